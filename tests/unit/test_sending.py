"""Records on their way: the outcome is always that of the right record, and the order that of the calls, whatever
becomes of the client."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from streams import EventProducer
from streams.errors import BrokerUnavailable, NotDelivered, RecordRefused, Stopped, StreamsError
from streams.kafka.settings import ClientSettings
from streams.kafka.writing import plain_producer, sending
from streams.kafka.writing.plain_producer import DeliveryReport, PlainProducer
from streams.kafka.writing.sending import SendQueue
from streams.records import Record

NOT_ALLOWED = KafkaError.TOPIC_AUTHORIZATION_FAILED
TOO_LARGE, PURGED = KafkaError.MSG_SIZE_TOO_LARGE, KafkaError._PURGE_QUEUE


class Report:
    """What the client says of a record, as its ``Message``. ``age``: in seconds."""

    age = 0.1

    def __init__(self, record: Record) -> None:
        self._record = record

    def latency(self) -> float:
        return self.age

    def topic(self) -> str:
        return self._record.topic

    def value(self) -> bytes | None:
        return self._record.value

    def key(self) -> bytes | None:
        return self._record.key

    def partition(self) -> int | None:
        return self._record.partition

    def offset(self) -> int | None:
        return None


class Client:
    """A ``PlainProducer`` whose records all fail. ``made``: all of them."""

    made: list[Client]

    def __init__(self, _: ClientSettings, *, delivery_timeout_ms: int) -> None:
        self.waiting: deque[tuple[Record, DeliveryReport]] = deque()
        self.is_broken = self.is_closed = False
        self.error = NOT_ALLOWED
        self.numbers = itertools.count()
        self.sent: list[Record] = []
        self.made.append(self)

    @property
    def unreported(self) -> int:
        return len(self.waiting)

    def produce_reported(self, record: Record, report: DeliveryReport) -> bool:
        if self.is_closed:
            raise Stopped("the producer is closed")
        self.waiting.append((record, report))
        self.sent.append(record)
        return True

    @staticmethod
    def takes_back(*_: object) -> bool:
        return False

    def poll(self, _: float) -> None:
        for _ in range(len(self.waiting)):
            record, report = self.waiting.popleft()
            report(KafkaError(self.error), Report(record))  # type: ignore[arg-type]

    @staticmethod
    def failure(topic: str, partition: int, error: KafkaError) -> StreamsError:
        kind = BrokerUnavailable if error.code() == KafkaError._FATAL else RecordRefused
        return kind(f"{topic}[{partition}]: {error.name()}")

    def purge(self) -> None: ...

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> SendQueue:
    Client.made = []
    fake: Any = Client
    monkeypatch.setattr(sending, "PlainProducer", fake)
    return SendQueue(ClientSettings("h:1", client_id="test"), 10, 1.0)


def test_each_failure_has_its_own_record(queue: SendQueue) -> None:
    """Records that share their headers, and others, in turn."""
    one: list[tuple[str, bytes | None]] = [("a", b"1")]
    other: list[tuple[str, bytes | None]] = [("a", b"1")]
    sent = [
        Record("t", b"1", b"k", one),
        Record("t", b"2", None, one),
        Record("t", b"", b"", other),
        Record("u", None, b"k", one),
        Record("t", b"3", b"k", one, partition=2),
        Record("t", b"4", b"k", one, timestamp_ms=7),
        Record("t", b"5", b"k"),
        Record("u", b"6", b"k"),
    ]
    for record in sent:
        assert queue.take(record)
    queue.serve(0)
    with pytest.raises(NotDelivered) as found:
        queue.raise_failures()
    failed = [failure.record for failure in found.value.deliveries]
    assert failed == sent
    assert [record.headers is before.headers for record, before in zip(failed, sent, strict=True)] == [True] * len(sent)


def test_records_behind_a_broken_client_have_the_report_of_the_next(queue: SendQueue) -> None:
    headers: list[tuple[str, bytes | None]] = [("a", b"1")]
    Client.made[0].error = KafkaError._FATAL
    Client.made[0].is_broken = True
    queue.take(Record("t", b"1", None, headers))
    queue.serve(0)
    assert Client.made[0].is_closed
    Client.made[1].error = KafkaError.TOPIC_AUTHORIZATION_FAILED
    queue.take(Record("t", b"2", None, headers))
    queue.serve(0)
    with pytest.raises(NotDelivered) as found:
        queue.raise_failures()
    assert [(failure.record.value, type(failure.error) is RecordRefused) for failure in found.value.deliveries] == [
        (b"1", False),
        (b"2", True),
    ]


def test_a_producer_that_may_write_to_no_topic_names_the_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kafka refuses it the id of a producer, as a matter of the cluster; what is queued is purged."""
    producer = PlainProducer(ClientSettings("127.0.0.1:1", {}, client_id="test"), delivery_timeout_ms=1_000)

    def refused(_: float) -> int:
        raise KafkaException(KafkaError(KafkaError.CLUSTER_AUTHORIZATION_FAILED, "no id", fatal=True))

    monkeypatch.setattr(producer, "_poll", refused)
    assert producer.poll(0) == []
    failure = producer.failure("t", 0, KafkaError(KafkaError._PURGE_QUEUE))
    assert isinstance(failure, RecordRefused)
    assert "--operation Write --topic t" in str(failure)
    assert producer.is_broken
    producer.close()


class Stopping:
    """A client of librdkafka that is told what to report. ``made``: all of them."""

    made: list[Stopping]

    def __init__(self, batch_bytes: int | None) -> None:
        self.batch_bytes = batch_bytes
        self.waiting: list[tuple[int, DeliveryReport]] = []
        self.error: int | None = None
        self.made.append(self)

    def produce(self, _topic: str, value: bytes | None, *arguments: Any) -> None:
        if self.error is not None:
            raise KafkaException(KafkaError(KafkaError._FATAL, "fatal"))
        self.waiting.append((int(value or 0), arguments[2]))

    def stop(self, error: int = KafkaError._GAPLESS_GUARANTEE) -> None:
        self.error = error

    def poll(self, _: float) -> int:
        if self.error is not None:
            raise KafkaException(KafkaError(self.error, "stopped", fatal=True))
        return 0

    def report(self, error: int | None, *numbers: int) -> None:
        for number, report in [one for one in self.waiting if one[0] in numbers]:
            self.waiting.remove((number, report))
            message: Any = Report(Record("t", b"%04d" % number, None, None, number % 10 // 5))
            report(None if error is None else KafkaError(error), message)

    def purge(self, **_: bool) -> None: ...

    def __len__(self) -> int:
        return len(self.waiting)


@pytest.fixture
def stopping(monkeypatch: pytest.MonkeyPatch) -> PlainProducer:
    Stopping.made = []

    def build(_: object, config: dict[str, Any], __: object) -> Stopping:
        assert config["enable.gapless.guarantee"]
        assert config["max.in.flight.requests.per.connection"] == 1
        assert config["log.connection.close"], "else a lost connection is not reported"
        return Stopping(config.get("batch.size"))

    monkeypatch.setattr(plain_producer, "build", build)
    settings = ClientSettings(
        "h:1", {"max.in.flight.requests.per.connection": 5, "log.connection.close": False}, client_id="test"
    )
    return PlainProducer(settings, delivery_timeout_ms=1_000)


def sent(producer: PlainProducer, *numbers: int) -> list[bool]:
    return [producer.produce(Record("t", b"%04d" % number), number) for number in numbers]


def test_what_comes_back_is_sent_again_in_its_order(stopping: PlainProducer) -> None:
    """In smaller batches; no record gets in between, and one that is refused alone is at fault itself."""
    assert all(sent(stopping, *range(100, 105)))
    [client] = Stopping.made
    client.stop()
    assert sent(stopping, 105) == [False]
    assert stopping.poll(0) == []
    client.report(TOO_LARGE, 100, 101)
    client.report(PURGED, 104)
    assert stopping.poll(0) == []
    assert (sent(stopping, 105), stopping.unreported) == ([False], 6)
    client.report(PURGED, 102, 103)  # a request that was ready comes back last
    assert stopping.poll(0) == []
    second = Stopping.made[1]
    assert [number for number, _ in second.waiting] == [100, 101, 102, 103, 104]
    assert second.batch_bytes == 4
    assert sent(stopping, 105) == [True]
    second.stop()
    assert stopping.poll(0) == []
    second.report(TOO_LARGE, 100)
    second.report(PURGED, 101, 102, 103, 104, 105)
    [refused] = stopping.poll(0)
    assert (refused.token, type(refused.error)) == (100, RecordRefused)
    third = Stopping.made[2]
    assert [number for number, _ in third.waiting] == [101, 102, 103, 104, 105]
    third.report(None, 101, 102, 103, 104, 105)
    assert [report.token for report in stopping.poll(0)] == [101, 102, 103, 104, 105]
    assert stopping.unreported == 0


def test_another_refusal_before_all_is_sent_again_changes_no_order(stopping: PlainProducer) -> None:
    assert all(sent(stopping, 100, 101, 102))
    first = Stopping.made[0]
    first.stop()
    stopping.poll(0)
    first.report(TOO_LARGE, 100, 101)
    first.report(PURGED, 102)
    connect = stopping._build

    def connect_to_one_with_room_for_one() -> Any:
        client: Any = connect()

        def produce(*arguments: Any) -> None:
            Stopping.produce(client, *arguments)
            client.stop()

        vars(client)["produce"] = produce
        return client

    vars(stopping)["_build"] = connect_to_one_with_room_for_one
    stopping.poll(0)
    del vars(stopping)["_build"]
    stopping.poll(0)
    Stopping.made[1].report(PURGED, 100)
    stopping.poll(0)
    assert [number for number, _ in Stopping.made[2].waiting] == [100, 101, 102]


@pytest.mark.parametrize(
    ("ago", "age", "is_in_doubt"), [(0.0, 0.1, True), (20.0, 0.1, True), (90.0, 61.0, True), (90.0, 50.0, False)]
)
def test_what_an_old_client_alone_could_tell_is_in_doubt(
    stopping: PlainProducer, monkeypatch: pytest.MonkeyPatch, ago: float, age: float, is_in_doubt: bool
) -> None:
    """A request for another partition was lost with its connection: sent again it could be there twice. librdkafka
    reports the same error once in 30 seconds."""
    monkeypatch.setattr(Report, "age", age)
    assert all(sent(stopping, 100, 101, 102, 105))
    [client] = Stopping.made
    stopping._connection.on_error(KafkaError(KafkaError._TRANSPORT, "connection lost"))
    stopping._connection.failed_at -= ago
    client.stop()
    stopping.poll(0)
    client.report(PURGED, 105)
    client.report(TOO_LARGE, 100, 101)
    client.report(PURGED, 102)
    doubts = stopping.poll(0)
    assert [(doubt.token, type(doubt.error)) for doubt in doubts] == [(105, BrokerUnavailable)] * is_in_doubt
    assert all("it may be there or not" in str(doubt.error) for doubt in doubts)
    again = [100, 101, 102] if is_in_doubt else [100, 101, 102, 105]
    assert [number for number, _ in Stopping.made[1].waiting] == again


def test_what_is_refused_with_another_record_is_sent_again_in_its_order(stopping: PlainProducer) -> None:
    """Whatever has become of a connection before: the broker has refused the batch, so nothing of it is there."""
    assert all(sent(stopping, 100, 101, 102, 103))
    [client] = Stopping.made
    stopping._connection.on_error(KafkaError(KafkaError._TRANSPORT, "connection lost"))
    client.stop()
    stopping.poll(0)
    client.report(KafkaError.INVALID_RECORD, 101)
    client.report(KafkaError._INVALID_DIFFERENT_RECORD, 100, 102)
    client.report(None, 103)
    [refused, done] = stopping.poll(0)
    assert (refused.token, type(refused.error), done.token) == (101, RecordRefused, 103)
    assert [number for number, _ in Stopping.made[1].waiting] == [100, 102]


def test_a_batch_of_nothing_but_headers_is_sent_again_in_smaller_ones(stopping: PlainProducer) -> None:
    for number in range(2):
        assert stopping.produce(Record("t", None, None, [("large", b"x")]), number)
    [client] = Stopping.made
    client.stop()
    stopping.poll(0)
    client.report(TOO_LARGE, 0)
    stopping.poll(0)
    assert Stopping.made[1].batch_bytes == 1


@pytest.mark.parametrize(("times", "error"), [(1, None), (9, "larger than queue.buffering.max.kbytes")])
def test_what_an_empty_queue_does_not_take_is_too_large(stopping: PlainProducer, times: int, error: str | None) -> None:
    """But not what found it full, just before another thread has emptied it."""
    full = iter([True] * times)
    produce = stopping._produce

    def at_times_full(*arguments: Any) -> None:
        if next(full, False):
            raise BufferError
        produce(*arguments)

    vars(stopping)["_produce"] = at_times_full
    with pytest.raises(RecordRefused, match=error) if error else contextlib.nullcontext():
        assert sent(stopping, 1) == [True]


@pytest.mark.parametrize("end", [PlainProducer.purge, PlainProducer.close])
def test_a_producer_that_ends_meanwhile_sends_nothing_again(
    stopping: PlainProducer, end: Callable[[PlainProducer], None]
) -> None:
    assert all(sent(stopping, 100, 101))
    [client] = Stopping.made
    client.stop()
    stopping.poll(0)
    client.report(TOO_LARGE, 100)
    end(stopping)
    client.report(PURGED, 101)
    if end is PlainProducer.purge:
        assert {report.token for report in stopping.poll(0)} == {100, 101}
    assert (len(Stopping.made), stopping.unreported) == (1, 0)


def test_a_client_that_is_broken_takes_nothing_and_says_so(stopping: PlainProducer) -> None:
    Stopping.made[0].stop(KafkaError._FENCED)
    assert sent(stopping, 1) == [False]
    stopping.poll(0)
    with pytest.raises(BrokerUnavailable):
        sent(stopping, 1)
    assert stopping.is_broken


def test_threads_wait_while_a_broken_client_is_made_anew(queue: SendQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[bool] = []
    connect, close = Client.__init__, Client.close

    def of_another_thread() -> None:
        taken.append(queue.take(Record("t", b"1")))

    def slow_connect(self: Client, *arguments: Any, **settings: Any) -> None:
        of_another_thread()
        connect(self, *arguments, **settings)

    def slow_close(self: Client) -> None:
        close(self)
        of_another_thread()

    monkeypatch.setattr(Client, "__init__", slow_connect)
    monkeypatch.setattr(Client, "close", slow_close)
    Client.made[0].is_broken = True
    queue.serve(0)
    assert taken == [False, False]
    assert queue.take(Record("t", b"1"))
    monkeypatch.setattr(Client, "close", close)
    queue.close(is_loud=False)
    with pytest.raises(Stopped, match="its block has ended"):
        queue.take(Record("t", b"1"))
    with pytest.raises(Stopped, match="its block has ended"):
        queue.serve(0)


def test_a_producer_without_a_broker_says_so_and_that_nothing_was_sent(caplog: pytest.LogCaptureFixture) -> None:
    with (
        EventProducer("127.0.0.1:1", delivery_timeout_seconds=2.5) as producer,
        pytest.raises(BrokerUnavailable, match=r"at 127.0.0.1:1 within 2.5 s.*; it was not sent"),
    ):
        producer.send(Record("t", b"1"))
    assert "Kafka at 127.0.0.1:1 can not be reached (nothing listens at 127.0.0.1:1: is it running?" in caplog.text
