"""Durable jobs of a ``TestDriver``'s source: what waits and runs, and an operator's acts on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from streams.core.jobs import PREFIX, JobAction, JobRecord, SeenJob
from streams.errors import ConfigError
from streams.runtime.partition.event_context import EventContext
from streams.runtime.partition.starting_jobs import act
from streams.testing.driven_parking import DrivenParking


class DurableJob(msgspec.Struct, frozen=True):
    """A durable job: its ``name``, the ``jobs`` that it is one of, its ``id`` outside and its ``item``, encoded.
    ``attempts`` have failed, the last one with ``error``; the next one is due at ``due_ms``. ``is_running``: it runs,
    or has ended and not had its turn; ``is_parked``: it waits for an operator."""

    partition: int
    name: str
    jobs: str
    id: str
    item: bytes
    key: bytes | None
    attempts: int
    error: str
    due_ms: int
    is_running: bool
    is_parked: bool
    seen: SeenJob


class DrivenJobs(DrivenParking):
    """The part of ``TestDriver`` about durable jobs."""

    if TYPE_CHECKING:

        def interject(self, partition: int, handler: Callable[[EventContext[Any]], Any]) -> Any: ...

    def jobs(self, partition: int | None = None) -> list[DurableJob]:
        """Return the durable jobs of all partitions that are worked on, or of one, in the order of their starts."""
        found: list[DurableJob] = []
        for number in self._partitions() if partition is None else [partition]:
            worker = self._worker(number)
            if worker is not None:
                records = sorted(worker.timers.jobs.by_name.values(), key=lambda record: record.state.number)
                found += [_shown(number, one, is_running=worker.jobs.is_running(one.name)) for one in records]
        return found

    def cancel_job(self, name: str) -> bool:
        """Cancel a job as an operator: its ``on_failure`` is called with ``JobCancelled``. ``False``: there is none."""
        return self._act_on_job("cancel", name)

    def retry_job(self, name: str) -> bool:
        """Have a job tried at once, with all of its attempts. ``False``: there is none."""
        return self._act_on_job("retry", name)

    def _act_on_job(self, action: JobAction, name: str) -> bool:
        for each in self.jobs():
            if each.name == name:

                def handle(ctx: EventContext[Any], seen: SeenJob = each.seen) -> None:
                    if not act(ctx, action, seen):
                        raise ConfigError(f"the job {name!r} is over, cancelled, or another one by now; look again")

                self.interject(each.partition, handle)
                return True
        return False


def _shown(partition: int, record: JobRecord, *, is_running: bool) -> DurableJob:
    state = record.state
    return DurableJob(
        partition,
        record.name.removeprefix(PREFIX),
        state.jobs,
        state.id,
        state.item,
        record.key,
        state.attempts,
        state.error,
        record.due_ms,
        is_running,
        state.parked,
        SeenJob(record.name, state.number, state.since_ms),
    )
