"""The documentation says what is: its diagrams, the tests that it names, the names that it lists, its links."""

from __future__ import annotations

import ast
import importlib.util
import re
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import streams
import streams.settings
from streams.cli.commands import COMMANDS
from streams.runtime.async_work.concurrent_stage import ConcurrentContext

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
FEATURES = ("journal", "outbox", "settings", "source", "stores", "views")
LINK = r"\]\((?!https?://|mailto:|#)([^)#\s]+)"
PAGES = sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts) + sorted(ROOT.glob("*.md"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def script(name: str) -> Any:
    """Load a script of the folder of pages."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_diagrams_and_tables_are_those_of_the_code() -> None:
    """And a machine that has changed is noticed: its texts name every state and move."""
    diagrams = script("diagrams")
    stale = [name_of(path) for path, text in diagrams.outputs().items() if path.read_text() != text]
    assert stale == [], "run: python docs/diagrams.py"
    machine = diagrams.PARTITION
    states = {state.value: state for state in machine.table}
    more, less = {states["void"]: {states["active"]}}, {states["restoring"]: set[Any]()}
    fewer = {state: moves for state, moves in machine.table.items() if state is not states["released"]}
    for table in (machine.table | more, machine.table | less, fewer):
        with pytest.raises(ValueError, match="partition"):
            diagrams.check(machine._replace(table=table))


def test_the_page_of_settings_is_that_of_the_classes(tmp_path: Path) -> None:
    """And a setting without its meaning, or a meaning without its setting, is an error."""
    settings = script("settings")
    stale = [name_of(path) for path, text in settings.outputs().items() if path.read_text() != text]
    assert stale == [], "run: python docs/settings.py"
    page = settings.PAGE.read_text()
    for spoilt in (
        page.replace("| `topic` |", "| `topics` |"),
        re.sub(r"^\| `topic` .*\n", "", page, flags=re.MULTILINE),
    ):
        settings.PAGE = tmp_path / "settings.md"
        settings.PAGE.write_text(spoilt)
        with pytest.raises(ValueError, match="topic"):
            settings.outputs()
    classes = {each.__name__ for each in settings.CLASSES}
    public = {name for name in streams.settings.__all__ if name.endswith(("Config", "Policy", "Retry"))}
    assert public - classes == set()


def test_the_recording_of_the_readme_is_of_the_commands_in_its_script() -> None:
    recording = script("recording")
    commands = [line.removeprefix("$ ") for line in recording.shown().splitlines() if line.startswith("$ ")]
    assert [re.sub(r"^kill -9 \d+", "kill -9 PID", command) for command in commands] == list(recording.STEPS)


@cache
def texts_of_the_code() -> list[str]:
    """Every text in the code, with a mark where a value is put in."""
    found = []
    for path in (ROOT / "streams").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%(\.\d+)?[a-z]", "\0", node.value))
    return found


def pattern(message: str) -> str:
    """Return the pattern of a quoted message: ``...`` stands for values, and text between them, in one sentence."""
    return ".*".join(re.escape(part) for part in message.split("..."))


@pytest.mark.parametrize("page", ["troubleshooting", "guides/embedded-kafka"])
def test_every_message_that_a_page_explains_is_in_the_code(page: str) -> None:
    text = (DOCS / f"{page}.md").read_text()
    tables = re.findall(r"^\| message \|.*?\n((?:\|.*\n)+)", text, re.MULTILINE)
    messages = [message for table in tables for message in re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)]
    assert len(messages) > 5

    def is_there(message: str) -> bool:
        first = max(message.split("..."), key=len)
        wanted = re.compile(pattern(message), re.DOTALL)
        return any(first in text and wanted.search(text) for text in texts_of_the_code())

    assert [message for message in messages if not is_there(message)] == []
    assert not is_there("topic ... was never " + "mentioned")


def test_a_word_of_the_glossary_has_one_meaning() -> None:
    words = re.findall(r"^\| ([^|]+) \| ", (DOCS / "glossary.md").read_text(), re.MULTILINE)
    single = [word for entry in words if entry != "word" for word in entry.split(", ")]
    assert len(single) > 50
    assert sorted({word for word in single if single.count(word) > 1}) == []


def nightly(path: Path) -> set[str]:
    """The tests of a file that ``make test`` leaves out whole (cases of a parametrized test count as in the gate)."""
    tree = ast.parse(path.read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    marks = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Assign)]
    if any(mark.startswith("pytestmark") and "mark.nightly" in mark for mark in marks):
        return {function.name for function in functions}
    return {
        function.name
        for function in functions
        if any(ast.unparse(each).startswith("pytest.mark.nightly") for each in function.decorator_list)
    }


def test_every_failure_names_tests_that_exist_and_one_that_every_change_runs() -> None:
    lines = (DOCS / "internals/failures.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("| ") and line != "| failure | outcome | test |"]
    assert len(rows) > 150
    for row in rows:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", row.split(" | ")[-1])
        assert named, row
        for file, test in named:
            text = (ROOT / "tests" / file).read_text()
            assert re.search(rf"def {test}\(", text), f"{file}::{test}"
        in_gate = [test for file, test in named if test not in nightly(ROOT / "tests" / file)]
        assert in_gate, f"no test of this row is in the change gate: {row}"


def test_every_public_name_is_in_the_reference() -> None:
    page = (DOCS / "reference/api.md").read_text()
    blocks = re.findall(r"^```\{eval-rst\}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)  # else it is shown as text
    listed = re.findall(r"auto\w+:: (streams\.[\w.]+)$", "".join(blocks), re.MULTILINE)
    assert [name for name in listed if listed.count(name) > 1] == []
    last = [name.rpartition(".")[2] for name in listed]
    public = {*streams.__all__}.union(*(import_module(f"streams.{name}").__all__ for name in FEATURES))
    assert {name: last.count(name) for name in public if last.count(name) != 1} == {}


def test_contexts_show_users_the_names_of_the_reference_and_no_others() -> None:
    page = (DOCS / "reference/api.md").read_text()
    table = page.partition("<!-- names of EventContext -->")[2].partition("<!-- end -->")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    names = sorted(name for row in rows for name in re.findall(r"`(\w+)`", row))
    for context in (streams.EventContext, ConcurrentContext):
        assert [name for name in dir(context) if not name.startswith("_")] == names
    assert [name for name in dir(streams.BatchContext) if not name.startswith("_")] == sorted([*names, "records"])
    assert "A handler with `batch=True` has `records` as well." in page


def test_every_command_is_there_and_in_the_reference() -> None:
    page = (DOCS / "reference/command-line.md").read_text()
    assert [name for name, command in COMMANDS.items() if importlib.util.find_spec(command.module) is None] == []
    assert [name for name, command in COMMANDS.items() if f"kes {name}" not in page] == []


def test_links_lead_somewhere() -> None:
    """Files only; that anchors exist is what the build of the documentation finds out."""
    links = [(page, link) for page in PAGES for link in re.findall(LINK, page.read_text())]
    assert [f"{name_of(page)}: {link}" for page, link in links if not (page.parent / link).exists()] == []


def test_the_architecture_names_files_that_exist() -> None:
    text = (DOCS / "ARCHITECTURE.md").read_text()
    names = set(re.findall(r"`((?:\w+/)*\w+\.py)`", text))
    assert len(names) > 20
    missing = [name for name in names if not any((root / name).exists() for root in (ROOT, ROOT / "streams"))]
    assert missing == []


def test_the_architecture_names_methods_and_functions_that_exist() -> None:
    """``Class.method``, ``module.function``; fields of instances count by their names in slots or annotations."""
    text = (DOCS / "ARCHITECTURE.md").read_text()
    named = {pair for pair in re.findall(r"`(\w+)\.(\w+)(?:\([^`]*\))?`", text) if pair[1] not in ("py", "toml")}
    known = set()
    for path in (ROOT / "streams").rglob("*.py"):
        tree = ast.parse(path.read_text())
        homes: list[tuple[str, Any]] = [(path.stem, tree)]
        homes += [(node.name, node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        for home, node in homes:
            for each in ast.walk(node):
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    known.add((home, each.name))
                elif isinstance(each, ast.Attribute | ast.Name):
                    known.add((home, each.attr if isinstance(each, ast.Attribute) else each.id))
    assert len(named) > 40
    assert named - known == set()
