"""A batch handler comes to what a plain one comes to, event for event, whatever fails, is refused or dies."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streams import (
    DEAD_LETTER,
    SKIP,
    BatchContext,
    ErrorResponse,
    EventContext,
    EventSource,
    EventSourceConfig,
    Record,
    Retry,
    Table,
)
from streams.records import TYPE_HEADER
from streams.testing import TestDriver
from tests.property.kit import seeded
from tests.vocabulary import Added, Named, TotalAt

pytestmark = pytest.mark.usefixtures("quiet")

EXAMPLES = int(os.environ.get("BATCH_EXAMPLES", "40"))
OUT, LIMIT = "out", 200
POLICIES = {
    "skip": SKIP,
    "dead letter": DEAD_LETTER,
    "retried": Retry(attempts=2, backoff_seconds=0.01, then=ErrorResponse.DEAD_LETTER),
}


def add(ctx: EventContext[Any], key: str, offset: int, deed: str = "") -> None:
    total = ctx.store.get(key, 0) + 1
    ctx.store.put(key, total)
    ctx.forward(OUT, TotalAt(key, total, offset, "x" * LIMIT if deed == "refused" else ""), key=key)
    if deed == "raises":
        raise ValueError("no")
    if deed == "timer":
        ctx.schedule_in(5.0, Added(f"{key} later"), name=f"{key}-{offset}")


def source_of(policy: Retry, batch: bool) -> EventSource[Any]:
    config = EventSourceConfig(
        group_id="g", topic="in", num_partitions=2, error_policy=policy, decode_policy=DEAD_LETTER
    )
    source: EventSource[Any] = EventSource(config, Table.factory(key=str, value=int))

    def together(ctx: BatchContext[Any], events: list[Added]) -> None:
        for event, record in zip(events, ctx.records, strict=True):
            add(ctx, event.name, record.offset, event.deed)

    if batch:
        source.register_event_type(Added, together, batch=True)
    else:
        source.register_event_type(Added, lambda ctx, event: add(ctx, event.name, ctx.offset, event.deed))
    source.register_event_type(Named, lambda ctx, event: add(ctx, event.name, ctx.offset))
    return source


Play = Sequence[tuple[int, str, str]]
"""Partition, key, and what is done: a deed, ``aside``, ``unreadable``, ``settle``, ``crash`` or ``rebalance``."""


def play(driver: TestDriver[Any], steps: Play, faults: bool) -> dict[str, Any]:
    driver._world.broker.limits[OUT] = LIMIT
    for partition, key, what in steps:
        if what in ("settle", "crash", "rebalance"):
            if faults:
                meddle(driver, what)
        elif what == "unreadable":
            record = Record("in", b"?", key.encode(), [(TYPE_HEADER, b"Added")], partition)
            driver.send_record(record, wait=False)
        else:
            event = Named(key) if what == "aside" else Added(key, deed=what)
            driver.send(event, key=key, partition=partition, wait=False)
    driver.settle()
    driver.advance(10)
    driver.settle()
    driver.check()
    outputs: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for total in driver.outputs(OUT, TotalAt):
        outputs[total.key].append((total.total, total.offset))
    stores = [dict(driver.restored_store(number).items()) for number in range(2)]
    letters = [(record.partition, record.key, record.value) for record in driver.dead_letters()]
    return {"outputs": dict(outputs), "stores": stores, "letters": sorted(letters, key=repr)}


def meddle(driver: TestDriver[Any], what: str) -> None:
    if what == "crash":
        driver.advance(0.004)  # in the middle of something
        member = driver.members[0]
        driver.crash(member)
        driver.restart(member)
    elif what == "rebalance":
        driver.rebalance()
    else:
        driver.settle()


KINDS = ("", "", "", "", "raises", "refused", "timer", "aside", "unreadable", "settle", "crash", "rebalance")
STEPS = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from("abc"), st.sampled_from(KINDS)).map(
        lambda step: (step[0], f"{step[1]}{step[0]}", step[2])
    ),
    min_size=1,
    max_size=40,
)


@seeded
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(STEPS, st.sampled_from(sorted(POLICIES)), st.integers(0, 1_000))
def test_lists_are_as_good_as_events(steps: Play, policy: str, chance: int) -> None:
    topics = {OUT: 1}
    with TestDriver(source_of(POLICIES[policy], batch=False), topics=topics) as driver:
        expected = play(driver, steps, faults=False)
    with TestDriver(source_of(POLICIES[policy], batch=True), members=2, seed=chance, topics=topics) as driver:
        assert play(driver, steps, faults=True) == expected
