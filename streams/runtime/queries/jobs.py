"""Operators' requests about the durable jobs of a partition, as they travel, and the owner's answers to them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import islice
from typing import Any, ClassVar, Final, get_args

import msgspec

from streams.core.jobs import PREFIX, JobAction, JobRecord, Jobs, SeenJob
from streams.errors import ConfigError
from streams.runtime.partition.context_fields import LONGEST_NAME
from streams.runtime.partition.event_context import EventContext
from streams.runtime.partition.job_runs import JobRun
from streams.runtime.partition.starting_jobs import act
from streams.runtime.partition.worker import PartitionWorker
from streams.runtime.queries.operating import PAGE, Named, OperatorReply, OperatorRequest

_KEY_BYTES: Final = 256
"""Bytes of a key, and of an order, that are shown."""
_PLACE: Final = re.compile(r"[0-9]{20}")


class ShownJob(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A job as an operator sees it (``core.jobs.JobState``). ``key`` and ``order``: their beginnings, and None where
    there is none; ``key_bytes``: of the whole key. ``item_bytes``: of its item, and ``item`` itself, if it was wanted.
    ``is_running``: it runs, or its end has not had its turn; ``progress``: how far it is (done, total, text), as it has
    said. ``is_known``: the source defines jobs of this kind."""

    name: str
    jobs: str
    id: str
    number: int
    since_ms: int
    due_ms: int
    key: bytes | None = None
    key_bytes: int = 0
    order: bytes | None = None
    attempts: int = 0
    error: str = ""
    is_parked: bool = False
    is_cancelled: bool = False
    is_running: bool = False
    is_known: bool = True
    progress: tuple[float, float, str] | None = None
    item_bytes: int = 0
    item: bytes | None = None

    @classmethod
    def of(
        cls,
        record: JobRecord,
        *,
        is_known: bool = True,
        is_running: bool = False,
        run: JobRun | None = None,
        with_item: bool = False,
    ) -> ShownJob:
        """Describe a job."""
        state = record.state
        return cls(
            name=record.job_name,
            jobs=state.jobs,
            id=state.id,
            number=state.number,
            since_ms=state.since_ms,
            due_ms=record.due_ms,
            key=None if record.key is None else record.key[:_KEY_BYTES],
            key_bytes=len(record.key or b""),
            order=None if state.order is None else state.order[:_KEY_BYTES],
            attempts=state.attempts,
            error=state.error,
            is_parked=state.parked,
            is_cancelled=state.cancelled,
            is_running=is_running,
            is_known=is_known,
            progress=None if run is None else run.progressed,
            item_bytes=len(state.item),
            item=state.item if with_item else None,
        )

    @property
    def place(self) -> str:
        """Return its place in a list: that of its start."""
        return f"{self.number:020d}"

    @property
    def named(self) -> Named:
        """Return what an act on it names."""
        return self.name, self.number, self.since_ms

    @property
    def state(self) -> str:
        """Return what it does, in one word: ``cancelled``, ``running``, ``parked``, ``unknown`` (the source does not
        define it) or ``waiting``."""
        marks = {
            "cancelled": self.is_cancelled,
            "running": self.is_running,
            "parked": self.is_parked,
            "unknown": not self.is_known,
        }
        return next((word for word, holds in marks.items() if holds), "waiting")


class JobReply(OperatorReply, frozen=True, kw_only=True, omit_defaults=True):
    """``count`` and ``parked``: all jobs of the partition, and those of them that wait for an operator, before an act.
    ``found``: the entries of a list."""

    count: int = 0
    parked: int = 0
    found: tuple[ShownJob, ...] = ()


class JobRequest(OperatorRequest[JobReply], frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """``name``, ``id``: list this one alone, with its item. ``jobs``, ``only_parked``: list those of this definition,
    those that wait for an operator."""

    path: ClassVar[str] = "/api/v1/jobs"
    noun: ClassVar[str] = "job"
    actions: ClassVar[tuple[str, ...]] = get_args(JobAction)

    name: str = ""
    id: str = ""
    jobs: str = ""
    only_parked: bool = False

    def check_own(self, names: list[str]) -> None:
        for name in (self.name, *names):
            if len(name.encode()) > LONGEST_NAME:
                raise ConfigError(f"the job's name {name[:40]!r}... has more than {LONGEST_NAME} bytes")
        if self.after and not _PLACE.fullmatch(self.after):
            raise ConfigError(f"a place in a list of jobs has 20 digits, not {self.after[:64]!r}")

    def carry_out(self, ctx: EventContext[Any], worker: PartitionWorker) -> JobReply:
        jobs, running, action = worker.timers.jobs, worker.jobs.running, self.action
        count, parked, _ = jobs.figures()
        done = [
            name
            for name, number, since_ms in self.seen
            if act(ctx, action, SeenJob(PREFIX + name, number, since_ms))  # type: ignore[arg-type]
        ]
        found = [
            ShownJob.of(
                record,
                is_known=worker.jobs.is_known(record),
                is_running=worker.jobs.is_running(record.name),
                run=running.get(record.name),
                with_item=bool(self.name or self.id),
            )
            for record in (islice(self.listed(jobs), PAGE + 1) if action == "list" else ())
        ]
        return JobReply(
            partition=self.partition,
            served_by=worker.timers.config.instance_id,
            count=count,
            parked=parked,
            found=tuple(found[:PAGE]),
            more=len(found) > PAGE,
            done=tuple(done),
        )

    def listed(self, jobs: Jobs) -> Iterable[JobRecord]:
        """Return the jobs of a partition that the list is about, in the order of their starts."""
        if self.name:
            record = jobs.by_name.get(PREFIX + self.name)
            return [] if record is None or self.id not in ("", record.state.id) else [record]
        behind = int(self.after or -1)
        return (
            record
            for record in jobs.by_name.values()
            if record.state.number > behind
            and self.id in ("", record.state.id)
            and self.jobs in ("", record.state.jobs)
            and (record.state.parked or not self.only_parked)
        )
