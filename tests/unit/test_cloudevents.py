"""CloudEvents: both modes in and out, what other programs write, ids that stay when an event is handled again."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from datetime import datetime
from typing import Any

import msgspec
import pytest

from streams import (
    DEAD_LETTER,
    PARK,
    AsyncJobScheduler,
    EventSource,
    EventSourceConfig,
    Record,
    Retry,
    event_type,
    upcaster,
)
from streams.errors import ConfigError
from streams.formats import CloudEvent, CloudEvents, Deleted
from streams.formats.cloudevents import attributes_of
from streams.records import IncomingRecord, TypedRecord
from streams.settings import SchedulerConfig
from streams.stores.table import Table
from streams.testing import TestDriver
from streams.testing.simulation.virtual_time import elapse
from tests.unit.handlers_kit import OUT


@event_type("order.placed", version=2)
class CloudOrder(msgspec.Struct, frozen=True):
    order: str
    cents: int


@upcaster(CloudOrder, from_version=1)
def with_cents(old: dict[str, Any]) -> dict[str, Any]:
    return {"cents": 0, **old}


RULE = CloudEvents(nulls=Deleted)
JSON_MODE = ("content-type", b"application/cloudevents+json")
NEEDED = {"id": "a-1", "source": "/shop", "type": "order.placed", "specversion": "1.0"}
BINARY = [(f"ce_{name}", text.encode()) for name, text in NEEDED.items()]
# As cloudevents 2.2.0 (PyPI) writes them by ``bindings.kafka.to_binary`` and ``to_structured``.
SDK_BINARY = [
    ("ce_id", b"a-1"), ("ce_source", b"/shop/\xc3\xa9"), ("ce_type", b"order.placed"), ("ce_specversion", b"1.0"),
    ("content-type", b"application/json"), ("ce_time", b"2026-11-30T00:00:00Z"), ("ce_subject", b"o1"),
    ("ce_partitionkey", b"k1"),
]  # fmt: skip
SDK_VALUE = b'{"order": "o1", "cents": 500}'
SDK_STRUCTURED = (
    b'{"id": "a-1", "source": "/shop/\\u00e9", "type": "order.placed", "specversion": "1.0", "datacontenttype": '
    b'"application/json", "time": "2026-11-30T00:00:00Z", "subject": "o1", "partitionkey": "k1", "data": {"order": '
    b'"o1", "cents": 500}}'
)
SDK_EVENT = CloudEvent(
    "a-1",
    "/shop/é",
    "1.0",
    "order.placed",
    "application/json",
    "",
    "o1",
    "2026-11-30T00:00:00Z",
    {"partitionkey": "k1"},
)


def record(value: bytes | None, *headers: tuple[str, bytes | None]) -> IncomingRecord:
    return IncomingRecord("orders", 0, 0, b"k", value, headers or None)


def structured(**changes: Any) -> IncomingRecord:
    whole = {name: value for name, value in {**NEEDED, **changes}.items() if value is not ...}
    return record(msgspec.json.encode(whole), JSON_MODE)


def refused(came: IncomingRecord) -> str:
    typed = RULE.typed(came)
    assert isinstance(typed, TypedRecord)
    assert attributes_of(typed) is None or not typed.is_refused
    return typed.reason if typed.is_refused else ""


@pytest.mark.parametrize(
    "came", [record(SDK_VALUE, *SDK_BINARY), record(SDK_STRUCTURED, JSON_MODE)], ids=["binary", "json"]
)
def test_what_the_sdk_writes_is_read(came: IncomingRecord) -> None:
    typed = RULE.typed(came)
    assert typed.record_type == "order.placed"
    assert msgspec.json.decode(typed.value or b"") == {"order": "o1", "cents": 500}
    assert attributes_of(typed) == SDK_EVENT
    assert typed.as_received is came


@pytest.mark.parametrize(
    ("changes", "value"),
    [
        ({"data": {"a": 1}}, b'{"a":1}'),
        ({"data": "text"}, b'"text"'),  # no content type: JSON
        ({"data": "text", "datacontenttype": "application/vnd.x+json"}, b'"text"'),
        ({"data": "text", "datacontenttype": "text/plain"}, b"text"),
        ({"data": {"a": 1}, "datacontenttype": "text/plain"}, b'{"a":1}'),
        ({"data_base64": "AAE=", "datacontenttype": "application/octet-stream"}, b"\0\1"),
        ({"data_base64": None, "data": 1}, b"1"),
        ({"data": None}, None),
        ({}, None),
    ],
)
def test_the_payload_of_a_structured_event(changes: dict[str, Any], value: bytes | None) -> None:
    assert RULE.typed(structured(**changes)).value == value


@pytest.mark.parametrize(
    ("came", "said"),
    [
        (record(b"{}", *BINARY[1:]), "lacks the attribute 'id'"),
        (record(b"{}", *BINARY[:3]), "lacks the attribute 'specversion'"),
        (record(b"{}", *BINARY[:3], ("ce_specversion", None)), "lacks the attribute 'specversion'"),
        (record(b"{}", *BINARY[:3], ("ce_specversion", b"0.3")), "specversion '0.3'"),
        (record(b"{}", *BINARY[:3], ("ce_specversion", b"1.x")), "specversion '1.x'"),
        (record(b"{}", ("ce_TYPE", b"order.placed"), BINARY[0], BINARY[1], BINARY[3]), "lacks the attribute 'type'"),
        (record(b"{}", *BINARY, ("ce_Bad-Name", b"1")), "'Bad-Name' is no name"),
        (record(b"{}", *BINARY, BINARY[0]), "'id' of the CloudEvent is there twice"),
        (record(b"{}", *BINARY, ("ce_subject", b"\xff")), "'subject' of the CloudEvent is no UTF-8"),
        (record(b"{}", *BINARY, ("content-type", b"a/b"), ("Content-Type", b"c/d")), "one content type"),
        (record(b"{}", *BINARY, JSON_MODE), "in two modes"),
        (record(b"[]", ("content-type", b"application/cloudevents-batch+json")), "cloudevents-batch"),
        (record(b"", ("content-type", b"application/cloudevents+avro")), "cloudevents+avro"),
        (record(None, JSON_MODE, ("x", b"")), ""),  # a tombstone
        (record(b"[]", JSON_MODE), "no JSON object"),
        (record(b'{"id":', JSON_MODE), "no JSON object"),
        (structured(id=...), "lacks the attribute 'id'"),
        (structured(type=""), "lacks the attribute 'type'"),
        (structured(subject={"a": 1}), "'subject' of the CloudEvent is no text"),
        (structured(data=1, data_base64="AAE="), "both 'data' and 'data_base64'"),
        (structured(data_base64="?"), "no base64"),
    ],
)
def test_what_is_no_cloudevent_is_named(came: IncomingRecord, said: str) -> None:
    assert said in refused(came)
    assert bool(said) == bool(refused(came))


def test_eight_megabytes_of_attributes() -> None:
    came = record(b"{}", *BINARY, ("ce_note", b"x" * 8_000_000))
    assert RULE.typed(came).record_type == "order.placed"


def test_foreign_bytes_are_an_event_a_refusal_or_none_and_nothing_else() -> None:
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    for _ in range(5_000):
        value = bytearray(SDK_STRUCTURED)
        for _ in range(rng.randint(1, 6)):
            value[rng.randrange(len(value))] = rng.choice(b'"{}[]:,\\0e\xff\xc3 tn')
        try:
            typed = RULE.typed(record(bytes(value), JSON_MODE))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {bytes(value)!r}") from error
        assert typed.as_received.value == bytes(value)


def source_of(form: CloudEvents, got: list[Any], types: CloudEvents = RULE, **settings: Any) -> EventSource[Any]:
    settings = {"decode_policy": DEAD_LETTER, **settings}
    source = EventSource(EventSourceConfig(group_id="shop", topic="orders", num_partitions=1, **settings), types=types)
    source.output(OUT, form=form)
    source.output("plain")

    @source.on
    def ordered(ctx: Any, event: CloudOrder) -> None:
        got.append((event, ctx.cloudevent))
        ctx.forward("plain", event, key=event.order)
        ctx.forward(OUT, event, key=event.order, headers=[("x", b"1")])
        ctx.forward(OUT, event, key=event.order)
        ctx.forward(Record(OUT, b"ready", b"k"))

    source.register_event_type(Deleted, lambda ctx, event: got.append(event))
    return source


@pytest.mark.parametrize("is_structured", [False, True])
def test_what_is_written_is_read_again_and_has_none_of_our_headers(is_structured: bool) -> None:
    got: list[Any] = []
    form = CloudEvents(source="/bank", structured=is_structured)
    with TestDriver(source_of(form, got)) as driver:
        driver.send_record(Record("orders", SDK_VALUE, b"k", SDK_BINARY))
        driver.send_record(Record("orders", None, b"k"))
        driver.check()
        first, second, ready = driver.outputs(OUT)
        assert driver.outputs("plain", CloudOrder) == [CloudOrder("o1", 500)]
        assert (ready.value, ready.headers) == (b"ready", None)
        assert [name for name, _ in first.headers or () if name.startswith("__")] == []
        assert first.header("x") == b"1"
        written = [attributes_of(each) for each in (first, second)]
        assert [event and event.id for event in written] == ["orders/0/0/1", "orders/0/0/2"]
        assert written[0] is not None
        assert (written[0].source, written[0].type) == ("/bank", "order.placed")
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", written[0].time)
        assert form.typed(first).value == b'{"order":"o1","cents":500}'
    # A foreign event has no version of ours, so it is of version 1; ours says its own.
    assert got == [(CloudOrder("o1", 500), SDK_EVENT), Deleted(b"k")]
    assert form.typed(first).header("__grv__") == b"2"


@pytest.mark.parametrize("kind", [{}, {"blocking": True}, {"concurrency": 4}], ids=["plain", "blocking", "concurrent"])
def test_an_event_that_is_handled_again_has_the_same_ids(kind: dict[str, Any]) -> None:
    """After a failure, after a crash before the commit, and once a metric is added."""
    policy = Retry(attempts=3, backoff_seconds=0.01)
    config = EventSourceConfig(group_id="g", topic="orders", num_partitions=1, error_policy=policy)
    source, calls = EventSource(config, Table.factory(key=str, value=int)), list[int]()
    source.output(OUT, form=CloudEvents(source="/bank"))
    source.metric("tries", "counter")

    def work(ctx: Any, event: CloudOrder) -> None:
        ctx.count("tries")
        ctx.forward(OUT, event, key="a")
        ctx.count("tries")
        calls.append(ctx.offset)
        if calls.count(ctx.offset) == 1 and event.cents == 1:
            raise ValueError("once")

    async def work_ahead(ctx: Any, event: CloudOrder) -> None:
        work(ctx, event)
        await ctx.turn()
        ctx.forward(OUT, event, key="a")

    def work_twice(ctx: Any, event: CloudOrder) -> None:
        work(ctx, event)
        ctx.forward(OUT, event, key="a")

    handler: Any = work_ahead if "concurrency" in kind else work_twice
    source.register_event_type(CloudOrder, handler, **kind)
    with TestDriver(source) as driver:
        driver.at("commit.before", driver.crash)
        sent = [driver.send(CloudOrder("a", cents), key="k", wait=False).offset for cents in range(3)]
        driver.settle()
        driver.restart(0)
        driver.settle()
        driver.check()
        found = [event.id for event in map(attributes_of, driver.outputs(OUT)) if event is not None]
    assert found == [f"orders/0/{offset}/{number}" for offset in sent for number in (0, 1)]
    assert len(calls) > 4  # some of them more than once


def test_timers_name_their_due_time_and_interjections_are_random() -> None:
    source = EventSource(EventSourceConfig(group_id="g", topic="orders", num_partitions=1))
    source.output(OUT, form=CloudEvents(source="/bank"))

    @source.on
    def ordered(ctx: Any, event: CloudOrder) -> None:
        if ctx.timer is None:
            ctx.schedule_in(1, event, name="later")
        else:
            ctx.forward(OUT, event, key="a")

    with TestDriver(source) as driver:
        driver.send(CloudOrder("a", 1), key="k")
        driver.advance(2)
        for _ in range(2):
            driver.interject(0, lambda ctx: ctx.forward(OUT, CloudOrder("b", 1), key="a"))
        first, second, third = (attributes_of(each) for each in driver.outputs(OUT))
    assert first is not None
    assert second is not None
    assert third is not None
    assert re.fullmatch(r"orders/0/later/\d+/[0-9a-f]+/0", first.id)
    assert first.time
    assert second.id != third.id
    assert (second.time, third.time) == ("", "")


@pytest.mark.parametrize("broken", [False, True], ids=["done", "parked"])
def test_the_end_of_a_durable_job_has_the_time_of_its_start(broken: bool) -> None:
    """Also from the queue of its key, and the same id."""
    source = EventSource(EventSourceConfig(group_id="g", topic="orders", num_partitions=1, error_policy=PARK))
    source.output(OUT, form=CloudEvents(source="/bank"))
    began, ids, fails = list[float](), list[str](), [broken]

    async def work(event: CloudOrder) -> int:
        await elapse(100)
        return event.cents

    def finish(ctx: Any, event: CloudOrder, cents: int) -> None:
        ctx.forward(OUT, event, key="a")
        ids.append(dict(ctx._outputs[-1].headers)["ce_id"].decode())
        if fails and fails.pop():
            raise ValueError("once")

    jobs = AsyncJobScheduler(source, work, finish)

    @source.on
    def ordered(ctx: Any, event: CloudOrder) -> None:
        ctx.start_job(jobs, event, delay=50)
        began.append(ctx._now_ms / 1000)

    with TestDriver(source) as driver:
        driver.send(CloudOrder("a", 1), key="k", wait=False)
        driver.advance(200)
        driver.advance(200)
        [written] = driver.outputs(OUT)
        event = attributes_of(written)
        driver.check()
    assert event is not None
    assert datetime.fromisoformat(event.time).timestamp() == pytest.approx(began[0], abs=0.001)
    assert ids == [event.id] * (1 + broken)


@pytest.mark.parametrize("setter", ["event", "timer", "interjection"])
def test_a_timer_that_is_set_again_for_the_same_time_has_other_ids(setter: str) -> None:
    """Receivers would drop what its second firing sends; and after a crash each firing keeps its ids."""
    source = EventSource(EventSourceConfig(group_id="g", topic="orders", num_partitions=1))
    source.output(OUT, form=CloudEvents(source="/bank"))
    first = list[Any]()

    def set_it(ctx: Any) -> None:
        first[:] = first or [ctx.now]
        ctx.schedule_at(first[0], CloudOrder("a", 1), name="close")

    @source.on
    def ordered(ctx: Any, event: CloudOrder) -> None:
        if ctx.timer is None:
            set_it(ctx)
        else:
            ctx.forward(OUT, event, key="a")
            if setter == "timer" and event.cents:
                ctx.schedule_at(first[0], CloudOrder("a", 0), name="close")

    with TestDriver(source) as driver:
        for number in range(1 if setter == "timer" else 3):
            if number == 1 and setter == "event":
                driver.at("commit.before", driver.crash, skip=1)  # the commit of what it fires as
            if setter == "interjection":
                driver.interject(0, set_it)
            else:
                driver.send(CloudOrder("a", 1), key="k", wait=False)
            driver.advance(2)
            if not driver.members:
                driver.restart()
                driver.settle()
        driver.check()
        ids = [event.id for event in map(attributes_of, driver.outputs(OUT)) if event is not None]
    assert len(set(ids)) == len(ids) == (2 if setter == "timer" else 3)


def test_the_own_topic_is_written_in_its_form() -> None:
    got: list[Any] = []
    source = EventSource(
        EventSourceConfig(group_id="g", topic="orders", num_partitions=1), types=CloudEvents(source="/me")
    )

    @source.on
    def ordered(ctx: Any, event: CloudOrder) -> None:
        got.append(event)
        if event.cents:
            ctx.forward("orders", CloudOrder(event.order, event.cents - 1), key="k")

    with TestDriver(source) as driver:
        driver.send_record(Record("orders", b'{"order":"a","cents":2}', b"k", BINARY))
    assert got == [CloudOrder("a", 2), CloudOrder("a", 1), CloudOrder("a", 0)]


@pytest.mark.parametrize(
    ("headers", "form", "said"),
    [
        ([("ce_id", b"mine")], CloudEvents(source="/bank"), "'ce_id' of a CloudEvent is given by its form"),
        ([("content-type", b"a/b")], CloudEvents(source="/bank"), "'content-type' of a CloudEvent"),
    ],
)
def test_what_cannot_be_written_is_the_handlers_error(headers: Any, form: CloudEvents, said: str) -> None:
    source = EventSource(EventSourceConfig(group_id="g", topic="orders", num_partitions=1, error_policy=DEAD_LETTER))
    source.output(OUT, form=form)
    source.register_event_type(CloudOrder, lambda ctx, event: ctx.forward(OUT, event, key="a", headers=headers))
    with TestDriver(source) as driver:
        driver.send(CloudOrder("a", 1), key="k")
        [letter] = driver.dead_letters()
        assert said in dict(letter.headers or ())["__kes_dlq_message"].decode()  # type: ignore[union-attr]
        assert driver.outputs(OUT) == []


def test_a_value_that_is_no_json_is_not_called_so() -> None:
    with pytest.raises(Exception, match="no JSON"):
        CloudEvents(source="/a").written(b"\x81\xa1a\x01", [("__grt__", b"T")], "1", -1)
    value, headers = CloudEvents(source="/a", content_type="application/msgpack", structured=True).written(
        b"\x81\xa1a\x01", [("__grt__", b"T")], "1", -1
    )
    assert b'"data_base64":"gaFhAQ=="' in (value or b"")
    assert RULE.typed(record(value, *headers)).value == b"\x81\xa1a\x01"


def test_a_form_without_source_writes_nothing() -> None:
    with pytest.raises(ConfigError, match="CloudEvents"):
        source_of(CloudEvents(), [])
    with pytest.raises(ConfigError, match="source of CloudEvents"):
        CloudEvents(source="a\nb")


async def wait_and_send(ctx: Any, event: CloudOrder) -> None:
    ctx.forward(OUT, event, key="a")
    with contextlib.suppress(TimeoutError):  # in virtual time
        await asyncio.wait_for(asyncio.Event().wait(), 1)
    ctx.forward(OUT, event, key="a")


def test_a_finalizer_that_awaits_numbers_what_it_sends_from_the_start() -> None:
    """Those before it are admitted meanwhile, and leave the list that they share with it."""
    source = EventSource(EventSourceConfig(group_id="g", topic="orders", num_partitions=1))
    source.output(OUT, form=CloudEvents(source="/bank"))

    begun, all_begun = list[int](), asyncio.Event()

    async def work(event: CloudOrder) -> int:  # they end at the same time, so that their turns are one unit
        begun.append(event.cents)
        if len(set(begun)) == 4:
            all_begun.set()
        await all_begun.wait()
        return event.cents

    def finish(ctx: Any, event: CloudOrder, cents: int) -> Any:
        if cents == 2:
            return wait_and_send(ctx, event)
        for _ in range(3):
            ctx.forward(OUT, event, key="a")
        return None

    jobs = AsyncJobScheduler(source, work, finish, config=SchedulerConfig(concurrency=8))
    jobs.register_event_type(CloudOrder, key=lambda event: str(event.cents))
    with TestDriver(source) as driver:
        for cents in range(4):
            driver.send(CloudOrder("a", cents), key="k", wait=False)
        driver.settle()
        found = [event.id.split("/")[2:] for event in map(attributes_of, driver.outputs(OUT)) if event is not None]
    offsets = list(dict.fromkeys(offset for offset, _ in found))
    numbers = [[number for at, number in found if at == offset] for offset in offsets]
    assert numbers == [["0", "1", "2"], ["0", "1", "2"], ["0", "1"], ["0", "1", "2"]]
