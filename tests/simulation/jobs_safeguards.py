"""The safeguards of durable jobs, as in ``safeguards.py``. ``property/test_jobs.py`` has further ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from streams.core.jobs import PREFIX, Jobs
from streams.records import Change
from streams.runtime.changelog import timer_key
from streams.runtime.partition.job_runs import JobRuns
from streams.runtime.partition.timers import PartitionTimers

from .member_safeguards import edited_text
from .safeguards import Patch, left_out, missed

Edit = tuple[Any, str, str, str]


def without(is_out: Callable[[Change], bool]) -> Callable[..., list[Change]]:
    """Leave changes of jobs out of the transaction of their event."""

    def admitted(original: Any, *of: Any) -> list[Change]:
        return [change for change in original(*of) if not (change.key.startswith(timer_key(PREFIX)) and is_out(change))]

    return admitted


def edited(name: str, rule: str, seed: int, *edits: Edit) -> None:
    """Register a safeguard that is a piece of text, or several."""

    def out(patch: Patch) -> None:
        for owner, method, before, after in edits:
            patch.setattr(owner, method, edited_text(getattr(owner, method), before, after))

    out.__name__ = name
    missed(rule, "jobs", seed=seed)(out)


left_out(
    "starts_are_not_in_the_transaction",
    PartitionTimers, "admitted", without(lambda change: change.value is not None), "J1", "jobs", seed=2,
)  # fmt: skip
left_out(
    "ends_and_cancels_are_not_in_the_transaction",
    PartitionTimers, "admitted", without(lambda change: change.value is None), "J3", "jobs", seed=11,
)  # fmt: skip
edited(
    "jobs_begin_before_the_commit_of_their_start", "J2", 0,
    (PartitionTimers, "admitted", "self._timers.set_aside(name)", "pass"),
    (JobRuns, "attempt", " or name in timers.jobs.unsettled", ""),
)  # fmt: skip
edited("donors_leave_their_runs_alone", "J5", 50, (JobRuns, "drop", "self._cancel(name)", "pass"))
edited(
    "a_result_is_taken_for_whatever_has_the_name", "J6", 43,
    (JobRuns, "attempt", "if run.number == state.number:", "if True:"),
    (JobRuns, "settled", "record.state.number != run.number", "False"),
)  # fmt: skip
edited("jobs_that_were_found_run_without_a_note", "J7", 0, (JobRuns, "attempt", "name in self._found", "False"))
edited(
    "failed_attempts_are_not_counted", "J8", 11,
    (JobRuns, "_failed", "due_ms, attempts=attempts, error", "due_ms, error"),
)  # fmt: skip
edited(
    "the_waits_of_jobs_are_not_restored", "J8", 50,
    (Jobs, "__init__", "record.name, record.due_ms, _read", "record.name, 0, _read"),
)  # fmt: skip
edited("jobs_of_an_order_run_side_by_side", "J9", 11, (Jobs, "is_first", "record.lane is None", "True"))
edited("ends_pass_the_queue_of_their_key", "J11", 3, (JobRuns, "_end", "partition.parked.get(due.key)", "None"))
