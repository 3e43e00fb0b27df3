"""Events that stop the event loop, or wait for each other without end: which they are, and what becomes of them.

A plain handler that blocks for longer than ``rebalance_timeout_seconds`` costs its member the group, and the next owner
meets the same event. So each such owner leaves a note for the next ones, while it is a member still: the metadata of an
offset that the group commits for the changelog's partition, fenced by the group's generation as every commit of ours.
The owner that finds ``MOST_OWNERS`` in it does not try the event again: it is the event's own failure. Only measured
stops count, so kills and moves blame no event; a note about an event that was committed after all is without effect.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from types import FrameType
from typing import Any, Final, cast

import msgspec

from streams.core.known_failures import KnownFailures
from streams.core.origin import INTERJECTION, Origin, in_input, is_batch
from streams.core.policy import Failure
from streams.errors import HandlerBlocked, StreamsError
from streams.records import TopicPartition
from streams.runtime.async_work.async_stage import StageWork
from streams.runtime.member import Member
from streams.runtime.partition.event_context import EventContext
from streams.runtime.partition.reorder_buffer import Entry
from streams.runtime.partition.worker import PartitionWorker

_log = logging.getLogger(__name__)

MOST_OWNERS: Final = 3
"""So many owners in a row may lose the group by one event. Then it is the event's own failure. Not fewer: what held up
one machine may not hold up the next."""
NOTE_SECONDS: Final = 5.0
"""The group has so many seconds to commit a note."""
CHECK_SECONDS: Final = 10.0
"""Events that do not come to their turn are looked for every so many seconds."""
TURN_SECONDS: Final = 30.0
"""The next event of a partition is named when it has been late for its turn for so many seconds, and later ones wait
in theirs. Most calls to services take less."""

Question = Callable[[Collection[int], float], dict[int, int | None]]


class BlockNote(msgspec.Struct, frozen=True):
    """The event that stopped the loop of so many ``owners``: its ``topic``, and its origin in that one input."""

    topic: str
    origin: Origin
    owners: int


class BlockedEvents:
    """The events of one member that hold up more than themselves. On the loop, if nothing else is said."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._found: dict[int, BlockNote] = {}  # by partition, as the last take-over found it
        self._check_at = 0.0
        self._waits: dict[int, tuple[Entry, float]] = {}  # by partition: the first in line, and when it is named

    # -- the loop stands still: on the watchdog's thread ---------------------------------------------------------------

    def name(self, frame: FrameType | None) -> str:
        """Name the event whose handler this frame of the loop's thread runs; empty: none is known."""
        what, origin, _ = self._blamed(frame)
        return "" if origin is None else f", at {what}"

    def give_up(self, frame: FrameType | None, seconds: float) -> None:
        """Leave a note about the event that has stopped the loop for so long; blocks until it is committed."""
        what, where, origin = self._blamed(frame)
        text = (
            f"{what} has stopped the event loop for {seconds:.0f} s: this member leaves the group unless it ends soon"
        )
        if where is None or origin == INTERJECTION:
            _log.error("%s. Make the handler async, or register it with blocking=True", text)
            return
        before = self._found.get(where.partition)
        is_known = before is not None and (before.topic, before.origin) == (where.topic, origin)
        note = BlockNote(where.topic, origin, 1 + (before.owners if before is not None and is_known else 0))
        _log.error(
            "%s, and the next owner of the partition meets that event. It is the owner number %d; after %d it is the "
            "event's failure, and its error policy decides. Make the handler async, or register it with blocking=True",
            text,
            note.owners,
            MOST_OWNERS,
        )
        try:
            if not self._leave(where.partition, msgspec.json.encode(note).decode()):
                _log.warning("%s: this owner is not counted: it has lost its membership by now", what)
        except Exception as error:  # the watchdog goes on
            _log.warning("%s: this owner is not counted: %s", what, error)

    def _blamed(self, frame: FrameType | None) -> tuple[str, TopicPartition | None, Origin]:
        """Name what a thread works on, with its partition and origin: an event, or a window that closes in front of
        it. No partition: it is not known."""
        work = _event_in(frame)
        if work is None:
            return "something", None, INTERJECTION
        where, origin = _origin_of(work)
        worker = self._member.workers.get(where.partition)
        closing = None if worker is None else worker.timekeeper.closing
        if closing is None or closing[0] is not work:
            return _name(work), where, origin
        return f"{closing[1].title} of {where}", where, closing[1].origin

    def _leave(self, partition: int, text: str) -> bool:
        member, until = self._member, time.monotonic() + NOTE_SECONDS
        return member.takeover_client.note(partition, text, member.membership.group_metadata, until)

    # -- a take-over ---------------------------------------------------------------------------------------------------

    def behind(self, question: Question) -> Question:
        """Return a question of a take-over, which blocks, with a look at the notes about its partitions behind it."""

        def both(partitions: Collection[int], deadline: float) -> dict[int, int | None]:
            answer = question(partitions, deadline)
            self._read_notes(partitions, deadline)
            return answer

        return both

    def _read_notes(self, partitions: Collection[int], deadline: float) -> None:
        for partition, text in self._member.takeover_client.notes(partitions, deadline).items():
            try:
                note = self._found[partition] = msgspec.json.decode(text, type=BlockNote)
            except msgspec.DecodeError:  # of another release
                continue
            if note.owners >= MOST_OWNERS:  # once: the next start may be that of a handler that was repaired
                with suppress(StreamsError):
                    self._leave(partition, "")

    def meet(self, worker: PartitionWorker) -> None:
        """Apply the note about a partition that is about to start: the event that it names counts as failed by so many
        owners."""
        note, topics = self._found.get(worker.partition), [self._member.config.topic]
        topics += [spec.topic for spec, _ in self._member.further_inputs]
        if note is None or note.topic not in topics:
            return
        origin = in_input(topics.index(note.topic), note.origin)
        if not is_batch(origin) and note.owners < MOST_OWNERS:
            return
        limit = self._member.config.timeouts.rebalance_timeout_seconds
        error = HandlerBlocked(
            f"its handler stopped the event loop for longer than rebalance_timeout_seconds ({limit:g} s) on "
            f"{note.owners} owners of the partition, one after the other: make it async, or register it with "
            "blocking=True; an on_close of windows can be neither: have it forward what takes long"
        )
        failure = Failure(0 if is_batch(origin) else note.owners, error)  # the events of a batch are tried one by one
        worker.failures = KnownFailures({**worker.failures.carried_over(), origin: failure})

    # -- turns that do not come ----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check now and then for events that do not come to their turn while later ones wait in theirs."""
        now, waits = self._member.now(), {}
        if now < self._check_at:
            return
        self._check_at = now + CHECK_SECONDS
        for partition, worker in self._member.workers.items():
            first, behind = worker.line
            if first is not None and behind:
                before, due = self._waits.get(partition, (None, 0.0))
                waits[partition] = first, due if before is first else now + TURN_SECONDS
                if now >= waits[partition][1]:
                    waits[partition] = first, float("inf")
                    _warn(first, behind)
        self._waits = waits


def _warn(first: Entry, behind: int) -> None:
    where = _name(first)
    _log.warning(
        "%s has not come to its turn for %.0f s: it waits%s, and %d later events of the partition wait in ctx.turn() "
        "for it. If it waits for what one of them holds (a lock, a semaphore), it waits without end: acquire that "
        "behind ctx.turn(), or release it before",
        where,
        TURN_SECONDS,
        _await_of(getattr(first.work, "task", None)),
        behind,
    )


def _await_of(task: asyncio.Task[Any] | None) -> str:
    """Return the innermost location at which a task waits, and what it awaits there."""
    coroutine: Any = None if task is None else task.get_coro()
    locations = []
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        locations.append(f" in {frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_qualname})")
        coroutine = coroutine.cr_await
    return locations[-1] if locations else ""


def _event_in(frame: FrameType | None) -> EventContext[Any] | Entry | None:
    """Return the event that a thread works on: the context, or the entry, that the innermost of its functions has."""
    for value in _locals(frame):
        if issubclass(type(value), EventContext) and not value._closed:  # isinstance may call code of the value's class
            return cast("EventContext[Any]", value)
        entry = value.entry if issubclass(type(value), StageWork) else value
        if type(entry) is Entry:  # an entry of a turn has no record
            return entry
    return None


def _locals(frame: FrameType | None) -> Iterator[Any]:
    while frame is not None:
        yield from [*frame.f_locals.values()]
        frame = frame.f_back


def _origin_of(work: EventContext[Any] | Entry) -> tuple[TopicPartition, Origin]:
    if isinstance(work, Entry):
        return TopicPartition(work.record.topic, work.record.partition), work.record.offset
    return work.topic_partition, work._origin


def _name(work: EventContext[Any] | Entry) -> str:
    return work.record.where if isinstance(work, Entry) else work._event
