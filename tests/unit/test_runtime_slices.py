"""What a slice hands over, which records it takes, how long it holds the loop, and the threads of blocking handlers.
That a slice is a unit of work for each event, whatever fails, is the property of ``tests/property/test_unit.py``."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from streams import EventContext, EventSourceConfig, ExecutionState, Table, event_type
from streams.codecs import JsonCodec
from streams.core.router import Route, Router
from streams.errors import EncodeError
from streams.events import event_type_of
from streams.outcomes import STOP
from streams.records import Change, Headers, IncomingRecord, Output, Record, TopicPartition
from streams.runtime.bridge import Worker
from streams.runtime.ownership.replica import Replica
from streams.runtime.partition import hot_path
from streams.runtime.partition.handler_threads import HandlerThreads
from streams.runtime.partition.hot_path import LONGEST_SLICE_SECONDS, SLICE
from streams.runtime.partition.worker import PartitionWorker
from tests.unit.waiting import PATIENCE


@event_type("Step")
class Step(msgspec.Struct, frozen=True):
    """``writes`` and ``sends`` so many records, takes so many seconds of the loop, then does as it is told."""

    writes: int = 1
    sends: int = 1
    then: str = ""
    takes: float = 0.0


@event_type("Other")
class Other(msgspec.Struct, frozen=True):
    """Handled by somebody else."""

    number: Any = 0
    text: str | None = None


async def later() -> None:
    """What an async handler does."""


STEP, OTHER = event_type_of(Step), event_type_of(Other)


class Slice:
    """A partition's worker and these events: its host keeps what is admitted, its clock goes on in handlers alone."""

    is_full = False

    def __init__(self, *events: Step, headers: Headers | None = None) -> None:
        self.now = 100.0
        self.slices: list[int] = []
        self.others: list[Any] = []
        self.timed: list[Any] = []
        self.admitted: list[tuple[int, list[Output], list[Change], int]] = []
        self.contexts: list[EventContext[Any]] = []
        router = Router()
        router.add(Route("Step", STEP, self._handle, blocking=False, policy=STOP))
        others = Route("Other", OTHER, lambda ctx, event: self.others.append(event), blocking=False, policy=STOP)
        router.add(others)
        host: Any = SimpleNamespace(
            config=EventSourceConfig(group_id="g", topic="t", num_partitions=1),
            router=router,
            schedules=(),
            rng=random.Random(1),
            input=SimpleNamespace(handled=lambda *_: None, pause=lambda _: None, resume=lambda _: None),
            further_inputs=(),
            message_limit=100,
            now=lambda: self.now,
            measure=self.timed.append,
            pool=self,
        )
        self.worker = PartitionWorker(host, 0, 1)
        self.table = Table.factory(key=str, value=str)(TopicPartition("t", 0))
        self.worker.adopt(Replica(0, 1, self.table, 0.0))
        self.records = [
            IncomingRecord("t", 0, 10 + number, None, STEP.encode(event), headers or STEP.headers)
            for number, event in enumerate(events)
        ]

    def run(self) -> tuple[int, BaseException | None]:
        return self.worker.hot_path.run(self.records, 0)

    async def handle(self, *seconds: float) -> list[int]:
        """The sizes of the slices in which events that take so long are handled."""
        self.slices, before = [], len(self.contexts)
        steps = [STEP.encode(Step(0, 0, takes=takes)) for takes in seconds]
        records = [IncomingRecord("t", 0, before + number, None, s, STEP.headers) for number, s in enumerate(steps)]
        self.worker.inbox.add(records, 0)
        await self.worker.handle(self.worker.inbox.take())
        assert [ctx.offset for ctx in self.contexts[before:]] == [record.offset for record in records]
        return self.slices

    def admit(
        self, partition: int, offset: int, outputs: list[Output], changes: list[Change], _: Any = None, events: int = 1
    ) -> None:
        """Called once per slice."""
        self.admitted.append((offset, outputs, changes, events))
        self.slices.append(events)

    def _handle(self, ctx: EventContext[Any], event: Step) -> Any:
        self.contexts.append(ctx)
        self.now += event.takes
        for number in range(event.writes):
            ctx.store.put(f"k{number}", f"{ctx.offset}")
        for number in range(event.sends):
            ctx.forward(Record("out", b"%d.%d" % (ctx.offset, number)))
        if event.then == "interrupt":
            raise KeyboardInterrupt
        if event.then == "fail":
            raise ValueError(event.then)
        if event.then == "wait":
            return later()
        return ExecutionState.COMPLETE

    def on_step(self, handler: Any) -> None:
        self.worker.engine.router.routes[b"Step"].handler = handler

    def becomes_other(self, number: int) -> None:
        """Make this record one of the other type."""
        self.records[number].headers = OTHER.headers
        self.records[number].value = OTHER.encode(Other(number))


async def test_a_slice_is_admitted_once() -> None:
    done = Slice(Step(), Step(writes=0, sends=2), Step(writes=2, sends=0), Step(writes=0, sends=0))
    assert done.run() == (4, None)
    assert [(offset, events) for offset, _, _, events in done.admitted] == [(14, 4)]
    assert done.worker.watermark == 14


@pytest.mark.parametrize(
    ("events", "ends_at", "admitted", "is_timed"),
    [
        ([Step(), Step(), Step()], 3, [(11, 1), (13, 2)], True),
        ([Step()], 1, [(11, 1)], True),
        ([Step(), Step(then="fail"), Step()], 1, [(11, 1)], True),
        ([Step(then="fail"), Step()], 0, [], False),
        ([Step(then="wait"), Step()], 0, [], False),
    ],
    ids=["all", "one", "the second fails", "the first fails", "the first is async"],
)
async def test_a_sample_is_the_first_event_of_its_slice(
    monkeypatch: pytest.MonkeyPatch,
    events: list[Step],
    ends_at: int,
    admitted: list[tuple[int, int]],
    is_timed: bool,
) -> None:
    """It is timed alone; how the slice ends, and what it leaves, is as without."""
    found = []
    for sampled in (1, 1_000_000):
        monkeypatch.setattr(hot_path, "SAMPLED", sampled)
        done = Slice(*events)
        position, failure = done.run()
        outputs = [(output.origin, output.value) for _, sent, _, _ in done.admitted for output in sent]
        changes = [(change.origin, change.key, change.value) for _, _, made, _ in done.admitted for change in made]
        rest = [(ctx.offset, ctx.attempt) for ctx in done.contexts], dict(done.table.items()), done.worker.watermark
        found.append((position, repr(failure), outputs, changes, rest))
        if sampled == 1:
            assert [(offset, count) for offset, _, _, count in done.admitted] == admitted
            assert [(one.type, one.seconds) for one in done.timed] == [("Step", 0.0)] * is_timed
    assert found[0] == found[1]
    assert found[0][0] == ends_at


async def test_what_ends_the_process_finds_a_slice_in_order() -> None:
    done = Slice(Step(), Step(writes=2, sends=2, then="interrupt"), Step())
    with pytest.raises(KeyboardInterrupt):
        done.run()
    ((offset, outputs, changes, events),) = done.admitted
    assert (offset, events, [output.value for output in outputs], len(changes)) == (11, 1, [b"10.0"], 1)
    assert dict(done.table.items()) == {"k0": "10"}


async def test_record_change_knows_the_changes_of_its_own_event_only() -> None:
    """A change that an earlier event of the slice has journalled is another event's."""
    done = Slice(Step(sends=0), Step(sends=0))
    known: list[Change] = []
    handle = done._handle

    def handle_and_record(ctx: EventContext[Any], event: Step) -> Any:
        answer = handle(ctx, event)
        own = ctx._journal[-1]
        ctx.record_change(own, *known)
        known.append(own)
        return answer

    done.on_step(handle_and_record)
    assert done.run() == (2, None)
    assert [change.value for _, _, changes, _ in done.admitted for change in changes] == [b"10", b"11", b"10"]


async def test_other_headers_and_null_values_need_patience() -> None:
    many: Headers = [("trace", b"1"), *STEP.headers, ("__grt__", b"another")]
    done = Slice(Step(), headers=many)
    assert done.run() == (1, None), "the first type header counts"
    others: list[Headers] = [
        [("trace", b"1")],
        [("__grt__", None)],
        [*STEP.headers, ("__grv__", None)],
    ]
    for headers in others:
        assert Slice(Step(), headers=headers).run() == (0, None)
    mixed = Slice(*[Step()] * 3)
    mixed.records[2].headers = others[0]
    assert mixed.run() == (2, None), "of each record its own headers count"
    assert Slice(*[Step()] * 3, headers=many).run() == (3, None)
    null = Slice(Step())
    null.records[0].value = None
    null.worker.engine.router.routes[b"Step"].bare_decode = lambda value: Step()  # as codecs that take anything
    assert null.run() == (0, None)


async def test_types_may_change_from_record_to_record() -> None:
    done = Slice(*[Step()] * 5)
    for number in (1, 3, 4):
        done.becomes_other(number)
    assert done.run() == (5, None)
    assert done.others == [Other(1), Other(3), Other(4)]
    assert [ctx.offset for ctx in done.contexts] == [10, 12]


async def test_what_a_handler_does_to_the_headers_of_its_record_is_nothing_to_the_next() -> None:
    done = Slice(Step(), Step())
    done.records[0].headers = [*STEP.headers]
    done.becomes_other(1)

    def handle(ctx: EventContext[Any], event: Step) -> None:
        assert ctx.input is not None
        ctx.input.headers[:] = OTHER.headers

    done.on_step(handle)
    assert done.run() == (2, None)
    assert done.others == [Other(1)]


async def test_what_cannot_be_sent_is_refused_in_the_words_of_the_codec_which_is_asked_once() -> None:
    asked: list[object] = []

    class Picky:
        def encode(self, value: object, /) -> bytes:
            asked.append(value)
            raise EncodeError("not today")

        decode = Step

    @event_type("Picked", codec=Picky())
    class Picked:
        pass

    @event_type("Mistaken", codec=JsonCodec(Other))
    class Mistaken(msgspec.Struct):
        pass

    done, refused = Slice(Step()), []

    def handle(ctx: EventContext[Any], _: Step) -> None:
        ctx.forward("out", Other(float("1.5")))
        for event in (Other(float("nan")), Other("\ud800"), Picked(), Mistaken()):
            with pytest.raises(EncodeError) as caught:
                ctx.forward("out", event)
            refused.append(str(caught.value))

    done.on_step(handle)
    assert done.run() == (1, None)
    assert refused[0] == "Other holds nan, which JSON cannot carry; use None, or MsgpackCodec"
    assert refused[1].startswith("Other cannot be encoded: ")
    assert refused[2:] == ["not today", "Other expected, got Mistaken (subclasses lose what they add)"]
    assert len(asked) == 1
    assert [output.value for output in done.admitted[0][1]] == [b'{"number":1.5,"text":null}']


# -- how long it is ----------------------------------------------------------------------------------------------------


async def test_slices_of_quick_handlers_grow() -> None:
    slices = await Slice().handle(*[0.0] * 1_000)
    assert slices[0] < SLICE, "nobody knows yet what the handlers take"
    assert SLICE in slices
    assert slices == sorted(slices[:-1]) + slices[-1:]
    assert len(slices) < 15


@pytest.mark.parametrize("takes", [0.02, 0.05, 1.0])
async def test_slices_of_slow_handlers_shrink_to_one_event(takes: float) -> None:
    """Commits and other partitions wait for one of them, not for a hundred."""
    bench = Slice()
    await bench.handle(*[0.0] * 1_000)
    slices = await bench.handle(*[takes] * 400)
    assert max(slices) == SLICE, "the first one comes unexpected"
    assert slices[8:] == [1] * len(slices[8:])
    assert await bench.handle(*[takes] * 5) == [1] * 5, "it is remembered from batch to batch"


async def test_slices_take_about_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handlers of a fifth of the longest slice: neither one by one nor by the hundred."""
    monkeypatch.setattr(hot_path, "SAMPLED", 1_000_000)  # the first event of a sample is admitted by itself
    bench = Slice()
    slices = await bench.handle(*[LONGEST_SLICE_SECONDS / 5] * 600)
    settled = slices[5:-1]
    assert min(settled) >= 2
    assert max(settled) <= 10, "not more than twice as long"
    assert max(await bench.handle(*[0.0] * 1_000)) == SLICE, "and they grow again"


@pytest.fixture
def threads() -> Iterator[HandlerThreads]:
    made = HandlerThreads(Worker)
    yield made
    made.close()


async def test_one_thread_for_each_partition(threads: HandlerThreads) -> None:
    first = await threads.call(0, threading.get_ident)
    assert await threads.call(0, threading.get_ident) == first
    assert await threads.call(1, threading.get_ident) not in (first, threading.get_ident())


async def test_a_call_that_fails_keeps_its_thread(threads: HandlerThreads) -> None:
    first = await threads.call(0, threading.get_ident)
    with pytest.raises(ZeroDivisionError):
        await threads.call(0, lambda: 1 // 0)
    assert await threads.call(0, threading.get_ident) == first


async def test_a_cancelled_call_leaves_the_threads_of_others_alone(threads: HandlerThreads) -> None:
    begun, go = threading.Event(), threading.Event()
    other = await threads.call(1, threading.get_ident)
    call = asyncio.create_task(threads.call(0, lambda: (begun.set(), go.wait(PATIENCE))))
    assert await asyncio.to_thread(begun.wait, PATIENCE)
    call.cancel()
    await asyncio.wait([call])
    assert await threads.call(1, threading.get_ident) == other
    go.set()
