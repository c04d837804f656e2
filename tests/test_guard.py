"""The guard (B14): the tables, and what must hold for every command. Nothing here is ever run."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import agent

CASES = Path(__file__).parent / "cases"
NAMES = ("guard.json", "guard_more.json")
TABLES = {name: json.loads((CASES / name).read_text("utf-8")) for name in NAMES}
ROWS = [row for table in TABLES.values() for row in table]
ALLOWED = [row["command"] for row in ROWS if row["verdict"] == "allow"]
BLOCKED = [row for row in ROWS if row["verdict"] == "block" and row["kind"] != "obfuscated"]
FOLDER = "/home/u/w"


@pytest.fixture(autouse=True, scope="module")
def _home_of_the_tables():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", "/home/u")
        yield


def refused(command: str) -> bool:
    return agent.guard(command, FOLDER) is not None


@pytest.mark.parametrize("row", [r for r in ROWS if r["verdict"] == "allow"], ids=lambda r: r["id"])
def test_b14_no_false_alarm(row):
    assert agent.guard(row["command"], FOLDER) is None


@pytest.mark.parametrize("name", TABLES)
def test_b14_blocks_nearly_all(name):
    rows = [row for row in TABLES[name] if row["verdict"] == "block"]
    total = Counter(row["kind"] for row in rows)
    hits = Counter(row["kind"] for row in rows if refused(row["command"]))
    print("".join(f"\n{kind}: {hits[kind]}/{count}" for kind, count in total.items()))
    del total["obfuscated"]
    bar = {"guard.json": 0.93, "guard_more.json": 0.88}[name]
    assert sum(hits[kind] for kind in total) >= bar * sum(total.values())


def test_b14_two_allowed_commands_together_stay_allowed():
    # every row meets every 31st other one, in both orders over the whole loop
    pairs = [(a, b) for i, a in enumerate(ALLOWED) for b in ALLOWED[i % 31 :: 31]]
    wrong = [(a, b) for a, b in pairs if refused(f"{a}\n{b}")]
    assert not wrong, wrong[:3]


@pytest.mark.parametrize("prefix", ["ls -la\n", "echo 'it is fine' && ", "# a note, don't\n"])
def test_b14_a_harmless_line_hides_nothing(prefix):
    caught = [row["command"] for row in BLOCKED if refused(row["command"])]
    missed = [command for command in caught if not refused(prefix + command)]
    assert not missed


@given(st.text(max_size=200) | st.text(alphabet="rm -f/~$(){}'\"`;|&<>#\\\n*.EO", max_size=200))
@settings(max_examples=300, deadline=None)
def test_b14_never_raises(command):
    refusal = agent.guard(command, FOLDER)
    assert refusal is None or (refusal.reason and refusal.safer)


@pytest.mark.parametrize("command", [None, 7, b"ls"])
def test_b14_what_is_no_text_is_refused(command):
    assert agent.guard(command, FOLDER).safer == "write it simpler"


UNITS = ["<<A\n", "<<A", "sh <<A\n", "a;", "$(", '"', "`", "a|", "bash -c ", "rm /x ", "> f ", " "]


@pytest.mark.parametrize("unit", UNITS)
def test_b14_400_kb_are_quick(unit):
    start = time.perf_counter()
    agent.guard(unit * (400_000 // len(unit)), FOLDER)
    assert time.perf_counter() - start < 5  # about 0.05 s; the bar is 1 s on a quiet machine


def test_b14_too_long_is_refused_but_not_for_its_heredoc():
    assert agent.guard("echo " + "a " * 9000, FOLDER).safer == "write it simpler"
    assert agent.guard("cat > f <<'EOF'\n" + "a b\n" * 20_000 + "EOF\nls", FOLDER) is None
    assert refused("cat > f <<'EOF'\n" + "a b\n" * 20_000 + "EOF\nrm -rf ~")


def test_b14_a_heredoc_is_read_only_where_it_would_run():
    assert refused("bash <<'EOF'\nrm -rf ~\nEOF")
    assert refused("cat <<EOF | sh\nrm -rf ~\nEOF")
    assert refused("python3 - <<'PY'\nimport shutil\nshutil.rmtree('/home')\nPY\nls")
    assert refused("python3 <<EOF && rm -rf ~\nprint(1)\nEOF")
    assert not refused("cat > clean.sh <<'EOF'\nrm -rf ~\nEOF\nls")
    assert refused("echo $((1<<A))\nrm -rf ~")  # no heredoc: nothing ends it


def test_b14_a_refusal_names_reason_and_safer_way():
    for row in BLOCKED:
        refusal = agent.guard(row["command"], FOLDER)
        if refusal:
            assert refusal.rule
            assert refusal.reason != refusal.safer
            assert len(refusal.reason) > 10 < len(refusal.safer)


def test_b14_home_and_folder_are_its_only_context(monkeypatch):
    assert agent.guard("rm -rf /srv/site", "/srv/site/app") is not None
    assert agent.guard("rm -rf /srv/site/app", Path("/srv/site/app")) is not None
    assert agent.guard("rm -rf /srv/site/app/build", "/srv/site/app") is None
    assert agent.guard("cd build && rm -rf *", FOLDER) is None
    assert agent.guard("cd ~/.. && rm -rf *", FOLDER) is not None
    monkeypatch.setenv("HOME", "/data/li")
    assert agent.guard("rm -rf /data/li", FOLDER) is not None


def test_b14_a_rule_has_only_what_a_rule_can_have():
    """An unquoted comma ends a text of YAML's, and its rest becomes a key."""
    keys = {"rule", "program", "arguments", "path", "unless", "inside", "script", "reason", "safer"}
    rules = agent.read_table("guard.yaml")["rules"]
    assert all(rule.keys() <= keys and all(rule.values()) for rule in rules)
    assert agent.guard("rm -rf .", FOLDER).reason.endswith("home or working folder")
