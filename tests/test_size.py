"""agent.py keeps to the budget that its README claims.

python tests/test_size.py    prints lines and code lines of each section
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).resolve().parent.parent / "agent.py"
BANNER = re.compile(r"# ─{3,} Part (I{1,2}) · (\d+) ([^─]+?) ─{3,}")
SECTIONS = [
    "I 1 Settings",
    "I 2 Model",
    "I 3 Shell",
    "I 4 Protocol",
    "I 5 Skills",
    "I 6 Loop",
    "I 7 Trace",
    "II 8 Guard and sandbox",
    "II 9 Memory",
    "II 10 Variants",
    "II 11 Edges",
    "II 12 Command line",
]
Function = ast.FunctionDef | ast.AsyncFunctionDef
BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match, ast.AsyncFor, ast.AsyncWith)
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


class Section(NamedTuple):
    """Lines `first` up to, not with, `end`, counted from 1; `code` is how many of them are code."""

    part: str
    name: str
    first: int
    end: int
    code: int

    @property
    def lines(self) -> int:
        return self.end - self.first


def docstring(node: ast.AST) -> ast.Expr | None:
    """The docstring of a module, class or function."""
    body = getattr(node, "body", None)
    if not isinstance(node, Function | ast.Module | ast.ClassDef) or not body:
        return None
    first = body[0]
    is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return first if is_text and isinstance(first.value.value, str) else None


def span(node: ast.stmt) -> range:
    """The lines of a statement."""
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def code_lines(text: str) -> set[int]:
    """The numbers of the lines that are not blank, not comment and not docstring."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if text_node := docstring(node):
            found.difference_update(span(text_node))
    lines = text.split("\n")
    return {number for number in found if lines[number - 1].strip()}


def sections(text: str) -> list[Section]:
    """The head and what stands below each banner."""
    lines = text.splitlines()
    marks = [("", "head", 1)]
    for number, line in enumerate(lines, 1):
        if found := BANNER.fullmatch(line):
            marks.append((found[1], f"{found[2]} {found[3]}", number))
    ends = [first for *_, first in marks[1:]] + [len(lines) + 1]
    code = code_lines(text)
    return [
        Section(part, name, first, end, sum(number in code for number in range(first, end)))
        for (part, name, first), end in zip(marks, ends, strict=True)
    ]


def functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def size(function: Function) -> int:
    """Lines from `def` to the end, without the docstring."""
    text = docstring(function)
    return len(span(function)) - (len(span(text)) if text else 0)


def same_column(child: ast.AST, node: ast.AST) -> bool:
    """Unlike an `if` in the block of an `else`."""
    return bool(getattr(child, "col_offset", 0) == getattr(node, "col_offset", 0))


def depth(node: ast.AST) -> int:
    """How deep the blocks below a node nest; an elif is as deep as its if."""
    deepest = 0
    for name, value in ast.iter_fields(node):
        below = value if isinstance(value, list) else [value]
        for child in below:
            if not isinstance(child, ast.AST) or isinstance(child, Function | ast.ClassDef):
                continue
            is_elif = isinstance(node, ast.If) and name == "orelse" and isinstance(child, ast.If)
            is_elif = is_elif and len(below) == 1 and same_column(child, node)
            deeper = isinstance(child, BLOCKS) and not is_elif
            deepest = max(deepest, deeper + depth(child))
    return deepest


def crowded(tree: ast.AST) -> list[int]:
    """Lines on which a second statement begins."""
    starts = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    return sorted({line for line in starts if starts.count(line) > 1})


@cache
def source() -> str:
    return SOURCE.read_text(encoding="utf-8")


@cache
def tree() -> ast.Module:
    return ast.parse(source())


# ---- the budget


def test_size_of_the_code() -> None:
    assert len(code_lines(source())) <= 800


def test_size_of_the_file() -> None:
    assert len(source().splitlines()) < 1100


def test_size_every_section_has_its_banner_in_order() -> None:
    found = [f"{section.part} {section.name}" for section in sections(source())[1:]]
    for name, wanted in zip(found, SECTIONS, strict=False):
        assert name.startswith(wanted)
    assert len(found) == len(SECTIONS)


def test_size_of_part_one() -> None:
    named = sections(source())
    assert any(section.part == "II" for section in named)
    assert sum(section.lines for section in named if section.part == "I") <= 620


def test_size_of_protocol_and_loop() -> None:
    both = [s.code for s in sections(source()) if re.match(r"\d+ (Protocol|Loop)", s.name)]
    assert len(both) == 2
    assert sum(both) <= 180


def test_size_of_functions() -> None:
    limits = {"run_turn": 40}
    sizes = {f"{f.name}:{f.lineno}": (size(f), limits.get(f.name, 30)) for f in functions(tree())}
    assert {name: lines for name, (lines, limit) in sizes.items() if lines > limit} == {}


def test_size_the_loop_is_there() -> None:
    assert "run_turn" in [function.name for function in functions(tree())]


def test_size_of_nesting() -> None:
    depths = {f"{f.name}:{f.lineno}": depth(f) for f in functions(tree())}
    assert {name: deep for name, deep in depths.items() if deep > 3} == {}


def test_size_of_lines() -> None:
    wide = [number for number, line in enumerate(source().splitlines(), 1) if len(line) > 100]
    assert wide == []


def test_size_one_statement_a_line() -> None:
    assert crowded(tree()) == []


# ---- the ruler itself

SAMPLE = '''"""Doc
string."""

# ──── Part I · 4 Protocol: x ────

import re

TEXT = """a

# not a comment"""  # why


def f(x):
    """One."""
    if x:
        pass
    elif x > 1:
        for y in x:
            with y:
                pass
    else:
        if y: z = 1; w = 2


# ──── Part II · 9 Memory ────────────────────────
class A:
    """Doc."""

    def g(self):
        return [
            1,
        ]
'''


def test_size_the_ruler_is_right() -> None:
    assert code_lines(SAMPLE) == {6, 8, 10, 13, *range(15, 23), 26, 29, 30, 31, 32}
    parts = [(s.part, s.name, s.lines, s.code) for s in sections(SAMPLE)]
    assert parts == [("", "head", 3, 0), ("I", "4 Protocol: x", 21, 12), ("II", "9 Memory", 8, 5)]
    found = {function.name: function for function in functions(ast.parse(SAMPLE))}
    assert (size(found["f"]), size(found["g"])) == (9, 4)
    assert (depth(found["f"]), depth(found["g"])) == (3, 0)
    assert crowded(ast.parse(SAMPLE)) == [22]


def main() -> None:
    """Prints the table."""
    table = sections(source())
    for part in ("I", "II"):
        mine = [section for section in table if section.part == part]
        lines, code = sum(s.lines for s in mine), sum(s.code for s in mine)
        table.append(Section("", f"Part {part}", 0, lines, code))
    lines, code = len(source().splitlines()), len(code_lines(source()))
    table.append(Section("", "agent.py", 0, lines, code))
    print(f"{'section':<60} lines   code")
    for section in table:
        print(f"{section.name[:60]:<60} {section.lines:>5}  {section.code:>5}")


if __name__ == "__main__":
    main()
