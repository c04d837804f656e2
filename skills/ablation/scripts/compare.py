"""Asks the same with a part of the agent taken away, and compares how it went.

    uv run skills/ablation/scripts/compare.py "question" ["next question of the conversation" …]

A run is a conversation: one without a flag and one for each --no-…; the last answer is judged.
Commands really run, in a new copy of --folder each time, else in the current folder.
"""

import argparse
import csv
import re
import shutil
import statistics
import sys
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
import agent

ABLATIONS = ("observations", "tools", "thoughts", "skills", "history", "stop")
SHARED = ("--demo", "--lang", "--model", "--base-url", "--max-steps", "--timeout",
          "--skills", "--sandbox", "--network", "--protocol", "--context-window")  # of agent.py


class Run(NamedTuple):
    """One conversation, from its first question to its last answer."""

    question: str  # the last one
    variant: str
    solved: str  # yes, no, or – where nothing is expected
    calls: int  # requests to the model
    commands: int  # that really ran, if only until Ctrl-C: not those refused, or never started
    tokens: int | None  # prompt and completion of all calls; None: the server left one out
    ended: str  # agent.Result.status
    answer: str  # or, in brackets, why there is none


class CountedModel(agent.OpenAIModel):
    """The model, counting every call: also those that fail, and those for a summary."""

    def __init__(self, settings: agent.Settings) -> None:
        super().__init__(settings)
        self.tokens: list[int | None] = []  # of each call; None: the server didn't tell

    def __call__(self, *args: Any) -> agent.Reply:
        self.tokens.append(None)
        reply = super().__call__(*args)
        if usage := reply.usage:
            self.tokens[-1] = sum(usage.get(f"{n}_tokens") or 0 for n in ("prompt", "completion"))
        return reply


def converse(settings: agent.Settings, folder: Path, questions: list[str], expect: str) -> Run:
    """Asks the questions one after the other. ConfigError: the demanded sandbox can't be had."""
    model, ran, result = CountedModel(settings), list[str](), agent.Result("interrupted")
    asked = agent.Agent(settings, model, folder)

    def run_command(command: str) -> str:
        ran.extend([] if agent.guard(command, asked.shell.folder) else [command])
        output = asked.shell.run(command)  # where Ctrl-C comes out of this, it ran too
        if output.startswith("[error: the command could not be started"):
            ran.pop()
        return output

    if "run_command" in asked.tools:
        asked.tools["run_command"] = asked.tools["run_command"][0], run_command
    for question in questions:
        result = asked.ask(question)
        if result.status in ("error", "interrupted"):
            break
    solved = ("yes" if re.search(expect, result.answer) else "no") if expect else "–"
    tokens = None if None in model.tokens else sum(filter(None, model.tokens))
    variant = "".join(f"--no-{name}" for name in settings.ablations) or "(no flag)"
    return Run(questions[-1], variant, solved, len(model.tokens), len(ran), tokens, result.status,
               result.answer or f"[{result.remark}]")


def experiment(flags: argparse.Namespace, questions: list[str]) -> Iterator[Run]:
    """Every run in turn. ConfigError: no model answers; KeyboardInterrupt: after the run's row."""
    start, end = ("\r\x1b[K", "") if sys.stderr.isatty() else ("", "\n")  # one line, written anew
    plan = [(), *((name,) for name in flags.only or ABLATIONS)] * flags.repeat
    ignored = shutil.ignore_patterns(".agent", ".env")  # sessions and keys
    with tempfile.TemporaryDirectory(prefix="compare-") as space:
        for number, off in enumerate(plan, 1):
            title = f"[{number}/{len(plan)}] {' '.join(off) or 'no flag'}"
            print(start + title, end=end, file=sys.stderr, flush=True)
            folder = Path.cwd()
            if flags.folder:  # its copy is always at one path, because the prompt names it
                folder = Path(space, flags.folder.resolve().name or "root")
                shutil.rmtree(folder, ignore_errors=True)
                shutil.copytree(flags.folder, folder, symlinks=True, ignore=ignored)
            run = converse(replace(flags.settings, ablations=off), folder, questions, flags.expect)
            print(start, end="", file=sys.stderr, flush=True)
            if (number, run.ended, run.calls) == (1, "error", 1):
                raise agent.ConfigError(f"{flags.settings.base_url}: no model there: {run.answer}")
            yield run
            if run.ended == "interrupted":
                raise KeyboardInterrupt


def middle(runs: list[Run], column: str) -> tuple[float, str]:
    """The median of a column, and how it is written; n/a where a run lacks its number."""
    numbers = [getattr(run, column) for run in runs]
    value = 0 if None in numbers else statistics.median(numbers)
    return value, "n/a" if None in numbers else f"{value:,.1f}".removesuffix(".0")


def row_of(runs: list[Run]) -> list[str]:
    """What the table says of a variant: medians, and what came most often."""
    right = [run.solved for run in runs].count("yes")
    solved = f"{right}/{len(runs)}" if len(runs) > 1 and runs[0].solved != "–" else runs[0].solved
    numbers = [middle(runs, column)[1] for column in ("calls", "commands", "tokens")]
    endings = Counter(run.ended for run in runs).most_common()
    ended = ", ".join(name if n == len(runs) else f"{name} ×{n}" for name, n in endings)
    answer = statistics.mode(run.answer for run in runs)
    return [runs[0].variant, solved, *numbers, ended, " ".join(answer.split())]


def cells(text: str) -> int:
    """Columns of a terminal: a Chinese character takes two."""
    return len(text) + sum(unicodedata.east_asian_width(char) in "WF" for char in text)


def fit(text: str, width: int) -> str:
    """The text in exactly `width` columns: filled up with blanks, or cut with an ellipsis."""
    cut = text[:width]
    while cells(cut) + (cut != text) > width:
        cut = cut[:-1]
    cut += "" if cut == text else "…"
    return cut + " " * (width - cells(cut))


def table(groups: list[list[Run]], room: int) -> Iterator[str]:
    """Aligned lines; what the other columns leave of `room` is for the answer. Then the charts."""
    rows = [list(Run._fields[1:]), *map(row_of, groups)]
    widths = [max(map(cells, column)) for column in zip(*rows, strict=True)]
    widths[-1] = max(room - sum(widths[:-1]) - 2 * len(widths[:-1]), 12)
    yield from ("  ".join(map(fit, row, widths)).rstrip() for row in rows)
    for column in ("calls", "tokens"):
        yield f"\n{column}"
        values = [middle(runs, column) for runs in groups]
        scale = max(room - widths[0] - 14, 10) / (max(values)[0] or 1)
        for row, (value, text) in zip(rows[1:], values, strict=True):
            yield f"  {fit(row[0], widths[0])} {'#' * round(value * scale)} {text}"


def report(runs: list[Run], form: str, model: str) -> None:
    """Prints the runs of one question: as csv each of them, else a row for each variant."""
    if form == "csv":
        csv.writer(sys.stdout, lineterminator="\n").writerows(runs)
        return
    named = {run.variant: [other for other in runs if other.variant == run.variant] for run in runs}
    groups = list(named.values())
    lines = table(groups, shutil.get_terminal_size().columns)
    if form == "markdown":
        rows = [Run._fields[1:], ["---"] * 7, *map(row_of, groups)]
        lines = ("|".join(["", *(cell.replace("|", "\\|") for cell in row), ""]) for row in rows)
    print(f"{model}: {' '.join(runs[0].question.split())}", "", *lines, "", sep="\n", flush=True)


def read_flags(argv: list[str] | None) -> argparse.Namespace:
    """The command line and its `settings`. ConfigError, re.error: it makes no sense."""
    # Without a usage, argparse tells a mistake in one line.
    parser = argparse.ArgumentParser("compare.py", argparse.SUPPRESS, __doc__, allow_abbrev=False)
    for name in SHARED:
        parser.add_argument(name, **agent.read_table("help.yaml")["flags"][name])
    parser.add_argument("question", nargs="*", help="several are asked in one conversation")
    parser.add_argument("--only", default="", metavar="FLAG,…", help=f"of {', '.join(ABLATIONS)}")
    parser.add_argument("--expect", default="", metavar="REGEX", help="found in a right answer")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="runs of a variant (1)")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="run in copies of this folder")
    for form in ("markdown", "csv"):
        parser.add_argument(f"--{form}", dest="form", action="store_const", const=form)
    flags = parser.parse_args(argv)
    flags.only = re.findall(r"(?:--)?(?:no-)?([\w-]+)", flags.only)
    if not set(flags.only) <= set(ABLATIONS):
        raise agent.ConfigError(f"--only takes names of these: {', '.join(ABLATIONS)}")
    if flags.repeat < 1 or flags.demo == bool(flags.question) or "" in flags.question:
        raise agent.ConfigError("give one or more questions or --demo, and --repeat above 0")
    re.compile(flags.expect)  # its error now, not after the first run
    flags.settings, _ = agent.configure(flags)
    if not flags.settings.base_url:
        raise agent.ConfigError("no model is set up: set a key or an address, see .env.example")
    return flags


def main(argv: list[str] | None = None) -> int:
    """Returns 0, 2 (wrong usage, no model) or 130 (Ctrl-C); what has run is shown in any case."""
    for stream in (sys.stdout, sys.stderr):
        getattr(stream, "reconfigure", dict)(errors="replace")  # for an ASCII screen
    try:
        flags = read_flags(argv)
        demos = [[demo] for demo in agent.read_table("demo.yaml")["questions"][flags.settings.lang]]
        if notice := agent.Shell(flags.settings, flags.folder or Path.cwd()).notice:
            print(notice, file=sys.stderr)
        if flags.form == "csv":
            print(*Run._fields, sep=",")
        for questions in demos if flags.demo else [flags.question]:
            runs: list[Run] = []
            try:
                runs.extend(experiment(flags, questions))  # keeps those before an error
            finally:
                if runs:
                    report(runs, flags.form, flags.settings.model)
    except (agent.ConfigError, ValueError, OSError, re.error) as error:
        print(f"compare.py: {error}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, SystemExit) as stop:  # of argparse: 2, and 0 for --help
        return int(getattr(stop, "code", 130))
    return 0


if __name__ == "__main__":
    sys.exit(main())
