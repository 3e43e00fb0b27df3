"""Work ahead of its turn in a program that is sent elsewhere and run over records that are not Kafka's."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest

from streams import EventContext
from streams.core.policy import Failure
from streams.events import event_type_of
from streams.records import IncomingRecord
from streams.runtime.replay import Completed, PartitionReplay, Program
from streams.settings.jobs import SchedulerConfig
from streams.source.jobs import AsyncJobScheduler
from tests.unit.async_kit import new_source
from tests.vocabulary import Added, Named, Ring

cloudpickle = pytest.importorskip("pyspark.cloudpickle")
FEW = SchedulerConfig(concurrency=3)


def program(shout: str = "!") -> Program:
    """A chain of a task and a thread for ``Named``, a concurrent handler for ``Ring``, a plain one for ``Added``."""
    source = new_source()

    def count(ctx: EventContext[Any], name: str) -> None:
        ctx.store.put(name, ctx.store.get(name, 0) + 1)
        ctx.forward("out", Added(name), key=name)

    def second(text: str) -> str:
        if text.startswith("bad"):
            raise ValueError("no")
        return text + shout

    def finalize(ctx: EventContext[Any], item: str, result: str) -> None:
        count(ctx, result)

    async def first(event: Named) -> str:
        return event.name

    following: Any = AsyncJobScheduler(source, second, finalize, config=FEW)
    AsyncJobScheduler(source, first, config=FEW, then=following).register_event_type(
        Named, key=lambda event: event.name
    )

    @source.register_event_type(Ring, concurrency=2)
    async def turn(ctx: EventContext[Any], event: Ring) -> None:
        await ctx.turn()
        count(ctx, event.name)

    source.register_event_type(Added, lambda ctx, event: count(ctx, event.name))
    return source.program()


async def handled(replay: PartitionReplay, *events: Any) -> Completed:
    """What comes of these events."""
    records = []
    for offset, event in enumerate(events):
        kind = event_type_of(type(event))
        records.append(IncomingRecord("in", 0, offset, b"k", kind.encode(event), kind.headers))
    logging.disable(logging.CRITICAL)
    try:
        return await replay.handle(records)
    finally:
        replay.close()
        logging.disable(logging.NOTSET)


async def test_a_program_with_jobs_runs_where_it_is_sent() -> None:
    made: Program = cloudpickle.loads(cloudpickle.dumps(program()))
    replay = PartitionReplay(made, 0, wall_ms=0)
    events = [Named("a"), Ring("b"), Added("c"), Named("bad"), Named("a"), Ring("b")]
    completed = await handled(replay, *events)
    assert [(output.origin, output.topic) for output in completed.outputs] == [
        (offset, "g.in.dead-letters" if offset == 3 else "out") for offset in range(6)
    ]
    assert completed.dead == {3}
    assert {change.key for change in replay.contents()} == {b"a!", b"b", b"c"}
    assert replay.watermark == 6


async def test_events_that_are_known_to_fail_are_met_in_the_line() -> None:
    """As after a restart that took more back than the event that failed."""
    replay = PartitionReplay(program(), 0, wall_ms=0)
    replay._known = {offset: Failure(1, ValueError("known")) for offset in (1, 3, 5)}
    events = [Named("a"), Added("b"), Ring("c"), Ring("d"), Named("e"), Named("f"), Added("g")]
    completed = await handled(replay, *events)
    assert completed.dead == {1, 3, 5}
    assert [output.origin for output in completed.outputs] == list(range(7))
    assert {change.key for change in replay.contents()} == {b"a!", b"c", b"e!", b"g"}


async def test_copies_have_one_fingerprint_and_other_jobs_another() -> None:
    made = program()
    assert cloudpickle.loads(cloudpickle.dumps(made)).fingerprint == made.fingerprint
    routes = [route for route in made.routes if route.name != "Named"]
    assert msgspec.structs.replace(made, routes=tuple(routes)).fingerprint != made.fingerprint
    told = [part for route in made.fingerprint for part in route]
    for name in ("program.<locals>.first", "program.<locals>.second", "program.<locals>.finalize"):
        assert any(part.endswith(name) for part in told), "each function of the chain counts"
