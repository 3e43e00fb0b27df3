"""The recorded durations of the tests: runs begin with the longest files, and the budget of the change gate is checked.

make test-all ARGS=--record-durations      writes tests/durations.json; files that did not run keep their figures
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).with_name("durations.json")
LONG_SECONDS = 20.0
"""A test of the change gate that takes longer is marked ``slow``: one looks twice before adding such a test."""

Files = dict[str, float]


def recorded() -> dict[str, Any]:
    """``gate`` and ``nightly``: file -> seconds of all its tests; ``long``: tests above ``LONG_SECONDS`` without the
    mark ``slow``."""
    return json.loads(PATH.read_text()) if PATH.exists() else {"gate": {}, "nightly": {}, "long": {}}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", action="store_true", help=f"write {PATH.name}, by which runs are ordered")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--record-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the longest files when several processes share the run: a long one at the end would have one wait."""
    if hasattr(config, "workerinput"):
        times = recorded()
        both: Files = {file: times["gate"].get(file, 0.0) for file in times["gate"].keys() | times["nightly"].keys()}
        for file, seconds in times["nightly"].items():
            both[file] += seconds
        items.sort(key=lambda item: -both.get(item.nodeid.partition("::")[0], 0.0))


class Recorder:
    """Sums up what setup, call and teardown of each test took; a long test is one with a long call, since its setup may
    be that of the broker or the Spark session which many tests share."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, bool], float] = defaultdict(float)
        self.long: Files = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        marks, nightly = report.keywords, "nightly" in report.keywords
        self.seconds[report.nodeid, nightly] += report.duration
        if report.when == "call" and report.duration > LONG_SECONDS and not (nightly or "slow" in marks):
            self.long[report.nodeid] = round(report.duration, 1)

    def pytest_sessionfinish(self) -> None:
        times = recorded()
        sums: dict[str, Files] = {"gate": defaultdict(float), "nightly": defaultdict(float)}
        for (node, nightly), seconds in self.seconds.items():
            sums["nightly" if nightly else "gate"][node.partition("::")[0]] += seconds
        ran = sums["gate"].keys() | sums["nightly"].keys()
        for kind, files in sums.items():
            kept = {file: seconds for file, seconds in times[kind].items() if file not in ran and Path(file).exists()}
            times[kind] = {file: round(seconds, 1) for file, seconds in sorted({**kept, **files}.items())}
        kept = {node: seconds for node, seconds in times["long"].items() if node.partition("::")[0] not in ran}
        times["long"] = dict(sorted({**kept, **self.long}.items()))
        PATH.write_text(json.dumps(times, indent=1) + "\n")
