"""Count what makes the package hard to understand: hooks, walks over the model, import circles, tables, names and sizes.

    python scripts/structure.py                               # a table of figures
    python scripts/structure.py --against main                # also the figures of main, in a column before
    python scripts/structure.py --list "walks over the model" # the places that a figure counts
    python scripts/structure.py --keep main                   # put the figures of a commit into structure.json

The script parses the package and imports nothing. A file names a table of the record if it contains the table's name as a
string in one of these places:

- an argument, index, comparison, default or value of something with a name such as table, schema or rows;
- a list, or the keys of a dict, in which at least half of the strings are names of tables or options;
- the value of a variable `name` or `NAME`.

A file also names the table if it defines, reads or sets the option of the same name in a `config`. We leave out files that
define the table. Variables of the same name do not count. Neither do equal strings elsewhere, such as keys of a checkpoint.
"""

from __future__ import annotations

import argparse
import ast
import functools
import io
import json
import re
import subprocess
import tarfile
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
KEPT = Path(__file__).with_suffix(".json")

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_ANY_HOOK = re.compile(r"register_\w*hook\w*")
_OPTIMIZER_HOOK = r"register_(optimizer_)?step_\w*hook"
_HOOK = rf"(?!{_OPTIMIZER_HOOK}){_ANY_HOOK.pattern}"
_WALK = re.compile(r"\.((named_)?(modules|children)|_modules\.(values|items))$")
_ORDERED = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_SORTS = ("max", "min", "sorted", "sort", "setdefault")
_ABOUT_TABLES = re.compile(r"table|schema|rows|columns|listed|packed|part\b", re.IGNORECASE)
_NAMES_TABLE = re.compile(r"table|schema|^name$", re.IGNORECASE)
_LATEST_IN_SQL = re.compile(r"max\(attempt\)|order by attempt", re.IGNORECASE)


class Place(NamedTuple):
    """A place in the code, and what is there."""

    file: str
    line: int
    what: str


@dataclass(frozen=True)
class Figure:
    """A number, and the places that it counts."""

    value: float
    places: list[Place] = field(default_factory=list)


@dataclass(frozen=True)
class File:
    """A parsed file of the package."""

    path: str
    module: str
    text: str
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        """Return True if the file is an `__init__.py`."""
        return self.path.endswith("__init__.py")

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        """Return every node of the file."""
        return list(ast.walk(self.tree))

    def place(self, node: ast.AST, what: str) -> Place:
        """Return the place of `node`."""
        return Place(self.path, getattr(node, "lineno", 1), what)


Files = list[File]


def read_folder(package: Path) -> Files:
    """Parse each Python file of a package's folder."""
    return parse({path.relative_to(package.parent).as_posix(): path.read_text() for path in package.rglob("*.py")})


def read_commit(commit: str, package: str) -> Files:
    """Parse each Python file of a package as it is in a commit."""
    packed = subprocess.run(["git", "archive", commit, package], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        members = [member for member in archive if member.name.endswith(".py")]
        return parse({member.name: archive.extractfile(member).read().decode() for member in members})


def parse(texts: dict[str, str]) -> Files:
    """Parse the texts of files, given by path."""
    modules = {path: path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in texts}
    return [File(path, modules[path], texts[path], ast.parse(texts[path])) for path in sorted(texts)]


def name_of(node: ast.AST) -> str:
    """Return the last part of a dotted name, or "" for anything else."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def calls(files: Files, pattern: str) -> list[Place]:
    """List calls of functions and methods whose name matches `pattern`."""
    nodes = [(file, node) for file in files for node in file.nodes if isinstance(node, ast.Call)]
    return [file.place(node, name_of(node.func)) for file, node in nodes if re.fullmatch(pattern, name_of(node.func))]


# Sizes


def count_statements(files: Files) -> int:
    """Count statements, except docstrings."""
    nodes = [node for file in files for node in file.nodes]
    documented = [node for node in nodes if isinstance(node, ast.Module | ast.ClassDef | FunctionNode)]
    return sum(isinstance(node, ast.stmt) for node in nodes) - sum(
        ast.get_docstring(node) is not None for node in documented
    )


def named_functions(files: Files) -> list[Place]:
    """List functions and methods, except dunders, whose names Python defines."""
    found = [(file, node) for file in files for node in file.nodes if isinstance(node, FunctionNode)]
    return [file.place(node, node.name) for file, node in found if not re.fullmatch(r"__\w+__", node.name)]


# Hooks and walks


def modes(files: Files) -> list[Place]:
    """List classes that derive from a dispatch or function mode, directly or through a class of the package."""
    found: list[Place] = []
    known, before = {"TorchDispatchMode", "TorchFunctionMode"}, 0
    while len(known) > before:
        before = len(known)
        found = [file.place(node, node.name) for file, node in classes(files) if known & set(map(name_of, node.bases))]
        known |= {place.what for place in found}
    return found


def observers(files: Files) -> list[Place]:
    """List classes that store hook handles in an attribute, or remove hook handles."""
    return [file.place(node, node.name) for file, node in classes(files) if any(map(_is_handle, ast.walk(node)))]


def classes(files: Files) -> list[tuple[File, ast.ClassDef]]:
    """Return every class with its file."""
    return [(file, node) for file in files for node in file.nodes if isinstance(node, ast.ClassDef)]


def _is_handle(node: ast.AST) -> bool:
    if isinstance(node, ast.AnnAssign):
        return "RemovableHandle" in ast.unparse(node.annotation)
    if isinstance(node, ast.Assign):
        values = [name_of(each.func) for each in ast.walk(node.value) if isinstance(each, ast.Call)]
        return any(isinstance(target, ast.Attribute) for target in node.targets) and any(map(_ANY_HOOK.fullmatch, values))
    is_removal = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "remove"
    return is_removal and not node.args  # list.remove takes an argument


def walks(files: Files) -> list[Place]:
    """List walks over modules of a model: `.named_modules()` and similar methods, and `._modules.values()`."""
    nodes = [(file, node) for file in files for node in file.nodes if isinstance(node, ast.Call)]
    return [file.place(node, ast.unparse(node)) for file, node in nodes if _WALK.search(ast.unparse(node.func))]


# The record


def row_choosers(files: Files) -> list[Place]:
    """List functions and SQL constants that choose the parts of a record whose rows count.

    Such a function mentions steps. It also compares or looks up attempts, or sorts merged parts before single parts. Such
    SQL selects the largest attempt.
    """
    found = []
    for file in files:
        for node in file.nodes:
            if isinstance(node, FunctionNode):
                if _mentions(node, lambda name: "step" in name) and any(map(_is_choice, ast.walk(node))):
                    found.append(file.place(node, node.name))
            elif isinstance(node, ast.Assign) and _LATEST_IN_SQL.search(str(getattr(node.value, "value", ""))):
                found.append(file.place(node, ast.unparse(node.targets[0])))
    return found


def _mentions(node: ast.AST, wanted: Callable[[str], bool]) -> bool:
    return any(wanted(_word_of(each)) for each in ast.walk(node))


def _word_of(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return node.arg if isinstance(node, ast.arg) else name_of(node)


def _is_choice(node: ast.AST) -> bool:
    """Return True if attempts are compared, sorted or looked up, or merged parts are sorted."""
    if isinstance(node, ast.Compare):
        if isinstance(node.left, ast.Tuple) and isinstance(node.ops[0], ast.In | ast.NotIn):
            return any(name_of(each) == "attempt" for each in node.left.elts)
        return isinstance(node.ops[0], _ORDERED) and _mentions(node, "attempt".__eq__)
    return (
        isinstance(node, ast.Call) and name_of(node.func) in _SORTS and _mentions(node, ("attempt", "merged").__contains__)
    )


def table_names(files: Files) -> dict[str, set[str]]:
    """Return the tables of the record, each with the files that define it.

    Table names are the keys of a dict called SCHEMAS, or the first arguments of `Table(...)`.
    """
    found: dict[str, set[str]] = {}
    for file in files:
        for node in file.nodes:
            keys: list[ast.expr | None] = []
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                keys = node.value.keys if any(name_of(target) == "SCHEMAS" for target in targets) else []
            elif isinstance(node, ast.Call) and name_of(node.func) == "Table":
                keys = [*node.args[:1], *(each.value for each in node.keywords if each.arg == "name")]
            for key in keys:
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    found.setdefault(key.value, set()).add(file.path)
    return found


def option_names(files: Files) -> set[str]:
    """Return the options of a run: the fields of a class called Config."""
    bodies = [node.body for _, node in classes(files) if node.name == "Config"]
    return {name_of(each.target) for body in bodies for each in body if isinstance(each, ast.AnnAssign)}


def namers(files: Files, table: str, definitions: set[str], known: Collection[str]) -> list[Place]:
    """List files that name a table or the option of the same name. Leave out files that define the table.

    Args:
        known: names of all tables and options.
    """
    found = [(file, next((node for node in file.nodes if _names(node, table, known)), None)) for file in files]
    return [file.place(node, table) for file, node in found if node and file.path not in definitions]


def _names(node: ast.AST, table: str, known: Collection[str]) -> bool:
    if isinstance(node, ast.List | ast.Tuple | ast.Set | ast.Dict):
        listed = _strings(node.keys if isinstance(node, ast.Dict) else node.elts)
        return table in listed and len(listed & set(known)) >= max(2, len(listed) / 2)
    return table in _strings(_values_about_tables(node)) or _is_option(node, table)


def _values_about_tables(node: ast.AST) -> list[ast.AST]:
    """Return the nodes that are passed to, compared with, or assigned to something with a name such as table or schema."""
    if isinstance(node, ast.Call):
        return [*node.args, *(each.value for each in node.keywords)] if _ABOUT_TABLES.search(ast.unparse(node.func)) else []
    if isinstance(node, ast.Subscript):
        return list(ast.walk(node.slice)) if _ABOUT_TABLES.search(ast.unparse(node.value)) else []
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        return sides if any(_ABOUT_TABLES.search(name_of(side)) for side in sides) else []
    if isinstance(node, ast.arguments):
        pairs = [*zip(node.args[len(node.args) - len(node.defaults) :], node.defaults, strict=True)]
        pairs += [(each, value) for each, value in zip(node.kwonlyargs, node.kw_defaults, strict=True) if value]
        return [value for each, value in pairs if _ABOUT_TABLES.search(each.arg)]
    if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        targets = [each for target in _targets(node) for each in ast.walk(target)]
        return list(ast.walk(node.value)) if any(_NAMES_TABLE.search(name_of(each)) for each in targets) else []
    return []


def _is_option(node: ast.AST, option: str) -> bool:
    """Return True if the node defines an option, reads it from a config, or sets it in a call that makes a config."""
    if isinstance(node, ast.Attribute):
        return node.attr == option and name_of(node.value).lower().endswith("config")
    if isinstance(node, ast.Call):
        about = [node.func, *(each.func for each in node.args if isinstance(each, ast.Call))]
        is_config = any(name_of(each) == "Config" for each in about)
        return is_config and any(each.arg == option for each in node.keywords)
    is_config = isinstance(node, ast.ClassDef) and node.name == "Config"
    return is_config and any(option in map(name_of, _targets(each)) for each in node.body)


def _targets(node: ast.AST) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []


def _strings(nodes: Iterable[ast.AST | None]) -> set[str]:
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


# Imports


def find_imports(files: Files) -> list[tuple[File, File, Place]]:
    """List importing file, imported file and place of each import, including imports for types and inside functions."""
    by_module = {file.module: file for file in files}
    return [
        (file, by_module[module], file.place(node, f"imports {by_module[module].path}"))
        for file in files
        for node in file.nodes
        for module in dict.fromkeys(_imported(file, node, by_module))
        if module in by_module and module != file.module
    ]


def _imported(file: File, node: ast.AST, known: Collection[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        parts = file.module.split(".")
        above = parts[: len(parts) - node.level + file.is_package] if node.level else []
        base = ".".join([*above, *filter(None, [node.module])])
        for alias in node.names:
            yield whole if (whole := f"{base}.{alias.name}") in known else base


def imported_once(files: Files) -> list[Place]:
    """List files that exactly one other file imports."""
    users: dict[str, set[str]] = {}
    for file, other, _ in find_imports(files):
        users.setdefault(other.path, set()).add(file.path)
    return [Place(path, 1, f"imported by {min(of)}") for path, of in users.items() if len(of) == 1]


def file_circles(files: Files) -> Figure:
    """Count import circles of files."""
    return count_circles([(file.module, other.module, place) for file, other, place in find_imports(files)])


def sibling_circles(files: Files) -> Figure:
    """Count import circles of files and packages that are in the same package."""
    edges = []
    for file, other, place in find_imports(files):
        a, b = file.module.split("."), other.module.split(".")
        same = [x == y for x, y in zip(a, b, strict=False)]
        if not all(same):
            depth = same.index(False) + 1
            edges.append((".".join(a[:depth]), ".".join(b[:depth]), place))
    return count_circles(edges)


def count_circles(edges: list[tuple[str, str, Place]]) -> Figure:
    """Count groups of nodes that all reach each other. The places are the imports within a group."""
    graph: dict[str, set[str]] = {}
    for start, end, _ in edges:
        graph.setdefault(start, set()).add(end)
    reached = {start: _reach(graph, start) for start in graph}
    circle_of = {a: frozenset(b for b in reached[a] if a in reached.get(b, ())) for a in graph}
    places = [place for start, end, place in edges if end in circle_of[start]]
    return Figure(len({circle for circle in circle_of.values() if circle}), places)


def _reach(graph: dict[str, set[str]], start: str) -> set[str]:
    reached, waiting = set[str](), [start]
    while waiting:
        new = graph.get(waiting.pop(), set()) - reached
        reached |= new
        waiting += new
    return reached


def uses_of(files: Files, function: str) -> list[Place]:
    """List the places where a function is called or passed on. Imports do not count."""
    nodes = [(file, node) for file in files for node in file.nodes if isinstance(node, ast.Name | ast.Attribute)]
    return [file.place(node, function) for file, node in nodes if name_of(node) == function]


def measure(files: Files) -> dict[str, Figure]:
    """Return every figure, in the order of the table."""

    def files_of(places: list[Place]) -> list[Place]:
        return sorted({place.file: place for place in reversed(places)}.values())

    lines, functions = sum(len(file.text.splitlines()) for file in files), named_functions(files)
    words = [place for place in functions if "_" not in place.what.strip("_")]
    hooks, walked, rows = calls(files, _HOOK), walks(files), row_choosers(files)
    tables = table_names(files)
    known = tables.keys() | option_names(files)
    figures = {
        "files": [Place(file.path, 1, file.module) for file in files],
        "lines": Figure(lines),
        "lines a file": Figure(round(lines / len(files), 1)),
        "statements": Figure(count_statements(files)),
        "functions": functions,
        "single-word function names": words,
        "single-word function names, %": Figure(round(100 * len(words) / max(1, len(functions)), 1)),
        "hook registrations": hooks,
        "files that register hooks": files_of(hooks),
        "optimizer hooks": calls(files, _OPTIMIZER_HOOK),
        "saved-tensor hooks": calls(files, "saved_tensors_hooks"),
        "dispatch and function modes": modes(files),
        "observers that hold handles": observers(files),
        "walks over the model": walked,
        "files that walk": files_of(walked),
        "functions that choose rows": rows,
        "files that choose rows": files_of(rows),
        "files imported by one other": imported_once(files),
        "import circles of files": file_circles(files),
        "import circles of siblings": sibling_circles(files),
        "uses of parse_recipe": uses_of(files, "parse_recipe"),
        **{f"files that name {table}": namers(files, table, where, known) for table, where in tables.items()},
    }
    return {name: Figure(len(found), found) if isinstance(found, list) else found for name, found in figures.items()}


def print_table(columns: list[dict[str, Figure]]) -> None:
    """Print a line for each figure, with a column for each measurement."""
    for name in dict.fromkeys(name for column in columns for name in column):
        values = [f"{column[name].value:>9,}" if name in column else f"{'-':>9}" for column in columns]
        print(f"{name:<36}{''.join(values)}")


def keep(commit: str, package: str) -> None:
    """Put the figures of a commit into structure.json."""
    whole = subprocess.run(["git", "rev-parse", commit], cwd=ROOT, capture_output=True, check=True, text=True).stdout.strip()
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    kept[whole] = {name: figure.value for name, figure in measure(read_commit(whole, package)).items()}
    KEPT.write_text(json.dumps(kept, indent=1) + "\n")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path, default=ROOT / "nemo_fp8_debug", help="folder of the package to measure")
    parser.add_argument("--against", metavar="COMMIT", help="also print the figures of this commit, in the first column")
    parser.add_argument("--list", metavar="FIGURE", help="print the places that a figure counts")
    parser.add_argument("--keep", metavar="COMMIT", help="put the figures of this commit into structure.json")
    chosen = parser.parse_args(arguments)
    if chosen.keep:
        keep(chosen.keep, chosen.package.name)
        return
    now = measure(read_folder(chosen.package))
    if chosen.list is None:
        print_table([*([measure(read_commit(chosen.against, chosen.package.name))] if chosen.against else []), now])
    elif chosen.list in now:
        print(*(f"{file}:{line}: {what}" for file, line, what in now[chosen.list].places), sep="\n")
    else:
        parser.error(f"no figure is called {chosen.list!r}; choose from {', '.join(now)}")


if __name__ == "__main__":
    main()
