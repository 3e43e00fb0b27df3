"""The write of a sink: rows and a marker in one Kafka transaction, exactly once per request.

``docs/internals/spark-protocol.md`` has the steps, and why each is right. Reading the marker before the fence (a new
forwarder's ``init_transactions``), committing it in a transaction of its own, or keeping the forwarder from round to
round, would break this.

When ``write_once`` returns, the transaction is committed. Readers of committed records see the rows in all partitions a
few milliseconds later; ``settle`` waits for that.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Final, Self

from streams.errors import BrokerUnavailable, ConfigError, RecordRefused, StreamsError, TopicError, TransactionFailed
from streams.kafka.permissions import Right, is_denial, on_group, on_topic, on_transactional_id
from streams.kafka.wire.answers import PRODUCE, Meaning
from streams.kafka.wire.codes import Code
from streams.kafka.writing.made_batch import MadeBatch
from streams.spark.kafka import TIMEOUT_SECONDS, code_of, existing, identity_of, no_such_topic, topic_admin, translated
from streams.spark.options import KafkaSettings
from streams.spark.writing.marker_log import MarkerLog
from streams.spark.writing.markers import SinkRequest, Stored, Written
from streams.spark.writing.write_options import SinkOptions

if TYPE_CHECKING:
    from streams.kafka.writing.forwarding import BatchForwarder

_ROUNDS: Final = 3
_LONGEST_SECONDS: Final = 900.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class WriteTarget:
    """The target of a write: one transactional id and the marker of the same name (offset of partition 0 of
    ``marker_topic``)."""

    identity: str
    marker_topic: str
    kafka: KafkaSettings = field(repr=False)
    marker_log: str | None = None
    """A compacted topic that keeps the marker, too."""

    @classmethod
    def of(cls, identity: str, options: SinkOptions) -> Self:
        """The target of this identity, where the options of a write say."""
        return cls(
            identity=identity,
            marker_topic=options.marker_topic,
            kafka=options.kafka,
            marker_log=options.marker_log,
        )


def write_once(
    target: WriteTarget,
    request: SinkRequest,
    batches: Callable[[], Iterable[MadeBatch]],
    *,
    size: int,
    last_step: Callable[[BatchForwarder], None] = lambda _: None,
) -> tuple[Written, bool]:
    """Write ``batches()`` (``size`` bytes in all) unless the marker says that they are written. Blocks.

    Returns what is in the target now, and whether this call wrote it. Raises what ``request`` refuses with, and
    ``TopicError``, ``RecordRefused``, ``BrokerUnavailable``, or ``TransactionFailed`` (``"fenced"``: another writer
    took the target over, or the transaction outlived its timeout). After an error nothing is visible, or all; ask
    again.

    ``last_step`` is called before each commit, in the open transaction, with its forwarder: for offsets of other
    groups, and last checks. What it raises ends the transaction, and nothing is written.
    """
    failure: StreamsError | None = None
    for attempt in range(_ROUNDS + 1):
        with _fenced(target, request, size) as forwarder:
            # Behind the fence: an earlier run can commit nothing any more, so what the marker says stays true until our
            # commit.
            stored = _marker(forwarder, target, request)
            if (found := request.written(stored)) is not None:
                return found, attempt > 0
            if attempt == _ROUNDS:
                break
            if attempt:
                _log.warning("%s: trying again after: %s", request, failure)
            try:
                marker = request.marker(stored, int(time.time() * 1000))
                _transaction(forwarder, target, request, marker, batches(), last_step)
                if (done := request.written(marker)) is not None:
                    return done, True
            except TransactionFailed as error:
                failure = _translated(error, target, request)
                if not isinstance(failure, TransactionFailed) or failure.kind == "fenced":
                    raise failure from error
    raise failure or TransactionFailed(
        "commit_transaction", "MARKER_MISSING", "unknown", "committed, but no marker is found"
    )


def settle(target: WriteTarget, doing: object) -> None:
    """Wait until what was committed is visible to readers of committed records in every partition."""
    with _fenced(target, doing, 0):
        pass


@contextlib.contextmanager
def _fenced(target: WriteTarget, doing: object, size: int) -> Iterator[BatchForwarder]:
    """A new forwarder after ``init_transactions``; what is open when the block ends is aborted."""
    forwarding = import_module("streams.kafka.writing.forwarding")  # tasks do without: it costs them 0.3 s
    settings = forwarding.settings_of(target.kafka, "kes-spark")
    with forwarding.BatchForwarder(settings, target.identity, _seconds(target.kafka, size)) as forwarder:
        try:
            forwarder.init_transactions(TIMEOUT_SECONDS * 2)
            existing(target.marker_topic, target.kafka, lambda: forwarder.partitions(target.marker_topic))
        except TransactionFailed as error:
            needed = on_transactional_id("Write", target.identity), on_topic("Describe", target.marker_topic)
            raise translated(error, f"init_transactions for {doing}", target.kafka, needed) from error
        yield forwarder


def _seconds(kafka: KafkaSettings, size: int) -> float:
    """Return how long a transaction of so many bytes may take.

    An open transaction hides everything behind it from readers of committed records, until its timeout when no client
    comes back for it. So: as short as the rows allow (a minute, and a second more for each MiB), a quarter hour at
    most.
    """
    given = kafka.get("transaction.timeout.ms")
    return min(60.0 + (size >> 20), _LONGEST_SECONDS) if given is None else int(given) / 1000


def _transaction(
    forwarder: BatchForwarder,
    target: WriteTarget,
    request: SinkRequest,
    marker: Stored,
    batches: Iterable[MadeBatch],
    last_step: Callable[[BatchForwarder], None],
) -> None:
    sent = forwarder.send(_checked_placement(forwarder, target, request, batches))
    if sent != request.rows:
        raise StreamsError(f"{request}: {request.rows} rows were staged, {sent} were found; nothing was written")
    # After the rows are counted, in their transaction: a marker is there if and only if all of them are.
    _put_marker(forwarder, target, request, marker)
    last_step(forwarder)
    forwarder.commit()


def _checked_placement(
    forwarder: BatchForwarder, target: WriteTarget, request: SinkRequest, batches: Iterable[MadeBatch]
) -> Iterator[MadeBatch]:
    """Check that each batch was placed by the partitions that its topic has now."""
    for batch in batches:
        count = forwarder.partitions(batch.topic)
        if count is None:
            raise no_such_topic(batch.topic, target.kafka)
        if count != batch.partitions:
            raise StreamsError(
                f"{request}: topic {batch.topic!r} had {batch.partitions} partitions when the rows were placed, and "
                f"has {count} now; nothing was written, run it again"
            )
        yield batch


def read_marker(target: WriteTarget, doing: object, *, needs_topic: bool = False) -> Stored | None:
    """The marker as it is now. Only a read, which disturbs no writer: a run that is about to commit may not show yet,
    and a killed run's open transaction is passed over (it would be undecided until its timeout). ``needs_topic``: raise
    ``TopicError`` where the marker's topic does not exist."""
    if needs_topic:
        identity_of(target.marker_topic, target.kafka)
    try:
        found = topic_admin(target.kafka).note(target.identity, target.marker_topic, 0, TIMEOUT_SECONDS)
    except TopicError as refusal:  # for want of a right: a query is not started again by itself then
        raise ConfigError(f"{doing}: reading the marker: {refusal}") from refusal
    return None if found is None else _stored(*found)


def _marker(forwarder: BatchForwarder, target: WriteTarget, doing: object) -> Stored | None:
    """Behind the fence. An offset that is being decided is waited for."""
    try:
        found = forwarder.committed(target.identity, target.marker_topic, 0, TIMEOUT_SECONDS)
    except TransactionFailed as error:
        raise translated(error, f"{doing}: reading the marker", target.kafka, _rights_to_read(target)) from error
    if found is not None:
        return _stored(*found)
    return (
        None if target.marker_log is None else MarkerLog(target.marker_log, target.identity, target.kafka, doing).read()
    )


def _stored(offset: int, text: str) -> Stored:
    """The marker of a committed offset, without the zero at the end of its text (see ``_put_marker``)."""
    return Stored(offset, text.partition("\0")[0])


def _put_marker(forwarder: BatchForwarder, target: WriteTarget, doing: object, marker: Stored) -> None:
    """Into the transaction."""
    if target.marker_log is not None:
        MarkerLog(target.marker_log, target.identity, target.kafka, doing).write(forwarder, marker)
    # With a zero at its end, as librdkafka writes it: reading, it takes the bytes up to one, whatever the length says.
    forwarder.send_offsets(target.identity, target.marker_topic, {0: marker.offset}, marker.metadata + "\0")


def _rights_to_read(target: WriteTarget) -> list[Right]:
    return [on_group("Describe", target.identity), on_topic("Describe", target.marker_topic)]


def _translated(error: TransactionFailed, target: WriteTarget, doing: object) -> StreamsError:
    code, name, reason = code_of(error), error.code, error.reason
    meaning = PRODUCE.get(code)
    if name == "_TRANSPORT":
        return error  # no answer: the marker will tell
    if meaning is Meaning.FENCED:
        return TransactionFailed(
            "commit_transaction", name, "fenced",
            f"{doing}: another run under this name took over (one of the two is too many: stop it), or the transaction "
            "outlived kafka.transaction.timeout.ms (run it again)",
        )  # fmt: skip
    if name == "_TIMED_OUT":
        return BrokerUnavailable(
            f"{doing}: not committed in time ({reason}): the broker is away, the line too slow for a batch of "
            "this size, the store of stagingDir slow to read, or this process stood still. Run it again. On a slow "
            "line or store: smaller batches (maxOffsetsPerTrigger), or a longer kafka.transaction.timeout.ms"
        )
    if meaning in (Meaning.REFUSED, Meaning.BLOCKED):
        return RecordRefused(f"{doing}: the broker refuses a record ({name}: {reason}); nothing was written")
    if code == Code.UNSUPPORTED_COMPRESSION_TYPE:
        return ConfigError(
            f"{doing}: the broker refuses batches of this compression ({reason}); nothing was written. Give "
            "another kafka.compression.type (gzip is the oldest; none)"
        )
    if is_denial(name) or code == Code.OFFSET_METADATA_TOO_LARGE:
        return ConfigError(f"{doing}: the broker refuses it ({name}: {reason}); nothing was written")
    return translated(error, str(doing), target.kafka)
