"""The memory: session files, resume, compaction (E01-E08), F02. Real files and processes."""

from __future__ import annotations

import gc
import hashlib
import io
import json
import os
import re
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kill import MOMENTS, trials
from loopback import Server, error, hang, reply, sse
from program import Done, Program, wait_for
from subject import CUT, DONE, FAIL, FULL, Life, Subject, Watched, act, live, read, stored, told
from test_repl import PROMPT, at, say

import agent

WHO = "Who am I on this machine?"  # a demo question: its command really runs
KEY = "sk-canary-0123456789abcdef"


@pytest.fixture
def call(call: Callable[..., Done]) -> Callable[..., Done]:
    """As conftest has it; and the lock is freed, as at a process's end."""
    return lambda *args, **more: (call(*args, **more), gc.collect())[0]


@pytest.fixture(scope="module")
def life() -> Iterator[Life]:
    """In memory where that can be had: thousands of files are written."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield live(Path(folder))


# ── On disk ───────────────────────────────────────────────────────────────────────────────────


def test_e01_a_session_cut_anywhere_resumes(life: Life) -> None:
    one, path = life.subject(), stored(life.folder)[0].with_stem("cut")
    unknown, known, states = one.texts["unknown"], life.states[0][1], life.states[:0:-1]
    for end in range(len(life.log) + 1):
        while states and states[-1][0] <= end:
            _, known = states.pop()
        path.write_bytes(life.log[:end])
        one.messages, one.every = list(life.states[0][1]), []
        said = one.session.resume(one, path.stem)
        repaired = known[-1]["kind"] == "action"
        assert one.messages[: len(known)] == known, end
        added = [unknown in message["content"] for message in one.messages[len(known) :]]
        assert added == [True] * repaired, end
        assert said.endswith(f"lost results: {int(repaired)}, bad lines: 0")
        whole, log = life.log[: life.log[:end].rfind(b"\n") + 1], path.read_bytes()
        events = [json.loads(line)["event"] for line in log[len(whole) :].splitlines()]
        assert (log.startswith(whole), events) == (True, ["resumed", *["message"] * repaired]), end


def test_e01_a_cut_session_goes_on(life: Life) -> None:
    for end in sorted({size + more for size, _ in life.states for more in (0, 9)}):
        one, path, _ = life.resume(life.log[:end], DONE)
        begun, before = bool(one.every), {*stored(life.folder)}
        assert one.ask("and now?").status == "final", end
        one.check()
        [path] = {*stored(life.folder)} - before or {path}
        assert (path in before) == begun  # a file begins with its first question
        again, _, said = life.resume(path.read_bytes())
        assert again.messages == one.messages and said.endswith("bad lines: 0")


COMPACTED = {"event": "compaction", "summary": "x", "kept": 1, "before": 9, "after": 3}
SAID = {"event": "message", "kind": "question", "content": "x"}
BAD = {
    "nul": b"\0" * 40, "half": b'{"event": "mess', "list": b"[]", "number": b"5", "empty": b"",
    "not utf-8": b'{"format": 1, "event": "message", "kind": "question", "content": "\xff"}',
    "deep": b"[" * 100_000, "no event": {"kind": "question", "content": "x"},
    "no content": {"event": "message", "kind": "question"}, "content: 5": SAID | {"content": 5},
    "content: blank": SAID | {"content": " "}, "content: surrogate": SAID | {"content": "\ud800"},
    "kind: dream": SAID | {"kind": "dream"}, "kind: list": SAID | {"kind": ["question"]},
    "kept: text": COMPACTED | {"kept": "1"}, "kept: 99": COMPACTED | {"kept": 99},
    "kept: -2": COMPACTED | {"kept": -2}, "summary: blank": COMPACTED | {"summary": " "},
    "summary: 5": COMPACTED | {"summary": 5}, "summary: \\ud800": COMPACTED | {"summary": "\ud800"},
    "no sizes": {"event": "compaction", "summary": "x", "kept": 1},
    "before: text": COMPACTED | {"before": "9"}, "header": {"event": "header", "model": "m"},
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_e02_a_bad_line_is_skipped_with_its_number(life: Life, name: str) -> None:
    bad, lines = BAD[name], life.log.split(b"\n")
    raw = bad if isinstance(bad, bytes) else json.dumps({"format": agent.FORMAT} | bad).encode()
    place = len(lines) - 2  # a later compaction would hide what it does
    broken = b"\n".join([*lines[:place], raw, *lines[place:]])
    one, path, said = life.resume(broken, DONE)
    assert one.messages == life.states[-1][1]
    assert said.endswith(f"bad lines: [{place + 1}]")
    assert agent.replay(path, lambda event, data: agent.remember(one, event, data)) == [place + 1]
    assert path.read_bytes().startswith(broken)
    assert one.ask("and now?").status == "final"
    one.check()


@pytest.mark.parametrize("compacted", [False, True])
def test_e02_any_line_lost_leaves_a_valid_list(life: Life, compacted: bool) -> None:
    lines = life.log.splitlines(keepends=True)
    first = next(n for n, line in enumerate(lines) if b'"event": "compaction"' in line)
    lines = lines[: None if compacted else first]
    for lost, line in enumerate(lines):
        broken = b"".join([*lines[:lost], b"\0" * len(line), b"\n", *lines[lost + 1 :]])
        one, _, said = life.resume(broken, DONE)
        more = r"(, \d+)*" if b'"first?"' in line else ""  # what the model said to it
        assert re.search(rf"bad lines: \[{lost + 1}{more}\]$", said), lost
        assert one.ask("and now?").status == "final"
        one.check()


def test_e03_killed_at_any_moment_it_resumes_and_runs_nothing_twice(tmp_path: Path) -> None:
    done = trials(tmp_path, 2 * len(MOMENTS))
    assert [(one.moment, one.faults) for one in done] == [(moment, []) for moment in MOMENTS] * 2


def test_e04_one_write_a_record_before_the_memory_changes(tmp_path: Path) -> None:
    one = Subject(tmp_path, [DONE, act("run_command", "echo 你好"), DONE])
    one.ask("first?")
    one.session.file = io.TextIOWrapper(io.BufferedWriter(file := Watched(stored(tmp_path)[0])))
    size, before, known = os.stat(file.name).st_size, len(one.messages), []
    one.listeners.insert(1, lambda event, data: known.append(len(one.messages)))
    one.ask("second?" + " 好" * 8_000)  # longer than the buffers
    for data, size_then in file.writes:
        size += len(data)
        assert (data.count(b"\n"), data[-1:], size_then) == (1, b"\n", size)
    step = ["request", "reply", "parsed", "message"]
    assert [json.loads(data)["event"] for data, _ in file.writes] == [
        "message", *step, "message", *step, "result"]  # fmt: skip
    assert known[0] == before


def test_e04_a_session_in_use_and_a_dead_ones_lock(program: Program) -> None:
    with Server([hang(60)]) as server:
        flags = ("--sandbox", "off", "--trace", "new")
        first = program.start("What?", *flags, **at(server))
        try:
            wait_for(lambda: server.requests)
            [path] = stored(program.folder)
            before = path.read_bytes()
            second = program.run(WHO, *flags, "--resume")
            assert (second.code, second.out, path.read_bytes()) == (2, "", before)
            assert len(told(second)) == 1 and "in use" in told(second)[0]
        finally:
            first.kill()
            first.communicate()
    assert program.run(WHO, *flags, "--resume").code == 0
    assert stored(program.folder) == [path] and path.read_bytes().startswith(before)


def test_e05_only_the_user_can_read_it_and_no_key_is_in_it(tmp_path: Path) -> None:
    old, command = os.umask(0), act("run_command", f"echo {KEY[:5]}''{KEY[5:]}")
    try:
        one = Subject(tmp_path, [command, f"Final Answer: {KEY}"], api_key=KEY, secrets=(KEY,))
        one.ask(f"Is {KEY} good?")
    finally:
        os.umask(old)
    [path] = stored(tmp_path)
    assert [stat.S_IMODE(p.stat().st_mode) for p in (path, tmp_path / ".agent")] == [0o600, 0o700]
    assert KEY not in path.read_text("utf-8") and "Is [key] good?" in path.read_text("utf-8")
    assert (tmp_path / ".agent" / ".gitignore").read_text() == "*\n"


@pytest.mark.parametrize("kib", [0, 1, 4])
def test_e05_it_cant_be_written(call: Callable[..., Done], program: Program, kib: int) -> None:
    if not kib:  # also for root, who may write everywhere
        (program.folder / ".agent").write_text("a file")
    words = [*program.argv, WHO, "--trace", "new", "--lang", "en"]
    argv = ["bash", "-c", f'ulimit -f {kib or 99}; exec "$@"', "bash", *words]
    ran = subprocess.run(argv, cwd=program.folder, env=program.env, capture_output=True)
    done = Done(ran.returncode, ran.stdout.decode(), ran.stderr.decode())
    assert (done.code, len(told(done))) == (0, 1), done.err
    assert done.out.startswith("You are logged in as ")
    assert not kib or call(WHO, "--resume").code == 0


def test_e06_another_format_is_refused(call: Callable[..., Done], program: Program) -> None:
    call(WHO)
    [path] = stored(program.folder)
    path.write_bytes(new := path.read_bytes().replace(b'"format": 1', b'"format": 99') + b"torn")
    done = call(WHO, "--resume")
    assert (done.code, done.out, len(told(done))) == (2, "", 1)
    assert path.name in told(done)[0] and "format" in told(done)[0]
    assert path.read_bytes() == new


@pytest.mark.parametrize("link", [".agent", ".agent/sessions"])
def test_e05_a_link_out_of_the_folder_is_not_followed(
    call: Callable[..., Done], program: Program, tmp_path_factory: pytest.TempPathFactory, link: str
) -> None:
    """A command in the sandbox can make one, for the next start of the program."""
    other = tmp_path_factory.mktemp("other")
    (other / ".gitignore").write_text("mine")
    other.chmod(0o755)
    (program.folder / link).parent.mkdir(exist_ok=True)
    (program.folder / link).symlink_to(other)
    done = call(WHO, "--trace", "new", "--lang", "en")
    assert (done.code, len(told(done))) == (0, 1) and "is a link" in told(done)[0]
    assert [p.name for p in other.iterdir()] == [".gitignore"]
    assert (other / ".gitignore").read_text() == "mine"
    assert stat.S_IMODE(other.stat().st_mode) == 0o755


def test_e05_what_others_keep_in_the_state_folder_stays(
    call: Callable[..., Done], program: Program
) -> None:
    (program.folder / ".agent").mkdir()
    (program.folder / ".agent" / ".gitignore").write_text("!rules")
    assert call(WHO).code == 0 and len(stored(program.folder)) == 1
    assert (program.folder / ".agent" / ".gitignore").read_text() == "!rules"


@pytest.mark.parametrize("name", ["/etc/passwd", "../sessions/", "*", "**", "?", "[a", "\0"])
def test_d04_a_session_that_cant_be_is_one_line(
    call: Callable[..., Done], program: Program, name: str
) -> None:
    call(WHO)
    script = str(program.project / "skills/sessions/scripts/sessions.py")
    done = call("x", "--resume", name)
    assert (done.code, len(told(done))) == (2, 1) and "no session" in told(done)[0]
    if name != "\0":  # no argument of a process can hold it
        shown = subprocess.run([sys.executable, script, name], cwd=program.folder, text=True,
                               capture_output=True)  # fmt: skip
        assert (shown.returncode, shown.stdout, len(shown.stderr.splitlines())) == (2, "", 1)


def test_e06_a_session_of_another_format_hides_no_other(
    call: Callable[..., Done], program: Program
) -> None:
    call(WHO)
    [path] = stored(program.folder)
    (path.parent / "19990101-000000.jsonl").write_text('{"format": 2, "event": "header"}\n')
    (path.parent / "20000101-000000.jsonl").mkdir()
    done = program.run("--sessions")
    assert (done.code, done.err, len(done.out.splitlines())) == (0, "", 3)
    assert path.stem in done.out and "format" in done.out.splitlines()[0]


def test_d03_a_foreign_log_cant_write_to_the_terminal(
    call: Callable[..., Done], program: Program
) -> None:
    call(WHO)
    [path] = stored(program.folder)
    bad = "a\u001b]0;PWN\u0007\u001b[2Jb\u0000c\u202ed"
    path.write_bytes(path.read_bytes().replace(WHO.encode(), json.dumps(bad)[1:-1].encode()))
    shown, resumed = program.run("--show", path.stem), call("again", "--resume")
    for text in (shown.out, resumed.err):
        assert "abcd" in text and not re.search("[\x00\x07\x1b\u202e]", text)


def test_e05_no_session_writes_nothing(call: Callable[..., Done], program: Program) -> None:
    assert (call(WHO, "--no-session").code, list(program.folder.iterdir())) == (0, [])


def test_e06_an_unknown_event_is_kept_and_ignored(life: Life) -> None:
    lines = life.log.split(b"\n")
    newer = b"\n".join([*lines[:5], b'{"format": 1, "event": "dream", "of": [1]}', *lines[5:]])
    one, path, said = life.resume(newer)
    assert one.messages == life.states[-1][1]
    assert said.endswith("bad lines: 0") and path.read_bytes().startswith(newer)


# ── Compaction ────────────────────────────────────────────────────────────────────────────────

WORDS = ["Hello {summary}, 你好\n\n  - indented\n\ttab",
         "Never touch `prod.db`!  Two  blanks, {questions} and \\1 too.",
         *[f"Question {n}: what is next?" for n in range(3, 13)]]  # fmt: skip
TALK = [text for n, _ in enumerate(WORDS) for text in (act("probe", f"output {n}"), DONE)]
REPLIES = [act("probe", "1"), act("probe", "much text"), "prose", "", DONE, FAIL, FULL, CUT]


def test_e07_e08_what_matters_survives_and_nothing_is_lost_on_disk(tmp_path: Path) -> None:
    assert [agent.threshold(n) for n in (0, 2_000, 4_096, 32_768)] == [0, 1_500, 3_072, 26_214]
    one = Subject(tmp_path, TALK, "First.", "Second.", context_window=3_000)
    system = one.messages[0]
    for number, question in enumerate(WORDS, 1):
        assert one.ask(question).status == "final"
        known = "\n".join(message["content"] for message in one.messages)
        assert one.messages[0] == system and all(word in known for word in WORDS[:number])
        one.check_pairs()
    one.check()
    requests = [*one.mind.seen, *one.mind.summarised]
    assert all(agent.estimate(sent) <= 3_000 - 750 for sent in requests)
    assert all(each["after"] <= 0.9 * each["before"] for each in one.all("compaction"))
    assert len(one.all("compaction")) >= 3
    assert "First." in str(one.mind.summarised[1])  # a summary is part of the next one
    said = [(line["kind"], line["content"]) for line in read(stored(tmp_path)[0], "message")]
    assert said == [(each["kind"], each["content"]) for each in one.every]
    assert said == [(each["kind"], each["content"]) for each in one.all("message")]
    again = one.again()
    assert (again.messages, again.every) == (one.messages, one.every)


@pytest.mark.parametrize(("size", "whole"), [(10, True), (400, False)])
def test_e07_a_loaded_skill_stays_or_is_named(tmp_path: Path, size: int, whole: bool) -> None:
    (tmp_path / "skills" / "pirate").mkdir(parents=True)
    text = f"---\nname: pirate\ndescription: talk\n---\n{'Say aye. ' * size}end of the skill"
    (tmp_path / "skills" / "pirate" / "SKILL.md").write_text(text)
    load = [act("load_skill", "pirate"), DONE]
    one = Subject(tmp_path, load + TALK, skills_dir=tmp_path / "skills", context_window=4_000)
    questions = iter(["Talk like one.", *WORDS])
    while not one.all("compaction"):
        one.ask(next(questions))
    summary = one.all("compaction")[0]["summary"]
    assert ("end of the skill" in summary) == whole and "loaded so far: pirate" in summary
    one.model, one.settings = agent.ScriptedModel(load), replace(one.settings, context_window=0)
    one.ask("Load it again.")
    assert "end of the skill" in one.messages[-2]["content"]


def test_e07_a_question_that_is_too_long_is_never_forgotten(tmp_path: Path) -> None:
    """Larger than the quarter of the window that words may take: its beginning stays."""
    acts = [act("probe", f"{n} {'x' * 2_900}") for n in range(6)]
    one = Subject(tmp_path, [*acts, DONE], "They acted.", context_window=9_600)
    one.ask("FIND the fault in this log:\n" + "line\n" * 2_200)
    assert one.all("compaction")
    assert all("FIND the fault" in str(sent) for sent in one.mind.seen)


@pytest.mark.parametrize("summary", ["", " \n", FAIL, CUT + "They", "blah " * 6_000])
@pytest.mark.parametrize("overflows", ["", "window", FULL])  # FULL: says the server, same step
def test_e08_a_bad_summary(tmp_path: Path, summary: str, overflows: str) -> None:
    one = Subject(tmp_path, [*TALK, *[FULL] * (overflows == FULL), DONE], summary, context_window=0)
    for question in WORDS:
        one.ask(question)
    before, size = list(one.messages), one.size()
    window = size + 800 if overflows == "window" else size * 100 // 82
    assert size > agent.threshold(window) and one.all("compaction") == []
    one.settings = replace(one.settings, context_window=window)
    assert one.ask("and now?").status == "final"
    assert [len(one.mind.summarised), len(one.all("compaction"))] == [1, int(overflows != "")]
    assert (one.messages[: len(before)] == before) != bool(overflows)
    assert not overflows or one.texts["dropped"] in one.messages[1]["content"]
    one.check()


def test_e08_at_most_one_summary_a_step_and_three_a_turn(tmp_path: Path) -> None:
    replies = [*[act("probe", f"long output {n}") for n in range(12)], DONE] * 2
    one = Subject(tmp_path, replies, FAIL, context_window=3_000, max_steps=20)
    for _ in range(2):
        before = len(one.mind.summarised)
        assert one.ask("Do a lot.").status == "final"
        assert 1 <= len(one.mind.summarised) - before <= 3
    assert len(one.all("request")) == len(one.mind.seen) == 26
    one.check()


def test_e08_an_overflow_helps_itself_once(tmp_path: Path) -> None:
    one = Subject(tmp_path, [*TALK[:8], FULL, DONE, FULL, FULL, DONE], FAIL)
    for question in WORDS[:5]:
        assert one.ask(question).status == "final"
    assert (len(one.all("compaction")), len(one.mind.summarised)) == (1, 1)
    assert one.ask("Once more").status == "error"
    assert len(one.mind.seen) <= 12 and len(one.mind.summarised) <= 2
    one.check()


@pytest.mark.parametrize(("status", "message"), [
    (400, "This model's maximum context length is 4096 tokens. However, you requested more"),
    (400, "the request exceeds the available context size, try increasing it"),
    (413, "Request too large"),
    (400, "The input token count (9000) exceeds the maximum number of tokens allowed (8192)."),
    (400, "Invalid request: Your request exceeded model token limit: 8192"),
    (400, "Range of input length should be [1, 8192]"),
    (422, "inputs must have less than 8192 tokens: `max_new_tokens` must be less"),
    (200, "This endpoint's maximum context length is 8192 tokens"),  # in a stream
])  # fmt: skip
def test_e08_a_real_servers_overflow(tmp_path: Path, status: int, message: str) -> None:
    one = Subject(tmp_path, TALK[:8])
    for question in WORDS[:4]:
        one.ask(question)
    failed = error(status, message) if status > 200 else sse({"error": {"message": message}})
    answers = [failed, reply("They talked."), reply("Final Answer: yes")]
    with Server(answers) as server:
        one.model = agent.OpenAIModel(replace(one.settings, base_url=server.url))
        assert one.ask("and now?").answer == "yes"
        first, _, last = [len(request.raw) for request in server.requests]
    assert last < 0.9 * first


@pytest.mark.parametrize("window", [0, 32_768])
def test_e08_compact_by_hand(tmp_path: Path, window: int) -> None:
    one = Subject(tmp_path, [act("probe", "a long output"), DONE], context_window=window)
    one.ask("first?")
    assert one.all("compaction") == [] and one.shrink() and not one.shrink()
    assert "first?" in one.messages[1]["content"]


@settings(max_examples=60, deadline=None)
@given(
    replies=st.lists(st.sampled_from(REPLIES), max_size=40),
    summaries=st.lists(st.sampled_from(["Hm.", "", FAIL, FULL, CUT]), min_size=1, max_size=3),
    questions=st.lists(st.text(max_size=40), min_size=1, max_size=6),
    window=st.integers(300, 4_000),
    hidden=st.sets(st.sampled_from(["observations", "thoughts", "history"])),
)  # fmt: skip
def test_a11_e07_the_rules_hold_after_compactions(
    life: Life, replies: list[str], summaries: list[str], questions: list[str], window: int,
    hidden: set[str],
) -> None:  # fmt: skip
    one = Subject(life.folder, replies, *summaries, context_window=window, ablations=tuple(hidden))
    system, one.listeners = one.messages[0], one.listeners[1:]  # without the session
    for question in questions:
        one.ask(question)
        one.check_pairs()
        one.shrink()
        one.check_pairs()
        assert one.messages[0] == system
    one.check()


# ── What is kept, and what a person sees of it ────────────────────────────────────────────────


def test_f02_the_session_knows_what_was_sent(tmp_path: Path) -> None:
    one = Subject(tmp_path, [], ablations=("thoughts", "tools"))
    replies = [act("probe", "测试测试测试"), "Final Answer: 好", DONE, "They talked.", DONE]
    with Server([reply(text) for text in replies]) as server:
        one.model = agent.OpenAIModel(replace(one.settings, base_url=server.url))
        for question in ("一?", "two?"):
            one.ask(question)
        one.shrink()
        one.ask("三?")
        requests = [request.json["messages"] for request in server.requests]
    sent = [*requests[:3], requests[4]]  # the fourth asked for a summary
    raw = [json.dumps(messages, ensure_ascii=False).encode() for messages in sent]
    logged = read(stored(tmp_path)[0], "request")
    assert [line["sha256"] for line in logged] == [hashlib.sha256(r).hexdigest() for r in raw]
    assert [line["sent"] for line in logged] == list(map(len, sent))


def test_the_commands_of_a_conversation(program: Program) -> None:
    texts = [f"Final Answer: {'a long answer ' * 100}"] * 3 + ["They talked.", "Final Answer: new"]
    with (
        Server([reply(text, size=500) for text in texts]) as server,
        program.terminal("--trace", "off", "--sandbox", "off", **at(server)) as terminal,
    ):
        terminal.until(PROMPT)
        *_, full = [say(terminal, line) for line in ("one", "two", "three", "/status")]
        *_, messages, less = [say(terminal, line) for line in ("/compact", "/messages", "/status")]
        say(terminal, "/new")
        say(terminal, "four")
        size = agent.estimate(server.requests[2].json["messages"])
    first, second = stored(program.folder)
    assert [line["content"] for line in read(second, "message")][:1] == ["four"]
    assert len(read(first, "compaction")) == 1
    assert "They talked." in messages and re.search(r"\b7 messages", full)
    assert not re.search(r"\b7 messages", less)
    numbers = [int(n) for n in re.findall(r"\d+", full.replace(",", ""))]
    assert {32_768, 26_214} <= set(numbers) and any(size < n < size + 900 for n in numbers)
    assert "never" in full and "never" not in less  # the last compaction


def test_e05_no_session_is_kept(call: Callable[..., Done], program: Program) -> None:
    assert (call(WHO, "--no-session").code, list(program.folder.iterdir())) == (0, [])
    assert (call(WHO, "-q").code, call("--demo", "-q").code, stored(program.folder)) == (0, 0, [])
    call(WHO)
    call(WHO, "-q", "--resume")
    assert len(read(stored(program.folder)[0], "result")) == 2


def test_a_resume_knows_what_was_said(call: Callable[..., Done], program: Program) -> None:
    call(WHO)
    [path] = stored(program.folder)
    with Server([reply("Final Answer: yes")]) as server:
        assert call("Really?", "--resume", path.stem[:10], **at(server)).out == "yes\n"
        sent = server.requests[0].json["messages"]
    assert [m["content"] for m in sent if m["role"] == "user"][::2] == [WHO, "Really?"]
    [old], [new] = read(path, "header"), read(path, "resumed")
    assert new["system"] == sent[0]["content"] != old["system"]  # another model: it is logged
    assert len(told(call(WHO, "--resume", "1999"))) == 1


def test_the_ending_of_the_last_turn_is_remembered(tmp_path: Path) -> None:
    one = Subject(tmp_path, [FAIL])
    assert one.ask("first?").status == "error"
    (again := one.again(DONE)).ask("second?")
    assert again.mind.seen[0][-2]["content"] == "[turn ended: error]"


def test_a_projects_instructions_are_the_users(tmp_path: Path) -> None:
    system = lambda: Subject(tmp_path, []).messages[0]["content"]  # noqa: E731
    assert "AGENTS.md" not in system()
    (tmp_path / "AGENTS.md").write_text("Speak like a {shell} pirate.\n\nAlways.", "utf-8")
    assert "Speak like a {shell} pirate.\n\nAlways." in system()
    assert "AGENTS.md" in system() and re.search("(?i)project", system())
    (tmp_path / "AGENTS.md").write_bytes(b"\xff" + "好".encode() * 100_000)
    assert system().count("好") == 7_999
    assert "AGENTS.md, at most the first 8,000 characters" in system()


def test_sessions_are_listed(call: Callable[..., Done], program: Program) -> None:
    call(WHO)
    call("What else?", "--resume")
    one = Subject(program.folder, [FAIL])
    one.ask("first?")
    one.close()
    paths, done = stored(program.folder), program.run("--sessions")
    rows = [r"\b2 q.*\b3 s.*\bfinal\b.*Who am I", r"\b1 q.*\b1 s.*\berror\b.*first\?"]
    assert (done.code, done.err, stored(program.folder)) == (0, "", paths)
    for path, row in zip(paths, rows, strict=True):
        [listed] = [line for line in done.out.splitlines() if path.stem in line]
        assert re.search(row, listed.replace(path.stem, ""))


def test_a_session_is_shown_as_the_trace_did(call: Callable[..., Done], program: Program) -> None:
    script = str(program.project / "skills/sessions/scripts/sessions.py")
    ways = {"new": [*program.argv, "--show"], "full": [sys.executable, script, "--full"]}
    for mode, words in ways.items():
        live = call(WHO, "--trace", mode, "--lang", "en").err
        path = stored(program.folder)[-1]
        path.write_bytes(log := b"[]\n" + path.read_bytes())
        shown = subprocess.check_output([*words, path.stem], cwd=program.folder).decode()
        assert path.read_bytes() == log and re.search(r"line 1\b.*damaged", shown)
        assert live[live.index("── step 1: sent") :].rstrip() in shown and WHO in shown
    assert program.run("--show", "1999").code == 2
