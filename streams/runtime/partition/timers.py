"""The durable timers of one partition: kept in its changelog, as part of its state. ``due_timers`` fires them.

A timer is set, replaced and removed by a record of the changelog in the transaction of the event that does it, and the
event that it fires as removes it in its own. So any state that is restored from the changelog has exactly the timers
that have not fired, and a timer's effects are there if and only if it is not.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from streams.core import cron, jobs, parking
from streams.core.origin import Origin
from streams.core.parking_rules import found_by
from streams.core.router import Router
from streams.core.timers import Timer, Timers
from streams.core.visits import TIMER_PREFIX as VISIT_PREFIX
from streams.metrics import Measurement
from streams.records import TYPE_HEADER, VERSION_HEADER, Change, Headers, IncomingRecord, TopicPartition
from streams.runtime.changelog import encode_timer, timer_key
from streams.runtime.partition.awaited_replies import AwaitedReplies
from streams.runtime.partition.joined_rows import JoinedRows
from streams.runtime.partition.seen_ids import NOTE, SeenIds
from streams.runtime.ports import LookupTables
from streams.settings.config import EventSourceConfig


class TimerHost(Protocol):
    """The part of ``host.Host`` that timers need."""

    @property
    def writer(self) -> str: ...
    @property
    def rng(self) -> random.Random: ...
    @property
    def config(self) -> EventSourceConfig: ...
    @property
    def router(self) -> Router: ...
    @property
    def lookups(self) -> LookupTables: ...
    def wall_ms(self) -> int: ...
    def measure(self, measurement: Measurement) -> None: ...


class PartitionTimers:
    """The timers that the complete events of one partition have set. On the loop; ``now_ms`` and ``name in timers``
    also on the thread of a handler that runs."""

    is_muted = False

    def __init__(self, host: TimerHost) -> None:
        self._host = host
        self._timers = Timers()
        self.joined = JoinedRows()
        """The rows of the partition's joined tables: what an event has of its partition from its turn on, as timers."""
        self.awaited = AwaitedReplies()
        """The replies to commands that other processes wait for."""
        self.seen = SeenIds()
        """The ids that the partition has handled (``once=``)."""
        self.timeless: frozenset[str] = frozenset()
        """The inputs whose events move no time (``InputSpec.moves_time``)."""
        self.visits: dict[str, Timer] = {}
        """The states of visits, by the names of their timers (``core.visits``): kept as timers, and never due."""
        self.parked = parking.ParkedKeys()
        """The queues of parked keys. Their records are among the timers: each is due when its head is to be tried."""
        self.jobs = jobs.Jobs()
        """The durable jobs. Their records are among the timers: each is due when the job is to begin, or has ended."""
        self.job_prefix = ""
        """The ids of jobs that are started here begin with it."""
        self.jobs_full = ""
        """The jobs whose bound holds up the partition's input now."""
        self._found: dict[str, Timer] = {}  # the records of those that are other ones in memory only

    def __bool__(self) -> bool:
        return bool(self.visits) or len(self._timers) > 0  # among them those of parked keys

    def __len__(self) -> int:
        return len(self._timers) - len(self.parked.by_name) - len(self.jobs.by_name)

    def __contains__(self, name: str) -> bool:
        return name in self._timers and not is_own(name) and not cron.is_cron(name)

    def __iter__(self) -> Iterator[Timer]:
        return iter(self._timers)

    def restore(self, timers: Iterable[Timer]) -> None:
        """Begin with the timers of a restored state. Raises ``core.parking.BrokenQueue``,
        ``core.jobs.BrokenJob``."""
        found = list(timers)
        self.jobs = jobs.Jobs(timer for timer in found if jobs.is_job(timer.name))
        self._found = {}
        self.parked = parking.ParkedKeys(timer for timer in found if parking.is_parked(timer.name))
        queues = self.parked.by_name.values()
        self.visits = {timer.name: timer for timer in found if timer.name.startswith(VISIT_PREFIX)}
        # In place of all that is here, which may have timers of events that were never committed.
        plain = [timer for timer in found if timer.name not in self.visits and not is_own(timer.name)]
        self._timers = Timers([*plain, *(queue.record for queue in queues), *self.jobs.by_name.values()])
        self._bound_jobs()
        for queue in queues:
            for queued in queue.events.values():
                self._keep_from_firing(queued)
        if not queues:
            return
        host = self._host
        # In memory only: what it stands for is in the changelog already.
        changes = found_by(queues, host.writer, host.wall_ms(), host.config.parking, host.rng)
        records = {name: self.parked.by_name[name].record for name in changes}
        self._apply(changes)
        self._found |= records

    def contents(self) -> dict[str, Timer]:
        """Return all of them, by name, the states of visits, and the records of parked keys and jobs: as in the
        changelog. A copy without them would be a state in which these keys are open, and their events nowhere."""
        there = {timer.name: timer for timer in self._timers} | self._found | self.visits
        for queue in self.parked.by_name.values():
            there.update((record.name, record) for record in queue.records())
        return there | {jobs.COUNTER: self.jobs.counter} if self.jobs.next else there

    def get(self, name: str) -> Timer | None:
        """Return the timer of this name."""
        return self._timers.get(name)

    def set_aside(self, name: str) -> None:
        """Keep a timer from being the first one (``core.timers.Timers.set_aside``)."""
        self._timers.set_aside(name)

    def call_back(self, name: str) -> None:
        """Take back ``set_aside``."""
        self._timers.call_back(name)

    def first(self) -> Timer | None:
        """Return the one that is due first."""
        return self._timers.first()

    @property
    def next_due_ms(self) -> int | None:
        """The due time of the first timer, in milliseconds since the epoch."""
        first = self._timers.first()
        return None if first is None else first.due_ms

    def now_ms(self) -> int:
        """The time of day, in milliseconds since the epoch."""
        return self._host.wall_ms()

    def measure(self, measurement: Measurement) -> None:
        """Hand a measurement to the source's handler of them."""
        self._host.measure(measurement)

    @property
    def config(self) -> EventSourceConfig:
        """The source's settings."""
        return self._host.config

    @property
    def source_topic(self) -> str:
        """The topic of the source's first input."""
        return self._host.config.topic

    @property
    def lookups(self) -> LookupTables:
        """The tables of the source's lookups."""
        return self._host.lookups

    @property
    def router(self) -> Router:
        """The routes of the event types that a timer may carry."""
        return self._host.router

    def admitted(self, changes: dict[str, Timer | None], origin: Origin) -> list[Change]:
        """Set and remove the timers of an event that is complete. Returns the changes for its transaction."""
        if (note := changes.pop(NOTE, None)) is not None:
            noted = self.seen.admitted(note, self.now_ms() // 1000, origin)
            return noted + self.admitted(changes, origin) if changes else noted
        starts = any(jobs.is_job(name) for name in changes)
        if starts:
            changes = self.jobs.numbered(changes, self.job_prefix)
        others = changes
        if self._host.config.visits:
            visits = {name: timer for name, timer in changes.items() if timer and name.startswith(VISIT_PREFIX)}
            self.visits |= visits
            others = {name: timer for name, timer in changes.items() if name not in visits}
        # Removals as well, in the event's own transaction: without them a restored state would fire a timer again.
        made = [
            Change(timer_key(name), None if timer is None else encode_timer(timer), origin=origin)
            for name, timer in changes.items()
        ]
        if starts:
            encoded = dict(zip(changes, (change.value for change in made), strict=True))
            waiting = self.jobs.apply(others, encoded)
            self._apply({name: timer for name, timer in others.items() if name != jobs.COUNTER})
            for name in waiting:  # until that is committed: no call is made for an event that never happened
                self._timers.set_aside(name)
            self._bound_jobs()
        else:
            self._apply(others)
        return made

    def set_job(self, record: jobs.JobRecord) -> None:
        """Change the record of a job in memory only: a new owner finds the job as it is in the changelog."""
        if (known := self.jobs.by_name.get(record.name)) is not None:
            self._found.setdefault(record.name, known)
        self.jobs.set(record)
        self._timers.apply({record.name: record})

    def settle_jobs(self, committed: Mapping[bytes, Change]) -> tuple[list[str], list[str]]:
        """Note the committed changes of a transaction, by their keys (``Jobs.settled``)."""
        keys = {name: timer_key(name) for name in self.jobs.unsettled}
        return self.jobs.settled({name: committed[key].value for name, key in keys.items() if key in committed})

    def _bound_jobs(self) -> None:
        there, known = self.jobs, self._host.router.jobs
        self.jobs_full = ""
        if known is None:  # a replay: its jobs never begin
            return
        for name, count in there.counts.items():
            definition = known.get(name)
            if definition is not None and count >= definition.config.max_jobs and definition.config.when_full == "wait":
                self.jobs_full = name
        if there.size >= jobs.MOST_BYTES:
            self.jobs_full = f"{jobs.MOST_BYTES} bytes of items"

    def _apply(self, changes: Mapping[str, Timer | None]) -> None:
        for name in changes if self._found else ():
            self._found.pop(name, None)
        if not any(parking.is_parked(name) for name in changes):
            self._timers.apply(changes)
            return
        self.parked.apply(changes)
        # A queue whose head is noted stays aside until that is committed, whatever joins it meanwhile.
        noted = [
            name
            for name, timer in changes.items()
            if isinstance(timer, parking.QueueRecord) and timer.state.noted and self._timers.is_aside(name)
        ]
        self._timers.apply({name: timer for name, timer in changes.items() if not parking.is_piece(name)})
        for name in noted:
            self._timers.set_aside(name)
        for timer in changes.values():
            if isinstance(timer, parking.PieceRecord) and timer.queued is not None:
                self._keep_from_firing(timer.queued)

    def _keep_from_firing(self, queued: parking.Queued) -> None:
        """Have a timer that is due wait for its place in a queue. It stays set: an earlier event may cancel it."""
        timer = self._timers.get(queued.topic) if queued.is_timer else None
        if timer is not None and timer.due_ms == queued.timestamp_ms:
            self._timers.set_aside(timer.name)


def is_own(name: str) -> bool:
    """Check for the record of a parked key, or of a job."""
    return parking.is_parked(name) or jobs.is_job(name)


def as_record(timer: Timer, topic_partition: TopicPartition) -> IncomingRecord:
    """Return the timer's event as a record of its partition, without an offset (-1); its time is when it is due."""
    headers: Headers = [(TYPE_HEADER, timer.type.encode())]
    if timer.version > 1:
        headers.append((VERSION_HEADER, b"%d" % timer.version))
    headers += [(name, text.encode()) for name, text in timer.trace]
    topic, partition = topic_partition
    return IncomingRecord(topic, partition, -1, timer.key, timer.value, headers, timer.due_ms)
