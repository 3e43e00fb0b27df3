"""A producer without transactions: idempotent, each record acknowledged by itself, on any cluster.

The records of a partition never change places. A batch that is larger than its topic takes (``max.message.bytes``) is
refused as a whole, and librdkafka by itself would go on with the records behind it. So it has to stop there
(``enable.gapless.guarantee``): what it had queued comes back unsent. Another client sends all of it again, by the
numbers that the records have, in smaller batches. A record that is refused in a batch of its own is at fault itself.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Final, NamedTuple, NoReturn

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from streams.errors import BrokerUnavailable, RecordRefused, Stopped, StreamsError
from streams.kafka import permissions
from streams.kafka.connection import ConnectionLog
from streams.kafka.permissions import denied
from streams.kafka.settings import ClientSettings, build
from streams.kafka.translate import NO_SUCH_TOPIC, NOT_AUTHORIZED, REFUSED, error_of
from streams.records import Acknowledgement, Record

_log = logging.getLogger(__name__)

DeliveryReport = Callable[[KafkaError | None, Message], None]

_SENT_AGAIN: Final = frozenset(
    {KafkaError.MSG_SIZE_TOO_LARGE, KafkaError._INVALID_DIFFERENT_RECORD, KafkaError._PURGE_QUEUE}
)
"""Errors of records that need not be at fault themselves: their batch is too large, another record in it is refused,
and they are behind such a batch."""
_SAME_ERROR_SECONDS: Final = 30.0
"""Seconds for which librdkafka does not report the same error of a connection again."""
_SETTLE_SECONDS: Final = 10.0
"""Seconds to wait for the answers to what a stopped client has under way; a request has as long."""


class _Returned(NamedTuple):
    """A record that a stopped client gave back; ``number``: of the call that took it; ``queued_at``: by that client
    (``time.monotonic``)."""

    number: int
    record: Record
    report: DeliveryReport
    error: KafkaError
    message: Message
    queued_at: float

    @property
    def is_refused(self) -> bool:
        return self.error.code() == KafkaError.MSG_SIZE_TOO_LARGE

    def may_be_there(self, failed_at: float) -> bool:
        """Check whether a request with it may have been lost with a connection, one of which failed then. A record has
        a partition when a broker has answered."""
        is_waiting = self.error.code() == KafkaError._PURGE_QUEUE and self.destination[1] not in (None, -1)
        return is_waiting and self.queued_at < failed_at + _SAME_ERROR_SECONDS

    @property
    def destination(self) -> tuple[str, int | None]:
        return self.record.topic, self.message.partition()

    @property
    def size(self) -> int:
        return len(self.record.key or b"") + len(self.record.value or b"")  # and not less, so that half is less


class PlainProducer:
    """Sends records, and reports each of them once: when all in-sync replicas have it, or when it has failed for good.

    Threads: ``produce`` is for one thread (the loop's, it never blocks), ``poll`` for another one; they may overlap.
    ``close`` may be called by any thread.
    """

    def __init__(self, settings: ClientSettings, *, delivery_timeout_ms: int) -> None:
        """Building takes some 1 to 60 ms and holds the GIL (longer with slow TLS): not for an event loop's thread.
        ``poll`` does it once more after a refusal.

        ``delivery_timeout_ms``: how long a record is tried.
        """
        self.is_broken = False
        """Whether the producer takes no records any more (a fatal error of librdkafka): another one is needed."""
        self._is_dead = False  # the same, as ``poll`` learns it
        self._is_ending = False
        self._may_write_nowhere = False
        self._settings = settings
        self._timeout_ms = delivery_timeout_ms
        self._connection = ConnectionLog(settings.bootstrap_servers, f"{settings.client_id}.plain")
        self._reports: list[Acknowledgement] = []
        self._batch_bytes: int | None = None  # that of the settings
        self._stopped_at: float | None = None  # of the client, by a refusal
        self.numbers = itertools.count()
        """Of the records: a thread takes one before each call."""
        self._returned: list[_Returned] = []
        self._again: deque[_Returned] = deque()
        self._swapping = threading.Lock()  # ``close`` on another thread must not be undone by a change of the client
        self._producer: Producer | None = self._build()
        self._produce: Callable[..., None] = self._producer.produce
        self._poll: Callable[..., int] = self._producer.poll

    def _build(self) -> Producer:
        settings = self._settings.plain_producer(self._timeout_ms, batch_bytes=self._batch_bytes)
        return build(Producer, settings, self._connection)

    def produce(self, record: Record, token: object) -> bool:
        """Queue a record for sending; never blocks. The partition is the key's (murmur2) if the record names none.

        ``False``: the local queue is full and the record was not taken; try again after ``poll``. Raises
        ``RecordRefused`` if the client itself will not take it (too large, also for an empty queue; no such partition),
        and ``BrokerUnavailable`` if it takes none any more (``is_broken``).
        """
        return self.produce_reported(record, partial(self._reported, token, record, next(self.numbers)))

    def produce_reported(self, record: Record, report: DeliveryReport, *, is_second: bool = False) -> bool:
        """Queue a record as ``produce`` does; ``report`` is called by ``poll``, with the error or ``None``. With an
        error it asks ``takes_back`` first."""
        try:
            _hand_over(self._produce, record, report)
        except BufferError:
            if self.unreported:
                return False
            if not is_second:  # what was in the way may have gone just now, by the ``poll`` of another thread
                return self.produce_reported(record, report, is_second=True)
            text = f"{record.topic}: a record larger than queue.buffering.max.kbytes of its producer"
            raise RecordRefused(text) from None
        except KafkaException as exception:
            error = error_of(exception)
            if error.code() == KafkaError._FATAL and not self._is_dead:
                return False  # why it has stopped is what ``poll`` learns next
            partition = -1 if record.partition is None else record.partition
            raise self.failure(record.topic, partition, error) from None
        return True

    def takes_back(
        self, number: int, record: Record, report: DeliveryReport, error: KafkaError, message: Message
    ) -> bool:
        """Check whether a record with an error is sent again, in the order of the numbers: then ``report`` is called
        once more. To be called by the report."""
        if self._stopped_at is None or error.code() not in _SENT_AGAIN:
            return False
        age = message.latency()
        queued_at = float("-inf") if age is None else time.monotonic() - age
        self._returned.append(_Returned(number, record, report, error, message, queued_at))
        return True

    @property
    def unreported(self) -> int:
        """The number of records that are not reported yet; one more while ``poll`` changes the client."""
        if self._producer is None:
            return 0
        return len(self._producer) + len(self._returned) + len(self._again) + (self._stopped_at is not None)

    def purge(self) -> None:
        """Give up all records: those that are not reported yet have failed, and are reported by ``poll``."""
        # Before the purge, which reports records with errors: none of them may be taken back to be sent again.
        self._is_ending, self._stopped_at = True, None
        if self._producer is not None:
            self._producer.purge()
        left, self._returned, self._again = [*self._returned, *self._again], [], deque()
        for one in left:
            one.report(KafkaError(KafkaError._PURGE_QUEUE), one.message)

    def poll(self, timeout_seconds: float) -> list[Acknowledgement]:
        """Wait for reports, for up to this long, and return those that there are. Blocks."""
        try:
            self._poll(timeout_seconds)
        except KafkaException as exception:  # a fatal error; the records that are purged by it are reported next
            self._on_fatal(error_of(exception))
        if self._stopped_at is not None:
            self._start_again(self._stopped_at)
        elif self._again:
            self._send_again()
        reports, self._reports = self._reports, []
        return reports

    def close(self) -> None:
        """Drop the producer: never raises, never flushes, never blocks. What is not reported yet will not be."""
        with self._swapping:
            producer, self._producer = self._producer, None
            self._produce = self._poll = _closed
        if producer is not None:
            _drop([producer], self._connection.client)

    # -- after a refusal -----------------------------------------------------------------------------------------------

    def _on_fatal(self, error: KafkaError) -> None:
        if error.code() != KafkaError._GAPLESS_GUARANTEE:
            self._may_write_nowhere |= error.code() == KafkaError.CLUSTER_AUTHORIZATION_FAILED
            self._is_dead = True
            self.is_broken |= bool(self._again)  # no call of ``produce`` would find out
        elif not self._is_ending:
            self._stopped_at = time.monotonic()
            with self._swapping:
                if self._producer is not None:
                    # Until all that comes back is sent again: a record that is taken in between would overtake it.
                    self._produce = _no_room

    def _start_again(self, stopped_at: float) -> None:
        """Go on with another client, once all that the stopped one had under way is answered."""
        old = self._producer
        if old is None:
            return
        if len(old):  # a request that was ready is answered, and its records are queued again
            old.purge(in_flight=time.monotonic() > stopped_at + _SETTLE_SECONDS)
            return
        batches: dict[tuple[str, int | None], list[_Returned]] = defaultdict(list)
        for one in self._returned:
            if one.is_refused:  # of a partition that is one batch: nothing was sent behind it
                batches[one.destination].append(one)
        for (topic, partition), batch in batches.items():
            if len(batch) > 1:
                self._shrink(f"{topic}[{partition}]", len(batch), sum(one.size for one in batch))
        new = self._build()
        with self._swapping:
            if self._producer is None:  # closed meanwhile
                return
            self._producer, self._poll = new, new.poll  # ``produce`` has no room yet: first comes what came back
        _drop([old], self._connection.client)
        del old
        # By number: a request that was ready comes back later than what was queued behind it.
        returned, self._returned, self._stopped_at = sorted(self._returned, key=attrgetter("number")), [], None
        # What waits for another partition may be there, if its connection was lost: only the old client could tell.
        failed_at = self._connection.failed_at
        waiting, self._again = self._again, deque()
        for one in returned:
            if one.is_refused and len(batches[one.destination]) == 1:  # alone in its batch: it is at fault itself
                one.report(one.error, one.message)
            elif one.destination not in batches and one.may_be_there(failed_at):
                one.report(KafkaError(KafkaError._PURGE_INFLIGHT, "while another batch was refused"), one.message)
            else:
                self._again.append(one)
        self._again += waiting  # the old client did not get to these
        self._send_again()

    def _shrink(self, where: str, count: int, size: int) -> None:
        self._batch_bytes = max(min(self._batch_bytes or size, size // 2), 1)  # without headers it may be nothing
        _log.warning(
            "%s: Kafka refuses a batch of %d records with %d bytes: max.message.bytes of the topic is smaller. They "
            "are sent again, in order, in batches of at most %d bytes; message.max.bytes in client_settings sets the "
            "topic's limit from the start",
            *(where, count, size, self._batch_bytes),
        )

    def _send_again(self) -> None:
        """Hand over what came back. Until all of it is taken, ``produce`` has no room for other records."""
        producer = self._producer
        while producer is not None and self._again:
            one = self._again[0]
            try:
                _hand_over(producer.produce, one.record, one.report)
            except BufferError:
                return
            except KafkaException as exception:
                error = error_of(exception)
                if error.code() == KafkaError._FATAL:
                    self.is_broken |= self._is_dead
                    return
                self._again.popleft().report(error, one.message)
            else:
                self._again.popleft()
        with self._swapping:
            if producer is not None and self._producer is producer:
                self._produce = producer.produce

    def _reported(self, token: object, record: Record, number: int, error: KafkaError | None, message: Message) -> None:
        """Collect a delivery report: called by ``poll``, on its thread."""
        partition, offset = message.partition(), message.offset()
        partition = -1 if partition is None else partition
        if error is None:
            self._connection.on_answer()
            self._reports.append(Acknowledgement(token, partition, -1 if offset is None else offset, None))
            return
        if self.takes_back(number, record, partial(self._reported, token, record, number), error, message):
            return
        self._reports.append(Acknowledgement(token, partition, -1, self.failure(record.topic, partition, error)))

    def failure(self, topic: str, partition: int, error: KafkaError) -> StreamsError:
        """Translate the error of a record: ``RecordRefused``, or ``BrokerUnavailable`` where it may be there or not."""
        where = topic if partition < 0 else f"{topic}[{partition}]"
        if self._may_write_nowhere and error.code() == KafkaError._PURGE_QUEUE:
            # Without the right to write to any topic at all a producer gets no id, and nothing is sent.
            self.is_broken, error = True, KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
        if (
            error.code() in REFUSED or error.code() in NO_SUCH_TOPIC
        ):  # no transaction waits here: the item has its policy
            rights = [permissions.on_topic("Write", topic)]
            why = denied(error.name(), rights) if error.code() in NOT_AUTHORIZED else f"{error.name()}: {error.str()}"
            return RecordRefused(f"{where}: {why}")
        if error.fatal() or error.code() == KafkaError._FATAL:
            self.is_broken = True
        reason = f"; {self._connection.reason}" if self._connection.down else ""
        # A record gets its partition from a broker that has answered.
        outcome = "it was not sent" if partition < 0 else "it may be there or not"
        return BrokerUnavailable(
            f"{where}: not acknowledged by Kafka at {self._connection.addresses} within "
            f"{self._timeout_ms / 1000:g} s ({error.name()}: {error.str()}{reason}); {outcome}"
        )


def _hand_over(produce: Callable[..., None], record: Record, report: DeliveryReport) -> None:
    partition = -1 if record.partition is None else record.partition
    timestamp = 0 if record.timestamp_ms is None else record.timestamp_ms
    headers = record.headers
    if headers is not None and type(headers) is not list:
        headers = [*headers]  # the client takes nothing but lists
    produce(record.topic, record.value, record.key, partition, report, None, timestamp, headers)


def _no_room(*_arguments: object) -> NoReturn:
    raise BufferError


def _closed(*_arguments: object) -> NoReturn:
    raise Stopped("the producer is closed")


def _drop(last_reference: list[Producer], client: str) -> None:
    """Let go of a client on a thread: its end may block."""
    threading.Thread(target=_discard, args=(last_reference,), name=f"close {client}", daemon=True).start()


def _discard(last_reference: list[Producer]) -> None:
    with contextlib.suppress(Exception):
        last_reference.clear()
