"""Copies of state that are filled from the changelog and not worked on: in restore, warm, or about to be taken.

One tail follows all of these partitions on a thread of its own and puts the records straight into the stores. The owner
of a store is decided under one lock, which is never held while a store works: a copy is the tail's as long as it is in
``_copies``, and until the batch under way (``busy``) is in its store. So a busy copy is not taken, and the store of one
that is discarded meanwhile is freed afterwards.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from functools import partial
from typing import Any, TypeVar

from streams.core.checkpoints import TOMBSTONES_MS
from streams.core.timers import Timer
from streams.errors import BrokerUnavailable, RegistrationError, StreamsError
from streams.protocols import StateStore
from streams.records import IncomingRecord, TopicPartition
from streams.runtime.bridge import Inlet
from streams.runtime.changelog import OffsetRecord, TopicIds, VoiceRecord
from streams.runtime.keeping.folders.entries import HalfLoaded
from streams.runtime.keeping.folders.shelf import tombstones_ms_of
from streams.runtime.keeping.kept_partition import KeptPartition
from streams.runtime.keeping.on_disk import load_after_snapshot, open_for, refuse_without_folder
from streams.runtime.member import Member
from streams.runtime.ownership.replica import Replica
from streams.runtime.partition.failures import cancelled_inside
from streams.runtime.partition.joined_rows import JoinedRows
from streams.runtime.partition.seen_ids import SeenIds
from streams.runtime.reading.log_follower import FROM_START
from streams.runtime.signal import Broadcast
from streams.statistics import CopyStatistics

T = TypeVar("T")
_log = logging.getLogger(__name__)

REQUEST_SECONDS, REQUEST_AGAIN_SECONDS = 10.0, 60.0
"""A request about the changelog takes the first number of seconds, at most. If it fails, the next one comes when the
second number has passed."""
CLOSE_SECONDS = 5.0
"""Stores that are being written to have so many seconds at the end."""


def make_store(factory: Callable[[TopicPartition], Any], where: TopicPartition) -> Any:
    """Make an empty store by the user's factory. Raises ``RegistrationError`` for an object that is none."""
    store = factory(where)
    if not isinstance(store, StateStore):
        raise RegistrationError(
            f"the store factory made a {type(store).__name__} for {where}; a store needs the methods "
            "receive_change and revoked (streams.protocols.StateStore)"
        )
    return store


class Replicas:
    """All copies of one member. Methods are for the loop, except ``_received`` and ``_failed``."""

    def __init__(
        self, member: Member, make_store: Callable[[TopicPartition], Any], changed: Callable[[int], None]
    ) -> None:
        """``make_store`` makes the empty store of a partition; ``changed`` is called on the loop with each partition
        whose copy has news."""
        self._member = member
        self._make_store = make_store
        self._when_changed = changed
        self._lock = threading.Condition()  # notified when a copy is not busy any more
        self._copies: dict[int, Replica] = {}
        self._orphans: list[Replica] = []  # discarded while they were busy
        self._standing: frozenset[int] = frozenset()  # to be kept warm, as the plan has it
        self._held: set[int] = set()  # being taken over
        self._epoch = 0
        self._tombstones = 0, -math.inf  # how long they live in the changelog, and until when that is not requested
        self._tail = member.connections.tail()
        self._inlet = Inlet(self._news)
        self._loads: Inlet[tuple[Replica, Exception | None]] = Inlet(lambda load: self._has_loaded(*load))
        self.changed = Broadcast()
        """News of a copy: it caught up, reached the awaited position, met a marker, or failed."""

    def start(self) -> None:
        self._tail.start(self._received, self._failed)

    def close(self) -> None:
        """Stop reading, free every store. Waits up to ``CLOSE_SECONDS`` for stores that take the last records."""
        self._tail.close()
        for partition in list(self._copies):
            self._discard(partition)
        with self._lock:
            self._lock.wait_for(lambda: not any(copy.busy for copy in self._orphans), CLOSE_SECONDS)
        self._revoke_orphans()
        for copy in self._orphans:
            _log.error(
                "%s[%d]: the store still takes a change after %g s; it is left behind without revoked()",
                self._member.config.changelog,
                copy.partition,
                CLOSE_SECONDS,
            )

    # -- kept copies ---------------------------------------------------------------------------------------------------

    def keep(self, partitions: Collection[int]) -> None:
        """Keep copies of these partitions warm from now on; others are freed unless they are being taken over. A
        partition that is worked on here gets its copy when that has ended (``adopt``, ``renew``)."""
        self._standing = frozenset(partitions)
        for partition, copy in list(self._copies.items()):
            if copy.failure is not None and partition not in self._held:
                self._discard(partition)  # each plan is another try
            self._let_go(partition)
        for partition in sorted(self._standing - self._member.workers.keys()):
            self.renew(partition)

    def renew(self, partition: int) -> None:
        """Begin a missing copy that is to be kept warm."""
        if partition in self._standing and partition not in self._copies:
            self._begin(self._new(partition))

    def hold(self, partition: int) -> None:
        """Read a partition for a take-over, and keep it until ``unhold``."""
        copy = self._copies.get(partition)
        if copy is not None and partition not in self._held:
            copy.warm = copy.is_ready
        self._held.add(partition)
        if copy is not None and copy.failure is not None:
            self._discard(partition)
            copy = None
        if copy is None:
            self._begin(self._new(partition))

    def unhold(self, partition: int) -> None:
        """End the hold of a take-over."""
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
        as_of_ms: int,
        kept: KeptPartition | None = None,
        joined: JoinedRows | None = None,
        seen: SeenIds | None = None,
        voice: VoiceRecord | None = None,
    ) -> None:
        """Keep store, timers, joined rows and ids of a partition that was worked on here until now. They contain
        everything below ``position``, the end of the log at ``as_of_ms`` or later, and maybe more: reading that again
        ends at the same state. ``kept``: the store's way to the disk."""
        self._discard(partition)
        copy = self._new(partition, store)
        copy.as_of_ms = as_of_ms
        copy.kept = kept
        copy.offset_record = offset_record
        copy.timers, copy.voice = timers, voice
        copy.joined = joined or copy.joined
        copy.seen = copy.seen if seen is None else seen
        self._follow(copy, position)

    def begin_anew(self, kept: KeptPartition) -> None:
        """Fill a copy again whose folder cannot be used any more."""
        copy = self._copies.get(kept.partition)
        if copy is not None and copy.kept is kept:
            self._discard(kept.partition)
            self._begin(self._new(kept.partition))

    def take(self, partition: int, when: Callable[[Replica], bool] = lambda _: True) -> Replica | None:
        """Take a copy out, if there is one that fits: the store belongs to the caller. ``None`` also while the tail
        puts records into it: wait for ``changed`` then."""
        with self._lock:
            copy = self._copies.get(partition)
            if copy is None or self._is_busy(copy) or copy.failure is not None or not when(copy):
                return None
            if copy.witness is not None:
                return None  # the log is not known to be the one that its folder was filled from
            del self._copies[partition]
        self._held.discard(partition)
        self._tail.remove([partition])
        return copy

    def reaches(self, partition: int, goal: int) -> bool:
        """Check whether everything below ``goal`` was read; if not, wait for ``changed``. Raises the error that reading
        met."""
        with self._lock:
            copy = self._copies.get(partition)
            if copy is None:
                return False
            if copy.failure is not None and not copy.begins_anew:
                raise copy.failure
            copy.goal = goal
            return not self._is_busy(copy) and copy.failure is None and copy.witness is None and copy.position >= goal

    def read(self, partition: int, goal: int, read: Callable[[Replica], T]) -> tuple[OffsetRecord | None, T] | None:
        """Read in a copy that contains everything below ``goal``; with its offset record. ``None``: it is not
        so far, or takes changes at the moment. ``read`` must be quick: the tail waits for it."""
        with self._lock:
            copy = self._copies.get(partition)
            if copy is None or self._is_busy(copy) or copy.failure is not None or copy.witness is not None:
                return None
            return None if copy.position < goal else (copy.offset_record, read(copy))

    def failure(self, partition: int) -> Exception | None:
        """Return the error that ended the reading of a copy; one that is about to begin anew has none."""
        copy = self._copies.get(partition)
        return None if copy is None or copy.begins_anew else copy.failure

    def written_at(self, partition: int) -> int:
        """Return the offset of the last record in a copy, -1 if none was read."""
        copy = self._copies.get(partition)
        return -1 if copy is None else copy.last

    def offset_record(self, partition: int) -> OffsetRecord | None:
        """Return the last offset record that was read with a copy."""
        copy = self._copies.get(partition)
        return None if copy is None else copy.offset_record

    def ids(self) -> dict[int, TopicIds]:
        """Return the topics that the state in each copy belongs to, as its last offset record names them: of copies
        that were read up to the end, because an older record may name the topic before a restore."""
        records = {partition: copy.offset_record for partition, copy in self._copies.items() if copy.caught_up}
        return {partition: record.ids for partition, record in records.items() if record is not None}

    def position(self, partition: int) -> int:
        """Return the position of a partition that is being read, else -1."""
        copy = self._copies.get(partition)
        return FROM_START if copy is None else copy.position

    # -- statistics ----------------------------------------------------------------------------------------------------

    def standing(self) -> Mapping[int, Replica]:
        """Return the copies that are kept warm, without those that are being taken over."""
        wanted = self._standing - self._held
        return {partition: copy for partition, copy in self._copies.items() if partition in wanted}

    def statistics(self) -> tuple[CopyStatistics, ...]:
        """Return one value per copy, ordered by partition."""
        now, wall = self._member.now(), self._member.wall_ms()
        found = []
        for partition, copy in sorted(self._copies.items()):
            seconds = max(now - copy.since, 1e-9)
            read = max(copy.position, 0) - max(copy.start, 0)
            rate, left = read / seconds, copy.behind
            if copy.folder_loaded < copy.folder_bytes:  # the changelog comes later
                rate, left = copy.folder_loaded / seconds, copy.folder_bytes - copy.folder_loaded
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
                    seconds_left=0.0 if not left else left / rate if rate else None,
                    lag_seconds=max(0.0, (wall - copy.timestamp_ms) / 1000) if copy.behind and copy.records else 0.0,
                    folder_bytes=copy.folder_bytes,
                    folder_loaded=copy.folder_loaded,
                )
            )
        return tuple(found)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _new(self, partition: int, store: Any = None) -> Replica:
        self._epoch += 1
        if store is None:
            store = self._make_store(TopicPartition(self._member.config.topic, partition))
        joined = JoinedRows.of((spec for spec, _ in self._member.further_inputs), partition, store)
        seen = SeenIds.of(self._member.router.once_bounds, store)
        copy = Replica(partition, self._epoch, store, self._member.now(), joined, seen)
        copy.as_of_ms = copy.begun_ms = self._member.wall_ms()
        return copy

    def _begin(self, copy: Replica) -> None:
        """Fill an empty copy: from its folder, if there is one, and then from the changelog."""
        keeper = self._member.keeper
        if keeper is None:
            refuse_without_folder(copy.store)
            self._follow(copy, FROM_START)
            return
        with self._lock:
            copy.busy = True  # the keeper's thread is in its store
            self._copies[copy.partition] = copy
        load_after_snapshot(keeper, copy, partial(self._load, copy))

    def _load(self, copy: Replica) -> None:
        """Load a copy from its folder. On the keeper's thread."""
        keeper, failure = self._member.keeper, None
        assert keeper is not None
        try:
            if not copy.is_discarded:
                copy.kept = open_for(keeper, copy.store, copy.partition, copy.restore, copy.loads)
                if copy.kept is not None and copy.kept.point is not None:
                    copy.begin_from(copy.kept.point)
        except (Exception, asyncio.CancelledError) as error:  # which would end the thread without a word
            failure = cancelled_inside(error)
        with self._lock:
            copy.awaited = False
            copy.busy = failure is not None and not copy.is_discarded  # its store is not to be taken as it is
            self._lock.notify_all()
        self._loads.put((copy, failure))

    def _has_loaded(self, copy: Replica, failure: Exception | None) -> None:
        copy.busy = copy.busy and failure is None  # it may be the tail's already
        if self._copies.get(copy.partition) is not copy:
            self._revoke_orphans()
        elif isinstance(failure, HalfLoaded):  # the folder is set aside, and its like is in the store
            self._member.revoke_store(copy.store, copy.partition)
            del self._copies[copy.partition]
            self._begin(self._new(copy.partition))
        elif isinstance(failure, BrokerUnavailable):
            _log.warning(
                "%s[%d]: its folder waits for the broker: %s", self._member.config.changelog, copy.partition, failure
            )
            self._begin(copy)
        elif failure is not None:
            copy.failure = self._failed_by(copy, failure)
            self._news(copy.partition)
        else:
            self._tail.add(copy.partition, copy.position, copy.epoch)
            self._news(copy.partition)

    def _follow(self, copy: Replica, position: int) -> None:
        copy.begin_at(position)
        with self._lock:
            self._copies[copy.partition] = copy
        self._tail.add(copy.partition, position, copy.epoch)

    def _let_go(self, partition: int) -> None:
        if partition not in self._standing and partition not in self._held:
            self._discard(partition)

    def _discard(self, partition: int) -> None:
        with self._lock:
            copy = self._copies.pop(partition, None)
        if copy is not None:
            copy.is_discarded = True
            if copy.kept is not None and copy.begins_anew:
                copy.kept.distrusted = str(copy.failure)
            self._tail.remove([partition])
            self._orphans.append(copy)
            self._revoke_orphans()

    def _revoke_orphans(self) -> None:
        """Free the stores of discarded copies that are not busy any more: a copy that is not in ``_copies`` never gets
        busy again."""
        done = [copy for copy in self._orphans if not copy.busy]
        self._orphans = [copy for copy in self._orphans if copy not in done]
        for copy in done:
            if copy.kept is not None:
                copy.kept.close()
            self._member.revoke_store(copy.store, copy.partition)

    def _is_busy(self, copy: Replica) -> bool:
        """Check whether a copy is busy; the caller then gets ``changed`` at the end of that. Under the lock."""
        copy.awaited = copy.busy
        return copy.busy

    def _received(self, partition: int, epoch: int, records: list[IncomingRecord], position: int, end: int) -> None:
        """See ``ports.Tail.start``. On the tail's thread."""
        with self._lock:
            copy = self._copies.get(partition)
            if copy is None or copy.epoch != epoch or copy.failure is not None:
                return
            copy.busy = True
        failure = None
        try:
            now_ms = self._member.wall_ms()
            copy.refuse_if_outlived(records, position, now_ms, self._tombstones_ms)
            copy.examine(records, position, end)
            if records:
                copy.receive(records)  # the user's code: without the lock, or a slow store would hold up the loop
                copy.as_of_ms = min(now_ms, max(copy.as_of_ms, copy.timestamp_ms))  # a clock may be set back
        except (Exception, asyncio.CancelledError) as error:
            failure = cancelled_inside(error)
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

    def _tombstones_ms(self) -> int:
        """Return for how long the changelog keeps tombstones; requested once. On the tail's thread."""
        member, (found, until) = self._member, self._tombstones
        if member.keeper is not None:
            return member.keeper.known_changelog()[1]  # known by now: a copy begins with its folder
        if member.now() < until:
            return found
        try:
            with closing(member.connections.topics()) as topics:
                self._tombstones = tombstones_ms_of(topics, member.config.changelog, REQUEST_SECONDS), math.inf
        except BrokerUnavailable as error:  # no copy waits for it batch by batch
            _log.info("%s: a day is assumed for its delete.retention.ms: %s", member.config.changelog, error)
            self._tombstones = TOMBSTONES_MS, member.now() + REQUEST_AGAIN_SECONDS
        return self._tombstones[0]

    def _failed(self, partition: int, epoch: int, error: Exception) -> None:
        """See ``ports.Tail.start``. On the tail's thread."""
        with self._lock:
            copy = self._copies.get(partition)
            if copy is None or copy.epoch != epoch:
                return
            copy.failure = self._failed_by(copy, error)
        self._inlet.put(partition)

    def _failed_by(self, copy: Replica, error: Exception) -> Exception:
        if isinstance(error, StreamsError):
            return error
        where = f"{self._member.config.changelog}[{copy.partition}]"
        failure = StreamsError(f"{where}: the store cannot be restored from position {copy.position}: {error!r}")
        failure.__cause__ = error
        return failure

    def _news(self, partition: int) -> None:
        self._revoke_orphans()
        copy = self._copies.get(partition)
        if copy is not None and copy.failure is not None:
            self._lost_copy(copy)
        self._when_changed(partition)
        self.changed.notify()

    def _lost_copy(self, copy: Replica) -> None:
        """Start a copy over if its place in the log is gone. Otherwise it cannot be read on: a take-over, or a marker
        that is waited for, meets the error, and stops the source."""
        where = f"{self._member.config.changelog}[{copy.partition}]"
        if copy.begins_anew:
            _log.warning("%s: its warm copy starts over: %s", where, copy.failure)
            self._discard(copy.partition)
            self._begin(self._new(copy.partition))
        elif copy.partition not in self._held:
            _log.error("%s: no warm copy can be kept here: %s", where, copy.failure)
