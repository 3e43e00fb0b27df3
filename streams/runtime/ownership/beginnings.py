"""Places where partitions without a past begin, if ``start_at`` says so. On the loop.

A member finds the place at its take-over. It is committed at once, with a begin record beside the offset record: so the
next take-over does not decide anew.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

import msgspec

from streams.errors import ConfigError, OffsetError
from streams.model.places import EARLIEST, LATEST, shown_place
from streams.records import Change
from streams.runtime.changelog import BEGIN_KEY, BeginRecord, OffsetRecord
from streams.runtime.member import Member
from streams.runtime.ownership.range_reader import Range
from streams.runtime.partition.worker import PartitionWorker
from streams.runtime.ports import Blocking

_log = logging.getLogger(__name__)

REQUEST_SECONDS: Final = 20.0
"""One request to the broker takes so many seconds, at most."""


class Beginnings:
    """The places of one member's settings. Raises ``ConfigError`` for a topic that is no input, or one that always
    begins at its start."""

    def __init__(self, member: Member, source: Blocking) -> None:
        """``source``: the thread for requests about the inputs."""
        config = member.config
        self._member, self._source, self._places = member, source, config.start_places
        plain = [spec.topic for spec, _ in member.further_inputs if spec.table is None and not spec.is_own]
        self._topics = [config.topic, *plain]
        self._has_said = False
        for topic, _ in self._places.offsets:
            if topic not in ("", *self._topics):
                raise ConfigError(
                    f"start_at: {topic!r} is no input that can begin anywhere: those are {', '.join(self._topics)}"
                )

    async def find(self, worker: PartitionWorker, record: OffsetRecord | None, logs: Mapping[str, Range]) -> None:
        """Find where a partition begins in each input, if it has no offset record. ``logs``: start and end of the
        inputs. Raises ``OffsetError`` for a place that is not there, and ``BrokerUnavailable``."""
        if record is not None:
            if not self._has_said:
                self._has_said = True
                _log.info(
                    "start_at=%r has no effect: the source has begun already (%s goes on at offset %d)",
                    self._member.config.start_at, worker.topic_partition, record.offset,
                )  # fmt: skip
            return
        for topic in self._topics:
            if topic not in worker.started_at:  # a restart keeps the first answer
                found = await self._find(topic, worker.partition, logs[topic])
                if found is not None:
                    worker.started_at[topic] = found

    def change(self, worker: PartitionWorker) -> Change:
        """Return the begin record of a partition that begins now."""
        config, number = self._member.config, worker.partition
        at = {topic: worker.started_at[topic] for topic in self._topics if topic in worker.started_at}
        places = {topic: self._text(topic, number) for topic in at}
        began = BeginRecord(how="start", at=at, places=places, by=config.instance_id, at_ms=self._member.wall_ms())
        return Change(BEGIN_KEY, msgspec.json.encode(began))

    def _text(self, topic: str, number: int) -> str:
        config, time_ms = self._member.config, self._places.time_ms
        if (offset := self._places.offset_in(topic, number, config.topic)) is not None:
            return f"{number}@{offset}"
        return config.auto_offset_reset if time_ms is None else shown_place(time_ms)

    async def _find(self, topic: str, number: int, log: Range) -> int | None:
        places, time_ms, (low, high) = self._places, self._places.time_ms, log
        offset = places.offset_in(topic, number, self._member.config.topic)
        if offset is not None:
            if not low <= offset <= high:
                raise OffsetError(
                    f"{topic}[{number}]: start_at names offset {offset}, and the log has {low} to {high} only"
                )
            return offset
        if time_ms is None:
            return None  # auto_offset_reset decides
        if time_ms == EARLIEST:
            return low
        call, client = self._source.call, self._member.source_log
        if time_ms > self._member.wall_ms():
            raise OffsetError(f"{topic}[{number}]: start_at={shown_place(time_ms)} is in the future; see 'latest'")
        # The end comes first: a record of that time that is sent between the two requests is behind it.
        end = await call(client.stable_end, topic, number, self._deadline())
        found = None
        if time_ms != LATEST:
            found = await call(client.offset_of_time, topic, number, time_ms, self._deadline())
        return max(end if found is None else found, low)  # None: no record is that young

    def _deadline(self) -> float:
        return self._member.now() + REQUEST_SECONDS
