"""Glassbox: a whole AI agent that you can read.

One loop, one protocol, one tool; everything else is a skill.

    question ──▶ messages ──▶ model ──▶ reply ──▶ parse ──┬──▶ Final Answer ──▶ you
                    ▲                                     └──▶ Action ──▶ tool ─┐
                    └──────────────── observation ◀─────────────────────────────┘

    uv run agent.py --demo          four questions, no key needed: a scripted model, real commands
    uv run agent.py "question"      one question; the trace goes to stderr, the answer to stdout
    uv run agent.py                 a conversation (/help lists its commands)

Part I, what it is: 1 Settings · 2 Model · 3 Shell · 4 Protocol · 5 Skills · 6 Loop · 7 Trace
Part II, what keeps it alive: 8 Guard and sandbox · 9 Edges · 10 Command line
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import difflib
import functools
import itertools
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import unicodedata
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn, TextIO
from urllib.parse import urlsplit

import dotenv
import yaml
from colorama import Fore, Style

# ──── Part I · 1 Settings ────────────────────────────────────────────────────────────────────
ROOT = Path(__file__).resolve().parent
PROMPTS = ROOT / "prompts"


class ConfigError(Exception):
    """A flag, variable or file that can't be used as it is: one line, exit code 2."""


@dataclass(frozen=True)
class Settings:
    """All that can be set. `configure` fills it: flag > environment > .env > default."""

    model: str = ""  # the name that its server knows it by
    base_url: str = ""  # of an OpenAI-compatible server; "" = offline, a script plays the model
    api_key: str = field(default="", repr=False)
    secrets: tuple[str, ...] = field(default=(), repr=False)  # what `redact` takes out of texts
    max_steps: int = 10  # model calls a question (article 001, 4.5: 5 to 10)
    timeout: float = 30.0  # seconds a command may run (article 003)
    observation_limit: int = 3000  # characters of a command's output (article 003)
    read_timeout: float = 120.0  # seconds between two pieces of a reply (10 to connect)
    stop: tuple[str, ...] = ("\nObservation:", "\n观察")  # where models begin to invent results
    skills_dir: Path = ROOT / "skills"
    sandbox: str = "auto"  # auto | bwrap | off
    network: bool = False  # may a sandboxed command use it
    trace: str = "full"  # full | new | off
    lang: str = "zh" if os.environ.get("LANG", "").startswith("zh") else "en"  # of the demo

    def redact(self, text: str) -> str:
        """The text cleaned (see `clean`), and with every known key replaced by `[key]`."""
        keys = [key for key in (*self.secrets, self.api_key) if len(key) >= 12]
        return functools.reduce(lambda t, key: t.replace(key, "[key]"), keys, clean(text))


# ──── Part I · 2 Model: messages in, a reply out; only this section knows of the network ─────
Message = dict[str, str]  # role (system, user or assistant) and content


class Reply(NamedTuple):
    """What the model said, or what one piece of a stream adds to it."""

    text: str
    reasoning: str = ""
    finish: str = "stop"  # "" = the stream ended without a reason
    usage: dict[str, int] | None = None  # prompt_tokens, completion_tokens … if the server tells

    @property
    def cut(self) -> bool:
        """The reply ends too early: nothing in it may run."""
        return self.finish in ("", "length", "content_filter", "insufficient_system_resource")


class ModelError(Exception):
    """No usable reply: one line that says what to do."""


class OpenAIModel:
    """Any server that speaks OpenAI's chat protocol. Every failure is a ModelError."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.name = settings, settings.model
        self.client: Any = None
        # 0: the same question gets the same reply, as far as the server can.
        options: dict[str, Any] = {"temperature": 0.0, "stream_options": {"include_usage": True}}
        self.options = options | ({"stop": list(settings.stop)} if settings.stop else {})

    def __call__(self, messages: list[Message], on_text: Callable[[str, bool], None]) -> Reply:
        """Asks once; `on_text` sees each piece as it comes, and whether it is reasoning."""
        redact, reply, safe, shown = self.settings.redact, Reply("", finish=""), "", 0
        # Closed on Ctrl-C too, so that the server stops writing.
        with contextlib.closing(self.stream(messages)) as pieces:
            for piece in pieces:
                reply = Reply(reply.text + piece.text, reply.reasoning + piece.reasoning,
                              piece.finish or reply.finish, piece.usage or reply.usage)
                safe = redact(reply.reasoning + reply.text)
                # What could be the beginning of a key waits until it is clear that it isn't.
                end = max(shown, len(safe) - max(map(len, self.settings.secrets), default=0))
                on_text(safe[shown:end], shown < len(reply.reasoning))
                shown = end
        on_text(safe[shown:], False)
        if reply == Reply("", finish=""):
            raise self.explain(ValueError("the server's stream held no reply"))
        return reply._replace(text=redact(reply.text), reasoning=redact(reply.reasoning))

    def stream(self, messages: list[Message]) -> Generator[Reply, None, None]:
        """The pieces of a reply until it ends or the connection breaks; of a plain reply, one."""
        try:
            import openai  # here, because it takes a second and the offline mode needs none of it
            response = self.request(openai, messages)
            with contextlib.closing(response.http_response) as body:
                # By its type, since the SDK takes a page of HTML for a stream of nothing.
                if "event-stream" not in response.headers.get("content-type", "").lower():
                    yield read_plain(body.read().decode("utf-8-sig", "replace"))
                    return
                with contextlib.suppress(openai.APIConnectionError):
                    yield from map(read_chunk, response.parse(to=openai.Stream[object]))
        except Exception as error:  # the SDK lets more through than its own errors
            raise self.explain(error) from None

    def request(self, openai: Any, messages: list[Message]) -> Any:
        """Sends it; an option that the server refuses by name is left out from then on."""
        if not self.client:
            openai._base_client.MAX_RETRY_AFTER_DELAY = 60  # seconds; longer waits are reported
            timeout = openai.Timeout(self.settings.read_timeout, connect=10)
            key, url = self.settings.api_key.strip("\"' \t\r\n") or "local", self.settings.base_url
            self.client = openai.OpenAI(api_key=key, base_url=url, timeout=timeout, max_retries=2)
        create = self.client.chat.completions.with_raw_response.create
        while True:
            try:
                # As `messages` the SDK would walk through the whole history at each call: 124 ms
                # for 400 messages, against 3.6 ms in extra_body.
                body = {"messages": messages, **self.options}
                return create(model=self.name, messages=[], stream=True, extra_body=body)
            except openai.BadRequestError as error:
                named = [n for n in self.options if re.search(rf"\b{n}\b", str(error.body))]
                if not named:
                    raise
                del self.options[named[0]]

    def explain(self, err: Exception) -> ModelError:
        """What to do about an error, and at most 500 characters of what the server said."""
        said = str(getattr(err, "body", "") or getattr(err, "doc", "") or err.__cause__ or err)
        status = getattr(err, "status_code", 408 if "Timeout" in type(err).__name__ else 0)
        hints: dict[int, str] = read_table("help.yaml")["hints"]
        hint = hints.get(402 if "insufficient_quota" in said else min(status, 500), hints[400])
        words = " ".join(self.settings.redact(f"{status or ''} {said}").split())
        return ModelError(f"{hint} ({words[:500]})")


class ScriptedModel:
    """Plays a list of replies, offline and in tests. `seen`: the messages of each call."""

    name = "scripted model"

    def __init__(self, replies: list[str]) -> None:
        self.seen: list[list[Message]] = []
        self.replies = replies

    def __call__(self, messages: list[Message], on_text: Callable[[str, bool], None]) -> Reply:
        """The next reply; {output} in it is the last observation without our notes."""
        self.seen.append([dict(message) for message in messages])
        if len(self.seen) > len(self.replies):
            raise ModelError("the script is over")
        output = re.sub(r"(?m)\AObservation: (\$ .*\n)?|^\[.*\]$\n?", "", messages[-1]["content"])
        reply = self.replies[len(self.seen) - 1].replace("{output}", output.strip())
        on_text(reply, False)
        return Reply(reply)


# ──── Part I · 3 Shell: a command goes in, the text that the model will read comes out ───────
# Of your environment only these reach a command: no key does.
PASSED_ON = r"PATH|HOME|USER|LOGNAME|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|VIRTUAL_ENV|CONDA_PREFIX"
# Nobody is at the keyboard: pagers print, editors accept, prompts fail; Python doesn't buffer.
FIXED = {"TERM": "dumb", "PAGER": "cat", "GIT_PAGER": "cat", "EDITOR": "true", "GIT_EDITOR": "true",
         "GIT_TERMINAL_PROMPT": "0", "DEBIAN_FRONTEND": "noninteractive", "PYTHONUNBUFFERED": "1"}


class Shell:
    """Runs each command in a new shell. `prefix` fences it in (empty: no sandbox), `notice` is
    for the screen. ConfigError: a sandbox was demanded that can't be had."""

    refusal: Refusal | None = None  # of the last command; its text alone could be an output

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings, self.folder = settings, Path(folder).resolve()
        self.name = "bash" if shutil.which("bash") else "sh"
        self.prefix, self.notice = sandbox_prefix(settings, self.folder)

    def run(self, command: str) -> str:
        """The observation; a failure is a text too. Ctrl-C kills what runs and raises on."""
        if os.name == "nt":
            return "[error: commands need a POSIX shell; on Windows, start this program in WSL]"
        self.refusal = guard(command, self.folder)
        if self.refusal:
            return f"[refused: {self.refusal.reason}. Safer: {self.refusal.safer}]"
        try:
            return self.execute(command)
        except (OSError, ValueError) as error:  # no folder, no shell, a NUL, over 128 KiB, …
            return f"[error: the command could not be started: {error}]"

    def execute(self, command: str) -> str:
        """Starts it and waits; on timeout and Ctrl-C the whole process group is killed."""
        output, stopped = Output(), None
        passed = {name: v for name, v in os.environ.items() if re.fullmatch(PASSED_ON, name)}
        process = subprocess.Popen(
            [*self.prefix, self.name, "-c", command], cwd=self.folder, env=passed | FIXED,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0,
            start_new_session=True)  # no terminal to read keys from, and one group to kill
        # A thread, so that the shell's end is seen while a background child holds the pipe. It
        # reads on after that: a server started with `&` would die of a closed pipe.
        reader = threading.Thread(target=output.drain, args=(process.stdout,), daemon=True)
        try:
            reader.start()
            note = exit_note(process.wait(self.settings.timeout))
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as stop:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)  # gentler signals can be ignored
            process.wait()
            note, stopped = f"[timed out after {self.settings.timeout:g} s]", stop
        reader.join(0.5)
        text = output.shorten(self.settings.observation_limit - len(note) - 1, self.settings.redact)
        if isinstance(stopped, KeyboardInterrupt):
            raise KeyboardInterrupt(text)
        return f"{text}\n{note}".rstrip("\n")


# ──── Part I · 4 Protocol: from the text of a reply to one directive ─────────────────────────
Label = tuple[str, int, int]  # kind, start, end in the text
# What a reply can be. `text` is the reply up to the end of its directive, `ignored` says that
# something came after it; `reason` is a key of prompts/nudges.yaml, and then `text` is all of it.
Final = NamedTuple("Final", [("answer", str), ("thought", str), ("text", str)])
Invalid = NamedTuple("Invalid", [("reason", str), ("text", str)])
Action = NamedTuple("Action", [("tool", str), ("input", str), ("thought", str), ("text", str),
                               ("ignored", bool)])
Parsed = Action | Final | Invalid

# A label is one of these words at the start of a line, perhaps bold or a heading, and a colon.
# Blanks are bounded: where two neighbours match the same, a regex would take quadratic time.
FINAL = "final[ _]?answer|最终答案|最终回答"
TOKEN = re.compile(rf"""
    ^[^\S\n]{{0,99}}(?:\#{{1,6}}[^\S\n]{{0,9}})?(?:\*\*)?(?:(?P<thought>thought|思考|想法)
        |(?P<input>action[ _]?\d{{0,3}}[ _]?input|(?:行动|动作|工具)(?:输入|参数))
        |(?P<action>action|行动|动作|工具)|(?P<final>{FINAL})|(?P<seen>observation|观察(?:结果)?))
        [^\S\n]{{0,9}}\d{{0,3}}(?:\*\*)?[^\S\n]{{0,9}}[:：](?:\*\*)?
    |^[^\S\n]{{0,99}}(?P<stopped>Observ[ation]{{0,5}})[^\S\n]{{0,99}}$  # what a stop string leaves
    |(?:^|(?<=[:：*]))[^\S\n]{{0,99}}(?P<fence>`{{3,}}|~{{3,}})[^`\n]*$
    |(?<!<)<<-?[^\S\n]?['\"\\]?(?P<heredoc>[A-Za-z_][\w-]*)
    """, re.MULTILINE | re.IGNORECASE | re.VERBOSE)
NO_TOOL = re.compile(r"[`\"'*]*(?:(?:none|n/a|null)\b|无|没有|不需要)", re.IGNORECASE)
FENCE = re.compile(r"^[ \t]*(?:```|~~~)", re.MULTILINE)
CALL = re.compile(r"""(?is)([\w.-]+)(?:[(（\[](?:\w+\s*=\s*(?=["']))?(.*)[)）\]]|[ ]\((\{.*\})\)
    |\s+(?:Action\ )?Input[:：](.*)|\s*\n(```.*))\Z""", re.VERBOSE)  # tool(name="x"), Input: x, …


def parse_reply(text: str) -> Parsed:
    """The first directive decides; nothing after it can change its kind. Pure, raises nothing."""
    reply = unwrap(text)
    labels = find_labels(reply)
    sections = [reply[end:after[1]].strip() for (_, _, end), after in itertools.pairwise(labels)]
    thoughts: list[str] = []
    for n, (kind, start, end) in enumerate(labels[:-2]):
        if kind in ("start", "thought"):
            thoughts.append(sections[n])
        elif kind == "final":
            answer = reply[end:].strip()
            if len(FENCE.findall(answer)) % 2:  # the end of one that began before the answer
                answer = re.sub(r"\n[ \t]*(?:```|~~~)[ \t]*\Z", "", answer)
            answer = answer.removesuffix("**" if reply[start:end].count("**") == 1 else "")
            # Below an empty label only further label lines: that is no text.
            empty = not sections[n] and all("\n" not in section for section in sections[n:])
            thought = "\n".join(thoughts).strip()
            return Invalid("empty answer", reply) if empty else Final(answer, thought, reply)
        elif kind == "action" and not NO_TOOL.match(sections[n]):
            return read_action(reply, labels[n + 1 :], sections[n:], "\n".join(thoughts).strip())
    return Invalid("no label", reply) if reply else Invalid("empty", text)


def read_action(reply: str, after: list[Label], sections: list[str], thought: str) -> Parsed:
    """An Action label: `sections` begin with its text, `after` with the label that follows."""
    if after[0][0] == "input":
        called, value, stop = sections[0], sections[1], after[1][1]
    else:  # the input may stand behind the tool's name
        call = CALL.match(sections[0])
        called, value = call.group(1, call.lastindex or 1) if call else (sections[0], "")
        stop = after[0][1]
    tool = called.split()[0].strip("`\"'*[]()<>【】") if called else ""
    if not tool or not value or "|" in called.split("\n")[0]:
        return Invalid("no input", reply)
    if not (value := clean_input(value.strip())):
        return Invalid("bad input", reply)
    if re.match(rf"(?:{FINAL}|finish)\b", called, re.IGNORECASE):
        return Final(value, thought, reply[:stop].rstrip())
    return Action(tool, value, thought, reply[:stop].rstrip(), bool(reply[stop:].strip()))


def find_labels(text: str) -> list[Label]:
    """The labels not quoted in a code fence or a heredoc, between one "start" and two "end"."""
    labels, position, bodies = [("start", 0, 0)], 0, (0, 0)  # of the heredocs of one line
    last_lines = {line[1]: line.start() for line in re.finditer(r"(?m)^\t*([\w-]+)$", text)}
    while token := TOKEN.search(text, position):
        kind, position, word = str(token.lastgroup), token.end(), token["heredoc"]
        if bodies[0] < token.start() < bodies[1]:
            continue
        if kind == "fence":
            closing = re.compile(rf"(?m)^[ \t]*{token['fence']}[`~]*[ \t]*$").search(text, position)
            position = closing.end() if closing else len(text)
        elif kind != "heredoc":
            labels.append((kind, token.start(), position))
        elif labels[-1][0] == "input" and last_lines.get(word, 0) > position:
            closing = re.compile(rf"(?m)^\t*{word}$").search(text, max(position, bodies[1]))
            bodies = (text.find("\n", position), closing.end() if closing else bodies[1])
    return [*labels, ("end", len(text), len(text)), ("end", len(text), len(text))]


# ──── Part I · 5 Skills: a line in the prompt, the instructions when they are asked for ──────
SKIP = re.compile(r"\.|(node_modules|scripts|assets|(readme|license|changelog)([-_.]\w\w)*\.md)$")
# What read_skill finds in a file; `place` is its folder's name, or a flat file's without .md.
Skill = NamedTuple("Skill", [("name", str), ("place", str), ("description", str), ("body", str),
                             ("path", Path)])


class Skills:
    """The skills in a folder; `problems` are lines for the user. Nothing here raises."""

    def __init__(self, skills_dir: Path, folder: Path | None = None) -> None:
        self.home = Path(os.path.realpath(skills_dir))
        self.folder = os.path.realpath(folder or ".")  # where commands run
        self.loaded: dict[str, str] = {}  # what the conversation holds already
        # Fixed from here on: if message 0 changed, the server's prefix cache would be lost.
        self.listed, self.problems = self.scan()

    def names(self) -> list[str]:
        return [skill.name for skill in self.listed]

    def catalogue(self) -> str:
        """Lines `- name: description`; "" without skills."""
        room = 8_000 // max(1, len(self.listed))  # characters: every request holds all of them
        return "\n".join(f"- {skill.name}: {skill.description[:room]}" for skill in self.listed)

    def load(self, request: str) -> str:
        """A skill's text, then our words (so it can't fake an end mark), or `[error: …]`."""
        skills, _ = self.scan()  # again: files may have been added, edited or deleted
        table = {skill_key(s.place): s for s in skills} | {skill_key(s.name): s for s in skills}
        key = skill_key(request[:500])
        if key not in table:  # the table is the only way to a file: a request is never a path
            nearest = difflib.get_close_matches(key, [s.name for s in skills], len(skills) or 1, 0)
            return f"[error: no skill is called {key!r}; the nearest first: {', '.join(nearest)}]"
        skill = table[key]
        folder = skill.path.parent
        shown = clean(os.path.relpath(folder, self.folder))
        names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if os.path.isfile(p))
        files = [clean(n) for n in names if folder != self.home and not re.search(r"(^|/)[._]", n)]
        note = f"[relative paths are relative to it; quote them; {len(files)} files: {files[:40]}]"
        answer = f"Skill: {skill.name}\n\n{skill.body}\n\nSkill directory: {shown}\n{note}"
        if self.loaded.get(skill.name) == answer:
            return f"[already loaded: {skill.name}, unchanged; its text stands above]"
        self.loaded[skill.name] = answer
        return answer

    def scan(self) -> tuple[list[Skill], list[str]]:
        """Skills and problems. Folders come before flat files; the first one keeps a name."""
        found: dict[str, Skill] = {}
        problems: list[str] = []
        for entry in sorted(self.home.glob("*"), key=lambda path: (os.path.isfile(path), path)):
            path = entry if os.path.isfile(entry) else entry / "SKILL.md"
            if path.suffix != ".md" or SKIP.match(entry.name.casefold()):
                continue
            faults = [f" {deep} is a level too deep" for deep in sorted(entry.glob("*/SKILL.md"))]
            try:
                skill = read_skill(path, faults)
                if (first := found.setdefault(skill_key(skill.name), skill)) is not skill:
                    faults.append(f" name taken by {first.path}")
            except (OSError, ValueError) as error:
                faults.append(f"{error} (a skill is skills/<name>/SKILL.md, saved as UTF-8)")
            problems += [clean(f"{path.relative_to(self.home.parent)}:{f}") for f in faults]
        return list(found.values()), problems


# ──── Part I · 6 Loop: think → parse → act, until there is an answer ─────────────────────────
class Result(NamedTuple):
    """How a turn ended: final, max_steps, repeated, refused, invalid, cut, interrupted, error."""

    status: str
    answer: str = ""
    steps: int = 0
    remark: str = ""


@dataclass
class Turn:
    """What the limits of one question are counted on."""

    step: int = 0
    action: tuple[str, str] = ("", "")  # the one before: tool and input
    repeats: int = 0  # of it, in a row
    refusals: int = 0  # in a row
    faults: list[str] = field(default_factory=list)  # of the invalid replies in a row


class Agent:
    """A conversation with a model that can act: `ask` runs a turn, `messages` is all it knows.

    `listeners` are called with each event and its data: the trace is one, it draws them.
    A new tool is one entry of `tools`: its name, a line for the prompt, and a function from the
    Action Input to the text of the observation."""

    def __init__(self, settings: Settings, model: OpenAIModel | ScriptedModel,
                 folder: Path | None = None, listeners: Iterable[Listener] = ()) -> None:
        self.settings, self.model, self.listeners = settings, model, list(listeners)
        self.texts: dict[str, str] = read_table("nudges.yaml")
        self.shell = Shell(settings, folder or Path.cwd())
        self.skills = Skills(settings.skills_dir, self.shell.folder)
        self.tools = {"run_command": (self.texts["run_command"], self.shell.run),
                      "load_skill": (self.texts["load_skill"], self.skills.load)}
        self.reset()

    def reset(self) -> None:
        """Starts a conversation afresh: only the system message stays."""
        self.form = (PROMPTS / "protocol-text.md").read_text("utf-8").strip()
        self.messages: list[Message] = []
        self.turn, self.ending = Turn(), ""  # how the last turn ended
        self.skills.loaded.clear()
        self.add("system", system_prompt(self))

    def ask(self, question: str) -> Result:
        """Runs one turn. Raises nothing: errors and Ctrl-C are statuses of the result."""
        self.turn = Turn()
        try:
            if self.messages[-1]["role"] == "user":  # the roles have to alternate
                self.add("assistant", f"[turn ended: {self.ending}]")
            self.add("user", question)
            result = self.run_turn()
        except Exception as error:  # a ModelError, or a fault in a model of your own
            result = Result("error", remark=str(error) or type(error).__name__)
        except KeyboardInterrupt:
            result = Result("interrupted", remark="stopped by Ctrl-C")
        result, self.ending = result._replace(steps=self.turn.step), result.status
        self.emit("result", **result._asdict())
        return result

    def run_turn(self) -> Result:
        """The loop itself."""
        for step in range(1, self.settings.max_steps + 1):
            self.turn.step = step
            parsed = self.parse(self.think())
            if isinstance(parsed, Final):
                hurried = step == self.settings.max_steps > 1  # see `add`
                return Result("max_steps" if hurried else "final", parsed.answer)
            ended = self.act(parsed) if isinstance(parsed, Action) else self.nudge(parsed)
            if ended:
                return ended
        return Result("max_steps", remark=f"no answer within {self.settings.max_steps} steps")

    def think(self) -> Reply:
        """One model call with all the messages; the reply streams to the listeners."""
        self.emit("request", step=self.turn.step, sent=self.messages)
        reply = self.model(self.messages, lambda text, dim: self.emit("text", text=text, dim=dim))
        self.emit("reply", step=self.turn.step, **reply._asdict())
        return reply

    def parse(self, reply: Reply) -> Parsed:
        """What the reply says. What it invented after that stays out of the messages."""
        parsed = parse_reply(reply.text)
        parsed = Invalid("cut", parsed.text) if reply.cut else parsed
        self.add("assistant", parsed.text.strip() or "(empty reply)")
        self.emit("parsed", step=self.turn.step, kind=type(parsed).__name__, **parsed._asdict())
        return parsed

    def act(self, action: Action) -> Result | None:
        """Runs a tool and adds its observation. Returns a result where a limit ends the turn."""
        turn, said = self.turn, (action.tool, action.input)
        turn.faults.clear()
        turn.action, turn.repeats = said, turn.repeats + 1 if said == turn.action else 1
        if turn.step == self.settings.max_steps or turn.repeats == 5:
            self.observe(action, "[not run: no step is left for it]")
            return Result("repeated", remark="five times the same") if turn.repeats == 5 else None
        output = self.use_tool(action)
        notes = ["repeat"] * (turn.repeats >= 3) + ["ignored"] * action.ignored
        self.observe(action, "\n".join([output, *(self.texts[name] for name in notes)]))
        refused = self.shell.refusal and output.startswith("[refused:")
        turn.refusals = turn.refusals + 1 if refused else 0
        return Result("refused", remark="three refusals in a row") if turn.refusals == 3 else None

    def use_tool(self, action: Action) -> str:
        """The tool's output; whatever goes wrong becomes a text that the model can act on."""
        if action.tool not in self.tools:
            return f"[error: no tool is called {action.tool}; the tools: {', '.join(self.tools)}]"
        try:
            return str(self.tools[action.tool][1](action.input))
        except KeyboardInterrupt as interrupt:
            self.observe(action, f"{interrupt}\n[interrupted by the user]")
            raise
        except Exception as error:
            return f"[error: {type(error).__name__}: {error}]"

    def nudge(self, invalid: Invalid) -> Result | None:
        """Says what was wrong with a reply. Returns a result where that was said often enough."""
        self.turn.faults.append(invalid.reason)
        faults, last = self.turn.faults, self.turn.step == self.settings.max_steps
        if invalid.reason == "no label" and (last or faults[-2:-1] == ["no label"]):
            status = "max_steps" if last else "final"
            return Result(status, invalid.text.removeprefix("Thought: "), remark="prose, no label")
        if len(faults) == 3 or [fault in ("empty", "cut") for fault in faults[-2:]] == [True, True]:
            status = "cut" if invalid.reason == "cut" else "invalid"
            return Result(status, remark=f"no usable reply: {', '.join(faults)}")
        self.add("user", fill(self.texts[invalid.reason], form=self.form))
        return None

    def observe(self, action: Action, output: str) -> None:
        """Adds what a tool returned, below the command that it belongs to."""
        command = f"$ {action.input}\n" if action.tool == "run_command" else ""
        self.add("user", f"Observation: {command}{output}")
        self.emit("observation", step=self.turn.step, text=self.messages[-1]["content"])

    def add(self, role: str, content: str) -> None:
        """The only way in: clean, without a key, never empty; asks for an answer in good time."""
        if role == "user" and 0 < self.turn.step == self.settings.max_steps - 1:
            content += f"\n{self.texts['last_step']}"
        content = self.settings.redact(content).strip() or "(empty)"
        self.messages.append({"role": role, "content": content})

    def emit(self, event: str, **data: Any) -> None:
        for listener in self.listeners:
            listener(event, data)


# ──── Part I · 7 Trace: what a person sees ───────────────────────────────────────────────────
Listener = Callable[[str, dict[str, Any]], None]
STATES = {"Action": "executing", "Final": "responding", "Invalid": "thinking"}  # article 001, 4.3
COLOURS = {"question": Fore.GREEN, "action": Fore.YELLOW, "observation": Fore.CYAN,
           "error": Fore.RED, "answer": Fore.WHITE, "dim": Style.DIM}  # article 001, 5.2


def paint(out: TextIO, kind: str, text: str) -> str:
    """Coloured text where a person looks and has not asked for none (no-color.org)."""
    plain = not out.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if plain or not kind else f"{COLOURS[kind]}{text}{Style.RESET_ALL}"


class Trace:
    """Draws the events of an agent: per step what was sent, replied, parsed and observed.

    Mode `full`: every message of each request, those shown before dimmed, or in a line where
    nothing can be dimmed, unless `again`; `new`: those always in a line; `off`: nothing."""

    def __init__(self, mode: str, out: TextIO, title: str, again: bool = False) -> None:
        self.mode, self.out, self.title = mode, out, title
        self.again = mode == "full" and (again or paint(out, "dim", "") != "")
        self.shown: set[str] = set()
        self.usages: list[dict[str, int] | None] = []

    def __call__(self, event: str, data: dict[str, Any]) -> None:
        if self.mode != "off" and hasattr(self, f"on_{event}"):
            getattr(self, f"on_{event}")(**data)

    def say(self, text: str, kind: str = "", end: str = "\n") -> None:
        print(paint(self.out, kind, text), end=end, file=self.out, flush=True)

    def rule(self, step: int, block: str, state: str, remark: str = "") -> None:
        """The line above a block: the step, the block, and the state of article 001."""
        dash = "─" if self.out.encoding.lower().startswith("utf") else "-"
        self.say(f"{dash * 2} step {step}: {block} ({state}){remark} ".ljust(80, dash), "dim")

    def on_request(self, step: int, sent: list[Message]) -> None:
        self.rule(step, "sent", "thinking", f" {len(sent)} messages")
        for number, m in enumerate(sent):
            text = m["content"]
            kind = "dim" if text in self.shown else "question" if step < 2 and m is sent[-1] else ""
            body = ", as before" if kind == "dim" and not self.again else f"\n{text}"
            self.say(f"[{number}] {m['role']}, {len(text):,} characters{body}", kind)
            self.shown.add(text)
        self.rule(step, "reply", "thinking", f" {self.title}")

    def on_text(self, text: str, dim: bool) -> None:
        self.say(text, "dim" if dim else "", end="")

    def on_reply(self, usage: dict[str, int] | None, **_: Any) -> None:
        self.usages.append(usage)
        self.say(f"\n[tokens: {count_usage([usage])}]", "dim")

    def on_parsed(self, step: int, kind: str, **parts: Any) -> None:
        self.rule(step, "parsed", STATES[kind], f" {kind}")
        said = [f"{n}: {parts[n]}" for n in ("tool", "input", "reason", "answer") if n in parts]
        dropped = ["what came after it is ignored"] if parts.get("ignored") else []
        self.say("\n".join([*said, *dropped]), "error" if "reason" in parts else "action")

    def on_observation(self, step: int, text: str) -> None:
        self.rule(step, "observation", "observing")
        self.say(text, "observation")

    def on_result(self, status: str, steps: int, remark: str, **_: Any) -> None:
        remark = f", {remark}" if remark else ""
        self.say(f"[{status}: {steps} steps, tokens {count_usage(self.usages)}{remark}]", "dim")
        self.usages = []


# ──── Part II · 8 Guard and sandbox: a seat belt and a fence ─────────────────────────────────
# What stands in quotes is made inert: each special character becomes a private twin, so that the
# plain patterns of prompts/guard.yaml see only what would act.
TWINS = {ord(char): 0xE000 + ord(char) for char in " \t\n;&|<>()#'\"\\`$*?~"}
UNTWIN = {twin: char for char, twin in TWINS.items()} | {0xE000: "''"}  # E000: an empty word
# Why a command isn't run, and what to do instead; `rule` is the family of the rule.
Refusal = NamedTuple("Refusal", [("rule", str), ("reason", str), ("safer", str)])


def guard(command: str, folder: Path | str) -> Refusal | None:
    """Refuses a command that would do harm; None lets it pass. Runs nothing, never raises."""
    try:
        return judge(command, os.path.abspath(folder))
    except Exception:  # what can't be read isn't run
        return Refusal("unreadable", "this is too long or too tangled to check", "write it simpler")


@functools.cache
def compiled(text: str) -> re.Pattern[str]:
    """A pattern of guard.yaml, each <name> in it replaced by the pattern of that name."""
    names = read_table("guard.yaml")["names"]
    return re.compile(re.sub(r"<(\w+)>", lambda name: compiled(names[name[1]]).pattern, text))


def judge(command: str, folder: str) -> Refusal | None:
    """Holds a command, and every script found inside it, against the rules."""
    rules = read_table("guard.yaml")["rules"]
    scripts = [command]
    for script in scripts:  # grows while it is read
        text = compiled("<heredoc>").sub(r"\1 \4\n\5", script)
        if len(text) > 16_000 or len(scripts) > 200:  # beyond a quick look
            raise ValueError("too long, or too many scripts inside scripts")
        for (program, words, places), row in itertools.product(commands_in(text, folder), rules):
            if not compiled(row["program"]).fullmatch(program):
                continue
            if "inside" in row:
                readable = words.replace(" ", "\0").translate(UNTWIN)
                found = compiled(row["inside"]).finditer(readable)
                scripts += [match.expand(row["script"]) for match in found]
                continue
            searched = (("arguments", words), ("path", places))
            fits = all(compiled(row.get(key, "")).search(text) for key, text in searched)
            if fits and not compiled(row.get("unless", "(?!)")).search(words):
                return Refusal(row["rule"], row["reason"], row["safer"])
    return None


def inert(match: re.Match[str]) -> str:
    """A comment as nothing; quoted text, a substitution or a heredoc as one word without effect."""
    whole = match[0]
    if whole[0] == '"':  # variables and substitutions stay active
        return compiled("<active>").sub(inert, whole[1:-1]).translate(TWINS | {ord("$"): "$"})
    if whole[0] in "$<>`":
        return "\ue001" + whole.translate(TWINS)
    return "" if whole[0] == "#" else whole.strip("\\'").translate(TWINS)


def commands_in(text: str, folder: str) -> Iterator[tuple[str, str, str]]:
    """(program, arguments, places of the operands): the script as one, its commands, redirects."""
    for pattern, replacement in read_table("guard.yaml")["reading"]:
        text = compiled(pattern).sub(replacement or inert, text)
    yield "script", text, ""
    here = "."
    for part in compiled("<separator>").split(compiled("<redirect>").sub(r"\3\n\1 \2\n", text)):
        program, *words = compiled("<prefix>").sub("", part).split() or [""]
        if program in ("cd", "pushd"):
            here = place_of(words[0] if words else "~", here, folder)
        operands = [place_of(word, here, folder) for word in words if word[0] != "-"]
        yield program, " ".join(words), " ".join(operands)


def place_of(word: str, here: str, folder: str) -> str:
    """Where a word points, as the rules write it: `~/x`, `./x`, `..` (above), `/etc/x`."""
    home = os.path.expanduser("~")
    word = os.path.join(here, compiled("<label>").sub("", word))
    word = os.path.join(folder, re.sub(r"^(?:.*/)?~(?=/|$)", lambda _: home, word))
    path = compiled("<everything>").sub("", "/" + os.path.normpath(word).lstrip("/")) or "/"
    path = re.sub(f"^{re.escape(folder)}(?=/|$)", ".", path)
    path = re.sub(f"^{re.escape(home)}(?=/|$)", "~", path)
    return ".." if folder.startswith(path + "/") else path


def sandbox_prefix(settings: Settings, folder: Path) -> tuple[list[str], str]:
    """Words to put before `bash -c …`, and a line for the screen where there are none.

    Covered: outside `folder` nothing can be changed; home, /tmp, /run, `.env` and other processes
    can't be seen; no network unless `settings.network`. Not covered: `folder` itself.
    ConfigError: `settings.sandbox` is "bwrap" and it can't be had."""
    prefix, problem = bwrap_command(settings.network, folder), ""
    if settings.sandbox == "off":
        return [], "sandbox off: commands can change all that you can"
    if Path(os.path.expanduser("~")).resolve().is_relative_to(folder):
        problem = "the working folder is your home folder or holds it; use a folder of its own"
    elif not shutil.which("bwrap"):
        problem = "bubblewrap is not installed (Linux: apt, dnf or pacman install bubblewrap)"
    else:
        done = subprocess.run([*prefix, "sh", "-c", ":"], capture_output=True, errors="replace")
        problem = clean(done.stderr).strip() + " (see the README)" if done.returncode else ""
    if problem and settings.sandbox == "bwrap":
        raise ConfigError(f"--sandbox bwrap: {problem}")
    return ([], f"sandbox off: {problem}") if problem else (prefix, "")


def bwrap_command(network: bool, folder: Path) -> list[str]:
    """bubblewrap and its arguments; a later mount lies over the earlier ones."""
    home = Path(os.path.expanduser("~")).resolve()
    hidden = [path for path in (Path("/tmp"), Path("/run"), home) if path.is_dir() and path.name]
    # Single files of git, since its folder ~/.config/git may hold a `credentials` file.
    needed = [home / name for name in (".gitconfig", ".config/git/config", ".config/git/ignore")]
    needed += [ROOT, Path(sys.prefix), Path(sys.base_prefix), *map(Path, os.get_exec_path())]
    needed += [Path("/etc/resolv.conf").resolve()] if network else []
    shown = [p for p in needed if any(top in p.parents for top in hidden) and os.path.exists(p)]
    # Else root could undo the mounts, and a background child would outlive its shell.
    words = ["bwrap", "--unshare-all", "--cap-drop", "ALL", "--die-with-parent"]
    words += ["--share-net"] if network else []
    words += ["--unsetenv", "TMPDIR", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
    words += [word for path in hidden for word in ("--tmpfs", str(path))]
    words += [word for path in shown for word in ("--ro-bind", str(path), str(path))]
    # A version manager's `python3` is a script that looks for the rest of it below home.
    words += ["--setenv", "PATH", os.pathsep.join([f"{sys.prefix}/bin", *os.get_exec_path()])]
    words += ["--bind", str(folder), str(folder), "--chdir", str(folder)]
    for secret in {ROOT / ".env", (folder / ".env").resolve()}:
        words += ["--ro-bind", "/dev/null", str(secret)] if secret.is_file() else []
    log = (folder / ".agent").resolve()
    return words + (["--tmpfs", str(log)] if log.is_dir() else [])


# ──── Part II · 9 Edges: prompts, replies, outputs, skill files as they come in real life ────
KEEP = 65_536  # characters kept of either end of an output, before escapes go
FRONTMATTER = re.compile(r"\A(\s*^---[ \t]*\n.*?)^---[ \t]*(?:\n|\Z)(.*)", re.S | re.M)
FIELD = re.compile(r"(?m)^([\w-]+)[ \t]*[:：](?:\s*[>|]-?\n)?(.*(?:\n(?![\w-]+[ \t]*[:：]).*)*)")
BLOCK = re.compile(r"(?sm)(`{3,}|~{3,})(?:[^`\n]*\n(.*?)^[ \t]*\1[`~]*[ \t]*$|([^`\n]+)\1)(.*)\Z")
WRAP = re.compile(r"""^(\w*(skill|name|input)['" ]*[:=(][^\w.]*)*(\./)?(skills/)?|(/skill)?\.md$""")


def clean(text: str) -> str:
    """Valid UTF-8 without terminal escapes; of the control characters newline and tab stay."""
    text = text.encode("utf-8", "replace").decode("utf-8").replace("\r\n", "\n")
    text = re.sub(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|[@-Z\\^_])", "", text)
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "", text)


@functools.cache
def read_table(name: str) -> Any:
    """The content of prompts/<name>, a YAML file."""
    return yaml.safe_load((PROMPTS / name).read_text("utf-8"))


def fill(template: str, **values: str) -> str:
    """Puts values in for {names}; a paragraph with an empty value is left out."""
    slot, paragraphs = re.compile(r"\{([a-z_]+)\}"), template.strip().split("\n\n")
    kept = [p for p in paragraphs if all(values.get(name, "?") for name in slot.findall(p))]
    return slot.sub(lambda found: values.get(found[1], found[0]), "\n\n".join(kept))


def read_chunk(chunk: Any) -> Reply:
    """What a chunk adds. Each `or` stands for a server that sends null or an empty list."""
    choice = ((chunk or {}).get("choices") or [{}])[0] or {}
    delta = choice.get("delta") or choice.get("message") or {}
    content = delta.get("content") or ""
    if isinstance(content, list):
        content = "".join(part.get("text") or "" for part in content)
    reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
    told = (chunk or {}).get("usage") or {}
    usage = {name: number for name, number in told.items() if isinstance(number, int)}
    return Reply(str(content), str(reasoning), choice.get("finish_reason") or "", usage or None)


def read_plain(text: str) -> Reply:
    """The reply in a body that isn't a stream. ValueError with the text: it holds none."""
    body = json.loads(text)
    if not isinstance(body, dict) or not body.get("choices"):
        raise ValueError(text)
    reply = read_chunk(body)
    return reply._replace(finish=reply.finish or "stop")


def unwrap(text: str) -> str:
    """The reply without what stands around it: reasoning, a code fence, server tokens."""
    text = text.replace("\r\n", "\n").strip("\ufeff \t\n\u3000")
    text = re.sub(r"\A<(think|thinking)>.*?(?:</\1>|\Z)", "", text, flags=re.I | re.S).strip()
    closed = max((tag.end() for tag in re.finditer(r"</think(?:ing)?>", text, re.I)), default=0)
    if closed and "<think" not in text[:closed].lower() and len(find_labels(text[closed:])) > 3:
        text = text[closed:].strip()
    text = text[:-200] + re.sub(r"(?:<\|\w{1,40}\|>\s*)+\Z", "", text[-200:])
    packed = re.match(r"(?:```|~~~)[^`\n]*\n(?:[^\S\n]*\n)*", text)
    if packed and (label := TOKEN.match(text, packed.end())) and label.lastgroup != "fence":
        text = text[packed.end():]
        fences = list(FENCE.finditer(text))
        text = text[: fences[-1].start()] if len(fences) % 2 else text
    return text.strip()


def clean_input(value: str) -> str:
    """The bare input; "" where it is cut off, invalid or more than one block."""
    if FENCE.match(value):
        block = BLOCK.match(value)
        value = (block[2] or block[3]).strip("\n") if block and not FENCE.search(block[4]) else ""
    if re.match(r"\{\s*[\"']", value):
        with contextlib.suppress(ValueError, AttributeError, RecursionError):
            found = map(json.loads(value).get, ("command", "cmd", "skill", "name", "input"))
            return next((text for text in found if isinstance(text, str)), "")
        return ""
    quoted = re.fullmatch(r"""(?s)(["'`])((?:(?!\1).)*)\1""", value)
    return quoted[2].strip() if quoted else value


def system_prompt(agent: Agent) -> str:
    """prompts/system.md filled with what holds here; a paragraph without a value is left out."""
    settings, shell, name = agent.settings, agent.shell, getattr(agent.model, "name", "own")
    return fill(
        (PROMPTS / "system.md").read_text("utf-8"), model=name, form=agent.form,
        tools="\n".join(f"- {name}: {text}" for name, (text, _) in agent.tools.items()),
        shell=shell.name, folder=str(shell.folder), timeout=f"{settings.timeout:g}",
        limit=f"{settings.observation_limit:,}", fence="bubblewrap" if shell.prefix else "",
        open="" if shell.prefix else "no sandbox", skills=agent.skills.catalogue())


def count_usage(usages: list[dict[str, int] | None]) -> str:
    """Tokens in and out as the server told them; `n/a` where it left one out."""
    told = [usage for usage in usages if usage]
    sums = [sum(u.get(f"{name}_tokens", 0) for u in told) for name in ("prompt", "completion")]
    return "{:,} in, {:,} out".format(*sums) if len(told) == len(usages) > 0 else "n/a"


def exit_note(code: int) -> str:
    """`[exit code 1]`, `[exit code 137: killed by SIGKILL]`, or nothing for 0."""
    # Python says -9, a shell 128 + 9 for a child of its own; 129 is git's code for a usage error.
    status = code if code >= 0 else 128 - code
    signals = {128 + s: f": killed by {s.name}" for s in signal.Signals if code < 0 or s > 1}
    return f"[exit code {status}{signals.get(status, '')}]" if status else ""


class Output:
    """What a command prints, in flat memory: both ends are kept, what lies between is counted."""

    text = ""
    dropped = 0  # characters between text[:KEEP] and text[KEEP:]

    def drain(self, pipe: IO[bytes]) -> None:
        chunks = iter(lambda: pipe.read(65_536), b"")
        for chunk in codecs.iterdecode(chunks, "utf-8", "replace"):
            text = self.text + chunk
            surplus = max(len(text) - 2 * KEEP, 0)
            self.dropped += surplus
            self.text = text[:KEEP] + text[KEEP + surplus :]

    def shorten(self, room: int, redact: Callable[[str], str]) -> str:
        """At most `room` characters, cleaned, with the number of those left out in the middle."""
        text = self.text.rstrip("\n")
        ends = [text[:KEEP], text[KEEP:]] if self.dropped else [text]
        # After a lone carriage return a terminal writes the line anew.
        ends = [redact(re.sub(r"(?m)^[^\n]*\r(?=[^\r\n])", "", end)) for end in ends]
        size = self.dropped + sum(map(len, ends))
        if size <= room:
            return "".join(ends) or "(no output)"
        half = max(room - 50, 2) // 2
        head, tail = ends[0][:half], ends[-1][-half:]
        return f"{head}\n[… {size - len(head) - len(tail)} characters left out …]\n{tail}"


def skill_key(text: str) -> str:
    """What a name and the requests for it have in common: `Code_Review.md` -> code-review."""
    text = unicodedata.normalize("NFKC", clean(text)).casefold().strip("\"'`“”‘’<>[](){}*$/。 \n")
    return re.sub(r"[\s_‐‑]+", "-", WRAP.sub("", text))


def read_skill(path: Path, faults: list[str]) -> Skill:
    """A file's skill; `faults` gets what it survives. Errors: OSError, ValueError("line: why")."""
    head, body = (FRONTMATTER.findall(path.read_text(encoding="utf-8-sig")) or [("", "")])[0]
    try:
        fields = dict(yaml.load(head, yaml.BaseLoader) or {})  # only strings: a name may be `yes`
    except Exception as error:  # PyYAML lets more through than its own: OverflowError, …
        marks = [getattr(error, key, None) for key in ("context_mark", "problem_mark")]
        line = min((mark.line for mark in marks if mark and mark.line > 1), default=1) + 1
        faults.append(f"{line}: not valid YAML; put the value in quotes")
        fields = {key: value.strip(" \t\n\"'") for key, value in FIELD.findall(head)}
    name = str(fields.get("name", "")).strip()
    place = " ".join(clean(path.parent.name if path.name == "SKILL.md" else path.stem).split())
    description = " ".join(clean(str(fields.get("description", ""))).split())
    if not description:
        line = re.split("^description", head, flags=re.M)[0].count("\n") + 1
        raise ValueError(f"{line}: no description in a frontmatter between two lines of just ---")
    if name != place or not re.fullmatch(r"(?!.{65})[^\W_A-Z]+(-[^\W_A-Z]+)*", name):
        faults.append(f" name {name!r} is not the folder's in a-z, 0-9, -")
    for what, text, limit in (("description", description, 1024), ("body", body, 20_000)):
        if len(text) > limit:
            faults.append(f" {what} of {len(text)} characters, more than {limit}")
    usable = name.isprintable() and not re.search(r"[/\\]|\.\.|^$", name)  # unlike any path
    return Skill(name if usable else place, place, description[:1024], clean(body).strip(), path)


# ──── Part II · 10 Command line ──────────────────────────────────────────────────────────────
# The prefix of a pair of variables, and the address and the model where none are set.
PROVIDERS = {"DEEPSEEK": ("https://api.deepseek.com", "deepseek-v4-flash"),
             "OPENAI": ("https://api.openai.com/v1", "")}
PLACEHOLDER = re.compile(r"(sk-)?(your|xxx|<|…|\.\.\.)", re.IGNORECASE)


def configure(flags: argparse.Namespace) -> tuple[Settings, dict[str, str]]:
    """Settings and where each came from: flag > environment > .env > default. ConfigError."""
    file = dotenv.dotenv_values(ROOT / ".env", interpolate=False, encoding="utf-8-sig")
    both = {n: str(t or "").strip("\"' \t\r\n") for n, t in (file | os.environ).items()}
    known = {name: text for name, text in both.items() if text and not PLACEHOLDER.match(text)}
    # The pair of variables whose address a flag asks for, else the one that is set higher up.
    urls = {n: urlsplit(known.get(f"{n}_BASE_URL", url)) for n, (url, _) in PROVIDERS.items()}
    asked = urlsplit(flags.base_url or "").netloc.lower().removesuffix(":443")
    pairs = [n for place in (os.environ, file) for n in PROVIDERS
             if {f"{n}_API_KEY", f"{n}_BASE_URL"} & known.keys() & place.keys()]
    matching = [n for n, url in urls.items() if url.netloc.lower() == asked]
    p = [*matching, "OPENAI"][0] if asked else [*pairs, "DEEPSEEK"][0]
    names = {"model": "MODEL", "base_url": f"{p}_BASE_URL", "api_key": f"{p}_API_KEY"}
    found = {field: known[name] for field, name in names.items() if name in known}
    origins = {field: "environment" if names[field] in os.environ else ".env" for field in found}
    given = {s.name: v for s in fields(Settings) if (v := getattr(flags, s.name, None)) is not None}
    keys = tuple(key for name in PROVIDERS if len(key := known.get(f"{name}_API_KEY", "")) >= 12)
    chosen = Settings(**{**found, **given, "secrets": keys})
    if chosen.max_steps < 1 or not 0 < chosen.timeout < 1e6 or not os.path.isdir(chosen.skills_dir):
        raise ConfigError("--max-steps and --timeout must be above 0, --skills a folder")
    online = chosen.api_key or chosen.base_url or flags.model
    return complete(chosen, p) if online else chosen, origins | dict.fromkeys(given, "flag")


def complete(settings: Settings, provider: str) -> Settings:
    """The settings with address, key and model, or a ConfigError that says what is wrong."""
    key, url, model = settings.api_key, *PROVIDERS[provider]
    url, model = settings.base_url or url, settings.model or model
    local = urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")
    faults = {
        f"base URL {url!r} must start with http:// or https://": not re.match("(?i)https?://", url),
        f"base URL {url!r}: leave /chat/completions off": "/chat/completions" in url,
        f"{provider}_API_KEY is not set, in the environment or {ROOT / '.env'}": not (key or local),
        f"{provider}_API_KEY holds what no key has; copy it again": not re.fullmatch("[!-~]*", key),
        f"MODEL is not set: name the model that {url} is to use": not model,
    }
    if any(faults.values()):
        raise ConfigError(next(fault for fault, applies in faults.items() if applies))
    return replace(settings, base_url=url, api_key=key or "local", model=model)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; --help lists the flags")


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code. Only SystemExit of --help gets out."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        getattr(stream, "reconfigure", dict)(errors="replace")  # no crash on a GBK or ASCII screen
    parser = Parser("agent.py", description="An AI agent that you can read.", allow_abbrev=False)
    parser.register("type", "int", int)
    parser.register("type", "float", float)
    for names, options in read_table("help.yaml")["flags"].items():
        parser.add_argument(*names.split(), **options)
    try:
        return run(parser.parse_args(argv))
    except ConfigError as error:
        print(f"agent.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except OSError as error:  # the reader has gone, the disk is full, the folder is deleted
        print(f"agent.py: {error}", file=sys.stderr)
        # Without this, Python complains once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def run(flags: argparse.Namespace) -> int:
    try:
        settings, origins = configure(flags)
    except ValueError as error:
        raise ConfigError(f"a base URL is wrong, or .env is not UTF-8: {error}") from None
    if flags.show_config:
        for setting in fields(settings):
            value = getattr(settings, setting.name)
            value = "(set)" if value and not setting.repr else value
            print(clean(f"{setting.name:<18} {value!s:<44} {origins.get(setting.name, 'default')}"))
        return 0
    question = " ".join(flags.question).strip()
    piped = not (question or flags.demo or sys.stdin.isatty())
    if piped and not (question := sys.stdin.read().strip()):
        raise ConfigError("no question: give one as an argument or on standard input")
    model = OpenAIModel(settings) if settings.base_url else ScriptedModel([])
    trace = Trace(settings.trace, sys.stderr, model.name, again=flags.trace == "full")
    agent = Agent(settings, model, listeners=[trace])
    offline = [] if settings.base_url else [read_table("demo.yaml")["offline"][settings.lang]]
    for notice in filter(None, [*offline, agent.shell.notice, *agent.skills.problems]):
        trace.say(notice, "action")
    if not flags.demo:
        return answer(agent, question) if question else converse(agent)
    codes: list[int] = []
    for demo in read_table("demo.yaml")["questions"]:
        print(end="\n" if codes else "", flush=True)
        agent.reset()
        codes.append(answer(agent, demo[settings.lang]))
    return max(codes)


def answer(agent: Agent, question: str) -> int:
    """One turn; the answer alone goes to stdout. Returns the exit code."""
    if isinstance(agent.model, ScriptedModel):
        agent.model = ScriptedModel(demo_replies(question, agent.settings.lang))
    result = agent.ask(question)
    if result.status != "final":
        line = f"{result.status}: {result.remark or 'the answer may be incomplete'}"
        print(paint(sys.stderr, "error", line), file=sys.stderr)
    if result.answer:
        print(paint(sys.stdout, "answer", result.answer), flush=True)
    return {"final": 0, "error": 1, "interrupted": 130}.get(result.status, 3)


def demo_replies(question: str, lang: str) -> list[str]:
    """The script's replies to a demo question in either language, else one that names them all."""
    demos = read_table("demo.yaml")["questions"]
    scripts = {demo[code]: demo["replies"][code] for demo in demos for code in ("en", "zh")}
    scripts |= {demo["id"]: demo["replies"][lang] for demo in demos}
    plain = {re.sub(r"\W", "", asked).casefold(): replies for asked, replies in scripts.items()}
    known = "\n".join(f"- {demo[lang]}" for demo in demos)
    unknown = fill(read_table("demo.yaml")["unknown"][lang], questions=known)
    return list(plain.get(re.sub(r"\W", "", question).casefold(), [unknown]))


def converse(agent: Agent) -> int:
    """The conversation at a terminal: Ctrl-C ends a turn, Ctrl-D the program."""
    with contextlib.suppress(ImportError):  # Python can be built without it
        import readline  # noqa: F401
    print(clean(f"Glassbox, {agent.model.name}, {agent.shell.folder}. /help lists the commands."))
    pending: list[str] = []
    while True:
        try:
            text = read_question(pending)
            if name := re.fullmatch(r"[/:](\w*)(?:\s.*)?", text):
                print(command(agent, name[1]))
            elif text:
                answer(agent, text)
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print()


def read_question(pending: list[str]) -> str:
    """The next question or command: a line, a pasted block, or what stands between \"\"\" lines."""
    if not pending:
        pending.append(input("you> "))
        with contextlib.suppress(EOFError):
            while select.select([sys.stdin], [], [], 0.05)[0]:
                pending.append(input())
    lines = [pending.pop(0)]
    while lines[0].startswith('\"\"\"') and "\n".join(lines).count('\"\"\"') < 2:
        lines.append(pending.pop(0) if pending else input("...> "))
    while pending and not {lines[0][:1], pending[0][:1]} & {"/", ":"}:
        lines.append(pending.pop(0))
    return "\n".join(lines).strip().removeprefix('\"\"\"').removesuffix('\"\"\"').strip()


def command(agent: Agent, name: str) -> str:
    """Does a /command (or :command) and returns what it has to say."""
    if name in ("quit", "exit"):
        raise EOFError
    if name == "new":
        agent.reset()
    size = sum(len(message["content"]) for message in agent.messages)
    sent = [f"[{n}] {each['role']}\n{each['content']}" for n, each in enumerate(agent.messages)]
    said = {
        "help": str(read_table("help.yaml")["commands"]),
        "new": "a new conversation",
        "skills": agent.skills.catalogue() or "no skills",
        "prompt": agent.messages[0]["content"],
        "messages": "\n\n".join(sent),
        "status": f"{agent.model.name} in {agent.shell.folder}, {len(sent)} messages, {size} chars",
    }
    return said.get(name, f"no command is called /{name}; the commands:\n{said['help']}")


if __name__ == "__main__":
    sys.exit(main())
