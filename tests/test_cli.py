"""The command line without a conversation: B13, D02-D06, D10, F01, F02, F04, F07, the trace."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from loopback import Response, Server, delta, error, hang, reply, sse
from program import COLOURS, ESCAPE, Done, Program, wait_for

Call = Callable[..., Done]

WHO = "Who am I on this machine?"
SKILLS_LINE = "\n- code-review: "  # in the system message
RUN = "Thought: I look.\nAction: run_command\nAction Input: {}"
BLOCKS = ["sent", "reply", "parsed", "observation"]
KNOWN = {
    "en": [
        WHO,
        "Which Python files are here?",
        "Review the code quality of agent.py.",
        "How much memory does this machine have?",
    ],
    "zh": [
        "我在这台机器上是谁？",
        "我有哪些 Python 文件？",
        "帮我审查一下 agent.py 的代码质量。",
        "看下系统有多少内存。",
    ],
}

pytestmark = pytest.mark.skipif(os.name != "posix", reason="commands need a POSIX shell")


def at(server: Server, **more: str) -> dict[str, str]:
    """The variables that choose this server."""
    return {"OPENAI_BASE_URL": server.url, "MODEL": "m", **more}


def blocks(trace: str) -> list[tuple[int, str, str]]:
    """Step, block and state of each rule line."""
    found = re.findall(r"^[─-]+ step (\d+): (\w+) \((\w+)\)", trace, re.M)
    return [(int(step), block, state) for step, block, state in found]


def last_line(screen: str) -> str:
    return COLOURS.sub("", screen).rstrip("\n").split("\n")[-1]


@cache
def whoami() -> str:
    return subprocess.run(["whoami"], capture_output=True, text=True).stdout.strip()


# ---- the first command of the README


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_f01_d05_the_demo_shows_whole_traces_and_four_answers(program: Program, lang: str) -> None:
    start = time.monotonic()
    done = program.run("--demo", "--lang", lang)
    assert time.monotonic() - start < 5
    assert done.code == 0, done.err
    answers = done.out.rstrip("\n").split("\n\n")
    assert len(answers) == 4, done.out
    assert whoami() in answers[0]
    assert re.search(r"\d", answers[3])
    assert "step" not in done.out
    assert ESCAPE not in done.out + done.err
    assert len([rule for rule in blocks(done.err) if rule[:2] == (1, "sent")]) == 4
    for question in KNOWN[lang]:
        assert question in done.err
    for screen in re.split(r"(?=^─+ step \d+: sent)", done.err, flags=re.M):
        assert "scripted" in screen


def test_f01_the_demo_follows_the_language_of_the_user(program: Program) -> None:
    done = program.run("--demo", LANG="zh_CN.UTF-8")
    assert done.code == 0
    assert all(question in done.err for question in KNOWN["zh"])
    assert "ffline" not in done.err.split("step 1")[0]


def test_f01_the_demo_asks_a_model_where_one_is_configured(call: Call) -> None:
    with Server(
        [reply("Final Answer: 1"), reply("Final Answer: 2"), error(401), error(401)]
    ) as server:
        done = call("--demo", "--lang", "en", **at(server))
    assert done.out.startswith("1\n\n2\n")
    assert done.code == 1
    asked = [request.json["messages"][-1]["content"] for request in server.requests]
    assert asked == KNOWN["en"]
    assert all(len(request.json["messages"]) == 2 for request in server.requests)


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_offline_an_unknown_question_names_those_that_are_known(call: Call, lang: str) -> None:
    done = call("--lang", lang, "What is the meaning of life?")
    assert done.code == 0
    assert all(question in done.out for question in KNOWN[lang])
    assert "scripted" in done.out
    assert "ollama" in done.out.lower()
    assert ".env" in done.out


@pytest.mark.parametrize(
    ("lang", "question", "answer"),
    [
        ("en", WHO, "You are logged in as {}."),
        ("en", "who am i on this MACHINE", "You are logged in as {}."),
        ("en", "whoami", "You are logged in as {}."),
        ("zh", "whoami", "你当前登录的用户是 {}。"),
        ("en", KNOWN["zh"][0], "你当前登录的用户是 {}。"),
    ],
)
def test_offline_a_known_question_really_runs_its_command(
    call: Call, lang: str, question: str, answer: str
) -> None:
    done = call("-q", "--lang", lang, question)
    assert done.out == f"{answer.format(whoami())}\n"


def test_f07_importing_does_nothing(program: Program, project: Path) -> None:
    watch = """
import os, sys
seen = []
def hook(name, args):
    if name == "open":
        path, mode, flags = args
        writes = isinstance(mode, str) and set(mode) & set("wax+")
        if writes or flags & (os.O_WRONLY | os.O_RDWR) or str(path).endswith(".env"):
            seen.append(f"{name} {path}")
    elif name.startswith(("socket.", "subprocess.", "os.mkdir", "os.system", "os.fork")):
        seen.append(name)
class Watched(type(os.environ)):
    def __getitem__(self, name):
        if "KEY" in name:
            seen.append(f"read {name}")
        return super().__getitem__(name)
os.environ.__class__ = Watched
sys.addaudithook(hook)
import agent
loaded = [name for name in ("openai", "readline") if name in sys.modules]
print(*seen, *loaded, *[v for v in vars(agent).values() if "canary" in repr(v)], sep="\\n", end="")
"""
    (project / ".env").write_text("OPENAI_API_KEY=sk-canary-0123456789\n")
    try:
        done = subprocess.run(
            [sys.executable, "-B", "-c", watch],
            capture_output=True,
            text=True,
            cwd=program.folder,
            env=program.env
            | {"PYTHONPATH": str(project), "DEEPSEEK_API_KEY": "sk-canary-9876543210"},
        )
    finally:
        (project / ".env").unlink()
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)
    assert list(program.folder.iterdir()) == []


# ---- standard input and output


@pytest.mark.parametrize("question", ["whoami\n", "\ufeff  whoami  \r\n\n"])
def test_d03_a_question_from_a_pipe(program: Program, question: str) -> None:
    done = program.run("-q", "--lang", "en", stdin=question)
    assert (done.code, done.out) == (0, f"You are logged in as {whoami()}.\n")


def test_d03_the_whole_of_a_pipe_is_one_question(call: Call) -> None:
    with Server([reply("Final Answer: 4")]) as server:
        done = call("-q", stdin="first\n\n/new\nlast\n", **at(server))
    assert done.out == "4\n"
    assert server.requests[0].json["messages"][-1]["content"] == "first\n\n/new\nlast"


@pytest.mark.parametrize("question", ["", "\n", " \t\n\n"])
def test_d03_an_empty_pipe_is_a_usage_error(call: Call, question: str) -> None:
    done = call("-q", stdin=question)
    assert (done.code, done.out) == (2, "")
    assert len(done.err.splitlines()) == 1


@pytest.mark.parametrize("sandbox", ["auto", "off"])
def test_d03_quiet_prints_the_answer_only_and_leaves_no_file(
    call: Call, program: Program, sandbox: str
) -> None:
    with Server(
        [reply(RUN.format("echo x")), reply("Thought: t\nFinal Answer: two\n\nlines  ")]
    ) as server:
        done = call("-q", "--sandbox", sandbox, "q", **at(server))
    assert (done.code, done.out) == (0, "two\n\nlines\n")
    notices = done.err.splitlines()  # without a sandbox one line says so, even when quiet
    assert all(line.startswith("sandbox off: ") for line in notices)
    assert len(notices) == 1 if sandbox == "off" else len(notices) <= 1
    assert list(program.folder.iterdir()) == []


@pytest.mark.parametrize("locale", ["C", "C.UTF-8", "en_US.UTF-8"])
def test_d02_bytes_that_are_no_utf8(program: Program, locale: str) -> None:
    done = program.run(stdin=b"a\xe4b\n", LC_ALL=locale)
    assert done.code == 0
    assert "Traceback" not in done.err
    assert re.search(r"^a\S+b$", done.err, re.M)


def test_d02_nor_as_an_argument(program: Program) -> None:
    done = subprocess.run(
        [*program.argv, b"a\xe4b"], capture_output=True, cwd=program.folder, env=program.env
    )
    assert done.returncode == 0
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "gbk", "cp1252"])
def test_d06_a_full_run_in_any_encoding(program: Program, encoding: str) -> None:
    done = subprocess.run(
        [*program.argv, "--demo", "--lang", "zh"],
        capture_output=True,
        cwd=program.folder,
        env=program.env | {"PYTHONIOENCODING": encoding},
    )
    assert done.returncode == 0
    assert whoami().encode() in done.stdout
    for word in (b"Traceback (most", b"UnicodeEncodeError", b"codec can't"):
        assert word not in done.stdout + done.stderr


@pytest.mark.parametrize("redirect", ["", "2>&1"])
def test_d06_a_reader_that_leaves_early(program: Program, redirect: str) -> None:
    line = f"{shlex.join([*program.argv, '--demo'])} {redirect} | head -1"
    done = subprocess.run(
        ["sh", "-c", line],
        capture_output=True,
        text=True,
        cwd=program.folder,
        env=program.env,
        timeout=30,
    )
    assert len(done.stdout.splitlines()) == 1
    for word in ("Traceback", "Exception", "BrokenPipe"):
        assert word not in done.stderr


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
def test_d05_none_on_a_terminal_that_wants_none(program: Program, env: dict[str, str]) -> None:
    with program.terminal("--demo", **env) as terminal:
        assert terminal.finish() == 0
    assert "step 2: observation" in terminal.screen
    assert ESCAPE not in terminal.screen


def test_d05_d10_colours_of_the_article_and_the_answer_last(program: Program) -> None:
    with program.terminal("--lang", "en", WHO) as terminal:
        assert terminal.finish() == 0
    colours = {
        32: WHO,
        33: "input: whoami",
        36: f"Observation: $ whoami\n{whoami()}",
        37: f"You are logged in as {whoami()}.",
    }
    for colour, text in colours.items():
        assert re.search(rf"\x1b\[{colour}m[^\x1b]*{re.escape(text)}", terminal.screen), text
    assert terminal.screen.rstrip().endswith("\x1b[0m")
    assert last_line(terminal.screen) == f"You are logged in as {whoami()}."
    first, second = terminal.screen.split("step 2: sent")
    assert first.count(SKILLS_LINE) == 1  # what is known by then is dimmed
    assert re.search(rf"\x1b\[2m[^\x1b]*{SKILLS_LINE}", second)


def test_d10_so_it_is_without_a_trace(program: Program) -> None:
    with program.terminal("--lang", "en", "--trace", "off", WHO) as terminal:
        terminal.finish()
    assert last_line(terminal.screen) == f"You are logged in as {whoami()}."


# ---- exit codes


@pytest.mark.parametrize(
    ("responses", "code"),
    [
        ([reply("Final Answer: 4")], 0),
        ([reply("prose"), reply("prose again")], 0),
        ([error(401)], 1),
        ([error(404)], 1),
        (
            [reply(RUN.format("echo 1")), reply(RUN.format("echo 2")), reply(RUN.format("echo 3"))],
            3,
        ),
        (
            [
                reply(RUN.format("echo 1")),
                reply(RUN.format("echo 2")),
                reply("Final Answer: perhaps"),
            ],
            3,
        ),
        ([reply(""), reply("")], 3),
        ([reply("Final Answer: half", finish="length")] * 2, 3),
        ([reply(RUN.format("rm -rf /"))] * 3, 3),
    ],
    ids=["answer", "prose", "401", "404", "limit", "incomplete", "empty", "cut", "refused"],
)
def test_d04_exit_codes_of_a_turn(call: Call, responses: list[Response], code: int) -> None:
    with Server(responses) as server:
        done = call("--max-steps", "3", "q", **at(server))
    assert done.code == code, done.err
    assert "Traceback" not in done.err
    assert server.responses == []


def test_d04_an_incomplete_answer_is_printed_and_marked(call: Call) -> None:
    with Server([reply(RUN.format("echo 1")), reply("Final Answer: perhaps")]) as server:
        done = call("--max-steps", "2", "q", **at(server))
    assert (done.code, done.out) == (3, "perhaps\n")
    assert "incomplete" in done.err
    assert "last step" in server.requests[1].json["messages"][-1]["content"]


def test_d04_an_error_is_one_line_even_when_quiet(call: Call) -> None:
    with Server([error(401, "bad key")]) as server:
        done = call("-q", "q", **at(server))
    assert (done.code, done.out) == (1, "")
    assert len(done.told) == 1
    assert "401" in done.err


@pytest.mark.parametrize("when", ["waiting", "command"])
def test_d04_ctrl_c_exits_with_130(program: Program, when: str) -> None:
    command = reply(RUN.format("touch started; sleep 60"))
    with Server([command if when == "command" else hang(60)]) as server:
        process = program.start("q", **at(server))
        started = program.folder / "started"
        wait_for(server.requests.__len__ if when == "waiting" else started.exists)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=5)
    assert process.returncode == 130
    assert out == b""
    assert b"Traceback" not in err
    assert b"interrupted" in err


# ---- the trace


def test_trace_has_four_blocks_a_step_with_the_states_of_the_article(call: Call) -> None:
    done = call("--lang", "en", WHO)
    states = {
        "sent": "thinking",
        "reply": "thinking",
        "parsed": "executing",
        "observation": "observing",
    }
    first = [(1, block, state) for block, state in states.items()]
    last = [(2, "sent", "thinking"), (2, "reply", "thinking"), (2, "parsed", "responding")]
    assert blocks(done.err) == first + last
    assert blocks(done.out) == []


@pytest.mark.parametrize(
    ("args", "systems", "one_line"),
    [([], 1, 1), (["--trace", "new"], 1, 1), (["--trace", "full"], 2, 0)],
)
def test_trace_known_messages_in_a_pipe(
    call: Call, args: list[str], systems: int, one_line: int
) -> None:
    done = call("--lang", "en", *args, WHO)
    assert done.err.count(SKILLS_LINE) == systems
    assert (
        len(re.findall(r"^\[0\] system, [\d,]+ characters, as before$", done.err, re.M)) == one_line
    )
    assert f"Observation: $ whoami\n{whoami()}" in done.err


def test_trace_off_shows_nothing_of_the_steps_but_says_scripted(
    call: Call, program: Program
) -> None:
    for args in (["--trace", "off"], ["-q"], ["--quiet"]):
        done = call("--lang", "en", *args, WHO)
        assert (done.code, done.out) == (0, f"You are logged in as {whoami()}.\n")
        assert blocks(done.err) == []
        assert "scripted" in done.err


def test_trace_a_reply_is_shown_while_it_is_written(program: Program) -> None:
    pieces = sse(delta(content="Thought: FIRST\n"), delta("stop", content="Final Answer: LAST"))
    pieces.pause = 0.4
    with Server([pieces]) as server:
        process = program.start("q", **at(server))
        assert process.stderr
        seen = b""
        while b"FIRST" not in seen:
            piece = os.read(process.stderr.fileno(), 4096)
            assert piece, seen
            seen += piece
        assert b"LAST" not in seen
        out, err = process.communicate(timeout=30)
    assert b"LAST" in err
    assert out == b"LAST\n"


def test_f04_tokens_a_step_and_a_turn(call: Call) -> None:
    with Server([
        reply(RUN.format("echo 1"), usage={"prompt_tokens": 1111, "completion_tokens": 22}),
        reply("Final Answer: 4", usage={"prompt_tokens": 3333, "completion_tokens": 44}),
    ]) as server:  # fmt: skip
        done = call("q", **at(server))
    plain = done.err.replace(",", "")
    for number in ("1111", "22", "3333", "44", "4444", "66"):
        assert re.search(rf"\b{number}\b", plain), number
    assert "n/a" not in done.err


@pytest.mark.parametrize("second", [None, {"prompt_tokens": 3333, "completion_tokens": 44}])
def test_f04_a_count_that_the_server_leaves_out_is_not_made_up(
    call: Call, second: dict[str, int] | None
) -> None:
    with Server([reply(RUN.format("echo 1")), reply("Final Answer: 4", usage=second)]) as server:
        done = call("q", **at(server))
    assert ("3,333" in done.err) == bool(second)
    assert "n/a" in done.err.splitlines()[-1]


# ---- what is sent


def test_b13_what_the_prompt_says_of_the_shell_is_so(call: Call, program: Program) -> None:
    command = reply(RUN.format("pwd; ps -o comm= -p $$; seq 100000; sleep 30"))
    with Server([command, reply("Final Answer: 4")]) as server:
        call("-q", "--timeout", "0.5", "q", **at(server))
    system = server.requests[0].json["messages"][0]["content"]
    observation = server.requests[1].json["messages"][-1]["content"]
    shell = re.search(r"run with (\w+) in ([^,\n]+),", system)
    assert shell
    _, folder, program_name = observation.split("\n")[:3]
    assert shell[1] == Path(program_name).name
    assert shell[2] == folder == str(program.folder.resolve())
    assert re.search(r"\b0\.5 second", system)
    assert "[timed out after 0.5 s]" in observation
    limit = re.search(r"([\d,]+) characters", system)
    assert limit
    output = observation.split("\n", 1)[1]
    assert 0.9 < len(output) / int(limit[1].replace(",", "")) <= 1


def test_f02_prompt_and_messages_tell_exactly_what_was_sent(program: Program) -> None:
    answers = [
        reply(f"{RUN.format('echo ½; false')}\nObservation: made up"),
        reply("Final Answer: eins 一"),
        reply("Final Answer: zwei"),
    ]
    with (
        Server(answers) as server,
        program.terminal("--trace", "off", **at(server, NO_COLOR="1")) as terminal,
    ):
        terminal.until("you> ")
        terminal.send("first 第一\n")
        terminal.until("eins 一")
        terminal.until("you> ")
        terminal.send("/prompt\n")
        terminal.until("/prompt")
        prompt = terminal.until("you> ")
        terminal.send("/messages\n")
        terminal.until("/messages")
        printed = terminal.until("you> ")
        terminal.send("second\n")
        terminal.until("zwei")
        terminal.until("you> ")
        terminal.send("/quit\n")
        assert terminal.finish() == 0
    sent = [request.json["messages"] for request in server.requests]
    *before, question = sent[2]
    assert question == {"role": "user", "content": "second"}
    assert before[: len(sent[1])] == sent[1]
    assert [message["role"] for message in before[1:]] == ["user", "assistant"] * 2
    assert "made up" not in str(before)
    assert before[0]["content"] in prompt
    assert len(prompt) - len(before[0]["content"]) < 40
    between = []
    for message in before:
        head, printed = printed.split(message["content"], 1)
        assert message["role"] in head
        between.append(head)
    assert all(len(head) < 40 for head in [*between, printed])


def test_b10_a_full_disk_or_a_deleted_folder_is_one_line(program: Program) -> None:
    script = f'"{sys.executable}" "{program.project}/agent.py"'
    for line in (f"{script} -q whoami > /dev/full", f"rmdir ../gone; {script} -q whoami"):
        gone = program.folder / "gone"
        gone.mkdir(exist_ok=True)
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=gone,
            env=program.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        assert done.stderr.splitlines()[-1].startswith("agent.py: [Errno")
