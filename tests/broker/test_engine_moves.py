"""Warm moves of real event sources: joins, leaves, standbys, and what happens to a copy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from streams.metrics import Measurement, MembershipChanged, PartitionMoved, TakeOverDone
from tests.broker.engine_kit import Lab, Running, until

pytestmark = [pytest.mark.broker, pytest.mark.asyncio, pytest.mark.timeout(120)]

PARTITIONS = 4


class Member(Running):
    """A source of the group, and what it measured."""

    def __init__(self, lab: Lab, name: str, **settings: Any) -> None:
        self.measured: list[Measurement] = []
        source = lab.telling(instance_id=name, metrics_handler=self.measured.append, **settings)
        super().__init__(source, active=0)

    async def until_alone(self) -> None:
        await self.until(lambda: self.active == PARTITIONS, "it has everything")

    def moved(self, direction: str) -> set[int]:
        return {m.partition for m in self.measured if isinstance(m, PartitionMoved) and m.direction == direction}

    def last_generation(self) -> int:
        return max(m.generation for m in self.measured if isinstance(m, MembershipChanged))


async def share(*members: Member, standbys: int = 0) -> None:
    """Wait until they share the partitions evenly, each copy is warm, and nothing moves."""

    def shared() -> bool:
        owned = [member.numbers for member in members]
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
    await lab.until_outputs(rounds * PARTITIONS)
    totals = await lab.totals()
    for partition in range(PARTITIONS):
        amounts = [amount for name, amount in totals if name == f"k{partition}"]
        assert amounts == list(range(1, rounds + 1)), f"partition {partition}"
        assert await lab.counts(partition) == {f"k{partition}": rounds}


async def test_a_join_moves_its_share_by_markers_in_two_generations(lab: Lab) -> None:
    await lab.create()
    first, second = Member(lab, "first"), Member(lab, "second")
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(first)
        await first.until_alone()
        await feed(lab, 3)
        before = first.last_generation()
        joined = asyncio.Event()
        feeding = asyncio.create_task(feed(lab, 1_000, lambda: not joined.is_set()))
        await stack.enter_async_context(second)
        await share(first, second)
        joined.set()
        rounds = 3 + await feeding
        assert first.moved("out") == second.moved("in") == second.numbers
        assert not any(isinstance(m, TakeOverDone) for m in second.measured), "nothing was taken over cold"
        assert first.last_generation() - before == 2
        await check(lab, rounds)
    await lab.check_settled()


async def test_who_stops_hands_over_first(lab: Lab) -> None:
    await lab.create()
    first, second = Member(lab, "first"), Member(lab, "second")
    async with first:
        async with second:
            await share(first, second)
            await feed(lab, 3)
            owned = second.numbers
            await second.source.stop()
        assert second.moved("out") >= owned
        await until(lambda: first.moved("in") >= owned, "the first has read the markers")
        await first.until_alone()
        await feed(lab, 3)
        await check(lab, 6)
    await lab.check_settled()


async def test_standbys_are_kept_and_promoted(lab: Lab) -> None:
    await lab.create()
    first, second = Member(lab, "first", num_standbys=1), Member(lab, "second", num_standbys=1)
    async with first:
        await first.until_alone()
        await feed(lab, 3)
        async with second:
            await share(first, second, standbys=1)
            assert first.ready == second.numbers
            assert second.ready == first.numbers
            await feed(lab, 3)
            second.source.stop_now()
            await second.task
        await first.until_alone()
        assert all(m.warm for m in first.measured[-10:] if isinstance(m, TakeOverDone))
        await feed(lab, 3)
        await check(lab, 9)
    await lab.check_settled()
