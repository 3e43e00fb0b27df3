from __future__ import annotations

import logging
import tracemalloc  # noqa: F401  # pytest asks it about warnings from finalizers, and one of those may run in its import
from collections.abc import Generator, Iterator

import pytest
from hypothesis import settings

# A change is judged by the same examples each time; new ones are looked for by `--hypothesis-profile=search`.
settings.register_profile("repeatable", derandomize=True, print_blob=True, deadline=None)  # a machine may stand still
settings.register_profile("search", print_blob=True, deadline=None)
settings.load_profile("repeatable")

pytest_plugins = ["streams.testing.fixtures", "streams.testing.plugin"]

WRONG_RESULT = r"Report\(|keys in the changelog|\.wrong\b|a transaction hangs|assert [\[{]|lost|missing|duplicate|twice"
"""How failures read when what came out is wrong: oracles' reports, lists and dictionaries that are compared. One of
those is one too many."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What runs beside real brokers, Spark and killed processes has one more try, since their timing is not ours; its
    first failure is told in full at the end. ``--fail-on-flaky`` makes it count, ``--force-reruns=0`` takes it back."""
    for item in items:
        if item.get_closest_marker("broker") or item.get_closest_marker("spark"):
            item.add_marker(pytest.mark.flaky(reruns=1, rerun_except=[WRONG_RESULT]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.write_sep("=", f"first try of {report.nodeid}", yellow=True)
        terminalreporter.write_line(report.longreprtext)
        for name, text in report.sections:
            terminalreporter.write_sep("-", name)
            terminalreporter.write_line(text)


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """The command line configures the package's logger; the test after it must not hear by it."""
    logger = logging.getLogger("streams")
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a test wrote may be no proper text, on purpose; a report has to get from one process to another."""
    report = yield
    report.sections = [
        (name, text.encode("utf-8", "backslashreplace").decode("utf-8")) for name, text in report.sections
    ]
    return report
