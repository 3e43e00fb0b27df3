"""What timers refuse: times, names and events that cannot be."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest

from streams import EventContext
from streams.errors import EncodeError, RecordRefused, RegistrationError, StoreError
from tests.unit.timer_kit import Clocked, Ring, alarmed


@pytest.mark.parametrize(
    ("when", "error"),
    [
        (datetime(2030, 1, 1), "without a time zone"),
        (timedelta(seconds=5), "schedule_in takes a delay"),
        ("tomorrow", "aware datetime"),
        (True, "aware datetime"),
        (1_000_000_000_000, "not milliseconds"),
        (float("nan"), "no time"),
        (-1.0, "no time"),
    ],
)
async def test_times_that_are_refused(clocked: Clocked, when: Any, error: str) -> None:
    source = alarmed(clocked)
    await clocked.start()
    with pytest.raises(StoreError, match=error):
        await source.interject(0, lambda ctx: ctx.schedule_at(when, Ring("a")))


@pytest.mark.parametrize("delay", [float("nan"), float("inf"), 1e300, timedelta.max, "5", True, None])
async def test_delays_that_are_refused(clocked: Clocked, delay: Any) -> None:
    source = alarmed(clocked)
    await clocked.start()
    with pytest.raises(StoreError, match="from now"):
        await source.interject(0, lambda ctx: ctx.schedule_in(delay, Ring("a")))


async def test_what_else_is_refused(clocked: Clocked) -> None:
    source = alarmed(clocked)
    await clocked.start()
    kept: list[EventContext[Any]] = []

    async def refused(error: type[Exception], *arguments: Any, **named: Any) -> None:
        with pytest.raises(error):
            await source.interject(0, lambda ctx: ctx.schedule_at(*arguments, **named))

    await refused(RegistrationError, 5, object())
    await refused(StoreError, 5, Ring("a"), name="")
    await refused(StoreError, 5, Ring("a"), name="@5/1")
    await refused(StoreError, 5, Ring("a"), name="x" * 501)
    await refused(StoreError, 5, Ring("a"), name="\ud800")
    await refused(StoreError, 5, Ring("a"), name=7)
    await refused(EncodeError, 5, Ring("a"), key=7)
    await refused(RecordRefused, 5, Ring("x" * 1_000_000))
    await source.interject(0, kept.append)
    with pytest.raises(StoreError, match="after the handler"):
        kept[0].schedule_at(5, Ring("a"))
    with pytest.raises(StoreError, match="after the handler"):
        kept[0].cancel_timer("a")
    assert clocked.timers() == []


async def test_an_event_that_nobody_handles_sets_no_timer(clocked: Clocked) -> None:
    source = alarmed(clocked, None)
    await clocked.start()
    with pytest.raises(RegistrationError, match="nobody handles"):
        await source.interject(0, lambda ctx: ctx.schedule_in(5, Ring("a")))
