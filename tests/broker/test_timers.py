"""Durable timers on a real broker: over restarts, moves to warm copies, and processes that are killed."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
import pytest_asyncio

from streams import EventSource
from streams.runtime.changelog import TIMER_PREFIX
from streams.runtime.connections import KafkaConnections
from streams.runtime.system import Environment
from streams.testing.fixtures import BrokerAddress
from tests.broker import timer_worker
from tests.broker.engine_kit import Lab, Running
from tests.vocabulary import Totals

pytestmark = [pytest.mark.broker, pytest.mark.asyncio, pytest.mark.timeout(300)]

PARTITIONS = 2


class Clock:
    """The time of day of all members of a test."""

    def __init__(self) -> None:
        self.seconds = 1_700_000_000.0

    def __call__(self) -> float:
        return self.seconds


class Timed(Running):
    """Its source takes the time of day from a clock."""

    def __init__(self, lab: Lab, clock: Clock, name: str, *, active: int | None = None, standbys: int = 0) -> None:
        source: EventSource[Totals] = lab.source(instance_id=name, num_standbys=standbys)
        timer_worker.register(source, lab.output)
        environment = Environment(wall_seconds=clock)
        source.consume_events = lambda: source._consume(lambda c: KafkaConnections(c), environment)  # type: ignore[method-assign]
        super().__init__(source, active=active)

    @property
    def timers(self) -> int:
        return sum(partition.timers for partition in self.source.statistics().partitions)

    @property
    def numbers(self) -> set[int]:
        return {p.partition for p in self.source.statistics().partitions if p.state == "active"}

    @property
    def ready(self) -> set[int]:
        return {copy.partition for copy in self.source.statistics().copies if copy.state == "ready"}


@pytest_asyncio.fixture
async def lab(kafka_broker: BrokerAddress, topic_prefix: str) -> Lab:
    lab = Lab(kafka_broker.bootstrap_servers, topic_prefix, PARTITIONS)
    await lab.create()
    return lab


async def rang(lab: Lab, partition: int | None = None) -> list[str]:
    return [name for name, _ in await lab.totals(partition)]


async def until_rang(lab: Lab, count: int, seconds: float = 60.0) -> list[str]:
    """Wait for so many; returns their names."""
    found: list[str] = []
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while len(found) < count:
        assert loop.time() < deadline, f"{len(found)} of {count} timers have fired"
        found = await rang(lab)
        await asyncio.sleep(0.05)
    return found


async def kept(lab: Lab) -> set[str]:
    """The timers in the changelogs."""
    last = {(record.partition, record.key): record.value for record in await lab.records(lab.changelog) if record.key}
    return {
        key[len(TIMER_PREFIX) :].decode()
        for (_, key), value in last.items()
        if key.startswith(TIMER_PREFIX) and value is not None
    }


async def test_they_move_with_their_partition(lab: Lab) -> None:
    """To a warm copy, and back to the copy that the donor kept."""
    clock = Clock()
    names = {f"{partition}/{number}" for partition in range(PARTITIONS) for number in range(20)}
    async with Timed(lab, clock, "a", standbys=1) as first:
        for name in sorted(names):
            await lab.add(name, partition=int(name[0]), amount=10_000 * (1 + int(name[2:]) // 10))
        await first.until(lambda: first.timers == 40, "all are set")
        async with Timed(lab, clock, "b", active=0, standbys=1) as second:
            await first.until(lambda: len(first.numbers) == len(second.numbers) == 1, "one has moved")
            await first.until(lambda: first.timers == second.timers == 20, "its timers with it")
            await first.until(lambda: first.ready == second.numbers and second.ready == first.numbers, "copies")
            clock.seconds += 10
            half = await until_rang(lab, 20)
            assert Counter(half) == dict.fromkeys({name for name in names if int(name[2:]) < 10}, 1)
        await first.until(lambda: len(first.numbers) == 2, "it is back")
        assert first.timers == 20, "those that have fired there are not in the copy that was kept here"
        clock.seconds += 10
        found = await until_rang(lab, 40)
    assert Counter(found) == dict.fromkeys(names, 1)
    assert await kept(lab) == set()
