"""Glassbox: a whole AI agent that you can read.

One loop, one protocol, one tool; everything else is a skill.

    question ──▶ messages ──▶ model ──▶ reply ──▶ parse ──┬──▶ Final Answer ──▶ you
                    ▲                                     └──▶ Action ──▶ tool ─┐
                    └──────────────── observation ◀─────────────────────────────┘

    uv run agent.py --demo          four questions, no key needed: a scripted model, real commands
    uv run agent.py "question"      one question; the trace goes to stderr, the answer to stdout
    uv run agent.py                 a conversation (/help lists its commands)

Part I, what it is: 1 Settings · 2 Model · 3 Shell · 4 Protocol · 5 Skills · 6 Loop · 7 Trace
Part II, the rest: 8 Guard and sandbox · 9 Memory · 10 Variants · 11 Edges · 12 Command line
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import datetime
import functools
import hashlib
import itertools
import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import threading
import unicodedata
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple, TextIO
from urllib.parse import urlsplit

import dotenv
import yaml
from colorama import Fore, Style

# ──── Part I · 1 Settings ────────────────────────────────────────────────────────────────────
ROOT = Path(__file__).resolve().parent
PROMPTS = ROOT / "prompts"


@functools.cache
def read_table(name: str) -> Any:
    return yaml.safe_load((PROMPTS / name).read_text("utf-8"))


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
    context_window: int = 32_768  # tokens; 0 = unknown: no automatic compaction
    protocol: str = "text"  # text | xml | json
    ablations: tuple[str, ...] = ()  # what is taken away: tools, history, …
    sandbox: str = "auto"  # auto | bwrap | off
    network: bool = False  # may a sandboxed command use it
    trace: str = "full"  # full | new | off
    lang: str = "zh" if os.environ.get("LANG", "").startswith("zh") else "en"  # of the demo

    def redact(self, text: str) -> str:
        """The text cleaned (see `clean`), each known key of 12 characters or more as `[key]`."""
        keys = [k for k in sorted({*self.secrets, self.api_key}, key=len)[::-1] if len(k) >= 12]
        return functools.reduce(lambda t, key: t.replace(key, "[key]"), keys, clean(text))


# ──── Part I · 2 Model: messages in, a reply out; only this section knows of the network ─────
Message = dict[str, str]  # role (system, user, assistant), content; in memory its kind too
CUT = ("", "length", "content_filter", "insufficient_system_resource")  # nothing in it runs then


class Reply(NamedTuple):
    """What the model said, perhaps only the beginning of it."""
    text: str
    reasoning: str = ""
    finish: str = "stop"  # "" = the stream ended without a reason
    usage: dict[str, Any] | None = None  # prompt_tokens, completion_tokens … if the server tells


class ModelError(Exception):
    """No usable reply: one line that says what to do."""


class Overflow(ModelError):
    """The conversation has outgrown the model's context window."""


class OpenAIModel:
    """Any server that speaks OpenAI's chat protocol. Every failure is a ModelError."""
    def __init__(self, settings: Settings) -> None:
        self.settings, self.name = settings, settings.model
        self.client: Any = None
        stop = {"stop": settings.stop} if settings.stop and "stop" not in settings.ablations else {}
        # 0: the same question gets the same reply, as far as the server can.
        self.options = {"temperature": 0.0, "stream_options": {"include_usage": True}, **stop}

    def __call__(self, messages: list[Message], on_text: Callable[[str, bool], None]) -> Reply:
        """Asks once; `on_text` sees each piece as it comes, and whether it is reasoning."""
        redact, safe, shown = self.settings.redact, "", 0
        # Closed on Ctrl-C too, so that the server stops writing.
        with contextlib.closing(self.stream(messages)) as replies:
            for reply in replies:
                safe = redact(reply.reasoning + reply.text)
                # What could be the beginning of a key waits until it is clear that it isn't.
                end = max(shown, len(safe) - max(map(len, self.settings.secrets), default=0))
                on_text(safe[shown:end], shown < len(reply.reasoning))
                shown = end
        on_text(safe[shown:], False)
        return reply._replace(text=redact(reply.text), reasoning=redact(reply.reasoning))

    def stream(self, messages: list[Message]) -> Generator[Reply, None, None]:
        """The reply as it grows, until it ends or the connection breaks."""
        import openai  # here, because it takes a second, and offline none of it is used
        # Seconds that a server may ask us to wait; what is longer is reported.
        vars(openai._base_client)["MAX_RETRY_AFTER_DELAY"] = 60
        settings, start, plain = self.settings, Reply("", finish=""), None
        limits, url = openai.Timeout(settings.read_timeout, connect=10), settings.base_url
        # Empty, else the SDK would send OpenAI's from the environment to any server.
        who: Any = {"api_key": settings.api_key or "local", "organization": "", "project": ""}
        try:
            self.client = self.client or openai.OpenAI(base_url=url, timeout=limits, **who)
            chunks = self.client.post(
                "/chat/completions", cast_to=object, stream=True, stream_cls=openai.Stream[object],
                body={"model": self.name, "messages": messages, "stream": True, **self.options})
            with chunks, contextlib.suppress(openai.APIConnectionError):
                # By its type, since the SDK takes a page of HTML for a stream of nothing.
                if "event-stream" not in chunks.response.headers.get("content-type", "").lower():
                    plain = json.loads(chunks.response.read().decode("utf-8-sig", "replace"))
                    chunks, start = [plain], Reply("", finish="stop" if plain["choices"] else "")
                for reply in itertools.accumulate(filter(None, chunks), grow, initial=start):
                    yield reply
            if not (reply.text or reply.reasoning or reply.finish):
                raise ValueError("the server's stream held no reply")
        except Exception as error:  # the SDK lets more through than its own errors
            refused = self.options.keys() & re.findall(r"\w+", str(getattr(error, "body", "")))
            if not refused or getattr(error, "status_code", 0) not in (400, 422):
                raise self.explain(error, plain) from None
            del self.options[refused.pop()]  # from now on
            yield from self.stream(messages)

    def explain(self, err: Exception, plain: Any) -> ModelError:
        """What to do about an error, and at most 500 characters of what the server said."""
        said = getattr(err, "body", "") or getattr(err, "doc", "") or plain or err.__cause__ or err
        line = self.settings.redact(f"{getattr(err, 'status_code', '')} {said}")
        line, hints = " ".join(line.split()), read_table("help.yaml")["hints"]
        kind = next(kind for kind, (sign, _) in hints.items() if re.search(sign, line))
        return (Overflow if kind == 413 else ModelError)(f"{hints[kind][1]} ({line[:500]})")


class ScriptedModel:
    """Plays a list of replies, offline and in tests. `seen`: the messages of each call."""
    name = "scripted model"

    def __init__(self, replies: list[str]) -> None:
        self.replies, self.seen = replies, list[list[Message]]()

    def __call__(self, messages: list[Message], on_text: Callable[[str, bool], None]) -> Reply:
        """The next reply; {output} in it is the last observation without our notes."""
        self.seen.append([dict(message) for message in messages])
        output = re.sub(r"(?m)\AObservation: (\$ .*\n)?|^\[.*\]$\n?", "", messages[-1]["content"])
        reply = self.replies[len(self.seen) - 1].replace("{output}", output.strip())
        on_text(reply, False)
        return Reply(reply)


# ──── Part I · 3 Shell: a command goes in, the text that the model will read comes out ───────
class Shell:
    """Runs each command in a new shell. `prefix` fences it in (empty: no sandbox), `notice` is
    for the screen. ConfigError: a sandbox was demanded that can't be had."""
    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings, self.folder = settings, Path(folder).resolve()
        self.name = "sh" if subprocess.getstatusoutput("command -v bash")[0] else "bash"
        self.prefix, self.notice = sandbox_prefix(settings, self.folder)

    def run(self, command: str) -> str:
        """The observation; a failure is a text too. Ctrl-C kills what runs and raises on."""
        if refusal := guard(command, self.folder):
            return f"[refused: {refusal.reason}. Safer: {refusal.safer}]"
        output, stopped = Output(), None
        passed_on, fixed = read_table("sandbox.yaml")["environment"]
        env = {name: v for name, v in os.environ.items() if re.fullmatch(passed_on, name)} | fixed
        try:
            process = subprocess.Popen(  # its own session: no keys to read, one group to kill
                [*self.prefix, self.name, "-c", command], cwd=self.folder, stdin=subprocess.DEVNULL,
                env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
        except (OSError, ValueError) as error:  # no folder, no shell, a NUL, over 128 KiB, …
            return f"[error: the command could not be started (on Windows it needs WSL): {error}]"
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
# What a reply can be. `text` is the reply up to the end of its directive, `ignored` says that
# something came after it; `reason` is a key of prompts/nudges.yaml, and then `text` is all of it.
Final = NamedTuple("Final", [("answer", str), ("thought", str), ("text", str)])
Invalid = NamedTuple("Invalid", [("reason", str), ("text", str)])
Action = NamedTuple("Action", [("tool", str), ("input", str), ("thought", str), ("text", str),
                               ("ignored", bool)])
Parsed = Action | Final | Invalid

# What is looked for in a reply: `token` finds the labels, and the quotations that may hide some.
SEEK = {k: re.compile(v, re.M | re.I | re.X) for k, v in read_table("replies.yaml").items()}


def parse_reply(text: str) -> Parsed:
    """The first directive decides; nothing after it can change its kind. Pure, raises nothing."""
    reply = unwrap(text)
    labels = find_labels(reply)
    first = next((label for label in labels if label.lastgroup in ("action", "final")), None)
    if not first:
        return Invalid("no label" if reply else "empty", reply or text)
    thought = SEEK["thought"].sub("", reply[: first.start()]).strip()
    after = next(labels)
    called, value = reply[first.end() : after.start()].strip(), ""
    if first.lastgroup == "final":
        *_, end = after, *labels
        answer = reply[first.end() : end.start()].strip()
        return Final(answer, thought, reply) if called else Invalid("empty answer", reply)
    if after.lastgroup == "input":
        start, after = after.end(), next(labels)
        value = reply[start : after.start()].strip()
    elif call := SEEK["call"].match(called):  # the input stands behind the tool's name
        called, value = call.group(1, call.lastindex or 1)
    tool = re.split(r"\s", called, maxsplit=1)[0].strip("`\"'*[]()<>【】")
    if not tool or not value or "|" in called.split("\n")[0]:
        return Invalid("no input", reply)
    value, done = clean_input(value.strip()), reply[: after.start()].rstrip()
    ignored = after.lastgroup != "end"
    return Action(tool, value, thought, done, ignored) if value else Invalid("bad input", reply)


def find_labels(text: str) -> Iterator[re.Match[str]]:
    """The labels not quoted in a code fence or, within an input, in a heredoc; then an "end"."""
    kind, position, heredocs = "", 0, False
    while kind != "end":
        token: Any = SEEK["token"].search(text, position)
        kind, position = token.lastgroup, token.end()
        if kind == "heredoc" and heredocs:
            closing = re.compile(rf"(?m)^\t*{token[kind]}$").search(text, position)
            position = closing.end() if closing else position
            heredocs = bool(closing)  # what never closes has no body, and none follows it
        elif kind not in ("heredoc", "fence"):
            heredocs = kind == "input"
            yield token


# ──── Part I · 5 Skills: a line in the prompt, the instructions when they are asked for ──────
Skill = NamedTuple("Skill", [("name", str), ("description", str), ("body", str), ("path", Path)])


class Skills:
    """The skills in `skills_dir`; commands run in `folder`. `problems`: lines for the user."""
    def __init__(self, skills_dir: Path, folder: Path | None = None) -> None:
        self.home, self.folder = (Path(os.path.realpath(p)) for p in (skills_dir, folder or "."))
        self.loaded: dict[str, str] = {}  # what the conversation holds already
        # Fixed from here on: if message 0 changed, the server's prefix cache would be lost.
        self.listed = {skill.name: skill.description for skill in self.scan().values()}

    def names(self) -> list[str]:
        return list(self.listed)

    def catalogue(self) -> str:
        """Lines `- name: description`; "" without skills."""
        room = 8_000 // max(1, len(self.listed))  # characters: every request holds all of them
        return "\n".join(f"- {name}: {text[:room]}" for name, text in self.listed.items())

    def load(self, request: str) -> str:
        """A skill's text, then our words (so it can't fake an end mark), or `[error: …]`."""
        table, key = self.scan(), skill_key(request)  # files may be new, edited or deleted
        if not (skill := table.get(key)):  # the only way to a file: a request is never a path
            return f"[error: no skill is called {key!r}; the skills: {', '.join(table)}]"
        folder = skill.path.parent
        names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if os.path.isfile(p))
        files = [n for n in names if folder != self.home and not re.search(r"(^|/)[._]", n)]
        answer = fill(read_table("nudges.yaml")["skill"], **skill._asdict(), count=str(len(files)),
                      files=str(files[:40]), place=clean(os.path.relpath(folder, self.folder)))
        before, self.loaded[skill.name] = self.loaded.get(skill.name), answer
        return f"[already loaded: {skill.name}, see above]" if before == answer else answer

    def scan(self) -> dict[str, Skill]:
        """Keys (of names and paths) and skills, folders before flat files. Sets `problems`."""
        found, self.problems = dict[str, Skill](), list[str]()
        for entry in sorted(self.home.glob("*"), key=lambda path: (os.path.isfile(path), path)):
            path = entry if os.path.isfile(entry) else entry / "SKILL.md"
            if path.suffix != ".md" or SEEK["no skill"].match(entry.name):
                continue
            faults = [f" {deep} is a level too deep" for deep in sorted(entry.glob("*/SKILL.md"))]
            skill = read_skill(path, entry.name.removesuffix(".md"), faults)
            if skill.description and found.setdefault(skill_key(skill.name), skill) != skill:
                faults.append(f" name taken by {found[skill_key(skill.name)].path}")
            self.problems += [clean(f"{path.relative_to(self.home.parent)}:{f}") for f in faults]
        return {skill_key(str(s.path.relative_to(self.home))): s for s in found.values()} | found


# ──── Part I · 6 Loop: think → parse → act, until there is an answer ─────────────────────────
# The kinds of message, and the roles that a server knows: it has none for what a tool returns.
ROLES = {"question": "user", "observation": "user", "nudge": "user", "action": "assistant",
         "final": "assistant", "invalid": "assistant", "ending": "assistant"}


class Result(NamedTuple):
    """How a turn ended: final, max_steps, repeated, refused, invalid, cut, interrupted, error."""
    status: str
    answer: str = ""
    steps: int = 0
    remark: str = ""


class Agent:
    """A conversation with a model that can act: `ask` runs a turn, `messages` is all it knows.

    A new tool is one entry of `tools`: its name, a line for the prompt, and a function from the
    Action Input to the text of the observation. `listeners` are told each event with its data; the
    memory is the last of them, so what it knows is on disk and on the screen already."""
    def __init__(self, settings: Settings, model: OpenAIModel | ScriptedModel,
                 folder: Path | None = None, listeners: Iterable[Listener] = ()) -> None:
        self.settings, self.model = settings, model
        self.listeners: list[Listener] = [*listeners, functools.partial(remember, self)]
        self.texts = read_table("nudges.yaml") | read_table("nudges.yaml")[settings.protocol]
        self.shell = Shell(settings, folder or Path.cwd())
        self.skills = Skills(settings.skills_dir, self.shell.folder)
        self.tools = {"run_command": (self.texts["run_command"], self.shell.run),
                      "load_skill": (self.texts["load_skill"], self.skills.load)}
        if "skills" in settings.ablations:
            del self.tools["load_skill"]
        self.tools = {} if "tools" in settings.ablations else self.tools
        self.reset()

    def reset(self) -> None:
        """Starts a conversation afresh: only the system message stays."""
        self.every: list[Message] = []  # with what a compaction took away
        self.ending, self.compacted = "interrupted", "never"
        self.begin()
        self.skills.loaded = {}
        system = self.settings.redact(system_prompt(self))
        self.messages = [{"kind": "system", "role": "system", "content": system}]

    def ask(self, question: str) -> Result:
        """Runs one turn. Raises nothing: errors and Ctrl-C are statuses of the result."""
        self.begin()
        try:
            if not self.every:
                self.emit("header", system=self.messages[0]["content"], **vars(self.settings))
            if self.messages[-1]["role"] == "user":  # the roles have to alternate
                self.add("ending", f"[turn ended: {self.ending}]")
            self.add("question", question)
            result = self.run_turn()
        except (Exception, KeyboardInterrupt) as error:  # Ctrl-C, a ModelError, a fault of a tool
            status = "error" if isinstance(error, Exception) else "interrupted"
            result = Result(status, remark=str(error) if status == "error" else "by Ctrl-C")
        result = result._replace(steps=self.step)
        self.emit("result", **result._asdict())
        return result

    def begin(self) -> None:
        """Starts a turn: no steps, streaks, summaries; under --no-history no loaded skills."""
        self.step, self.streak, self.summaries = 0, dict[str, int](), list[int]()
        self.skills.loaded = {} if "history" in self.settings.ablations else self.skills.loaded

    def run_turn(self) -> Result:
        """The loop itself."""
        for step in range(1, self.settings.max_steps + 1):
            self.step = step
            compact(self, "full")
            parsed = self.parse(self.think())
            if isinstance(parsed, Final):
                hurried = self.step == self.settings.max_steps > 1  # see `add`
                return Result("max_steps" if hurried else "final", parsed.answer)
            if ended := self.act(parsed) if isinstance(parsed, Action) else self.nudge(parsed):
                return ended
        return Result("max_steps", remark=f"no answer within {self.settings.max_steps} steps")

    def think(self, again: bool = False) -> Reply:
        """One model call (two after an overflow); the reply streams to the listeners."""
        sent = view(self.messages, self.settings.ablations)
        self.emit("request", step=self.step, sent=sent)
        self.emit("waiting")
        try:
            reply = self.model(sent, lambda text, dim: self.emit("text", text=text, dim=dim))
        except Overflow:
            if again or not compact(self, "overflow"):
                raise
            return self.think(again=True)
        self.emit("reply", step=self.step, **reply._asdict())
        return reply

    def parse(self, reply: Reply) -> Parsed:
        """What the reply says. What it invented after that stays out of the messages."""
        parsed = parse_form(self.settings.protocol, reply.text)
        parsed = Invalid("cut", parsed.text) if reply.finish in CUT else parsed
        kind = type(parsed).__name__.lower()
        self.emit("parsed", step=self.step, kind=kind, **parsed._asdict())
        self.add(kind, parsed.text.strip() or "(empty reply)")
        return parsed

    def act(self, action: Action) -> Result | None:
        """Runs a tool and adds its observation. Returns a result where a limit ends the turn."""
        said = f"{action.tool} {action.input}"
        times = self.streak.get(said, 0) + 1
        over = self.step == self.settings.max_steps or times == 5
        output = "[not run: no step is left for it]" if over else self.use_tool(action)
        notes = ["repeat"] * (2 < times < 5) + ["ignored"] * action.ignored
        self.observe(action, "\n".join([output, *(self.texts[name] for name in notes)]))
        # The guard is asked again, since a command can print such a line too.
        refused = output.startswith("[refused:") and guard(action.input, self.shell.folder)
        self.streak = {said: times, "refused": self.streak.get("refused", 0) + 1 if refused else 0}
        if self.streak["refused"] == 3:
            return Result("refused", remark="three refusals in a row")
        return Result("repeated", remark="five times the same") if times == 5 else None

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
        reason, last = invalid.reason, self.step == self.settings.max_steps
        kinds = ("invalid", "useless" if reason in ("empty", "cut") else reason)
        streak = self.streak = {kind: self.streak.get(kind, 0) + 1 for kind in kinds}
        if reason == "no label" and (last or streak[reason] == 2):
            prose = invalid.text.removeprefix("Thought: ")
            return Result("max_steps" if last else "final", prose, remark="prose, no label")
        if streak["invalid"] == 3 or streak.get("useless") == 2:
            return Result("cut" if reason == "cut" else "invalid", remark=f"the reply: {reason}")
        form, tool = reply_form(self).split("\nExample:")[0], "run_command" if self.tools else ""
        self.add("nudge", fill(self.texts[reason], form=form, tool=tool))
        return None

    def observe(self, action: Action, output: str) -> None:
        command = f"$ {action.input}\n" if action.tool == "run_command" else ""
        self.add("observation", f"Observation: {command}{output}")

    def add(self, kind: str, content: str) -> None:
        """The only way in: clean, without a key, never empty; asks for an answer in good time."""
        if ROLES[kind] == "user" and 0 < self.step == self.settings.max_steps - 1:
            content += f"\n{self.texts['last_step']}"
        self.emit("message", kind=kind, content=self.settings.redact(content).strip() or "(empty)")

    def emit(self, event: str, **data: Any) -> None:
        for listener in self.listeners:
            listener(event, data)


# ──── Part I · 7 Trace: what a person sees ───────────────────────────────────────────────────
Listener = Callable[[str, dict[str, Any]], None]
COLOURS = {"question": Fore.GREEN, "action": Fore.YELLOW, "observation": Fore.CYAN,
           "error": Fore.RED, "answer": Fore.WHITE, "dim": Style.DIM}  # article 001, 5.2


def paint(out: TextIO, kind: str, text: str) -> str:
    """Coloured text where a person looks and has not asked for none (no-color.org)."""
    plain = not out.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if plain or not kind else f"{COLOURS[kind]}{text}{Style.RESET_ALL}"


class Trace:
    """Draws the events of an agent. Mode `full`: each request with all its messages, known ones
    dimmed, or in a line where nothing can be dimmed, unless `again`; `new`: known ones always in
    a line; `off`: nothing."""
    def __init__(self, mode: str, out: TextIO, title: str, again: bool = False) -> None:
        self.mode, self.out, self.values = mode, out, {"title": title, "step": 0}
        self.again = mode == "full" and (again or paint(out, "dim", "") != "")
        self.shown, self.used = set[str](), list[dict[str, int] | None]()  # texts; of the turn

    def __call__(self, event: str, data: dict[str, Any]) -> None:
        """Draws an event by its rows in prompts/help.yaml: each a colour and a text."""
        if event == "text":
            self.say(data["text"], "dim" if data["dim"] else "", end="")
        self.used += [data["usage"]] if event == "reply" else []
        self.values |= data | {"tokens": spent(self.used[-1:] if event == "reply" else self.used)}
        name = f"{event} {data['kind']}" if "kind" in data else event
        for colour, text in read_table("help.yaml")["trace"].get(name, []):
            self.say(text.format(**self.values), colour)
        for number, m in enumerate(data["sent"] if event == "request" else []):
            known, asked = m["content"] in self.shown, data["step"] == 1 and m is data["sent"][-1]
            head = f"[{number}] {m['role']}, {len(m['content']):,} characters"
            body = ", as before" if known and not self.again else f"\n{m['content']}"
            self.say(head + body, "dim" if known else "question" if asked else "")
            self.shown.add(m["content"])
        self.used = [] if event == "result" else self.used

    def say(self, text: str, kind: str = "", end: str = "\n") -> None:
        if self.mode != "off":
            print(paint(self.out, kind, clean(text)), end=end, file=self.out, flush=True)


# ──── Part II · 8 Guard and sandbox: a seat belt and a fence ─────────────────────────────────
# What stands in quotes is made inert: each special character becomes a private twin, so that the
# plain patterns of prompts/guard.yaml see only what would act. READABLE is the way back.
TWINS = {ord(char): 0xE000 + ord(char) for char in " \t\n;&|<>()#'\"\\`$*?~"}
READABLE = {twin: chr(char) for char, twin in TWINS.items()} | {ord(" "): "\0"}
# Why a command isn't run, and what to do instead; `rule` is the family of the rule.
Refusal = NamedTuple("Refusal", [("rule", str), ("reason", str), ("safer", str)])


def guard(command: str, folder: Path | str) -> Refusal | None:
    """Refuses a command that would do harm; None lets it pass. Runs nothing, never raises."""
    try:
        return next(refusals(command, os.path.abspath(folder)), None)
    except Exception:  # what can't be read isn't run
        return Refusal("unreadable", "this is too long or too tangled to check", "write it simpler")


@functools.cache
def compiled(text: str) -> re.Pattern[str]:
    """A pattern of guard.yaml, each <name> in it replaced by the pattern of that name."""
    names = read_table("guard.yaml")["names"]
    return re.compile(re.sub(r"<(\w+)>", lambda name: compiled(names[name[1]]).pattern, text))


def refusals(command: str, folder: str, depth: int = 0) -> Iterator[Refusal]:
    """What the rules have against a command and against every script found inside it."""
    text = compiled("<heredoc>").sub(r"\1 \4\n\5", command)
    if len(text) > 16_000 or depth > 5:  # beyond a quick look
        raise ValueError("too long, or too many scripts inside scripts")
    rules = read_table("guard.yaml")["rules"]
    for seen, row in itertools.product(commands_in(text, folder), rules):
        fits = all(compiled(row.get(key, "")).search(part) for key, part in seen.items())
        if fits and "script" in row:
            for match in compiled(row["inside"]).finditer(seen["arguments"].translate(READABLE)):
                yield from refusals(match.expand(row["script"]), folder, depth + 1)
        elif fits and not compiled(row.get("unless", "(?!)")).search(seen["arguments"]):
            yield Refusal(row["rule"], row["reason"], row["safer"])


def inert(match: re.Match[str]) -> str:
    """A comment as nothing; quoted text, a substitution or a heredoc as one word without effect."""
    whole = match[0]
    if whole[0] == '"':  # variables and substitutions stay active
        return compiled("<active>").sub(inert, whole[1:-1]).translate(TWINS | {ord("$"): "$"})
    mark = "\ue001" if whole[0] in "$<>`" else ""
    return "" if whole[0] == "#" else mark + whole.strip("\\'").translate(TWINS)


def commands_in(text: str, folder: str) -> Iterator[dict[str, str]]:
    """What the rules look at: the whole text as `script`, then its commands and redirects."""
    for pattern, replacement in read_table("guard.yaml")["reading"]:
        text = compiled(pattern).sub(replacement or inert, text)
    yield {"program": "script", "arguments": text, "path": ""}
    here = folder
    for part in compiled("<separator>").split(compiled("<redirect>").sub(r"\3\n\1 \2\n", text)):
        program, *words = compiled("<prefix>").sub("", part).split() or [""]
        if program in ("cd", "pushd"):
            here = os.path.join(here, words[0] if words else "~")
        path = " ".join(place_of(word, here, folder) for word in words if word[0] != "-")
        yield {"program": program, "arguments": " ".join(words), "path": path}


def place_of(word: str, here: str, folder: str) -> str:
    """Where a word points, as the rules write it: `~/x`, `./x`, `..` (above), `/etc/x`."""
    path = re.sub(r"^.*/(?=~(/|$))", "", os.path.join(here, compiled("<around>").sub("", word)))
    path = "/" + os.path.normpath(os.path.expanduser(path)).lstrip("/")
    path = re.sub(f"^{re.escape(folder)}(?=/|$)", ".", path)
    path = re.sub(f"^{re.escape(os.path.expanduser('~'))}(?=/|$)", "~", path)
    return ".." if folder.startswith(path + "/") else path


def sandbox_prefix(settings: Settings, folder: Path) -> tuple[list[str], str]:
    """Words to put before `bash -c …`, and a line for the screen where there are none.

    With them only `folder` can be changed, and home, /tmp, /run, `.env` and other processes can't
    be seen. ConfigError: `settings.sandbox` is "bwrap" and it can't be had."""
    if settings.sandbox == "off":
        return [], "sandbox off: commands can change all that you can"
    home, path = Path(os.path.expanduser("~")).resolve(), [f"{sys.prefix}/bin", *os.get_exec_path()]
    hidden = [top for top in (Path("/tmp"), Path("/run"), home) if top.name]
    needed = map(Path, [str(ROOT), sys.prefix, sys.base_prefix, *path])
    places = {"folder": [folder], "hidden": hidden, "log": [(folder / ".agent").resolve()],
              "needed": [p for p in needed if any(top in p.parents for top in hidden)],
              "secret": [ROOT / ".env", (folder / ".env").resolve()],
              "network": [Path("/etc/resolv.conf").resolve()] * settings.network}
    prefix = [word.format(place, home=home, path=os.pathsep.join(path))
              for name, test, words in read_table("sandbox.yaml")["bwrap"]
              for place in places[name] if getattr(os.path, test)(place) for word in words.split()]
    failed, said = subprocess.getstatusoutput(shlex.join([*prefix, "sh", "-c", ":"]))
    problem = f"{' '.join(clean(said).split())} (Linux: install bubblewrap, or see the README)"
    if home.is_relative_to(folder):
        failed, problem = 1, "the folder is your home or holds it; work in one of its own"
    if failed and settings.sandbox == "bwrap":
        raise ConfigError(f"--sandbox bwrap: {problem}")
    return ([], f"sandbox off: {problem}") if failed else (prefix, "")


# ──── Part II · 9 Memory: what is known, what is on disk, what fits into a request ───────────
FORMAT = 1  # of the session files


def remember(agent: Agent, event: str, data: dict[str, Any]) -> None:
    """Changes what the agent knows; nothing else does, and a resume does it for a whole log.
    KeyError, TypeError, ValueError: the event has a wrong shape; unknown ones do nothing."""
    if event in ("header", "resumed"):
        agent.messages[0] = {"kind": "system", "role": "system", "content": data["system"]}
    elif event == "message":
        role = ROLES[data["kind"]]
        if not data["content"].strip().encode() or (role == "assistant" and not agent.every):
            raise ValueError("no text, or an answer without a question")
        agent.every.append({"kind": data["kind"], "role": role, "content": clean(data["content"])})
        agent.messages.append(agent.every[-1])
    elif event == "compaction":
        summary = {"kind": "summary", "role": "user", "content": clean(data["summary"]).strip()}
        if not data["summary"].strip().encode() or not 0 < data["kept"] < len(agent.messages):
            raise ValueError("no summary, or fewer messages than it keeps")
        agent.compacted = f"{data['before']:,} → {data['after']:,} tokens"
        agent.messages[1 : -data["kept"]] = [summary]
        agent.skills.loaded = {}
    elif event == "result":
        agent.ending = data["status"]


class Session:
    """A log, .agent/sessions/<time>.jsonl, from the first question on: an event a line, each one
    write. Where it can't be written, a line says so, and the agent goes on without it."""
    def __init__(self, folder: Path, redact: Callable[[str], str]) -> None:
        self.home, self.redact = folder / ".agent" / "sessions", redact
        with contextlib.suppress(OSError):  # this early, so that the sandbox hides it
            self.home.parent.mkdir(0o700)
            (self.home.parent / ".gitignore").write_text("*\n")  # only in a folder of our making

    def open(self, path: Path) -> None:
        """Opens a file to append to. OSError; ConfigError: another process has it."""
        if self.home.is_symlink() or self.home.parent.is_symlink():
            raise OSError(f"{self.home} is a link, perhaps out of the folder")
        self.home.mkdir(0o700, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self.file: IO[str] = os.fdopen(descriptor, "a", encoding="utf-8")
        try:
            import fcntl  # here, because Windows has none
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"session {path.stem} is in use by another process") from None

    def __call__(self, event: str, data: dict[str, Any]) -> None:
        """Writes an event down, before it changes the memory."""
        if event in ("text", "waiting"):  # the event `reply` has the text as a whole
            return
        if event == "request":  # the messages are in the log already
            sent = json.dumps(data["sent"], ensure_ascii=False).encode()
            data = {**data, "sent": len(data["sent"]), "sha256": hashlib.sha256(sent).hexdigest()}
        now = datetime.datetime.now()
        data = {"format": FORMAT, "event": event, "time": now, **data}
        line = json.dumps(data, ensure_ascii=False, default=str)
        try:
            if event == "header":
                self.open(self.home / f"{now:%Y%m%d-%H%M%S-%f}.jsonl")
            self.file.write(self.redact(line) + "\n")
            self.file.flush()
        except OSError as error:
            self.file = open(os.devnull, "a")  # noqa: SIM115
            print(f"agent.py: this session is not kept: {error}", file=sys.stderr)

    def resume(self, agent: Agent, name: str) -> str:
        """Goes on with a session; a line on what it did. An action that may have run never runs."""
        logs = self.home.glob(re.sub(r"[^\w-]", "_", name) + "*.jsonl")  # no pattern, no path
        if not (path := max(logs, key=os.path.getmtime, default=None)):
            raise ConfigError(f"no session {name!r} in {self.home}; --sessions lists them")
        self.open(path)
        system = agent.messages[0]["content"]
        bad = replay(path, functools.partial(remember, agent))
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)  # what a crash left of a line
        agent.emit("resumed", system=system, **vars(agent.settings))
        if broken := agent.messages[-1]["kind"] == "action":
            agent.add("observation", f"Observation: {agent.texts['unknown']}")
        told = f"{len(agent.messages)} messages, lost results: {broken:d}, bad lines: {bad or 0}"
        return f"resumed {path.stem}, {told}"


def replay(path: Path, tell: Listener) -> list[int]:
    """Tells the events of a log again; returns the numbers of bad lines. ConfigError: format."""
    bad = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            event = json.loads(line)
            if event.pop("format") != FORMAT:
                raise ConfigError(f"{path} is of a format that this version can't read")
            tell(event.pop("event"), event)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            bad.append(number)
    return bad


def estimate(messages: Iterable[Message]) -> int:
    """Tokens: UTF-8 bytes / 3 (article 000, 3.3), and 12 bytes a message for its role."""
    return -(-sum(len(message["content"].encode()) + 12 for message in messages) // 3)


def threshold(window: int) -> int:
    """Tokens above which a request is too long: what is left is for the reply (000, 3.3)."""
    return min(window * 4 // 5, window - min(1024, window // 4))


def compact(agent: Agent, cause: str) -> bool:
    """Puts a summary in place of the older messages; whether 10 % of the tokens went at least.

    `cause`: full (checked before each request), overflow (a server's error) or command. About 16 %
    of the window stay (000, 3.3), an action with its observation. Where no summary comes of it
    and the next request would overflow, the older messages are just dropped."""
    messages, window = agent.messages, agent.settings.context_window
    size, summary = estimate(view(messages, agent.settings.ablations)), ""
    if cause == "full" and not 0 < threshold(window) < size:  # 0: the window is unknown
        return False
    overflow = cause == "overflow" or 0 < window - min(1024, window // 4) < size
    limit = threshold(size if cause == "overflow" else window or 2 * size)
    window = window if cause == "full" else size
    starts = [n for n, m in enumerate(messages) if m["kind"] not in ("observation", "nudge")]
    border = next((n for n in starts if estimate(messages[n:]) <= window * 0.16), starts[-1])
    # The request for a summary has to fit too. It is made once a step, and three times a turn.
    fits = [n for n in starts if 1 < n <= border and estimate(messages[:n]) + 256 <= limit]
    if fits and agent.step not in agent.summaries and len(agent.summaries) < 3:
        agent.summaries.append(agent.step)
        ask = (PROMPTS / "compact.md").read_text("utf-8")
        asking = [*messages[: fits[-1]], {"kind": "nudge", "role": "user", "content": ask}]
        with contextlib.suppress(ModelError):
            reply = agent.model(view(asking, agent.settings.ablations), lambda *_: None)
            summary = "" if reply.finish in CUT else reply.text.strip()
    if summary and shorten(agent, fits[-1], summary):
        return True
    return overflow and shorten(agent, border, agent.texts["dropped"])


def shorten(agent: Agent, border: int, summary: str) -> bool:
    """Replaces what is before the border by a summary, the user's words and the skills verbatim."""
    system, tail, before = agent.messages[0], agent.messages[border:], estimate(agent.messages)
    room = (agent.settings.context_window or before) // 4
    words = [m["content"][: room // 2 if m["kind"] == "question" else None] for m in agent.every
             if m not in tail and (m["kind"] == "question" or (
                 m["content"].startswith("Observation: Skill: ") and estimate([m]) < room))]
    while estimate([{"content": "\n\n".join(words)}]) > room:
        words.pop((len(words) - 1) // 2)  # the first wishes and the last ones matter most
    text = fill(agent.texts["summary"], summary=summary, names=", ".join(agent.skills.loaded),
                words="\n\n".join(words))
    after = estimate([system, {"content": text}, *tail])
    if after <= before * 0.9:
        agent.emit("compaction", summary=text, kept=len(tail), before=before, after=after)
    return after <= before * 0.9


# ──── Part II · 10 Variants: other forms of the protocol, the loop with a part taken away ─────
def parse_form(form: str, text: str) -> Parsed:
    """What `parse_reply` returns, for a reply in text, xml or json."""
    if form == "text":
        return parse_reply(text)
    reply = unwrap(text)
    found = SEEK[form].search(reply)
    if not found:
        return Invalid("no label" if reply else "empty", reply or text)
    parts = [(part or "").strip() for part in found.group("tool", "input", "answer", "thought")]
    if form == "json":
        parts = [clean_input(f'{{"input": {part}}}').strip() for part in parts]
    tool, value, answer, thought = parts
    done, rest = reply[: found.end()], reply[found.end() :].strip("`~ \n")
    if answer:
        return Final(answer, thought, done)
    action = Action(tool, clean_input(value), thought, done, bool(rest))
    return action if tool and action.input else Invalid("bad input", reply)


def view(messages: list[Message], hidden: Iterable[str]) -> list[Message]:
    """The messages as the model sees them: without what an ablation hides; the roles take turns."""
    asked = [n for n, message in enumerate(messages) if message["kind"] == "question"] or [1]
    sent: list[Message] = []
    for message in [*messages[:1], *messages[asked[-1] if "history" in hidden else 1 :]]:
        role, content = message["role"], message["content"]
        if "observations" in hidden and message["kind"] == "observation":
            content = "Observation: [hidden]"
        if "thoughts" in hidden and role == "assistant":
            content = SEEK["thoughts"].sub("", content, count=1) or "(empty)"
        if sent and sent[-1]["role"] == role:
            content = f"{sent.pop()['content']}\n\n{content}"
        sent.append({"role": role, "content": content})
    return sent


# ──── Part II · 11 Edges: prompts, replies, outputs, skill files as they come in real life ────
KEEP = 65_536  # characters kept of either end of an output, before escapes go


def clean(text: str) -> str:
    """Valid UTF-8 without terminal escapes; of the control characters newline and tab stay."""
    return SEEK["noise"].sub("", text.encode("utf-8", "replace").decode("utf-8"))


def fill(template: str, **values: str) -> str:
    """Puts values in for {names}; a paragraph with an empty value is left out."""
    text = re.sub(r"\{(\w+)\}", lambda slot: values.get(slot[1], slot[0]) or "\0", template.strip())
    return "\n\n".join(part for part in text.split("\n\n") if "\0" not in part)


def system_prompt(agent: Agent) -> str:
    """prompts/system.md filled with what holds here; a paragraph without a value is left out."""
    settings, shell, tools = agent.settings, agent.shell, agent.tools
    project = shell.folder / "AGENTS.md"
    return fill(
        (PROMPTS / "system.md").read_text("utf-8"), model=getattr(agent.model, "name", "own"),
        form=reply_form(agent), tools="\n".join(f"- {name}: {tools[name][0]}" for name in tools),
        shell=shell.name if tools else "", folder=str(shell.folder),
        timeout=f"{settings.timeout:g}", limit=f"{settings.observation_limit:,}",
        fence="bubblewrap" if tools and shell.prefix else "",
        open="no sandbox" if tools and not shell.prefix else "",
        skills=agent.skills.catalogue() if "load_skill" in tools else "",
        project=project.read_text("utf-8", "replace")[:8_000] if project.is_file() else "")


def reply_form(agent: Agent) -> str:
    """prompts/protocol-<name>.md, without what an ablation takes away."""
    form = (PROMPTS / f"protocol-{agent.settings.protocol}.md").read_text("utf-8")
    form = fill(form, tool="run_command" if agent.tools else "", any_tool=" or ".join(agent.tools))
    return SEEK["thoughts"].sub("", form) if "thoughts" in agent.settings.ablations else form


def grow(reply: Reply, chunk: Any) -> Reply:
    """The reply with a chunk more. Each `or` is a server that sends null or an empty list."""
    choice = (chunk.get("choices") or [{}])[0] or {}
    delta = choice.get("delta") or choice.get("message") or {}
    parts = delta.get("content") or ""  # a text or a list
    content = "".join(p if isinstance(p, str) else p.get("text") or "" for p in parts)
    reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
    return Reply(reply.text + content, reply.reasoning + reasoning,
                 choice.get("finish_reason") or reply.finish, chunk.get("usage") or reply.usage)


def unwrap(text: str) -> str:
    """The reply without reasoning, even if only its end is marked, and without server tokens."""
    text = SEEK["around"].sub("", text.replace("\r\n", "\n")).strip()
    after = re.split(r"(?i)</think(?:ing)?>", text)[-1]
    opened = "<think" in text[: -len(after)].lower()
    labelled = next(find_labels(after)).lastgroup not in ("open", "end")
    return after.strip() if labelled and not opened else text


def clean_input(value: str) -> str:
    """The bare input; "" where it is cut off, invalid or more than one block."""
    if quoted := SEEK["quoted"].match(value):
        value = quoted[quoted.lastindex or 0].strip()
    if not re.match(r"\{\s*[\"']", value):
        return value
    with contextlib.suppress(ValueError, RecursionError):
        found = map(json.loads(value).get, ("command", "cmd", "skill", "name", "input"))
        return next((text for text in found if isinstance(text, str)), "")
    return ""


def spent(usages: list[Any]) -> str:
    """Tokens in and out as the server told them; `n/a` where it left one out."""
    tokens = [re.findall(rf"'{n}_tokens': (\d+)", str(usages)) for n in ("prompt", "completion")]
    sums = "{:,} in, {:,} out".format(*(sum(map(int, each)) for each in tokens))
    return sums if usages and all(usages) and all(tokens) else "n/a"


def exit_note(code: int) -> str:
    """`[exit code 1]`, `[exit code 137: killed by SIGKILL]`, or nothing for 0."""
    # Python says -9, a shell 128 + 9 for a child of its own; 129 is git's code for a usage error.
    status = code if code >= 0 else 128 - code
    signals = {128 + s: f": killed by {s.name}" for s in signal.Signals if code < 0 or s > 1}
    return f"[exit code {status}{signals.get(status, '')}]" if status else ""


class Output:
    """What a command prints, in flat memory: its beginning, its end, and how long it is."""
    text, size = "", 0

    def drain(self, pipe: Any) -> None:
        for chunk in codecs.iterdecode(iter(lambda: pipe.read1(KEEP), b""), "utf-8", "replace"):
            self.size += len(chunk)
            self.text = self.text[:KEEP] + (self.text[KEEP:] + chunk)[-KEEP:]

    def shorten(self, room: int, redact: Callable[[str], str]) -> str:
        """At most `room` characters, cleaned, with the number of those left out in the middle."""
        # After a lone carriage return a terminal writes the line anew.
        text = redact(re.sub(r"(?m)^[^\n]*\r(?=[^\r\n])", "", self.text.rstrip("\n")))
        size = self.size - len(self.text) + len(text)
        if size <= room:
            return text or "(no output)"
        half = max(room - 50, 2) // 2
        return f"{text[:half]}\n[… {size - 2 * half} characters left out …]\n{text[half:][-half:]}"


def skill_key(text: str) -> str:
    """What a name and the requests for it have in common: `Code_Review.md` -> code-review."""
    text = unicodedata.normalize("NFKC", clean(text[:500])).casefold()
    return re.sub(r"[\s_‐‑]+", "-", SEEK["wrapping"].sub("", text))


def read_skill(path: Path, place: str, faults: list[str]) -> Skill:
    """A file's skill (`place`: its folder's name); `faults` gets what is wrong. Raises nothing."""
    head = body = ""
    try:
        head, body = SEEK["skill"].findall(path.read_text(encoding="utf-8-sig"))[0]
        fields = dict(yaml.load(head, yaml.BaseLoader) or {})  # only strings: a name may be `yes`
    except Exception as error:  # PyYAML lets more through than its own: OverflowError, …
        line = int([*re.findall(r", line ([3-9]|\d\d+),", str(error)), 2][0])
        faults.append(f"{line}: not valid YAML; put the value in quotes" if head else f" {error}")
        fields = {key: value.strip(" \t\n\"'") for key, value in SEEK["field"].findall(head)}
    texts = (fields.get("name", ""), place, fields.get("description", ""))
    name, place, about = (" ".join(clean(t if isinstance(t, str) else "").split()) for t in texts)
    facts = {"names": f"{name}/{place}", "description": about, "body": body,
             "line": str(re.split("^description", head, flags=re.M)[0].count("\n") + 1)}
    faults += [fault.format(**facts) for fact, pattern, fault in read_table("help.yaml")["skill"]
               if not re.fullmatch(pattern, facts[fact])][:1]
    # A name that looks like a path or hides something is not taken.
    usable = re.fullmatch(r"(?!.*\.\.)[^/\\]+", name) and str(fields["name"]).strip().isprintable()
    return Skill(name if usable else place, about[:1024], clean(body).strip()[:50_000], path)


# ──── Part II · 12 Command line ──────────────────────────────────────────────────────────────
def configure(flags: argparse.Namespace) -> tuple[Settings, dict[str, str]]:
    """Settings and where each came from: flag > environment > .env > default. ValueError."""
    table = read_table("help.yaml")
    file = dotenv.dotenv_values(ROOT / ".env", interpolate=False, encoding="utf-8-sig")
    known = {name: str(text).strip("\"' \t\r\n") for name, text in (file | os.environ).items()
             if not re.match(table["unset"], text or "")}
    # Whose key and address are used: an address by flag is OpenAI's or like it.
    pairs = ["OPENAI"] if flags.base_url else [
        name for place in (os.environ, file) for name in table["providers"]
        if {f"{name}_API_KEY", f"{name}_BASE_URL"} & known.keys() & place.keys()]
    pair = [*pairs, "DEEPSEEK" if flags.model else "OFFLINE"][0]
    names = {field: name.format(pair=pair) for field, name in table["variables"].items()}
    found = {field: known[name] for field, name in names.items() if name in known}
    given = {n: v for n, v in vars(flags).items() if hasattr(Settings, n) and v not in (None, "")}
    values = vars(Settings()) | table["providers"].get(pair, {}) | found | given
    values["secrets"] = [v for t in (known, file) for k, v in t.items() if v and k.endswith("_KEY")]
    url, is_folder = urlsplit(values["base_url"]), os.path.isdir(values["skills_dir"])
    for text, pattern, fault in table["checks"]:
        if not re.fullmatch(pattern, text.format(pair=pair, url=url, folder=is_folder, **values)):
            raise ConfigError(fault.format(pair=pair, **values))
    origins = {field: "environment" if names[field] in os.environ else ".env" for field in found}
    values |= {} if values["base_url"] else {"protocol": "text", "context_window": 0}
    # Variables are texts, and so are flags: each takes the type of its default.
    settings = Settings(**{name: type(getattr(Settings, name))(v) for name, v in values.items()})
    return settings, origins | dict.fromkeys(given, "flag")


def main(argv: list[str] | None = None) -> int:
    """Runs the command line, each mistake one line; returns the exit code and raises nothing."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        getattr(stream, "reconfigure", dict)(errors="replace")  # no crash on a GBK or ASCII screen
    parser = argparse.ArgumentParser("agent.py", usage=argparse.SUPPRESS, allow_abbrev=False)
    for names, options in read_table("help.yaml")["flags"].items():
        parser.add_argument(*names.split(), **options)
    try:
        return run(parser.parse_args(argv))
    except (KeyboardInterrupt, SystemExit) as stop:  # of argparse: 2, and 0 for --help
        return int(getattr(stop, "code", 130))
    except (ConfigError, ValueError, OSError) as error:  # ValueError: a bad URL, .env not in UTF-8
        print(f"agent.py: {error} (see --help, and {ROOT / '.env'})", file=sys.stderr)
        if not isinstance(error, OSError):
            return 2
        # The reader has gone, or the disk is full: Python would complain when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def run(flags: argparse.Namespace) -> int:
    if flags.show is not None:
        script = str(ROOT / "skills/sessions/scripts/sessions.py")
        return subprocess.call([sys.executable, script, *filter(None, [flags.show])])
    settings, origins = configure(flags)
    if flags.show_config:
        for name, value in vars(settings).items():
            shown = "(set)" if value and name in ("api_key", "secrets") else value
            print(settings.redact(f"{name:<18} {shown!s:<44} {origins.get(name, 'default')}"))
        return 0
    question = " ".join(flags.question).strip()
    piped = not (question or flags.demo or sys.stdin.isatty())
    if piped and not (question := sys.stdin.read().strip()):
        raise ConfigError("no question: give one as an argument or on standard input")
    agent = start(flags, settings, bool(question))
    if not flags.demo:
        return answer(agent, question) if question else converse(agent)
    codes: list[int] = []
    for asked in read_table("demo.yaml")["questions"][settings.lang]:
        agent.reset()
        print(end="\n" if codes else "", flush=True)
        codes.append(answer(agent, asked))
    return max(codes)


def start(flags: argparse.Namespace, settings: Settings, once: bool) -> Agent:
    """The agent with its listeners, and what is to be known of it on the screen."""
    model = OpenAIModel(settings) if settings.base_url else ScriptedModel([])
    trace = Trace(settings.trace, sys.stderr, model.name, again=flags.trace == "full")
    fresh = not (flags.no_session or flags.demo or (once and settings.trace == "off"))
    session = Session(Path.cwd(), settings.redact) if fresh or flags.resume is not None else None
    agent = Agent(settings, model, listeners=filter(None, [session, trace]))
    resumed = session.resume(agent, flags.resume) if session and flags.resume is not None else ""
    offline = "" if settings.base_url else read_table("demo.yaml")["offline"][settings.lang]
    for notice in filter(None, [offline, agent.shell.notice, *agent.skills.problems, resumed]):
        print(paint(sys.stderr, "action", notice), file=sys.stderr)
    return agent


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
    """The script's replies to a question: letters and digits count, in any case."""
    scripts = read_table("demo.yaml")["scripts"][lang].items()
    plain = {re.sub(r"\W", "", text).casefold(): replies for text, replies in scripts}
    return list(plain.get(re.sub(r"\W", "", question).casefold(), plain["unknown"]))


def converse(agent: Agent) -> int:
    """The conversation at a terminal: Ctrl-C ends a turn, Ctrl-D the program."""
    with contextlib.suppress(ImportError):  # Python can be built without it
        import readline  # noqa: F401
    print(clean(f"Glassbox, {agent.model.name}, {agent.shell.folder}. /help lists the commands."))
    while True:
        try:
            text = read_question()
            if name := re.fullmatch(r"[/:](\w*)( .*)?", text):
                print(command(agent, name[1]))
            elif text:
                answer(agent, text)
        except (KeyboardInterrupt, EOFError) as stop:
            print()
            if isinstance(stop, EOFError):
                return 0


def read_question() -> str:
    """A line, what was pasted as a whole, or what stands between two lines of three quotes."""
    text = input("you> ")
    while text.startswith('"""') and text.count('"""') == 1:
        text += "\n" + input("...> ")
    with contextlib.suppress(EOFError):
        while select.select([sys.stdin], [], [], 0.05)[0]:
            text += "\n" + input()
    return text.strip().removeprefix('"""').removesuffix('"""').strip()


def command(agent: Agent, name: str) -> str:
    """Does a /command (or :command) and returns what it has to say."""
    if name in ("quit", "exit"):
        raise EOFError
    if name == "new":
        agent.reset()
    if name == "compact" and agent.settings.base_url:
        agent.begin()
        name = f"compact {compact(agent, 'command')}"
    texts, window = read_table("help.yaml")["commands"], agent.settings.context_window
    sent = view(agent.messages, agent.settings.ablations)
    return str(texts.get(name, texts["unknown"])).format(
        agent=agent, typed=name, help=texts["help"], count=len(sent),
        tokens=estimate(agent.messages), window=window or "unknown",
        limit=threshold(window) or "none", skills=agent.skills.catalogue() or "no skills",
        messages="\n\n".join(f"[{n}] {m['role']}\n{m['content']}" for n, m in enumerate(sent)))


if __name__ == "__main__":
    sys.exit(main())
