"""A producer without transactions: idempotent, each record acknowledged by itself, on any cluster."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from streams.clients import permissions
from streams.clients.connection import ConnectionLog
from streams.clients.permissions import denied
from streams.clients.settings import ClientSettings, build
from streams.clients.translate import BLOCKED, NOT_AUTHORIZED, REFUSED, error_of
from streams.errors import BrokerUnavailable, RecordRefused, Stopped, StreamsError
from streams.records import Acknowledgement, Record

DeliveryReport = Callable[[KafkaError | None, Message], None]


class PlainProducer:
    """Sends records, and reports each of them once: when all in-sync replicas have it, or when it has failed for good.

    Threads: ``produce`` is for one thread (the loop's, it never blocks), ``poll`` for another one; they may overlap.
    ``close`` may be called by any thread.
    """

    def __init__(self, settings: ClientSettings, *, delivery_timeout_ms: int, one_by_one: bool = False) -> None:
        """Building takes some 1 to 60 ms and holds the GIL (longer with slow TLS): not for an event loop's thread.

        ``delivery_timeout_ms``: how long a record is tried. ``one_by_one``: each travels in a batch of its own.
        """
        self.is_broken = False
        """Whether the producer takes no records any more (a fatal error of librdkafka): another one is needed."""
        self._alone = one_by_one
        self._may_write_nowhere = False
        self._timeout_ms = delivery_timeout_ms
        self._connection = ConnectionLog(settings.bootstrap_servers, f"{settings.client_id}.plain")
        self._reports: list[Acknowledgement] = []
        self._producer: Producer | None = build(
            Producer, settings.plain_producer(delivery_timeout_ms, one_by_one=one_by_one), self._connection
        )
        self._produce: Callable[..., None] = self._producer.produce
        self._poll: Callable[..., int] = self._producer.poll

    def produce(self, record: Record, token: object) -> bool:
        """Queue a record for sending; never blocks. The partition is the key's (murmur2) if the record names none.

        ``False``: the local queue is full and the record was not taken; try again after ``poll`` has returned
        something. Raises ``RecordRefused`` if the client itself will not take it (too large, no such partition), and
        ``BrokerUnavailable`` if it takes none any more (``is_broken``).
        """
        return self.produce_reported(record, partial(self._reported, token, record.topic))

    def produce_reported(self, record: Record, report: DeliveryReport) -> bool:
        """Queue a record as ``produce`` does; ``report`` is called by ``poll``, with the error or ``None``."""
        partition = -1 if record.partition is None else record.partition
        timestamp = 0 if record.timestamp_ms is None else record.timestamp_ms
        headers = record.headers
        if headers is not None and type(headers) is not list:
            headers = [*headers]  # the client takes nothing but lists
        try:
            self._produce(record.topic, record.value, record.key, partition, report, None, timestamp, headers)
        except BufferError:
            return False
        except KafkaException as exception:
            raise self.failure(record.topic, partition, error_of(exception)) from None
        return True

    @property
    def unreported(self) -> int:
        """The number of records that are not reported yet."""
        return 0 if self._producer is None else len(self._producer)

    def purge(self) -> None:
        """Give up all records: those that are not reported yet have failed, and are reported by ``poll``."""
        if self._producer is not None:
            self._producer.purge()

    def poll(self, timeout_seconds: float) -> list[Acknowledgement]:
        """Wait for reports, for up to this long, and return those that there are. Blocks."""
        try:
            self._poll(timeout_seconds)
        except KafkaException as exception:  # a fatal error; the records that are purged by it are reported next
            self._may_write_nowhere |= error_of(exception).code() == KafkaError.CLUSTER_AUTHORIZATION_FAILED
        reports, self._reports = self._reports, []
        return reports

    def close(self) -> None:
        """Drop the producer: never raises, never flushes, never blocks. What is not reported yet will not be."""
        producer, self._producer = self._producer, None
        if producer is None:
            return
        self._produce = self._poll = _closed
        thread = threading.Thread(
            target=_discard, args=([producer],), name=f"close {self._connection.client}", daemon=True
        )
        del producer
        thread.start()

    def _reported(self, token: object, topic: str, error: KafkaError | None, message: Message) -> None:
        """Collect a delivery report: called by ``poll``, on its thread."""
        partition, offset = message.partition(), message.offset()
        partition = -1 if partition is None else partition
        if error is None:
            self._connection.on_answer()
            self._reports.append(Acknowledgement(token, partition, -1 if offset is None else offset, None))
            return
        in_company = error.code() == KafkaError.MSG_SIZE_TOO_LARGE and not self._alone
        failure = self.failure(topic, partition, error)
        self._reports.append(Acknowledgement(token, partition, -1, failure, in_company))

    def failure(self, topic: str, partition: int, error: KafkaError) -> StreamsError:
        """Translate the error of a record: ``RecordRefused``, or ``BrokerUnavailable`` where it may be there or not."""
        where = topic if partition < 0 else f"{topic}[{partition}]"
        if self._may_write_nowhere and error.code() == KafkaError._PURGE_QUEUE:
            # Without the right to write to any topic at all a producer gets no id, and nothing is sent.
            self.is_broken, error = True, KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
        if error.code() in REFUSED or error.code() in BLOCKED:  # no transaction waits here: the item has its policy
            rights = [permissions.on_topic("Write", topic)]
            why = denied(error.name(), rights) if error.code() in NOT_AUTHORIZED else f"{error.name()}: {error.str()}"
            return RecordRefused(f"{where}: {why}")
        if error.fatal() or error.code() == KafkaError._FATAL:
            self.is_broken = True
        reason = f"; {self._connection.reason}" if self._connection.down else ""
        return BrokerUnavailable(
            f"{where}: not acknowledged by Kafka at {self._connection.addresses} within "
            f"{self._timeout_ms / 1000:g} s ({error.name()}: {error.str()}{reason}); it may be there or not"
        )


def _closed(*_arguments: object) -> NoReturn:
    raise Stopped("the producer is closed")


def _discard(last_reference: list[Producer]) -> None:
    with contextlib.suppress(Exception):
        last_reference.clear()
