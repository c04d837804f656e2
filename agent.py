"""Glassbox: a whole AI agent that you can read.

    question ──▶ messages ──▶ model ──▶ reply ──▶ parse ──┬──▶ Final Answer ──▶ you
                    ▲                                     │
                    │                                     └──▶ Action ──▶ tool ─┐
                    └──────────────── observation ◀─────────────────────────────┘

One loop, one protocol, one tool; everything else is a skill.

    uv run agent.py --demo          four questions, no key needed: a scripted model, real commands
    uv run agent.py "question"      one question; the trace goes to stderr, the answer to stdout
    uv run agent.py                 a conversation (/help lists its commands)

Part I, what an agent is:       1 Settings · 2 Model · 3 Shell · 4 Protocol · 5 Skills · 6 Loop
                                7 Trace
Part II, what keeps it alive:   8 Guard and sandbox · 9 Memory · 10 Protocol variants and
                                ablations · 11 Command line
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import datetime
import difflib
import functools
import glob
import hashlib
import importlib
import io
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
    temperature: float = 0.0  # the same question, the same reply, as far as a server can
    context_window: int = 32_768  # tokens; 0 = unknown, then nothing is compacted unasked
    connect_timeout: float = 10.0  # seconds
    read_timeout: float = 120.0  # seconds between two pieces of a reply
    stop: tuple[str, ...] = ("\nObservation:", "\n观察")  # where models begin to invent results
    skills_dir: Path = ROOT / "skills"
    sandbox: str = "auto"  # auto | bwrap | off
    network: bool = False  # may a sandboxed command use it
    protocol: str = "text"  # a key of PROTOCOLS
    ablations: tuple[str, ...] = ()  # parts taken away to see what they were for
    trace: str = "full"  # full | new | off
    lang: str = "en"  # of the demo: en | zh

    def redact(self, text: str) -> str:
        """The text with every known key replaced by `[key]`."""
        for secret in self.secrets:
            text = text.replace(secret, "[key]")
        return text


ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])")
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def clean(text: str) -> str:
    """Valid UTF-8 without terminal escapes; of the control characters newline and tab stay."""
    text = text.encode("utf-8", "replace").decode("utf-8").replace("\r\n", "\n")
    return CONTROLS.sub("", ESCAPES.sub("", text))


def read_prompt(name: str) -> str:
    """The text of prompts/<name>."""
    return (ROOT / "prompts" / name).read_text(encoding="utf-8")


@functools.cache
def read_table(name: str) -> Any:
    """The content of prompts/<name>, a YAML file."""
    return yaml.safe_load(read_prompt(name))


def fill(template: str, **values: str) -> str:
    """Puts values in for {names}; a paragraph with an empty value is left out."""
    slot = re.compile(r"\{([a-z_]+)\}")
    paragraphs = template.strip().split("\n\n")
    kept = [p for p in paragraphs if all(values.get(name, "?") for name in slot.findall(p))]
    return slot.sub(lambda found: values.get(found[1], found[0]), "\n\n".join(kept))


# ──── Part I · 2 Model: messages in, a reply out; only this section knows of the network ─────

Message = dict[str, str]  # role (system, user or assistant) and content
OnText = Callable[[str, bool], None]  # gets each piece of a reply as it comes; True: reasoning
OVERFLOW = re.compile(r"context[ _](length|size|window|limit)|maximum model length|prompt is too long", re.I)


@dataclass(frozen=True)
class Reply:
    """What the model said, or what one piece of a stream adds to it."""

    text: str
    reasoning: str = ""
    finish: str = "stop"  # "" = the stream ended without a reason
    usage: dict[str, int] | None = None  # prompt_tokens, completion_tokens … if the server tells

    def __add__(self, more: Reply) -> Reply:
        text, reasoning = self.text + more.text, self.reasoning + more.reasoning
        return Reply(text, reasoning, more.finish or self.finish, more.usage or self.usage)

    @property
    def cut(self) -> bool:
        """The reply ends too early: nothing in it may run."""
        return self.finish in ("", "length", "content_filter", "insufficient_system_resource")


class ModelError(Exception):
    """No usable reply: one line with what to do."""

    overflow = False  # the messages have outgrown the context window


class OpenAIModel:
    """Any server that speaks OpenAI's chat protocol. Every failure is a ModelError."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.name = settings, settings.model
        self.client: Any = None
        self.options: dict[str, Any] = {"temperature": settings.temperature, "stop": list(settings.stop),
                                        "stream_options": {"include_usage": True}}
        if not settings.stop:
            del self.options["stop"]

    def __call__(self, messages: list[Message], on_text: OnText) -> Reply:
        """Asks once; `on_text` sees the reply while it is written."""
        reply = nothing = Reply("", finish="")
        # Closed on Ctrl-C too, so that the server stops writing.
        with contextlib.closing(self.stream(messages)) as pieces:
            for piece in pieces:
                reply += piece
                for text, is_reasoning in ((piece.reasoning, True), (piece.text, False)):
                    if text:
                        on_text(self.safe(text), is_reasoning)
        if reply == nothing:
            raise self.explain(ValueError("the server's stream held no reply"))
        return replace(reply, text=self.safe(reply.text), reasoning=self.safe(reply.reasoning))

    def stream(self, messages: list[Message]) -> Generator[Reply, None, None]:
        """The pieces of a reply, in the end or when the connection breaks; of a plain reply one."""
        try:
            import openai  # here, because it takes a second and the offline mode needs none of it

            response = self.request(openai, messages)
            with contextlib.closing(response.http_response):
                # By its type, since the SDK takes a page of HTML for a stream of nothing.
                if "event-stream" in response.headers.get("content-type", ""):
                    with contextlib.suppress(openai.APIConnectionError):
                        yield from map(read_chunk, response.parse(to=openai.Stream[object]))
                else:
                    text = response.http_response.read().decode(errors="replace")
                    body = json.loads(text)
                    if not body.get("choices"):
                        raise ValueError(text)
                    yield Reply("") + read_chunk(body)
        except Exception as error:  # the SDK lets more through than its own errors
            raise self.explain(error) from None

    def request(self, openai: Any, messages: list[Message]) -> Any:
        """Sends it; an option that the server refuses by name is left out from then on."""
        if not self.client:
            openai._base_client.MAX_RETRY_AFTER_DELAY = 60  # seconds; longer waits are reported
            timeout = openai.Timeout(self.settings.read_timeout, connect=self.settings.connect_timeout)
            self.client = openai.OpenAI(api_key=self.settings.api_key or "local", timeout=timeout,
                                        base_url=self.settings.base_url, max_retries=2)
        create = self.client.chat.completions.with_raw_response.create
        while True:
            try:
                # As `messages` the SDK would walk through the whole history at each call: 124 ms
                # for 400 messages, against 3.6 ms in extra_body.
                body = {"messages": messages, **self.options}
                return create(model=self.name, messages=[], stream=True, extra_body=body)
            except openai.BadRequestError as error:
                named = [name for name in self.options if re.search(rf"\b{name}\b", str(error.body))]
                if not named:
                    raise
                del self.options[named[0]]

    def explain(self, error: Exception) -> ModelError:
        """What to do about an error, and at most 500 characters of what the server said."""
        said = str(getattr(error, "body", None) or getattr(error, "doc", None) or error.__cause__ or error)
        status = getattr(error, "status_code", 408 if "Timeout" in type(error).__name__ else 0)
        overflow = bool(OVERFLOW.search(said))
        meaning = 413 if overflow else 402 if "insufficient_quota" in said else min(status, 500)
        hints = read_table("help.yaml")["hints"]
        words = " ".join(self.safe(f"{status or ''} {said}").split())
        explained = ModelError(f"{hints.get(meaning, hints[400])} ({words[:500]})")
        explained.overflow = overflow
        return explained

    def safe(self, text: str) -> str:
        return self.settings.redact(clean(text))


def read_chunk(chunk: Any) -> Reply:
    """What a chunk adds. Each `or` stands for a server that sends null or an empty list."""
    chunk = chunk or {}
    choice = (chunk.get("choices") or [{}])[0] or {}
    delta = choice.get("delta") or choice.get("message") or {}
    content = delta.get("content") or ""
    if isinstance(content, list):
        content = "".join(part.get("text") or "" for part in content)
    reasoning = str(delta.get("reasoning_content") or delta.get("reasoning") or "")
    usage = {name: n for name, n in (chunk.get("usage") or {}).items() if isinstance(n, int)}
    return Reply(str(content), reasoning, choice.get("finish_reason") or "", usage or None)


class ScriptedModel:
    """Plays a list of replies, offline and in tests. `seen`: the messages of each call."""

    name = "scripted model"

    def __init__(self, replies: list[str]) -> None:
        self.seen: list[list[Message]] = []
        self.script = iter(replies)

    def __call__(self, messages: list[Message], on_text: OnText) -> Reply:
        """The next reply; {output} in it is the last observation without our notes."""
        self.seen.append([dict(message) for message in messages])
        reply = next(self.script, None)
        if reply is None:
            raise ModelError("the script is over")
        output = re.sub(r"\AObservation: (\$ .*\n)?|^\[.*\]$\n?", "", messages[-1]["content"], flags=re.M)
        reply = reply.replace("{output}", output.strip())
        on_text(reply, False)
        return Reply(reply)


Model = OpenAIModel | ScriptedModel


# ──── Part I · 3 Shell: a command goes in, the text that the model will read comes out ───────

# Of your environment only these reach a command: no key does.
PASSED_ON = r"PATH|HOME|USER|LOGNAME|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|VIRTUAL_ENV|CONDA_PREFIX"
# Nobody sits at the keyboard: pagers print, editors accept, password prompts fail at once.
# Python doesn't buffer: its errors come in order, and a timeout keeps what was printed before.
FIXED = {"TERM": "dumb", "PAGER": "cat", "GIT_PAGER": "cat", "EDITOR": "true", "GIT_EDITOR": "true",
         "GIT_TERMINAL_PROMPT": "0", "DEBIAN_FRONTEND": "noninteractive", "PYTHONUNBUFFERED": "1"}
KEEP = 65_536  # characters kept of either end of an output, before colours and progress bars go


def environment() -> dict[str, str]:
    """The environment of a command."""
    return {name: v for name, v in os.environ.items() if re.fullmatch(PASSED_ON, name)} | FIXED


def exit_note(code: int) -> str:
    """`[exit code 1]`, `[exit code 137: killed by SIGKILL]`, or nothing for 0."""
    # Python says -9, a shell 128 + 9 for a child of its own; 129 is git's code for a usage error.
    status = code if code >= 0 else 128 - code
    signals = {128 + s: f": killed by {s.name}" for s in signal.Signals if code < 0 or s > 1}
    return f"[exit code {status}{signals.get(status, '')}]" if status else ""


def visible(text: str) -> str:
    """What a terminal would still show: after a lone carriage return a line is written anew."""
    return clean("\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")))


class Output:
    """What a command prints, in flat memory: both ends are kept, what lies between is counted."""

    text = ""
    dropped = 0  # characters between text[:KEEP] and text[KEEP:]

    def drain(self, pipe: IO[bytes]) -> None:
        """Reads until the last writer has closed the pipe."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        with pipe:
            while chunk := pipe.read(65_536):
                text = self.text + decoder.decode(chunk)
                surplus = max(len(text) - 2 * KEEP, 0)
                self.dropped += surplus
                self.text = text[:KEEP] + text[KEEP + surplus :]

    def shorten(self, room: int, redact: Callable[[str], str]) -> str:
        """At most `room` characters, cleaned, with the number of those left out in the middle."""
        text = self.text.rstrip("\n")
        ends = [text[:KEEP], text[KEEP:]] if self.dropped else [text]
        ends = [redact(visible(end)) for end in ends]
        size = self.dropped + sum(map(len, ends))
        if size <= room:
            return "".join(ends) or "(no output)"
        half = max(room - 50, 2) // 2
        head, tail = ends[0][:half], ends[-1][-half:]
        return f"{head}\n[… {size - len(head) - len(tail)} characters left out …]\n{tail}"


class Shell:
    """Runs one command at a time, each in a new shell: `cd` and `export` last for one command.

    `name`, `folder` and `prefix` (empty: no sandbox) are facts for the prompt, `notice` is for
    the screen. ConfigError: a sandbox was demanded that can't be had.
    """

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings, self.folder = settings, folder.resolve()
        self.name = "bash" if shutil.which("bash") else "sh"
        self.prefix, self.notice = sandbox_prefix(settings, self.folder)

    def run(self, command: str) -> str:
        """The observation; a failure is a text too. Ctrl-C kills what runs and raises on."""
        if os.name == "nt":
            return "[error: commands need a POSIX shell; on Windows, start this program in WSL]"
        if refusal := guard(command, self.folder):
            return f"[refused: {refusal.reason}. Safer: {refusal.safer}]"
        try:
            return self.execute(command)
        except (OSError, ValueError) as error:  # no folder, no shell, a NUL, over 128 KiB, …
            return f"[error: the command could not be started: {error}]"

    def execute(self, command: str) -> str:
        """Starts it and waits; on timeout and Ctrl-C the whole process group is killed."""
        output, stopped = Output(), None
        process = subprocess.Popen(
            [*self.prefix, self.name, "-c", command], cwd=self.folder, env=environment(), bufsize=0,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True)  # no terminal to read keys from, and one group to kill
        # A thread, so that the shell's end is seen while a background child holds the pipe. It
        # reads on after that: a server started with `&` would die of a closed pipe.
        reader = threading.Thread(target=output.drain, args=(process.stdout,), daemon=True)
        reader.start()
        try:
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


class Action(NamedTuple):
    """The model wants a tool. `text`: the reply up to here; `ignored`: something came after it."""

    tool: str
    input: str
    thought: str
    text: str
    ignored: bool


class Final(NamedTuple):
    """The model answers."""

    answer: str
    thought: str
    text: str


class Invalid(NamedTuple):
    """Neither. `reason` is a key of prompts/nudges.yaml; `text` is the whole reply."""

    reason: str
    text: str


# A label is one of these words at the start of a line, perhaps bold or a heading, and a colon.
# Blanks are bounded: where two neighbours match the same, a regex would take quadratic time.
FINAL = "final[ _]?answer|最终答案|最终回答"
TOKEN = re.compile(rf"""
    ^[^\S\n]{{0,99}}(?:\#{{1,6}}[^\S\n]{{0,9}})?(?:\*\*)?(?:(?P<thought>thought|思考|想法)
        |(?P<input>action[ _]?\d{{0,3}}[ _]?input|(?:行动|动作|工具)(?:输入|参数))
        |(?P<action>action|行动|动作|工具)|(?P<final>{FINAL})|(?P<observation>observation|观察(?:结果)?))
        [^\S\n]{{0,9}}\d{{0,3}}(?:\*\*)?[^\S\n]{{0,9}}[:：](?:\*\*)?
    |^[^\S\n]{{0,99}}(?P<stopped>Observ[ation]{{0,5}})[^\S\n]{{0,99}}$  # what a stop string leaves
    |(?:^|(?<=[:：*]))[^\S\n]{{0,99}}(?P<fence>`{{3,}}|~{{3,}})[^`\n]*$
    |(?<!<)<<-?[^\S\n]?['\"\\]?(?P<heredoc>[A-Za-z_]\w*)
    """, re.MULTILINE | re.IGNORECASE | re.VERBOSE)
NO_TOOL = re.compile(r"[`\"'*]*(?:(?:none|n/a|null)\b|无|没有|不需要)", re.IGNORECASE)
FENCE = re.compile(r"^[ \t]*(?:```|~~~)", re.MULTILINE)
BLOCK = re.compile(r"(`{3,}|~{3,})(?:[^`\n]*\n(.*?)^[ \t]*\1[`~]*[ \t]*$|([^`\n]+)\1)(.*)\Z", re.S | re.M)
CALL = re.compile(  # tool(x), tool[command="x"], tool ({json}), Input: x, a code block below
    r"([\w.-]+)(?:[(（\[](?:\w+\s*=\s*(?=[\"']))?(.*)[)）\]]|\ \((\{.*\})\)"
    r"|\s+(?:Action )?Input[:：](.*)|\s*\n(```.*))\Z", re.DOTALL | re.IGNORECASE)


def parse_reply(text: str) -> Action | Final | Invalid:
    """The first directive decides; nothing after it can change its kind. Pure, raises nothing."""
    reply = unwrap(text)
    labels = find_labels(reply)
    sections = [reply[end:after[1]].strip() for (_, _, end), after in zip(labels, labels[1:])]
    for n, (kind, start, end) in enumerate(labels[:-2]):
        told = [sections[k] for k in range(n) if labels[k][0] in ("start", "thought")]
        thought = "\n".join(filter(None, told))
        if kind == "final":
            answer = clean_answer(reply[start:end], reply[end:].strip())
            # Below an empty label only further label lines: that is no text.
            empty = not sections[n] and all("\n" not in section for section in sections[n:])
            return Invalid("empty answer", reply) if empty else Final(answer, thought, reply)
        if kind == "action" and not NO_TOOL.match(sections[n]):
            return read_action(reply, labels[n + 1 :], sections[n:], thought)
    return Invalid("no label", reply) if reply else Invalid("empty", text)


def read_action(reply: str, after: list[Label], sections: list[str], thought: str) -> Action | Final | Invalid:
    """An Action label: `sections` begin with its text, `after` with the label that follows."""
    called, value, stop = sections[0], sections[1], after[1][1]
    if after[0][0] != "input":
        call = CALL.match(called)
        called, value = (call[1], call[call.lastindex or 1]) if call else (called, "")
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
    labels, position, lines = [("start", 0, 0)], 0, set(text.split("\n"))
    while token := TOKEN.search(text, position):
        kind, position = str(token.lastgroup), token.end()
        if kind == "fence":
            closing = re.compile(rf"^[ \t]*{token['fence']}[`~]*[ \t]*$", re.M).search(text, position)
            position = closing.end() if closing else len(text)
        elif kind == "heredoc" and labels[-1][0] == "input" and token["heredoc"] in lines:
            position = max(position, f"{text}\n".find(f"\n{token['heredoc']}\n", position))
        elif kind != "heredoc":
            labels.append((kind, token.start(), position))
    return [*labels, ("end", len(text), len(text)), ("end", len(text), len(text))]


# ---------------------------------------------------------------------------------- 5 Skills
# A skill is a folder with a SKILL.md. Every prompt lists its name and description (the file's
# frontmatter); the instructions below those cost nothing until `load_skill` asks for them.

FILE_MAX = 250_000  # bytes read of a file: enough for BODY_MAX characters of any script
BODY_LONG, BODY_MAX = 20_000, 50_000  # characters: a warning; the cut
CATALOGUE_MAX, FILES_MAX = 8_000, 40  # characters in every request; files a load answer names
SKILL_FILE = "[sS][kK][iI][lL][lL].[mM][dD]"
IGNORED = re.compile(
    r"\.|(node_modules|scripts|references|assets)$|(readme|license|changelog)([-_.]\w\w)*\."
)
FRONTMATTER = re.compile(r"((?:[ \t]*\n)*)---[ \t]*\n(.*?)^---[ \t]*(?:\n|\Z)(.*)", re.S | re.M)
FIELD = re.compile(r"^([\w-]+)[ \t]*[:：](.*(?:\n(?![\w-]+[ \t]*[:：]|#).*)*)", re.M)
FIELD_VALUE = re.compile(r"""\A(?:[>|][-+]?\s+)?(["']?)(.*)\1\Z""", re.S)
QUOTES = "\"'`“”‘’「」《》<>[](){}*$ \t\n"
# What stands round a name in {"skill": "x", …}, name=x or load_skill("x"):
CALL = re.compile(r"""^([\[{("'\s]*(load_skill|skill|name|input)["'\s]*[:=(])+|["']\s*[,})].*""")


class Skill(NamedTuple):
    """An entry of the table."""

    name: str
    description: str
    path: Path


def skill_key(text: str) -> str:
    """What a name and the requests for it have in common: `Code_Review.md` -> code-review."""
    text = unicodedata.normalize("NFKC", text).casefold().replace("\\", "/")
    text = CALL.sub("", text).lstrip(QUOTES).rstrip(QUOTES + "。.,;:")  # a leading .. stays
    text = re.sub(r"^(\.?/)?(skills/)?|(/skill)?\.md$|/$", "", text)
    return re.sub(r"[\s_‐-―−]+", "-", text)


def open_skill(path: Path) -> tuple[int, str, str]:
    """Line of the opening `---`, frontmatter, body. Errors: OSError, ValueError("line: why")."""
    if not path.is_file():  # opening a named pipe would wait for ever
        raise ValueError(" not found; a skill is skills/<name>/SKILL.md")
    with path.open("rb") as file:
        raw = file.read(FILE_MAX)
    try:  # FILE_MAX may have cut the last character in two
        text = raw.decode("utf-8-sig", "strict" if len(raw) < FILE_MAX else "ignore")
    except UnicodeDecodeError:
        raise ValueError(" not UTF-8: save the file as UTF-8") from None
    match = FRONTMATTER.match(text.replace("\r\n", "\n").replace("\r", "\n"))
    if not match:
        raise ValueError("1: no frontmatter between two lines that are just ---")
    return match[1].count("\n") + 1, match[2], match[3]


def read_fields(head: str) -> tuple[dict[str, str], int]:
    """The fields of a frontmatter; the line (from 0) that isn't valid YAML, -1 if all is."""
    line = 0
    try:
        fields = yaml.load(head, yaml.BaseLoader)  # only strings: a skill may be called `yes`
        if all(isinstance(fields.get(key, ""), str) for key in ("name", "description")):
            return fields, -1
    except Exception as error:  # PyYAML lets more through than its own: OverflowError, …
        marks = (getattr(error, "context_mark", None), getattr(error, "problem_mark", None))
        line = min((mark.line for mark in marks if mark and mark.line), default=0)
    return {key: FIELD_VALUE.sub(r"\2", text.strip()) for key, text in FIELD.findall(head)}, line


def one_line(text: object) -> str:
    """Valid text without line breaks; each run of white space is one blank."""
    return " ".join(clean(str(text)).split())


class Skills:
    """The skills below `skills_dir`; `problems` are lines for the user. Nothing here raises.

    Commands run in `folder` (default: the current one), so paths are told relative to it.
    """

    def __init__(self, skills_dir: Path, folder: Path | None = None) -> None:
        self.problems: list[str] = []
        self._dir = Path(os.path.abspath(skills_dir))
        self._folder = folder or Path.cwd()
        self._loaded: dict[str, str] = {}
        self._table = self._scan()
        # Fixed from here on: if message 0 changed, the server's prefix cache would be lost.
        self._listed = list(dict.fromkeys(self._table.values()))
        if len(self.catalogue()) > CATALOGUE_MAX:
            room = CATALOGUE_MAX // len(self._listed)
            self._listed = [s._replace(description=s.description[:room]) for s in self._listed]
            self._report(self._dir, f" descriptions cut to {room} characters: too many skills")

    def names(self) -> list[str]:
        """The names in the catalogue."""
        return [skill.name for skill in self._listed]

    def catalogue(self) -> str:
        """Lines `- name: description`; "" without skills."""
        return "\n".join(f"- {skill.name}: {skill.description}" for skill in self._listed)

    def forget(self) -> None:
        """To be called when the conversation no longer holds what was loaded."""
        self._loaded.clear()

    def load(self, request: str) -> str:
        """A skill's text, folder and files, or `[error: …]` with the valid names."""
        key = skill_key(clean(request[:500]))
        if key not in self._table:
            self._table = self._scan()  # it may be new
        skill = self._table.get(key)
        if not skill:
            near = difflib.get_close_matches(key, self._table, 1) or ["none"]
            return self._error(f"no skill {key!r}, nearest: {near[0]}. run_command reads files.")
        try:
            answer = self._answer(skill)
        except (OSError, ValueError) as error:
            return self._error(f"{skill.name}:{error}.")
        if self._loaded.get(skill.name) == answer:
            return f"[already loaded: {skill.name}, unchanged; its text stands above]"
        self._loaded[skill.name] = answer
        return answer

    def _answer(self, skill: Skill) -> str:
        """Our words come last: there is no end mark that a body could fake."""
        folder = skill.path.parent
        inside = folder.is_relative_to(self._folder)
        shown = one_line(folder.relative_to(self._folder) if inside else folder)
        body = clean(open_skill(skill.path)[2]).strip()
        body = re.sub(r"\{baseDir\}|\$\{(CLAUDE_)?SKILL_DIR\}", lambda _: shown, body)
        if len(body) > BODY_MAX:
            body = f"{body[:BODY_MAX]}\n[… cut here; the rest is in {shown}/{skill.path.name}]"
        depths = () if folder == self._dir else ("*", "*/*", "*/*/*")
        paths = [path for depth in depths for path in folder.glob(depth) if path != skill.path]
        names = sorted(one_line(p.relative_to(folder)) for p in paths if os.path.isfile(p))
        files = [name for name in names if not re.search(r"(^|/)(\.|node_modules/)", name)]
        return (
            f"Skill: {skill.name}\n\n{body}\n\nSkill directory: {shown}\n"
            "[relative paths are relative to it; in a command put them in quotes]\n"
            f"[files: {', '.join(files[:FILES_MAX]) or 'none'}; {len(files)} in all]"
        )

    def _scan(self) -> dict[str, Skill]:
        """Look-up key -> skill. Folders come before flat files; the first one keeps a name."""
        self.problems.clear()
        table: dict[str, Skill] = {}
        aliases: dict[str, Skill] = {}
        for entry in sorted(self._dir.glob("*"), key=lambda path: (os.path.isfile(path), path)):
            flat = os.path.isfile(entry)
            path = entry if flat else min(entry.glob(SKILL_FILE), default=entry / "SKILL.md")
            if path.suffix.casefold() != ".md" or IGNORED.match(entry.name.casefold()):
                continue
            for deep in sorted(entry.glob("*/SKILL.md")):
                self._report(deep, " one level too deep: not used")
            place = one_line(entry.stem if flat else entry.name)
            try:
                skill = self._examine(path, place)
            except (OSError, ValueError) as error:
                self._report(path, str(error))
                continue
            first = table.setdefault(skill_key(skill.name), skill)
            if first is skill:
                aliases[skill_key(place)] = skill
            else:
                self._report(path, f" name taken by {first.path.relative_to(self._dir)}")
        return aliases | table

    def _examine(self, path: Path, place: str) -> Skill:
        """The skill in `path`; faults that don't stop it are reported. Errors: as open_skill."""
        top, head, body = open_skill(path)
        fields, bad_line = read_fields(head)
        name = fields.get("name", "").strip()
        description = one_line(fields.get("description", ""))
        if not description:
            line = top + 1 + re.split("^description", head, flags=re.M)[0].count("\n")
            raise ValueError(f"{line}: no description; the model needs it to choose the skill")
        if str(fields.get("disable-model-invocation")).lower() == "true":
            raise ValueError(" hidden by disable-model-invocation")
        standard = re.fullmatch(r"(?!.{65})[^\W_A-Z]+(-[^\W_A-Z]+)*", name)
        faults = [
            (bad_line >= 0, f"{top + 1 + bad_line}: not valid YAML; put the value in quotes"),
            (name != place or not standard, f" name {name!r} is not the folder's in a-z, 0-9, -"),
            (len(description) > 1024, " description longer than 1024 characters: cut"),
            (len(body) > BODY_LONG, f" {len(body)} characters are much for one context"),
            (path.name in ("skill.md", "Skill.md", "SKILL.MD"), " should be called SKILL.md"),
        ]
        for applies, fault in faults:
            if applies:
                self._report(path, fault)
        if not name.isprintable() or re.search(r"[/\\]|\.\.|^$", name):
            name = place  # what looks like a path is no name
        return Skill(name, description[:1024], path)

    def _report(self, path: Path, fault: str) -> None:
        self.problems.append(one_line(f"{path.relative_to(self._dir.parent)}:{fault}"))

    def _error(self, message: str) -> str:
        names = dict.fromkeys(skill.name for skill in self._table.values())
        return f"[error: {one_line(message)} Skills: {', '.join(names) or 'none'}]"


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
    actions: list[tuple[str, str]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)  # of the invalid replies in a row
    refusals: int = 0  # in a row
    last: bool = False  # the model was asked for its best answer so far
    summaries: list[int] = field(default_factory=list)  # steps at which the history was compacted


class Agent:
    """A conversation with a model that can act: `ask` runs a turn, `history` is all it knows.

    `listeners` are called with each event and its data: the trace draws it, the session keeps it.
    A new tool is one entry of `tools`: its name, a line for the prompt, and a function from the
    Action Input to the text of the observation.
    """

    def __init__(self, settings: Settings, model: Model, folder: Path | None = None,
                 listeners: Iterable[Listener] = ()) -> None:
        self.settings, self.model, self.listeners = settings, model, list(listeners)
        self.texts: dict[str, str] = read_table("nudges.yaml")
        self.shell = Shell(settings, folder or Path.cwd())
        self.skills = Skills(settings.skills_dir, self.shell.folder)
        self.tools: dict[str, tuple[str, Callable[[str], str]]] = {
            "run_command": (self.texts["run_command"], self.shell.run),
            "load_skill": (self.texts["load_skill"], self.skills.load),
        }
        ablate_tools(self)
        self.history = History(settings, self.emit)
        self.reset()

    def reset(self) -> None:
        """Starts a conversation afresh."""
        self.skills.forget()
        self.history.clear()
        self.emit("header", format=FORMAT, model=self.model.name, folder=str(self.shell.folder),
                  protocol=self.settings.protocol, ablations=self.settings.ablations)
        self.history.add("system", system_prompt(self))

    def ask(self, question: str) -> Result:
        """Runs one turn. Raises nothing: errors and Ctrl-C are statuses of the result."""
        turn = Turn()
        try:
            self.history.add("question", question)
            result = self.run_turn(turn)
        except ModelError as error:
            result = Result("error", remark=str(error))
        except KeyboardInterrupt:
            result = Result("interrupted", remark="stopped by Ctrl-C")
        result = result._replace(steps=turn.step)
        self.history.ending = result.status
        self.emit("result", **result._asdict())
        return result

    def run_turn(self, turn: Turn) -> Result:
        """The loop itself."""
        for turn.step in range(1, self.settings.max_steps + 1):
            parsed = self.parse(turn, self.think(turn))
            if isinstance(parsed, Final):
                return Result("max_steps" if turn.last else "final", parsed.answer)
            ended = self.act(turn, parsed) if isinstance(parsed, Action) else self.nudge(turn, parsed)
            if ended:
                return ended
        return Result("max_steps", remark=f"no answer within {self.settings.max_steps} steps")

    def think(self, turn: Turn) -> Reply:
        """One model call, after making room for it where the context window is nearly full."""
        if is_full(self):
            compact(self, turn)
        try:
            return self.request(turn)
        except ModelError as error:
            if not error.overflow or not compact(self, turn, overflow=True):
                raise
            return self.request(turn)

    def request(self, turn: Turn) -> Reply:
        """Sends the view of the history; the reply streams to the listeners."""
        view = self.history.view()
        sent = [note.message for note in view]
        self.emit("request", step=turn.step, sent=sent, numbers=[note.number for note in view])
        reply = self.model(sent, lambda text, dim: self.emit("text", text=text, dim=dim))
        self.emit("reply", step=turn.step, **vars(reply))
        return reply

    def parse(self, turn: Turn, reply: Reply) -> Action | Final | Invalid:
        """What the reply says. What it invented after that stays out of the history."""
        parsed = PROTOCOLS[self.settings.protocol](reply.text)
        if reply.cut:
            parsed = Invalid("cut", parsed.text)
        self.history.add("reply", parsed.text or "(empty reply)")
        self.emit("parsed", step=turn.step, kind=type(parsed).__name__, **parsed._asdict())
        return parsed

    def act(self, turn: Turn, action: Action) -> Result | None:
        """Runs a tool and adds its observation. Returns a result where a limit ends the turn."""
        turn.faults.clear()
        turn.actions.append((action.tool, action.input))
        repeats = count_repeats(turn.actions)
        if turn.step == self.settings.max_steps or repeats == 5:
            self.observe(turn, action, "[not run: no step is left for it]")
            return Result("repeated", remark="the same five times in a row") if repeats == 5 else None
        self.emit("command", step=turn.step, tool=action.tool, input=action.input)
        output = self.use_tool(turn, action)
        due = {"repeat": repeats >= 3, "ignored": action.ignored}
        self.observe(turn, action, "\n".join([output, *(self.texts[key] for key in due if due[key])]))
        turn.refusals = turn.refusals + 1 if output.startswith("[refused:") else 0
        return Result("refused", remark="three refusals in a row") if turn.refusals == 3 else None

    def use_tool(self, turn: Turn, action: Action) -> str:
        """The tool's output; whatever goes wrong becomes a text that the model can act on."""
        if action.tool not in self.tools:
            return f"[error: no tool is called {action.tool}; the tools: {', '.join(self.tools)}]"
        try:
            return self.tools[action.tool][1](action.input)
        except KeyboardInterrupt as interrupt:
            self.observe(turn, action, f"{interrupt}\n[interrupted by the user]")
            raise
        except Exception as error:
            return f"[error: {type(error).__name__}: {error}]"

    def nudge(self, turn: Turn, invalid: Invalid) -> Result | None:
        """Says what was wrong with a reply. Returns a result where that was said often enough."""
        turn.faults.append(invalid.reason)
        if invalid.reason == "no label" and (turn.last or turn.faults[-2:-1] == ["no label"]):
            status = "max_steps" if turn.last else "final"
            return Result(status, invalid.text, remark="prose without a label, taken as the answer")
        if len(turn.faults) == 3 or turn.faults[1:] and {"empty", "cut"}.issuperset(turn.faults[-2:]):
            status = "cut" if invalid.reason == "cut" else "invalid"
            return Result(status, remark=f"no usable reply: {', '.join(turn.faults)}")
        self.tell(turn, "nudge", fill(self.texts[invalid.reason], form=reply_form(self)))
        return None

    def observe(self, turn: Turn, action: Action, output: str) -> None:
        """Adds what a tool returned, below the command that it belongs to."""
        kind = "skill" if action.tool == "load_skill" else "observation"
        command = f"$ {action.input}\n" if action.tool == "run_command" else ""
        note = self.tell(turn, kind, f"Observation: {command}{output}")
        self.emit("observation", step=turn.step, number=note.number)

    def tell(self, turn: Turn, kind: str, text: str) -> Note:
        """Adds a message of ours; before the last step it asks for the best answer so far."""
        turn.last = turn.step == self.settings.max_steps - 1
        return self.history.add(kind, f"{text}\n{self.texts['last_step']}" if turn.last else text)

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
    return text if plain or kind not in COLOURS else f"{COLOURS[kind]}{text}{Style.RESET_ALL}"


class Trace:
    """Draws the events of an agent: per step what was sent, replied, parsed and observed.

    Mode `full`: every message of every request, those shown before dimmed, or in one line where
    nothing can be dimmed unless `again`; `new`: those always in one line; `off`: nothing.
    """

    def __init__(self, mode: str, out: TextIO, again: bool = False) -> None:
        self.mode, self.out = mode, out
        self.again = mode == "full" and (again or paint(out, "dim", "") != "")
        self.usages: list[dict[str, int] | None] = []

    def __call__(self, event: str, data: dict[str, Any]) -> None:
        draw = getattr(self, f"on_{event}", None)
        if draw and self.mode != "off":
            draw(data)

    def say(self, text: str, kind: str = "", end: str = "\n") -> None:
        print(paint(self.out, kind, text), end=end, file=self.out, flush=True)

    def rule(self, data: dict[str, Any], block: str, state: str, remark: str) -> None:
        """The line above a block: the step, the block, and the state of article 001."""
        dash = "─" if self.out.encoding.lower().startswith("utf") else "-"
        self.say(f"{dash * 2} step {data['step']}: {block} ({state}) {remark} ".ljust(80, dash), "dim")

    def on_header(self, data: dict[str, Any]) -> None:
        self.notes: dict[int, Note] = {}
        self.shown: set[int] = set()
        self.hidden = data["ablations"]
        self.title = " ".join([data["model"], data["protocol"], *(f"--no-{name}" for name in self.hidden)])

    def on_message(self, data: dict[str, Any]) -> None:
        self.notes[data["number"]] = Note(data["number"], data["kind"], data["content"])

    def on_request(self, data: dict[str, Any]) -> None:
        notes = ablate([self.notes[number] for number in data["numbers"]], self.hidden)
        self.rule(data, "sent", "thinking", f"{len(notes)} messages")
        for number, kind, text in notes:
            known = number in self.shown
            self.shown.add(number)
            head = f"[{number}] {kind}, {len(text):,} characters"
            self.say(f"{head}, as before" if known and not self.again else f"{head}\n{text}", "dim" if known else kind)
        self.rule(data, "reply", "thinking", self.title)

    def on_text(self, data: dict[str, Any]) -> None:
        self.say(data["text"], "dim" if data["dim"] else "", end="")

    def on_reply(self, data: dict[str, Any]) -> None:
        self.usages.append(data["usage"])
        self.say(f"\n[tokens: {count_usage([data['usage']])}]", "dim")

    def on_parsed(self, data: dict[str, Any]) -> None:
        self.rule(data, "parsed", STATES[data["kind"]], data["kind"])
        for name in ("tool", "input", "reason"):
            if name in data:
                self.say(f"{name}: {data[name]}", "error" if name == "reason" else "action")
        if data.get("ignored"):
            self.say("[what came after it was dropped]", "dim")

    def on_observation(self, data: dict[str, Any]) -> None:
        self.rule(data, "observation", "observing", "")
        self.say(self.notes[data["number"]].content, "observation")

    def on_compaction(self, data: dict[str, Any]) -> None:
        self.notes |= {number: Note(number, *added) for number, *added in data["notes"] if added}
        self.say(f"[compacted: {data['before']} → {data['after']} tokens, estimated]", "dim")

    def on_result(self, data: dict[str, Any]) -> None:
        total = f"{data['steps']} steps, {count_usage(self.usages)} tokens"
        self.say(f"[{data['status']}: {total}{data['remark'] and ', ' + data['remark']}]", "dim")
        self.usages = []


def count_usage(usages: list[dict[str, int] | None]) -> str:
    """Tokens in and out as the server told them; `n/a` where it left one out."""
    told = [usage for usage in usages if usage]
    sums = [sum(usage.get(f"{name}_tokens", 0) for usage in told) for name in ("prompt", "completion")]
    return f"{sums[0]:,} in, {sums[1]:,} out" if told and len(told) == len(usages) else "n/a"


# ── 8 Guard ──────────────────────────────────────────────────────────────────────────────────────
# A seat belt for honest mistakes; the sandbox is the fence. One idea: what stands in quotes is made
# inert (each special character becomes a twin from Unicode's private area), so that after it plain
# patterns see only what the shell would act on. Patterns and rules are data: prompts/guard.yaml.

GUARD_LIMIT = 16_000  # characters without heredoc bodies; what is longer is beyond a quick look
_TWINS = {ord(char): 0xE000 + ord(char) for char in " \t\n;&|<>()#'\"\\`$*?~"}
_UNTWIN = {twin: char for char, twin in _TWINS.items()} | {0xE000: None}  # E000: an empty word


@dataclass(frozen=True)
class Refusal:
    """Why a command isn't run, and what to do instead; `rule` names the family of the rule."""

    rule: str
    reason: str
    safer: str


def guard(command: str, folder: Path | str) -> Refusal | None:
    """Refuse a command that would do harm; None lets it pass. Runs nothing, never raises."""
    try:
        return _judge(command, str(folder))
    except Exception:  # what can't be read isn't run
        return Refusal("unreadable", "this is too long or too tangled to check", "write it simpler")


@functools.cache
def _guard_data() -> Any:
    """prompts/guard.yaml, with each <name> replaced by its pattern."""
    text = read_prompt("guard.yaml")
    for name, pattern in yaml.safe_load(text)["names"].items():
        text = text.replace(f"<{name}>", pattern.replace("'", "''"))
    return yaml.safe_load(text)


@functools.lru_cache(maxsize=512)  # one command often names a program many times
def _rules_for(program: str) -> list[dict[str, str]]:
    return [row for row in _guard_data()["rules"] if re.fullmatch(row["program"], program)]


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(_guard_data()["reading"][name])


def _judge(command: str, folder: str) -> Refusal | None:
    """Hold a command, and every script found inside it, against the rules."""
    known = {"HOME": os.path.expanduser("~"), "PWD": ".", "FOLDER": folder, "TMPDIR": "/tmp"}
    scripts = [command]
    for script in scripts:  # grows while it is read
        for program, arguments, places in _simple_commands(_mask(script), known):
            readable = arguments.replace(" ", "\0").translate(_UNTWIN)
            for row in _rules_for(program):
                if "inside" in row:
                    found = re.finditer(row["inside"], readable)
                    scripts += [match.expand(row["script"]) for match in found]
                elif _applies(row, arguments, places):
                    return Refusal(row["rule"], row["reason"], row["safer"])
        if len(scripts) > 200:
            raise ValueError("too many scripts inside scripts")
    return None


def _applies(row: dict[str, str], arguments: str, places: str) -> bool:
    found = re.search(row.get("arguments", ""), arguments)
    found = found and re.search(row.get("path", ""), places)
    return bool(found) and not re.search(row.get("unless", "(?!)"), arguments)


def _mask(script: str) -> str:
    """The script without comments, its quotes, substitutions and heredoc bodies made inert."""

    def fold(heredoc: re.Match[str]) -> str:  # what a shell or python reads is code, like its -c
        body = heredoc["body"][:4000] if heredoc["code"] or heredoc["pipe"] else ""
        folded = f"{heredoc['code'] or ''} -c {body.translate(_TWINS)} {heredoc['rest']}"
        return folded if heredoc["end"] else heredoc[0]

    def inert(match: re.Match[str]) -> str:
        whole = match[0]
        if whole[0] == '"':  # variables and substitutions stay active
            text = _pattern("active").sub(inert, whole[1:-1])
            return text.translate(_TWINS | {ord("$"): ord("$")}) or "\ue000"
        if whole[0] in "$<>`":
            return "\ue001" + whole.translate(_TWINS)
        return "" if whole[0] == "#" else whole.strip("\\'").translate(_TWINS) or "\ue000"

    text = _pattern("heredoc").sub(fold, script.replace("\\\n", " "))
    if len(text) > GUARD_LIMIT:
        raise ValueError("too long")
    return _pattern("choice").sub(";", _pattern("quoted").sub(inert, text).replace("<<<", " -c "))


def _simple_commands(text: str, known: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    """(program, arguments, places of the operands): the script as one, its redirects, commands."""
    yield "script", re.sub(r"[ \t]+", " ", text), ""
    for part in _pattern("separator").split(text):
        for name, value in _pattern("assignment").findall(part):
            known[name] = _place(value, known)
        for sign, target in _pattern("redirect").findall(part):
            yield sign, target, _place(target, known)
        command = _pattern("prefix").sub("", _pattern("redirect").sub(" ", part))
        program, *words = command.split() or [""]
        if program in ("cd", "pushd"):
            known["PWD"] = _place((words or ["~"])[0], known)
        places = " ".join(_place(word, known) for word in words if word[0] != "-")
        yield program, " ".join(words), places


def _place(word: str, known: dict[str, str]) -> str:
    """Where a word points, as the rules write it: `~/x`, `./x`, `..` (above), `/etc/x`."""
    word = re.sub(r"^[\w-]+=@?|^@(?=[\w./~$])", "", word)
    word = _pattern("variable").sub(lambda m: known.get(m[1] or m[2]) or m[3] or "\0", word)
    word = re.sub(r"^\0(?=/\*+$)", "", word)  # an unknown variable before /* may well be empty
    word = re.sub(r"^(.*/)?~(?=/|$)", lambda m: known["HOME"], os.path.join(known["PWD"], word))
    path = "/" + os.path.normpath(os.path.join(known["FOLDER"], word)).lstrip("/")
    path = re.sub(r"(/[.?*]*\*)+$", "", path) or "/"
    for base, name in ((known["FOLDER"], "."), (known["HOME"], "~")):
        if (path + "/").startswith(base + "/"):
            return name + path[len(base) :]
    return ".." if known["FOLDER"].startswith(path + "/") else path


def sandbox_prefix(settings: Settings, folder: Path) -> tuple[list[str], str]:
    """Words to put before `bash -c …`, and one line for the screen ("" when all is well).

    Covered: outside `folder` nothing can be changed; home, /tmp, /run, `.env` and other processes
    can't be seen; no network unless `settings.network`. Not covered: `folder` itself.
    Raises ConfigError when `settings.sandbox` is "bwrap" and it can't be had.
    """
    if settings.sandbox == "off":
        return [], ""
    prefix = bwrap_command(settings.network, folder.resolve())
    problem = preflight(prefix)
    if Path.home().resolve().is_relative_to(folder.resolve()):
        problem = "the working folder is your home folder or holds it; use a folder of its own"
    if problem and settings.sandbox == "bwrap":
        raise ConfigError(f"--sandbox bwrap: {problem}")
    return ([], f"sandbox off: {problem}") if problem else (prefix, "")


def bwrap_command(network: bool, folder: Path) -> list[str]:
    """bubblewrap and its arguments; a later mount lies over the earlier ones."""
    home, python = Path.home().resolve(), Path(sys.prefix)
    hidden = [path for path in (Path("/tmp"), Path("/run"), home) if path.is_dir()]
    needed = [ROOT, python, Path(sys.base_prefix), *map(Path, os.get_exec_path())]
    # Single files, since a folder ~/.config/git may hold a `credentials` file.
    needed += [home / name for name in (".gitconfig", ".config/git/config", ".config/git/ignore")]
    needed += [Path("/etc/resolv.conf").resolve()] if network else []
    shown = [p for p in needed if any(top in p.parents for top in hidden) and os.path.exists(p)]
    # Without --cap-drop root would keep its capabilities, and could undo the mounts; without
    # --die-with-parent a background child would outlive its shell.
    words = ["bwrap", "--unshare-all", "--cap-drop", "ALL", "--die-with-parent"]
    words += ["--share-net"] if network else []
    words += ["--unsetenv", "TMPDIR", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
    words += [word for path in hidden for word in ("--tmpfs", str(path))]
    words += [word for path in shown for word in ("--ro-bind", str(path), str(path))]
    # A version manager's `python3` is a script that looks for the rest of it below home.
    first_path = os.pathsep.join([f"{python}/bin", *os.get_exec_path()])
    words += ["--setenv", "PATH", first_path] if python in shown else []
    words += ["--bind", str(folder), str(folder), "--chdir", str(folder)]
    for secret in {(ROOT / ".env").resolve(), (folder / ".env").resolve()}:
        words += ["--ro-bind", "/dev/null", str(secret)] if secret.is_file() else []
    log = (folder / ".agent").resolve()
    return words + (["--tmpfs", str(log)] if log.is_dir() else [])


def preflight(prefix: list[str]) -> str:
    """Run `true` in the sandbox: "" if that works, else what is missing and how to get it."""
    if not shutil.which("bwrap"):
        return "bubblewrap is not installed (Linux: apt, dnf or pacman install bubblewrap)"
    argv = [*prefix, "true"]
    done = subprocess.run(argv, env=environment(), capture_output=True, errors="replace")
    hint = "the system must allow user namespaces, see the README"
    return f"{visible(done.stderr).strip()} ({hint})" if done.returncode else ""


# ──── Part II · 9 Memory: the history, the session on disk, the context window ───────────────


FORMAT = 1  # of the session files


class Note(NamedTuple):
    """A message of the history. `kind`: system, question, reply, observation, skill, nudge …"""

    number: int
    kind: str
    content: str

    @property
    def message(self) -> Message:
        """As a server gets it. What a tool returned is the user's: there is no other role."""
        roles = {"system": "system", "reply": "assistant", "ending": "assistant"}
        return {"role": roles.get(self.kind, "user"), "content": self.content}


class History:
    """What the model knows: `notes`, in order. `every` holds those that were compacted away, too."""

    def __init__(self, settings: Settings, emit: Callable[..., None]) -> None:
        self.settings, self.emit = settings, emit
        self.clear()

    def clear(self) -> None:
        self.notes: list[Note] = []
        self.every: dict[int, Note] = {}
        self.ending = "interrupted"  # how the last turn ended, as far as is known

    def add(self, kind: str, content: str) -> Note:
        """The only way in: clean, without a key, never empty, and on disk before it is here."""
        if kind == "question" and self.notes[-1].message["role"] == "user":
            self.add("ending", f"[turn ended: {self.ending}]")  # since roles have to alternate
        content = self.settings.redact(clean(content)).strip() or "(empty)"
        note = Note(next(reversed(self.every), -1) + 1, kind, content)
        self.emit("message", **note._asdict())
        self.attach(note)
        return note

    def attach(self, note: Note) -> None:
        """Appends a note; a system message takes the place of the one before."""
        self.every[note.number] = note
        last = self.notes[-1] if self.notes else None
        if note.kind == "system":
            self.notes = [note, *(old for old in self.notes if old.kind != "system")]
        elif last and last.message["role"] == note.message["role"]:  # a line of the log got lost
            self.notes[-1] = last._replace(content=f"{last.content}\n{note.content}")
        else:
            self.notes.append(note)

    def replay(self, event: dict[str, Any]) -> None:
        """Applies an event of a log. KeyError, TypeError, ValueError: it has a wrong shape."""
        if event["event"] == "message":
            self.attach(Note(int(event["number"]), str(event["kind"]), str(event["content"])))
        elif event["event"] == "compaction":
            self.notes = []
            for number, *added in event["notes"]:
                self.attach(Note(number, *added) if added else self.every[number])
        elif event["event"] == "result":
            self.ending = str(event["status"])

    def view(self) -> list[Note]:
        """The notes as the model sees them: all, unless an ablation hides a part."""
        return ablate(self.notes, self.settings.ablations)


class Session:
    """The log of a conversation: .agent/sessions/<time>.jsonl, one event a line.

    A file begins with the first question. Each event is one write, made before memory changes: a
    process killed at any point leaves whole lines. A folder that can't be written is warned of
    once, and the agent works on without a log.
    """

    def __init__(self, folder: Path) -> None:
        self.home, self.file, self.broken = folder / ".agent" / "sessions", -1, False
        self.waiting: list[dict[str, Any]] = []

    def __call__(self, event: str, data: dict[str, Any]) -> None:
        if event == "header":  # a new conversation, a new file
            self.file, self.waiting = -1, []
        if event == "request":  # the messages themselves are in the log already
            data = data | {"sent": hashlib.sha256(json.dumps(data["sent"]).encode()).hexdigest()}
        if event == "text" or self.broken:
            return
        now = datetime.datetime.now().isoformat(timespec="microseconds")
        self.waiting.append({"event": event, "time": now, **data})
        try:
            if self.file < 0 and data.get("kind") == "question":
                self.open(self.home / f"{now.replace(':', '')}.jsonl")
            while self.file >= 0 and self.waiting:
                line = json.dumps(self.waiting.pop(0), ensure_ascii=False, default=str)
                os.write(self.file, f"{line}\n".encode())
        except OSError as error:
            self.broken = True
            print(f"agent.py: no session is kept: {error}", file=sys.stderr)

    def open(self, path: Path) -> None:
        """Opens a file and locks it. OSError; ConfigError: another process has it."""
        self.home.mkdir(parents=True, exist_ok=True)
        self.home.parent.chmod(0o700)
        (self.home.parent / ".gitignore").write_text("*\n")
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        if os.name == "posix":
            import fcntl

            try:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"session {path.stem} is in use by another process") from None

    def paths(self, name: str = "") -> list[Path]:
        """The files whose name begins with `name`, the newest last. ConfigError: none."""
        found = sorted(self.home.glob(f"{glob.escape(name)}*.jsonl"))
        if not found:
            raise ConfigError(f"no session {name!r} in {self.home}; --sessions lists them")
        return found

    def resume(self, agent: Agent, path: Path) -> str:
        """Makes a log's history the agent's and goes on in it; says in a line what it did.

        An action without an observation is not run again, since it may have run.
        """
        self.open(path)
        history, system = agent.history, agent.history.notes[0].content
        events, bad = read_log(path)
        os.ftruncate(self.file, path.read_bytes().rfind(b"\n") + 1)
        self.waiting = []
        history.clear()
        for event in events:
            try:
                history.replay(event)
            except (KeyError, TypeError, ValueError):
                bad.append(event["line"])
        repairs = [f"line {line} skipped" for line in sorted(bad)]
        if not history.notes or history.notes[0].content != system:
            history.add("system", system)
        last = history.notes[-1]
        if last.kind == "reply" and isinstance(PROTOCOLS[agent.settings.protocol](last.content), Action):
            history.add("observation", "Observation: [result unknown: interrupted, not run again]")
            repairs.append("one result is unknown")
        return "; ".join([f"resumed {path.stem}: {len(history.notes)} messages", *repairs])


def read_log(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The events of a session's whole lines, and the numbers of the bad ones. ConfigError."""
    events, bad = [], []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            events.append({**json.loads(line), "line": number})
            if events[-1]["event"] == "header" and events[-1]["format"] != FORMAT:
                raise ConfigError(f"session {path.stem} has a format that this version can't read")
        except (ValueError, TypeError, KeyError, RecursionError):
            bad.append(number)
    return events, bad


def summary_line(path: Path) -> str:
    """A session in a line: name, questions, steps, how it ended, the first question."""
    events = read_log(path)[0]
    asked = [str(event["content"]) for event in events if event.get("kind") == "question"] or [""]
    ended = [event["status"] for event in events if event["event"] == "result"] or ["cut off"]
    steps = sum(event["event"] == "request" for event in events)
    return f"{path.stem}  {len(asked)} questions  {steps} steps  {ended[-1]}  {asked[0][:60]!r}"


def count_tokens(notes: Iterable[Note]) -> int:
    """Estimated as UTF-8 bytes / 3 (article 000, 3.3), with 12 bytes a message for its role."""
    return -(-sum(len(note.content.encode()) + 12 for note in notes) // 3)


def threshold(window: int) -> int:
    """Tokens of a request above which the history is compacted."""
    return min(window * 4 // 5, window - reserve(window))


def is_full(agent: Agent) -> bool:
    """The next request would pass the threshold; never where the window is unknown."""
    window = agent.settings.context_window
    return 0 < threshold(window) < count_tokens(agent.history.view())


def compact(agent: Agent, turn: Turn, overflow: bool = False) -> bool:
    """Replaces the older messages by a summary; True if the history is shorter by 10 % at least.

    The system message and about 16 % of the window at the end stay, an action with its
    observation. Without a summary, and only if the window would overflow, the middle is dropped.
    """
    history, before = agent.history, count_tokens(agent.history.notes)
    window = agent.settings.context_window or before
    border = find_border(history.notes, window)
    overflow = overflow or before > window - reserve(window)
    for text in (summarise(agent, turn, border), "[earlier messages were left out]" if overflow else ""):
        notes = rebuild(agent, text, history.notes[border:], window)
        if text and count_tokens(notes) <= before * 0.9:
            agent.emit("compaction", before=before, after=count_tokens(notes), summary=text, notes=[
                [note.number] if note.number in history.every else list(note) for note in notes])
            history.every |= {note.number: note for note in notes}
            history.notes = notes
            agent.skills.forget()
            return True
    return False


def reserve(window: int) -> int:
    """Tokens that are kept free for a reply."""
    return min(1024, window // 4)


def find_border(notes: list[Note], window: int) -> int:
    """Where the messages begin that stay; an action is not parted from its observation."""
    borders = [n for n in range(2, len(notes)) if notes[n].kind in ("question", "reply")] or [2]
    sizes = list(itertools.accumulate(count_tokens([note]) for note in notes))
    # The end that stays is small, and the request for a summary of the rest fits the window.
    small = [n for n in borders if sizes[-1] - sizes[n - 1] <= window * 0.16] or borders[-1:]
    fitting = [n for n in borders if n <= small[0] and sizes[n - 1] <= window - 2 * reserve(window)]
    return fitting[-1] if fitting else small[0]


def summarise(agent: Agent, turn: Turn, border: int) -> str:
    """The model's summary of what is before the border; "" if it fails. Three a turn at most."""
    if turn.step in turn.summaries or len(turn.summaries) == 3:
        return ""
    turn.summaries.append(turn.step)
    sent = [note.message for note in agent.history.notes[:border]]
    request = read_prompt("compact.md").split("\n---\n")[0].strip()
    if sent[-1]["role"] == "user":
        request = f"{sent.pop()['content']}\n\n{request}"
    try:
        reply = agent.model([*sent, {"role": "user", "content": request}], lambda text, dim: None)
    except ModelError:
        return ""
    return "" if reply.cut else reply.text.strip()


def rebuild(agent: Agent, summary: str, tail: list[Note], window: int) -> list[Note]:
    """The system message, a summary with the user's own words and the skills, and the tail."""
    away = [note for note in agent.history.every.values() if note not in tail]
    asked = [f"- {note.content}" for note in away if note.kind == "question"]
    loaded = {note.content: note for note in away if note.content.startswith("Observation: Skill: ")}
    names = ", ".join(skill.split("\n")[0].removeprefix("Observation: Skill: ") for skill in loaded)
    fits = count_tokens(loaded.values()) <= window // 4
    number = next(reversed(agent.history.every)) + 1
    while True:
        content = fill(read_prompt("compact.md").split("\n---\n")[1], summary=summary, questions="\n".join(asked),
                       skills="\n\n".join(loaded) if fits else "", again="" if fits else names)
        middle = [Note(number, "summary", content), Note(number + 1, "ending", "[noted]")]
        notes = [agent.history.notes[0], *middle[: 2 if tail[:1] and tail[0].kind == "question" else 1], *tail]
        if len(asked) <= 3 or count_tokens(notes) < window - 2 * reserve(window):
            return notes
        del asked[2]  # the first ones often hold what is to be obeyed all along


# ──── Part II · 10 Protocol variants, ablations, edges ───────────────────────────────────────


FORMS = {  # the other protocols: the loop and the results stay the same
    "xml": re.compile(r"""<tool\s+name=["']?(?P<tool>\w+)["']?\s*>(?P<input>.*?)</tool>
        |<answer>(?P<answer>.*?)(?:</answer>|\Z)""", re.DOTALL | re.VERBOSE),
    "json": re.compile(r""""tool"\s*:\s*"(?P<tool>\w+)"\s*,\s*"input"\s*:\s*(?P<input>"(?:[^"\\]|\\.)*")
        |"answer"\s*:\s*(?P<answer>"(?:[^"\\]|\\.)*")""", re.DOTALL | re.VERBOSE),
}


def parse_form(name: str, text: str) -> Action | Final | Invalid:
    """The first directive of a reply in xml or json, whose values are the strings of JSON."""
    reply = unwrap(text)
    found = FORMS[name].search(reply)
    if not found:
        return Invalid("no label" if reply else "empty", text)
    end = found.end() + (name == "json" and reply[found.end():].lstrip()[:1] == "}")
    try:
        value = found["answer"] or found["input"] or ""
        value = (json.loads(value, strict=False) if name == "json" else value).strip()
    except ValueError:
        value = ""
    if not value:
        return Invalid("no input" if found["tool"] else "empty answer", text)
    thought = reply[: found.start()].strip()
    if found["tool"]:
        return Action(found["tool"], value, thought, reply[:end], bool(reply[end:].strip()))
    return Final(value, thought, reply[:end])


PROTOCOLS: dict[str, Callable[[str], Action | Final | Invalid]] = {
    "text": parse_reply, **{name: functools.partial(parse_form, name) for name in FORMS}}
THOUGHT = re.compile(  # of a form or a reply, in each of the protocols
    r'"thought": *"(?:[^"\\]|\\.)*", *\n?|(?ims:^\W*(?:thought|思考)\W.*?(?=^\W*(?:action|final|tool'
    r"|answer|行动|最终)|\Z))")


def system_prompt(agent: Agent) -> str:
    """prompts/system.md filled with what holds here; a paragraph without a value is left out."""
    settings, shell = agent.settings, agent.shell
    project = shell.folder / "AGENTS.md"
    return fill(
        read_prompt("system.md"), model=agent.model.name, form=reply_form(agent),
        tools="\n".join(f"- {name}: {text}" for name, (text, _) in agent.tools.items()),
        shell=shell.name if agent.tools else "", folder=str(shell.folder),
        timeout=f"{settings.timeout:g}", limit=f"{settings.observation_limit:,}",
        fence="bubblewrap" if shell.prefix and agent.tools else "",
        open="no sandbox" if not shell.prefix and agent.tools else "",
        skills=agent.skills.catalogue() if "load_skill" in agent.tools else "",
        project=project.read_text("utf-8", "replace")[:8000] if project.is_file() else "")


def reply_form(agent: Agent) -> str:
    """The form of the replies: prompts/protocol-<name>.md, without what an ablation takes away."""
    form = fill(read_prompt(f"protocol-{agent.settings.protocol}.md"), tools=" or ".join(agent.tools))
    return THOUGHT.sub("", form) if "thoughts" in agent.settings.ablations else form


def ablate_tools(agent: Agent) -> None:
    """Takes away tools that an ablation hides, or that have nothing to do."""
    if "skills" in agent.settings.ablations or not agent.skills.names():
        del agent.tools["load_skill"]
    if "tools" in agent.settings.ablations:
        agent.tools.clear()


def ablate(notes: list[Note], hidden: Iterable[str]) -> list[Note]:
    """The messages as the model sees them, without what an ablation hides."""
    if "history" in hidden:
        asked = [n for n, note in enumerate(notes) if note.kind == "question"] or [1]
        notes = [notes[0], *notes[asked[-1]:]]
    if "observations" in hidden:
        notes = [note._replace(content="Observation: [hidden]") if note.kind in ("observation", "skill") else note
                 for note in notes]
    if "thoughts" in hidden:
        notes = [note._replace(content=THOUGHT.sub("", note.content) or "(empty)") if note.kind == "reply" else note
                 for note in notes]
    return notes


def count_repeats(actions: list[tuple[str, str]]) -> int:
    """How often the end of the list says the same in a row; cycles of two and three count too."""
    counts = []
    for period in (1, 2, 3):
        tail, count = actions[-period:], 1
        while actions[-period * (count + 1) : -period * count] == tail:
            count += 1
        counts.append(count)
    return max(counts)


def unwrap(text: str) -> str:
    """The reply without what stands around it: reasoning, a code fence, tokens of the server."""
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
        return (block[2] or block[3]).strip() if block and not FENCE.search(block[4]) else ""
    if re.match(r"\{\s*[\"']", value):
        with contextlib.suppress(ValueError, AttributeError, RecursionError):
            found = map(json.loads(value).get, ("command", "cmd", "skill", "name", "input"))
            return next((text for text in found if isinstance(text, str)), "")
        return ""
    quoted = len(value) > 1 and value[0] in "\"'`" and value[-1] == value[0] and value.count(value[0]) == 2
    return value[1:-1].strip() if quoted else value


def clean_answer(label: str, answer: str) -> str:
    """An answer without the end of a fence or of bold stars that began before it."""
    if len(FENCE.findall(answer)) % 2:
        answer = re.sub(r"\n[ \t]*(?:```|~~~)[ \t]*\Z", "", answer)
    return answer.removesuffix("**") if label.count("**") == 1 and "\n" not in answer else answer


# ──── Part II · 11 Command line ──────────────────────────────────────────────────────────────

PROVIDERS = {  # prefix of the variables → address and model where none are set
    "DEEPSEEK": ("https://api.deepseek.com", "deepseek-v4-flash"),
    "OPENAI": ("https://api.openai.com/v1", ""),
}
PLACEHOLDER = re.compile(r"(?i)(sk-)?(your|xxx|<|…|\.\.\.)")
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def read_variables() -> tuple[dict[str, str], dict[str, str]]:
    """The variables of the environment and of .env, and where each stands; "" hides one in .env."""
    file = dotenv.dotenv_values(ROOT / ".env", interpolate=False, encoding="utf-8-sig")
    values = {name: (value or "").strip().strip("\"'").strip() for name, value in {**file, **os.environ}.items()}
    set_ones = {name: value for name, value in values.items() if value and not PLACEHOLDER.match(value)}
    return set_ones, {name: "environment" if name in os.environ else ".env" for name in set_ones}


def choose_provider(address: str, variables: dict[str, str], origins: dict[str, str]) -> str:
    """Whose variables are in force: who has the address asked for, else who is set higher up."""

    def rank(name: str) -> int:
        own = variables.get(f"{name}_BASE_URL") or PROVIDERS[name][0]
        places = [origins.get(f"{name}_{part}") for part in ("API_KEY", "BASE_URL")]
        same = bool(address) and urlsplit(address).netloc == urlsplit(own).netloc
        return 0 if same else 1 if "environment" in places else 2 if ".env" in places else 3

    return min(PROVIDERS, key=rank)


def configure(flags: argparse.Namespace) -> tuple[Settings, dict[str, str]]:
    """Settings and where each came from: flag > environment > .env > default. ConfigError."""
    variables, places = read_variables()
    provider = choose_provider(flags.base_url or "", variables, places)
    names = {"model": "MODEL", "base_url": f"{provider}_BASE_URL", "api_key": f"{provider}_API_KEY",
             "context_window": "CONTEXT_WINDOW"}
    values: dict[str, Any] = {field: variables[name] for field, name in names.items() if name in variables}
    origins = {field: places[names[field]] for field in values}
    given = {setting.name: getattr(flags, setting.name, None) for setting in fields(Settings)}
    given = {name: value for name, value in given.items() if value is not None}
    origins |= dict.fromkeys(given, "flag")
    values |= given
    keys = {variables.get(f"{name}_API_KEY", "") for name in PROVIDERS}
    try:
        settings = Settings(**values | {"context_window": int(values.get("context_window", 32_768))},
                            secrets=tuple(key for key in keys if len(key) >= 12))
    except ValueError:
        raise ConfigError("CONTEXT_WINDOW must be a whole number of tokens") from None
    online = settings.api_key or settings.base_url or flags.model
    return check(settings, provider) if online else settings, origins


def check(settings: Settings, provider: str) -> Settings:
    """The settings with address, key and model complete, or a ConfigError that names what is not."""
    url, key = settings.base_url or PROVIDERS[provider][0], settings.api_key
    model = settings.model or PROVIDERS[provider][1]
    faults = {
        f"base URL {url!r} must start with http:// or https://": not url.startswith(("http://", "https://")),
        f"base URL {url!r}: leave /chat/completions off": url.rstrip("/").endswith("/chat/completions"),
        f"{provider}_API_KEY is not set, neither in the environment nor in {ROOT / '.env'}":
            not key and urlsplit(url).hostname not in LOOPBACK,
        f"{provider}_API_KEY holds characters that no key has; copy it again": not key.isascii(),
        f"MODEL is not set: name the model that {url} is to use": not model,
    }
    for fault, applies in faults.items():
        if applies:
            raise ConfigError(fault)
    return replace(settings, base_url=url, api_key=key or "local", model=model)


class Parser(argparse.ArgumentParser):
    """Complains in one line."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (--help lists the flags)")


def build_parser() -> Parser:
    """The flags of prompts/help.yaml."""
    parser = Parser(prog="agent.py", description="An AI agent that you can read.", allow_abbrev=False)
    parser.add_argument("question", nargs="*", help="none: a conversation, or one question from a pipe")
    types = {"int": int, "float": float, "path": Path}
    for name, options in read_table("help.yaml")["flags"].items():
        options = {**options, "type": types.get(options.get("type"))} if "type" in options else dict(options)
        parser.add_argument(*options.pop("also", []), name, **options)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code. Only SystemExit of --help gets out."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        return run(build_parser().parse_args(argv))
    except ConfigError as error:
        print(f"agent.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader has gone; without this, Python complains when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def run(flags: argparse.Namespace) -> int:
    """Does what the flags say."""
    settings, origins = configure(flags)
    session = Session(Path.cwd())
    if flags.show_config:
        for setting in fields(settings):
            value = "set" if setting.name in ("api_key", "secrets") else getattr(settings, setting.name)
            print(f"{setting.name:<18} {value!s:<44} {origins.get(setting.name, 'default')}")
        return 0
    if flags.sessions:
        print("\n".join(map(summary_line, session.paths())))
        return 0
    if flags.show is not None:
        trace = Trace("full", sys.stdout, again=True)
        for event in read_log(session.paths(flags.show)[-1])[0]:
            trace(event["event"], event)
        return 0
    question = " ".join(flags.question)
    if not (question or flags.demo or sys.stdin.isatty()) and not (question := sys.stdin.read().strip()):
        raise ConfigError("no question: give one as an argument or on standard input")
    trace = Trace(settings.trace, sys.stderr, again=flags.trace == "full")
    keep = flags.resume is not None or not (flags.no_session or flags.demo or question and settings.trace == "off")
    agent = build_agent(settings, [trace, session] if keep else [trace])
    if flags.resume is not None:
        print(session.resume(agent, session.paths(flags.resume)[-1]), file=sys.stderr)
    if flags.demo:
        return demonstrate(agent)
    return answer(agent, question) if question else converse(agent)


def build_agent(settings: Settings, listeners: list[Listener]) -> Agent:
    """The agent; what a user should know beforehand goes to stderr, a line each."""
    model = OpenAIModel(settings) if settings.base_url else ScriptedModel([])
    agent = Agent(settings, model, listeners=listeners)
    offline = "" if settings.base_url else read_table("demo.yaml")["offline"][settings.lang]
    for notice in filter(None, [offline, agent.shell.notice, *agent.skills.problems]):
        print(paint(sys.stderr, "action", notice), file=sys.stderr)
    return agent


def answer(agent: Agent, question: str) -> int:
    """One turn; the answer alone goes to stdout. Returns the exit code."""
    if isinstance(agent.model, ScriptedModel):
        agent.model = ScriptedModel(demo_replies(question, agent.settings.lang))
    result = agent.ask(question)
    if result.status != "final":
        line = f"{result.status}: {result.remark or 'the answer is incomplete'}"
        print(paint(sys.stderr, "error", line), file=sys.stderr)
    if result.answer:
        print(paint(sys.stdout, "answer", result.answer), flush=True)
    return {"final": 0, "error": 1, "interrupted": 130}.get(result.status, 3)


def demo_replies(question: str, lang: str) -> list[str]:
    """The script's replies to a demo question in either language, else one that names them all."""

    def plain(text: str) -> str:
        return "".join(filter(str.isalnum, text.casefold()))

    demo = read_table("demo.yaml")
    for each in demo["questions"]:
        for language in ("en", "zh"):
            if plain(question) in (plain(each["id"]), plain(each[language])):
                return list(each["replies"][language])
    return [fill(demo["unknown"][lang], questions="\n".join(f"- {each[lang]}" for each in demo["questions"]))]


def demonstrate(agent: Agent) -> int:
    """The demo questions, each in a conversation of its own. Returns the highest exit code."""
    codes: list[int] = []
    for demo in read_table("demo.yaml")["questions"]:
        if codes:
            print(flush=True)
            agent.reset()
        codes.append(answer(agent, demo[agent.settings.lang]))
    return max(codes)


def converse(agent: Agent) -> int:
    """The conversation at a terminal: Ctrl-C ends a turn, Ctrl-D the program."""
    with contextlib.suppress(ImportError):  # Python can be built without it
        importlib.import_module("readline")
    print(f"Glassbox, {agent.model.name}, in {agent.shell.folder}. /help lists the commands.", file=sys.stderr)
    pending: list[str] = []
    while True:
        try:
            text = read_question(pending)
            if text[:1] in ("/", ":") and text[1:]:
                name = text[1:].split()[0]
                print(COMMANDS.get(name, COMMANDS["help"])(agent))
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


def show_status(agent: Agent) -> str:
    """What /status prints."""
    window, notes = agent.settings.context_window, agent.history.notes
    return (f"model     {agent.model.name}\nfolder    {agent.shell.folder}\n"
            f"messages  {len(notes)}, about {count_tokens(notes):,} tokens\n"
            f"window    {window or 'unknown'}, compacted above {threshold(window):,}\n"
            f"last compaction …")


def start_afresh(agent: Agent) -> str:
    agent.reset()
    return "a new conversation"


def leave(_: Agent) -> str:
    raise EOFError


COMMANDS: dict[str, Callable[[Agent], str]] = {
    "help": lambda _: read_table("help.yaml")["commands"],
    "skills": lambda agent: agent.skills.catalogue(),
    "prompt": lambda agent: agent.history.view()[0].content,
    "messages": lambda agent: "\n\n".join(f"[{n.number}] {n.message['role']}\n{n.content}" for n in agent.history.view()),
    "status": show_status,
    "new": start_afresh,
    "compact": lambda agent: "compacted" if compact(agent, Turn()) else "nothing to gain",
    "quit": leave,
}

if __name__ == "__main__":
    sys.exit(main())
