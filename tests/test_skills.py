"""Skills: the table of cases, the odd corners, and the skills that ship."""

from __future__ import annotations

import base64
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import agent

ROWS = json.loads((Path(__file__).parent / "cases" / "skills.json").read_text(encoding="utf-8"))
# Rows below `must` that we decided not to meet: id -> why.
NOT_MET: dict[str, str] = {
    "placeholder-basedir": "not built: the answer names the folder, and the model can put it in",
    "disable-model-invocation": "not built, for the budget: such a skill is listed like any other",
}
GOOD = "---\nname: code-review\ndescription: Reviews code.\n---\n\nREVIEW-BODY\n"


def write(path: Path, content: Any) -> None:
    """Make one file of a row: text, raw bytes, a long text, a link; None deletes it."""
    if content is None:
        path.unlink()
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, str):
        path.write_bytes(content.encode())
    elif "base64" in content:
        path.write_bytes(base64.b64decode(content["base64"]))
    elif "symlink_to" in content:
        path.symlink_to(content["symlink_to"])
    else:
        text = content["before"] + content["repeat"] * content["times"] + content["after"]
        path.write_bytes(text.encode())


def build(folder: Path, row: dict[str, Any]) -> Path:
    """The row's tree below `folder`; returns the skills folder."""
    skills_dir = folder / "skills"
    skills_dir.mkdir()
    for name, content in row.get("outside", {}).items():
        write(folder / name, content)
    for name, content in row["files"].items():
        write(skills_dir / name, content)
    return skills_dir


def skill(folder: Path, name: str, text: str = GOOD) -> Path:
    """Write skills/<name>/SKILL.md; returns its folder."""
    write(folder / "skills" / name / "SKILL.md", text)
    return folder / "skills" / name


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def answers_of(skills: agent.Skills, skills_dir: Path, row: dict[str, Any]) -> list[str]:
    """Every answer to the row's requests, with its changes made in between."""
    changes = dict(row.get("after_start", {}))
    when = changes.pop("_before_request", 1)
    answers = []
    for number, request in enumerate(as_list(row["request"]), 1):
        if number == when:
            for name, content in changes.items():
                write(skills_dir / name, content)
        answers.append(skills.load(request))
    return answers


def check_catalogue(skills: agent.Skills, expect: dict[str, Any]) -> None:
    assert skills.names() == expect["catalog"]
    catalogue = skills.catalogue()
    lines = catalogue.splitlines()
    assert [line[2:].split(":")[0] for line in lines] == expect["catalog"]
    assert len(catalogue) <= expect.get("catalog_max_chars", len(catalogue))
    assert len(lines) == expect.get("catalog_lines", len(lines))
    for name, description in expect.get("descriptions", {}).items():
        assert f"- {name}: {description}" in lines
    for text in as_list(expect.get("catalog_not_contains", [])):
        assert text not in catalogue


def check_problems(problems: list[str], expect: dict[str, Any]) -> None:
    told = "\n".join(problems)
    if "warn" in expect:
        assert bool(problems) == expect["warn"], told
    for text in as_list(expect.get("warn_contains", [])):
        assert text in told
    if "warn_line" in expect:
        assert f":{expect['warn_line']}: " in told


def check_answers(answers: list[str], expect: dict[str, Any]) -> None:
    everything = "\n".join(answers)
    failed = answers[-1].startswith("[error:")
    assert failed == (expect["load"] == "error"), answers[-1]
    for text in as_list(expect.get("body_contains", [])):
        assert text in everything
    for text in as_list(expect.get("body_not_contains", [])):
        assert text not in everything
    for text in as_list(expect.get("error_contains", [])):
        assert text in answers[-1]
    for text in as_list(expect.get("error_not_contains", [])):
        assert text not in answers[-1]
    assert len(answers[-1]) <= expect.get("body_max_chars", len(answers[-1]))
    if "body_count" in expect:
        assert everything.count(expect["body_count"]["text"]) == expect["body_count"]["count"]


def check_run(answer: str, command: str, folder: Path, expect: dict[str, Any]) -> None:
    named = re.search(r"^Skill directory: (.*)$", answer, re.M)
    assert named
    command = command.replace("{dir}", named[1])
    done = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert expect["output_contains"] in done.stdout


def row_id(row: dict[str, Any]) -> str:
    return f"{row['level']}-{row['id']}"


@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_skill_cases(row: dict[str, Any], tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if row["id"] in NOT_MET and row["level"] != "must":
        request.applymarker(pytest.mark.xfail(reason=NOT_MET[row["id"]], strict=True))
    skills_dir, expect = build(tmp_path, row), row["expect"]
    started = time.monotonic()
    skills = agent.Skills(skills_dir, tmp_path)
    check_catalogue(skills, expect)
    answers = answers_of(skills, skills_dir, row)
    check_answers(answers, expect)
    check_problems(skills.problems, expect)
    assert time.monotonic() - started < expect.get("max_seconds", 10)
    for name in expect.get("no_file_created", []):
        assert not list(tmp_path.rglob(name))
    if "run" in expect:
        check_run(answers[-1], row["then_run"], tmp_path, expect["run"])


def test_skill_files_are_read_as_utf8_under_any_locale(tmp_path: Path) -> None:
    """Every read and every write of text names its encoding: `-X warn_default_encoding`."""
    skill(tmp_path, "code-review", GOOD.replace("Reviews", "审查代码 ✅ —"))
    code = (
        "import sys, agent, pathlib\n"
        "skills = agent.Skills(pathlib.Path('skills'))\n"
        "text = skills.catalogue() + skills.load('code-review') + str(skills.problems)\n"
        "sys.stdout.buffer.write(text.encode())\n"
    )
    for locale in ("zh_CN.GBK", "en_US.CP1252", "C"):
        env = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(agent.ROOT),
            "LC_ALL": locale,
            "PYTHONUTF8": "0",
            "PYTHONCOERCECLOCALE": "0",
            "PYTHONIOENCODING": {"zh_CN.GBK": "gbk"}.get(locale, "cp1252"),
        }
        command = [sys.executable, "-X", "warn_default_encoding", "-W", "error", "-c", code]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True)
        assert done.returncode == 0, done.stderr.decode(errors="replace")
        assert "审查代码 ✅ —" in done.stdout.decode()
        assert "REVIEW-BODY" in done.stdout.decode()
        assert done.stdout.decode().endswith("[]")


SLOW_DISK = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=80, deadline=None, suppress_health_check=SLOW_DISK)
@given(
    st.one_of(
        st.binary(max_size=300),
        st.binary(max_size=80).map(lambda raw: b"---\nname: x\ndescription: " + raw + b"\n---\n"),
        st.text(max_size=80).map(lambda text: f"---\n{text}\n---\nB".encode("utf-8", "replace")),
    )
)
def test_no_bytes_of_a_skill_file_raise(tmp_path: Path, raw: bytes) -> None:
    folder = skill(tmp_path, "odd")
    (folder / "SKILL.md").write_bytes(raw)
    skills = agent.Skills(tmp_path / "skills", tmp_path)
    assert bool(skills.names()) or bool(skills.problems)
    text = skills.catalogue() + skills.load("odd") + "".join(skills.problems)
    text.encode()  # no lone surrogate
    assert len(skills.catalogue().splitlines()) == len(skills.names())
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", text)


NEAR_NAMES = ["code-review", "skills/", "..", "/", "\\", "SKILL.md", "secret", ".md", '{"skill":"']


@settings(max_examples=200, deadline=None, suppress_health_check=SLOW_DISK)
@given(st.one_of(st.text(), st.lists(st.sampled_from(NEAR_NAMES), max_size=6).map("".join)))
def test_no_request_raises_or_leaves_the_table(tmp_path: Path, request: str) -> None:
    if not (tmp_path / "skills").exists():
        folder = skill(tmp_path, "code-review")
        write(folder / "secret", "SECRET")
        write(folder / "secret.md", "SECRET")
        write(tmp_path / "secret.md", GOOD.replace("REVIEW-BODY", "SECRET"))
    skills = agent.Skills(tmp_path / "skills", tmp_path)
    answer = skills.load(request)
    assert answer.startswith("[error:") or "REVIEW-BODY" in answer
    assert "SECRET" not in answer
    answer.encode()


@pytest.mark.parametrize(
    "request_text",
    [
        '{"skill": "code-review"}',
        "{'name': 'code-review'}",
        'load_skill("code-review")',
        "skill: code-review",
        "skills/code-review/SKILL.md",
        "./skills/code-review",
        "code-review/",
        "/code-review",
        "“code-review”",
        "**code-review**",
        "code-review。",
        "CODE REVIEW\n",
        "code\u2011review",
        "code_review",
    ],
)
def test_c11_packaging_round_a_name_is_taken_off(tmp_path: Path, request_text: str) -> None:
    skill(tmp_path, "code-review")
    assert "REVIEW-BODY" in agent.Skills(tmp_path / "skills", tmp_path).load(request_text)


def test_c11_an_unknown_skill_is_answered_with_the_valid_names(tmp_path: Path) -> None:
    skill(tmp_path, "code-review")
    answer = agent.Skills(tmp_path / "skills", tmp_path).load("code-reveiw")
    assert answer.startswith("[error:")
    assert "the skills: code-review" in answer
    huge = agent.Skills(tmp_path / "skills", tmp_path).load("x" * 1_000_000)
    assert huge.startswith("[error:")
    assert len(huge) < 1_000


@pytest.mark.parametrize(
    ("head", "description", "line"),
    [
        ("description: Reviews code: finds bugs", "Reviews code: finds bugs", 3),
        ("description: [DEPRECATED] use other", "[DEPRECATED] use other", 3),
        ("description: {x} y", "{x} y", 3),
        ("description: @team reviews", "@team reviews", 3),
        ("description: %d of them", "%d of them", 3),
        ('description: "never closed', "never closed", 3),
        ("description：审查代码", "审查代码", 3),
        ("license: MIT\ndescription: >-\n  two\n  lines\nx: **", "two lines", None),
        ('description: "\\UFFFFFFFF"', "\\UFFFFFFFF", None),
    ],
)
def test_faulty_yaml_is_read_line_by_line(
    tmp_path: Path, head: str, description: str, line: int | None
) -> None:
    skill(tmp_path, "code-review", f"---\nname: code-review\n{head}\n---\nBODY\n")
    skills = agent.Skills(tmp_path / "skills", tmp_path)
    assert skills.catalogue() == f"- code-review: {description}"
    assert len(skills.problems) == 1
    assert skills.problems[0].startswith(f"skills/code-review/SKILL.md:{line or ''}")


def test_odd_things_in_the_skills_folder_raise_nothing(tmp_path: Path) -> None:
    good = skill(tmp_path, "code-review")
    skills_dir = tmp_path / "skills"
    (skills_dir / "dir" / "SKILL.md").mkdir(parents=True)
    (skills_dir / "loop").symlink_to("loop")
    (skills_dir / "self").symlink_to(".")
    (good / "again").symlink_to("..")
    os.mkfifo(skills_dir / "pipe.md")
    skill(tmp_path, "two\nlines \x1b[31m", "---\ndescription: D\n---\nB\n")
    write(good / "bad\n\x1b[31mname.txt", "")
    with (good / os.fsdecode(b"\xff\xfe")).open("w"):
        pass
    skills = agent.Skills(skills_dir, tmp_path)
    assert skills.names() == ["code-review", "two lines"]
    answer = skills.load("code-review")
    assert "REVIEW-BODY" in answer
    assert "\x1b" not in answer + "".join(skills.problems) + skills.catalogue()
    answer.encode()
    told = "\n".join(skills.problems)
    for name in ("skills/dir/", "skills/loop", "skills/pipe.md"):
        assert name in told


def test_missing_empty_and_wrong_skills_folders(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    for name in ("none", "file", "empty"):
        skills = agent.Skills(tmp_path / name, tmp_path)
        assert (skills.catalogue(), skills.names()) == ("", [])
        assert skills.load("x").startswith("[error:")


@pytest.mark.parametrize("field", ["description", "name"])
def test_c10_a_yaml_bomb_is_a_skill_without_that_field(tmp_path: Path, field: str) -> None:
    rows = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    names = "abcdefghijk"
    for one, next_one in itertools.pairwise(names):
        rows.append(f"{next_one}: &{next_one} [{', '.join([f'*{one}'] * 9)}]")
    other = "name: bomb" if field == "description" else "description: Bombs."
    text = "\n".join(["---", *rows, other, f"{field}: *k", "---", "body"])
    skill(tmp_path, "bomb", text)
    started = time.monotonic()
    skills = agent.Skills(tmp_path / "skills", tmp_path)
    assert time.monotonic() - started < 5
    assert skills.catalogue() == ("" if field == "description" else "- bomb: Bombs.")
    assert len(skills.problems) == 1 and len(skills.problems[0]) < 200


def test_long_file_and_huge_folder(tmp_path: Path) -> None:
    folder = skill(tmp_path, "big", "---\nname: big\ndescription: Big.\n---\n" + "字x" * 60_000)
    for number in range(3_000):
        (folder / f"f{number}").touch()
    started = time.monotonic()
    skills = agent.Skills(tmp_path / "skills", tmp_path)
    answer = skills.load("big")
    assert time.monotonic() - started < 5
    assert "characters" in skills.problems[0]
    assert answer.count("字x") == 25_000  # of 50,000 characters the rest is left out
    assert "SKILL.md" in answer
    assert "3001 files" in answer


def test_bodies_between_the_limits_come_whole_with_a_warning(tmp_path: Path) -> None:
    skill(tmp_path, "long", "---\nname: long\ndescription: L\n---\n" + "x" * 30_000 + "END")
    skills = agent.Skills(tmp_path / "skills", tmp_path)
    assert len(skills.problems) == 1
    assert "x" * 30_000 + "END" in skills.load("long")


def test_loaded_is_remembered_until_forgotten_or_edited(tmp_path: Path) -> None:
    folder = skill(tmp_path, "code-review")
    skills = agent.Skills(tmp_path / "skills", tmp_path)
    first = skills.load("code-review")
    assert skills.load("code-review").startswith("[already loaded")
    skills.loaded.clear()
    assert skills.load("code-review") == first
    (folder / "SKILL.md").write_bytes(GOOD.replace("REVIEW-BODY", "EDITED").encode())
    assert "EDITED" in skills.load("code-review")
    (folder / "SKILL.md").write_bytes(b"no frontmatter")
    assert skills.load("code-review").startswith("[error:")


def test_a_directory_outside_the_working_folder_can_be_used(tmp_path: Path) -> None:
    folder = skill(tmp_path / "home", "my tools", GOOD.replace("code-review", "my-tools"))
    write(folder / "scripts" / "hi.py", "print('HI')")
    work = tmp_path / "work"
    work.mkdir()
    answer = agent.Skills(tmp_path / "home" / "skills", work).load("my tools")
    found = re.search(r"^Skill directory: (.*)$", answer, re.M)
    assert found
    command = f"python3 {shlex.quote(found[1] + '/scripts/hi.py')}"
    done = subprocess.run(["bash", "-c", command], cwd=work, capture_output=True, text=True)
    assert done.stdout == "HI\n"
    assert "relative paths are relative to it" in answer


def test_the_catalogue_is_fixed_at_start_but_new_skills_load(tmp_path: Path) -> None:
    skill(tmp_path, "code-review")
    skills = agent.Skills(tmp_path / "skills", tmp_path)
    before = skills.catalogue()
    skill(tmp_path, "new", GOOD.replace("code-review", "new"))
    assert "REVIEW-BODY" in skills.load("new")
    assert skills.catalogue() == before


@pytest.mark.parametrize(
    "path", ["../code-review", "..\\code-review", "x/../code-review", "..", "~", "/etc/passwd"]
)
def test_c11_paths_are_refused_even_if_they_end_in_a_name(tmp_path: Path, path: str) -> None:
    skill(tmp_path, "code-review")
    answer = agent.Skills(tmp_path / "skills", tmp_path).load(path)
    assert answer.startswith("[error:")
    assert "code-review" in answer


@pytest.mark.parametrize(
    "head",
    ["description: *" + " " * 200_000 + "b", "description: " + "[" * 100_000, "a" * 240_000],
    ids=["blanks", "brackets", "one word"],
)
def test_long_odd_frontmatter_is_read_in_linear_time(tmp_path: Path, head: str) -> None:
    skill(tmp_path, "odd", f"---\n{head}\n---\nB\n")
    started = time.monotonic()
    agent.Skills(tmp_path / "skills", tmp_path).load("'" * 1_000_000)
    assert time.monotonic() - started < 8


SHIPPED = ["code-review", "debugging", "tech-writing"]


def test_shipped_skills_load_without_problems() -> None:
    skills = agent.Skills(agent.ROOT / "skills")
    assert skills.problems == []
    assert set(SHIPPED) <= set(skills.names())
    for name in SHIPPED:
        answer = skills.load(name)
        assert answer.startswith(f"Skill: {name}\n")
        assert len(answer) < 6_000
        text = (agent.ROOT / "skills" / name / "SKILL.md").read_text(encoding="utf-8")
        assert len(text) < 6_000
        assert 40 <= len(text.splitlines()) <= 80
        assert max(map(len, text.splitlines())) <= 1_200


def test_names_of_readmes_in_other_languages_are_no_skills(tmp_path: Path) -> None:
    for name in ("README_CN.md", "readme-zh.md", "LICENSE.md", "CHANGELOG.zh_CN.md"):
        (tmp_path / "skills").mkdir(exist_ok=True)
        (tmp_path / "skills" / name).write_text("# no skill")
    assert agent.Skills(tmp_path / "skills", tmp_path).problems == []


def test_a_path_in_a_wrapper_is_refused_and_json_is_read(tmp_path: Path) -> None:
    skill(tmp_path, "code-review")
    skills = agent.Skills(tmp_path / "skills", tmp_path)
    for request in ('{"skill": "../code-review"}', "skill: ../code-review"):
        assert skills.load(request).startswith("[error:")
    assert "REVIEW-BODY" in skills.load('{"input": "code-review"}')


def test_the_catalogue_of_many_skills_stays_small(tmp_path: Path) -> None:
    for number in range(100):
        text = f"---\nname: s-{number:03}\ndescription: {'word ' * 100}\n---\nbody\n"
        skill(tmp_path, f"s-{number:03}", text)
    skills = agent.Skills(tmp_path / "skills", tmp_path)
    assert len(skills.names()) == 100 and "s-099" in skills.catalogue()
    assert len(skills.catalogue()) < 10_000
