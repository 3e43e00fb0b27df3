"""The lag of a group: by offsets, and without the markers of transactions at the end of a partition."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from streams.errors import BrokerUnavailable, Stopped, StreamsError
from streams.kafka.reading.reader import PartitionReader
from streams.kafka.settings import ClientSettings
from streams.records import IncomingRecord

TAIL_OFFSETS: Final = 16
"""Number of offsets behind the committed one that are read, at most: a transaction leaves one marker in a partition,
so a longer tail has records in it."""
_SECONDS: Final = 3.0
"""Seconds without progress after which the reading of tails is given up."""


class PartitionLag(msgspec.Struct, frozen=True):
    """Lag of a group in a partition: ``end - committed``, as other tools have it, transaction markers included.

    ``committed`` is ``None`` where the group has no offset; ``lag`` counts from ``start`` then. ``seconds``: the age of
    the oldest record in it, by the record's own time; ``None``: not known.
    """

    partition: int
    committed: int | None
    start: int
    stable: int
    end: int
    lag: int
    seconds: float | None = None


class Tails:
    """Reads the last offsets of partitions. One thread; it connects when it is needed first, and ``close`` ends that.

    A topic that is written by transactions ends in a marker, so a group that has handled everything is 1 or more behind
    by the offsets alone.
    """

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._reader: PartitionReader | None = None
        self._refused: set[str] = set()
        self._ended: dict[tuple[str, int], tuple[int | None, int]] = {}
        """Committed offset and end between which nothing but markers was; of each partition the last ones."""
        self._oldest: dict[tuple[str, int], tuple[int, int]] = {}
        """The offset from which the lag counts, and the time (ms) of the first record behind it."""

    def without_markers(self, topic: str, lags: Sequence[PartitionLag]) -> list[PartitionLag]:
        """Return the lags with a 0 where no record is left behind the committed offset. Where that cannot be read (no
        right to it, no answer) they stay as they are."""
        unknown = {
            entry.partition: (entry.committed, entry.end)
            for entry in lags
            if topic not in self._refused
            and entry.committed is not None
            and 0 < entry.lag <= TAIL_OFFSETS
            and entry.start <= entry.committed
            and entry.stable == entry.end  # else a transaction is open, and its records may come to count
            and not self._is_at_end(topic, entry)
        }
        if unknown:
            if self._reader is None:
                self._reader = PartitionReader(self._settings)
            try:
                found = self._reader.read_all(topic, unknown, stalled_after_seconds=_SECONDS)
                # Kept by offsets, so a partition at rest is not read again at each look.
                self._ended |= {(topic, number): unknown[number] for number, records in found.items() if not records}
            except BrokerUnavailable:
                pass
            except StreamsError:  # no right to read it
                self._refused.add(topic)
        return [msgspec.structs.replace(one, lag=0) if self._is_at_end(topic, one) else one for one in lags]

    def with_ages(self, topic: str, lags: Sequence[PartitionLag], now_ms: float) -> list[PartitionLag]:
        """Return the lags with the ages of their oldest records; 0 without a lag. Not known is that of a record which
        an open transaction holds back, which has no time, or cannot be read (no right to it, no answer)."""
        firsts = {entry.partition: max(entry.start, entry.committed or 0) for entry in lags if entry.lag}
        unknown = {
            entry.partition: (first, entry.stable)
            for entry in lags
            if topic not in self._refused
            and (first := firsts.get(entry.partition)) is not None
            and first < entry.stable
            and self._oldest.get((topic, entry.partition), (-1, 0))[0] != first
        }
        if unknown:
            self._oldest |= {(topic, number): found for number, found in self._first(topic, unknown).items()}
        aged: list[PartitionLag] = []
        for entry in lags:
            offset, time_ms = self._oldest.get((topic, entry.partition), (-1, -1))
            is_known = time_ms >= 0 and offset == firsts.get(entry.partition)
            seconds = 0.0 if not entry.lag else max(0.0, (now_ms - time_ms) / 1000) if is_known else None
            aged.append(msgspec.structs.replace(entry, seconds=seconds))
        return aged

    def _first(self, topic: str, ranges: Mapping[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
        """Return begin and time of the first record in each range, as far as they come within some seconds."""
        found: dict[int, tuple[int, int]] = {}
        until = time.monotonic() + _SECONDS
        if self._reader is None:
            self._reader = PartitionReader(self._settings)

        def receive(number: int, records: list[IncomingRecord]) -> None:
            found.setdefault(number, (ranges[number][0], records[0].timestamp_ms))

        try:  # the rest of the ranges, which may be all of the topic, is not wanted
            is_over = lambda: len(found) == len(ranges) or time.monotonic() > until  # noqa: E731
            self._reader.read(topic, ranges, receive, stalled_after_seconds=_SECONDS, cancelled=is_over)
        except (Stopped, BrokerUnavailable):
            pass
        except StreamsError:  # no right to read it
            self._refused.add(topic)
        return found

    def _is_at_end(self, topic: str, entry: PartitionLag) -> bool:
        return self._ended.get((topic, entry.partition)) == (entry.committed, entry.end)

    def close(self) -> None:
        """Close the connections."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()
