"""A copy of one partition's state: its store, and how far of the changelog it contains."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from streams.codecs import RESERVED_KEY_PREFIX
from streams.core.checkpoints import MARGIN_MS, reason_to_refuse
from streams.core.timers import Timer
from streams.errors import OffsetError, Stopped
from streams.records import TYPE_HEADER, Change, IncomingRecord
from streams.runtime.changelog import (
    JOIN_PREFIX,
    OFFSET_KEY,
    RELEASE_KEY,
    SEEN_PREFIX,
    TIMER_PREFIX,
    VOICE_KEY,
    OffsetRecord,
    ReleaseMarker,
    VoiceRecord,
    decode_offset,
    decode_release,
    decode_timer,
    decode_voice,
)
from streams.runtime.keeping.folders.entries import Point
from streams.runtime.keeping.kept_partition import KeptPartition
from streams.runtime.partition.joined_rows import JoinedRows
from streams.runtime.partition.seen_ids import SeenIds
from streams.runtime.reading.log_follower import FROM_START, FollowedPartition

_log = logging.getLogger(__name__)

NO_PAUSE_MS = 60_000
"""No tombstone can have gone within so many milliseconds of the last record: it is short beside ``MARGIN_MS``, an
hour."""
READY_WITHIN = 100_000
"""A copy that is further behind the end of the changelog than so many records is not warm: fewer are read in about a
second."""


class Replica(FollowedPartition):
    """A store, and how far of the changelog it contains. ``marker``: the release marker, if that is the last record so
    far. ``kept``: its way to the disk, if it is kept there. ``witness``: the record that its folder goes up to, until
    the log has shown that it goes on from there; before that the copy is not taken. ``as_of_ms``: all that the copy
    lacks is younger."""

    def __init__(
        self,
        partition: int,
        epoch: int,
        store: Any,
        since: float,
        joined: JoinedRows | None = None,
        seen: SeenIds | None = None,
    ) -> None:
        super().__init__(partition, epoch)
        self.store = store
        self.joined = JoinedRows() if joined is None else joined
        self.seen = SeenIds() if seen is None else seen
        self.since = since
        self.goal: int | None = None  # a take-over waits until the position has reached it
        self.busy = False  # the tail's thread is in its store
        self.awaited = False  # a look at it is to be repeated when it is not busy any more
        self.warm = False  # it was ready when a take-over began
        self.last = -1  # offset of the last record
        self.offset_record: OffsetRecord | None = None
        self.timers: dict[str, Timer] = {}
        self.voice: VoiceRecord | None = None
        self.marker: ReleaseMarker | None = None
        self.failure: Exception | None = None
        self.timestamp_ms = self.as_of_ms = self.begun_ms = 0
        self.is_outlived = False  # by tombstones that it has not read
        self.kept: KeptPartition | None = None
        self.witness: Point | None = None
        self.is_from_folder = self.is_discarded = False
        self.folder_loaded = self.folder_bytes = 0

    @property
    def is_ready(self) -> bool:
        return self.caught_up and self.failure is None and self.behind <= READY_WITHIN

    @property
    def begins_anew(self) -> bool:
        """Check that it has failed because its place in the log is gone, or is in another log, or because tombstones
        that it has not read may be gone."""
        return self.is_outlived or (isinstance(self.failure, OffsetError) and self.start != FROM_START)

    def restore(self, changes: Sequence[Change]) -> None:
        """Put what a folder holds into the store. On the keeper's thread."""
        if self.is_discarded:
            raise Stopped("the copy is not wanted any more")
        receive = self.store.receive_change
        for change in changes:
            if change.key.startswith(TIMER_PREFIX):
                self._receive_timer(IncomingRecord("", self.partition, -1, change.key, change.value, None))
            elif change.key.startswith(JOIN_PREFIX):
                self.joined.receive(change)
            elif change.key.startswith(SEEN_PREFIX):
                self.seen.receive(change)
            elif change.key == VOICE_KEY:
                self._receive_voice(IncomingRecord("", self.partition, -1, change.key, change.value, None))
            elif not change.key.startswith(RESERVED_KEY_PREFIX):  # others are beside the state, as in the log
                receive(change)

    def loads(self, loaded: int, size: int) -> None:
        """Note how many bytes of its folder are in the store. On the keeper's thread."""
        self.folder_loaded, self.folder_bytes = loaded, size

    def begin_from(self, point: Point) -> None:
        """Go on from the end of a folder whose changes are in the store: its last record is read once more."""
        record = IncomingRecord("", self.partition, point.offset, OFFSET_KEY, point.record, None)
        self.offset_record = decode_offset(record)
        self.witness, self.last = point, point.offset
        self.timestamp_ms = self.as_of_ms = point.as_of_ms
        self.is_from_folder = True
        self.begin_at(point.offset)

    def examine(self, records: list[IncomingRecord], position: int, end: int) -> None:
        """Compare the log with the end of the folder. Raises ``OffsetError``: it is another log, or was cut. On the
        tail's thread."""
        witness = self.witness
        if witness is not None:
            first = records[0] if records else None
            found = None if first is None else (first.offset, first.value, first.key == OFFSET_KEY)
            reason = reason_to_refuse(witness.offset, witness.record, position=position, end=end, first=found)
            if reason:
                raise OffsetError(f"partition {self.partition}: {reason}")
            if records:
                self.witness = None

    def refuse_if_outlived(
        self, records: Sequence[IncomingRecord], position: int, now_ms: int, tombstones_ms: Callable[[], int]
    ) -> None:
        """Compare the time since its last record with the life of tombstones: this process may have been frozen, or cut
        off, for longer, and a key whose tombstone it never saw would stay in it, and in its folder. Raises
        ``OffsetError``. On the tail's thread. ``tombstones_ms`` may make a request: it is called only after a pause."""
        age_ms = now_ms - self.as_of_ms
        if position <= self.position or age_ms <= NO_PAUSE_MS:
            return
        life_ms = tombstones_ms()
        most = life_ms - MARGIN_MS
        if self.as_of_ms == self.begun_ms and most > 0:  # by this clock alone; or a slow restore would never end
            most = life_ms
        if not 0 < most < age_ms:
            return
        # A young record right behind: the partition was idle. A transaction that is gone leaves a wider hole, for its
        # records and its marker; one offset is the marker of the last one.
        young = bool(records) and now_ms - records[0].timestamp_ms <= most
        if not (young and records[0].offset - self.position <= 1):
            self.is_outlived = True
            hours, kept = age_ms / 3_600_000, life_ms / 3_600_000
            raise OffsetError(
                f"partition {self.partition}: it was not read on for {hours:.1f} h; the changelog keeps tombstones for "
                f"{kept:g} h (delete.retention.ms)"
            )

    def receive(self, records: list[IncomingRecord]) -> None:
        """Put changelog records into the store. On the tail's thread."""
        change = self.store.receive_change
        changes: list[Change | None] = []
        size = 0
        for record in records:
            key, value = record.key, record.value
            changes.append(None)
            if key is None:
                _log.warning("%s: a record without key does not belong into a changelog; it is ignored", record.where)
                continue
            size += len(key) + len(value or b"")
            if not key.startswith(RESERVED_KEY_PREFIX):
                kind = record.header(TYPE_HEADER) if record.headers else None
                changes[-1] = received = Change(key, value, None, kind.decode() if kind else "")
                change(received)
            elif key == OFFSET_KEY and value is not None:
                self._receive_offset(record)
            elif key.startswith(TIMER_PREFIX):
                self._receive_timer(record)
            elif key.startswith(JOIN_PREFIX):
                changes[-1] = received = Change(key, value)  # of rows on disk: see RowTable.set_row
                self.joined.receive(received)
            elif key.startswith(SEEN_PREFIX):
                changes[-1] = received = Change(key, value)  # as above
                self.seen.receive(received)
            elif key == VOICE_KEY:
                self._receive_voice(record)
        last = records[-1]
        self.marker = decode_release(last) if last.key == RELEASE_KEY and last.value is not None else None
        self.last = last.offset
        self.timestamp_ms = last.timestamp_ms
        self.records += len(records)
        self.size += size
        if self.kept is not None:
            self.kept.receive(records, changes)

    def advance(self, position: int, end: int, *, more: bool) -> bool:
        """See ``FollowedPartition.advance``; returns whether that is news for a take-over or a move."""
        before = self.position
        first = super().advance(position, end, more=more)
        if self.kept is not None:
            self.kept.is_ready = self.is_ready and self.witness is None
        reached = self.goal is not None and before < self.goal <= self.position
        return first or reached or self.marker is not None

    def _receive_offset(self, record: IncomingRecord) -> None:
        found, known = decode_offset(record), self.offset_record
        if self.is_from_folder and known is not None and found.offset < known.offset:
            raise OffsetError(
                f"{record.where}: the input offset goes back from {known.offset} to {found.offset}: the log lacks what "
                "was read from it before"
            )
        self.offset_record = found

    def _receive_timer(self, record: IncomingRecord) -> None:
        name, timer = decode_timer(record)
        if timer is None:
            self.timers.pop(name, None)
        else:
            self.timers[name] = timer

    def _receive_voice(self, record: IncomingRecord) -> None:
        self.voice = None if record.value is None else decode_voice(record)
