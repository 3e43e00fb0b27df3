"""The source that a muted one follows: its changelog, read committed, as far as muted partitions are here.

A thread reads it, and takes from each batch the position and the timers; the loop gives them to the worker. The whole
changelog is read, because a timer may have been set long ago.
"""

from __future__ import annotations

import logging
from typing import Final

from streams.core.following import News, TimerMark
from streams.errors import BrokerUnavailable, OffsetError, TopicReplaced
from streams.records import IncomingRecord
from streams.runtime.bridge import Inlet
from streams.runtime.changelog import (
    OFFSET_KEY,
    PARKED_PREFIX,
    TIMER_PREFIX,
    VOICE_KEY,
    VoiceRecord,
    decode_offset,
    decode_timer,
)
from streams.runtime.member import Member
from streams.runtime.partition.muted_worker import MutedWorker
from streams.runtime.partition.timers import is_own
from streams.runtime.ports import LogTail, TopicRequests
from streams.runtime.reading.log_follower import FROM_START, FollowedPartition
from streams.runtime.signal import Signal

_log = logging.getLogger(__name__)

ASK_SECONDS: Final = 10.0
"""One request about the other changelog takes so many seconds, at most."""
AGAIN_SECONDS: Final = 1.0
"""A first look that was not answered is repeated after so many seconds."""


class _Copy(FollowedPartition):
    """One partition of the other changelog. ``goal``: its end at the first look."""

    def __init__(self, worker: MutedWorker) -> None:
        super().__init__(worker.partition, worker.epoch)
        self.worker = worker
        self.goal = -1

    def read(self, records: list[IncomingRecord], position: int, end: int) -> News:
        """Return what these records say. On the tail's thread. Raises ``OffsetError``."""
        positions: dict[str, int] | None = None
        timers: dict[str, TimerMark | None] = {}
        for record in records:
            key = record.key or b""
            if key == OFFSET_KEY and record.value is not None:
                found, (own, *further) = decode_offset(record), self.worker.followed.own
                at = {topic: found.position_in(topic, self.partition) for topic in further}
                positions = {own: found.offset} | {topic: one[0] for topic, one in at.items() if one is not None}
                ids = found.ids, self.worker.ids
                if ids[0].source and ids[1].source not in ("", ids[0].source):
                    raise TopicReplaced("it reads another topic of that name")
            elif key.startswith(TIMER_PREFIX) and not key.startswith(PARKED_PREFIX):
                name, timer = decode_timer(record)
                if not is_own(name):
                    timers[name] = None if timer is None else TimerMark(timer.due_ms, timer.by)
            elif key == VOICE_KEY and record.value is not None:
                raise OffsetError("it is muted itself")
        self.advance(position, end, more=bool(records))
        self.goal = end if self.goal < 0 else self.goal
        return News(positions, timers, 0 <= self.goal <= self.position)


class FollowedSource:
    """The other source of one member; nothing at all as long as no partition is muted. On the loop, except
    ``_received`` and ``_failed``."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._voice: VoiceRecord | None = None
        self._copies: dict[int, _Copy] = {}
        self._new: list[_Copy] = []
        self._wake = Signal()

    def follow(self, worker: MutedWorker) -> None:
        """Tell a partition that begins to work what the other source does. Raises ``OffsetError`` for partitions that
        follow several."""
        voice = worker.voice
        assert voice is not None  # or it would not work
        if self._voice is None:
            self._voice, self._inlet = voice, Inlet(self._learned)
            self._member.spawn(lambda: self._run(voice))
        if (self._voice.changelog, self._voice.changelog_id) != (voice.changelog, voice.changelog_id):
            raise OffsetError(f"{worker.topic_partition}: it follows {voice.changelog}, others {self._voice.changelog}")
        copy = self._copies[worker.partition] = _Copy(worker)
        self._new.append(copy)
        self._wake.notify()

    async def _run(self, voice: VoiceRecord) -> None:
        member, checked = self._member, False
        clients, thread = member.connections.followed(voice.changelog), member.thread("kes-following")
        topics: TopicRequests = await thread.call(clients.topics)
        tail: LogTail = clients.tail()
        tail.start(self._received, self._failed)
        try:
            while True:
                try:
                    found = await thread.call(topics.identity, voice.changelog, ASK_SECONDS)
                    checked = True
                except BrokerUnavailable as error:
                    _log.debug("%s cannot be looked at: %s", voice.changelog, error)
                else:
                    self._refuse_replaced(voice, found)
                gone = [number for number, copy in self._copies.items() if copy.worker.is_closing]
                tail.remove(gone)
                for number in gone:
                    del self._copies[number]
                new, self._new = (self._new, []) if checked else ([], self._new)
                for copy in new:
                    if not copy.worker.is_closing:
                        tail.add(copy.partition, FROM_START, copy.epoch)
                await self._wake.wait(member.environment.topic_check_seconds if checked else AGAIN_SECONDS)
        finally:
            tail.close()

    def _refuse_replaced(self, voice: VoiceRecord, found: tuple[str, int] | None) -> None:
        if found is None or found[0] != voice.changelog_id:
            what = "does not exist any more" if found is None else "was deleted and created again"
            raise TopicReplaced(
                f"{voice.changelog}, the changelog of the group {voice.group} which this source follows muted, {what}: "
                "nothing says any more how far that one is. Begin the rebuild anew with another group_id"
            )

    def _received(self, partition: int, epoch: int, records: list[IncomingRecord], position: int, end: int) -> None:
        copy = self._copies.get(partition)
        if copy is not None and copy.epoch == epoch:
            self._inlet.put((copy, copy.read(records, position, end)))

    def _failed(self, partition: int, epoch: int, error: Exception) -> None:
        copy = self._copies.get(partition)
        if copy is not None and copy.epoch == epoch:
            self._inlet.put((copy, error))

    def _learned(self, learned: tuple[_Copy, News | Exception]) -> None:
        copy, news = learned
        worker = copy.worker
        if worker.is_closing or self._copies.get(copy.partition) is not copy:
            return
        try:
            if isinstance(news, Exception):
                raise news
            worker.followed.learn(news)
            worker.learned({*news.timers})
        except Exception as error:
            assert self._voice is not None
            where = f"{self._voice.changelog}[{copy.partition}]"
            failure = OffsetError(
                f"{where}: the group {self._voice.group}, which {worker.topic_partition} follows muted, cannot be "
                f"followed: {error}"
            )
            failure.__cause__ = error
            self._member.fail(failure)
