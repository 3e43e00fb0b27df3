"""The documentation says what is: its diagrams, the tests that it names, the names that it lists, its links."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import streams
from streams.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts) + sorted(ROOT.glob("*.md"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.fixture
def diagrams() -> ModuleType:
    spec = importlib.util.spec_from_file_location("diagrams", DOCS / "diagrams.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_diagrams_and_tables_are_those_of_the_code(diagrams: ModuleType) -> None:
    stale = [name_of(path) for path, text in diagrams.outputs().items() if path.read_text() != text]
    assert stale == [], "run: python docs/diagrams.py"


@pytest.mark.parametrize("changed", ["a move more", "a move less", "a state more"])
def test_a_machine_that_changed_is_noticed(diagrams: ModuleType, changed: str) -> None:
    machine = diagrams.PARTITION
    states = {state.value: state for state in machine.table}
    table: dict[Any, Any] = dict(machine.table)
    if changed == "a move more":
        table[states["void"]] = {states["active"]}
    elif changed == "a move less":
        table[states["restoring"]] = table[states["restoring"]] - {states["void"]}
    else:
        del table[states["released"]]
    with pytest.raises(ValueError, match="partition"):
        diagrams.check(machine._replace(table=table))


def test_every_failure_names_tests_that_exist() -> None:
    rows = [line for line in (DOCS / "guarantees.md").read_text().splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 15
    for row in rows:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", row.split(" | ")[-1])
        assert named, row
        for file, test in named:
            text = (ROOT / "tests" / file).read_text()
            assert re.search(rf"def {test}\(", text), f"{file}::{test}"


def test_every_public_name_is_in_the_reference() -> None:
    page = (DOCS / "reference/api.md").read_text()
    missing = [name for name in streams.__all__ if not re.search(rf"auto\w+:: streams\.(\w+\.)?{name}$", page, re.M)]
    assert missing == []


def test_every_command_is_there_and_in_the_reference() -> None:
    page = (DOCS / "reference/command-line.md").read_text()
    assert [name for name, command in COMMANDS.items() if importlib.util.find_spec(command.module) is None] == []
    assert [name for name in COMMANDS if f"kes {name}" not in page] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    """Files only; that anchors exist is what the build of the documentation finds out."""
    targets = re.findall(r"\]\((?!https?://|mailto:|#)([^)#\s]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_the_architecture_names_files_that_exist() -> None:
    text = (DOCS / "ARCHITECTURE.md").read_text()
    names = set(re.findall(r"`((?:\w+/)*\w+\.py)`", text))
    assert len(names) > 20
    missing = [name for name in names if not any((root / name).exists() for root in (ROOT, ROOT / "streams"))]
    assert missing == []
