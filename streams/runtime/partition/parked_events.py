"""The way of events into the queues of parked keys: what an event changes there, and whether there is room for it."""

from __future__ import annotations

from streams.core.jobs import JobEnd
from streams.core.parking import LONGEST_PIECE, PREFIX, Queue, Queued, encoded_size, queued_record
from streams.core.parking_rules import next_due_ms
from streams.core.policy import Failure
from streams.core.timers import Timer
from streams.errors import EventFailure, RecordRefused
from streams.model.tracing import carried
from streams.outcomes import Retry
from streams.records import Change, IncomingRecord, shown_key
from streams.runtime.changelog import timer_key
from streams.runtime.partition.failures import describe
from streams.runtime.partition.host import Host
from streams.runtime.partition.state import Partition

QUEUES = timer_key(PREFIX)
"""The keys of queues in the changelog begin with it."""


class NoRoom(Exception):
    """An event that is to be parked, or to be queued (then there is no ``failure``), finds no room. ``setting``: the
    bound of ``ParkingConfig`` that is reached."""

    def __init__(self, queued: Queued, failure: Failure | None, setting: str) -> None:
        self.queued = queued
        self.failure = failure
        self.setting = setting
        why = f" (the event failed: {describe(failure.error)})" if failure is not None else ""
        super().__init__(f"its key {shown_key(queued.key)} cannot be parked: ParkingConfig.{setting} is reached{why}")


class ParkedEvents:
    """The way into the queues of one partition. On its task. What is returned are the changes of the event; they take
    effect when it is admitted."""

    def __init__(self, partition: Partition, host: Host) -> None:
        self._partition = partition
        self._host = host

    def begun(
        self,
        failure: Failure,
        record: IncomingRecord,
        timer: Timer | None,
        policy: Retry,
        handler: str,
        pause_seconds: float | None,
    ) -> dict[str, Timer | None]:
        """Park the key of an event that has failed. ``pause_seconds``: until the next attempt; ``None``: by the pace of
        queues. Raises ``NoRoom``."""
        host, error = self._host, failure.error
        attempts = min(failure.attempts, policy.attempts)  # those of a job are its own policy's
        self._refuse_if_refused(record, error)
        # Timers, and the ends of jobs, are a part of the state already, so they always find room.
        if timer is None:
            queued = self._with_room(record, failure)
        else:
            queued = timer.queued if isinstance(timer, JobEnd) else Queued.of_timer(timer)
        now_ms = host.wall_ms()
        if pause_seconds is None:
            due_ms = next_due_ms(error, attempts, policy, host.config.parking, now_ms, host.rng)
        else:
            due_ms = now_ms + round(1000 * pause_seconds)
        changes = self._partition.timers.parked.begun(
            queued, host.writer, attempts, due_ms, describe(error), handler, now_ms, self._longest_piece
        )
        self._partition.traces.note(queued.queue_name, error)
        return changes | {timer.name: None} if isinstance(timer, JobEnd) else changes

    def alone(self, record: IncomingRecord) -> dict[str, Timer | None]:
        """Park the key of an event that was not attempted; it is due at once. Raises ``NoRoom``."""
        queued, host = self._with_room(record, None), self._host
        now_ms = host.wall_ms()
        return self._partition.timers.parked.begun(queued, host.writer, 0, now_ms, "", "", now_ms, self._longest_piece)

    def behind(self, queue: Queue, record: IncomingRecord) -> dict[str, Timer | None]:
        """Have a record wait behind the events of its key. Raises ``NoRoom``."""
        queued = self._with_room(record, None)
        known = self._partition.failures.meet(record.offset)
        if known is not None:
            self._refuse_if_refused(record, known.error)
        return queue.followed_by(queued, self._longest_piece)

    def in_slice(self, record: IncomingRecord) -> list[Change] | None:
        """Have a record wait, as a part of a slice. Returns the changes for its journal; ``None``: that is for
        ``Execution``, since there is no room, the event is traced, or it is a row of a joined table."""
        partition, tracer = self._partition, self._host.router.tracer
        queue = partition.queue_of(record)
        is_row = record.topic in partition.joined.tables
        if queue is None or is_row or (tracer is not None and carried(record.headers)):
            return None
        try:
            return partition.timers.admitted(self.behind(queue, record), record.offset)
        except NoRoom:
            return None

    def timer_behind(self, queue: Queue, timer: Timer) -> dict[str, Timer | None]:
        """Give a timer that is due its place behind the events of its key. It stays set: they may cancel it."""
        return queue.followed_by(Queued.of_timer(timer), self._longest_piece)

    def end_behind(self, queue: Queue, end: JobEnd) -> dict[str, Timer | None]:
        """Have the end of a job wait behind the events of its key, in place of the job's record."""
        return queue.followed_by(end.queued, self._longest_piece) | {end.name: None}

    def setting_without_room(self, queued: Queued) -> str:
        """Return the setting that leaves no room for an event; ``""``: there is room."""
        config = self._host.config.parking
        return self._partition.timers.parked.lacks_room(config, queued.key, encoded_size(queued))

    def _with_room(self, record: IncomingRecord, failure: Failure | None) -> Queued:
        came = record.as_received  # its type is found again when it has its turn
        queued = queued_record(came.topic, came.offset, came.timestamp_ms, came.headers, came.key, came.value)
        table = self._partition.joined.tables.get(record.topic)
        if table is not None:  # the row changes now, and its update handler is called later: with the row of this place
            row = table.read(record, self._host.message_limit)
            queued = queued.with_old(None if row is None else table.row(row.key))
        setting = self.setting_without_room(queued)
        if setting:
            raise NoRoom(queued, failure, setting)
        return queued

    def _refuse_if_refused(self, record: IncomingRecord, error: BaseException) -> None:
        """Stop where the changelog refuses the queue itself: parked again it would be refused again, without end."""
        if isinstance(error, RecordRefused) and (error.key or b"").startswith(QUEUES):
            raise EventFailure(
                f"{record.where}: the changelog does not take the event into its key's queue: {describe(error)}. Raise "
                "its max.message.bytes"
            ) from error

    @property
    def _longest_piece(self) -> int:
        return min(LONGEST_PIECE, max(1, self._host.message_limit // 2))
