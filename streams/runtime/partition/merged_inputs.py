"""The inputs of one partition whose source reads several topics: one order, and one position in all of them.

``core/merging.py`` decides which input comes next; this carries it out. One input has its turn at a time: the
partition's ``watermark``, the number of its known failures and its ``reading`` are about that one, so that everything
behind the decision (slices, contexts, policies) is as with one topic. Nothing of another input begins while work of
this one runs ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from streams.core import runs as runs_of_several
from streams.core.merging import InputHead, InputKind, Wait, next_input
from streams.core.position import Position
from streams.core.runs import Run
from streams.model.topics import InputSpec
from streams.records import Change, IncomingRecord, TopicPartition
from streams.runtime.changelog import InputPosition
from streams.runtime.partition.inbox import Inbox
from streams.runtime.partition.state import Partition
from streams.statistics import InputStatistics

SHORT: Final = 128
"""Records below which a queued batch takes in those that come next. A slice ends where the batch of any input does, so
short batches make short slices."""


class PartitionInput:
    """One input of one partition. ``position``: the first offset that is not admitted. ``goal``: the end up to which a
    joined table is to be read before any event, until it is. ``at_end``: nothing is behind what is queued here, as far
    as is known; ``missing_since``: since when it has nothing, and is not known to be at its end. ``head``: what is
    known of it, as noted last.

    Requests for visits are never waited for.
    """

    def __init__(self, input_number: int, where: TopicPartition, inbox: Inbox, spec: InputSpec | None = None) -> None:
        self.input_number = input_number
        self.where = where
        self.inbox = inbox
        self.is_own = spec is not None and spec.is_own
        self.position = -1
        self.goal: int | None = None
        self.is_awaited = spec is None or spec.is_awaited
        self.at_end = self.was_at_end = False
        self.missing_since: float | None = None
        self.head = InputHead(self._kind, None)

    @property
    def is_read(self) -> bool:
        """Check whether everything up to the goal is handled: there may be nothing but holes and markers below it."""
        return self.goal is not None and (self.position >= self.goal or (self.at_end and not self.inbox))

    @property
    def _kind(self) -> InputKind:
        if self.is_own:
            return InputKind.LOOP
        return InputKind.EVENTS if self.goal is None else InputKind.UNREAD_TABLE

    def note(self, now: float) -> None:
        """Note what is known of its end, after something has come or was taken."""
        self.was_at_end = self.was_at_end or self.at_end
        # The loop is waited for until it was at its end once: what was begun before a start is finished first. Later
        # its records come with the commit of what has sent them, so none of them is older than what waits.
        if self.inbox or self.at_end or not self.is_awaited or (self.is_own and self.was_at_end):
            self.missing_since = None
        elif self.missing_since is None:
            self.missing_since = now
        first = self.inbox.first
        if first is None:
            self.head = InputHead(self._kind, None, self.missing_since)
        else:
            self.head = InputHead(self._kind, first.timestamp_ms)


class MergedInputs:
    """All inputs of one partition, the source's own topic first. On the loop. ``wait_until``: nothing may be handled
    before, unless something comes; ``None``: for as long as that takes."""

    def __init__(
        self, partition: Partition, first: Inbox, others: Sequence[tuple[InputSpec, Inbox]], patience_seconds: float
    ) -> None:
        self._partition = partition
        self._patience = patience_seconds
        self.current = PartitionInput(0, partition.topic_partition, first)
        self.all = [self.current]
        for input_number, (spec, inbox) in enumerate(others, 1):
            where = TopicPartition(spec.topic, partition.partition)
            self.all.append(PartitionInput(input_number, where, inbox, spec))
        self.wheres = [one.where for one in self.all]
        self.wait_until: float | None = None

    def start_at(self, position: Sequence[int], now: float) -> None:
        """Begin work at this position; nothing is known of the ends yet."""
        for one, offset in zip(self.all, position, strict=True):
            one.position = offset
            one.goal = self._partition.joined.goals.get(one.where.topic)
            one.note(now)

    @property
    def position(self) -> tuple[int, ...]:
        """Return the position up to which everything is admitted."""
        return tuple([one.position for one in self.all])

    def moved_to(self, offset: int) -> tuple[int, tuple[int, ...]]:
        """Note what is admitted of the input that has its turn. Returns the number of that, and the position."""
        self.current.position = offset
        return self.current.input_number, self.position

    def add(self, input_number: int, records: list[IncomingRecord], size: int, now: float, *, at_end: bool) -> None:
        """Queue records of an input; ``at_end``: it has no further ones for now."""
        one = self.all[input_number]
        one.at_end = at_end
        if records:
            one.inbox.add(records, size, SHORT)
        else:
            one.inbox.wake()  # no record, but news: an input at its end is not waited for any more
        one.note(now)

    def take(self, now: float, *, only_current: bool) -> list[IncomingRecord]:
        """Take the records that come next; their input has its turn from now on. None: nothing may be handled before
        ``wait_until``, or while work runs ahead (``only_current``) of the input that has its turn."""
        answer = next_input([one.head for one in self.all], now, self._patience)
        if isinstance(answer, Wait):
            self.wait_until = answer.until
            return []
        self.wait_until = None
        one = self.all[answer.input_number]
        if one is not self.current:
            # The watermark, known failures and policies are those of the input whose work runs ahead.
            if only_current:
                return []
            self._turn_to(one)
        records = one.inbox.take_run(answer.until_ms)
        one.note(now)
        return records

    def next_runs(self, now: float, most: int) -> tuple[list[IncomingRecord], list[Run]]:
        """Return the records that come next, ``most`` of them at most, and their runs, if they are of several inputs:
        what ``take`` would give run by run, for a slice in which nothing new is known. Nothing is taken by it."""
        answer = next_input([one.head for one in self.all], now, self._patience)
        # One input alone has its turn, with no end: a slice of its own takes it (``take``).
        if isinstance(answer, Wait) or answer.until_ms is None:
            return [], []
        here = [one for one in self.all if one.inbox]
        batches, starts = zip(*(one.inbox.next_batch for one in here), strict=True)
        return runs_of_several.merge([one.input_number for one in here], [*batches], [*starts], most)

    def advance(self, records: list[IncomingRecord], runs: Sequence[Run], stop: int) -> tuple[Position, list[Run]]:
        """Note that these records are admitted up to ``stop``. Returns the position, and their runs."""
        offsets = [one.position for one in self.all]
        done = runs_of_several.advance(records, runs, stop, offsets)
        for one, offset in zip(self.all, offsets, strict=True):
            one.position = offset
        return tuple(offsets), done

    def take_runs(self, runs: Sequence[Run], stop: int, now: float) -> None:
        """Take what ``next_runs`` gave, up to ``stop``, which is handled. The input of the last record has its turn."""
        counts = [0] * len(self.all)
        last = runs_of_several.count(runs, stop, counts)
        for one, records in zip(self.all, counts, strict=True):
            if records:
                one.inbox.skip(records)
                one.inbox.handled(records)
                one.note(now)  # behind ``skip``: the head is the first record that is left
        self._turn_to(self.all[last])

    def tables_read(self, now: float) -> list[Change]:
        """Return the changes that note in the changelog which tables are read up to their goals. Called when everything
        that was taken is handled. Such a table is an input like the others from then on."""
        changes: list[Change] = []
        if not self._partition.joined.goals:  # nearly always
            return changes
        for one in self.all:
            if one.is_read:
                one.goal = None
                one.note(now)
                changes.append(self._partition.joined.read_up(one.where.topic))
        return changes

    def has_taken(self, topic: str) -> bool:
        """Check that this input was at its end once, and that nothing of it is queued here."""
        return any(one.was_at_end and not one.inbox for one in self.all if one.where.topic == topic)

    def waiting_for(self, now: float) -> tuple[str, ...]:
        """Return the topics of the inputs that the others wait for now."""
        if not any(one.inbox for one in self.all):
            return ()
        answer = next_input([one.head for one in self.all], now, self._patience)
        return tuple(self.all[number].where.topic for number in answer.missing) if isinstance(answer, Wait) else ()

    def statistics(self, now: float, ends: Sequence[int]) -> tuple[InputStatistics, ...]:
        """Return the figures of each input; ``ends``: as far as they are known."""
        awaited = self.waiting_for(now)
        return tuple(
            InputStatistics(
                one.where.topic,
                one.position,
                one.inbox.records,
                one.where.topic in awaited,
                ends[one.input_number] if one.input_number < len(ends) else -1,
            )
            for one in self.all
        )

    def _turn_to(self, one: PartitionInput) -> None:
        partition = self._partition
        self.current = one
        partition.watermark, partition.reading = one.position, one.where
        partition.failures.input_number = one.input_number

    def positions(self, ids: Sequence[str], position: Sequence[int]) -> dict[str, InputPosition]:
        """Return the positions in further inputs by their topics, as an offset record has them; ``ids``: of those
        topics."""
        offsets = zip(self.all[1:], position[1:], ids, strict=True)
        return {one.where.topic: (offset, topic_id) for one, offset, topic_id in offsets}
