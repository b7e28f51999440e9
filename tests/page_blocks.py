"""Blocks of code in the pages: where they are, and what each language means.

| language | what the tests do |
|---|---|
| `python` | run it by itself, with the names that `page_names.py` gives it |
| `pycon` | run it, and compare what it shows |
| `sh` | run each command, or parse its options if it takes minutes or a machine |
| `text` | compare it with what a command or a run prints |
| `yaml`, `json` | read it as the product does |
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import doctest
import os
import re
import runpy
import shlex
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
WIDTH = 120
_FENCE = re.compile(r"^```(.*)$")


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    page: Path
    line: int
    language: str
    text: str
    #: the page and the heading above, `attach.md#accelerate`
    section: str
    #: which block of its language it is in the section, from 1
    number: int

    @property
    def name(self) -> str:
        """The section, and the number unless the block is the first."""
        return self.section if self.number == 1 else f"{self.section}, {self.number}"

    @property
    def place(self) -> str:
        """Where it begins, for messages."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def read_blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    blocks, section, start, language, inside = [], page.name, 0, "", list[str]()
    for number, line in enumerate(page.read_text().splitlines(), 1):
        fence = _FENCE.match(line)
        if start and fence:
            number = 1 + sum((block.section, block.language) == (section, language) for block in blocks)
            blocks.append(Block(page, start, language, "\n".join(inside), section, number))
            start = 0
        elif start:
            inside.append(line)
        elif fence:
            start, language, inside = number, fence[1], []
        elif line.startswith("## ") or line.startswith("### "):
            section = f"{page.name}#{heading_id(line)}"
    assert not start, f"{page}:{start} is not closed"
    return blocks


def heading_id(line: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", line.lstrip("#").strip().lower()).replace(" ", "-")


BLOCKS = [block for page in PAGES for block in read_blocks(page)]


def find_block(language: str, name: str) -> Block:
    """Return a block by its name."""
    return next(block for block in BLOCKS if (block.language, block.name) == (language, name))


class _Placeholders(ast.NodeTransformer):
    """Turns `f(..., x=1)` into `f(**options of f, x=1)`: what a reader would write there."""

    def visit_Call(self, call: ast.Call) -> ast.AST:
        self.generic_visit(call)
        if call.args and isinstance(call.args[0], ast.Constant) and call.args[0].value is ...:
            options = ast.parse(f"options_of[{ast.unparse(call.func)!r}]", mode="eval").body
            call.args, call.keywords = call.args[1:], [ast.keyword(None, options), *call.keywords]
        return call


def execute(block: Block, names: dict[str, Any]) -> Any:
    """Run a block of Python; return the value of its last line if that is an expression.

    Args:
        names: what the page takes as given, such as `model`; `options_of` has what stands for `...` in a call. Those of the
            block are added.
    """
    if block.language == "pycon":
        example = doctest.DocTestParser().get_doctest(block.text + "\n", names, block.place, None, 0)
        found = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, clear_globs=False)
        assert not found.failed, block.place
        return None
    tree = ast.fix_missing_locations(_Placeholders().visit(ast.parse(block.text, block.place)))
    value = tree.body.pop().value if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, block.place, "exec"), names)
    return value and eval(compile(ast.Expression(value), block.place, "eval"), names)


def parse_options(*words: str) -> Any:
    """Return what a script, or `-m` and a module, makes of its options; nothing else of it runs."""
    parsed = []

    class Parsed(Exception):
        """The options are read."""

    def stop(parser: argparse.ArgumentParser, *arguments: Any, **options: Any) -> None:
        parsed.append(parse(parser, *arguments, **options))
        raise Parsed

    parse, argv = argparse.ArgumentParser.parse_args, sys.argv
    argparse.ArgumentParser.parse_args = stop  # type: ignore[assignment, method-assign]
    try:
        name, *sys.argv = words[1:] if words[0] == "-m" else (str(ROOT / words[0]), *words[1:])
        sys.argv.insert(0, name)
        with contextlib.suppress(Parsed):
            runpy.run_module(name, run_name="__main__") if words[0] == "-m" else runpy.run_path(name, run_name="__main__")
    finally:
        argparse.ArgumentParser.parse_args, sys.argv = parse, argv  # type: ignore[method-assign]
    return parsed[0]


def commands(block: Block) -> list[list[str]]:
    """Return the words of each command of a block; `|`, `>` and `&&` are words too."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def wrapped(line: str, width: int = WIDTH) -> str:
    """Break a line of output between words, as pages show long lines."""
    return textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)


def cut(line: str) -> str:
    """Leave out the end of a line of output that is too long for a page."""
    if len(line) <= WIDTH:
        return line
    shown = line[: WIDTH - 3]
    return f"{shown[: max(shown.rfind(' '), shown.rfind('&')) + 1]}..."


def check_text(block: Block, text: str, varies: str | None = None) -> None:
    """Compare a page with what came out, or write that into the page if REGENERATE is set.

    Args:
        varies: a pattern of what differs from one machine to another, such as the last digits of an error.
    """
    shown, found = block.text, text
    if varies:  # which moves the ends of lines too
        shown, found = (" ".join(re.sub(varies, "#", each).split()) for each in (shown, found))
    if shown != found and os.environ.get("REGENERATE"):
        lines = block.page.read_text().splitlines()
        start = lines.index(block.text.splitlines()[0])
        lines[start : start + len(block.text.splitlines())] = text.splitlines()
        block.page.write_text("\n".join(lines) + "\n")
        return
    assert shown == found, f"{block.place}; REGENERATE=1 writes it anew"
