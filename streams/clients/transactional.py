"""One slot of the transaction pool: a producer with a stable transactional id."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple, NoReturn

from confluent_kafka import KafkaError, KafkaException, Message, Producer, TopicPartition

from streams.clients.connection import ConnectionLog
from streams.clients.settings import ClientSettings, build
from streams.clients.translate import BLOCKED, FENCED, REFUSED, error_of, transaction_failed
from streams.errors import RecordRefused, Stopped, TransactionFailed
from streams.records import TYPE_HEADER, Change, Output, shown_key

_RETRY_PAUSE_SECONDS = 0.02
_FLUSH_SLICE_SECONDS = 0.1

WHY_FENCED = (
    "; a producer with the same transactional id was started since (a process with the same instance_id? each needs "
    "one of its own), or the broker timed the transaction out"
)


class RefusedDelivery(NamedTuple):
    """A record that is not taken.

    The broker answers to a *batch*, and every record of the batch is refused, also those that would be taken alone. So
    ``output`` names the record only where each travelled alone (``one_by_one``); else it is ``None``. ``is_own``: the
    record itself is at fault (in a batch: perhaps), and not its topic, a right or a clock.
    """

    topic: str
    partition: int
    code: str
    reason: str
    is_own: bool
    output: Output | None


class TransactionalProducer:
    """A transactional id and its producer.

    Threads: ``produce``, ``produce_many``, ``produce_changes`` and ``poll`` are for one thread (the loop's, they never
    block); ``init``, ``warm_up``, ``flush``, ``send_offsets``, ``commit`` and ``abort`` block and are for one worker
    thread; the two may overlap. ``close`` may be called by any thread, also while a call of the worker hangs.

    A call that fails raises ``TransactionFailed``, whose ``kind`` is the state that transaction and producer are left
    in. The blocking calls honour their timeouts, with one exception that nothing here can cure: ``send_offsets`` never
    returns on a producer that sent offsets before the group's coordinator was restarted (every time, Kafka 4.1.1), and
    when the group has no coordinator yet (a new cluster: join the group, or read its committed offsets, before). The
    caller needs a deadline of its own, and a new producer; one that has sent no offsets yet is fine.
    """

    def __init__(
        self,
        settings: ClientSettings,
        transactional_id: str,
        *,
        transaction_timeout_ms: int,
        one_by_one: bool = False,
    ) -> None:
        """Building takes some 1 to 60 ms and holds the GIL (longer with slow TLS): not for an event loop's thread.

        ``one_by_one``: every record travels in a batch of its own, and has a report of its own. Slow, but the only way
        to know which record is refused: the broker refuses whole batches.
        """
        self._alone = one_by_one
        self.transactional_id = transactional_id
        self.refused: list[RefusedDelivery] = []
        """Records that the broker refused in this transaction, in the order of the answers; emptied by ``begin``.
        Complete after ``flush``, ``commit`` or ``abort`` came back."""
        self._connection = ConnectionLog(settings.bootstrap_servers, transactional_id)
        self._failed: KafkaError | None = None
        config = settings.producer(transactional_id, transaction_timeout_ms, one_by_one=one_by_one)
        self._producer: Producer | None = build(
            Producer, {**config, "on_delivery": partial(self._on_failed_delivery, None)}, self._connection
        )
        self._produce: Callable[..., None] = self._producer.produce
        self._poll: Callable[..., int] = self._producer.poll

    def init(self, timeout_seconds: float) -> None:
        """Settle what an earlier producer with this id left open, and fence it. Blocks; once per object.

        A new id takes some 20 ms; a used one that left a transaction open 0.5 to 1 s (librdkafka asks every 500 ms).
        """
        try:
            self._open().init_transactions(timeout_seconds)
        except KafkaException as exception:
            raise self._failure("init_transactions", exception) from None

    def warm_up(self, topics: Collection[str], timeout_seconds: float) -> None:
        """Fetch what the first transaction would otherwise wait for: where the partitions of ``topics`` are. Blocks.

        Halves the first transaction (42 to 26 ms with 20 partitions). A topic that does not exist is no error here: its
        records fail with the kind ``blocked`` until it is there.
        """
        deadline = time.monotonic() + timeout_seconds
        for topic in topics:
            try:
                self._open().list_topics(topic, max(deadline - time.monotonic(), 0.001))
            except KafkaException as exception:
                raise self._failure("list_topics", exception) from None

    def begin(self) -> None:
        """Start a transaction. Local, some 30 us."""
        self.refused = []
        self._failed = None
        try:
            self._open().begin_transaction()
        except KafkaException as exception:
            raise self._failure("begin_transaction", exception) from None

    def produce_many(self, outputs: Sequence[Output], start: int) -> int:
        """Queue those from position ``start`` on, up to the first that is not taken, whatever the reason; its position
        is returned. Never blocks, never raises: ask ``produce`` for the reason. One by one, it takes none.

        The hot path, 0.8 us a record: one call of C each, all arguments by position, and no ``try`` inside.
        """
        if self._alone:
            return start
        produce, position = self._produce, start
        with contextlib.suppress(Exception):
            for position in range(start, len(outputs)):
                output = outputs[position]
                produce(
                    output.topic,
                    output.value,
                    output.key,
                    output.partition,
                    None,
                    None,
                    output.timestamp_ms,
                    output.headers,
                )
            return len(outputs)
        return position

    def produce_changes(self, topic: str, partition: int, changes: Sequence[Change], start: int) -> int:
        """Queue the changelog records of a partition's changes, as ``produce_many`` does outputs. The hot path, too."""
        if self._alone:
            return start
        produce, position = self._produce, start
        with contextlib.suppress(Exception):
            for position in range(start, len(changes)):
                change = changes[position]
                headers = [(TYPE_HEADER, change.type.encode())] if change.type else None
                produce(topic, change.value, change.key, partition, None, None, 0, headers)
            return len(changes)
        return position

    def produce(self, output: Output) -> bool:
        """Queue one record for sending; never blocks. The partition is the key's (murmur2) if the record names none.

        ``False``: the local queue is full and the record was not taken; try again after ``poll``. Raises
        ``RecordRefused`` if the client itself will not take it (too large, no such partition), ``TransactionFailed``
        if it cannot be sent now (kind ``blocked``: no such topic; no transaction, fenced), and ``TypeError``,
        ``ValueError`` or ``OverflowError`` where a part of the record is of a wrong type.
        """
        report = partial(self._on_failed_delivery, output) if self._alone else None
        try:
            self._produce(
                output.topic,
                output.value,
                output.key,
                output.partition,
                report,
                None,
                output.timestamp_ms,
                output.headers,
            )
        except BufferError:
            return False
        except KafkaException as exception:
            raise self._refusal(output, error_of(exception)) from None
        return True

    def poll(self) -> None:
        """Serve callbacks; never blocks. Frees the places of acknowledged records in the local queue."""
        with contextlib.suppress(KafkaException, SystemError):  # a fatal error: the next blocking call raises it
            self._poll(0)

    def flush(self, timeout_seconds: float) -> None:
        """Wait until every record is acknowledged. Blocks.

        Raises if a record failed. ``refused`` is filled if records (kind ``abortable``) or what they need (``blocked``)
        are at fault; else the kind is that of the failed delivery. Nothing is committed then.
        """
        try:
            left = self._flush_until_failed(timeout_seconds)
        except KafkaException as exception:
            raise self._failure("flush", exception) from None
        except SystemError as error:
            raise self._broken("flush", error) from None
        failed = self._failed
        if failed is not None:
            raise self._delivery_failure(failed)
        if left:
            reason = f"{left} records not acknowledged after {timeout_seconds:g} s"
            if self._connection.down:
                reason += f"; {self._connection.reason}"
            raise TransactionFailed("flush", "_TIMED_OUT", "unknown", self._named(reason))

    def _flush_until_failed(self, timeout_seconds: float) -> int:
        """Flush in slices: once a delivery failed, the records behind it are not sent any more, and waiting for them (4
        s measured) would be in vain."""
        producer = self._open()
        deadline = time.monotonic() + timeout_seconds
        while True:
            left: int = producer.flush(max(0.0, min(_FLUSH_SLICE_SECONDS, deadline - time.monotonic())))
            if not left or self._failed is not None or time.monotonic() >= deadline:
                return left

    def send_offsets(self, topic: str, offsets: Mapping[int, int], metadata: bytes, timeout_seconds: float) -> None:
        """Make ``offsets`` (partition: next offset) part of the transaction, fenced by the group metadata.

        Blocks, perhaps for longer than the timeout (see above). ``offsets`` must not be empty: a transaction without
        offsets is not fenced.
        """
        if not offsets:
            raise ValueError("a transaction without offsets is not fenced by the group")
        positions = [TopicPartition(topic, partition, offset) for partition, offset in offsets.items()]
        try:
            self._open().send_offsets_to_transaction(positions, metadata, timeout_seconds)
        except KafkaException as exception:
            raise self._failure("send_offsets_to_transaction", exception) from None
        except SystemError as error:
            raise self._broken("send_offsets_to_transaction", error) from None

    def commit(self, timeout_seconds: float) -> None:
        """End the transaction. Blocks. Errors that may be retried are, until the time is over (then ``unknown``)."""
        self._end("commit_transaction", timeout_seconds)

    def abort(self, timeout_seconds: float) -> None:
        """Abort the transaction. Blocks. The producer should be replaced afterwards (a gap in its sequence is left)."""
        self._end("abort_transaction", timeout_seconds)

    def close(self) -> None:
        """Drop the producer: never raises, never flushes, never blocks. A transaction is left open.

        The destructor may take long around an outage, so it runs on a thread of its own.
        """
        producer, self._producer = self._producer, None
        if producer is None:
            return
        self._produce = self._poll = _closed
        thread = threading.Thread(
            target=_discard, args=([producer],), name=f"close {self.transactional_id}", daemon=True
        )
        del producer
        thread.start()

    def _open(self) -> Producer:
        if self._producer is None:
            raise Stopped(f"producer {self.transactional_id} is closed")
        return self._producer

    def _end(self, call: str, timeout_seconds: float) -> None:
        producer = self._open()
        deadline = time.monotonic() + timeout_seconds
        while True:
            try:
                getattr(producer, call)(max(deadline - time.monotonic(), 0.001))
                return
            except KafkaException as exception:
                if not error_of(exception).retriable() or time.monotonic() + _RETRY_PAUSE_SECONDS >= deadline:
                    raise self._failure(call, exception) from None
                time.sleep(_RETRY_PAUSE_SECONDS)
            except SystemError as error:
                raise self._broken(call, error) from None

    def _on_failed_delivery(self, output: Output | None, error: KafkaError | None, message: Message) -> None:
        """Note a failed delivery; called on the thread that polls, for failed ones only. Must not raise: a commit would
        pass it on."""
        if error is None:
            return
        code = error.code()
        is_refusal = code in REFUSED or code in BLOCKED
        if is_refusal:
            partition = message.partition()
            self._refuse(error, message.topic() or "", -1 if partition is None else partition, output)
        if self._failed is None or code in FENCED or (is_refusal and self._failed.code() not in FENCED):
            self._failed = error

    def _refuse(self, error: KafkaError, topic: str, partition: int, output: Output | None) -> None:
        code = error.code()
        # A time that the handler chose is the record's own, any other the clock's.
        is_own = code in REFUSED or (code == KafkaError.INVALID_TIMESTAMP and (output is None or output.timestamp_ms))
        where = topic if partition < 0 else f"{topic}[{partition}]"
        reason = f"{where}: {error.str()}" + ("" if is_own else f": {BLOCKED[code]}")
        self.refused.append(RefusedDelivery(topic, partition, error.name(), reason, bool(is_own), output))

    def _delivery_failure(self, error: KafkaError) -> TransactionFailed:
        if self.refused and error.code() not in FENCED:
            first = next((refused for refused in self.refused if refused.is_own), self.refused[0])
            kind = "abortable" if first.is_own else "blocked"
            return TransactionFailed("flush", first.code, kind, self._named(first.reason))
        return self._failure("flush", KafkaException(error))

    def _failure(self, call: str, exception: KafkaException) -> TransactionFailed:
        failure = transaction_failed(call, exception)
        reason = error_of(exception).str()
        if failure.kind == "fenced":
            reason += WHY_FENCED
        if self._connection.down and self._connection.reason not in reason:
            reason += f"; {self._connection.reason}"
        return TransactionFailed(call, failure.code, failure.kind, self._named(reason))

    def _broken(self, call: str, error: SystemError) -> TransactionFailed:
        """A fatal error (fenced, as a rule) that met failed deliveries: confluent-kafka 2.16 leaves an exception
        pending while it calls the delivery callback, and the interpreter objects. Nothing is known about the
        outcome."""
        return TransactionFailed(call, "FATAL", "unknown", self._named(str(error.__cause__ or error)))

    def _refusal(self, output: Output, error: KafkaError) -> RecordRefused | TransactionFailed:
        if error.code() in BLOCKED:
            self._refuse(error, output.topic, output.partition, output)
            return TransactionFailed("produce", error.name(), "blocked", self._named(self.refused[-1].reason))
        if error.code() not in REFUSED:
            return self._failure("produce", KafkaException(error))
        where = output.topic if output.partition < 0 else f"{output.topic}[{output.partition}]"
        return RecordRefused(f"{where}, key {shown_key(output.key)}: {error.name()}: {error.str()}")

    def _named(self, reason: str) -> str:
        return f"{self.transactional_id}: {reason}"


def _closed(*_arguments: object) -> NoReturn:
    raise Stopped("the producer is closed")


def _discard(last_reference: list[Producer]) -> None:
    with contextlib.suppress(Exception):
        last_reference.clear()
