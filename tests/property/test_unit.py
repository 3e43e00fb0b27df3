"""The hot path has the unit of work inlined: for any events it does the same as ``Unit``, event by event.

The same records go through three workers: as plain handlers (``hot_path``), as handlers that are executed one by one
(``execution``), and as finalizers, which share a unit. What is admitted, what is left in the store and among the
timers, and what is reported of failures must be equal.
"""

from __future__ import annotations

import asyncio
import random
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn

import anyio.lowlevel
import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from streams import EventContext, EventSourceConfig, ExecutionState, Table, event_type
from streams.codecs import codec_for
from streams.core.partition import PartitionState
from streams.core.router import Route, Router
from streams.errors import EventFailure
from streams.events import event_type_of
from streams.outcomes import ErrorResponse, Retry
from streams.records import Change, IncomingRecord, Output, TopicPartition
from streams.runtime.ownership.replica import Replica
from streams.runtime.partition.event_context import EventContext as Context
from streams.runtime.partition.failures import Cancellation
from streams.runtime.partition.reorder_buffer import Entry
from streams.runtime.partition.unit import Unit
from streams.runtime.partition.worker import PartitionWorker
from streams.stores import HashEngine
from tests.property.kit import seeded

pytestmark = pytest.mark.usefixtures("quiet")

LIMIT = 120
OPS = ("put", "put and record", "large", "delete", "read", "set", "set unnamed", "cancel")
THEN = ("complete", "nothing", "fail", "raise", "raise once", "cancelled", "fatal", "odd")


@event_type("Deed")
class Deed(msgspec.Struct, frozen=True):
    """Tells its handler what to do: (operation, key, number), then how to end."""

    ops: tuple[tuple[str, str, int], ...]
    then: str


@event_type("Seen")
class Seen(msgspec.Struct, frozen=True):
    """The value of a key."""

    value: str | None


deeds = st.builds(
    Deed,
    st.lists(st.tuples(st.sampled_from(OPS), st.sampled_from("abc"), st.integers(0, 9)), max_size=4).map(tuple),
    st.sampled_from(THEN[:3] * 4 + THEN[3:6] * 2 + THEN[6:]),
)
policies = st.builds(
    Retry,
    attempts=st.integers(1, 3),
    backoff_seconds=st.just(0.0),
    then=st.sampled_from([ErrorResponse.CONTINUE, ErrorResponse.DEAD_LETTER]),
)


def act(ctx: EventContext[Table[str, str]], deed: Deed) -> Any:
    for op, key, number in deed.ops:
        if op in ("put", "put and record", "large"):
            ctx.store.put(key, f"{ctx.offset}.{number}" * (LIMIT if op == "large" else 1))
            if op == "put and record":
                ctx.record_change(ctx._journal[-1])  # known already
        elif op == "delete":
            ctx.store.delete(key)
        elif op == "read":
            ctx.forward("out", Seen(ctx.store.get(key)), key=key)
        elif op == "cancel":
            ctx.cancel_timer(key)
        else:
            ctx.schedule_at(1_000 + number, Seen(key), name=key if op == "set" else None)
    if deed.then == "raise" or (deed.then == "raise once" and ctx.attempt == 1):
        raise ValueError(f"of {ctx.offset}, attempt {ctx.attempt}")
    if deed.then == "cancelled":
        raise asyncio.CancelledError
    if deed.then == "fail":
        return ctx.fail(KeyError("reason"))
    answers = {"complete": ExecutionState.COMPLETE, "fatal": ExecutionState.FATAL, "odd": "an answer"}
    return answers.get(deed.then)


class Observing(Table[str, str]):
    """A table that looks at each event first: it writes and sends, and some events fail at it, one of them for good."""

    def before_event(self, ctx: Any) -> None:
        self.put("observed", str(ctx.offset))
        ctx.forward("observed", Seen(str(ctx.attempt)), key="k")
        if ctx.offset == 5 or (ctx.offset % 4 == 3 and ctx.attempt == 1):
            raise KeyError(ctx.offset)


class World:
    """One worker; its host keeps what is admitted. ``way``: of the events into it."""

    is_full = False

    def __init__(self, way: str, policy: Retry, awaits: bool) -> None:
        self.way = way
        self.outputs: list[Output] = []
        self.changes: list[Change] = []
        self.events = 0
        self.measured: list[Any] = []
        self.contexts: list[Context[Any]] = []
        self.stopped = ""
        deed, seen = event_type_of(Deed), event_type_of(Seen)
        self.route = Route("Deed", deed, self._handle, blocking=False, policy=policy)
        self.route.plain = way == "hot path"
        self._awaits = awaits and not self.route.plain
        router = Router()
        router.add(self.route)
        router.add(Route("Seen", seen, self._handle, blocking=False, policy=policy))
        host: Any = SimpleNamespace(
            config=EventSourceConfig(group_id="g", topic="t", num_partitions=1),
            router=router,
            schedules=(),
            rng=random.Random(1),
            input=SimpleNamespace(handled=lambda *_: None),
            further_inputs=(),
            message_limit=LIMIT,
            now=lambda: 0.0,
            wall_ms=lambda: 5,
            fires_timers=False,
            cancellation=Cancellation(),
            measure=self.measured.append,
            exit_now=self._exit,
            pool=self,
        )
        self.table = Observing(TopicPartition("t", 0), HashEngine(), codec_for(str), codec_for(str))
        self.worker = PartitionWorker(host, 0, 1)
        self.worker.adopt(Replica(0, 1, self.table, 0.0))
        self.worker.state = self.worker.state.to(PartitionState.ACTIVE)
        self.worker.start_at(0)

    def _exit(self, text: str) -> NoReturn:
        raise AssertionError(text)

    def _handle(self, ctx: Any, deed: Deed) -> Any:
        self.contexts.append(ctx)
        return self._later(ctx, deed) if self._awaits and len(deed.ops) % 2 else act(ctx, deed)

    def _finish(self, deed: Deed, ctx: Any) -> Any:
        return self._handle(ctx, deed)

    async def _later(self, ctx: Any, deed: Deed) -> Any:
        await anyio.lowlevel.checkpoint()
        return act(ctx, deed)

    def admit(
        self, _: int, watermark: int, outputs: list[Output], changes: list[Change], __: Any = None, events: int = 1
    ) -> None:
        assert watermark == self.events + events, "one event after the other, each of them once"
        self.outputs += outputs
        self.changes += changes
        self.events += events

    def pump(self) -> None: ...

    async def handle(self, records: list[IncomingRecord]) -> World:
        worker = self.worker
        worker.inbox.add(records, 0)
        taken = worker.inbox.take()
        try:
            if self.way == "finalizers":
                for record in taken:
                    deed = self.route.decode(record.value, 1)
                    entry = Entry(1, record, self.route, deed, worker._buffer)
                    entry.settle(partial(self._finish, deed))
                    worker._buffer.entries.append(entry)
                await worker.settle_line()
            else:
                await worker.handle(taken)
        except EventFailure as failure:
            self.stopped = str(failure)
        return self

    def left(self) -> tuple[Any, ...]:
        """All that can be seen of it."""
        assert all(ctx._closed for ctx in self.contexts)
        assert self.table._journal is None, "the store is closed behind its events"
        changes = [(one.key, one.value, one.previous, one.origin) for one in self.changes]
        sent = [(one.topic, one.key, one.value, one.origin, one.origin_partition) for one in self.outputs]
        timers = self.worker.timers.contents()
        return (
            sent, changes, dict(self.table.items()), timers, self.worker.watermark, self.events, self.measured,
            self.stopped,
        )  # fmt: skip


def records(events: list[Deed]) -> list[IncomingRecord]:
    made = event_type_of(Deed)
    return [IncomingRecord("t", 0, at, b"k", made.encode(deed), made.headers) for at, deed in enumerate(events)]


async def compare(events: list[Deed], policy: Retry, awaits: bool) -> None:
    expected = (await World("hot path", policy, awaits).handle(records(events))).left()
    for way in ("execution", "finalizers"):
        assert (await World(way, policy, awaits).handle(records(events))).left() == expected, way


PUT = ("put", "a", 1)


@seeded
@example([Deed((PUT, PUT), "complete"), Deed((("put and record", "a", 1),), "complete")], Retry(attempts=1), True)
@given(st.lists(deeds, max_size=12), policies, st.booleans())
@settings(deadline=None)
def test_the_hot_path_is_a_unit_of_work(events: list[Deed], policy: Retry, awaits: bool) -> None:
    asyncio.run(compare(events, policy, awaits))


BROKEN: dict[str, tuple[str, Any]] = {
    "changes are not undone": ("_undo", lambda self, changes: None),
    "contexts stay open": ("fail", lambda self, ctx, error: (self.end(), self._undo(self.journal), error)[-1]),
    "outputs of failures are sent": ("begin_next", lambda self: len(self.journal)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_unit_that_differs_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The property can fail: it sees each of these."""
    attribute, broken = BROKEN[name]
    monkeypatch.setattr(Unit, attribute, broken)
    events = [Deed((PUT, ("read", "a", 0)), "complete"), Deed((PUT, ("read", "a", 0), ("read", "b", 0)), "raise")]
    events.append(Deed((("read", "a", 0),), "complete"))
    with pytest.raises(AssertionError):
        asyncio.run(compare(events, Retry(attempts=1, then=ErrorResponse.CONTINUE), awaits=False))
