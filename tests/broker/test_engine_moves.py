"""Warm moves of real event sources: joins, leaves, standbys, and what happens to a copy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
import pytest_asyncio

from streams.metrics import Measurement, MembershipChanged, PartitionMoved, TakeOverDone
from streams.testing.fixtures import BrokerAddress
from tests.broker.engine_kit import Lab, Running, until

pytestmark = [pytest.mark.broker, pytest.mark.asyncio, pytest.mark.timeout(120)]

PARTITIONS = 4


class Member:
    """A source of the group, and what it measured."""

    def __init__(self, lab: Lab, name: str, **settings: Any) -> None:
        self.measured: list[Measurement] = []
        self.source = lab.telling(instance_id=name, metrics_handler=self.measured.append, **settings)
        self.running = Running(self.source, active=0)

    @property
    def active(self) -> frozenset[int]:
        return frozenset(p.partition for p in self.source.statistics().partitions if p.state == "active")

    @property
    def ready(self) -> frozenset[int]:
        return frozenset(copy.partition for copy in self.source.statistics().copies if copy.state == "ready")

    def moved(self, direction: str) -> set[int]:
        return {m.partition for m in self.measured if isinstance(m, PartitionMoved) and m.direction == direction}

    def taken_over(self) -> list[int]:
        return sorted(m.partition for m in self.measured if isinstance(m, TakeOverDone))

    def generations(self) -> set[int]:
        return {m.generation for m in self.measured if isinstance(m, MembershipChanged)}


@pytest_asyncio.fixture
async def lab(kafka_broker: BrokerAddress, topic_prefix: str) -> Lab:
    lab = Lab(kafka_broker.bootstrap_servers, topic_prefix, PARTITIONS)
    await lab.create()
    return lab


async def share(*members: Member, standbys: int = 0) -> None:
    """Wait until they share the partitions evenly, each copy is warm, and nothing moves."""

    def shared() -> bool:
        owned = [member.active for member in members]
        ready = [member.ready for member in members]
        even = max(map(len, owned)) - min(map(len, owned)) <= 1
        still = not any(member.source.statistics().moves for member in members)
        return even and still and sum(map(len, owned)) == PARTITIONS and sum(map(len, ready)) == PARTITIONS * standbys

    await until(shared, "the partitions are shared")


async def feed(lab: Lab, rounds: int, running: Callable[[], bool] = lambda: True) -> int:
    """One event per partition and round, for as long as it is asked for; returns the rounds."""
    for number in range(rounds):
        if not running():
            return number
        for partition in range(PARTITIONS):
            await lab.send(b'{"name":"k%d","amount":1}' % partition, b"k", partition=partition)
        await lab.flush()
    return rounds


async def check(lab: Lab, rounds: int) -> None:
    """Each partition's outputs are 1, 2, 3 … once each."""

    async def complete() -> bool:
        return len(await lab.records()) == rounds * PARTITIONS

    deadline = asyncio.get_running_loop().time() + 60
    while not await complete():
        assert asyncio.get_running_loop().time() < deadline, f"{len(await lab.records())} of {rounds * PARTITIONS}"
    totals = await lab.totals()
    for partition in range(PARTITIONS):
        amounts = [amount for name, amount in totals if name == f"k{partition}"]
        assert amounts == list(range(1, rounds + 1)), f"partition {partition}"
        assert await lab.counts(partition) == {f"k{partition}": rounds}


async def test_a_join_moves_its_share_by_markers_in_two_generations(lab: Lab) -> None:
    first, second = Member(lab, "first"), Member(lab, "second")
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(first.running)
        await first.running.until(lambda: len(first.active) == PARTITIONS, "the first has everything")
        await feed(lab, 3)
        before = max(first.generations())
        joined = asyncio.Event()
        feeding = asyncio.create_task(feed(lab, 1_000, lambda: not joined.is_set()))
        await stack.enter_async_context(second.running)
        await share(first, second)
        joined.set()
        rounds = 3 + await feeding
        assert first.moved("out") == second.moved("in") == second.active
        assert second.taken_over() == [], "nothing was taken over cold"
        assert max(first.generations()) - before == 2
        await check(lab, rounds)
    await lab.check_settled()


async def test_who_stops_hands_over_first(lab: Lab) -> None:
    first, second = Member(lab, "first"), Member(lab, "second")
    async with first.running:
        async with second.running:
            await share(first, second)
            await feed(lab, 3)
            owned = second.active
            await second.source.stop()
        assert second.moved("out") >= owned
        await until(lambda: first.moved("in") >= owned, "the first has read the markers")
        await first.running.until(lambda: len(first.active) == PARTITIONS, "the first has everything again")
        await feed(lab, 3)
        await check(lab, 6)
    await lab.check_settled()


async def test_standbys_are_kept_and_promoted(lab: Lab) -> None:
    first, second = Member(lab, "first", num_standbys=1), Member(lab, "second", num_standbys=1)
    async with first.running:
        await first.running.until(lambda: len(first.active) == PARTITIONS, "the first has everything")
        await feed(lab, 3)
        async with second.running:
            await share(first, second, standbys=1)
            assert first.ready == second.active
            assert second.ready == first.active
            await feed(lab, 3)
            second.source.stop_now()
            await second.running.task
        await first.running.until(lambda: len(first.active) == PARTITIONS, "the standbys are at work")
        assert all(m.warm for m in first.measured[-10:] if isinstance(m, TakeOverDone))
        await feed(lab, 3)
        await check(lab, 9)
    await lab.check_settled()


async def test_all_stop_at_once(lab: Lab) -> None:
    members = [Member(lab, f"m{number}", num_standbys=1) for number in range(3)]
    async with AsyncExitStack() as stack:
        for member in members:
            await stack.enter_async_context(member.running)
        await share(*members, standbys=1)
        await feed(lab, 5)
        await check(lab, 5)
        async with asyncio.timeout(20):
            await asyncio.gather(*(member.source.stop() for member in members))
    await check(lab, 5)
    await lab.check_settled()
