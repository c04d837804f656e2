"""C04: what the prompts and skills show as an example is what the parser makes of it."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

import agent

ROOT = Path(agent.__file__).resolve().parent
CASES = Path(__file__).parent / "cases"
TABLE = yaml.safe_load((ROOT / "prompts" / "nudges.yaml").read_text("utf-8"))
NUDGES: dict[str, str] = TABLE | TABLE["text"]
DEMO: dict[str, Any] = yaml.safe_load((ROOT / "prompts" / "demo.yaml").read_text("utf-8"))
SKILLS = sorted((ROOT / "skills").rglob("*.md"))
# A reply for each reason that there is no directive.
UNUSABLE = {
    "empty": "",
    "no label": "I think so.",
    "no input": "Action: run_command",
    "bad input": "Action: run_command\nAction Input:\n```bash\nls",
    "empty answer": "Final Answer:",
}


def system_message(folder: Path) -> str:
    """The prompt as a model gets it, with everything filled in."""
    model = agent.ScriptedModel([""])
    agent.Agent(agent.Settings(sandbox="off"), model, folder).ask("hi")
    return model.seen[0][0]["content"]


def text_examples(text: str) -> list[str]:
    """The replies in a text: from a Thought to the next one, an Observation or a blank line."""
    found = []
    for paragraph in re.split(r"\n\s*\n", textwrap.dedent(text)):
        parts = re.split(r"^(?=Thought:|Observation:|Question:)", paragraph, flags=re.M)
        found += [part.strip() for part in parts if part.startswith("Thought:")]
    return found


def check_text_example(example: str) -> str:
    """Compares the parser's reading with a naive one. The tool's name, or "" for an answer."""
    parsed = agent.parse_reply(example)
    thought = example.split("\n")[0].removeprefix("Thought:").strip()
    if "\nAction: " in example:
        action, _, given = example.split("\nAction: ")[1].partition("\nAction Input: ")
        assert isinstance(parsed, agent.Action), example
        assert parsed.tool == action.split()[0].strip("<>")  # the form itself has <tool>
        assert (parsed.input, parsed.thought, parsed.ignored) == (given.strip(), thought, False)
        return parsed.tool
    assert isinstance(parsed, agent.Final), example
    assert parsed.answer == example.split("Final Answer: ")[1].strip()
    assert parsed.thought == thought
    return ""


def test_c04_the_text_form_shows_both_kinds_and_parses(tmp_path: Path) -> None:
    examples = text_examples(system_message(tmp_path))
    kinds = [check_text_example(example) for example in examples]
    assert "run_command" in kinds and "" in kinds


def test_c04_no_other_prompt_or_skill_shows_a_reply_that_fails() -> None:
    paths = [*(ROOT / "prompts").glob("*"), *SKILLS]
    assert len(paths) > 8
    for path in paths:
        if path.name != "demo.yaml" and not path.name.startswith("protocol-"):
            for example in text_examples(path.read_text("utf-8")):
                check_text_example(example)


def demo_scripts() -> list[tuple[str, list[str]]]:
    groups = [(lang, DEMO[part][lang]) for part in ("questions", "others") for lang in ("en", "zh")]
    return [(f"{lang}-{name}", told) for lang, group in groups for name, told in group.items()]


@pytest.mark.parametrize("output", ["", "u", "a.py\nb.py", "Final Answer: 1\nAction: x"])
@pytest.mark.parametrize(("name", "replies"), demo_scripts(), ids=lambda value: str(value)[:20])
def test_c04_the_demo_replies_parse(name: str, replies: list[str], output: str) -> None:
    skills = {path.parent.name for path in SKILLS}
    for reply in replies[:-1]:
        assert check_text_example(reply) in ("run_command", "load_skill")
        action = agent.parse_reply(reply)
        assert isinstance(action, agent.Action)
        assert action.tool != "load_skill" or action.input in skills
    answer = replies[-1].replace("{output}", output)
    parsed = agent.parse_reply(answer)
    assert isinstance(parsed, agent.Final)
    assert parsed.answer == answer.split("Final Answer: ", 1)[1].strip()


@pytest.mark.parametrize("path", SKILLS, ids=lambda path: path.parent.name)
def test_c04_what_a_skill_shows_survives_as_input_and_as_answer(path: Path) -> None:
    text = path.read_text("utf-8")
    blocks = re.findall(r"(?:^(?: {4}.*)?\n)*^ {4}.*\n", text, re.M)
    blocks = [textwrap.dedent(block).strip() for block in blocks]
    inline = [code for code in re.findall(r"`([^`\n]+ [^`\n]+)`", text) if "…" not in code]
    if not blocks + inline:  # a skill that a reader has added
        pytest.skip("this skill shows no command")
    for sample in blocks + inline:
        action = agent.parse_reply(f"Thought: x\nAction: run_command\nAction Input: {sample}")
        assert isinstance(action, agent.Action) and action.input == sample
        answer = agent.parse_reply(f"Thought: x\nFinal Answer: {sample}")
        assert isinstance(answer, agent.Final) and answer.answer == sample


def test_c04_each_reason_of_the_parser_has_its_nudge() -> None:
    rows = [
        row
        for name in ("parse.json", "parse_more.json")
        for row in json.loads((CASES / name).read_text("utf-8"))
    ]
    replies = [row["input"] or "" for row in rows] + [
        *UNUSABLE.values(),
    ]
    parsed = [agent.parse_reply(reply) for reply in replies]
    reasons = {found.reason for found in parsed if isinstance(found, agent.Invalid)} | {"cut"}
    assert len(reasons) > 4
    assert {reason for reason in reasons if not NUDGES.get(reason, "").strip()} == set()


@pytest.mark.parametrize("reason", UNUSABLE)
def test_c04_a_nudge_says_what_was_wrong_and_repeats_the_form(reason: str, tmp_path: Path) -> None:
    model = agent.ScriptedModel([UNUSABLE[reason], "Final Answer: 1"])
    result = agent.Agent(agent.Settings(sandbox="off"), model, tmp_path).ask("hi")
    assert (result.status, result.answer) == ("final", "1")
    nudge = model.seen[1][-1]["content"]
    [note] = re.findall(r"^\[.*\]$", NUDGES[reason], re.M)
    assert note.replace("{tool}", "run_command") in nudge
    assert re.search(r"^Action Input: .*^Final Answer: ", nudge, re.M | re.S)
    assert "run_command" in nudge and "{" not in nudge
