"""Dead letters: which of them are open, and how each is sent again, or dropped, exactly once.

**Where it is kept that a letter is settled.** In the dead-letter topic itself: behind the letters of a partition stands
a *mark*, a record with a reserved key, whose value lists all offsets up to there that are settled. A mark repeats what
the mark before it says, so the last one of a partition counts. It stands behind the letters that it settles. So
whatever deletes from the start of the log (retention, DeleteRecords) takes a letter before the mark that settles it;
compaction keeps the last mark, since all have the same key; and a topic that is recreated, or restored from a backup,
has both or neither. (Offsets of a group would expire before the letters do.)

**Why no letter is sent twice, and none is lost.** All writing is done under one transactional id per dead-letter topic:

1. ``init_transactions`` ends what an earlier process left open under this id, and fences that process: from here on
   nothing of it is committed any more.
2. The high watermarks are read after that, and then the topic up to them, read committed. Every mark that was ever
   committed stands below them, and the reader does not pass an open transaction. So the last marks are the truth, and
   stay so until this process writes, or is fenced by a later one.
3. The records go to their topic in the order of the letters, and in the same transaction the new marks: what was
   settled, and these. Either both are there or neither is.

A second process that begins in between fences this one, whose transaction is then refused as a whole; or it begins
after the commit, and reads the mark. Each letter is therefore in exactly one committed transaction, however often and
from however many places the command is run. An unclear end (a timeout) is cleared up by running it again.
Letters that the source writes meanwhile, and copies that it handles, change nothing of this: they only add letters.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Self

import msgspec

from streams.codecs import RESERVED_KEY_PREFIX
from streams.errors import OffsetError, TopicError
from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.reading.reader import PartitionReader
from streams.kafka.settings import ClientSettings
from streams.kafka.writing.blocking import BlockingSlot
from streams.looks.committing import transaction
from streams.looks.records import PartitionOffset
from streams.looks.scans import OffsetProgress, late_lines
from streams.records import Headers, IncomingRecord, Output
from streams.runtime.partition.dead_letters import PARTS, PREFIX

_log = logging.getLogger(__name__)

MARK_KEY: Final = RESERVED_KEY_PREFIX + b"settled"
"""Key of the record in a dead-letter topic that lists the letters before it that are settled."""
ORIGIN_HEADER: Final = "__kes_origin"
"""Header of a record that was sent again: its place when it failed for the first time, ``topic[partition]@offset``."""

_MARK_FORMAT: Final = 1
_TRANSACTION_SECONDS: Final = 60.0
_MOST_RECORDS, _MOST_BYTES = 500, 4_000_000
"""Of one transaction: it has to fit its time on a slow line, too."""


class Mark(msgspec.Struct, frozen=True):
    """The value of a mark: ranges of offsets (first, behind the last) whose letters are settled, in order."""

    v: int
    settled: list[tuple[int, int]]


class Settled:
    """A set of offsets, as ranges that are in order and do not touch."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in ranges:
            self.add(start, end)

    def __contains__(self, offset: int) -> bool:
        at = bisect_right(self._starts, offset) - 1
        return at >= 0 and offset < self._ends[at]

    def add(self, start: int, end: int) -> None:
        """Add the offsets from ``start`` up to and without ``end``."""
        first, last = bisect_left(self._ends, start), bisect_right(self._starts, end)
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._starts[first:last], self._ends[first:last] = [start], [end]

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Return the ranges, in order."""
        return list(zip(self._starts, self._ends, strict=True))

    @property
    def prefix(self) -> int:
        """Return the offset below which everything is settled."""
        return self._ends[0] if self._starts[:1] == [0] else 0


class Letter(NamedTuple):
    """A record of a dead-letter topic. Nothing in it is trusted. ``after``: the offset behind the letter before it.
    ``is_settled``: it was sent again, or dropped."""

    record: IncomingRecord
    after: int
    is_settled: bool

    @property
    def facts(self) -> Mapping[str, str]:
        """Return the last ``__kes_dlq_*`` header of each name, without the prefix."""
        return {
            name.removeprefix(PREFIX): (value or b"").decode(errors="backslashreplace")
            for name, value in self.record.headers or ()
            if name.startswith(PREFIX)
        }

    @property
    def position(self) -> PartitionOffset:
        """Return its place in the dead-letter topic."""
        return PartitionOffset(self.record.partition, self.record.offset)

    @property
    def origin(self) -> str:
        """Return the place that the record came from, ``topic[partition]@offset``; ``""``: it does not say so."""
        facts = self.facts
        return f"{facts['topic']}[{facts['partition']}]@{facts.get('offset', '?')}" if self.is_addressed else ""

    @property
    def is_addressed(self) -> bool:
        """Check that it says where it came from."""
        return bool(self.facts.get("topic")) and number_in(self.facts.get("partition", "")) is not None

    @property
    def type(self) -> str:
        """Return the name of its event type: that of its header, or the one that a rule gave it."""
        return self.facts.get("type") or self.record.record_type or ""

    @property
    def as_received(self) -> IncomingRecord:
        """Return it as the record that it was, so that its source's rule gives it a type again. Events of timers have
        our headers, and no rule is about them."""
        topic = "" if "timer" in self.facts else self.facts.get("topic", "")
        offset = number_in(self.facts.get("offset", ""))
        offset = self.record.offset if offset is None else offset
        return msgspec.structs.replace(self.record, topic=topic, offset=offset, headers=self.own_headers)

    @property
    def own_headers(self) -> Headers:
        """Return the headers of the record itself."""
        return [header for header in self.record.headers or () if not header[0].startswith(PREFIX)]

    @property
    def left_out(self) -> dict[str, int]:
        """Return the parts of the record that did not fit into the letter, with their sizes."""
        return {
            part: number_in(size) or 0 for part in PARTS if (size := self.facts.get("left_out_" + part)) is not None
        }


def number_in(text: str) -> int | None:
    """Return the number that a fact is; ``None``: it is none."""
    return int(text) if text.isdecimal() and len(text) < 19 else None


class LetterBox:
    """The dead letters in one topic. Blocks; one thread. ``with LetterBox(settings, topic, seconds) as box``.

    ``seconds``: for an answer of the cluster, and for open transactions to end.
    """

    def __init__(self, settings: ClientSettings, topic: str, seconds: float) -> None:
        self.topic = topic
        self._settings, self._seconds = settings, seconds
        self._admin = TopicAdmin(settings)
        self._reader = PartitionReader(settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._reader.close()
        self._admin.close()

    def scan(
        self,
        receive: Callable[[Letter], None],
        *,
        whole: bool = False,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> dict[int, Settled]:
        """Hand in the letters up to the end of the topic as it is now, per partition in order; returns what is settled.
        ``whole``: also those of before the first open one. Raises ``TopicError``, ``BrokerUnavailable``;
        ``Stopped`` once ``cancelled`` returns true."""
        marks = self._admin.watermarks(self.topic, None, self._seconds)
        ranges = {number: (mark.start, mark.end) for number, mark in marks.items()}
        last = self._reader.last_with_key(self.topic, ranges, MARK_KEY, stalled_after_seconds=self._seconds)
        settled = {number: _settled_by(last.get(number)) for number in ranges}
        behind = {number: 0 if whole else found.prefix for number, found in settled.items()}
        spans = {number: (max(start, behind[number]), end) for number, (start, end) in ranges.items()}
        progress = OffsetProgress(f"reading {self.topic}", spans)

        def take(number: int, records: list[IncomingRecord]) -> None:
            progress.reached(number, records)
            for record in records:
                # A letter has headers, a mark has none: the key of a letter is the record's own, also a reserved one.
                if record.headers or not (record.key or b"").startswith(RESERVED_KEY_PREFIX):
                    receive(Letter(record, behind[number], record.offset in settled[number]))
                    behind[number] = record.offset + 1

        self._reader.read(self.topic, spans, take, stalled_after_seconds=self._seconds, cancelled=cancelled)
        return settled

    def originals(self, letters: Iterable[Letter]) -> dict[PartitionOffset, IncomingRecord | str]:
        """Return the records of letters that go by reference, from the topic that they came from; or why not."""
        found: dict[PartitionOffset, IncomingRecord | str] = {}
        for letter in letters:
            found[letter.position] = self._original(letter) if letter.is_addressed else "it does not say where it is"
        return found

    def _original(self, letter: Letter) -> IncomingRecord | str:
        facts = letter.facts
        topic, number, offset = facts["topic"], int(facts["partition"]), facts.get("offset", "")
        gone = f"parts of it were left out of the letter, and the record at {letter.origin}"
        at = number_in(offset)
        if at is None:
            return f"{gone} is nowhere"
        try:
            if number >= (self.partitions(topic) or 0):
                return f"{gone} is gone with its topic"
            mark = self._admin.watermarks(topic, [number], self._seconds)[number]
            if not mark.start <= at < mark.end:
                return f"{gone} is not in the log any more"
            span = {number: (at, at + 1)}
            records = self._reader.read_all(topic, span, stalled_after_seconds=self._seconds)[number]
        except (TopicError, OffsetError) as error:
            return f"{gone} cannot be read: {error}"
        if not records or str(records[0].timestamp_ms) != facts.get("timestamp_ms"):
            return f"{gone} is another one by now, or none"
        return records[0]

    def partitions(self, topic: str) -> int | None:
        """Return the number of partitions of a topic; ``None``: there is no such topic, or none can have that name."""
        try:
            identity = self._admin.identity(topic, self._seconds)
        except TopicError as error:
            if "not authorised" in str(error):
                raise
            return None
        return None if identity is None else identity[1]

    def settler(self, report: Callable[[str], object] = _log.warning) -> Settler:
        """Return the only process that settles letters of this topic from now on: step 1 of the module's argument."""
        name, seconds = f"{self.topic}.kes-dlq", self._seconds
        slot = BlockingSlot(self._settings, name, transaction_seconds=_TRANSACTION_SECONDS, seconds=seconds)
        try:
            slot.open()
        except BaseException:
            slot.close()
            raise
        return Settler(self.topic, slot, report)


class Settler:
    """Settles letters, in transactions. ``scan`` comes after it was made. One thread."""

    def __init__(self, topic: str, slot: BlockingSlot, report: Callable[[str], object]) -> None:
        self._topic, self._slot, self._report = topic, slot, report

    def settle(self, letters: Sequence[tuple[Letter, Output | None]], settled: dict[int, Settled]) -> int:
        """Send the records (``None``: drop the letter), and mark their letters; ``settled`` is kept up to date. Returns
        the number of letters.

        Raises ``TransactionFailed`` (kind ``unknown``: the last transaction is in doubt, the next run clears it up;
        ``fenced``: another process has begun) and ``RecordRefused``. Those of the transactions before are settled.
        """
        done, progress = 0, late_lines("letters")
        for batch in _batches(letters):
            for letter, _ in batch:
                settled[letter.record.partition].add(letter.after, letter.record.offset + 1)
            touched = sorted({letter.record.partition for letter, _ in batch})
            outputs = [output for _, output in batch if output is not None]
            self._commit([*outputs, *(self._mark(number, settled[number]) for number in touched)])
            done += len(batch)
            progress(f"settling in {self._topic}", done, len(letters))
        return done

    def close(self) -> None:
        """Let go of the transactional id."""
        self._slot.close()

    def _mark(self, partition: int, settled: Settled) -> Output:
        value = msgspec.json.encode(Mark(_MARK_FORMAT, settled.ranges))
        return Output(self._topic, value, MARK_KEY, None, partition, 0, partition, -1)

    def _commit(self, outputs: list[Output]) -> None:
        to_find_out = "`kes dlq list` shows the letters that are not settled; to run it again is safe"
        with transaction(self._slot, to_find_out, self._report):
            self._slot.send(outputs)


def resent(letter: Letter, original: IncomingRecord | None) -> Output:
    """Make the record to be sent again: key, value, headers and partition as they were, and its first place in a
    header. Its time is that of sending: with the old one, retention could delete it before it is handled."""
    record = letter.record if original is None else original
    headers = letter.own_headers if original is None else list(original.headers or ())
    headers = [header for header in headers if not header[0].startswith(PREFIX)]
    if not any(name == ORIGIN_HEADER for name, _ in headers):
        headers.append((ORIGIN_HEADER, letter.origin.encode()))
    topic, partition = letter.facts["topic"], int(letter.facts["partition"])
    return Output(topic, record.value, record.key, headers, partition, 0, partition, -1)


def _settled_by(mark: IncomingRecord | None) -> Settled:
    if mark is None:
        return Settled()
    try:
        found = msgspec.json.decode(mark.value or b"", type=Mark)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise OffsetError(f"{mark.where}: the mark of settled letters cannot be read: {error}") from error
    if found.v > _MARK_FORMAT:
        raise OffsetError(f"{mark.where}: the mark of settled letters has format {found.v}: update this program first")
    if any(not 0 <= start < end for start, end in found.settled):
        raise OffsetError(f"{mark.where}: the mark of settled letters has a range that is none")
    return Settled(found.settled)


def _batches(letters: Iterable[tuple[Letter, Output | None]]) -> Iterable[list[tuple[Letter, Output | None]]]:
    batch: list[tuple[Letter, Output | None]] = []
    size = 0
    for letter, output in letters:
        batch.append((letter, output))
        size += 0 if output is None else len(output.value or b"") + len(output.key or b"")
        if len(batch) >= _MOST_RECORDS or size >= _MOST_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
