"""A simulated broker: logs with transactions, the transaction coordinator, and the offsets of one group.

It follows the classic broker (transactions v1) where exactly-once depends on it: markers are written some time after
the decision and partition by partition; the last stable offset waits for them, and so do pending offsets of the group;
epochs fence; a transaction that is open for too long is aborted, which fences its producer.
"""

from __future__ import annotations

import base64
import itertools
import random
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Final
from uuid import NAMESPACE_URL, UUID, uuid5

from streams.model.topics import TopicIdentity
from streams.records import Headers, IncomingRecord
from streams.runtime.changelog import RELEASE_KEY
from streams.sak.murmur2 import partition_of
from streams.testing.simulation.virtual_time import VirtualTimeLoop

CLUSTER: Final = "simulated"
"""The cluster's id."""
TOPIC_LIMIT: Final = 1_048_588
"""``max.message.bytes`` of topics, by default."""
_AHEAD_MS: Final = 3_600_000
"""``message.timestamp.after.max.ms``, by default."""
_NAME: Final = re.compile(r"(?!\.{1,2}$)[a-zA-Z0-9._-]{1,249}")
_INVALID_TOPIC, _INVALID_TIMESTAMP, _INVALID_RECORD = 17, 32, 87


@cache
def id_of(topic: str, creation: int = 0) -> UUID:
    """Return the id of a topic that was created again so many times."""
    return uuid5(NAMESPACE_URL, f"{topic}#{creation}")


def printed_id(topic: str, creation: int = 0) -> str:
    """Return it as Kafka's tools print it."""
    return base64.urlsafe_b64encode(id_of(topic, creation).bytes).decode().rstrip("=")


class Refuses(Exception):
    """The broker's answer is an error; ``kind`` as in ``TransactionFailed``."""

    def __init__(self, code: str, kind: str) -> None:
        super().__init__(code)
        self.code, self.kind = code, kind


@dataclass(eq=False)
class Txn:
    """One transaction of the broker. ``outcome``: ``None`` while it is open."""

    name: str
    outcome: bool | None = None
    logs: dict[Log, None] = field(default_factory=dict)  # in the order in which they were added
    offsets: bool = False
    unmarked: int = 0
    releases: list[tuple[int, LogEntry]] = field(default_factory=list)


@dataclass(eq=False)
class LogEntry:
    """One offset of a log: a record, or the marker of a transaction. ``gone``: compacted away."""

    key: bytes | None
    value: bytes | None
    headers: Headers | None
    txn: Txn | None
    marker: bool = False
    timestamp_ms: int = 0
    number: int = 0
    """Grows from entry to entry over all logs of a broker."""
    gone: bool = False


class Log:
    """One partition."""

    def __init__(self, topic: str, partition: int) -> None:
        self.topic, self.partition = topic, partition
        self.entries: list[LogEntry] = []
        self.start = 0
        """What is below was deleted: clients cannot read it. ``entries`` keep it, for those who judge."""
        self.open: dict[Txn, int] = {}

    @property
    def end(self) -> int:
        return len(self.entries)

    @property
    def stable(self) -> int:
        return min(self.open.values(), default=self.end)

    def append(self, entry: LogEntry) -> None:
        if entry.txn is not None and not entry.marker:
            self.open.setdefault(entry.txn, self.end)
        self.entries.append(entry)
        if entry.txn is not None and entry.marker:
            self.open.pop(entry.txn, None)

    def committed(self, start: int, end: int) -> Iterator[IncomingRecord]:
        """Yield the committed records of this range."""
        for offset in range(start, min(end, self.stable)):
            entry = self.entries[offset]
            if not entry.marker and not entry.gone and (entry.txn is None or entry.txn.outcome):
                headers = None if entry.headers is None else tuple(entry.headers)
                yield IncomingRecord(
                    self.topic, self.partition, offset, entry.key, entry.value, headers, entry.timestamp_ms
                )

    def compact(self, end: int) -> None:
        """Compact the log: of each key only the last record below ``end`` stays. The log keeps its ends, and holes
        between them."""
        kept: dict[bytes | None, int] = {
            record.key: record.offset for record in self.committed(0, end) if record.key is not None
        }
        for record in list(self.committed(0, end)):
            if kept.get(record.key, record.offset) != record.offset:
                self.entries[record.offset].gone = True


OffsetKey = int | tuple[str, int]
"""A partition of the source's topic, or topic and partition of a further input: whose offset the group has."""


class _Id:
    """State of a transactional id at its coordinator."""

    def __init__(self) -> None:
        self.epoch = -1
        self.timeout = 5.0
        self.txn: Txn | None = None
        self.last: bool | None = None


class Broker:
    """Effects only: how long a request and its answer travel, and whether they arrive, is the clients' part."""

    def __init__(self, loop: VirtualTimeLoop, rng: random.Random, partitions: int) -> None:
        self.loop, self.rng, self.partitions = loop, rng, partitions
        self.topics: dict[str, int] = {}
        """Numbers of partitions, where they are not ``partitions``."""
        self.logs: dict[tuple[str, int], Log] = {}
        self.recreated: Counter[str] = Counter()
        """Topic -> number of times that it was deleted and created again."""
        self.ids: dict[str, _Id] = {}
        self.further: frozenset[str] = frozenset()
        """Further inputs of the source."""
        self.offsets: dict[OffsetKey, int] = {}
        self.notes: dict[int, str] = {}
        """By partition: see ``group.TakeOver.note``."""
        self.pending: dict[Txn, dict[OffsetKey, tuple[int, int]]] = {}
        self.offsets_from: dict[OffsetKey, int] = {}
        self.down_until = 0.0
        self.slow_markers = 0.02
        self.check_member: Callable[[int, str], None] = lambda generation, member: None
        self.on_append: Callable[[str], None] = lambda topic: None
        self.on_stable: list[Callable[[Log], None]] = []
        self.on_marker: Callable[[str, int, LogEntry], None] = lambda what, partition, entry: None
        """Called with release markers: produced, and committed."""
        self.refuses: Callable[[str, LogEntry], bool] = lambda topic, entry: False
        """Whether a record is refused for its content."""
        self.limits: dict[str, int] = {}
        """``max.message.bytes`` of topics that have their own."""
        self.blocked: dict[str, int] = {}
        """Topics that no client can write to now (missing, say, or forbidden), and the broker's error code."""
        self.met: set[str] = set()
        """Names of the errors that were answered, and of what happened by itself."""
        self._numbers = itertools.count(1)
        self._entries = itertools.count()

    def log(self, topic: str, partition: int) -> Log:
        found = self.logs.get((topic, partition))
        if found is None:
            found = self.logs[topic, partition] = Log(topic, partition)
        return found

    def range(self, topic: str, partition: int) -> tuple[int, int]:
        """Return start and end of a log."""
        log = self.log(topic, partition)
        return log.start, log.end

    def identity(self, topic: str) -> TopicIdentity:
        """Return the identity of a topic, as metadata has it."""
        name = printed_id(topic, self.recreated[topic])
        return TopicIdentity(name, self.topics.get(topic, self.partitions), CLUSTER)

    def topic_id(self, topic: str) -> UUID:
        """Return a topic's id: another one when it is created again."""
        return id_of(topic, self.recreated[topic])

    def recreate(self, topic: str) -> None:
        """Delete a topic, and create it again: empty, with another id. What is open in it is not ended."""
        self.recreated[topic] += 1
        for log in self.logs.values():
            if log.topic == topic:
                log.entries.clear()
                log.start = 0
                log.open.clear()

    def unusable(self, topic: str) -> int | None:
        """Return the error code of a topic that is missing, forbidden, or whose name is none; ``None``: it is there."""
        return self.blocked.get(topic) if _NAME.fullmatch(topic) else _INVALID_TOPIC

    def refusal(self, topic: str, entry: LogEntry) -> int | None:
        """Return the error code for a record that is refused for itself; ``None``: it is written."""
        if self.refuses(topic, entry):
            return _INVALID_RECORD
        now_ms = self.wall_ms()
        return _INVALID_TIMESTAMP if entry.timestamp_ms > now_ms + _AHEAD_MS and now_ms > 0 else None

    def partition_of(self, topic: str, key: bytes | None) -> int:
        """Choose the partition of a record that names none: as Java's clients do, and librdkafka as it is set here."""
        count = self.topics.get(topic, self.partitions)
        return self.rng.randrange(count) if key is None else partition_of(key, count)

    def wall_ms(self) -> int:
        """Timestamp of records that come without one."""
        return 0

    def append(
        self,
        topic: str,
        partition: int,
        key: bytes | None,
        value: bytes | None,
        headers: Headers | None,
        timestamp_ms: int = 0,
    ) -> int:
        """Append a record from a producer without transactions; returns its offset. ``timestamp_ms`` 0: now."""
        log = self.log(topic, partition)
        offset = log.end
        self._write(log, LogEntry(key, value, headers, None, timestamp_ms=timestamp_ms))
        self.on_append(topic)
        self._grown(log)
        return offset

    def _write(self, log: Log, entry: LogEntry) -> None:
        entry.number, entry.timestamp_ms = next(self._entries), entry.timestamp_ms or self.wall_ms()
        entry.headers = entry.headers or None  # so clients report the absence of headers
        log.append(entry)

    # -- the transaction coordinator -----------------------------------------------------------------------------------

    def init(self, name: str, timeout: float) -> int | None:
        """InitProducerId: the new epoch, or ``None`` (CONCURRENT_TRANSACTIONS: the old transaction is being ended)."""
        state = self.ids.setdefault(name, _Id())
        if state.txn is not None:
            if state.txn.outcome is None:
                state.epoch += 1
                self._decide(state, False)
            self.met.add("concurrent")
            return None
        state.epoch += 1
        state.timeout = timeout
        state.last = None
        return state.epoch

    def ongoing(self, name: str, epoch: int) -> Txn | None:
        """Return the open transaction, begun if there is none. ``None``: CONCURRENT_TRANSACTIONS."""
        state = self._current(name, epoch)
        if state.txn is None:
            txn = state.txn = Txn(f"{name}#{next(self._numbers)}")
            self.loop.call_later(state.timeout + self.rng.uniform(0.0, 3.0), self._expire, state, txn)
        return state.txn if state.txn.outcome is None else None

    def enlist(self, name: str, epoch: int, logs: Collection[Log] = (), *, offsets: bool = False) -> bool:
        """AddPartitionsToTxn and AddOffsetsToTxn. ``False``: try again (CONCURRENT_TRANSACTIONS)."""
        txn = self.ongoing(name, epoch)
        if txn is None:
            return False
        txn.logs.update(dict.fromkeys(logs))
        txn.offsets = txn.offsets or offsets
        return True

    def is_enlisted(self, name: str, epoch: int, log: Log | None = None) -> bool:
        """Check whether a partition takes part in the open transaction; ``None``: whether offsets do."""
        txn = self._current(name, epoch).txn
        return txn is not None and txn.outcome is None and (txn.offsets if log is None else log in txn.logs)

    def produce(self, name: str, epoch: int, topic: str, partition: int, entry: LogEntry) -> bool:
        """``False``: try again (CONCURRENT_TRANSACTIONS)."""
        txn = self.ongoing(name, epoch)
        if txn is None:
            return False
        log = self.log(topic, partition)
        txn.logs[log] = None
        entry.txn = txn
        self._write(log, entry)
        if entry.key == RELEASE_KEY:
            txn.releases.append((partition, entry))
            self.on_marker("produced", partition, entry)
        return True

    def send_offsets(self, name: str, epoch: int, generation: int, member: str, offsets: dict[OffsetKey, int]) -> bool:
        """AddOffsetsToTxn and TxnOffsetCommit."""
        txn = self.ongoing(name, epoch)
        if txn is None:
            return False
        txn.offsets = True
        self.check_member(generation, member)
        number = next(self._numbers)  # the place in the offsets' log decides, not when its marker is written
        self.pending.setdefault(txn, {}).update((partition, (number, at)) for partition, at in offsets.items())
        return True

    def end(self, name: str, epoch: int, commit: bool) -> bool:
        """EndTxn; a repetition with the same decision succeeds too."""
        state = self._current(name, epoch)
        if state.txn is None:
            if state.last is commit:
                return True
            raise Refuses("INVALID_TXN_STATE", "unknown")
        if state.txn.outcome is None:
            self._decide(state, commit)
        elif state.txn.outcome is not commit:
            raise Refuses("INVALID_TXN_STATE", "unknown")
        return True

    def end_epoch(self, name: str, epoch: int, commit: bool) -> int | None:
        """EndTxn of transactions v2: the epoch of the next one. A repetition finds the same; ``None``: try again."""
        state = self.ids[name]
        if state.last is not None and state.epoch == epoch + 1:  # ended by us, or by the coordinator
            if state.last is not commit:
                raise Refuses("INVALID_TXN_STATE", "unknown")
            self.met.add("ended again")
            return None if state.txn is not None else state.epoch
        self._current(name, epoch)
        if state.txn is None and commit:
            raise Refuses("INVALID_TXN_STATE", "unknown")
        if state.txn is not None and state.txn.outcome is not None:
            return None  # the one before is not marked yet
        state.epoch, state.last = epoch + 1, commit
        if state.txn is not None:
            self._decide(state, commit)
        return state.epoch

    def _current(self, name: str, epoch: int) -> _Id:
        state = self.ids[name]
        if state.epoch != epoch:
            self.met.add("_FENCED")
            raise Refuses("_FENCED", "fenced")
        return state

    def expire(self, names: Collection[str]) -> bool:
        """Abort the open transactions of these ids, as if they had been open for too long; return whether there was
        one."""
        found = [(state, state.txn) for name, state in self.ids.items() if name in names]
        still = [(state, txn) for state, txn in found if txn is not None and txn.outcome is None]
        for state, txn in still:
            self._expire(state, txn)
        return bool(still)

    def _expire(self, state: _Id, txn: Txn) -> None:
        if state.txn is txn and txn.outcome is None:
            state.epoch += 1
            self.met.add("expired")
            self._decide(state, False)

    def _decide(self, state: _Id, commit: bool) -> None:
        txn = state.txn
        assert txn is not None
        assert txn.outcome is None, "decided twice"
        txn.outcome = commit
        state.last = commit
        for number, entry in txn.releases:
            self.on_marker("committed" if commit else "aborted", number, entry)
        marks = [partial(self._mark, log, txn) for log in txn.logs]
        if txn.offsets:
            marks.append(partial(self._settle_offsets, txn))
        txn.unmarked = len(marks)
        if not marks:
            state.txn = None

        def mark(write: Callable[[], None]) -> None:
            write()
            txn.unmarked -= 1
            if txn.unmarked == 0:
                state.txn = None

        for write in marks:
            self.loop.call_later(self.rng.uniform(0.0005, self.slow_markers), mark, write)

    def _mark(self, log: Log, txn: Txn) -> None:
        self._write(log, LogEntry(None, None, None, txn, True))
        self._grown(log)

    def _grown(self, log: Log) -> None:
        for callback in list(self.on_stable):
            callback(log)

    def _settle_offsets(self, txn: Txn) -> None:
        offsets = self.pending.pop(txn, {})
        for partition, (number, offset) in offsets.items():
            if txn.outcome and number > self.offsets_from.get(partition, 0):
                self.offsets_from[partition] = number
                self.offsets[partition] = offset

    # -- the group's offsets -------------------------------------------------------------------------------------------

    def offset_key(self, topic: str, partition: int) -> OffsetKey:
        """Return the key of a group's offset."""
        return (topic, partition) if topic in self.further else partition

    def stable_offsets(self, partitions: list[int], topic: str = "") -> dict[int, int | None] | None:
        """OffsetFetch with require_stable; ``None``: UNSTABLE_OFFSET_COMMIT."""
        keys = {partition: self.offset_key(topic, partition) for partition in partitions}
        if any(key in offsets for offsets in self.pending.values() for key in keys.values()):
            return None
        return {partition: self.offsets.get(key) for partition, key in keys.items()}
