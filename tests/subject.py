"""An agent with a session and a model that can also write summaries, for tests of the memory."""

from __future__ import annotations

import io
import itertools
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from program import Done

import agent

ROOT = Path(agent.__file__).resolve().parent
ASKS = (ROOT / "prompts" / "compact.md").read_text("utf-8").strip()[:40]
FAIL, FULL, CUT = "!error", "!overflow", "✂"  # how a script asks a Mind for trouble
DONE = "Thought: done\nFinal Answer: done"
NUMBERS = itertools.count()
# No skills are in tests/.
LOCAL: dict[str, Any] = {"sandbox": "off", "model": "m", "skills_dir": ROOT / "tests"}


class Mind(agent.ScriptedModel):
    """A scripted model that also writes summaries: those it was given, the last again and again."""

    def __init__(self, replies: list[str], *summaries: str) -> None:
        super().__init__(replies)
        self.summaries = list(summaries) or ["They talked."]
        self.summarised: list[list[dict[str, str]]] = []  # the messages of each such request

    def __call__(self, messages: Any, on_text: Any) -> agent.Reply:
        if ASKS in messages[-1]["content"]:
            self.summarised.append([dict(message) for message in messages])
            text = self.summaries.pop(0) if self.summaries[1:] else self.summaries[0]
        else:
            text = super().__call__(messages, on_text).text
        if text in (FAIL, FULL):
            raise (agent.Overflow if text == FULL else agent.ModelError)("the server is down")
        return agent.Reply(text.removeprefix(CUT), finish="length" if CUT in text else "stop")


class Subject(agent.Agent):
    """An agent with a Mind and a session; its tool `probe` returns its input 150 times."""

    def __init__(self, folder: Path, replies: list[str], *summaries: str, **options: Any) -> None:
        setting = agent.Settings(**(LOCAL | options))
        self.mind, self.session = Mind(replies, *summaries), agent.Session(folder, setting.redact)
        super().__init__(setting, self.mind, folder, [self.session])
        self.tools["probe"] = ("repeats", lambda text: text * 150)
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.listeners.append(lambda event, data: self.events.append((event, data)))

    def all(self, event: str) -> list[dict[str, Any]]:
        return [data for name, data in self.events if name == event]

    def shrink(self) -> bool:
        """What /compact does."""
        self.begin()
        return agent.compact(self, "command")

    def close(self) -> None:
        """Ends the log, as the end of the process does: its lock is free."""
        self.session.file.close()

    def again(self, *replies: str) -> Subject:
        """Another process that resumes this one."""
        self.close()
        other = Subject(self.shell.folder, list(replies))
        other.session.resume(other, "")
        return other

    def size(self) -> int:
        return agent.estimate(self.messages)

    def check(self) -> None:
        """The message rules of DESIGN, of each request."""
        for sent in [*self.mind.seen, *self.mind.summarised]:
            pairs = ["user", "assistant"] * (len(sent) // 2 - 1)
            assert [m["role"] for m in sent] == ["system", *pairs, "user"]
            assert all(m["content"].strip() and m["content"].encode("utf-8") for m in sent)

    def check_pairs(self) -> None:
        """An observation stands below its action."""
        kinds = [message["kind"] for message in self.messages]
        assert all(a == "action" for a, b in itertools.pairwise(kinds) if b == "observation")


def act(tool: str, text: str) -> str:
    return f"Thought: I try it.\nAction: {tool}\nAction Input: {text}"


def stored(folder: Path) -> list[Path]:
    return sorted(folder.glob(".agent/sessions/*.jsonl"))


def read(path: Path, event: str) -> list[dict[str, Any]]:
    lines = map(json.loads, path.read_text("utf-8").splitlines())
    return [line for line in lines if line["event"] == event]


def told(done: Done) -> list[str]:
    """The lines that the program itself says, not its trace; never a traceback."""
    assert "Traceback" not in done.err
    return [line for line in done.err.splitlines() if line.startswith("agent.py:")]


class Life(NamedTuple):
    """A session's bytes, and after each of its records: their size and the messages known."""

    log: bytes
    states: list[tuple[int, list[dict[str, str]]]]
    folder: Path

    def subject(self, *replies: str) -> Subject:
        """One whose system message is this session's."""
        return Subject(self.folder, list(replies), ablations=("tools",))

    def resume(self, log: bytes, *replies: str) -> tuple[Subject, Path, str]:
        """What goes on with this log, where that stands, what it says of it."""
        one = self.subject(*replies)
        path = self.folder / ".agent" / "sessions" / f"x{next(NUMBERS)}.jsonl"
        path.write_bytes(log)
        return one, path, one.session.resume(one, path.stem)


def live(folder: Path) -> Life:
    """A short session: an action, an overflow with its compaction, two questions."""
    replies = [act("probe", "test"), "Final Answer: 你好", FULL, DONE]
    one = Subject(folder, replies, ablations=("tools",))  # that makes the system message short
    states = [(0, list(one.messages))]

    def note(event: str, data: dict[str, Any]) -> None:
        size = stored(folder)[0].stat().st_size if stored(folder) else 0
        states.append((size, list(one.messages)))

    one.listeners.append(note)
    assert [one.ask("first?").status, one.ask("二?").status] == ["final", "final"]
    assert len(one.all("compaction")) == 1
    return Life(stored(folder)[0].read_bytes(), states, folder)


class Watched(io.FileIO):
    """Below a text file: notes each write, and the file's size after it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "ab")
        self.writes: list[tuple[bytes, int]] = []

    def write(self, data: Any) -> int:
        count = super().write(data)
        self.writes.append((bytes(data), os.stat(self.name).st_size))
        return count
