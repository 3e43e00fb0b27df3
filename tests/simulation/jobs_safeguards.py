"""The safeguards of durable jobs, as in ``safeguards.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from streams.core.jobs import PREFIX, JobRecord, Jobs
from streams.model.group import GroupMetadata
from streams.records import Change
from streams.runtime.changelog import timer_key
from streams.runtime.partition.job_runs import JobRuns
from streams.runtime.partition.timers import PartitionTimers
from streams.runtime.transactions.pool import TransactionPool

from .member_safeguards import edited, edited_text
from .safeguards import Patch, instead, left_out, missed, nothing

JOBS, JOB = "jobs", timer_key(PREFIX)


def changed(name: str, edits: list[tuple[Any, str, str, str]], rule: str, seed: int = 0) -> None:
    """Register a safeguard that is several pieces of text."""

    def out(patch: Patch) -> None:
        for owner, method, before, after in edits:
            patch.setattr(owner, method, edited_text(getattr(owner, method), before, after))

    out.__name__ = name
    missed(rule, JOBS, seed=seed)(out)


def without(which: Callable[[Change], bool]) -> Callable[..., list[Change]]:
    """Leave changes of jobs out of the transaction of their event."""

    def admitted(original: Any, *of: Any) -> list[Change]:
        return [change for change in original(*of) if not (change.key.startswith(JOB) and which(change))]

    return admitted


left_out(
    "starts_are_not_in_the_transaction",
    PartitionTimers, "admitted", without(lambda change: change.value is not None), "J1", JOBS,
)  # fmt: skip
left_out(
    "ends_and_cancels_are_not_in_the_transaction",
    PartitionTimers, "admitted", without(lambda change: change.value is None), "J3", JOBS,
)  # fmt: skip
changed(
    "jobs_begin_before_the_commit_of_their_start",
    [
        (PartitionTimers, "admitted", "self._timers.set_aside(name)", "pass"),
        (JobRuns, "attempt", " or name in timers.jobs.unsettled", ""),
    ],
    "J2",
)
edited("each_attempt_has_an_id_of_its_own", JobRuns, "_begin", "JobRun(state.id, ", "JobRun(f'{state.id}-{state.attempts}', ", "J4", JOBS)
edited("numbers_are_not_kept", Jobs, "numbered", "made[COUNTER] = self.counter", "pass", "J4", JOBS)
edited("donors_leave_their_runs_alone", JobRuns, "drop", "self._cancel(name)", "pass", "J5", JOBS)
changed(
    "a_result_is_taken_for_whatever_has_the_name",
    [
        (JobRuns, "attempt", "if run.number == state.number:", "if True:"),
        (JobRuns, "settled", "record.state.number != run.number", "False"),
    ],
    "J6",
)
edited("jobs_that_were_found_run_without_a_note", JobRuns, "attempt", "name in self._found", "False", "J7", JOBS)
edited("failed_attempts_are_not_counted", JobRuns, "_failed", "due_ms, attempts=attempts, error", "due_ms, error", "J8", JOBS)


edited("waits_are_not_kept", Jobs, "__init__", "record.name, record.due_ms, _read", "record.name, 0, _read", "J8", JOBS)
edited("jobs_of_an_order_run_side_by_side", Jobs, "is_first", "record.lane is None", "True", "J9", JOBS)
edited("the_next_one_of_an_order_is_forgotten", JobRuns, "settled", "(*changed, *behind)", "changed", "J9", JOBS)
edited("ends_pass_the_queue_of_their_key", JobRuns, "_end", "partition.parked.get(due.key)", "None", "J11", JOBS)


@instead(TransactionPool, "_fence", "8a", JOBS)
def owners_that_were_frozen_end_jobs(self: TransactionPool, txn: Any) -> GroupMetadata:
    self.metadata_used = self.group_metadata()
    return self.metadata_used
