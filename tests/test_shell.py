"""The shell with real processes: B01-B12. The sandbox is off here; test_sandbox.py has it on."""

from __future__ import annotations

import os
import pty
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import agent

KEY = "sk-canary-0123456789abcdef"


@pytest.fixture(autouse=True)
def _below_the_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tested here must hold even for a command that the guard lets through."""
    monkeypatch.setattr(agent, "guard", lambda command, folder: None)


def shell(folder: Path, timeout: float = 10.0, limit: int = 3000) -> agent.Shell:
    settings = agent.Settings(
        timeout=timeout, observation_limit=limit, sandbox="off", secrets=(KEY,)
    )
    return agent.Shell(settings, folder)


def timed(runner: agent.Shell, command: str) -> tuple[str, float]:
    start = time.monotonic()
    return runner.run(command), time.monotonic() - start


def alive(pid: int) -> bool:
    """Is there such a process (a zombie is not)?"""
    done = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return bool(done.stdout.strip()) and not done.stdout.startswith("Z")


def gone_within(pid: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not alive(pid)


# ---- B01-B04: time and processes -----------------------------------------------------------


@pytest.mark.parametrize("start", ["", "trap '' TERM INT HUP; "])
def test_b01_timeout_kills_the_group_and_keeps_the_output(tmp_path: Path, start: str) -> None:
    command = f"{start}sleep 60 & echo child $!; echo shell $$; echo before; wait; sleep 60"
    text, seconds = timed(shell(tmp_path, timeout=0.5), command)
    assert seconds <= 2
    assert "before" in text
    assert text.endswith("[timed out after 0.5 s]")
    pids = [int(number) for number in re.findall(r"(?:child|shell) (\d+)", text)]
    assert len(pids) == 2
    assert all(gone_within(pid, 1.0) for pid in pids)


def test_b02_nothing_runs_on_after_a_timeout(tmp_path: Path) -> None:
    text = shell(tmp_path, timeout=0.4).run("touch first; (sleep 0.9; touch late) & wait")
    assert "[timed out after 0.4 s]" in text
    time.sleep(0.8)
    assert (tmp_path / "first").exists()
    assert not (tmp_path / "late").exists()


@pytest.mark.parametrize("program", ["sleep", "setsid sleep"])
def test_b03_b04_a_background_child_does_not_hold_the_shell(tmp_path: Path, program: str) -> None:
    if program.startswith("setsid") and not shutil.which("setsid"):
        pytest.skip("no setsid here")
    text, seconds = timed(shell(tmp_path), f"{program} 8 & echo ok")
    assert text == "ok"
    assert seconds <= 2


def test_b03_a_background_writer_survives_the_end_of_its_shell(tmp_path: Path) -> None:
    command = "(sleep 0.8; echo one; echo two; touch done) & echo started"
    assert shell(tmp_path).run(command) == "started"
    end = time.monotonic() + 5
    while not (tmp_path / "done").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert (tmp_path / "done").exists()


# ---- B05: nothing waits for keys -----------------------------------------------------------


@pytest.mark.parametrize(
    "command", ["cat", "read x", "python3", "read x </dev/tty", "git commit", "man ls"]
)
def test_b05_commands_that_ask_return_at_once(tmp_path: Path, command: str) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    text, seconds = timed(shell(tmp_path), command)
    assert "timed out" not in text
    assert seconds < 5


def test_b05_a_long_git_log_does_not_page(tmp_path: Path) -> None:
    commits = "".join(
        f"commit refs/heads/main\ncommitter a <a@b> {1700000000 + i} +0000\ndata 2\nm\n\n"
        for i in range(500)
    )
    subprocess.run(["git", "init", "-q", "-b", "main", str(tmp_path)], check=True)
    subprocess.run(
        ["git", "fast-import", "--quiet"], input=commits.encode(), cwd=tmp_path, check=True
    )
    text, seconds = timed(shell(tmp_path), "git log")
    assert seconds < 5
    assert "characters left out" in text
    assert shell(tmp_path).run("git log --oneline | wc -l").strip() == "500"


TERMINAL_SCRIPT = """
import agent, pathlib
shell = agent.Shell(agent.Settings(timeout=5, sandbox="off"), pathlib.Path("."))
for command in ["read x </dev/tty; echo got=$x", "cat", "stty -echo", "read y; echo y=$y"]:
    print("ran", repr(shell.run(command)), flush=True)
print("typed:" + input("ready> "), flush=True)
"""


def test_b05_under_a_terminal_the_next_input_still_gets_the_keys(tmp_path: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:  # the child: a program with a real controlling terminal
        os.environ["PYTHONPATH"] = str(agent.ROOT)
        os.chdir(tmp_path)
        os.execv(sys.executable, [sys.executable, "-c", TERMINAL_SCRIPT])
    seen, sent, end = b"", False, time.monotonic() + 15
    while b"typed:" not in seen and time.monotonic() < end:
        if not sent:  # typed while the commands run
            os.write(terminal, b"my keys\n")
            sent = True
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                seen += os.read(terminal, 4096)
            except OSError:
                break
    os.waitpid(pid, 0)
    os.close(terminal)
    screen = seen.decode(errors="replace")
    assert "typed:my keys" in screen, screen
    assert "got=my" not in screen
    assert "timed out" not in screen


# ---- B06-B08: output -----------------------------------------------------------------------


@pytest.mark.parametrize("command", ["yes", "cat /dev/urandom", "head -c 1G /dev/zero"])
def test_b06_endless_output_in_flat_memory(tmp_path: Path, command: str) -> None:
    if command.startswith("head") and sys.platform == "darwin":
        command = "head -c 1073741824 /dev/zero"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    text = shell(tmp_path, timeout=0.5 if "head" not in command else 20).run(command)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 50 * 1024 * (1024 if sys.platform == "darwin" else 1)
    assert len(text) <= 3000
    assert re.search(r"\[… \d{4,} characters left out …\]", text)
    assert "exit code" not in text
    assert ("timed out" in text) is ("head" not in command)


@pytest.mark.parametrize("size", [2999, 3000, 3001, 5000, 131072, 131073, 400000])
def test_b07_the_number_left_out_is_exact(tmp_path: Path, size: int) -> None:
    expected = ("0123456789" * (size // 10 + 1))[:size]
    (tmp_path / "big").write_text(expected)
    text = shell(tmp_path).run("cat big")
    assert len(text) <= 3000
    match = re.fullmatch(r"(\d+)\n\[… (\d+) characters left out …\]\n(\d+)", text)
    if match is None:
        assert text == expected and size < 3000
        return
    head, number, tail = match.groups()
    assert expected.startswith(head) and expected.endswith(tail)
    assert len(head) > 1000 and len(tail) > 1000
    assert len(head) + int(number) + len(tail) == size


def test_b07_a_long_line_is_no_work(tmp_path: Path) -> None:
    (tmp_path / "big").write_text("0123456789" * 14_000)
    before = time.process_time()
    shell(tmp_path).run("cat big")
    assert time.process_time() - before < 0.5  # a quadratic pattern takes 2 s and more


@pytest.mark.parametrize("after", ["", "; exit 3", "; sleep 60"])
def test_b07_head_and_tail_and_whole_characters_on_every_path(tmp_path: Path, after: str) -> None:
    (tmp_path / "big").write_text("首" + "汉字🙂é" * 60000 + "尾", encoding="utf-8")
    text = shell(tmp_path, timeout=0.7, limit=500).run("cat big" + after)
    body, note = text, ""
    if after:
        body, note = text.rsplit("\n", 1)
    notes = {"": "", "; exit 3": "[exit code 3]", "; sleep 60": "[timed out after 0.7 s]"}
    assert note == notes[after]
    head, left_out, tail = body.split("\n")
    assert head.startswith("首汉字") and tail.endswith("尾")
    assert "\ufffd" not in text
    number = int(re.findall(r"\d+", left_out)[0])
    assert len(head) + number + len(tail) == 240002
    assert len(text) <= 500


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (r"printf 'a\r\nb\r\n'", "a\nb"),
        (r"printf ' 10%%\r 50%%\r100%%\nok\n'", "100%\nok"),
        (r"printf ' 10%%\r100%%\r'", "100%"),
        (r"printf '\033[31mred\033[0m\n'", "red"),
        (r"printf '\033]0;title\007text\n'", "text"),
        (r"printf 'a\000b\007c\td\n'", "abc\td"),
        (r"printf 'caf\303\251 \377 x\n'", "café \ufffd x"),
        (r"printf 'cut \344\275'", "cut \ufffd"),
    ],
)
def test_b08_only_what_a_terminal_would_show(tmp_path: Path, command: str, expected: str) -> None:
    assert shell(tmp_path).run(command) == expected


def test_b08_no_control_character_from_random_bytes(tmp_path: Path) -> None:
    (tmp_path / "noise").write_bytes(bytes(range(256)) * 40 + os.urandom(200000))
    text = shell(tmp_path).run("cat noise")
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text)
    text.encode("utf-8")


# ---- B09-B10: how it ended -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("true", "(no output)"),
        ("echo", "(no output)"),
        ("false", "(no output)\n[exit code 1]"),
        ("echo x; exit 42", "x\n[exit code 42]"),
        ("kill -9 $$", "(no output)\n[exit code 137: killed by SIGKILL]"),
        ("kill -1 $$", "(no output)\n[exit code 129: killed by SIGHUP]"),
        ("exit 129", "(no output)\n[exit code 129]"),
        ("printf '  two  spaces'", "  two  spaces"),
        ("echo 1; echo 2 >&2; echo 3; echo 4 >&2", "1\n2\n3\n4"),
        ("python3 -c 'import sys; print(1); print(2, file=sys.stderr); print(3)'", "1\n2\n3"),
    ],
)
def test_b09_exit_code_signal_empty_and_order(tmp_path: Path, command: str, expected: str) -> None:
    assert shell(tmp_path).run(command) == expected


def test_b09_a_killed_child_is_named_too(tmp_path: Path) -> None:
    text = shell(tmp_path).run("bash -c 'kill -SEGV $$'; exit $?")
    assert "[exit code 139: killed by SIGSEGV]" in text


def test_b10_nul_and_too_long_and_not_utf8(tmp_path: Path) -> None:
    runner = shell(tmp_path)
    assert runner.run("echo a\0b").startswith("[error:")
    assert runner.run("echo \ud800").startswith("[error:")
    text = runner.run("echo " + "x" * 200_000)
    assert len(text) < 3000
    assert text.startswith(("[error:", "xxx"))
    assert runner.run("echo still here") == "still here"


def test_b10_deleted_folder(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    runner = shell(folder)
    folder.rmdir()
    text = runner.run("echo hi")
    assert text.startswith("[error:") and "gone" in text and "WSL" in text


def test_b10_missing_bash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    text = shell(tmp_path).run("echo hi")
    assert text.startswith("[error:") and "'sh'" in text
    (programs / "sh").symlink_to("/bin/sh")
    runner = shell(tmp_path)
    assert runner.name == "sh"
    assert runner.run("echo hi") == "hi"


# ---- B11: no key ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    ["env", "printenv DEEPSEEK_API_KEY", "cat /proc/self/environ | tr '\\0' '\\n'", "export -p"],
)
def test_b11_the_environment_has_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    for name in ("DEEPSEEK_API_KEY", "OPENAI_API_KEY", "SOME_TOKEN", "BASH_ENV"):
        monkeypatch.setenv(name, KEY)
    monkeypatch.setenv("LC_CANARY", "passed on")
    settings = agent.Settings(sandbox="off")  # knows no secret: nothing is redacted
    text = agent.Shell(settings, tmp_path).run(command)
    assert KEY not in text and KEY[3:] not in text
    assert "API_KEY" not in text
    assert ("LC_CANARY" in text) == ("printenv" not in command)  # the probe shows what there is


def test_b11_a_key_in_a_file_is_redacted(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text(f"DEEPSEEK_API_KEY={KEY}\n")
    assert shell(tmp_path).run("cat .env") == "DEEPSEEK_API_KEY=[key]"
    text = shell(tmp_path, limit=200).run(f"for i in $(seq 300); do echo {KEY}; done")
    assert KEY not in text and "[key]" in text


# ---- B12: Ctrl-C ---------------------------------------------------------------------------

INTERRUPT_SCRIPT = """
import agent, pathlib
shell = agent.Shell(agent.Settings(timeout=30, sandbox="off"), pathlib.Path("."))
try:
    shell.run("trap '' INT TERM; echo partial; sleep 60 & echo $! $$ > pids; wait; sleep 60")
except KeyboardInterrupt as stop:
    print(repr(str(stop)), flush=True)
print("back:", shell.run("echo again"), flush=True)
"""


def test_b12_ctrl_c_kills_the_group_and_gives_the_partial_output(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPT_SCRIPT],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(agent.ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    pids, end = tmp_path / "pids", time.monotonic() + 10
    while not (pids.exists() and pids.read_text().endswith("\n")) and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.3)  # nobody presses Ctrl-C in the millisecond in which a command starts
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=10)
    assert time.monotonic() - start < 3
    assert out.splitlines() == [repr("partial"), "back: again"]
    assert all(gone_within(int(pid), 1.0) for pid in pids.read_text().split())


def test_b14_a_refusal_is_never_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = agent.Refusal("rule", "it is a test", "do nothing")
    monkeypatch.setattr(agent, "guard", lambda command, folder: refusal)
    assert shell(tmp_path).run("touch ran") == "[refused: it is a test. Safer: do nothing]"
    assert not (tmp_path / "ran").exists()
