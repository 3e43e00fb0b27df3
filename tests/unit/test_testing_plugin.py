"""The fixtures that come with the package, as a project that has it installed gets them."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from streams.errors import ConfigError
from streams.testing.clock import Clock

from .driver_kit import build

ROOT = Path(__file__).resolve().parents[2]
ENTRY_POINTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
HEAVY = ("confluent_kafka", "kafka", "pyspark", "anyio", "streams.source.event_source", "streams.testing.driver")

PROJECT = """
import sys
from streams.testing import TestDriver
from tests.unit.driver_kit import OUT, Added, Total, build


def test_right(kes_driver, kes_event, kes_clock, kes_seed):
    driver = kes_driver(build(), members=2)
    driver.send(kes_event(Added, name="ann"))
    assert driver.outputs(OUT, Total) == [Total("ann", 1)]
    assert kes_clock.monotonic() == driver.now > 0
    assert kes_seed == driver.seed == 12


def test_wrong(kes_driver):
    driver = kes_driver(build())
    driver.crash()
    assert driver.members == [0]
"""


@pytest.fixture
def project(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs pytest in a project of its own, which has this package installed and names nothing in a conftest."""
    installed = tmp_path / "site" / "kes_entry_points-0.dist-info"
    installed.mkdir(parents=True)
    lines = "\n".join(f"{name} = {value}" for name, value in ENTRY_POINTS.items())
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: kes-entry-points\nVersion: 0\n")
    (installed / "entry_points.txt").write_text(f"[pytest11]\n{lines}\n")

    def run(text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "test_project.py").write_text(text)
        environment = {**os.environ, "PYTHONPATH": f"{installed.parent}:{ROOT}", "SEED": "12"}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, "test_project.py"]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False
        )

    return run


def test_the_fixtures_are_there_and_a_failure_shows_its_seed(
    project: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = project(PROJECT, "-W", "error", "-o", "asyncio_default_fixture_loop_scope=function")
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "TestDriver, SEED=12, at 0." in done.stdout
    assert "member 0 is killed" in done.stdout
    assert "cannot collect" not in done.stdout  # TestDriver is no test


def test_it_may_be_named_in_a_conftest_too(project: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = project(PROJECT, "-p", "streams.testing.plugin", "-k", "right")
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_loading_it_costs_nothing() -> None:
    told = f"import sys, streams.testing.plugin; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", told], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_clock_follows_the_newest_driver(kes_driver: Callable[..., object], kes_clock: Clock) -> None:
    kes_clock.advance(5.0)
    assert kes_clock.monotonic() == 5.0
    driver = kes_driver(build())
    start = kes_clock.now()
    kes_clock.advance(3600.0)
    assert (kes_clock.now() - start).total_seconds() == pytest.approx(3600.0)
    assert kes_clock.time() == driver.time()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="cannot go back"):
        Clock().advance(-1.0)
