"""The parser: tables of replies with their verdict, and what holds for every reply."""

from __future__ import annotations

import contextlib
import json
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import agent

CASES = Path(__file__).parent / "cases"
KINDS = {"Action": "action", "Final": "final", "Invalid": "thought"}
LABELS = [
    "Thought:",
    "Action:",
    "Action Input:",
    "Final Answer:",
    "Observation:",
    "**Action:**",
    "## Final Answer:",
    "**Action Input**:",
    "Action 1:",
    "Action 1 Input:",
    "ActionInput:",
    "思考：",
    "行动：",
    "行动输入：",
    "最终答案：",
    "观察：",
    "工具:",
    "观察结果：",
    "Answer:",
    "Observ",
    "> Action:",
    "- Action:",
]
PIECES = [
    *LABELS,
    "\n",
    "\n",
    "\n",
    " ",
    "\t",
    "\r\n",
    "\r",
    "\u00a0",
    "\u3000",
    "\ufeff",
    "run_command",
    "load_skill",
    "ls -la",
    "```",
    "```bash\n",
    "~~~",
    "````",
    "`",
    "<<EOF",
    "<<-'EOF'",
    '<<"A"',
    "EOF",
    "A",
    "<think>",
    "</think>",
    "<Thinking>",
    "</thinking>",
    "<|im_end|>",
    "**",
    "#",
    "None",
    "N/A",
    "无",
    "null",
    '{"command": "ls"}',
    '{"',
    "{'",
    "}",
    "(",
    ")",
    "（",
    "[",
    "]",
    "'",
    '"',
    "Finish",
    "Input: x",
    "tool | tool",
    "|",
    "...",
    "你好",
    "\x00",
    "\x1b[31m",
    "\ud800",
    "1.",
]
ACTION = "Thought: look\nAction: run_command\nAction Input: ls -la"
INVENTIONS = [
    "\nObservation: a.txt",
    "\nObservation: a\nFinal Answer: one file",
    "\nFinal Answer: done",
    "\nThought: next\nAction: run_command\nAction Input: rm -r build",
    "\n观察：a.txt\n最终答案：好",
    "\n\n**Observation:** a\n\n**Final Answer:** b",
    "\n## Final Answer: b",
    "\nAction Input: pwd",
    "\nAction: run_command\nAction Input: pwd",
    "\n最终回答：一个文件",
    "\nObservation 1: a",
    "\nThought: I am sure.\nFinal Answer: yes\n```\nAction: x\n```",
]


def load(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((CASES / name).read_text(encoding="utf-8"))
    return rows


ROWS = load("parse.json") + load("parse_more.json")


# Rows of the rules 12 and 13 (plus) that were left out to keep the file small.
NOT_MET = {
    "label-bold-whole-final": "rule 13: the stars that close a bold line stay in the answer",
    "bold-whole-final-line": "rule 13: the stars that close a bold line stay in the answer",
    "zh-finish-keyword": "rule 12: finish(...) as a call is an unknown tool",
    "finish-brackets": "rule 12: Finish[...] as a call is an unknown tool",
}


def marked(rows: list[dict[str, Any]]) -> list[Any]:
    """The rows as parameters."""
    xfail = {name: pytest.mark.xfail(reason=why, strict=True) for name, why in NOT_MET.items()}
    return [
        pytest.param(row, id=row["id"], marks=[xfail[row["id"]]] if row["id"] in xfail else [])
        for row in rows
    ]


def reply_of(row: dict[str, Any]) -> str:
    parts = row.get("generator")
    if not parts:
        return str(row["input"])
    parts = parts if isinstance(parts, list) else [parts]
    return "".join(part["repeat"] * part["times"] for part in parts)


def kind_of(parsed: object) -> str:
    return KINDS[type(parsed).__name__]


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Fails, and stops what hangs, after so much time of this process alone."""

    def stop(*_: object) -> None:
        pytest.fail(f"still busy after {seconds} s")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def check_row(expect: dict[str, Any], parsed: Any) -> None:
    assert kind_of(parsed) == expect["kind"], parsed
    fields = {"action": "tool", "input": "input", "content": "answer"}
    for key, name in fields.items():
        if key in expect:
            assert getattr(parsed, name) == expect[key]
    if "thought_contains" in expect:
        text = parsed.text if expect["kind"] == "thought" else parsed.thought
        assert expect["thought_contains"] in text
    if "input_length" in expect:
        assert len(parsed.input) == expect["input_length"]
    if "content_length" in expect:
        assert len(parsed.answer) == expect["content_length"]


def check_any(reply: str) -> None:
    """What holds for whatever a model says."""
    parsed = agent.parse_reply(reply)
    assert kind_of(parsed) in ("action", "final", "thought")
    assert parsed.text == reply or parsed.text in reply.replace("\r\n", "\n")
    if isinstance(parsed, agent.Action):
        assert parsed.tool and parsed.input.strip()
        assert isinstance(parsed.ignored, bool)
    elif isinstance(parsed, agent.Final):
        assert parsed.answer.strip()
    else:
        assert parsed.reason


@pytest.mark.parametrize("row", marked(ROWS))
def test_c03_table(row: dict[str, Any]) -> None:
    with at_most(max(row.get("max_seconds", 0), 5)):
        check_row(row["expect"], agent.parse_reply(reply_of(row)))


@pytest.mark.parametrize("row", marked([row for row in ROWS if "\r" not in reply_of(row)]))
def test_c03_table_with_crlf(row: dict[str, Any]) -> None:
    check_row(row["expect"], agent.parse_reply(reply_of(row).replace("\n", "\r\n")))


def test_c03_table_is_deterministic_and_ids_are_unique() -> None:
    assert len({row["id"] for row in ROWS}) == len(ROWS) > 200
    for row in ROWS:
        assert agent.parse_reply(reply_of(row)) == agent.parse_reply(reply_of(row))


@settings(max_examples=150, deadline=None)
@given(st.text())
def test_c03_any_text_gets_a_verdict(reply: str) -> None:
    check_any(reply)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=30))
def test_c03_any_mix_of_labels_gets_a_verdict(pieces: list[str]) -> None:
    check_any("".join(pieces))


def test_c03_ten_thousand_random_replies() -> None:
    source = random.Random(20)
    seen = set()
    for _ in range(10_000):
        reply = "".join(source.choices(PIECES, k=source.randrange(25)))
        check_any(reply)
        seen.add(kind_of(agent.parse_reply(reply)))
    assert seen == {"action", "final", "thought"}


@pytest.mark.parametrize(
    "unit",
    [
        " ",
        "\n",
        "\t",
        "a",
        "`",
        "```\n",
        "#",
        "**",
        "<<A\n",
        "<think>",
        "</think>\n",
        "<|x|>",
        '{"',
        "(",
        "Action Input: x\n",
        "Thought:\n",
        "Final Answer:\n",
        "Observ\n",
        "action ",
        "\r\n",
        "Action: a(b\n",
        "```\n~~~\n",
    ],
)
def test_c03_one_megabyte_takes_no_time_to_speak_of(unit: str) -> None:
    body = unit * (1_000_000 // len(unit))
    for before in ("", f"{ACTION}\n"):
        with at_most(3):
            agent.parse_reply(before + body)


@pytest.mark.parametrize("fence", ["~", "`", "`~"])
@pytest.mark.parametrize("before", ["", "Action: ", "Final Answer: ", f"{ACTION}\n"])
def test_c03_a_long_fence_that_is_none_takes_no_time_either(fence: str, before: str) -> None:
    with at_most(3):
        agent.parse_reply(before + fence * 500_000 + "\nx`")


@pytest.mark.parametrize("unit", ["\n", " ", "*\n", "\n\n> "])
def test_c03_nor_does_taking_the_thought_away(unit: str) -> None:
    with at_most(3):
        agent.SEEK["thoughts"].sub("", "x\n" + unit * 200_000 + "Action: a", count=1)


@pytest.mark.parametrize("invention", INVENTIONS)
@pytest.mark.parametrize(
    "command",
    [
        "ls -la",
        "cd a\nls",
        "cat > a <<'EOF'\nFinal Answer: 1\nEOF",
        "echo 'Observation: x'",
        "grep -n '^Action:' a.md",
    ],
)
def test_c01_c02_what_follows_an_action_changes_nothing(command: str, invention: str) -> None:
    reply = f"Thought: look\nAction: run_command\nAction Input: {command}"
    parsed = agent.parse_reply(reply + invention)
    assert isinstance(parsed, agent.Action)
    assert (parsed.tool, parsed.input, parsed.thought) == ("run_command", command, "look")
    assert (parsed.text, parsed.ignored) == (reply, True)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(INVENTIONS), st.lists(st.sampled_from(PIECES), max_size=12))
def test_c01_c02_nor_does_anything_after_an_invention(invention: str, pieces: list[str]) -> None:
    # Text before a </think> that never began would rightly be taken for reasoning.
    rest = "".join(piece for piece in pieces if "think" not in piece.lower())
    parsed = agent.parse_reply(f"{ACTION}{invention}\n{rest}")
    assert isinstance(parsed, agent.Action)
    assert (parsed.tool, parsed.input, parsed.ignored) == ("run_command", "ls -la", True)


@pytest.mark.parametrize("tail", ["", "\n", "\n\n  \n", "\r\n"])
def test_c02_nothing_is_reported_ignored_where_nothing_was(tail: str) -> None:
    parsed = agent.parse_reply(ACTION + tail)
    assert isinstance(parsed, agent.Action) and parsed.ignored is False


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(
        ["Final Answer: ", "最终答案：", "**Final Answer:** ", "Thought: x\nFinal Answer: "]
    ),
    st.lists(st.sampled_from(PIECES), max_size=20),
)
def test_c01_what_starts_with_an_answer_never_acts(label: str, pieces: list[str]) -> None:
    rest = "".join(piece for piece in pieces if "think" not in piece.lower())
    parsed = agent.parse_reply(f"{label}42 {rest}")
    assert isinstance(parsed, agent.Final)
    assert parsed.answer.startswith("42")


LINES = st.lists(
    st.sampled_from(
        [
            "Final Answer: no",
            "Action: x",
            "Observation: y",
            "Observ",
            "思考：z",
            "```",
            "```bash",
            "~~~",
            "",
            "  two  ",
            "\ttab",
            "a\\nb $HOME \\",
            "`date` $(id)",
            "'q' \"q\"",
            "EOFX",
            " EOF",
            "<|im_end|>",
            '{"a": 1}',
            "**bold**",
            "# head",
            "&amp; <b>",
            "\u2028x\u00a0",
            "\x0c",
            "你好",
            "<<B",
            "<think>",
        ]
    ),
    max_size=12,
)


@settings(max_examples=120, deadline=None)
@given(
    LINES,
    st.sampled_from(["<<'EOF'", '<<"EOF"', "<<EOF", "<< 'EOF'", "<<-'EOF'", "<<\\EOF"]),
    st.sampled_from(["", "\necho done", "\nObservation: ok\nFinal Answer: ok", "\nObserv"]),
)
def test_c05_a_heredoc_is_kept_byte_for_byte(lines: list[str], mark: str, rest: str) -> None:
    script = "\n".join([f"cat > a.txt {mark}", *lines, "EOF"])
    parsed = agent.parse_reply(f"Thought: write\nAction: run_command\nAction Input: {script}{rest}")
    assert isinstance(parsed, agent.Action)
    assert parsed.input == script + (rest if "done" in rest else "")


@settings(max_examples=120, deadline=None)
@given(
    LINES,
    st.sampled_from(["```", "```bash", "~~~sh", "````"]),
    st.sampled_from(["", "\nThat is all.", "\nObservation: ok\nFinal Answer: ok"]),
)
def test_c05_a_fenced_script_is_kept_byte_for_byte(
    lines: list[str], opening: str, rest: str
) -> None:
    inner = [line for line in lines if not line.startswith(("```", "~~~"))]
    script = "\n".join(["set -e", *inner, "echo done"])
    closing = opening.rstrip("bash")
    reply = f"Action: run_command\nAction Input:\n{opening}\n{script}\n{closing}{rest}"
    parsed = agent.parse_reply(reply)
    assert isinstance(parsed, agent.Action)
    assert parsed.input == script
