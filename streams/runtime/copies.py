"""State that is filled from the changelog and not worked on: being restored, kept warm, or about to be taken.

One tail follows all of these partitions on a thread of its own and puts what it reads straight into the stores. Who
may touch a store is decided under one lock, which is never held while a store works: a copy is the tail's as long as it
is in ``_copies``, and until the batch that it is being given (``busy``) is in its store. So a busy copy is not taken,
and the store of one that is discarded meanwhile is let go afterwards.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from streams.codecs import RESERVED_KEY_PREFIX
from streams.core.timers import Timer
from streams.errors import OffsetError, RegistrationError, StreamsError
from streams.protocols import StateStore
from streams.records import TYPE_HEADER, Change, IncomingRecord, TopicPartition
from streams.runtime.bridge import Inlet
from streams.runtime.changelog import (
    OFFSET_KEY,
    RELEASE_KEY,
    TIMER_PREFIX,
    OffsetRecord,
    ReleaseMarker,
    TopicIds,
    decode_offset,
    decode_release,
    decode_timer,
)
from streams.runtime.signal import Broadcast
from streams.statistics import CopyStatistics

if TYPE_CHECKING:
    from streams.runtime.lifecycle import Engine

_log = logging.getLogger(__name__)

FROM_START = -1
READY_WITHIN = 100_000
"""Records behind the end of the changelog at which a copy is not warm any more: fewer are read in about a second."""


CLOSE_SECONDS = 5.0
"""At the end, for stores that are being written to."""


def make_store(factory: Callable[[TopicPartition], Any], where: TopicPartition) -> Any:
    """An empty store from the user's factory. Raises ``RegistrationError`` for what is none."""
    store = factory(where)
    if not isinstance(store, StateStore):
        raise RegistrationError(
            f"the store factory made a {type(store).__name__} for {where}; a store needs the methods "
            "receive_change and revoked (streams.protocols.StateStore)"
        )
    return store


class StateCopy:
    """A store, and how far of the changelog it contains. ``position``: everything below was read (-1: nothing yet).
    ``marker``: the release marker, if that is the last record so far."""

    __slots__ = (
        "awaited",
        "busy",
        "caught_up",
        "end",
        "epoch",
        "failure",
        "goal",
        "last",
        "marker",
        "offset_record",
        "partition",
        "position",
        "records",
        "since",
        "size",
        "start",
        "store",
        "timers",
        "timestamp_ms",
        "warm",
    )

    def __init__(self, partition: int, epoch: int, store: Any, since: float) -> None:
        self.partition = partition
        self.epoch = epoch
        self.store = store
        self.since = since
        self.start = self.position = FROM_START
        self.end = -1
        self.goal: int | None = None  # a take-over waits until the position has reached it
        self.caught_up = False  # once
        self.busy = False  # the tail's thread is in its store
        self.awaited = False  # somebody asked for it while it was
        self.warm = False  # it was ready when a take-over began
        self.last = -1  # offset of the last record
        self.offset_record: OffsetRecord | None = None
        self.timers: dict[str, Timer] = {}
        self.marker: ReleaseMarker | None = None
        self.failure: Exception | None = None
        self.records = 0
        self.size = 0
        self.timestamp_ms = 0

    @property
    def behind(self) -> int:
        """Records of the changelog that are not in it, as far as is known (holes and markers count)."""
        return max(0, self.end - max(self.position, 0))

    @property
    def is_ready(self) -> bool:
        """Whether it is warm."""
        return self.caught_up and self.failure is None and self.behind <= READY_WITHIN

    def receive(self, records: list[IncomingRecord]) -> None:
        """Put changelog records into the store. On the tail's thread."""
        change = self.store.receive_change
        size = 0
        for record in records:
            key, value = record.key, record.value
            if key is None:
                _log.warning("%s: a record without key does not belong into a changelog; it is ignored", record.where)
                continue
            size += len(key) + len(value or b"")
            if not key.startswith(RESERVED_KEY_PREFIX):
                kind = record.header(TYPE_HEADER) if record.headers else None
                change(Change(key, value, None, kind.decode() if kind else ""))
            elif key == OFFSET_KEY and value is not None:
                self.offset_record = decode_offset(record)
            elif key.startswith(TIMER_PREFIX):
                self._receive_timer(record)
        last = records[-1]
        self.marker = decode_release(last) if last.key == RELEASE_KEY and last.value is not None else None
        self.last = last.offset
        self.timestamp_ms = last.timestamp_ms
        self.records += len(records)
        self.size += size

    def advance(self, position: int, end: int, *, more: bool) -> bool:
        """Everything below ``position`` was read, of a log that ends at ``end`` as far as is known; ``more`` records
        came. Returns whether that is news."""
        before, self.position = self.position, max(self.position, position)
        self.end = max(self.end, end, self.position)
        first = not self.caught_up and (not more or position >= end >= 0)
        self.caught_up = self.caught_up or first
        reached = self.goal is not None and before < self.goal <= self.position
        return first or reached or self.marker is not None

    def _receive_timer(self, record: IncomingRecord) -> None:
        name, timer = decode_timer(record)
        if timer is None:
            self.timers.pop(name, None)
        else:
            self.timers[name] = timer


class StateCopies:
    """All copies of one member. Methods are for the loop, except ``_received`` and ``_failed``."""

    def __init__(self, engine: Engine, heard: Callable[[int], None]) -> None:
        self._engine = engine
        self._heard = heard
        self._lock = threading.Condition()  # notified when a copy is not busy any more
        self._copies: dict[int, StateCopy] = {}
        self._orphans: list[StateCopy] = []  # discarded while they were busy
        self._standing: frozenset[int] = frozenset()  # to be kept warm, as the plan has it
        self._held: set[int] = set()  # being taken over
        self._epoch = 0
        self._tail = engine.connections.tail()
        self._inlet: Inlet[int]
        self.changed = Broadcast()
        """Something came: a copy caught up, reached what was waited for, met a marker, or failed."""

    def start(self) -> None:
        """On the loop that is told the news."""
        self._inlet = Inlet(self._news)
        self._tail.start(self._received, self._failed)

    def close(self) -> None:
        """Stop reading, let every store go. Waits up to ``CLOSE_SECONDS`` for stores that take what was read last."""
        self._tail.close()
        for partition in list(self._copies):
            self._discard(partition)
        with self._lock:
            self._lock.wait_for(lambda: not any(copy.busy for copy in self._orphans), CLOSE_SECONDS)
        self._revoke_orphans()
        for copy in self._orphans:
            _log.error(
                "%s[%d]: the store still takes a change after %g s; it is left behind without revoked()",
                self._engine.config.changelog,
                copy.partition,
                CLOSE_SECONDS,
            )

    # -- what is kept --------------------------------------------------------------------------------------------------

    def keep(self, partitions: Collection[int]) -> None:
        """These are to be kept warm from now on; others are let go unless somebody takes them over. One that is worked
        on here gets its copy when that has ended (``adopt``, ``renew``)."""
        self._standing = frozenset(partitions)
        for partition, copy in list(self._copies.items()):
            if copy.failure is not None and partition not in self._held:
                self._discard(partition)  # each plan is another try
            self._let_go(partition)
        for partition in sorted(self._standing - self._engine.partitions.workers.keys()):
            self.renew(partition)

    def renew(self, partition: int) -> None:
        """Begin a copy that is to be kept warm and is not there."""
        if partition in self._standing and partition not in self._copies:
            self._follow(self._new(partition), FROM_START)

    def hold(self, partition: int) -> None:
        """Somebody is going to take it over: see that it is being read."""
        copy = self._copies.get(partition)
        if copy is not None and partition not in self._held:
            copy.warm = copy.is_ready
        self._held.add(partition)
        if copy is not None and copy.failure is not None:
            self._discard(partition)
            copy = None
        if copy is None:
            self._follow(self._new(partition), FROM_START)

    def unhold(self, partition: int) -> None:
        """Nobody takes it over (any more)."""
        self._held.discard(partition)
        self._let_go(partition)
        self.changed.notify()

    def adopt(
        self,
        partition: int,
        store: Any,
        offset_record: OffsetRecord | None,
        timers: dict[str, Timer],
        position: int,
    ) -> None:
        """Keep store and timers of a partition that was worked on here until now. They contain everything below
        ``position``, and maybe more: reading that again ends at the same state."""
        self._discard(partition)
        copy = self._new(partition, store)
        copy.offset_record = offset_record
        copy.timers = timers
        self._follow(copy, position)

    def take(self, partition: int, when: Callable[[StateCopy], bool] = lambda _: True) -> StateCopy | None:
        """Take a copy out, if there is one that fits: the store belongs to the caller. ``None`` also while the tail
        puts records into it: ``changed`` tells when to ask again."""
        with self._lock:
            copy = self._copies.get(partition)
            if copy is None or self._is_busy(copy) or copy.failure is not None or not when(copy):
                return None
            del self._copies[partition]
        self._held.discard(partition)
        self._tail.forget(partition)
        return copy

    def reaches(self, partition: int, goal: int) -> bool:
        """Whether everything below ``goal`` was read; ``changed`` tells when to ask again. Raises what reading met."""
        with self._lock:
            copy = self._copies.get(partition)
            if copy is None:
                return False
            if copy.failure is not None:
                raise copy.failure
            copy.goal = goal
            return not self._is_busy(copy) and copy.position >= goal

    def failure(self, partition: int) -> Exception | None:
        """What ended the reading of a copy."""
        copy = self._copies.get(partition)
        return None if copy is None else copy.failure

    def written_at(self, partition: int) -> int:
        """The offset of the last record in a copy, -1 if none was read."""
        copy = self._copies.get(partition)
        return -1 if copy is None else copy.last

    def lacks_offset(self, partition: int) -> bool:
        """Whether no input offset was read with a copy."""
        copy = self._copies.get(partition)
        return copy is not None and copy.offset_record is None

    def ids(self) -> dict[int, TopicIds]:
        """The topics that the state in each copy belongs to, as its last offset record names them: of copies that were
        read up to the end, because an older record may name what a restored topic was before."""
        records = {partition: copy.offset_record for partition, copy in self._copies.items() if copy.caught_up}
        return {partition: record.ids for partition, record in records.items() if record is not None}

    def position(self, partition: int) -> int:
        """How far it was read, -1 if it is not."""
        copy = self._copies.get(partition)
        return FROM_START if copy is None else copy.position

    # -- what is said of them ------------------------------------------------------------------------------------------

    def standing(self) -> Mapping[int, StateCopy]:
        """The copies that are kept warm, without those that are being taken over."""
        wanted = self._standing - self._held
        return {partition: copy for partition, copy in self._copies.items() if partition in wanted}

    def statistics(self) -> tuple[CopyStatistics, ...]:
        """One value per copy, ordered by partition."""
        now, wall = self._engine.now(), self._engine.wall_ms()
        found = []
        for partition, copy in sorted(self._copies.items()):
            seconds = max(now - copy.since, 1e-9)
            read = max(copy.position, 0) - max(copy.start, 0)
            rate = read / seconds
            state = "restoring" if partition in self._held else "ready" if copy.is_ready else "preparing"
            found.append(
                CopyStatistics(
                    partition=partition,
                    state="failed" if copy.failure is not None else state,
                    position=copy.position,
                    end=copy.end,
                    records_left=copy.behind,
                    records=copy.records,
                    size_bytes=copy.size,
                    seconds=seconds,
                    seconds_left=0.0 if not copy.behind else copy.behind / rate if rate else None,
                    lag_seconds=max(0.0, (wall - copy.timestamp_ms) / 1000) if copy.behind and copy.records else 0.0,
                )
            )
        return tuple(found)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _new(self, partition: int, store: Any = None) -> StateCopy:
        self._epoch += 1
        engine = self._engine
        if store is None:
            store = engine.store_factory(TopicPartition(engine.config.topic, partition))
        return StateCopy(partition, self._epoch, store, engine.now())

    def _follow(self, copy: StateCopy, position: int) -> None:
        copy.start = copy.position = position
        with self._lock:
            self._copies[copy.partition] = copy
        self._tail.follow(copy.partition, position, copy.epoch)

    def _let_go(self, partition: int) -> None:
        if partition not in self._standing and partition not in self._held:
            self._discard(partition)

    def _discard(self, partition: int) -> None:
        with self._lock:
            copy = self._copies.pop(partition, None)
        if copy is not None:
            self._tail.forget(partition)
            self._orphans.append(copy)
            self._revoke_orphans()

    def _revoke_orphans(self) -> None:
        """Let the stores go that nobody writes to any more: a copy that is not in ``_copies`` never gets busy again."""
        done = [copy for copy in self._orphans if not copy.busy]
        self._orphans = [copy for copy in self._orphans if copy not in done]
        for copy in done:
            self._engine.revoke_store(copy.store, copy.partition)

    def _is_busy(self, copy: StateCopy) -> bool:
        """Under the lock. Who is told so hears when it is over."""
        copy.awaited = copy.busy
        return copy.busy

    def _received(self, partition: int, epoch: int, records: list[IncomingRecord], position: int, end: int) -> None:
        """On the tail's thread."""
        with self._lock:
            copy = self._copies.get(partition)
            if copy is None or copy.epoch != epoch or copy.failure is not None:
                return
            copy.busy = True
        failure = None
        try:
            if records:
                copy.receive(records)  # the user's code: without the lock, or a slow store would hold up the loop
        except Exception as error:
            failure = error
        with self._lock:
            copy.busy = False
            news, copy.awaited = copy.awaited, False
            if self._copies.get(partition) is not copy:
                news = True  # an orphan: its store can be let go now
            elif failure is None:
                news = copy.advance(position, end, more=bool(records)) or news
            else:
                copy.failure = failure  # at once: half of the records are in its store, so it must not be taken
            self._lock.notify_all()
        if news:
            self._inlet.put(partition)
        if failure is not None:
            raise failure

    def _failed(self, partition: int, epoch: int, error: Exception) -> None:
        """On the tail's thread."""
        with self._lock:
            copy = self._copies.get(partition)
            if copy is None or copy.epoch != epoch:
                return
            if not isinstance(error, StreamsError):
                where = f"{self._engine.config.changelog}[{partition}]"
                failure = StreamsError(
                    f"{where}: the store cannot be restored from position {copy.position}: {error!r}"
                )
                failure.__cause__ = error
                error = failure
            copy.failure = error
        self._inlet.put(partition)

    def _news(self, partition: int) -> None:
        self._revoke_orphans()
        copy = self._copies.get(partition)
        if copy is not None and copy.failure is not None:
            self._lost_copy(copy)
        self._heard(partition)
        self.changed.notify()

    def _lost_copy(self, copy: StateCopy) -> None:
        """A copy cannot be read on: begin anew if its place in the log is gone. Otherwise a take-over, or a marker that
        is waited for, meets the error, and stops the source."""
        where = f"{self._engine.config.changelog}[{copy.partition}]"
        if isinstance(copy.failure, OffsetError) and copy.start != FROM_START:
            _log.warning("%s: its warm copy begins anew: %s", where, copy.failure)
            self._discard(copy.partition)
            self._follow(self._new(copy.partition), FROM_START)
        elif copy.partition not in self._held:
            _log.error("%s: no warm copy can be kept here: %s", where, copy.failure)
