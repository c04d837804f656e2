"""F06: what README.md says of commands, flags, exit codes and sizes is so."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from loopback import Server, error, reply
from program import Done, Program
from test_size import code_lines, source

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
NOT_CLONED = (".*", "__pycache__", "tests")  # hidden files would be the user's own
FLAG = re.compile(r"(?<![\w-])--?[a-z][a-z-]*")
NUMBER = r"(\d{1,3}(?:,\d{3})+|\d+)"
# `uv run` without its network: the tests' own Python has all that is needed.
UV = """#!/bin/sh
[ "$1" = run ] || exit 0
shift
case "$1" in
*.py) exec python "$@" ;;
*) exec "$@" ;;
esac
"""

pytestmark = [
    pytest.mark.skipif(not README.is_file(), reason="there is no README.md"),
    pytest.mark.skipif(os.name != "posix", reason="commands need a POSIX shell"),
]


@cache
def readme() -> str:
    return README.read_text(encoding="utf-8")


def fences(info: str = r"[^\n]*") -> list[str]:
    """The bodies of the code blocks whose first line matches."""
    return re.findall(rf"^```{info}\n(.*?)^```[ \t]*$", readme(), re.M | re.S) if readme() else []


def runnable() -> list[str]:
    """Not the one that runs these tests."""
    if not README.is_file():
        return []
    return [block for block in fences(r"bash runnable[ \t]*") if "pytest" not in block]


def prose() -> str:
    """All but the code blocks."""
    return re.sub(r"^```.*?^```[ \t]*$", "", readme(), flags=re.M | re.S)


def number(text: str) -> int:
    return int(text.replace(",", ""))


def help_flags(call: Callable[..., Done], capsys: pytest.CaptureFixture[str]) -> set[str]:
    """The flags of --help but for itself."""
    done = call("--help")
    assert done.code == 0
    heads = re.findall(r"^ {2,4}(-.*?)(?: {2}|$)", done.out, re.M)
    return {flag for head in heads for flag in FLAG.findall(head)} - {"-h", "--help"}


@pytest.fixture
def clone(tmp_path: Path, program: Program) -> tuple[Path, dict[str, str]]:
    """What somebody has who has just got the project, and an environment with its tools."""
    folder, tools = tmp_path / "clone", tmp_path / "tools"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*NOT_CLONED))
    if (ROOT / ".env.example").is_file():
        shutil.copy(ROOT / ".env.example", folder)
    tools.mkdir()
    for name in ("python", "python3"):
        script = f'#!/bin/sh\nexec "{sys.executable}" "$@"\n'
        (tools / name).write_text(script)
    (tools / "uv").write_text(UV)
    for tool in tools.iterdir():
        tool.chmod(0o755)
    return folder, program.env | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}


def run_block(clone: tuple[Path, dict[str, str]], block: str) -> subprocess.CompletedProcess[str]:
    folder, env = clone
    return subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", block],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=folder,
        env=env,
        timeout=60,
    )


@pytest.mark.parametrize("number_", range(len(runnable())))
def test_f06_a_block_marked_runnable_runs(clone: tuple[Path, dict[str, str]], number_: int) -> None:
    done = run_block(clone, runnable()[number_])
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_f01_the_first_command_shows_a_whole_trace(clone: tuple[Path, dict[str, str]]) -> None:
    assert runnable()
    start = time.monotonic()
    done = run_block(clone, runnable()[0])
    assert time.monotonic() - start < 5
    assert done.returncode == 0, done.stderr
    for block in ("sent", "reply", "parsed", "observation"):
        assert f"step 1: {block}" in done.stderr
    assert done.stdout.strip()


def test_f06_flags_in_help_are_those_of_the_readme(
    call: Callable[..., Done], capsys: pytest.CaptureFixture[str]
) -> None:
    spans = re.findall(r"(?<!`)`(-[^`\n]+)`(?!`)", prose())
    told = {flag for span in spans for flag in FLAG.findall(span)} - {"-h", "--help"}
    assert told == help_flags(call, capsys)


def test_f06_flags_in_examples_exist(
    call: Callable[..., Done], capsys: pytest.CaptureFixture[str]
) -> None:
    spans = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose())
    lines = [line for text in [*fences(), *spans] for line in text.splitlines()]
    calls = [line.split("agent.py", 1)[1] for line in lines if re.search(r"agent\.py\s+-", line)]
    assert calls
    used = {flag for line in calls for flag in FLAG.findall(re.sub(r"#.*|[|>].*", "", line))}
    assert used - {"-h", "--help"} <= help_flags(call, capsys)


def test_f06_the_table_of_exit_codes_is_so(call: Callable[..., Done]) -> None:
    rows = re.findall(r"^\|\s*`?(\d+)`?\s*\|(.*)\|\s*$", prose(), re.M)
    told = {int(code): meaning.lower() for code, meaning in rows}
    with Server([error(401), reply(""), reply("")]) as server:
        env = {"OPENAI_BASE_URL": server.url, "MODEL": "m"}
        found = {
            "answer": call("-q", "whoami").code,
            "error": call("-q", "q", **env).code,
            "usage": call("--no-such-flag").code,
            "without": call("-q", "q", **env).code,
        }
    found["interrupt"] = 130  # test_cli.py looks at that
    assert sorted(told) == sorted(found.values())
    for word, code in found.items():
        assert word in told[code], f"{code}: {told[code]}"


def test_f06_sizes_claimed_are_sizes_measured() -> None:
    lines = [line for line in readme().splitlines() if "agent.py" in line]
    code = [number(n) for line in lines for n in re.findall(rf"{NUMBER} code lines", line)]
    total = [number(n) for line in lines for n in re.findall(rf"{NUMBER} lines", line)]
    assert set(code) == {len(code_lines(source()))}
    assert set(total) == {len(source().splitlines())}
