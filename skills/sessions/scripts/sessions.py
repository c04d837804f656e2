"""Lists and shows the sessions that are kept in a folder.

    python sessions.py       a line for each: name, questions, steps, how it ended, first question
    python sessions.py ID    one of them, drawn as the trace drew it

Exit codes: 0 · 2 no such session, or one of another format.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import agent


def blank_agent() -> agent.Agent:
    """An agent that only remembers: nothing runs, no model is asked, no file is written."""
    return agent.Agent(agent.Settings(sandbox="off"), agent.ScriptedModel([]))


def overview(path: Path) -> str:
    """A session in a line."""
    reader, steps, status = blank_agent(), 0, "interrupted"

    def tell(event: str, data: dict[str, Any]) -> None:
        nonlocal steps, status
        agent.remember(reader, event, data)
        steps += event == "request"
        status = data["status"] if event == "result" else status

    bad = agent.replay(path, tell)
    asked = [m["content"] for m in reader.every if m["kind"] == "question"]
    first = (asked or ["?"])[0].splitlines()[0][:50]
    damage = f", {len(bad)} lines damaged" if bad else ""
    return f"{path.stem}  {len(asked)} questions, {steps} steps, {status}{damage}: {first}"


def show(path: Path, full: bool) -> None:
    """Draws a session on stdout. ConfigError: it has another format."""
    reader, hidden = blank_agent(), []
    trace = agent.Trace("full" if full else "new", sys.stdout, "", again=full)

    def tell(event: str, data: dict[str, Any]) -> None:
        nonlocal hidden
        if event in ("header", "resumed"):
            hidden, trace.values["title"] = data["ablations"], data["model"] or "scripted model"
        if event == "request":  # the log has each message once, and how many were sent
            data["sent"] = agent.view(reader.messages, hidden)
        if event == "reply":
            trace("waiting", {})
            trace("text", {"text": data["reasoning"], "dim": True})
            trace("text", {"text": data["text"], "dim": False})
        trace(event, data)
        agent.remember(reader, event, data)

    for number in agent.replay(path, tell):
        print(f"[line {number} of the session is damaged]")


def main() -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Lists the sessions of this folder, or shows one.")
    parser.add_argument("id", nargs="?", help="show this one: the beginning of its name")
    parser.add_argument("--full", action="store_true", help="known messages in full, again")
    options = parser.parse_args()
    home, name = Path.cwd() / ".agent" / "sessions", options.id or ""
    paths = sorted(path for path in home.glob("*.jsonl") if path.name.startswith(name))
    try:
        if options.id and not paths:
            raise agent.ConfigError(f"no session {options.id!r} in this folder")
        if not paths:
            print("no session is kept in this folder", file=sys.stderr)
        for path in [] if options.id else paths:
            try:
                print(agent.clean(overview(path)))
            except (agent.ConfigError, OSError) as error:
                print(f"{path.stem}  {error}")
        if options.id:
            show(paths[-1], options.full)
    except BrokenPipeError:  # the reader, `head` perhaps, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (agent.ConfigError, OSError) as error:
        print(f"sessions.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
