"""The task of a muted partition: as of any other, but for what it waits for, and when its timers fire."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from streams.core.following import Followed
from streams.core.position import Position, offsets_of
from streams.records import IncomingRecord
from streams.runtime.changelog import MUTED, ReleaseMarker
from streams.runtime.partition.host import Host
from streams.runtime.partition.merged_inputs import MergedInputs
from streams.runtime.partition.muted import FollowingInbox, MutedTimers, QueuedRecords, TimerIsDue
from streams.runtime.partition.state import Restored
from streams.runtime.partition.worker import PartitionWorker
from streams.statistics import PartitionStatistics


class Follows(Protocol):
    """The source that muted partitions follow (``ownership.following.FollowedSource``)."""

    def follow(self, worker: MutedWorker) -> None: ...


class MutedHost(Host, Protocol):
    """A host of muted partitions."""

    @property
    def following(self) -> Follows: ...


class MutedWorker(PartitionWorker):
    """A partition that follows that of another source. ``followed``: what is known of it."""

    kinds = FollowingInbox, MutedTimers, QueuedRecords
    timers: MutedTimers

    def __init__(self, engine: MutedHost, partition: int, epoch: int) -> None:
        super().__init__(engine, partition, epoch)
        self._following, self.followed = engine.following, self.timers.followed

    def adopt(self, restored: Restored) -> None:
        """Work on this state from now on."""
        super().adopt(restored)
        self.before_event = self.timers.at(self.before_event)

    def start_at(self, position: Position) -> None:
        """Begin work at this position; no record is taken before the other source is known."""
        super().start_at(position)
        topics = [self.topic_partition.topic] if self.inputs is None else [one.where.topic for one in self.inputs.all]
        self.followed = self.timers.followed = Followed(dict(zip(topics, offsets_of(position), strict=True)))
        self._following.follow(self)

    def statistics(self, ends: Sequence[int] = ()) -> PartitionStatistics:
        """Return its figures, with how far it is behind the other source."""
        behind = None
        if self.followed.is_whole:
            here = zip(self.followed.own, offsets_of(self.position), strict=True)
            behind = sum(max(0, self.followed.cap(topic) - offset) for topic, offset in here)
        return msgspec.structs.replace(super().statistics(ends), behind_followed=behind)

    def learned(self, timers: set[str]) -> None:
        """Take in what may be taken in by now; ``timers``: the other source's that have changed."""
        self.timers.learned(timers)
        for inbox, topic in zip(self.inboxes, self.followed.own, strict=True):
            assert isinstance(inbox, FollowingInbox)
            inbox.open_to(self.followed.cap(topic))
        for one in () if self.inputs is None else self.inputs.all:
            one.note(self.engine.now())

    def further_fields(self, position: Position) -> tuple[str, str, msgspec.Raw | msgspec.UnsetType]:
        """Return the fields of its offset record, with the mark that older releases refuse."""
        source_id, changelog_id, inputs = super().further_fields(position)
        return source_id, MUTED + changelog_id, inputs

    def release_marker(self, to: str, generation: int) -> ReleaseMarker:
        """Return the marker with the mark: no member that knows no voices takes the partition for its own."""
        return ReleaseMarker(MUTED + to, generation)

    async def run_slice(self, records: list[IncomingRecord], start: int) -> int:
        """Handle some of these records, as far as no timer is due before them; before that the timers that are."""
        while (timer := self.timers.due(records[start].timestamp_ms)) is not None:
            if self.is_closing:
                return start
            await self._due_timers.fire(timer)
        if self.is_closing:
            return start
        self.timers.ends_slice = True
        try:
            position, failure = self.hot_path.run(records, start)
        finally:
            self.timers.ends_slice = False
        if position == start or not isinstance(failure, TimerIsDue | None):
            return position + await self._singles.one(records[position], failure)
        await self._breathe(position - start)
        return position

    async def _run_merged(self, inputs: MergedInputs) -> bool:
        return False  # timers may be due between two records

    async def _between(self) -> bool:
        self.timers.by_clock()
        return await super()._between()
