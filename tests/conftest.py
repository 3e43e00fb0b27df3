from __future__ import annotations

import logging
import tracemalloc  # noqa: F401  # pytest asks it about warnings from finalizers, and one of those may run in its import
from collections.abc import Generator, Iterator

import pytest
from hypothesis import settings

# A change is judged by the same examples each time; new ones are looked for by `--hypothesis-profile=search`.
settings.register_profile("repeatable", derandomize=True, print_blob=True)
settings.register_profile("search", print_blob=True)
settings.load_profile("repeatable")

pytest_plugins = ["streams.testing.fixtures", "streams.testing.plugin"]


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
