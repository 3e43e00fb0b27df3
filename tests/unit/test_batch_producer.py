"""Records beside the transactions, over a producer in memory: order, failures, room, the end."""

from __future__ import annotations

import asyncio
import pickle
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from streams import BatchProducer, Delivery, EventContext, IncomingRecord, Record, to_record
from streams.errors import BrokerUnavailable, ConfigError, EncodeError, RecordRefused
from streams.outcomes import DEAD_LETTER, SKIP
from streams.records import Acknowledgement
from streams.runtime import bridge
from tests.unit.runtime_kit import OUT, Bench, Named, count
from tests.unit.waiting import PATIENCE

FAR = "far"


class Fake:
    """``ports.PlainProducer``: acknowledges what it is told to."""

    def __init__(self, *, room: int = 1000, is_open: bool = False) -> None:
        self.is_broken = False
        self.room = room
        self.is_open = is_open
        self.taken: list[tuple[Record, object]] = []
        self.errors: dict[bytes, Exception] = {}
        self.in_company: set[bytes] = set()
        self.under_way: deque[tuple[Record, object]] = deque()
        self.closed = threading.Event()
        self.polls: set[str] = set()
        self._reports: queue.SimpleQueue[Acknowledgement] = queue.SimpleQueue()
        self._offset = 0

    @property
    def names(self) -> list[str]:
        return [(record.key or b"").decode() for record, _ in self.taken]

    def produce(self, record: Record, token: object) -> bool:
        if record.topic == "missing":
            raise RecordRefused("missing: no such topic")
        if len(self.under_way) >= self.room:
            return False
        self.taken.append((record, token))
        self.under_way.append((record, token))
        if self.is_open:
            self.acknowledge()
        return True

    def acknowledge(self, number: int = 1) -> None:
        for _ in range(min(number, len(self.under_way))):
            record, token = self.under_way.popleft()
            error = self.errors.get(record.key or b"")
            alone = (record.key or b"") in self.in_company
            self._offset += 1
            self._reports.put(Acknowledgement(token, 0, -1 if error else self._offset, error, alone))

    def open(self) -> None:
        self.is_open = True
        self.acknowledge(len(self.under_way))

    def poll(self, timeout_seconds: float) -> list[Acknowledgement]:
        self.polls.add(threading.current_thread().name)
        try:
            reports = [self._reports.get(timeout=timeout_seconds)]
        except queue.Empty:
            return []
        while not self._reports.empty():
            reports.append(self._reports.get())
        return reports

    def close(self) -> None:
        self.closed.set()


def finalize(ctx: EventContext[Any], deliveries: list[Delivery]) -> None:
    count(ctx, "seen")
    told = [f"{(delivery.record.key or b'').decode()}@{delivery.offset}" for delivery in deliveries]
    ctx.forward(OUT, Named("+".join(told)), key="k")


def plan(_: IncomingRecord, event: Named) -> list[Record]:
    return [to_record(FAR, Named(word), key=word) for word in event.name.split()]


def run(bench: Bench, fake: Fake | Callable[..., Any], *names: str) -> asyncio.Task[None]:
    """Over these events, with this producer, or what makes one."""
    connect = (lambda *_, **__: fake) if isinstance(fake, Fake) else fake
    task = bench.begin(*names)
    bench.connections.plain_producer = connect  # type: ignore[attr-defined]
    bench.connections.wait_for = bridge.wait_for  # type: ignore[attr-defined]
    return task


def producing(bench: Bench, *, on_error: Any = None, partitions: int = 1, **settings: Any) -> BatchProducer[Any]:
    source = bench.make(None, partitions=partitions)
    producer: BatchProducer[Any] = BatchProducer(source, settings.pop("finalizer", finalize), **settings)
    producer.register_event_type(Named, plan, on_error=on_error)
    return producer


async def test_an_event_completes_when_all_of_its_records_are_acknowledged(bench: Bench) -> None:
    fake = Fake()
    producing(bench)
    run(bench, fake, "a b", "c")
    await bench.until(lambda: fake.names == ["a", "b", "c"], "all are sent")
    fake.under_way.rotate(1)
    fake.acknowledge(2)  # c, a
    await bench.until(lambda: bench.source.statistics().stages[0].running == 1, "two are back")
    assert bench.broker.outputs() == []
    fake.open()
    await bench.until(lambda: bench.broker.outputs() == ["a@2+b@3", "c@1"], "in order")
    assert bench.broker.offsets == {0: 2}
    assert all("kes-" in name for name in fake.polls), "reports are waited for beside the loop"


async def test_events_without_records_complete(bench: Bench) -> None:
    source = bench.make(None)
    seen: list[int] = []
    producer: BatchProducer[Any] = BatchProducer(source, lambda ctx, deliveries: seen.append(len(deliveries)))

    @producer.register_event_type(Named)
    def none_or_empty(_: IncomingRecord, event: Named) -> list[Record] | None:
        return None if event.name == "none" else []

    run(bench, lambda *_, **__: pytest.fail("nothing is to be sent"), "none", "empty", "none")
    await bench.committed()
    assert seen == [0]


async def test_a_full_queue_holds_nobody_up_and_keeps_the_order(bench: Bench) -> None:
    fake = Fake(room=2)
    producing(bench)
    names = [f"n{number}" for number in range(20)]
    run(bench, fake, " ".join(names), "last")
    await bench.until(lambda: len(fake.taken) == 2, "it is full")
    assert await asyncio.wait_for(bench.source.interject(0, lambda ctx: 5), PATIENCE) == 5
    await bench.until(lambda: bool(fake.under_way and not fake.acknowledge()) or len(fake.taken) == 21, "one by one")
    await bench.until(lambda: (fake.acknowledge(), bench.broker.offsets == {0: 2})[1], "done")
    assert fake.names == [*names, "last"]


async def test_a_bound_holds_up_its_own_partition_only(bench: Bench) -> None:
    fake = Fake()
    producing(bench, partitions=2, max_queued_records=2)
    run(bench, fake)
    await bench.until_active()
    bench.broker.send("a b c", "d")
    await bench.until(lambda: fake.names == ["a", "b", "c"], "more than the bound goes in alone")
    bench.broker.send("x", partition=1)
    await bench.until(lambda: fake.names == ["a", "b", "c", "x"], "the other partition goes on")
    fake.open()
    await bench.until(lambda: sorted(bench.broker.offsets.items()) == [(0, 2), (1, 1)], "all done")


async def test_a_record_that_failed_fails_its_event_and_no_other(bench: Bench) -> None:
    fake = Fake(is_open=True)
    fake.errors[b"b"] = RecordRefused("far[0]: b is too large")
    producing(bench, on_error=DEAD_LETTER)
    run(bench, fake, "a b", "c")
    await bench.committed()
    assert bench.broker.outputs() == ["c@3"]
    letters = bench.letters
    assert any(b"b is too large" in (value or b"") for _, value in letters[0].headers or ())


async def test_what_the_client_refuses_is_the_records_error(bench: Bench) -> None:
    fake = Fake(is_open=True)
    errors: list[Exception | None] = []
    source = bench.make(None)
    producer: BatchProducer[Any] = BatchProducer(
        source, on_failure=lambda ctx, deliveries: errors.extend(delivery.error for delivery in deliveries)
    )
    producer.register_event_type(Named, lambda record, event: [Record("missing", b"1"), Record(FAR, b"2")])
    run(bench, fake, "a")
    await bench.committed()
    assert isinstance(errors[0], RecordRefused)
    assert errors[1] is None


async def test_what_was_refused_with_its_batch_is_sent_again_alone(bench: Bench) -> None:
    together, alone = Fake(is_open=True), Fake(is_open=True)
    together.errors = {b"a": RecordRefused("batch"), b"b": RecordRefused("batch")}
    together.in_company = {b"a", b"b"}
    alone.errors = {b"b": RecordRefused("b alone")}
    producing(bench, on_error=DEAD_LETTER)
    run(bench, lambda *_, one_by_one=False, **__: alone if one_by_one else together, "a", "b", "c")
    await bench.committed()
    assert together.names == ["a", "b", "c"]
    assert alone.names == ["a", "b"]
    assert bench.broker.outputs() == ["a@1", "c@3"]


async def test_a_producer_that_breaks_is_replaced(bench: Bench) -> None:
    fakes: list[Fake] = []

    def connect(*_: Any, **__: Any) -> Fake:
        fakes.append(Fake())
        return fakes[-1]

    producing(bench, on_error=SKIP)
    run(bench, connect, "a", "b")
    await bench.until(lambda: fakes and fakes[0].names == ["a", "b"], "sent")
    fakes[0].acknowledge()
    await bench.until(lambda: bench.broker.outputs() == ["a@1"], "one is acknowledged")
    fakes[0].is_broken = True
    await bench.committed()
    bench.broker.send("c")
    await bench.until(lambda: len(fakes) == 2 and fakes[1].names == ["c"], "by another one")
    fakes[1].open()
    await bench.until(lambda: bench.broker.outputs() == ["a@1", "c@1"], "done")
    assert await asyncio.to_thread(fakes[0].closed.wait, PATIENCE)


async def test_settings_that_no_client_takes_stop_the_source_whatever_the_policy(bench: Bench) -> None:
    def connect(*_: Any, **__: Any) -> Fake:
        raise ConfigError("kafka settings: no such property")

    producing(bench, on_error=SKIP)
    task = run(bench, connect, "a")
    await asyncio.wait([task], timeout=PATIENCE)
    with pytest.raises(Exception, match="no such property"):
        task.result()
    assert bench.broker.offsets.get(0, 0) == 0


async def test_produce_in_a_handler_that_has_its_turn(bench: Bench) -> None:
    fake = Fake(is_open=True)
    fake.errors[b"bad"] = BrokerUnavailable("no answer")
    source = bench.make(None)
    producer: BatchProducer[Any] = BatchProducer(source)

    @source.register_event_type(Named, on_error=DEAD_LETTER)
    async def handler(ctx: EventContext[Any], event: Named) -> None:
        deliveries = await producer.produce(ctx, plan(ctx.input, event))  # type: ignore[arg-type]
        ctx.forward(OUT, Named(",".join(str(delivery.offset) for delivery in deliveries)), key="k")

    run(bench, fake, "a b", "", "bad", "c")
    await bench.committed()
    assert bench.broker.outputs() == ["1,2", "", "4"]
    assert len(bench.letters) == 1


async def test_produce_and_wait_in_a_blocking_handler(bench: Bench) -> None:
    fake = Fake()
    source = bench.make(None)
    producer: BatchProducer[Any] = BatchProducer(source)
    errors: list[BaseException] = []

    def handler(ctx: EventContext[Any], event: Named) -> None:
        if event.name == "late":
            try:
                producer.produce_and_wait(ctx, plan(ctx.input, event), timeout_seconds=0.01)  # type: ignore[arg-type]
            except TimeoutError as error:
                errors.append(error)
            return
        deliveries = producer.produce_and_wait(ctx, plan(ctx.input, event))  # type: ignore[arg-type]
        ctx.forward(OUT, Named(",".join(str(delivery.offset) for delivery in deliveries)), key="k")

    source.register_event_type(Named, handler, blocking=True)
    run(bench, fake, "late", "a b")
    await bench.until(lambda: fake.names == ["late", "a", "b"], "sent")
    assert len(errors) == 1
    fake.open()
    await bench.until(lambda: bench.broker.outputs() == ["2,3"], "done")


async def test_produce_and_wait_on_the_loop_is_refused(bench: Bench) -> None:
    source = bench.make(None)
    producer: BatchProducer[Any] = BatchProducer(source)
    errors: list[BaseException] = []

    @source.register_event_type(Named)
    async def handler(ctx: EventContext[Any], event: Named) -> None:
        try:
            producer.produce_and_wait(ctx, [])
        except RuntimeError as error:
            errors.append(error)

    run(bench, Fake(), "a")
    await bench.committed()
    assert "await it instead" in str(errors[0])


async def test_a_stop_waits_for_what_is_sent(bench: Bench) -> None:
    fake = Fake()
    producing(bench)
    run(bench, fake, "a", "b")
    await bench.until(lambda: fake.names == ["a", "b"], "sent")
    stopping = await bench.drain()
    fake.open()
    await stopping
    assert bench.broker.offsets == {0: 2}
    assert await asyncio.to_thread(fake.closed.wait, PATIENCE)


async def test_what_a_lost_partition_waits_to_send_is_not_sent(bench: Bench) -> None:
    fake = Fake(room=1)
    producing(bench)
    run(bench, fake, "a", "b")
    await bench.until(lambda: fake.names == ["a"], "the other one waits")
    bench.connections.membership.lose_and_rejoin()
    await bench.until(lambda: bench.source.statistics().stages[0].waiting == 2, "it begins again")
    fake.open()
    await bench.committed()
    assert fake.names == ["a", "a", "b"]


async def test_settings_that_cannot_be(bench: Bench) -> None:
    source = bench.make(None)
    for settings, said in (
        ({"client_settings": {"acks": 1}}, "acks"),
        ({"client_settings": {"message.timeout.ms": 1}}, "delivery_timeout_seconds"),
        ({"max_queued_records": 0}, "max_queued_records"),
        ({"delivery_timeout_seconds": 0}, "delivery_timeout_seconds"),
        ({"bootstrap_servers": "user@host:1"}, "bootstrap_servers"),
    ):
        with pytest.raises(ConfigError, match=said):
            BatchProducer(source, **settings)  # type: ignore[arg-type]


async def test_secrets_are_not_shown_and_do_not_travel(bench: Bench) -> None:
    source = bench.make(None)
    producer: BatchProducer[Any] = BatchProducer(
        source, bootstrap_servers="host:1", client_settings={"sasl.password": "s3cret"}
    )
    assert "s3cret" not in repr(producer) + repr(producer._definition)
    assert b"s3cret" not in pickle.dumps(producer._definition)


async def test_to_record_is_what_forward_sends() -> None:
    record = to_record("t", Named("a"), key="k", headers=[("h", b"1")], partition=2)
    assert record == Record("t", b'{"name":"a"}', b"k", [("__grt__", b"Named"), ("h", b"1")], 2)
    with pytest.raises(EncodeError, match="key"):
        to_record("t", Named("a"), key=5)  # type: ignore[arg-type]
