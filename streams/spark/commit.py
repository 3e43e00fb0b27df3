"""The driver's side of a write: every row and a marker in one Kafka transaction, once for each ``writeId``.

    1. a new producer, ``init_transactions``: whoever held the transactional id before is fenced from here on, and
       what it left open is decided and settled;
    2. only then read the marker (an offset of a group that exists for this write alone);
    3. marker there: the write is done, by this run or an earlier one, stop;
    4. else send all rows, send the marker with them, commit; whatever comes out of that, go to 1.

Two runs that both commit cannot be: the second one's step 1 waits until the first one's transaction is decided, and
the marker, which was committed with the rows, is there in its step 2. A run that died leaves nothing visible, or rows
and marker. A commit without a clear answer is answered by steps 1 and 2 of the next round, and so is a good one: when
``commit_once`` returns, the rows are visible to readers of committed records in every partition. Reading the marker
before step 1, or keeping the producer from round to round, would break this.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from streams.errors import RecordRefused, StreamsError, TransactionFailed
from streams.records import TYPE_HEADER, VERSION_HEADER
from streams.spark.kafka import TIMEOUT_SECONDS, client, partitions_of, translated
from streams.spark.write_options import WriteOptions

_ROUNDS: Final = 3
_FENCED = (KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH)
_REFUSED = (KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_RECORD, KafkaError.TOPIC_AUTHORIZATION_FAILED)

_UNDECIDED: Final = (
    KafkaError.UNSTABLE_OFFSET_COMMIT,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteResult:
    """How a write ended: ``written`` by this run, or (``False``) by an earlier one with the same id; ``rows`` of the
    one that did."""

    write_id: str
    rows: int
    written: bool
    committed_at_ms: int


class _Marker(msgspec.Struct):
    """The metadata of the marker's offset."""

    run: str
    rows: int
    at_ms: int


def identity(options: WriteOptions) -> str:
    """Transactional id and marker group of a write. The topic is in it: one id for two topics is two writes."""
    return f"kes.spark.{options.topic or '*'}.{options.write_id}"


def find_write(options: WriteOptions) -> WriteResult | None:
    """The committed write of this id, or ``None``. Only a look: a run that is about to commit may not show yet."""
    found = _read_marker(options, wait=False)
    return None if found is None else _result(options, found, options.run_id)


def commit_once(
    options: WriteOptions, run: str, *, rows: int, size: int, batches: Callable[[], Iterable[Any]]
) -> WriteResult:
    """Write ``batches()`` (Arrow, ``rows`` rows, ``size`` bytes as staged) unless this id is written. Blocks; driver
    only.

    Raises ``TopicError``, ``RecordRefused``, ``BrokerUnavailable``, or ``TransactionFailed`` (``"fenced"``: another
    run with the same id took over, or the transaction outlived its timeout). After an error nothing is visible, or
    all: run it again.
    """
    failure: StreamsError | None = None
    for attempt in range(_ROUNDS + 1):
        with _fenced_producer(options, size) as producer:
            if (marker := _read_marker(options, wait=True)) is not None:
                return _result(options, marker, run)
            if attempt == _ROUNDS:
                break
            if attempt:
                _log.warning("write %r: trying again after: %s", options.write_id, failure)
            try:
                _transaction(producer, options, _Marker(run, rows, 0), batches())
            except KafkaException as error:
                failure = _translated(error, options)
                if not isinstance(failure, TransactionFailed) or failure.kind == "fenced":
                    raise failure from error
    raise failure or TransactionFailed(
        "commit_transaction", "MARKER_MISSING", "unknown", "committed, but no marker is found"
    )


@contextlib.contextmanager
def _fenced_producer(options: WriteOptions, size: int) -> Iterator[Producer]:
    """A new producer after ``init_transactions``; what is open when the block ends is aborted."""
    # An open transaction hides everything behind it from readers of committed records, until its timeout when nobody
    # comes back for it. So: as short as the rows allow (a minute, and a second more for each MiB), a quarter hour at
    # most.
    timeout_ms = min(60_000 + 1000 * (size >> 20), 900_000)
    settings: dict[str, Any] = {
        "transaction.timeout.ms": timeout_ms,
        "linger.ms": 20,
        "compression.type": "lz4",
        "queue.buffering.max.messages": 100_000,
        "queue.buffering.max.kbytes": 131_072,
        **options.kafka,
        "transactional.id": identity(options),
        "partitioner": "murmur2_random",
    }
    producer: Producer = client(Producer, settings)
    try:
        producer.init_transactions(TIMEOUT_SECONDS * 2)
    except KafkaException as error:
        raise translated(error, f"init_transactions for writeId {options.write_id!r}", options.kafka) from error
    try:
        yield producer
    finally:
        with contextlib.suppress(KafkaException):
            producer.purge()
        with contextlib.suppress(KafkaException):
            producer.abort_transaction(TIMEOUT_SECONDS)


def _transaction(producer: Producer, options: WriteOptions, marker: _Marker, batches: Iterable[Any]) -> None:
    partitions_of_topics = _Partitions(options)
    partitions_of_topics.check(options.marker_topic)
    producer.begin_transaction()
    sent = 0
    for batch in batches:
        sent += _send(producer, batch, options, partitions_of_topics)
    if sent != marker.rows:
        raise StreamsError(
            f"write {options.write_id!r}: {marker.rows} rows were staged, {sent} were found; nothing was written"
        )
    metadata = msgspec.json.encode(_Marker(marker.run, marker.rows, int(time.time() * 1000))).decode()
    # A group nobody is a member of; confluent-kafka makes its metadata through a consumer only.
    consumer = client(Consumer, options.kafka, {"group.id": identity(options), "enable.auto.commit": False})
    try:
        offset = TopicPartition(options.marker_topic, 0, 1, metadata)
        producer.send_offsets_to_transaction([offset], consumer.consumer_group_metadata(), TIMEOUT_SECONDS)
        producer.commit_transaction(max(TIMEOUT_SECONDS, 60.0))
    finally:
        consumer.close()


def _send(producer: Producer, batch: Any, options: WriteOptions, partitions: _Partitions) -> int:
    """Hand one Arrow batch to the client. No callback per row: a record that fails makes the commit fail."""
    columns = {name: batch.column(name).to_pylist() for name in batch.schema.names if name != "timestamp"}
    nothing = itertools.repeat(None)
    names = ("topic", "key", "value", "type", "version", "headers", "partition")
    stamps = _milliseconds(batch) if "timestamp" in batch.schema.names else nothing
    known_headers: dict[tuple[Any, Any], list[tuple[str, bytes]]] = {}
    rows = zip(*(columns.get(name, nothing) for name in names), stamps, range(batch.num_rows), strict=False)
    for topic, key, value, kind, version, headers, partition, stamp, _ in rows:
        topic = options.topic or topic
        if topic is None:
            raise RecordRefused(f"write {options.write_id!r}: a row has null in its column topic; nothing was written")
        partitions.check(topic, partition)
        ours = known_headers.get((kind, version))
        if ours is None:
            ours = known_headers[kind, version] = _type_headers(kind, version)
        extra: dict[str, Any] = {}
        if partition is not None:
            extra["partition"] = partition
        if stamp is not None:
            extra["timestamp"] = stamp
        record_headers: Any = _merged(headers, ours) if headers else ours
        while True:
            try:
                producer.produce(topic, value, key, headers=record_headers, **extra)
                break
            except BufferError:
                producer.poll(0.05)
    producer.poll(0)
    return int(batch.num_rows)


def _milliseconds(batch: Any) -> list[int | None]:
    micros = batch.column("timestamp").cast("int64").to_pylist()
    return [None if value is None else value // 1000 for value in micros]


def _type_headers(kind: str | None, version: int | None) -> list[tuple[str, bytes]]:
    if kind is None:
        return []
    headers = [(TYPE_HEADER, kind.encode())]
    if version is not None and version > 1:
        headers.append((VERSION_HEADER, b"%d" % version))
    return headers


def _merged(headers: list[dict[str, Any]], ours: list[tuple[str, bytes]]) -> list[tuple[str, bytes | None]]:
    """The row's own headers; its columns ``type`` and ``version`` win over headers of the same meaning."""
    replaced = {TYPE_HEADER, VERSION_HEADER} if ours else set()
    return [*ours, *((each["key"], each["value"]) for each in headers if each["key"] not in replaced)]


class _Partitions:
    """Topics and partitions that exist, asked for once each: a produce to a missing one would wait for its whole
    timeout."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options
        self._known: dict[str, int] = {}

    def check(self, topic: str, partition: int | None = None) -> None:
        count = self._known.get(topic)
        if count is None:
            admin = client(AdminClient, self._options.kafka)
            count = self._known[topic] = partitions_of(admin, [topic], self._options.kafka)[topic]
        if partition is not None and not 0 <= partition < count:
            raise RecordRefused(
                f"write {self._options.write_id!r}: a row names partition {partition} of {topic!r}, which has "
                f"{count}; drop the "
                "column partition to let the key decide. Nothing was written"
            )


def _read_marker(options: WriteOptions, *, wait: bool) -> _Marker | None:
    """The marker, when it is committed; with ``wait``, not before one that is being decided is decided.

    Without ``wait`` a killed run's open transaction is passed over: it would be undecided until its timeout, or until
    this run comes to its fence.

    By a consumer, not by the admin client: its request for a group's offsets takes the process down (librdkafka 2.16)
    when the group's coordinator is only just coming up.
    """
    isolation = "read_committed" if wait else "read_uncommitted"  # for offsets: only stable ones, or the last committed
    settings = {"group.id": identity(options), "enable.auto.commit": False, "isolation.level": isolation}
    consumer = client(Consumer, options.kafka, settings)
    deadline = time.monotonic() + TIMEOUT_SECONDS
    try:
        while True:
            found, error = _committed(consumer, TopicPartition(options.marker_topic, 0))
            if error is None:
                return None if found is None else msgspec.json.decode(found, type=_Marker)
            if error.code() == KafkaError.GROUP_ID_NOT_FOUND:
                return None
            if error.code() not in _UNDECIDED or time.monotonic() > deadline:
                doing = f"reading the marker of writeId {options.write_id!r}"
                raise translated(KafkaException(error), doing, options.kafka)
            time.sleep(0.05)
    finally:
        consumer.close()


def _committed(consumer: Consumer, place: TopicPartition) -> tuple[str | None, KafkaError | None]:
    """Metadata of the offset committed there, if any, or what the broker said instead."""
    try:
        (found,) = consumer.committed([place], timeout=TIMEOUT_SECONDS)
    except KafkaException as error:
        return None, error.args[0]
    if found.error is not None:
        return None, found.error
    return (found.metadata or "{}" if found.offset >= 0 else None), None


def _result(options: WriteOptions, marker: _Marker, run: str | None) -> WriteResult:
    return WriteResult(
        write_id=options.write_id, rows=marker.rows, written=marker.run == run, committed_at_ms=marker.at_ms
    )


def _translated(error: KafkaException, options: WriteOptions) -> StreamsError:
    reason: KafkaError = error.args[0]
    doing = f"write {options.write_id!r}"
    if reason.code() in _FENCED:
        return TransactionFailed(
            "commit_transaction", reason.name(), "fenced",
            f"{doing}: another run with this writeId took over, or the transaction outlived "
            "kafka.transaction.timeout.ms; "
            "run it again",
        )  # fmt: skip
    if reason.code() in _REFUSED:
        return RecordRefused(
            f"{doing}: the broker refuses a record ({reason.name()}: {reason.str()}); nothing was written"
        )
    return translated(error, doing, options.kafka)
