"""Hand the records of a global change log to its receivers, and count the progress, on the tail's thread.

One object per log. Receivers only ever run on the tail's thread, one at a time. Requests of other threads (pause,
resume, the end) take effect between two records: each gives the partition a new epoch, and older records are dropped.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from streams.codecs import RESERVED_KEY_PREFIX
from streams.core.policy import Decision, Failure, WorkKind, apply_error_policy
from streams.errors import ConfigError, DecodeError, OffsetError, RecordError
from streams.model.reasons import reason
from streams.outcomes import ErrorResponse, Retry
from streams.records import Change, IncomingRecord
from streams.runtime.ports import Tail
from streams.runtime.reading.log_follower import FROM_START, FollowedPartition
from streams.runtime.system import elapsed_seconds

_log = logging.getLogger(__name__)

MOST_GOALS: Final = 8
"""So many goals wait for a partition, at most: those of two lives of tombstones, where lives are short."""
Starts = Mapping[int, tuple[int, float]]
"""Where to go on in partitions, and as of when everything below is there (``elapsed_seconds``)."""
OnError = Retry | Callable[[IncomingRecord, RecordError], ErrorResponse]


class Receiver(NamedTuple):
    """A receiver of the records; ``name`` is for messages, ``end`` is called once after the last record. ``fail`` is
    called with the reason as soon as the reading has failed: a table is not kept up to date any more."""

    name: str
    receive: Callable[[IncomingRecord], object]
    end: Callable[[], object] | None
    fail: Callable[[str], object] | None = None


def to_changes(receive_change: Callable[[Change], object]) -> Callable[[IncomingRecord], object]:
    """Make a receiver of records from a store's ``receive_change``."""

    def receive(record: IncomingRecord) -> None:
        assert record.key is not None  # such records do not come here
        kind = record.record_type if record.headers else None
        receive_change(Change(record.key, record.value, None, kind or ""))

    return receive


class LogPartitionStatistics(msgspec.Struct, frozen=True):
    """One partition of a global change log. ``position``: everything below it was received (-1: nothing is known yet);
    ``end``: the high watermark as far as it is known (-1: not yet); ``lag``: the difference, in offsets (transaction
    markers, compacted records and what an open transaction holds back count). ``records`` and ``size_bytes`` (keys and
    values) were read, ``skipped`` records were passed over by the error policy."""

    partition: int
    position: int
    end: int
    lag: int
    records: int
    size_bytes: int
    skipped: int
    paused: bool


class _Followed(FollowedPartition):
    """One partition. ``next`` is where reading goes on: the record that the receivers have at this moment lies between
    ``position`` and it. ``as_of``: all that was not received is younger (``elapsed_seconds``). ``goals``: ends of the
    log, and when they were that; the last one that is reached is the next ``as_of``."""

    def __init__(self, partition: int) -> None:
        super().__init__(partition, 0)
        self.next = FROM_START
        self.as_of = elapsed_seconds()
        self.goals: deque[tuple[int, float]] = deque()
        self.paused = False
        self.skipped = 0

    def begin_at(self, offset: int) -> None:
        super().begin_at(offset)
        self.next = offset

    def note_goals(self) -> None:
        """Take the time of each goal over that is reached."""
        while self.goals and self.position >= self.goals[0][0]:
            self.as_of = max(self.as_of, self.goals.popleft()[1])


class Following:
    """The partitions of one topic and their receivers. Methods may be called from any thread, and return at once.

    ``news`` and ``failed(partition, error)`` are called on the tail's thread: the first when a partition caught up for
    the first time, and after each batch while ``awaited`` is set; the second when a partition can not be read on, or
    when a record was refused and the policy says stop (a ``RecordError``).
    """

    def __init__(
        self,
        topic: str,
        tail: Tail,
        receivers: Sequence[Receiver],
        on_error: OnError,
        news: Callable[[], None],
        failed: Callable[[int, Exception], None],
        starts: Starts | None = None,
        life_seconds: float = math.inf,
    ) -> None:
        self.topic = topic
        self.awaited = False
        self.life_seconds = life_seconds
        """For so long tombstones live. A partition that is read on later fails: a key whose tombstone is gone would
        stay with the receivers."""
        self._tail = tail
        self._receivers = tuple(receivers)
        self._on_error = on_error
        self._news = news
        self._failed = failed
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._starts = starts or {}
        self._followed: dict[int, _Followed] = {}
        self._epoch = 0
        tail.start(self._receive, self._fail)

    # -- requests of all threads ---------------------------------------------------------------------------------------

    def grow(self, partitions: int) -> None:
        """Follow those of the first ``partitions`` that are not followed yet."""
        with self._lock:
            if self._ended.is_set():
                return
            for number in range(len(self._followed), partitions):
                followed = self._followed[number] = _Followed(number)  # first: the thread may be quicker
                if number in self._starts:
                    offset, followed.as_of = self._starts[number]
                    followed.begin_at(offset)
                self._follow(number, followed.next)

    def go_on(self, partition: int) -> None:
        """Read a partition again that failed, from where it was."""
        with self._lock:
            followed = self._followed[partition]
            if not followed.paused and not self._ended.is_set():
                self._follow(partition, followed.next)

    def pause(self, partitions: Collection[int] | None) -> None:
        """Hand over nothing of these partitions (``None``: of all); the record that a receiver has at this moment is
        the last one. Raises ``ConfigError`` for an unknown number."""
        with self._lock:
            for number in self._checked(partitions):
                followed = self._followed[number]
                if not followed.paused:
                    followed.paused = True
                    # Without a new epoch the rest of the batch under way would still be handed over.
                    followed.epoch = self._new_epoch()
                    self._tail.remove([number])

    def resume(self, partitions: Collection[int] | None, at_offset: int | None) -> None:
        """Undo ``pause``, or go on elsewhere (then also without a pause)."""
        if at_offset is not None and at_offset < 0:
            raise ConfigError(f"at_offset is {at_offset!r}; it must be an offset of {self.topic}: 0 or more")
        with self._lock:
            for number in self._checked(partitions):
                followed = self._followed[number]
                if at_offset is not None:
                    followed.begin_at(at_offset)
                elif not followed.paused:
                    continue
                followed.paused = False
                if not self._ended.is_set():
                    self._follow(number, followed.next)

    def end(self) -> None:
        """Hand over nothing more, also of what is on its way; the tail's thread ends soon."""
        # This comes before the tail is closed: the batch under way stops behind its present record.
        self._ended.set()
        self._tail.close()

    # -- progress ------------------------------------------------------------------------------------------------------

    def missing(self, goals: Mapping[int, int]) -> list[tuple[int, int, int, bool]]:
        """Return (partition, position, goal, whether it is paused) of those that have not reached their goal."""
        with self._lock:
            return [
                (number, followed.position, goal, followed.paused)
                for number, goal in sorted(goals.items())
                if (followed := self._followed[number]).position < goal
            ]

    def prove(self, ends: Mapping[int, int], as_of: float) -> None:
        """Note that everything below these offsets was all that there was to read at a time. Goals stay until they are
        reached, several at a time: a reader that is always late reaches each as late, and no later."""
        with self._lock:
            for number, followed in self._followed.items():
                followed.note_goals()
                if number in ends and len(followed.goals) < MOST_GOALS:
                    followed.goals.append((ends[number], as_of))
                    followed.note_goals()

    @property
    def partitions(self) -> int:
        return len(self._followed)

    @property
    def positions(self) -> tuple[tuple[int, int], ...]:
        """Return two offsets of each partition: the receivers have had everything below the first, and nothing from the
        second on; a record that they have at this moment is between them."""
        with self._lock:
            return tuple((max(one.position, 0), max(one.next, 0)) for one in self._followed.values())

    @property
    def caught_up(self) -> bool:
        """Check that each partition has met the end of its log once."""
        with self._lock:
            return all(followed.caught_up for followed in self._followed.values())

    def progress(self) -> tuple[int, int, int]:
        """Return, over all partitions: offsets that were passed, offsets that are left as far as is known, records
        received."""
        with self._lock:
            known = [followed for followed in self._followed.values() if followed.position >= 0]
            passed = sum(followed.position - followed.start for followed in known)
            return passed, sum(followed.behind for followed in known), sum(followed.records for followed in known)

    def statistics(self) -> tuple[LogPartitionStatistics, ...]:
        with self._lock:
            return tuple(
                LogPartitionStatistics(
                    number,
                    followed.position,
                    followed.end,
                    followed.behind,
                    followed.records,
                    followed.size,
                    followed.skipped,
                    followed.paused,
                )
                for number, followed in sorted(self._followed.items())
            )

    # -- inside --------------------------------------------------------------------------------------------------------

    def _new_epoch(self) -> int:
        self._epoch += 1
        return self._epoch

    def _follow(self, number: int, offset: int) -> None:
        epoch = self._followed[number].epoch = self._new_epoch()
        self._tail.add(number, offset, epoch)

    def _checked(self, partitions: Collection[int] | None) -> Collection[int]:
        if partitions is None:
            return list(self._followed)
        for number in partitions:
            if number not in self._followed:
                raise ConfigError(
                    f"{self.topic} has no partition {number!r} here: there are 0 to {len(self._followed) - 1}"
                )
        return partitions

    # -- on the tail's thread ------------------------------------------------------------------------------------------

    def _receive(self, partition: int, epoch: int, records: list[IncomingRecord], position: int, end: int) -> None:
        followed = self._followed[partition]
        lock, ended = self._lock, self._ended.is_set
        with lock:
            if followed.start < 0:  # nothing was received, so nothing can be out of date
                followed.as_of = elapsed_seconds()
            followed.note_goals()
            away = elapsed_seconds() - followed.as_of
        if away > self.life_seconds and position > followed.position:  # else nothing was missed
            raise OffsetError(
                f"{self.topic}[{partition}] was complete {_shown_seconds(away)} ago for the last time, and the topic "
                f"keeps tombstones for {_shown_seconds(self.life_seconds)} (delete.retention.ms): keys that were "
                "deleted since then could stay here. Start a new global change log; if to read it takes longer than "
                "that, raise delete.retention.ms"
            )
        for record in records:
            with lock:
                if followed.epoch != epoch or ended():
                    return
                if followed.start < 0:
                    followed.begin_at(record.offset)
                # This is noted before a receiver has the record: ``places`` may name too much as seen, but never too
                # little.
                followed.next = record.offset + 1
            try:
                # No lock is held here: a slow receiver must not hold up a pause or the statistics.
                skipped = self._hand_over(record)
            except RecordError as error:  # reported here: the tail reports no partition that was paused meanwhile
                self._ended.set()
                self._failed(partition, error)
                return
            with lock:
                # The position moves only now: a task that waits for it looks for the record in the table.
                if followed.next == record.offset + 1:  # else it was sent elsewhere meanwhile
                    followed.position = record.offset + 1
                followed.records += 1
                followed.size += len(record.key or b"") + len(record.value or b"")
                followed.skipped += skipped
        with lock:
            if followed.epoch != epoch or ended():
                return
            if followed.start < 0:
                followed.begin_at(max(position, 0))
            first = followed.advance(position, end, more=bool(records))
            followed.next = followed.position
        if first or self.awaited:
            self._news()

    def _hand_over(self, record: IncomingRecord) -> bool:
        """Hand a record to every receiver; return whether one of them was passed over. Raises ``RecordError`` if the
        policy says stop."""
        if record.key is None:
            self._refused(
                record, "a change", DecodeError("the record has no key; records of a compacted topic have"), 0
            )
            return True
        # A record of the toolkit in a changelog is no change of its store.
        if record.key.startswith(RESERVED_KEY_PREFIX):
            return False
        passed_over = False
        for receiver in self._receivers:
            attempt, began = 0, time.monotonic()
            while True:
                try:
                    receiver.receive(record)
                except BaseException as error:  # a thread that ends silently would look like a silent topic
                    attempt += 1
                    if self._refused(record, receiver.name, error, attempt, time.monotonic() - began):
                        continue
                    passed_over = True
                break
        return passed_over

    def _refused(
        self, record: IncomingRecord, who: str, error: BaseException, attempt: int, elapsed_seconds: float = 0.0
    ) -> bool:
        """Decide about a record that a receiver refused: ``True``, another try; ``False``, go on without it. Raises
        ``RecordError``: stop."""
        kind = DecodeError if isinstance(error, DecodeError) else RecordError
        failure = kind(f"{record.where} can not be received by {who}: {_text_of(error)}")
        failure.__cause__ = error
        policy = self._on_error
        if isinstance(policy, Retry):
            decision = apply_error_policy(
                Failure(attempt, error, WorkKind.VIEW, elapsed_seconds=elapsed_seconds), policy
            )
            if decision is Decision.RETRY:
                # This is no sleep: the end cuts it short, since ``stop`` waits for this thread.
                if self._ended.wait(policy.pause_seconds(attempt)):
                    raise failure
                return True
            skip = decision is Decision.SKIP
        else:
            skip = self._answer(policy, record, failure) is ErrorResponse.CONTINUE
        if not skip:
            raise failure
        _log.warning("%s; skipped", failure)
        return False

    def _answer(self, callback: Callable[..., object], record: IncomingRecord, failure: RecordError) -> object:
        try:
            return callback(record, failure)
        except BaseException as error:  # as above
            raise RecordError(f"{failure}; and on_error failed: {_text_of(error)}") from error

    def _fail(self, partition: int, epoch: int, error: Exception) -> None:
        with self._lock:
            current = self._followed[partition].epoch == epoch and not self._ended.is_set()
        if current:
            self._failed(partition, error)


def _text_of(error: BaseException) -> str:
    return reason(error) if isinstance(error, Exception) else type(error).__name__


def _shown_seconds(seconds: float) -> str:
    return f"{seconds / 3600:.4g} h" if seconds >= 3600 else f"{seconds:.4g} s"
