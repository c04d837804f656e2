"""The conversation, on a real terminal: A08, D01, D05, D07-D09, the commands."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest
from loopback import Server, delta, error, hang, reply, sse
from program import COLOURS, ESCAPE, Program, Terminal, wait_for

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs a POSIX terminal")

PROMPT = "you> "
CTRL_C, CTRL_D, BACKSPACE = "\x03", "\x04", "\x7f"
COMMANDS = ["help", "skills", "prompt", "messages", "status", "new", "quit"]
WHO = "Who am I on this machine?"
RUN = "Thought: I look.\nAction: run_command\nAction Input: {}"


def at(server: Server, **more: str) -> dict[str, str]:
    """The variables that choose this server."""
    return {"OPENAI_BASE_URL": server.url, "MODEL": "m", **more}


def say(terminal: Terminal, line: str, timeout: float = 15.0) -> str:
    """Types a line at the prompt; what is printed until the next prompt, without colours."""
    terminal.send(f"{line}\n")
    terminal.until("\n", timeout)  # the echo of the line
    return COLOURS.sub("", terminal.until(PROMPT, timeout)).removesuffix(PROMPT)


def asked(terminal: Terminal) -> list[str]:
    """The questions of the conversation, by /messages."""
    parts = re.split(r"^\[\d+\] (\w+)\n", say(terminal, "/messages"), flags=re.M)[1:]
    said = zip(parts[::2], parts[1::2], strict=True)
    told = [text.strip() for role, text in said if role == "user"]
    return [text for text in told if not text.startswith("Observation:")]


def interrupt(terminal: Terminal) -> None:
    """Presses Ctrl-C, and looks whether the prompt is back at once."""
    time.sleep(0.2)  # nobody is quick enough to hit the moment between two system calls
    terminal.send(CTRL_C)
    terminal.until(PROMPT, 3)


@pytest.fixture(params=["readline", "plain"])
def editor(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """Variables under which `import readline` works, or fails as in a Python built without it."""
    if request.param == "readline":
        pytest.importorskip("readline")
        return {}
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import sys\nsys.modules['readline'] = None\n"
    )
    return {"PYTHONPATH": str(tmp_path / "site")}


def test_d01_chinese_can_be_typed_and_erased(program: Program, editor: dict[str, str]) -> None:
    with program.terminal("--trace", "off", **editor) as terminal:
        terminal.until(PROMPT)
        say(terminal, "你好" + BACKSPACE)
        say(terminal, "x" + BACKSPACE * 3 + "早")
        if not editor:  # the arrows: the last one again, and to the left of it something new
            say(terminal, "\x1b[A\x1b[D很")
        assert asked(terminal) == ["你", "早"] + ["很早"] * (not editor)


def test_f02_messages_are_shown_as_they_are_sent(program: Program) -> None:
    hide = ("--no-observations", "--no-thoughts", "--sandbox", "off", "--trace", "off")
    secret = "Thought: hmhm\nAction: run_command\nAction Input: echo SEC''RET"
    with (
        Server([reply(secret), reply("Final Answer: done")]) as server,
        program.terminal(*hide, **at(server)) as terminal,
    ):
        terminal.until(PROMPT)
        say(terminal, "what?")
        shown = say(terminal, "/messages")
    assert "Observation: [hidden]" in shown and "SECRET" not in shown and "hmhm" not in shown


def test_e08_a_script_writes_no_summary(program: Program) -> None:
    with program.terminal("--lang", "en", "--context-window", "2000") as terminal:
        terminal.until(PROMPT)
        who = "Who am I on this machine?"
        for question in (who, "tell me something", who):
            assert "list index" not in say(terminal, question)
        assert "a script can write no summary" in say(terminal, "/compact")
        assert "logged in as" in say(terminal, who)


def test_d07_ctrl_c_at_the_prompt(program: Program, editor: dict[str, str]) -> None:
    with program.terminal("--trace", "off", **editor) as terminal:
        terminal.until(PROMPT)
        interrupt(terminal)
        terminal.send("half a question")
        interrupt(terminal)
        terminal.send('"""\n')
        terminal.until("...> ")
        interrupt(terminal)
        assert "logged in" in say(terminal, "whoami")
        assert asked(terminal) == ["whoami"]
        terminal.send(CTRL_D)
        assert terminal.finish() == 0
    assert "Traceback" not in terminal.screen


def test_d07_ctrl_c_in_a_turn_brings_the_prompt_back(program: Program) -> None:
    slow = sse(delta(content="Thought: it flows\n"), *[delta(content="and ")] * 99)
    slow.pause = 0.1
    command = reply(RUN.format("touch started; sleep 60"))
    answers = [hang(60), slow, command, reply("Final Answer: still here")]
    started = program.folder / "started"
    with Server(answers) as server, program.terminal(**at(server)) as terminal:
        terminal.until(PROMPT)
        terminal.send("one\n")
        wait_for(lambda: len(server.requests) == 1)
        interrupt(terminal)
        terminal.send("two\n")
        terminal.until("it flows")
        interrupt(terminal)
        wait_for(server.hung_up.is_set)  # the server is not left writing for nobody
        terminal.send("three\n")
        wait_for(started.exists)
        interrupt(terminal)
        assert "still here" in say(terminal, "four")
    assert "Traceback" not in terminal.screen
    *before, last = server.requests[-1].json["messages"]
    assert last["content"] == "four"
    roles = [message["role"] for message in before[1:]]
    assert roles == ["user", "assistant"] * (len(before) // 2)
    told = [message["content"] for message in before if message["role"] == "user"]
    assert told[:3] == ["one", "two", "three"]
    assert "[interrupted by the user]" in told[3]
    assert before[2]["content"] == "[turn ended: interrupted]"


@pytest.mark.parametrize("typed", [CTRL_D, "/quit\n", ":quit\n"])
def test_d07_leaving_is_no_error(program: Program, typed: str) -> None:
    with program.terminal() as terminal:
        terminal.until(PROMPT)
        terminal.send(typed)
        assert terminal.finish() == 0
    assert "Traceback" not in terminal.screen


def test_d08_blank_lines_and_commands(program: Program) -> None:
    with program.terminal("--trace", "off", "--lang", "en", NO_COLOR="1") as terminal:
        terminal.until(PROMPT)
        for blank in ("", "  \t"):
            assert say(terminal, blank).strip() == ""
        listed = say(terminal, "/help")
        for name in COMMANDS:
            assert f"/{name}" in listed
        assert say(terminal, ":help")[-len(listed) :] == listed
        for unknown in ("/nope", ":helpme now"):
            told = say(terminal, unknown)
            assert f"no command is called /{unknown[1:].split()[0]}" in told
            assert told[-len(listed) :] == listed
        assert "code-review" in say(terminal, ":skills")
        assert "code-review" in say(terminal, "/prompt")
        assert WHO not in say(terminal, "/messages")
        say(terminal, WHO)
        messages = say(terminal, "/messages")
        assert WHO in messages
        assert "Final Answer: You are" in messages
        status = say(terminal, "/status")
        assert "scripted" in status
        assert re.search(r"\b5 messages", status)
        assert asked(terminal) == [WHO]
        terminal.send("/quit\n")
        assert terminal.finish() == 0


def test_d08_the_status_tells_model_folder_and_size(program: Program) -> None:
    with program.terminal("--trace", "off", NO_COLOR="1") as terminal:
        terminal.until(PROMPT)
        status = say(terminal, "/status")
    assert "scripted model" in status
    assert re.search(r"\b1 messages?\b", status)
    assert str(program.folder.resolve()) in status


def test_d08_a_lone_slash_is_no_question(program: Program) -> None:
    with program.terminal("--trace", "off") as terminal:
        terminal.until(PROMPT)
        assert "/help" in say(terminal, "/")
        assert "/help" in say(terminal, ":")


def test_the_conversation_is_remembered_until_new(program: Program) -> None:
    with (
        Server([reply("Final Answer: 4")], repeat=True) as server,
        program.terminal(**at(server)) as terminal,
    ):
        terminal.until(PROMPT)
        for line in ("first", "second", "/new", "third"):
            say(terminal, line)
    sent = [request.json["messages"] for request in server.requests]
    told = [[message["content"] for message in messages[1:]] for messages in sent]
    assert told == [["first"], ["first", "Final Answer: 4", "second"], ["third"]]
    assert sent[0][0] == sent[1][0] == sent[2][0]


def test_d09_a_block_or_a_paste_is_one_question(program: Program, editor: dict[str, str]) -> None:
    with program.terminal("--trace", "off", **editor) as terminal:
        terminal.until(PROMPT)
        terminal.send('"""\n')
        terminal.until("...> ")
        for line in ("typed", "", "  /new is text"):
            terminal.send(f"{line}\n")
            terminal.until("...> ")
        terminal.send('"""\n')
        terminal.until("scripted model")
        terminal.until(PROMPT)
        for pasted in ("one\ntwo\nthree\n", '"""\npasted\n\n/quit\n"""\n', "a\n\n  b\n"):
            terminal.send(pasted)
            terminal.until("scripted model")
            terminal.until(PROMPT)
        say(terminal, "last")
        told = ["typed\n\n  /new is text", "one\ntwo\nthree", "pasted\n\n/quit", "a\n\n  b"]
        assert asked(terminal) == [*told, "last"]


def test_a08_an_error_leaves_the_conversation_alive(program: Program) -> None:
    answers = [
        reply("Final Answer: 4"),
        error(401, "the key is bad"),
        reply(RUN.format("echo ran")),
        error(404, "no such model"),
        reply("Final Answer: fine again"),
    ]
    with Server(answers) as server, program.terminal(**at(server)) as terminal:
        terminal.until(PROMPT)
        say(terminal, "one")
        assert "the key is bad" in say(terminal, "two")
        assert re.search(r"\x1b\[31m[^\x1b]*the key is bad", terminal.screen)
        assert "no such model" in say(terminal, "three")
        assert "fine again" in say(terminal, "four")
        terminal.send(CTRL_D)
        assert terminal.finish() == 0
    contents = [message["content"] for message in server.requests[-1].json["messages"][1:]]
    assert contents == [
        *("one", "Final Answer: 4"),
        *("two", "[turn ended: error]"),
        *("three", RUN.format("echo ran"), "Observation: $ echo ran\nran", "[turn ended: error]"),
        "four",
    ]


def test_d05_answers_are_coloured_unless_unwanted(program: Program) -> None:
    for env, coloured in (({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)):
        with program.terminal("--trace", "off", **env) as terminal:
            terminal.until(PROMPT)
            terminal.send("whoami\n")
            terminal.until("logged in as")
            terminal.until(PROMPT)
            terminal.send(CTRL_D)
            assert terminal.finish() == 0
        assert ("\x1b[37mYou are logged in as" in terminal.screen) == coloured
        assert bool(COLOURS.search(terminal.screen)) == coloured
        if env.get("TERM"):
            assert ESCAPE not in terminal.screen


def test_a01_offline_the_screen_says_scripted(program: Program) -> None:
    with program.terminal() as terminal:
        first = terminal.until(PROMPT)
        assert "scripted" in first
        assert "/help" in first
        assert str(program.folder.resolve()) in first
        assert "scripted" in say(terminal, "whoami")
        assert "scripted" in say(terminal, "/status")
