"""Durable jobs of one partition: work that an event has started, and that waits, runs, or is tried again.

A job is kept where timers are, so whatever carries timers carries it: as one that is due when the job is to begin. A
record of its own has the number that the next job gets. Nothing here is changed but by ``apply``, with the changes of
an event that is complete, and by ``set``, with what the changelog implies. What an event has changed counts as
``settled`` once its transaction is committed: a job begins, or lets the next one of its order begin, not before that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec

from streams.core.origin import Origin, parked_origin
from streams.core.parking import NEVER_MS, Queued
from streams.core.timers import Timer
from streams.model.tracing import Carrier

PREFIX: Final = "@job/"
"""The name of a job's record: this, and the job's name."""
COUNTER: Final = "@jobs"
"""The name of the record with the number of the next job. It is never removed: no two jobs have one number."""
JOB_TYPE: Final = "kes.job"
COUNTER_TYPE: Final = "kes.jobs"
FORMAT: Final = 2
"""The format of these records. Releases that know none but 1 refuse the partition: its jobs would not run there."""
LONGEST_BYTES: Final = 256 * 1024
"""Bytes of a job's item, and of its result, at most."""
MOST_BYTES: Final = 64 * 1024 * 1024
"""Bytes of the items of one partition's jobs; beyond, the partition takes no further input."""
LONGEST_ERROR: Final = 300
"""Letters of the error that a job's record keeps."""
_NO_NUMBER: Final = -1

T = TypeVar("T")


JobAction: TypeAlias = Literal["retry", "cancel"]
"""The acts of an operator on a job."""


class SeenJob(NamedTuple):
    """A job as an operator has seen it: a request that is repeated is for no other job of its name. A retry counts its
    time anew, so ``since_ms`` tells a retry that is repeated."""

    name: str
    number: int
    since_ms: int


class BrokenJob(ValueError):
    """The records of a partition's jobs do not belong together, or cannot be read."""


class JobState(msgspec.Struct, frozen=True, omit_defaults=True):
    """A job: that of the definition ``jobs``, with its ``number`` and its ``id`` outside. It was started at
    ``since_ms``; ``attempts`` have failed, the last one with ``error``. ``order``: jobs of one run one after the other.
    ``noted``: the process that was going to run it, after it had found it. ``parked``: it waits for an operator;
    ``cancelled``: an operator has ended it, which its ``on_failure`` is to hear."""

    jobs: str
    item: bytes
    since_ms: int
    number: int = _NO_NUMBER
    id: str = ""
    order: bytes | None = None
    attempts: int = 0
    error: str = ""
    noted: str = ""
    parked: bool = False
    cancelled: bool = False


class JobRecord(Timer, frozen=True, kw_only=True):
    """The record of a job, as a timer that is due when the job is to begin."""

    kind = "job"

    state: JobState

    @property
    def kept(self) -> bytes:
        """Return the job's state. It is encoded for each record anew: 100,000 jobs may wait, each with its item."""
        return _encode_state(self.state)

    @classmethod
    def of(cls, name: str, due_ms: int, state: JobState, key: bytes | None, trace: Carrier = ()) -> JobRecord:
        """Make the record."""
        due_ms = max(0, min(due_ms, NEVER_MS))
        return cls(name, due_ms, JOB_TYPE, b"", 1, key, trace, state=state)

    def changed(self, due_ms: int, **fields: int | str | bool) -> JobRecord:
        """Return the record of the same job with other fields."""
        if "error" in fields:
            fields["error"] = str(fields["error"])[:LONGEST_ERROR]
        return JobRecord.of(self.name, due_ms, msgspec.structs.replace(self.state, **fields), self.key, self.trace)

    @property
    def job_name(self) -> str:
        """Return the job's name, as the handler has it."""
        return self.name.removeprefix(PREFIX)

    @property
    def lane(self) -> tuple[str, bytes] | None:
        """Return what the jobs that it runs one after the other with have in common; ``None``: there are none."""
        return None if self.state.order is None else (self.state.jobs, self.state.order)

    @property
    def origin(self) -> Origin:
        """Return the origin of the effects of its end: the same after a restart."""
        return job_origin(self.state.id)

    @property
    def title(self) -> str:
        """Name it in messages."""
        return f"job {self.job_name!r} ({self.state.jobs}, {self.state.id})"

    @property
    def facts(self) -> dict[str, str]:
        """Return what its dead letter names."""
        return {"job": self.job_name, "jobs": self.state.jobs, "job_id": self.state.id}


class JobResult(msgspec.Struct, frozen=True, array_like=True):
    """The end of a job, as it waits in the queue of a parked key: its item, and its result or its error."""

    # The record is an array: the order of the fields is the format.
    name: str
    id: str
    item: bytes
    result: bytes | None
    error: str = ""


class JobEnd(JobRecord, frozen=True, kw_only=True):
    """The event of a job's end. ``result``: encoded; ``None``: it has failed with ``failure``."""

    result: bytes | None
    failure: str = ""

    @classmethod
    def of_record(cls, record: JobRecord, result: bytes | None, failure: str = "") -> JobEnd:
        """Make the event of this job's end. Its value is the item, as in its dead letter; its time is that of the job's
        start, as in the queue of a parked key: the same in each attempt."""
        state = record.state
        return cls(
            record.name, state.since_ms, JOB_TYPE, state.item, 1, record.key, record.trace,
            state=state, result=result, failure=failure,
        )  # fmt: skip

    @classmethod
    def of_queued(cls, queued: Queued) -> JobEnd:
        """Read it back from the queue of a parked key. Raises ``msgspec.DecodeError``."""
        end = _decode_result(queued.value or b"")
        state = JobState(queued.topic, end.item, queued.timestamp_ms, id=end.id)
        return cls(
            PREFIX + end.name,
            queued.timestamp_ms,
            JOB_TYPE,
            end.item,
            1,
            queued.key,
            state=state,
            result=end.result,
            failure=end.error,
        )

    @property
    def queued(self) -> Queued:
        """Return it as an event of its key's queue."""
        end = JobResult(self.job_name, self.state.id, self.state.item, self.result, self.failure)
        return Queued.of_result(self.state.jobs, self.state.id, self.state.since_ms, self.key, _encode_result(end))


class Jobs:
    """The jobs of one partition, by the names of their records. ``next``: the number of the next one; ``counts`` and
    ``size``: by definition, and the bytes of all items; ``parked``: how many wait for an operator. ``unsettled``: the
    changes, encoded, that are not known to be committed, by the names of the records."""

    def __init__(self, records: Iterable[Timer] = ()) -> None:
        """Begin with these records. Raises ``BrokenJob``."""
        self.by_name: dict[str, JobRecord] = {}
        self.counts: dict[str, int] = {}
        self.size = self.parked = self.next = 0
        self.unsettled: dict[str, bytes | None] = {}
        self._lanes: dict[tuple[str, bytes], dict[int, str]] = {}  # in the order of the starts
        self._leaving: dict[str, list[JobRecord]] = {}
        found, counter = list[JobRecord](), -1
        for record in records:
            if record.name == COUNTER:
                counter = self.next = next_number(record)
            else:
                found.append(
                    JobRecord.of(record.name, record.due_ms, _read(record, _decode_state), record.key, record.trace)
                )
        for record in sorted(found, key=lambda record: record.state.number):
            if not 0 <= record.state.number < counter:
                raise BrokenJob(f"{record.title} has the number {record.state.number}, and the next one is {counter}")
            self._add(record)

    @property
    def counter(self) -> Timer:
        """Return the record of the next job's number."""
        return Timer(COUNTER, NEVER_MS, COUNTER_TYPE, msgspec.json.encode(_Counter(self.next)))

    def numbered(self, changes: Mapping[str, Timer | None], prefix: str) -> dict[str, Timer | None]:
        """Return the changes of an event that is complete, with numbers, and ids of this prefix, for the jobs that it
        starts."""
        made, first = dict(changes), self.next
        for name, change in changes.items():
            if isinstance(change, JobRecord) and change.state.number == _NO_NUMBER:
                made[name] = change.changed(change.due_ms, number=self.next, id=f"{prefix}-{self.next}")
                self.next += 1
        if self.next > first:
            # The counter goes with the starts: a transaction that is never committed takes its numbers back with it.
            made[COUNTER] = self.counter
        return made

    def apply(self, changes: Mapping[str, Timer | None], encoded: Mapping[str, bytes | None]) -> list[str]:
        """Make the changes of an event that is complete, which its transaction has ``encoded``; those of other timers
        are passed over. Returns the names of the jobs that wait for its commit."""
        waiting = []
        for name, change in changes.items():
            if name.startswith(PREFIX):
                known = self.by_name.get(name)
                if known is not None and (change is None or not is_same(known, change)):
                    self._remove(known)
                    self._leaving.setdefault(name, []).append(known)
                if isinstance(change, JobRecord):
                    self.set(change)
                    waiting.append(name)
                self.unsettled[name] = encoded[name]
        return waiting

    def set(self, record: JobRecord) -> None:
        """Replace the record of a job, or add one."""
        known = self.by_name.get(record.name)
        if known is None:
            self._add(record)
        else:
            self.by_name[record.name] = record
            self.parked += record.state.parked - known.state.parked

    def settled(self, committed: Mapping[str, bytes | None]) -> tuple[list[str], list[str]]:
        """Note the committed changes of a transaction. Returns the names of changed jobs that may go on, and of those
        that may begin because the one before them in their order has left."""
        changed, behind = list[str](), list[str]()
        for name, value in committed.items():
            if self.unsettled.get(name, b"") != value:
                continue  # a later event has changed it again: its own transaction is not settled
            del self.unsettled[name]
            changed.append(name)
            for record in self._leaving.pop(name, ()):
                behind += self._leave_lane(record)
        return changed, behind

    def acted(self, seen: SeenJob, action: JobAction, now_ms: int) -> JobRecord | None:
        """Return the record that carries out an operator's act. ``None``: the job is over, or cancelled, or another one
        by now, or a retry has been carried out."""
        record = self.by_name.get(seen.name)
        if record is None or record.state.number != seen.number or record.state.cancelled:
            return None
        if action == "retry" and record.state.since_ms != seen.since_ms:
            return None
        if action == "cancel":  # its ``on_failure`` hears of it, at its turn
            return record.changed(now_ms, cancelled=True, noted="")
        return record.changed(now_ms, attempts=0, since_ms=now_ms, parked=False, noted="")

    def figures(self) -> tuple[int, int, int | None]:
        """Return how many there are, how many of them wait for an operator, and since when the oldest one is there."""
        oldest = next(iter(self.by_name.values()), None)  # they are in the order of their starts
        return len(self.by_name), self.parked, None if oldest is None else oldest.state.since_ms

    def is_first(self, record: JobRecord) -> bool:
        """Check that no job has to run before this one."""
        return record.lane is None or next(iter(self._lanes[record.lane])) == record.state.number

    def _add(self, record: JobRecord) -> None:
        self.by_name[record.name] = record
        self.parked += record.state.parked
        self.counts[record.state.jobs] = self.counts.get(record.state.jobs, 0) + 1
        self.size += len(record.state.item)
        if record.lane is not None:
            self._lanes.setdefault(record.lane, {})[record.state.number] = record.name

    def _remove(self, record: JobRecord) -> None:
        del self.by_name[record.name]
        self.parked -= record.state.parked
        self.counts[record.state.jobs] -= 1
        self.size -= len(record.state.item)

    def _leave_lane(self, record: JobRecord) -> list[str]:
        """Return the name of the job that is the first of its order by now."""
        if record.lane is None:
            return []
        lane = self._lanes[record.lane]
        del lane[record.state.number]
        if not lane:
            del self._lanes[record.lane]
            return []
        return [next(iter(lane.values()))]


def next_number(record: Timer) -> int:
    """Return the number of the next job, of a counter's record. Raises ``BrokenJob``."""
    return _read(record, _decode_counter).next


def is_same(record: JobRecord, other: object) -> bool:
    """Check for records of one job: a name that is set again is another one."""
    return isinstance(other, JobRecord) and other.state.number == record.state.number


def is_job(name: str) -> bool:
    """Check for the name of a job's record, or of the counter."""
    return name.startswith(PREFIX) or name == COUNTER


def job_origin(job_id: str) -> Origin:
    """Return the origin of the effects of a job's end."""
    return parked_origin(f"job {job_id}", 0)


class _Counter(msgspec.Struct, frozen=True):
    next: int


def _read(record: Timer, decode: Callable[[bytes], T]) -> T:
    try:
        return decode(record.kept)
    except msgspec.DecodeError as error:
        raise BrokenJob(f"the record {record.name!r} of a job cannot be read ({error})") from error


_encode_state: Final = msgspec.json.Encoder().encode
_decode_state: Final = msgspec.json.Decoder(JobState).decode
_decode_counter: Final = msgspec.json.Decoder(_Counter).decode
_encode_result: Final = msgspec.msgpack.Encoder().encode
_decode_result: Final = msgspec.msgpack.Decoder(JobResult).decode
