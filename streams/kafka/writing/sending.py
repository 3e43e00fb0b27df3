"""Send records of any program, and keep them until they are acknowledged. Transactions: ``writing/blocking``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import msgspec
from confluent_kafka import KafkaError, Message

from streams.errors import BrokerUnavailable, ConfigError, NotDelivered, Stopped
from streams.kafka.settings import ClientSettings
from streams.kafka.writing.plain_producer import PlainProducer
from streams.records import Delivery, Record
from streams.sak.forks import MadeHere, never_freed

_log = logging.getLogger(__name__)

MAX_FAILURES: Final = 1_000
"""Failures that ``NotDelivered`` lists; it counts the others."""
_PURGE_SECONDS: Final = 0.1
"""Seconds of one wait for the reports of purged records."""


class SendQueue:
    """Records on their way, and the client that sends them. ``serve`` is for one thread at a time."""

    def __init__(self, settings: ClientSettings, limit: int, delivery_seconds: float) -> None:
        # linger.ms: with 0 nearly every record wakes the client's thread; 1 costs ``send`` a millisecond, and takes a
        # stream of ``send_soon`` from 0.75 to 0.92 of a loop by hand (five rounds in turn).
        client_settings = {"linger.ms": 1, **settings.overrides, "queue.buffering.max.messages": limit}
        self._settings = ClientSettings(
            settings.bootstrap_servers,
            client_settings,
            client_id=settings.client_id,
            partitioner=settings.partitioner,
            null_keys=settings.null_keys,
        )
        self._timeout_ms = max(int(delivery_seconds * 1000), 1)
        self._failures: list[Delivery] = []
        self._more_failures = 0
        self.sends = 0
        """The records since the last ``serve``."""
        self._producer: PlainProducer | None = self._connect()
        self._is_closed = False
        self._shared: Record | None = None
        self._made_here = MadeHere("this EventProducer", ConfigError, self._leave_to_parent)

    @property
    def unreported(self) -> int:
        """The number of records that are not acknowledged, and have not failed."""
        return 0 if self._producer is None else self._producer.unreported

    def take(self, record: Record, settle: Callable[[Delivery], None] | None = None) -> bool:
        """Queue a record; ``False``: there is no room, call ``serve``. Raises ``RecordRefused``.

        ``serve`` calls ``settle`` with its outcome. Without one, ``raise_failures`` raises what failed.
        """
        producer = self._producer
        if producer is None:
            self.check_open()
            return False  # another thread is making it anew
        number = next(producer.numbers)
        if settle is not None or record.partition is not None or record.timestamp_ms is not None:
            sent = Sent(self, producer, number, record, settle)
        else:  # nothing more of it is kept, so its memory is free at once, and still in the processor's cache
            shared = self._shared
            if shared is None or shared.headers is not record.headers:
                shared = self._shared = record
            sent = Sent(self, producer, number, shared, None, True)
        try:
            taken = producer.produce_reported(record, sent)
        except Stopped:
            self.check_open()
            return False  # another thread is making it anew, as above
        except BrokerUnavailable:
            if producer.is_broken:
                return False  # ``serve`` makes another one
            raise
        self.sends += 1
        return taken

    def serve(self, seconds: float) -> None:
        """Wait for acknowledgements for so long, and take those that there are."""
        self.sends = 0
        self.check_open()
        if (producer := self._producer) is None:  # it could not be made before
            producer = self._producer = self._connect()
        producer.poll(seconds)
        if producer.is_broken:
            self._drop()
            self._producer = self._connect()

    def note(self, delivery: Delivery) -> None:
        """Keep a failure for ``raise_failures``."""
        if len(self._failures) < MAX_FAILURES:
            self._failures.append(delivery)
        else:
            self._more_failures += 1

    def raise_failures(self) -> None:
        """Raise ``NotDelivered`` with the failures since the last call, if there are any."""
        self.check_fork()
        failures, more = self._failures, self._more_failures
        self._failures, self._more_failures = [], 0
        if failures:
            raise NotDelivered(failures, more)

    def close(self, *, is_loud: bool) -> None:
        """Close the client. Records on their way are in doubt. Raises ``NotDelivered``, or logs it if not loud."""
        # Before the client goes: a thread that waits for room must find this, and not make another client.
        self._is_closed = True
        if self.is_foreign:
            return
        self._drop()
        try:
            self.raise_failures()
        except NotDelivered as failure:
            if is_loud:
                raise
            _log.error("%s", failure)

    def reported(self, sent: Sent, error: KafkaError | None, partition: int, offset: int) -> None:
        """Take in the outcome of a record: called by ``serve``."""
        if error is None:
            if sent.settle is not None:
                sent.settle(Delivery(sent.record, partition, offset))
            return
        failure = sent.producer.failure(sent.record.topic, partition, error)
        (sent.settle or self.note)(Delivery(sent.record, partition, -1, failure))

    def _connect(self) -> PlainProducer:
        return PlainProducer(self._settings, delivery_timeout_ms=self._timeout_ms)

    def check_open(self) -> None:
        """Raise ``Stopped`` once this is closed, and ``ConfigError`` after a fork."""
        self.check_fork()
        if self._is_closed:
            raise Stopped("the producer is closed: its block has ended")

    def check_fork(self) -> None:
        """Raise ``ConfigError`` in a process that did not make this."""
        self._made_here.check()

    @property
    def is_foreign(self) -> bool:
        """Check whether this process is a child of the one that made it: then there is nothing to end."""
        return self._made_here.is_foreign

    def _leave_to_parent(self) -> None:
        producer, self._producer = self._producer, None  # so that no call gets to it
        never_freed(producer)

    def _drop(self) -> None:
        """Drop the client. Its records on the way are in doubt."""
        if (producer := self._producer) is not None:
            producer.purge()
            while producer.unreported:  # each record is reported, as failed, before the client goes
                producer.poll(_PURGE_SECONDS)
            producer.close()
            self._producer = None


class Sent(msgspec.Struct, gc=False):
    """A record on its way: the function that the client calls with the outcome. Not a closure, and out of the garbage
    collector's sight: a hundred thousand of them are on their way, and it would look at each. ``is_shared``: ``record``
    is one with the same headers, since only failures matter; the client knows the rest of it."""

    queue: SendQueue
    producer: PlainProducer
    number: int
    record: Record
    settle: Callable[[Delivery], None] | None
    is_shared: bool = False

    def __call__(self, error: KafkaError | None, message: Message) -> None:
        if error is None and self.settle is None:
            return
        sent = self
        if self.is_shared:
            record = Record(message.topic() or "", message.value(), message.key(), self.record.headers)
            sent = Sent(self.queue, self.producer, self.number, record, None)
        if error is not None and self.producer.takes_back(self.number, sent.record, self, error, message):
            return
        partition, offset = message.partition(), message.offset()
        self.queue.reported(sent, error, -1 if partition is None else partition, -1 if offset is None else offset)
