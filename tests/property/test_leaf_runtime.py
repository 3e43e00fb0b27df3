"""``EventContext.forward`` and slices of plain handlers, compiled and in plain Python: the same records, changes,
answers and errors, also with objects that have lost a field."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from streams import event_type
from streams.errors import RecordRefused
from streams.events import event_type_of
from streams.outcomes import ExecutionState
from streams.records import TYPE_HEADER, Change, IncomingRecord, Output, Record, TopicPartition
from streams.runtime.async_work.concurrent_stage import ConcurrentContext
from streams.runtime.partition import forwarding, plain_slice
from streams.runtime.partition.event_context import EventContext
from streams.sak.compiling import fields_of
from streams.sak.leaves import source_of
from tests.property.leaves_kit import needs_compiled, outcome, plain

pytestmark = needs_compiled
PLAIN_FORWARDING, PLAIN_SLICE = plain(forwarding), plain(plain_slice)
WHERE = TopicPartition("in", 3)


@event_type("leaf_sum")
class Sum(msgspec.Struct):
    number: int
    rate: float = 0.0
    note: str | None = None


RECORD = IncomingRecord("in", 3, 40, b"k", b'{"number":1}', ((TYPE_HEADER, b"leaf_sum"),), 1_000)
weird = st.sampled_from([None, 7, 1.5, "text", "\ud800", b"bytes", [], {}, object, Sum(1)])
events = st.one_of(
    st.builds(Sum, st.integers(0, 9), st.floats(), st.one_of(st.none(), st.just("null"))),
    st.sampled_from([Sum("x" * 200), Sum(1 << 80), Sum(object())]),  # type: ignore[arg-type]
    weird,
)
RECORDS: list[Any] = [
    Record("t", b"v"),
    Record("t", b"x" * 101),
    Record("t", bytearray(b"v"), memoryview(b"k")),
    Record("t", "text", 7),  # type: ignore[arg-type]
]
named = st.fixed_dictionaries(
    {},
    optional={
        "key": st.one_of(st.text(max_size=2), st.binary(max_size=2), weird),
        "headers": st.sampled_from([(), [("h", b"v")], None, 7, [7]]),
        "partition": st.sampled_from([-1, 0, None, "two"]),
        "timestamp_ms": st.sampled_from([0, 5, None]),
        "unknown": st.just(1),
    },
)


def context(record: Any = RECORD, lost: str | None = None, *, closed: bool = False) -> EventContext[Any]:
    made: EventContext[Any] = EventContext(None, WHERE, record, [], [], 100)
    made._closed = closed
    if lost is not None:
        delattr(made, lost)
    return made


def forwarded(module: Any, made: EventContext[Any], topic: Any, given: tuple[Any, ...], how: dict[str, Any]) -> Any:
    found = outcome(lambda: module.forward(made, topic, *given, **how))
    # Errors name the nearest caller outside of the package, which the plain copy is itself.
    return re.sub(r" at \S+\.py:\d+", "", repr((found, getattr(made, "_outputs", None))))


def similar(one: str, other: str) -> bool:
    """Alike but for the wording of wrong calls: a ``TypeError`` in both."""
    return one == other or (one.startswith("((<class 'TypeError'>") and other.startswith("((<class 'TypeError'>"))


@given(st.sampled_from(["t", "t", "t", None, 7, *RECORDS]), events, named, st.booleans())
@example("t", Sum(1), {"key": "k"}, False)
@example("t", Sum(1, float("nan")), {}, False)
@example("t", None, {}, False)
def test_events_are_forwarded_alike(topic: Any, sent: Any, how: dict[str, Any], closed: bool) -> None:
    ours, theirs = (
        forwarded(module, context(closed=closed), topic, (sent,), how) for module in (forwarding, PLAIN_FORWARDING)
    )
    assert similar(ours, theirs), (ours, theirs)


@pytest.mark.parametrize("record", [RECORD, None])
@pytest.mark.parametrize("lost", fields_of(EventContext))
def test_a_context_that_has_lost_a_field_forwards_alike(record: Any, lost: str) -> None:
    for topic, sent in (("t", (Sum(1),)), (Record("t", b"v"), ()), ("t", (Sum("x" * 200),))):  # type: ignore[arg-type]
        ours, theirs = (
            forwarded(module, context(record, lost), topic, sent, {}) for module in (forwarding, PLAIN_FORWARDING)
        )
        assert ours == theirs


def test_buffers_and_text_of_a_record_are_bytes_of_its_own() -> None:
    """The handler may fill its buffer again for the next record."""
    made, buffer, wide = context(), bytearray(b"one"), memoryview(b"view" * 26).cast("I")
    forwarding.forward(made, Record("t", memoryview(buffer), buffer))
    buffer[:] = b"two"
    forwarding.forward(made, Record("t", "größe", buffer))  # type: ignore[arg-type]
    assert [(sent.key, sent.value) for sent in made._outputs] == [(b"one", b"one"), (b"two", "größe".encode())]
    assert {type(part) for sent in made._outputs for part in (sent.key, sent.value)} == {bytes}
    with pytest.raises(RecordRefused, match="a record of 104 bytes"):
        forwarding.forward(made, Record("t", wide))  # type: ignore[arg-type]


@pytest.mark.parametrize("lost", fields_of(IncomingRecord))
def test_a_record_that_has_lost_a_field_forwards_alike(lost: str) -> None:
    record = IncomingRecord("in", 3, 40, b"k", b"v", None)
    delattr(record, lost)
    ours, theirs = (forwarded(module, context(record), "t", (Sum(1),), {}) for module in (forwarding, PLAIN_FORWARDING))
    assert ours == theirs


@pytest.mark.parametrize("foreign", [None, 7, object(), RECORD], ids=["none", "number", "object", "record"])
def test_what_is_no_context_is_refused(foreign: Any) -> None:
    with pytest.raises((TypeError, AttributeError)):
        forwarding.forward(foreign, "t", Sum(1))


def test_no_leaf_reads_a_field_that_a_subclass_has_a_property_in_front_of() -> None:
    """It would not see the property: the store of a handler that runs ahead of its turn."""
    hidden = {name for name in fields_of(EventContext) if isinstance(vars(ConcurrentContext).get(name), property)}
    assert hidden == {"store"}
    for module in (forwarding, plain_slice):
        assert not re.search(r"\b(self|ctx)\.store\b", source_of(module.__name__).read_text())


# ------------------------------------------------------------------------------------------------- slices

DEEDS = (
    "send",
    "change",
    "foreign change",
    "lost change",
    "large",
    "fail",
    "answer",
    "complete",
    "lose",
    "timer",
    "read",
)


NO_CHANGE = "'object' object has no attribute 'value'"
"""The one error that is another in compiled code: of a change that is no ``Change``."""


class Store:
    """A journalled store that shows its calls."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls
        self.journal: list[Change] | None = None

    def begin(self, journal: list[Change]) -> None:
        self.calls.append("begin")
        self.journal = journal

    def end(self) -> None:
        self.calls.append("end")

    def undo(self, journal: list[Change]) -> None:
        self.calls.append(("undo", len(journal)))


def handled(store: Store, ctx: Any, given: Sum) -> Any:
    deed = DEEDS[given.number % len(DEEDS)]
    store.calls.append((deed, ctx.offset, ctx.attempt, ctx._first))
    assert store.journal is not None
    if deed == "send":
        ctx.forward("out", given, key="k")
    elif deed == "change":
        store.journal.append(Change(b"k", b"v"))
    elif deed == "foreign change":
        store.journal.append(object())  # type: ignore[arg-type]
    elif deed == "lost change":
        store.journal.append(Change(b"k", b"v"))
        del store.journal[-1].value
    elif deed == "large":
        store.journal.append(Change(b"k", b"v" * 200))
    elif deed == "fail":
        raise ValueError("no")
    elif deed == "lose":
        for name in ("_outputs", "_closed", "_timer_changes", "_error", "input"):
            delattr(ctx, name)
    elif deed == "timer":
        ctx._timer_changes = {"name": None}
    return {"answer": 7, "complete": ExecutionState.COMPLETE}.get(deed)


def ran(
    module: Any,
    records: list[Any],
    start: int,
    stop: int,
    journalled: bool,
    observed: bool = False,
    parked: Sequence[int] = (),
) -> Any:
    calls: list[Any] = []
    store = Store(calls)
    decode = event_type_of(Sum).bare_decode
    route = SimpleNamespace(
        plain=True,
        handled=0,
        wire_version=None,
        bare_decode=decode,
        handler=lambda ctx, one: handled(store, ctx, one),
    )
    store.journal = []

    def observe(ctx: Any) -> None:
        calls.append(("observed", ctx.offset))
        if ctx.offset == 43:
            ctx.forward("out", Sum(2), key="k")
        if ctx.offset == 44:
            raise ValueError("not this one")

    partition = SimpleNamespace(
        store=store,
        is_journalled=journalled,
        before_event=observe if journalled and observed else None,
        timers=SimpleNamespace(admitted=lambda changes, offset: [Change(b"timer", b"%d" % offset)], now_ms=lambda: 1),
        seen=SimpleNamespace(rows=SimpleNamespace(has=lambda digest: digest == b"7"), room=4),
        reading=WHERE,
        failures=SimpleNamespace(events={}),
        partition=3,
        watermark=-1,
    )

    def keep(_: Any, record: Any, limit: int) -> Change | None:
        calls.append(("keep", record.offset, limit))
        number = json.loads(record.value)["number"]
        return Change(b"row", record.value, origin=record.offset) if number else None

    kinds = {b"row": SimpleNamespace(keep=keep), b"list": SimpleNamespace(keep=None), b"ahead": None}
    others = {
        name: SimpleNamespace(plain=False, handled=0, wire_version=None, kind=kind, is_plain_once=False)
        for name, kind in kinds.items()
    }
    ids = SimpleNamespace(
        within_s=60,
        id_of=lambda record, event: event.number,
        digest_of=lambda id: b"%d" % id,
        keep=lambda change, reply: 1,
        recorded=lambda partition, new, value: [Change(b"new", b"%d" % partition.watermark), *new.values()],
        count=lambda partition, host, route, passed, missing: calls.append((len(passed), len(missing))),
    )
    others[b"once"] = SimpleNamespace(
        plain=False,
        handled=0,
        is_plain_once=True,
        wire_version=None,
        kind=None,
        once=ids,
        bare_decode=decode,
        handler=route.handler,
    )
    host = SimpleNamespace(
        router=SimpleNamespace(routes={b"leaf_sum": route, **others}, tracer=None),
        message_limit=100,
        pool=SimpleNamespace(admit=lambda *given, events: calls.append((*given, events))),
    )

    def queue(record: Any) -> list[Change] | None:
        calls.append(("queue", record.offset))
        return None if record.value == b'{"number":0}' else [Change(b"queue", None), Change(b"piece", record.value)]

    given = partition, host, records, start, stop, None, (), parked, queue
    ended = outcome(module.run, *given)
    counts = {name.decode(): one.handled for name, one in host.router.routes.items() if one.handled}
    found = repr((ended, calls, partition.watermark, route.plain, counts))
    return found.replace("TypeError('Cannot convert object to Change')", repr(AttributeError(NO_CHANGE)))


KEPT = ("row", "unreadable row", "list", "ahead", "once")
"""Kinds of records whose handlers are not plain; rows have their turn among those that are."""


def record_of(offset: int, number: int, kind: str) -> IncomingRecord:
    headers: Any = {"other": ((TYPE_HEADER, b"other"),), "none": None, "two": (("x", b"y"), *RECORD.headers)}.get(  # type: ignore[misc]
        kind, RECORD.headers
    )
    if kind in KEPT:
        headers = ((TYPE_HEADER, kind.split()[-1].encode()),)
    value = {"null": None, "rubbish": b"{", "unreadable row": b"{"}.get(kind, b'{"number":%d}' % number)
    made = IncomingRecord("in", 3, offset, b"k", value, headers)
    if kind.startswith("lost "):
        delattr(made, kind.removeprefix("lost "))
    return made


kinds = st.sampled_from(
    ["plain"] * 12
    + ["row"] * 3
    + ["parked", "once"] * 3
    + [*KEPT, "other", "none", "two", "null", "rubbish", "lost value", "lost headers", "lost offset"]
)
numbers = st.integers(0, len(DEEDS) - 1)


@given(st.lists(st.tuples(numbers, kinds), max_size=8), st.booleans(), st.booleans(), st.integers(0, 2))
@example([(number, "plain") for number in (0, 1, 7, 9, 10)], True, False, 0)
@example([(0, "plain")] * 6, True, True, 0)
@example([(1, "plain"), (1, "row"), (0, "row"), (1, "row"), (4, "plain"), (5, "plain")], True, False, 0)
@example([(1, "row"), (1, "unreadable row")], False, False, 0)
@example([(1, "parked"), (1, "plain"), (1, "parked"), (2, "parked"), (5, "plain")], True, False, 0)
@example([(1, "plain"), (1, "parked"), (0, "parked"), (1, "plain")], True, False, 0)
@example([(1, "once"), (1, "once"), (0, "plain"), (7, "once"), (9, "once"), (5, "once")], True, False, 0)
def test_slices_run_alike(made: list[tuple[int, str]], journalled: bool, observed: bool, start: int) -> None:
    start = min(start, len(made))
    records = [record_of(40 + at, *one) for at, one in enumerate(made)]
    parked = [at for at, (_, kind) in enumerate(made) if kind == "parked" and at >= start]
    ours, theirs = (
        ran(module, records, start, len(made), journalled, observed, parked) for module in (plain_slice, PLAIN_SLICE)
    )
    assert ours == theirs


@pytest.mark.parametrize("number", range(len(DEEDS)), ids=DEEDS)
def test_each_deed_ends_alike(number: int) -> None:
    ours, theirs = (
        ran(module, [record_of(40 + at, one, "plain") for at, one in enumerate((0, number, 1))], 0, 3, True)
        for module in (plain_slice, PLAIN_SLICE)
    )
    assert ours == theirs


@pytest.mark.parametrize("last", ["plain", "once", "rubbish", "two"])
def test_events_are_counted_where_their_handlers_complete(last: str) -> None:
    """Neither those that are queued behind a parked key, nor duplicates, nor the one that fails or is left."""
    made = [(1, "plain"), (1, "parked"), (1, "row"), (1, "once"), (1, "parked"), (1, "once"), (0, "plain"), (5, last)]
    found = ran(plain_slice, [record_of(40 + at, *one) for at, one in enumerate(made)], 0, 8, True, False, (1, 4))
    assert found.endswith("{'leaf_sum': 2, 'row': 1, 'once': 1})"), found


def test_outputs_of_a_slice_are_records() -> None:
    found = ran(plain_slice, [record_of(40, 0, "plain")], 0, 1, True)
    assert (
        repr(Output("out", b'{"number":0,"rate":0.0,"note":null}', b"k", event_type_of(Sum).headers, -1, 0, 3, 40))
        in found
    )
