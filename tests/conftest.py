from __future__ import annotations

import logging
import tracemalloc  # noqa: F401  # pytest asks it about warnings from finalizers, and one of those may run in its import
from collections.abc import Iterator

import pytest

pytest_plugins = ["streams.testing.fixtures", "streams.testing.plugin"]


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """The command line configures the package's logger; the test after it must not hear by it."""
    logger = logging.getLogger("streams")
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])
