"""The markers of several lanes, and their consequences. Pure, as ``markers.py``.

Lanes are written one by one, so at any moment some may have a batch and others not. Two things could then put rows into
two lanes: another number of lanes, and another run that is not finished. So before each batch the driver fences all
lanes, reads all markers (``plan``), and puts into each a *token* that belongs to this run of this batch alone. A task
writes only where it finds its own run's token. A pin changes the token and nothing of what the marker says of rows.

Searched as a model: ``docs/internals/spark-protocol.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from streams.errors import ConfigError, StreamsError
from streams.spark.markers import MOST_REPLACED, Stored, Written, read_metadata

NOTHING = -1
"""The batch of a lane that has none yet."""


class LaneMetadata(msgspec.Struct, frozen=True, omit_defaults=True):
    """``batch`` is the last one written here, with how many ``lanes``; ``most`` how many were ever used under this name
    (kept in lane 0)."""

    query: str
    batch: int
    lanes: int
    most: int
    token: str
    at_ms: int
    replaced: tuple[str, ...] = ()

    def stored(self) -> Stored:
        return Stored(self.batch + 1, msgspec.json.encode(self).decode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan of a batch's driver: this batch of this query over so many lanes."""

    sink: str
    query: str
    batch: int
    lanes: int
    token: str
    replaces: str | None = None
    last_written: tuple[str, int] | None = None

    def __str__(self) -> str:
        return f"lanes of {self.sink!r}, batch {self.batch}"

    def most(self, first: Stored | None) -> int:
        """Return the number of lanes that have to be fenced, by what lane 0 says."""
        return max(self.lanes, 0 if first is None else read_metadata(first, LaneMetadata).most)

    def pins(self, stored: Sequence[Stored | None], at_ms: int) -> list[Stored]:
        """The markers to put, one for each lane that there ever was. Raises ``StreamsError`` to refuse the batch."""
        found = [None if each is None else read_metadata(each, LaneMetadata) for each in stored]
        first = found[0]
        start = self._start(first)
        if first is None and self.last_written is None and any(found):
            raise StreamsError(f"{self}: the marker of lane 0 is missing, others are there. Nothing was written")
        replaced = () if first is None else first.replaced
        if first is not None and first.query != self.query:
            replaced = (*first.replaced, first.query)
        if len(replaced) > MOST_REPLACED:
            raise ConfigError(
                f"{self}: {MOST_REPLACED} queries were replaced under this name, and no more can be remembered: give "
                "the sink a new name. Nothing was written"
            )
        pinned = []
        for lane, marker in enumerate(found):
            if marker is None or marker.query != self.query:
                self._check_gap(lane, marker, first)
                batch, lanes = start, self.lanes
            else:
                self._check(lane, marker)
                batch, lanes = marker.batch, marker.lanes
            pinned.append(LaneMetadata(self.query, batch, lanes, len(found), self.token, at_ms, replaced).stored())
        return pinned

    def _start(self, first: LaneMetadata | None) -> int:
        """The batch that a lane without a marker of this query stands at. Raises when lane 0 does not allow this batch
        at all."""
        if first is None:
            said = self.last_written[1] if self.last_written and self.last_written[0] == self.query else None
            if said is not None and said in (self.batch, self.batch - 1):
                return said
            if self.batch == 0 and said is None:
                return NOTHING
            raise ConfigError(
                f"{self}: the markers of what was written before are missing (they expire with the broker's "
                "offsets.retention.minutes, and go with their groups or their topic). Find out whether batch "
                f"{self.batch} is in the topic, then start once with last_written=({self.query!r}, {self.batch}) (it "
                f"is) or ({self.query!r}, {self.batch - 1}) (it is not). Nothing was written"
            )
        if self.query in first.replaced:
            raise StreamsError(
                f"{self}: query {first.query} has replaced this one ({self.query}); this one must not write here "
                "again. Nothing was written"
            )
        if first.query != self.query and (self.batch != 0 or self.replaces != first.query):
            raise ConfigError(
                f"{self}: query {first.query} writes into these lanes (up to batch {first.batch}), and this is "
                f"{self.query}. If a new checkpoint is to write everything again, give replace_query="
                f"{first.query!r} in its first batch; else give this sink a name of its own. Nothing was written"
            )
        if first.query == self.query and first.batch not in (self.batch - 1, self.batch):
            raise StreamsError(
                f"{self}: lane 0 has written up to batch {first.batch}. Either another run of this query is ahead "
                "(then this one is the old one), or the checkpoint is an older copy, or markers were set back. "
                "Nothing was written"
            )
        return NOTHING

    def _check_gap(self, lane: int, marker: LaneMetadata | None, first: LaneMetadata | None) -> None:
        if first is None or first.query != self.query:
            if marker is not None and marker.query != self.query and (first is None or marker.query != first.query):
                raise StreamsError(
                    f"{self}: lane {lane} is of query {marker.query}, lane 0 is not: its marker was deleted. Nothing "
                    "was written"
                )
            return
        if marker is None and lane < first.most and first.batch != NOTHING:
            raise StreamsError(
                f"{self}: the marker of lane {lane} is missing, that of lane 0 is there: its group was deleted. "
                "Nothing was written"
            )
        if marker is not None and (marker.query not in first.replaced or first.batch != NOTHING):
            raise StreamsError(
                f"{self}: lane {lane} is of query {marker.query}, lane 0 of {first.query}. Nothing was written"
            )

    def _check(self, lane: int, marker: LaneMetadata) -> None:
        if marker.batch > self.batch:
            raise StreamsError(
                f"{self}: lane {lane} has written batch {marker.batch} already: this is the older run, or the "
                "checkpoint is an older copy. Nothing was written"
            )
        if marker.batch == self.batch and marker.lanes != self.lanes:
            raise ConfigError(
                f"{self}: lane {lane} has this batch already, written with lanes={marker.lanes}, not {self.lanes}: "
                f"start with {marker.lanes} and change the number afterwards. Nothing was written"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneRequest:
    """One lane of one batch, as a task wants to write it."""

    plan: Plan
    lane: int

    rows = None  # a task knows how many there are only at the end of its rows

    def __str__(self) -> str:
        return f"lane {self.lane} of {self.plan.sink!r}, batch {self.plan.batch}"

    def written(self, stored: Stored | None) -> Written | None:
        marker = None if stored is None else read_metadata(stored, LaneMetadata)
        if marker is None or marker.token != self.plan.token:
            raise StreamsError(f"{self}: another run has taken the lanes over. Nothing was written")
        if marker.batch == self.plan.batch:
            return Written(rows=0, at_ms=marker.at_ms)
        return None

    def marker(self, stored: Stored | None, at_ms: int) -> Stored:
        assert stored is not None
        before = read_metadata(stored, LaneMetadata)
        changed = msgspec.structs.replace(before, batch=self.plan.batch, lanes=self.plan.lanes, at_ms=at_ms)
        return changed.stored()
