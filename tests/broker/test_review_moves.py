"""Moves of a source that has trouble of its own: handlers that fail, are slow, send what is refused; stores that can
not undo; members that come, drain, and are cut off meanwhile."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from streams import Change, ErrorPolicy, ErrorResponse, EventContext, EventSource, Record, TopicPartition
from streams.testing.fixtures import BrokerAddress
from tests.broker.engine_kit import Lab, Running, until
from tests.broker.gate import gate
from tests.vocabulary import TOTALS, Added, Total, added

pytestmark = [pytest.mark.broker, pytest.mark.asyncio, pytest.mark.timeout(180)]

PARTITIONS = 4
SKIPPED = ("bad", "refused")
POLICY = ErrorPolicy(retries=1, backoff_seconds=0.01, then=ErrorResponse.CONTINUE)


class Plain:
    """A store that cannot undo, and is strict about its contract."""

    def __init__(self, _: TopicPartition) -> None:
        self.values: dict[bytes, bytes] = {}
        self.is_gone = False

    def receive_change(self, change: Change, /) -> None:
        assert not self.is_gone
        assert change.value is not None
        assert int(change.value) > int(self.values.get(change.key, b"0")), "fed twice, or with holes"
        self.values[change.key] = change.value

    def revoked(self) -> None:
        assert not self.is_gone
        self.is_gone = True


def bump(ctx: EventContext[Any]) -> int:
    """One more event in this partition, in either store."""
    if not isinstance(ctx.store, Plain):
        number: int = ctx.store.get("all", 0) + 1
        ctx.store.put("all", number)
        return number
    number = int(ctx.store.values.get(b"all", b"0")) + 1
    ctx.store.values[b"all"] = b"%d" % number
    ctx.record_change(Change(b"all", b"%d" % number))
    return number


class Trouble:
    """Input with trouble in it, and what has to come of it."""

    def __init__(self, lab: Lab, small: str, seed: int) -> None:
        self._lab, self._small, self._rng = lab, small, random.Random(seed)
        self.sent = [0] * PARTITIONS
        self.expected: list[list[str]] = [[] for _ in range(PARTITIONS)]
        self.ended = False

    async def feed(self) -> None:
        """Until it is told to end."""
        while not self.ended:
            for partition in range(PARTITIONS):
                for _ in range(self._rng.randrange(6)):
                    await self._send(partition)
            await self._lab.flush()
            await asyncio.sleep(0.02)

    async def _send(self, partition: int) -> None:
        (deed,) = self._rng.choices(["", "once", "slow", *SKIPPED], [1000, 3, 2, 2, 1])
        name = f"{partition}/{self.sent[partition]}"
        await self._lab.send(added(name, 1, deed), b"k", partition=partition)
        self.sent[partition] += 1
        if deed not in SKIPPED:
            self.expected[partition].append(name)

    def handle(self, ctx: EventContext[Any], event: Added) -> None:
        number = bump(ctx)
        ctx.forward(self._lab.output, Total(event.name, number), partition=ctx.topic_partition.partition)
        if event.deed == "bad" or (event.deed == "once" and ctx.attempt == 1):
            raise ValueError(event.deed)
        if event.deed == "refused":
            ctx.forward(Record(self._small, b"x" * 5000, b"k"))

    async def handle_async(self, ctx: EventContext[Any], event: Added) -> None:
        self.handle(ctx, event)
        if event.deed == "slow":
            await asyncio.sleep(0.6)

    def handle_blocking(self, ctx: EventContext[Any], event: Added) -> None:
        self.handle(ctx, event)
        if event.deed == "slow":
            time.sleep(0.6)


def active(source: EventSource[Any]) -> int:
    return sum(partition.state == "active" for partition in source.statistics().partitions)


@pytest.mark.parametrize(
    ("store", "blocking"),
    gate([(Plain, False), (Plain, True), (TOTALS, False), (TOTALS, True)], (Plain, False)),
    ids=["plain-async", "plain-blocking", "table-async", "table-blocking"],
)
async def test_moves_of_a_source_that_has_trouble(
    kafka_broker: BrokerAddress, topic_prefix: str, store: Callable[[TopicPartition], Any], blocking: bool
) -> None:
    seed = int(os.environ.get("SEED", random.randrange(1 << 30)))
    print(f"SEED={seed}")
    lab = Lab(kafka_broker.bootstrap_servers, topic_prefix, PARTITIONS)
    small = f"{topic_prefix}small"
    await lab.create()
    await lab.create(small, max_message_bytes="2000")
    trouble = Trouble(lab, small, seed)

    def source(name: str, drain_timeout_seconds: float = 5.0) -> EventSource[Any]:
        made: EventSource[Any] = EventSource(
            lab.config(
                instance_id=name,
                num_standbys=1,
                error_policy=POLICY,
                drain_timeout_seconds=drain_timeout_seconds,
                leave_timeout_seconds=3.0,
            ),
            store,
        )
        handler: Any = trouble.handle_blocking if blocking else trouble.handle_async
        made.register_event_type(Added, handler, blocking=blocking)
        return made

    feeding = asyncio.create_task(trouble.feed())
    try:
        async with AsyncExitStack() as stack:
            # Less than a slow event takes: it is cancelled, and done again by who comes next.
            first = source("a", drain_timeout_seconds=0.3)
            await stack.enter_async_context(Running(first, active=1))
            second = source("b")
            cut = await stack.enter_async_context(Running(second, active=1))
            third = source("c", drain_timeout_seconds=0.3)
            await stack.enter_async_context(Running(third, active=1))
            await first.stop()
            await until(lambda: active(second) + active(third) == PARTITIONS, "the others have everything")
            fourth = source("d")
            await stack.enter_async_context(Running(fourth, active=1))
            second.stop_now()
            await cut.task
            await until(lambda: active(third) + active(fourth) == PARTITIONS, "the others have it again")
    finally:
        trouble.ended = True
        await feeding
    async with Running(source("last")) as run:
        await run.until_handled(*trouble.sent)
    for partition in range(PARTITIONS):
        totals = await lab.totals(partition)
        assert [name for name, _ in totals] == trouble.expected[partition], f"partition {partition}"
        assert [number for _, number in totals] == list(range(1, len(totals) + 1)), f"partition {partition}"
    await lab.check_settled()
