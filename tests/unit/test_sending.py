"""Records on their way: the outcome is always that of the right record, whatever becomes of the client."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from streams.clients import sending
from streams.clients.plain_producer import DeliveryReport, PlainProducer
from streams.clients.sending import SendQueue
from streams.clients.settings import ClientSettings
from streams.errors import BrokerUnavailable, NotDelivered, RecordRefused, Stopped, StreamsError
from streams.records import Delivery, Record

TOO_LARGE = KafkaError.MSG_SIZE_TOO_LARGE


class Report:
    """What the client says of a record, as its ``Message``."""

    def __init__(self, record: Record) -> None:
        self._record = record

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

    def __init__(self, _: ClientSettings, *, delivery_timeout_ms: int, one_by_one: bool = False) -> None:
        self.waiting: deque[tuple[Record, DeliveryReport]] = deque()
        self.is_broken = self.is_closed = False
        self.error = TOO_LARGE
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
    """Records that share a report, and others, in turn; sent again alone, each is still itself."""
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
    assert Client.made[1].sent == sent
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


@pytest.mark.parametrize("is_broken", [False, True])
def test_what_is_refused_with_its_batch_while_the_client_is_dropped_has_an_outcome(
    queue: SendQueue, is_broken: bool
) -> None:
    """It goes to a client of its own, which is dropped behind the first."""
    settled: list[Delivery] = []
    record = Record("t", b"1")
    queue.take(record, settled.append)
    if is_broken:
        client = Client.made[0]
        client.is_broken, vars(client)["poll"] = True, lambda _: None  # nothing is reported before it is purged
        vars(client)["purge"] = lambda: vars(client).pop("poll")
        queue.serve(0)
    else:
        queue.close(is_loud=False)
    assert [delivery.record for delivery in settled] == [record]
    assert all(client.is_closed for client in Client.made[: 2 if is_broken else None])
    assert queue.unreported == 0


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
