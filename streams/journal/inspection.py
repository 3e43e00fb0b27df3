"""Looks at a whole journal, without its classes: terms, entries, checkpoints, and whether all is in order. Blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from streams.core.journal import BARRIER_TYPE, CHECKPOINT_TYPE, LogOrder, checkpoint_of, term_of
from streams.core.router import type_and_version
from streams.kafka.questions.admin import Watermarks
from streams.kafka.reading.reader import PartitionReader
from streams.records import IncomingRecord

_STALLED_SECONDS = 30.0


class SeenTerm(NamedTuple):
    """A term in the log, and how many entries of events it has there."""

    term: int
    writer: str
    address: str
    began_ms: int
    entries: int


class SeenCheckpoint(NamedTuple):
    """A checkpoint in the log."""

    offset: int
    term: int
    covers: int
    name: str
    at_ms: int


class JournalSurvey:
    """The contents of a journal's log, record by record. ``is_start``: from offset 0 on."""

    def __init__(self, *, is_start: bool) -> None:
        self.terms: list[SeenTerm] = []
        self.checkpoints: list[SeenCheckpoint] = []
        self.entries = self.barriers = 0
        self._order = LogOrder(is_start=is_start)

    def see(self, record: IncomingRecord) -> None:
        """Check and count a record. Raises ``JournalError``."""
        mark = self._order.see(record)
        kind = (type_and_version(record.headers)[0] or b"").decode(errors="replace")
        if not mark.number:
            about = term_of(record)
            self.terms.append(SeenTerm(mark.term, about.writer, about.address, about.began_ms, 0))
        elif kind == CHECKPOINT_TYPE:
            found = checkpoint_of(record)
            at_ms = record.timestamp_ms
            self.checkpoints.append(SeenCheckpoint(record.offset, mark.term, found.covers, found.name, at_ms))
        elif kind == BARRIER_TYPE:
            self.barriers += 1
        else:
            self.entries += 1
            if self.terms:
                self.terms[-1] = self.terms[-1]._replace(entries=self.terms[-1].entries + 1)


def survey(
    reader: PartitionReader, topic: str, log: Watermarks, reached: Callable[[int, list[IncomingRecord]], None]
) -> JournalSurvey:
    """Read the whole log. Raises ``JournalError`` (out of order, foreign), and as ``PartitionReader.read``."""
    found = JournalSurvey(is_start=log.start == 0)

    def receive(partition: int, records: list[IncomingRecord]) -> None:
        for record in records:
            found.see(record)
        reached(partition, records)

    spans = {0: (log.start, log.end)}
    reader.read(topic, spans, receive, stalled_after_seconds=_STALLED_SECONDS, cancelled=lambda: False)
    return found
