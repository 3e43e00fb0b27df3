"""``kes new``: what it makes, and what it refuses. That it runs over a broker: ``tests/broker/test_cli_new.py``."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.cli_kit import Kes

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(project: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=project,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "HOME": str(project.parent), "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_new_project_passes_its_tests_and_is_in_good_style(kes: Kes, folder: Path) -> None:
    answer = kes("new", "order_totals", "--json").data
    assert answer["files"] == [
        *("order_totals.py", "test_order_totals.py", "produce.py"),
        *("pyproject.toml", "README.md", "kes.toml", ".gitignore"),
    ]
    project = folder / "order_totals"
    with contextlib.chdir(project):
        assert "(not there)" not in kes("config").out, "its settings file has no settings yet"
    assert "3 passed" in run(project, "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:asyncio")
    run(project, "ruff", "check", "--no-cache", ".")
    run(project, "ruff", "format", "--no-cache", "--check", ".")


@pytest.mark.nightly
def test_a_new_project_is_typed(kes: Kes, folder: Path) -> None:
    kes("new", "shop")
    run(folder / "shop", "mypy", "--strict", "shop.py", "produce.py", "test_shop.py")


@pytest.mark.parametrize(
    "name", ["", "Shop", "my-shop", "a.b", "../up", "class", "json", "streams", "test_x", "1a", "é"]
)
def test_names_that_no_module_can_have_are_refused(kes: Kes, folder: Path, name: str) -> None:
    assert f"{name!r} " in kes("new", name, code=2).words
    assert list(folder.iterdir()) == []


def test_nothing_is_overwritten(kes: Kes, folder: Path) -> None:
    (folder / "shop").mkdir()
    kes("new", "shop")
    before = (folder / "shop/shop.py").read_text()
    (folder / "shop/shop.py").write_text(before + "# mine\n")
    assert "exists and is not empty" in kes("new", "shop", code=1).err
    assert (folder / "shop/shop.py").read_text() == before + "# mine\n"
    (folder / "other").write_text("a file")
    assert kes("new", "other", code=1).err.startswith("kes: config error: other: Not a directory")
