"""The state of a replay as the beginning of an event source: stores and positions, in one Kafka transaction.

State is the changelog, and the input offset lives in it beside the state. So that is what is written: the records that
a running source would have written, an offset record behind those of each partition, and the group's offsets, which
are what lag tools read. Then members restore from there as after any restart; nothing in the engine depends on it.

No member may work on the source meanwhile. Asking whether the group is empty is not enough: a member could start right
after the answer. The order makes it sure:

    1. the rows and the offset records are sent, then the group's offsets, all in one open transaction;
    2. only then the group is described: no members, and what departed ones left open is ended; no offset is committed;
    3. commit.

A member that joins after 2 asks for the group's offsets before it reads the changelog, and that answer waits for our
transaction. A member that joined before is seen in 2, or is gone by then; what it may have committed came with
offsets of the group, which are seen in 2 as well.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from streams.errors import ConfigError, OffsetError, StreamsError
from streams.kafka.questions.group_checks import GroupChecks
from streams.kafka.writing.forwarding import BatchForwarder
from streams.records import Change
from streams.records import TopicPartition as Partition
from streams.runtime.changelog import OFFSET_KEY, OffsetRecord, TopicIds
from streams.runtime.ownership.replicas import make_store
from streams.runtime.replay import Program, refuse_several_inputs
from streams.settings.config import EventSourceConfig
from streams.source.event_source import EventSource
from streams.spark.replaying.replay_task import loaded
from streams.spark.replaying.replays import State
from streams.spark.typed.tables import is_reserved
from streams.spark.writing.batch_encoding import BatchEncoder
from streams.spark.writing.markers import Stored, Written, read_metadata
from streams.spark.writing.placing import topic_shapes
from streams.spark.writing.sink_transaction import WriteTarget, read_marker, settle, write_once

_WRITER: Final = "bootstrap"
_ROWS: Final = 10_000
_LONGEST: Final = 1 << 40  # as bytes: the transaction may take as long as one may (Spark jobs run inside of it)
_SCHEMA: Final = pa.schema(
    [("partition", pa.int32()), ("key", pa.binary()), ("value", pa.binary()), ("type", pa.string())]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bootstrapped:
    """The beginning of an event source: ``offsets`` by partition (the first one that it handles), ``keys`` in its
    stores; ``written`` by this call, or (``False``) by an earlier one with the same state."""

    offsets: Mapping[int, int]
    keys: int
    written: bool
    committed_at_ms: int


def bootstrap(
    source: EventSource[Any] | str, state: State, *, parked: Literal["refuse", "leave out"] = "refuse"
) -> Bootstrapped:
    """Give an event source that has never run the state of a replay to begin with, and the offsets to go on at.

    Stores and positions are written into its changelog, and its group's offsets are committed, in one transaction: all
    of it is there, or nothing. Started normally, its members restore that state, and handle what follows exactly once.
    Partitions without a position (the replay had no record of them) begin at the start of their log.

    Topics that are missing are created. Refused (``OffsetError``) when the group has members, when there are offsets
    of the group or anything in the changelog, and when a position is not in the log of the source's topic. ``state``
    is a ``Replay`` or what ``changelog_state`` gives; ``ConfigError`` when it does not fit the source, or its changelog
    has parked keys: their events are below the positions, so the new source would never handle them, unless
    ``parked="leave out"`` says that it need not. Repeating it
    with the same state is harmless, also after an unclear answer; with another one it is refused. Blocks; driver only:
    the driver holds one partition's state at a time. An open transaction of so many rows holds up nothing but the
    members of this source, for a quarter of an hour at most.
    """
    if not isinstance(state, State):
        raise ConfigError(f"state is {type(state).__name__}; give a Replay, a State, or changelog_state(df)")
    if parked not in ("refuse", "leave out"):
        raise ConfigError(f"parked is {parked!r}; use 'refuse' or 'leave out'")
    if parked == "refuse" and state.parked is not None and (events := state.parked.count()):
        raise ConfigError(
            f"{events:,} events of parked keys wait in the changelog of this state, below its positions: the new "
            "source would never handle them. Have them worked off first (kes parked list), or pass parked='leave out'"
        )
    source = loaded(source) if isinstance(source, str) else source
    config = source.config.resolved()
    with GroupChecks(config) as checks:
        return _bootstrap(source, config, checks, state.stores, state.positions)


def _bootstrap(
    source: EventSource[Any],
    config: EventSourceConfig,
    checks: GroupChecks,
    stores: DataFrame,
    positions: DataFrame,
) -> Bootstrapped:
    ranges, source_id = checks.source()
    keys, digest = _summary(stores)
    offsets = _offsets(config, positions, ranges)
    request = _Request(config.group_id, config.num_partitions + keys, _digest(offsets, digest))
    target = _target(config)
    found = request.written(read_marker(target, request))
    written = False
    if found is None:
        refuse_several_inputs("a bootstrap", source.inputs, source.lookups)
        _check_contents(source.program(), stores)
        checks.create(source.specs()[1 if config.source_is_elsewhere else 0 :])
        # In this order: what departed members left open is decided before the changelog is looked at.
        checks.refuse_unless_at_rest()
        checks.refuse_unless_empty(config.changelog)
        ids = TopicIds(source_id, checks.changelog_id())
        shapes = topic_shapes(target.kafka)

        def last_step(forwarder: BatchForwarder) -> None:
            """From here on a member that joins waits for the outcome; so look again."""
            forwarder.send_offsets(config.group_id, config.offsets_topic, offsets)
            checks.refuse_if_begun()

        found, written = write_once(
            target,
            request,
            lambda: BatchEncoder(config.changelog, target.kafka, str(request), shapes).encode(
                _batches(stores, offsets, ids)
            ),
            size=_LONGEST,
            last_step=last_step,
        )
        settle(target, request)
    return Bootstrapped(offsets=offsets, keys=keys, written=written, committed_at_ms=found.at_ms)


def _target(config: EventSourceConfig) -> WriteTarget:
    """Return where the state is written, by the settings of the source; one that is a function stays one."""
    given = config.client_settings.items()
    kafka = {name: value if callable(value) else str(value) for name, value in given}
    return WriteTarget(
        identity=f"kes.spark.bootstrap/{config.group_id}/{config.changelog}",
        marker_topic=config.changelog,
        kafka={**kafka, "bootstrap.servers": config.bootstrap_servers},
    )


def _offsets(config: EventSourceConfig, positions: DataFrame, ranges: Mapping[int, tuple[int, int]]) -> dict[int, int]:
    """Return the offset where each partition goes on. Raises ``OffsetError`` for one that is not in its log."""
    found: dict[int, int] = {}
    for row in positions.collect():
        if row.partition not in ranges or row.partition in found:
            raise ConfigError(
                f"the state has a position of partition {row.partition}"
                + (" twice" if row.partition in found else f", but the source has {config.num_partitions} partitions")
            )
        found[row.partition] = row.offset
    for number, offset in sorted(found.items()):
        low, high = ranges[number]
        if not low <= offset <= high:
            raise OffsetError(
                f"{config.topic}[{number}]: the state goes on at offset {offset}, but the log begins at {low} and ends "
                f"at {high}: it is the state of another topic, or records that it needs are gone"
            )
    return {number: found.get(number, low) for number, (low, _) in sorted(ranges.items())}


def _summary(stores: DataFrame) -> tuple[int, str]:
    """Return the number of rows, and a number that is another one for other contents, whatever their order."""
    row = stores.agg(
        f.count(f.lit(1)).alias("keys"),
        f.sum(f.xxhash64("partition", "key", "value", "type").cast("decimal(38,0)")).alias("digest"),
    ).collect()[0]
    return row.keys, str(row.digest)


def _digest(offsets: Mapping[int, int], stores: str) -> str:
    return hashlib.sha256(json.dumps([sorted(offsets.items()), stores]).encode()).hexdigest()[:32]


def _check_contents(program: Program, stores: DataFrame) -> None:
    """Raises ``ConfigError`` for a state that the source's stores do not take, or that is none."""
    count = program.config.num_partitions
    partition, key = f.col("partition"), f.col("key")
    wrong = f.coalesce((partition < 0) | (partition >= count) | is_reserved(key) | f.col("value").isNull(), f.lit(True))
    for row in stores.where(wrong | key.isNull()).limit(1).collect():
        raise ConfigError(
            f"the state has a row of partition {row.partition} with key {row.key!r} that no store can have: partitions "
            f"are 0 to {count - 1}, keys and values are not null, and keys of the toolkit are not state"
        )
    for row in stores.groupBy("partition", "key").count().where("count > 1").limit(1).collect():
        raise ConfigError(f"the state has the key {bytes(row.key)!r} of partition {row.partition} more than once")
    for row in stores.limit(1).collect():
        store = make_store(program.store_factory, Partition(program.config.topic, row.partition))
        try:
            store.receive_change(Change(bytes(row.key), bytes(row.value), None, row.type or ""))
        except StreamsError as error:
            raise ConfigError(f"the source's store does not take the state: {error}") from error
        finally:
            store.revoked()


def _batches(stores: DataFrame, offsets: Mapping[int, int], ids: TopicIds) -> Iterator[Any]:
    """The changelog's records: for each partition its state, and then its position."""
    for number, offset in offsets.items():
        table = stores.where(f.col("partition") == number).select("partition", "key", "value", "type").toArrow()
        yield from table.cast(_SCHEMA).to_batches(_ROWS)
        record = msgspec.json.encode(OffsetRecord(offset, _WRITER, 0, 0, *ids))
        yield pa.RecordBatch.from_pylist(
            [{"partition": number, "key": OFFSET_KEY, "value": record, "type": None}], schema=_SCHEMA
        )


class _Metadata(msgspec.Struct):
    digest: str
    rows: int
    at_ms: int


@dataclass(frozen=True, slots=True)
class _Request:
    """``markers.SinkRequest``: one state for a group, once."""

    group_id: str
    rows: int
    digest: str

    def __str__(self) -> str:
        return f"bootstrap of group {self.group_id!r}"

    def written(self, stored: Stored | None) -> Written | None:
        if stored is None:
            return None
        found = read_metadata(stored, _Metadata)
        if found.digest != self.digest:
            raise OffsetError(
                f"{self}: it was given another state before ({found.rows} records). To start over use another "
                "group_id, or delete the changelog and the groups of the source and of its bootstrap"
            )
        return Written(rows=found.rows, at_ms=found.at_ms)

    def marker(self, stored: Stored | None, at_ms: int) -> Stored:
        return Stored(1, msgspec.json.encode(_Metadata(self.digest, self.rows, at_ms)).decode())
