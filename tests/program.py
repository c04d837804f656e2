"""The program as a user has it: a process with a bare environment, on pipes or on a terminal."""

from __future__ import annotations

import codecs
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ESCAPE = "\x1b"
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Done:
    """What a run left behind."""

    code: int
    out: str
    err: str

    @property
    def told(self) -> list[str]:
        """The lines on stderr, but for the one that says there is no sandbox."""
        return [line for line in self.err.splitlines() if not line.startswith("sandbox off: ")]


def bare_environment(home: Path) -> dict[str, str]:
    """What a process needs to start, and nothing that configures the agent."""
    return {"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8", "TERM": "xterm"}


def fresh_signals() -> None:
    """Ctrl-C works even where the tests themselves were started in the background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def own_terminal() -> None:
    """Makes standard input the terminal that Ctrl-C comes from."""
    import fcntl
    import termios

    fresh_signals()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@dataclass
class Program:
    """agent.py of `project`, started in `folder`."""

    project: Path
    folder: Path
    env: dict[str, str] = field(default_factory=dict)

    @property
    def argv(self) -> list[str]:
        return [sys.executable, str(self.project / "agent.py")]

    def run(self, *args: str, stdin: str | bytes = b"", **env: str) -> Done:
        """Waits for the end; both streams are pipes."""
        raw = stdin.encode() if isinstance(stdin, str) else stdin
        done = subprocess.run(
            [*self.argv, *args],
            input=raw,
            capture_output=True,
            cwd=self.folder,
            env=self.env | env,
            timeout=60,
        )
        return Done(done.returncode, done.stdout.decode(), done.stderr.decode())

    def start(self, *args: str, **env: str) -> subprocess.Popen[bytes]:
        """A running process with pipes."""
        return subprocess.Popen(
            [*self.argv, *args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self.folder,
            env=self.env | env,
            preexec_fn=fresh_signals,
        )

    def terminal(self, *args: str, **env: str) -> Terminal:
        """A process on a terminal of its own."""
        return Terminal([*self.argv, *args], self.folder, self.env | env)


class Terminal:
    """A process on a pseudo terminal. `until` reads on from where the last one stopped."""

    def __init__(self, argv: list[str], folder: Path, env: dict[str, str]) -> None:
        import pty
        import termios

        self.leader, follower = pty.openpty()
        modes = termios.tcgetattr(follower)
        modes[0] |= 0x4000 if sys.platform == "linux" else 0  # IUTF8, as terminal programs set it
        modes[1] &= ~termios.OPOST  # newlines come as they were written
        termios.tcsetattr(follower, termios.TCSANOW, modes)
        termios.tcsetwinsize(follower, (50, 200)) if hasattr(termios, "tcsetwinsize") else None
        self.process = subprocess.Popen(
            argv,
            stdin=follower,
            stdout=follower,
            stderr=follower,
            cwd=folder,
            env=env,
            start_new_session=True,
            preexec_fn=own_terminal,
        )
        os.close(follower)
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.screen, self.position = "", 0

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.leader)

    def send(self, text: str) -> None:
        """Types it."""
        os.write(self.leader, text.encode())

    def read(self, seconds: float) -> bool:
        """Adds what comes within the time to `screen`; False at the end."""
        if not select.select([self.leader], [], [], max(seconds, 0))[0]:
            return True
        try:
            data = os.read(self.leader, 65_536)
        except OSError:  # Linux says so when the last process has gone
            data = b""
        self.screen += self.decoder.decode(data)
        return bool(data)

    def until(self, text: str, timeout: float = 15.0) -> str:
        """What was printed up to and with this text; fails after `timeout` seconds."""
        end = time.monotonic() + timeout
        while text not in self.screen[self.position :]:
            alive = time.monotonic() < end and self.read(end - time.monotonic())
            assert alive, f"no {text!r} in:\n{self.screen[self.position :][-3000:]!r}"
        start = self.position
        self.position = self.screen.index(text, start) + len(text)
        return self.screen[start : self.position]

    def finish(self, timeout: float = 15.0) -> int:
        """Reads to the end; the exit code."""
        end = time.monotonic() + timeout
        while time.monotonic() < end and self.read(end - time.monotonic()):
            pass
        return self.process.wait(max(end - time.monotonic(), 1))


def wait_for(condition: Callable[[], object], timeout: float = 15.0) -> None:
    """Polls until it is true."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)
