"""The marker of a write, and its consequences. Pure: no clock, no broker.

A write has one transactional id and one consumer group of the same name, without members. The group's
committed offset is the *marker*: it is committed in the same transaction as the rows, so it says what has been written.
A writer asks first: is it written (``Written``)? may it be (``None``)? Anything else is refused by an error. The table
of what follows is in ``docs/internals/spark-protocol.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar

import msgspec

from streams.errors import ConfigError, OffsetError, StreamsError

_M = TypeVar("_M", bound=msgspec.Struct)

MOST_REPLACED: Final = 64  # 37 bytes each; the broker takes 4096 bytes of metadata (offset.metadata.max.bytes)


@dataclass(frozen=True, slots=True)
class Stored:
    """A committed offset and its metadata, as the broker keeps them."""

    offset: int
    metadata: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The requested write is there: how many rows, when they were committed, and by which run, if that is known."""

    rows: int
    at_ms: int
    run: str | None = None


class SinkRequest(Protocol):
    """A request to write."""

    def written(self, stored: Stored | None) -> Written | None:
        """Read the marker: it is written, or (``None``) go on. Raises ``StreamsError`` to refuse."""
        ...

    def marker(self, stored: Stored | None, at_ms: int) -> Stored:
        """Return the marker to commit together with the rows, in place of ``stored``."""
        ...

    @property
    def rows(self) -> int:
        """Return the number of rows to write."""
        ...

    def __str__(self) -> str:
        """Return its name in messages."""
        ...


class _WriteMetadata(msgspec.Struct):
    run: str
    rows: int
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteRequest:
    """A batch write: once for each ``writeId``."""

    write_id: str
    run: str
    rows: int

    def __str__(self) -> str:
        return f"write {self.write_id!r}"

    def written(self, stored: Stored | None) -> Written | None:
        return written_by(stored)

    def marker(self, stored: Stored | None, at_ms: int) -> Stored:
        return Stored(1, msgspec.json.encode(_WriteMetadata(self.run, self.rows, at_ms)).decode())


def written_by(stored: Stored | None) -> Written | None:
    """The marker of a batch write, read."""
    if stored is None:
        return None
    metadata = read_metadata(stored, _WriteMetadata)
    return Written(rows=metadata.rows, at_ms=metadata.at_ms, run=metadata.run)


class _BatchMetadata(msgspec.Struct, omit_defaults=True):
    query: str
    batch: int
    rows: int
    at_ms: int
    replaced: tuple[str, ...] = ()
    """Queries that wrote here before and must not again, the last one last."""
    sources: dict[str, str] = {}
    """The ids of the topics that the query reads (option ``sourceTopics``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """One micro-batch of a streaming query: once for each query and batch, one batch after the other.

    ``identity`` is that of the sink. ``replaces`` is the query whose place this one is to take, ``last_written`` what
    an operator says (query, batch) where the marker is gone. ``sources``: the ids of the topics that the rows were read
    of, as they are now, behind the reading.
    """

    sink: str
    identity: str
    query: str
    batch: int
    rows: int
    replaces: str | None = None
    last_written: tuple[str, int] | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"sink {self.sink!r}, batch {self.batch}"

    def written(self, stored: Stored | None) -> Written | None:
        if stored is None:
            return self._without_marker()
        last = read_metadata(stored, _BatchMetadata)
        if last.query != self.query:
            self._check_other(last)
            return None
        if last.batch == self.batch:
            # Spark stores a batch's offsets before it runs it, so a batch run again has the rows of the first run.
            # Another number of rows is the only sign here that two runs have planned it, each its own way.
            if last.rows != self.rows and self.last_written != (self.query, self.batch):
                raise StreamsError(
                    f"{self}: is in Kafka with {last.rows} rows, and has {self.rows} now: another run has planned it "
                    "anew (a second copy of the checkpoint, or one put back), or the query's code was changed in "
                    "between, or it is not deterministic. Nothing was written. If what is there is to stay as it is, "
                    f"start once with option lastWrittenBatch={self.query}:{self.batch}"
                )
            return Written(rows=last.rows, at_ms=last.at_ms)
        if last.batch == self.batch - 1:
            # Only here: a batch that is in Kafka already must be passed over whatever has become of its sources.
            self._check_sources(last.sources)
            return None
        if last.batch > self.batch:
            raise StreamsError(
                f"{self}: this query has written up to batch {last.batch} already. Either another run of it is ahead "
                "(then this one is the old one: leave it stopped), or the checkpoint is an older copy; its next "
                "batches would not be the ones that were written. Nothing was written"
            )
        raise StreamsError(
            f"{self}: the last batch written is {last.batch}, so batches in between are missing: they went to another "
            f"sink (the query was moved to it, and back), or the marker (group {self.identity}) was set back. Nothing "
            f"was written. If all before batch {self.batch} are in the topic, delete that group, and start once with "
            f"option lastWrittenBatch={self.query}:{self.batch - 1}"
        )

    def _without_marker(self) -> Written | None:
        said = self.last_written[1] if self.last_written and self.last_written[0] == self.query else None
        if said == self.batch:
            return Written(rows=self.rows, at_ms=0)
        if said == self.batch - 1 or (said is None and self.batch == 0):
            return None
        given = "" if self.last_written is None else " (option lastWrittenBatch={}:{})".format(*self.last_written)
        raise ConfigError(
            f"{self}: the marker of what was written before is missing{given}. It expires when nothing is written for "
            "longer than the broker's offsets.retention.minutes (7 days by default), goes when its group "
            f"{self.identity} or its topic is deleted, and is not found when the option topic, markerTopic or idPrefix "
            f"was changed. Find out whether batch {self.batch} is in the topic, then start once with option "
            f"lastWrittenBatch={self.query}:{self.batch} (it is) or {self.query}:{self.batch - 1} (it is not). "
            "Nothing was written"
        )

    def _check_sources(self, known: Mapping[str, str]) -> None:
        for topic, was in known.items():
            if (now := self.sources.get(topic, was)) != was:
                raise OffsetError(
                    f"{self}: source topic {topic} was deleted and recreated (id {was} then, {now} now) since the last "
                    "batch: the rows of this one may be of either. Nothing was written. Begin with a new checkpoint "
                    f"and option replaceQuery={self.query}"
                )

    def _check_other(self, last: _BatchMetadata) -> None:
        # Before the batch number: a query that was replaced at its batch 0 still has a `replaceQuery` of its own, with
        # which it must not take its successor's place.
        if self.query in last.replaced:
            raise StreamsError(
                f"{self}: query {last.query} has replaced this one ({self.query}) and goes on under this name; this "
                "one must not write here again. Nothing was written"
            )
        if self.batch > 0:
            raise StreamsError(
                f"{self}: query {last.query} writes to this sink now (up to batch {last.batch}); this is {self.query}. "
                "Two queries need two sink names. Nothing was written"
            )
        if self.replaces != last.query:
            raise ConfigError(
                f"{self}: query {last.query} has written to this sink before (up to batch {last.batch}), and this is a "
                f"new one, {self.query} (a new checkpoint): it would write again what it reads again. If that is "
                f"meant, give option replaceQuery={last.query}; if not, go on with the old checkpoint, or give this "
                "sink a name of its own. Nothing was written"
            )
        if len(last.replaced) >= MOST_REPLACED:
            raise ConfigError(
                f"{self}: {len(last.replaced)} queries were replaced under this name, and no more can be remembered: "
                "give the sink a new name. Nothing was written"
            )

    def marker(self, stored: Stored | None, at_ms: int) -> Stored:
        replaced: tuple[str, ...] = ()
        if stored is not None:
            last = read_metadata(stored, _BatchMetadata)
            replaced = last.replaced if last.query == self.query else (*last.replaced, last.query)
        metadata = _BatchMetadata(self.query, self.batch, self.rows, at_ms, replaced, dict(self.sources))
        return Stored(self.batch + 1, msgspec.json.encode(metadata).decode())


def read_metadata(stored: Stored, kind: type[_M]) -> _M:
    """Raises ``StreamsError`` for a marker that is none of these."""
    try:
        return msgspec.json.decode(stored.metadata, type=kind)
    except msgspec.MsgspecError as error:
        raise StreamsError(
            f"the marker (offset {stored.offset}) is not one of this library: the offsets of its group were set by "
            f"other means ({error}). Delete the group to start without a marker. Nothing was written"
        ) from None
