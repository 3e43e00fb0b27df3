"""Events by type: how many their handlers have completed, and how long a sample of them took."""

from __future__ import annotations

from typing import Any

import pytest

from streams import AsyncJobScheduler, EventContext, EventSource, Once, Record
from streams.metrics import HandlerTimed, Measurement
from streams.outcomes import SKIP
from streams.runtime.partition import hot_path
from streams.testing import TestDriver
from streams.testing.simulation.virtual_time import elapse
from tests.unit.handlers_kit import config
from tests.vocabulary import KINDS, TOTALS, Added, Named, Total, count, register

pytestmark = pytest.mark.usefixtures("quiet")


def work(ctx: EventContext[Any], event: Any) -> None:
    for each in event if isinstance(event, list) else [event]:
        if each.deed:
            raise ValueError(each.deed)
        count(ctx, Added(each.name))


async def call(event: Added) -> None:
    await elapse(0.001)


def source_of(kind: str, measured: list[Measurement]) -> EventSource[Any]:
    settings = config(error_policy=SKIP, decode_policy=SKIP, metrics_handler=measured.append)
    source: EventSource[Any] = EventSource(settings, TOTALS)
    if kind == "batch":
        source.register_event_type(Added, work, batch=True)
    elif kind == "once":
        source.register_event_type(Added, work, once=Once("name", within=60.0))
    elif kind == "scheduler":

        def finish(ctx: EventContext[Any], event: Added, result: None) -> None:
            work(ctx, event)

        AsyncJobScheduler(source, call, finish).register_event_type(Added, key=lambda event: event.name)
    elif kind == "concurrent":

        @source.register_event_type(Added, concurrency=2)
        async def handler(ctx: EventContext[Any], event: Added) -> None:
            await call(event)
            await ctx.turn()
            work(ctx, event)
    else:
        register(source, work, kind)
    source.register_event_type(Total, lambda ctx, event: None)
    return source


@pytest.mark.parametrize("kind", [*KINDS, "batch", "once", "scheduler", "concurrent"])
def test_completed_events_are_counted_by_their_types(kind: str) -> None:
    """One that fails has another outcome, and one of another type in between is of its own."""
    with TestDriver(source_of(kind, [])) as driver:
        for number in range(6):
            driver.send(Added(f"n{number}"), key="a", wait=False)
            driver.send(Total("t", number), key="a", wait=False)
            driver.send(Added(f"f{number}", 1, "no"), key="a", wait=False)
        driver.send(Added("n0"), key="a")
        found = driver._world.members[0].source.statistics()
        assert found.handled_events == {"Added": 6 if kind == "once" else 7, "Total": 6}
        assert found.failed_events == {"Added": {"continue": 6}}
        assert len(driver.store(0)) == 6


@pytest.mark.parametrize("kind", ["plain", "async", "blocking"])
def test_a_sample_of_them_is_timed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of a type, and of so many; a plain one alone at the beginning of a slice, in the order of all."""
    monkeypatch.setattr(hot_path, "SAMPLED", 2)
    measured: list[Measurement] = []
    source = source_of(kind, measured)

    @source.register_event_type(Named)
    async def slow(ctx: EventContext[Any], event: Named) -> None:
        await elapse(0.25)

    with TestDriver(source) as driver:
        for number in range(8):
            driver.send(Added(f"n{number}"), key="a")
        driver.send(Named("x"), key="a")
        assert list(driver.store(0).keys()) == [f"n{number}" for number in range(8)]
    timed = [one for one in measured if isinstance(one, HandlerTimed)]
    assert HandlerTimed("Named", 0.25) in timed
    if kind == "plain":
        assert len([one for one in timed if one.type == "Added"]) >= 4


def test_a_record_that_cannot_be_read_is_an_outcome_of_its_type() -> None:
    """And of none, if nothing is known of its type."""
    source = source_of("plain", [])
    with TestDriver(source) as driver:
        driver.send_record(Record("in", b"{", b"a", [("__grt__", b"Added")]))
        driver.send_record(Record("in", b"{}", b"a", [("__grt__", b"Nobody")]))
        assert driver.statistics().failed_events == {"Added": {"continue": 1}}
