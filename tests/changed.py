"""Choose the tests that a change can reach: ``python tests/changed.py [BASE]``, or ``make test-changed``.

A test file is chosen when it, or a module that it imports however far away (also within functions), has changed since
BASE, or reads a file that has. BASE is the merge base with ``main``, and on ``main`` the last commit; what is not
committed counts. The files are printed on standard output, and why on standard error, a line each.

In doubt more is chosen: names of modules and files in strings count as imports, a file in a package counts as all of
its modules, and a file that nothing here knows (``pyproject.toml``, ``Makefile``, ``conftest.py``) chooses everything.
Imports for type checkers do not count: nothing runs by them.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

ROOTS: Final = ("streams", "pyspark_grt", "tests", "examples", "benchmarks", "docs", "deploy")
EVERYTHING: Final = "tests"
"""The argument of pytest for all tests."""
MODULE: Final = re.compile(rf"\b(?:{'|'.join(ROOTS)})(?:\.\w+)+")
FILE: Final = re.compile(rf"\b(?:{'|'.join(ROOTS)})/[\w./*-]*\w")
SHELL: Final = "!"
"""Behind a path: the file alone, without what it imports."""
PROGRAM: Final = re.compile(r"from ((?:streams|examples)[\w.]*) import ([\w, ]+)")
"""An import in a text, of a program that runs in a process of its own."""
PAGE: Final = re.compile(r"[A-Z]+\.md|(docs|deploy)/.*")
"""Files that concern the modules that read them, and no others; a page beside ``docs`` is one of its pages."""
PLUGIN: Final = "tests/durations.py"
"""Loaded by ``tests/conftest.py`` for all tests, and named there as a text."""


class Source(NamedTuple):
    """What a Python file uses: modules and names that it imports, files or folders of them that it reads, and arguments
    of its functions, which may be fixtures."""

    imports: set[str]
    files: set[str]
    arguments: set[str]
    fixtures: dict[str, set[str]]
    """Fixtures that it defines, each with the imports that it uses; ``*``: those of all tests below it."""
    exports: dict[str, str]
    """Names that it imports, by where they are; a package may import them for type checkers only, and later serve
    them."""


def read(text: str, is_test: bool = True) -> Source:
    """Read what a file uses off its text. ``is_test``: a text ``kes`` is the command."""
    tree, source = ast.parse(text), Source(set(), set(), set(), {}, {})
    names: dict[str, set[str]] = {}  # of each function and class, by its name: the names that it uses

    def look(node: ast.AST, typed: bool) -> None:
        found: list[str] = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [f"{node.module}.{alias.name}" for alias in node.names]
            source.exports.update((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute) and (dotted := _dotted(node)):
            found = [dotted]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = [*MODULE.findall(node.value)] + (["streams.__main__"] if is_test and node.value == "kes" else [])
            for module, imported in PROGRAM.findall(node.value):
                found += [f"{module}.{name.strip()}" for name in imported.split(",")]
            source.files.update(FILE.findall(node.value))
            if re.fullmatch(r"[A-Za-z.]+\.(md|toml|json)|Makefile", node.value):
                source.files.add(node.value)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and isinstance(node.right, ast.Constant):
            source.files.update({str(node.right.value)} & {*ROOTS})
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = {each.arg for each in (*node.args.args, *node.args.kwonlyargs)}
            source.arguments.update(arguments)
            names[node.name] = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} | arguments
            imported = [each for each in ast.walk(node) if isinstance(each, ast.ImportFrom)]
            names[node.name] |= {alias.asname or alias.name for each in imported for alias in each.names}
            marks = " ".join(map(ast.unparse, node.decorator_list))
            source.arguments.update(re.findall(r"usefixtures\('(\w+)'", marks))
            if "fixture" in marks:
                source.fixtures["*" if "autouse" in marks else node.name] = {node.name}
        if not typed:
            source.imports.update(found)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                continue  # a docstring
            checked = isinstance(node, ast.If) and child in node.body and ast.unparse(node.test) == "TYPE_CHECKING"
            look(child, typed or checked)

    look(tree, typed=False)
    for name, used in source.fixtures.items():
        left = [*used]
        while left:
            more = names.get(left.pop(), set()) - used
            used |= more
            left += more
        source.fixtures[name] = {source.exports[each] for each in used if each in source.exports}
    return source


def _dotted(node: ast.expr) -> str:
    """Return ``streams.views.View`` for this expression; empty for one that begins otherwise."""
    if isinstance(node, ast.Name):
        return node.id if node.id in ROOTS else ""
    return f"{first}.{node.attr}" if isinstance(node, ast.Attribute) and (first := _dotted(node.value)) else ""


class Graph:
    """The files of a project by what they use."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.sources = {path: read(text, path.startswith("tests/")) for path, text in texts.items()}
        self.modules = {_module(path): path for path in texts}
        self.users: dict[str, set[str]] = defaultdict(set)
        self._found: dict[str, frozenset[str]] = {}
        for path, source in self.sources.items():
            self._use(path, source.imports)
            ran = source.files & texts.keys()  # and not imported
            if any(file.startswith("examples") for file in source.files - ran):
                ran |= {each for each in texts if each.startswith("examples/") and _reads(source.files, {each})}
            for program in ran:
                self.users[program].add(path)
            if _is_test(path):
                for shared in self._shared_by(path):
                    for name, imports in self.sources[shared].fixtures.items():
                        if name == "*" or name in source.arguments:
                            self.users[shared + SHELL].add(path)
                            self._use(path, imports)

    def _use(self, path: str, imports: Iterable[str]) -> None:
        for name in imports:
            for used in self._files_of(name):
                self.users[used].add(path)

    def _files_of(self, name: str) -> frozenset[str]:
        """Return the files that an import of this module or name uses: the module's, the one that a package has the
        name from, and of the packages above it only their own text."""
        if name not in self._found:
            self._found[name] = frozenset()  # of a name that leads to itself
            self._found[name] = frozenset(self._look_up(name))
        return self._found[name]

    def _look_up(self, name: str) -> Iterator[str]:
        parts = name.split(".")
        for end in range(len(parts), 0, -1):
            path = self.modules.get(".".join(parts[:end]))
            if path is None:
                if end == len(parts) - 1 and end > 1 and parts[0] in ROOTS:
                    yield "/".join(parts[:end]) + ".py"  # it may have been deleted
            elif end == len(parts) or not path.endswith("__init__.py"):
                yield path
            else:
                yield path + SHELL
                if (home := self.sources[path].exports.get(parts[end], name)) != name:
                    yield from self._files_of(home)

    def _shared_by(self, test: str) -> Iterator[str]:
        """Yield the files of fixtures that a test may use: ``conftest.py`` above it, and what these import."""
        for folder in map(str, PurePosixPath(test).parents):
            if (path := f"{folder}/conftest.py") in self.sources:
                yield path
                found = {used for name in self.sources[path].imports for used in self._files_of(name)}
                yield from (used for used in found if used in self.sources and self.sources[used].fixtures)

    def first(self, paths: Iterable[str]) -> dict[str, str]:
        """Return the Python files that a change of these files concerns at once, each with the changed one; or
        ``EVERYTHING``."""
        found: dict[str, str] = {}
        for path in paths:
            page = path if "/" in path else f"docs/{path}"
            readers = [each for each, source in self.sources.items() if _reads(source.files, {path, page})]
            beside = [] if PAGE.fullmatch(path) else self._beside(path)
            is_known = beside or PAGE.fullmatch(path)
            if path == PLUGIN or path.endswith("conftest.py") or not is_known:
                return {EVERYTHING: path}
            found |= dict.fromkeys([*readers, *beside], path)
        return found

    def _beside(self, path: str) -> list[str]:
        """The modules that a file belongs to: itself, a leaf of its ``.pxd``, or all of the package that it lies in."""
        if path in self.sources or (path.endswith(".py") and path.startswith(ROOTS)):
            return [path]
        if (leaf := str(PurePosixPath(path).with_suffix(".py"))) in self.sources and path.endswith(".pxd"):
            return [leaf]
        for folder in map(str, PurePosixPath(path).parents):
            inside = [each for each in self.sources if each.startswith(f"{folder}/")]
            if "/" in folder and inside:
                return [each for each in inside if _is_test(each)] if folder.startswith("tests/") else inside
        return []

    def chosen(self, paths: Collection[str]) -> dict[str, list[str]]:
        """Return the tests for a change of these files, each with the way from it to the changed file."""
        first = self.first(paths)
        if EVERYTHING in first:
            return {EVERYTHING: [EVERYTHING, first[EVERYTHING]]}
        ways = {path: [path] if path == changed else [path, changed] for path, changed in first.items()}
        left = deque(ways)
        while left:
            used = left.popleft()
            users = self.users[used] | (self.users[used + SHELL] if used in first else set())
            for user in sorted(users - ways.keys()):
                ways[user] = [user, *ways[used]]
                left.append(user)
        return {path: way for path, way in sorted(ways.items()) if _is_test(path) and path in self.sources}


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _is_test(path: str) -> bool:
    return path.startswith("tests/") and PurePosixPath(path).name.startswith("test_")


def _reads(files: Collection[str], paths: Collection[str]) -> bool:
    folders = tuple(f"{each.partition('*')[0].rstrip('/')}/" for each in files)
    return any(path in files or path.startswith(folders) for path in paths)


def _git(*arguments: str) -> list[str]:
    ran = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    return ran.stdout.split() if ran.returncode == 0 else []


def main() -> None:
    """Print the chosen files."""
    base, *_ = sys.argv[1:] or _git("merge-base", "main", "HEAD") or ["HEAD"]
    tracked = [path for path in _git("ls-files", "-co", "--exclude-standard", "*.py") if path.startswith(ROOTS)]
    changed = [*_git("diff", "--name-only", "--no-renames", base), *_git("ls-files", "-o", "--exclude-standard")]
    graph = Graph({path: Path(path).read_text() for path in tracked if Path(path).exists()})
    chosen = graph.chosen(changed)
    for path, way in chosen.items():
        print(path if way == [path] else f"{path}: {' <- '.join(way[1:])}", file=sys.stderr)
    print(f"{len(changed)} files changed since {base[:12]}: {len(chosen)} of the tests", file=sys.stderr)
    print(*chosen)


if __name__ == "__main__":
    main()
