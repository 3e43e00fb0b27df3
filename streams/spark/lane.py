"""The lane write: rows and a marker in one Kafka transaction, exactly once per request.

``docs/internals/spark-protocol.md`` has the steps, and why each is right. Reading the marker before the fence (a new
producer's ``init_transactions``), committing it in a transaction of its own, or keeping the producer from round to
round, would break this.

When ``write_lane`` returns, the transaction is committed. Readers of committed records see the rows in all partitions a
few milliseconds later; ``settle`` waits for that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Self

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from streams.clients.translate import BLOCKED, FENCED, NO_SUCH_TOPIC, NOT_AUTHORIZED, REFUSED, UNDECIDED
from streams.errors import BrokerUnavailable, ConfigError, RecordRefused, StreamsError, TransactionFailed
from streams.spark.kafka import TIMEOUT_SECONDS, client, partition_count, translated
from streams.spark.marker_log import MarkerLog
from streams.spark.markers import Request, Stored, Written, inherited, left_behind
from streams.spark.sending import Sender
from streams.spark.write_options import SinkOptions

_ROUNDS: Final = 3

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Lane:
    """The target of a write: one transactional id and the marker of the same name (offset of partition 0 of
    ``marker_topic``)."""

    identity: str
    marker_topic: str
    topic: str | None
    """The topic of all rows; ``None``: every row names its own."""
    kafka: dict[str, str] = field(repr=False)
    marker_log: str | None = None
    """A compacted topic that keeps the marker, too."""
    former: str | None = None
    """The identity that versions before this one gave the lane, whose marker is taken over."""

    @classmethod
    def of(cls, identity: str, options: SinkOptions, *, former: str | None = None) -> Self:
        """The lane of this identity, where the options of a write say."""
        return cls(
            identity=identity,
            former=former,
            marker_topic=options.marker_topic,
            topic=options.topic,
            kafka=options.kafka,
            marker_log=options.marker_log,
        )

    def as_former(self) -> Lane | None:
        """The same lane as versions before this one know it."""
        return None if self.former is None else dataclasses.replace(self, identity=self.former, former=None)


def write_lane(
    lane: Lane,
    request: Request,
    batches: Callable[[], Iterable[Any]],
    *,
    size: int,
    last_step: Callable[[Producer], None] = lambda _: None,
) -> tuple[Written, bool]:
    """Write ``batches()`` (Arrow; ``size`` bytes as staged) unless the marker says that they are written. Blocks.

    Returns what is in the lane now, and whether this call wrote it. Raises what ``request`` refuses with, and
    ``TopicError``, ``RecordRefused``, ``BrokerUnavailable``, or ``TransactionFailed`` (``"fenced"``: another writer
    took the lane over, or the transaction outlived its timeout). After an error nothing is visible, or all; ask again.

    ``last_step`` is called before each commit, in the open transaction, with its producer: for offsets of other groups,
    and last looks. What it raises ends the transaction, and nothing is written.
    """
    failure: StreamsError | None = None
    for attempt in range(_ROUNDS + 1):
        with _group_of(lane) as group, _fenced_producer(lane, group, request, size) as producer:
            stored = _marker(group, lane, request) or _taken_over(lane, request)
            if (found := request.written(stored)) is not None:
                return found, attempt > 0
            if attempt == _ROUNDS:
                break
            if attempt:
                _log.warning("%s: trying again after: %s", request, failure)
            try:
                marker = request.marker(stored, int(time.time() * 1000))
                _transaction(producer, group, lane, request, marker, batches(), last_step)
                if (done := request.written(marker)) is not None:
                    return done, True
            except KafkaException as error:
                failure = _translated(error, lane, request)
                if not isinstance(failure, TransactionFailed) or failure.kind == "fenced":
                    raise failure from error
    raise failure or TransactionFailed(
        "commit_transaction", "MARKER_MISSING", "unknown", "committed, but no marker is found"
    )


def settle(lane: Lane, doing: object) -> None:
    """Wait until what was committed is visible to readers of committed records in every partition."""
    with _group_of(lane) as group, _fenced_producer(lane, group, doing, 0):
        pass


@contextlib.contextmanager
def _fenced_producer(lane: Lane, group: Consumer, doing: object, size: int) -> Iterator[Producer]:
    """A new producer after ``init_transactions``; what is open when the block ends is aborted."""
    partition_count(group, lane.marker_topic, str(doing), lane.kafka)  # a producer's own question would create it
    # An open transaction hides everything behind it from readers of committed records, until its timeout when no client
    # comes back for it. So: as short as the rows allow (a minute, and a second more for each MiB), a quarter hour at
    # most.
    timeout_ms = lane.kafka.get("transaction.timeout.ms", min(60_000 + 1000 * (size >> 20), 900_000))
    settings: dict[str, Any] = {
        "transaction.timeout.ms": timeout_ms,
        "message.timeout.ms": timeout_ms,  # rows that wait behind others on a slow line are not late before it is
        "linger.ms": 20,
        "reconnect.backoff.ms": 5,
        "compression.type": "lz4",
        "queue.buffering.max.messages": 100_000,
        "queue.buffering.max.kbytes": 131_072,
        **lane.kafka,
        "transactional.id": lane.identity,
        "partitioner": "murmur2_random",
    }
    producer: Producer = client(Producer, settings)
    try:
        # librdkafka leaves its first connection when it learns the broker's number; a question for the coordinator that
        # meets this is repeated half a second later (a third of all new producers). After two answers it is connected.
        for _ in range(2):
            producer.list_topics(lane.marker_topic, TIMEOUT_SECONDS)
        producer.init_transactions(TIMEOUT_SECONDS * 2)
    except KafkaException as error:
        raise translated(error, f"init_transactions for {doing}", lane.kafka) from error
    try:
        yield producer
    finally:
        with contextlib.suppress(KafkaException):
            producer.purge()
        with contextlib.suppress(KafkaException):
            producer.abort_transaction(TIMEOUT_SECONDS)


def _transaction(
    producer: Producer,
    group: Consumer,
    lane: Lane,
    request: Request,
    marker: Stored,
    batches: Iterable[Any],
    last_step: Callable[[Producer], None],
) -> None:
    sender = Sender(producer, group, lane.topic, lane.kafka, str(request))
    producer.begin_transaction()
    sent = sum(sender.send(batch) for batch in batches)
    if request.rows is not None and sent != request.rows:
        raise StreamsError(f"{request}: {request.rows} rows were staged, {sent} were found; nothing was written")
    _put_marker(producer, group, lane, request, marker)
    last_step(producer)
    producer.commit_transaction()  # it waits for the rows, for as long as the transaction may last


class _Former:
    """The marker under the lane's former name, behind a fence of its own, which lasts as long as ``stack``.

    A writer under that name is not fenced by this lane's transactional id. So the marker is not just read:
    ``leave``, before the first transaction under the new name, puts one in its place that every query is refused by
    (``markers.left_behind``). Until then nothing has changed. After it, and until that transaction is committed,
    ``marker`` still gives what was there.
    """

    def __init__(self, stack: contextlib.ExitStack, lane: Lane, doing: object) -> None:
        former = lane.as_former()
        self._identity = lane.identity
        self._held = None if former is None else stack.enter_context(hold(former, doing))
        self._found = None if self._held is None else self._held.marker()
        self.marker = None if self._found is None else inherited(self._found, lane.identity)

    def leave(self) -> None:
        """Raises ``TransactionFailed`` when another writer has taken the former name over since."""
        if self._held is not None and self._found is not None:
            self._held.put(left_behind(self._found, self._identity))


def _taken_over(lane: Lane, request: Request) -> Stored | None:
    """The marker under the lane's former name, by which no client can write any more. Raises what ``request`` refuses
    with: then nothing has changed."""
    with contextlib.ExitStack() as stack:
        former = _Former(stack, lane, request)
        if former.marker is not None and request.written(former.marker) is None:
            former.leave()
        return former.marker


@dataclass
class Held:
    """A lane behind a fence of one's own: its marker, read and put without rows. Made by ``hold``."""

    _lane: Lane
    _doing: object
    _producer: Producer
    _group: Consumer
    _stack: contextlib.ExitStack
    _former: _Former | None = None

    def marker(self) -> Stored | None:
        """Return the marker that was committed before the fence, under the lane's former name if need be."""
        stored = _marker(self._group, self._lane, self._doing)
        if stored is None:
            self._former = _Former(self._stack, self._lane, self._doing)
            return self._former.marker
        return stored

    def put(self, marker: Stored) -> None:
        """Commit a marker, alone. Once. Raises ``TransactionFailed`` when another writer has fenced this one since."""
        if self._former is not None:
            self._former.leave()
        try:
            self._producer.begin_transaction()
            _put_marker(self._producer, self._group, self._lane, self._doing, marker)
            self._producer.commit_transaction(TIMEOUT_SECONDS)
        except KafkaException as error:
            raise _translated(error, self._lane, self._doing) from error


@contextlib.contextmanager
def hold(lane: Lane, doing: object) -> Iterator[Held]:
    """Fence other writers of the lane, before the block begins."""
    with (
        _group_of(lane) as group,
        _fenced_producer(lane, group, doing, 0) as producer,
        contextlib.ExitStack() as stack,
    ):
        yield Held(lane, doing, producer, group, stack)


def look(lane: Lane, doing: object, *, needs_topic: bool = False) -> Stored | None:
    """The marker as it is now. Only a look, which disturbs no writer: a run that is about to commit may not show yet,
    and a killed run's open transaction is passed over (it would be undecided until its timeout). ``needs_topic``: raise
    ``TopicError`` where the marker's topic does not exist."""
    with _group_of(lane, isolation="read_uncommitted") as group:
        if needs_topic:
            partition_count(group, lane.marker_topic, str(doing), lane.kafka)
        stored = _read_offset(group, lane, doing)
    former = lane.as_former() if stored is None else None
    before = None if former is None else look(former, doing)
    return stored if before is None else inherited(before, lane.identity)


@contextlib.contextmanager
def _group_of(lane: Lane, isolation: str = "read_committed") -> Iterator[Consumer]:
    """A consumer for the offsets of the lane's group. It never joins: the group has no members.

    ``read_committed``, for offsets, means that one that is being decided is waited for.

    By a consumer, not by the admin client: its request for a group's offsets takes the process down (librdkafka 2.16)
    when the group's coordinator is only just coming up.
    """
    settings = {
        "group.id": lane.identity,
        "enable.auto.commit": False,
        "isolation.level": isolation,
        "reconnect.backoff.ms": 5,
    }
    consumer: Consumer = client(Consumer, lane.kafka, settings)
    try:
        yield consumer
    finally:
        consumer.close()


def _marker(group: Consumer, lane: Lane, doing: object) -> Stored | None:
    """Behind the fence."""
    stored = _read_offset(group, lane, doing)
    if stored is None and lane.marker_log is not None:
        return MarkerLog(lane.marker_log, lane.identity, lane.kafka, doing).read()
    return stored


def _put_marker(producer: Producer, group: Consumer, lane: Lane, doing: object, marker: Stored) -> None:
    """Into the open transaction."""
    if lane.marker_log is not None:
        MarkerLog(lane.marker_log, lane.identity, lane.kafka, doing).write(producer, group, marker)
    offset = TopicPartition(lane.marker_topic, 0, marker.offset, marker.metadata)
    producer.send_offsets_to_transaction([offset], group.consumer_group_metadata(), TIMEOUT_SECONDS)


def _read_offset(group: Consumer, lane: Lane, doing: object) -> Stored | None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while True:
        found, error = _committed(group, TopicPartition(lane.marker_topic, 0))
        if error is None:
            return found
        if error.code() == KafkaError.GROUP_ID_NOT_FOUND:
            return None
        if error.code() not in UNDECIDED or time.monotonic() > deadline:
            raise translated(KafkaException(error), f"{doing}: reading the marker", lane.kafka)
        time.sleep(0.05)


def _committed(consumer: Consumer, place: TopicPartition) -> tuple[Stored | None, KafkaError | None]:
    """The offset committed there, if any, or what the broker said instead."""
    try:
        (found,) = consumer.committed([place], timeout=TIMEOUT_SECONDS)
    except KafkaException as error:
        return None, error.args[0]
    if found.error is not None:
        return None, found.error
    return (Stored(found.offset, found.metadata or "") if found.offset >= 0 else None), None


def _translated(error: KafkaException, lane: Lane, doing: object) -> StreamsError:
    reason: KafkaError = error.args[0]
    if reason.code() in FENCED:
        return TransactionFailed(
            "commit_transaction", reason.name(), "fenced",
            f"{doing}: another run under this name took over (one of the two is too many: stop it), or the transaction "
            "outlived kafka.transaction.timeout.ms (run it again)",
        )  # fmt: skip
    if reason.code() == KafkaError._TIMED_OUT:
        return BrokerUnavailable(
            f"{doing}: not committed in time ({reason.str()}): the broker is away, the line too slow for a batch of "
            "this size, or this process stood still. Run it again. On a slow line: smaller batches "
            "(maxOffsetsPerTrigger), or a longer kafka.transaction.timeout.ms"
        )
    if reason.code() in (REFUSED | BLOCKED.keys()) - NO_SUCH_TOPIC:
        return RecordRefused(
            f"{doing}: the broker refuses a record ({reason.name()}: {reason.str()}); nothing was written"
        )
    if reason.code() in NOT_AUTHORIZED or reason.code() == KafkaError.OFFSET_METADATA_TOO_LARGE:
        return ConfigError(
            f"{doing}: the broker refuses it ({reason.name()}: {reason.str()}): check the permissions of "
            f"{lane.identity} as transactional id and as group; nothing was written"
        )
    return translated(error, str(doing), lane.kafka)
