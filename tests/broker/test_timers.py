"""Durable timers move with their partition, on a real broker. Over restarts: ``test_two_back_ends_async.py``,
``tests/unit/test_timers.py``; when members die: ``tests/simulation``."""

from __future__ import annotations

import msgspec
import pytest

from streams import EventContext, EventSource, event_type
from streams.runtime.changelog import TIMER_PREFIX
from streams.runtime.connections import KafkaConnections
from streams.runtime.system import Environment
from tests.broker.engine_kit import Lab, Running
from tests.vocabulary import Added, Totals, tell_total

pytestmark = [pytest.mark.broker, pytest.mark.asyncio, pytest.mark.timeout(300)]

PARTITIONS = 2


@event_type("Rang")
class Rang(msgspec.Struct, frozen=True):
    """What timers fire."""

    name: str


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

        def set_timer(ctx: EventContext[Totals], event: Added) -> None:
            ctx.schedule_in(event.amount / 1000, Rang(event.name), name=event.name)

        source.register_event_type(Added, set_timer)
        source.register_event_type(Rang, lambda ctx, event: tell_total(ctx, Added(event.name), lab.output))
        environment = Environment(wall_seconds=clock)
        source.consume_events = lambda: source._consume(lambda c: KafkaConnections(c), environment)  # type: ignore[method-assign]
        super().__init__(source, active=active)

    @property
    def timers(self) -> int:
        return sum(partition.timers for partition in self.source.statistics().partitions)


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
    await lab.create()
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
            await lab.until_outputs(20)
            assert sorted(await lab.totals()) == sorted((name, 1) for name in names if int(name[2:]) < 10)
        await first.until(lambda: len(first.numbers) == 2, "it is back")
        assert first.timers == 20, "those that have fired there are not in the copy that was kept here"
        clock.seconds += 10
        await lab.until_outputs(40)
    assert sorted(await lab.totals()) == sorted((name, 1) for name in names)
    assert await kept(lab) == set()
