"""Kills the agent with signal 9 around a command and resumes: `python tests/kill.py 20`.

The model is a server on loopback. A `bash` of our own, first in PATH, kills its parent before or
after it runs the command, so that these moments are hit each time.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from loopback import Server, hang, reply
from program import Program, bare_environment, wait_for

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import agent  # noqa: E402

# When it is killed: while it waits for the model; the action is known, its command hasn't begun;
# the command runs; the command has ended, what it printed isn't written down.
MOMENTS = ("request", "action", "command", "observation")
SHIMS = {"action": "kill -9 $PPID", "observation": '{bash} "$@"; kill -9 $PPID'}
COMMAND = "echo ran >> log"
ENDLESS = f"{COMMAND}; echo $$ > pid; sleep 60"


class Trial(NamedTuple):
    """What came of one kill."""

    moment: str
    faults: list[str]
    runs: int  # of the command


def crash(folder: Path, moment: str) -> None:
    """One question to a real process, up to its death."""
    command = ENDLESS if moment == "command" else COMMAND
    action = reply(f"Thought: I do it.\nAction: run_command\nAction Input: {command}")
    env = bare_environment(folder)
    if moment in SHIMS:
        (folder / "bin").mkdir()
        shim = folder / "bin" / "bash"
        shim.write_text("#!/bin/sh\n" + SHIMS[moment].replace("{bash}", shutil.which("bash") or ""))
        shim.chmod(0o700)
        env["PATH"] = f"{shim.parent}:{env['PATH']}"
    with Server([hang(60) if moment == "request" else action]) as server:
        flags = ("--sandbox", "off", "--base-url", server.url, "--model", "m", "--trace", "new")
        process = Program(ROOT, folder, env).start("Do it once.", *flags)
        if moment == "request":
            wait_for(lambda: server.requests)
        if moment == "command":
            wait_for(lambda: (folder / "pid").exists() and (folder / "pid").read_text().strip())
        if moment not in SHIMS:
            process.kill()
        process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL, process.returncode
    if moment == "command":  # the command outlives the agent
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int((folder / "pid").read_text()), signal.SIGKILL)


def resume(folder: Path, url: str = "") -> tuple[agent.Agent, agent.Session, str]:
    """The agent that goes on with the session used last, its log, and what it says of that."""
    settings = agent.Settings(base_url=url, model="m", sandbox="off")
    session = agent.Session(folder, settings.redact)
    one = agent.Agent(settings, agent.OpenAIModel(settings), folder, [session])
    return one, session, session.resume(one, "")


def close(session: agent.Session) -> None:
    """Frees its lock, which else lasts as long as this process."""
    session.file.close()


def trial(folder: Path, moment: str) -> Trial:
    """Kills it, resumes twice, asks on. A fault is a line that says what is wrong."""
    crash(folder, moment)
    first, session, told = resume(folder)
    close(session)
    with Server([reply("Final Answer: done")]) as server:
        second, session, again = resume(folder, server.url)
        known = list(second.messages)
        result = second.ask("Is it done?")
        close(session)
        sent = server.requests[0].json["messages"]
    unknown = first.texts["unknown"]
    log = folder / "log"
    runs = len(log.read_text().splitlines()) if log.exists() else 0
    interrupted = int(moment != "request")
    checks = {
        "the question is lost": "Do it once." in sent[1]["content"],
        "the roles don't alternate": [m["role"] for m in sent]
        == ["system", *["user", "assistant"] * (len(sent) // 2 - 1), "user"],
        "the result isn't unknown": str(sent).count(unknown) == interrupted,
        "the first resume doesn't say so": f"lost results: {interrupted}," in told,
        "the second resume repairs": "lost results: 0, bad lines: 0" in again
        and first.messages == known,
        "it can't go on": result.status == "final",
        "the command ran at a wrong time": runs == int(moment in ("command", "observation")),
    }
    return Trial(moment, [fault for fault, fine in checks.items() if not fine], runs)


def trials(folder: Path, count: int) -> list[Trial]:
    """So many, the moments in turn, four at a time: they mostly wait."""
    moments = list(itertools.islice(itertools.cycle(MOMENTS), count))
    folders = [folder / str(number) for number in range(count)]
    for each in folders:
        each.mkdir()
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(trial, folders, moments))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        done = trials(Path(place), int(sys.argv[1]))
    for number, (moment, faults, _) in enumerate(done):
        for fault in faults:
            print(f"{number}, killed at the {moment}: {fault}")
    twice = sum(one.runs > 1 for one in done)
    good = sum(not one.faults for one in done)
    print(f"killed {len(done)}, resumed {good} of {len(done)}, commands run twice: {twice}")
    sys.exit(good < len(done))
