"""Reading whole partitions up to a position: changelogs at a restore, and look-ups."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from streams.errors import Stopped
from streams.kafka.reading.fetch_session import LOOKING_UP
from streams.kafka.reading.fetching import LogFetcher
from streams.kafka.reading.reading_loop import ReadingLoop
from streams.kafka.settings import ClientSettings
from streams.kafka.translate import broker_unavailable
from streams.records import IncomingRecord

_POLL_SECONDS = 0.05
"""Seconds of one wait for records; so often ``cancelled`` is looked at."""
_MOST_RECORDS = 10_000
"""Records of one call of ``receive``, at most."""
_STRETCH = 10_000
"""Number of offsets, from the end, that are read first in search of the last record of a kind."""


class PartitionReader:
    """``read_committed``; owned by one thread. It belongs to no group and commits nothing; ``read`` may be repeated."""

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._loop = ReadingLoop(settings)

    def read(
        self,
        topic: str,
        ranges: Mapping[int, tuple[int, int]],
        receive: Callable[[int, list[IncomingRecord]], None],
        *,
        stalled_after_seconds: float,
        cancelled: Callable[[], bool],
    ) -> None:
        """Read each partition from ``start`` until its position has reached ``end``, several partitions at once.

        ``ranges``: partition -> (first offset to read, high watermark). ``receive(partition, records)`` is called on
        this thread with the committed records below ``end``, per partition in order; never with an empty list.

        Open transactions hold the position back (at the last stable offset); so does an outage. When nothing moves for
        ``stalled_after_seconds``, ``BrokerUnavailable`` names the partitions and their positions. ``OffsetError``: a
        start is not in the log. ``TopicError``: no such topic. ``Stopped``: ``cancelled()``, called between batches,
        was true; a part was read then.
        """
        positions = {number: start for number, (start, end) in ranges.items() if start < end}
        if not positions:
            return
        fetcher = LogFetcher(self._settings, topic, LOOKING_UP, loop=self._loop)
        fetcher.add_all(positions, {number: ranges[number][1] for number in positions})
        last_progress = time.monotonic()
        try:
            while positions:
                if cancelled():
                    raise Stopped(f"reading {topic} was cancelled")
                for number, progress in fetcher.poll_batch(_POLL_SECONDS, _MOST_RECORDS).items():
                    records, end = progress.records, ranges[number][1]
                    # The position counts, not the records: the end of a log may be markers, aborted records and holes
                    # of compaction, and "the record before the end" would be waited for in vain.
                    if progress.position > positions[number]:
                        positions[number], last_progress = progress.position, time.monotonic()
                    if records and records[-1].offset >= end:
                        records = [record for record in records if record.offset < end]
                    if records:
                        receive(number, records)
                    if progress.position >= end:
                        del positions[number]
                        fetcher.remove([number])
                for failure in fetcher.take_failures().values():
                    raise failure
                if positions and time.monotonic() - last_progress > stalled_after_seconds:
                    raise broker_unavailable(
                        f"reading {_shown(topic, positions, ranges)}: no progress for {stalled_after_seconds:g} s",
                        self._settings.bootstrap_servers,
                        fetcher.reason or "an open transaction may hold the end of the log back",
                    )
        finally:
            fetcher.close()

    def read_all(
        self, topic: str, ranges: Mapping[int, tuple[int, int]], *, stalled_after_seconds: float
    ) -> dict[int, list[IncomingRecord]]:
        """Read the ranges, and return the records of each partition. Raises as ``read``."""
        found: dict[int, list[IncomingRecord]] = {number: [] for number in ranges}
        self.read(
            topic,
            ranges,
            lambda number, batch: found[number].extend(batch),
            stalled_after_seconds=stalled_after_seconds,
            cancelled=lambda: False,
        )
        return found

    def last_with_key(
        self, topic: str, ranges: Mapping[int, tuple[int, int]], key: bytes, *, stalled_after_seconds: float
    ) -> dict[int, IncomingRecord]:
        """Return the last committed record with this key, and no header, in each range (first offset, high watermark);
        partitions without one are left out. Reads backwards, in ever longer stretches. Raises as ``read``."""
        left = dict(ranges)
        found: dict[int, IncomingRecord] = {}
        stretch = _STRETCH

        def receive(number: int, records: list[IncomingRecord]) -> None:
            found.update((number, record) for record in records if record.key == key and not record.headers)

        while left := {number: (low, high) for number, (low, high) in left.items() if low < high}:
            spans = {number: (max(low, high - stretch), high) for number, (low, high) in left.items()}
            self.read(topic, spans, receive, stalled_after_seconds=stalled_after_seconds, cancelled=lambda: False)
            left = {number: (left[number][0], start) for number, (start, _) in spans.items() if number not in found}
            stretch *= 8  # each search costs round trips; the record is near the end of most logs
        return found

    def close(self) -> None:
        """Free everything. Does not raise; repeating is harmless."""
        self._loop.close()


def _shown(topic: str, positions: Mapping[int, int], ranges: Mapping[int, tuple[int, int]]) -> str:
    where = [
        f"{topic}[{number}] at {position} of {ranges[number][1]}" for number, position in sorted(positions.items())
    ]
    return ", ".join(where[:5]) + (f" and {len(where) - 5} more" if len(where) > 5 else "")
