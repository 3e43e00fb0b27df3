"""pytest's way to ``TestDriver`` and its companions. Installed with the package; nothing is imported before it is used.

``kes_driver``  makes drivers, and closes them at the end: ``driver = kes_driver(source, members=2)``
``kes_event``   makes events with the fields filled in that a test leaves out: ``kes_event(Order, amount=5)``
``kes_clock``   the time of the test's driver, for code that asks for the time
``kes_seed``    the number in the variable ``SEED``, else 0: what drivers and events are made from
``kes_broker``  a real Kafka for the whole session (``streams.testing.fixtures.kafka_broker``, if that is in use)
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from streams.source.event_source import EventSource
    from streams.testing.clock import Clock
    from streams.testing.driver import TestDriver
    from streams.testing.event_factory import EventFactory
    from streams.testing.fixtures import BrokerAddress

DriverFactory = Callable[..., "TestDriver[Any]"]
"""The type of the fixture ``kes_driver``: called with the arguments of ``TestDriver``."""

_DRIVERS = pytest.StashKey[list["TestDriver[Any]"]]()
_SHOWN_LINES = 40


@pytest.fixture
def kes_seed() -> int:
    """``SEED``, else 0."""
    named = os.environ.get("SEED", "").strip()
    try:
        return int(named or "0")
    except ValueError:
        raise pytest.UsageError(f"SEED is {named!r}; it must be a whole number") from None


@pytest.fixture
def kes_driver(request: pytest.FixtureRequest, kes_seed: int, kes_clock: Clock) -> Iterator[DriverFactory]:
    """A function that makes a ``TestDriver``; what happened in it is shown when the test fails."""
    from streams.testing.driver import TestDriver

    with contextlib.ExitStack() as drivers:

        def make(
            source: EventSource[Any] | Callable[[], EventSource[Any]],
            members: int = 1,
            seed: int = kes_seed,
            **options: Any,
        ) -> TestDriver[Any]:
            driver = drivers.enter_context(TestDriver(source, members, seed, **options))
            kes_clock.follow(driver)
            request.node.stash.setdefault(_DRIVERS, []).append(driver)
            return driver

        yield make


@pytest.fixture
def kes_clock() -> Clock:
    """The time of the driver that ``kes_driver`` made last."""
    from streams.testing.clock import Clock

    return Clock()


@pytest.fixture
def kes_event(kes_seed: int) -> EventFactory:
    """Makes events: the same ones for the same seed."""
    from streams.testing.event_factory import EventFactory

    return EventFactory(kes_seed)


@pytest.fixture(scope="session")
def kes_broker(request: pytest.FixtureRequest) -> Iterator[BrokerAddress]:
    """A real Kafka, found or started as in ``streams.testing.fixtures``; one for the whole session."""
    from streams.testing.fixtures import session_broker

    try:
        yield request.getfixturevalue("kafka_broker")
    except pytest.FixtureLookupError:
        with session_broker() as broker:
            yield broker


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that fails shows the seed, and what happened in its drivers."""
    report = yield
    if report.when == "call" and report.failed:
        for driver in item.stash.get(_DRIVERS, []):
            happened = "\n".join(driver.trace[-_SHOWN_LINES:])
            report.sections.append((f"TestDriver, SEED={driver.seed}, at {driver.now:.3f} s", happened))
    return report
