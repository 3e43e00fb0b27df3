"""What timers refuse: times, names and events that cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest

from streams import EventContext
from streams.errors import EncodeError, RecordRefused, RegistrationError, StoreError
from streams.testing import TestDriver
from tests.unit.test_timers import clocked, timers
from tests.vocabulary import Ring, Total

A = Ring("a")
NO_TIMES: list[tuple[Any, str]] = [
    (datetime(2030, 1, 1), "without a time zone"),
    (timedelta(seconds=5), "schedule_in takes a delay"),
    ("tomorrow", "aware datetime"),
    (True, "aware datetime"),
    (1_000_000_000_000, "not milliseconds"),
    (float("nan"), "no time"),
    (-1.0, "no time"),
]
NO_DELAYS: list[Any] = [float("nan"), float("inf"), 1e300, timedelta.max, "5", True, None]
NO_NAMES: list[Any] = ["", "@5/1", "x" * 501, "\ud800", 7]


@pytest.fixture(scope="module")
def at_work() -> Iterator[TestDriver[Any]]:
    with clocked() as driver:
        yield driver


@pytest.mark.parametrize(
    ("error", "said", "how"),
    [
        *((StoreError, said, {"when": when}) for when, said in NO_TIMES),
        *((StoreError, "from now", {"delay": delay}) for delay in NO_DELAYS),
        *((StoreError, None, {"when": 5, "name": name}) for name in NO_NAMES),
        (EncodeError, None, {"when": 5, "key": 7}),
        (RegistrationError, None, {"when": 5, "event": object()}),
        (RecordRefused, None, {"when": 5, "event": Ring("x" * 1_000_000)}),
        (RegistrationError, "has no handler", {"delay": 5, "event": Total("x", 1)}),
    ],
)
def test_what_is_refused(
    at_work: TestDriver[Any], error: type[Exception], said: str | None, how: dict[str, Any]
) -> None:
    options = {"event": A, **how}

    def schedule(ctx: EventContext[Any]) -> None:
        if "delay" in options:
            ctx.schedule_in(options.pop("delay"), **options)
        ctx.schedule_at(options.pop("when"), **options)

    with pytest.raises(error, match=said):
        at_work.interject(0, schedule)
    assert timers(at_work) == []


def test_after_the_handler(at_work: TestDriver[Any]) -> None:
    kept: list[EventContext[Any]] = []
    at_work.interject(0, kept.append)
    for late in (lambda: kept[0].schedule_at(5, Ring("a")), lambda: kept[0].cancel_timer("a")):
        with pytest.raises(StoreError, match="after the handler"):
            late()
