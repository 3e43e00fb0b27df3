"""The judgement of failed work: its error policy is applied; one that is a function is called first."""

from __future__ import annotations

import logging
import time
from typing import Final, NamedTuple

from streams.core.policy import Decision, Failure, WorkKind, apply_error_policy, demands_stop
from streams.core.timers import Timer
from streams.errors import PolicyFailed
from streams.outcomes import STOP, ErrorPolicy, Failed, PolicyFunction, Retry, WorkOrigin, answered, policy_name
from streams.records import TYPE_HEADER, IncomingRecord
from streams.runtime.partition.failures import describe, reason_of
from streams.sak.users_code import location_of

_log = logging.getLogger(__name__)

LONGEST_SECONDS: Final = 0.05
"""Seconds that a policy function may take without a warning: it stands on the event loop."""


class Judgement(NamedTuple):
    """The decision, the policy that was applied, and the failure: with the error of a policy function that failed."""

    decision: Decision
    policy: Retry
    failure: Failure


def judged(
    failure: Failure,
    policy: ErrorPolicy,
    record: IncomingRecord | None,
    name: str,
    origin: WorkOrigin = "event",
    *,
    was_ahead: bool = False,
) -> Judgement:
    """Decide what becomes of failed work. ``name``: of its type, or handler. ``was_ahead``: the attempts that hold up
    the partition were made before its turn."""
    if not isinstance(policy, Retry):
        policy, failure = _called(policy, failure, None if origin == "interjection" else record, name, origin)
    if was_ahead and policy.waits == "partition":
        failure = failure._replace(is_final=True)
    return Judgement(apply_error_policy(failure, policy), policy, failure)


def of_interjection(error: BaseException, policy: ErrorPolicy, name: str) -> tuple[Decision, BaseException]:
    """Decide about an interjection that has failed. Returns the error, too, with that of a policy that failed."""
    decision, _, failure = judged(Failure(1, error, WorkKind.INTERJECTION), policy, None, name, "interjection")
    return decision, failure.error


def kind_of(timer: Timer | None) -> WorkOrigin:
    """Return the kind of work whose event this is; ``None``: that of a record."""
    return "event" if timer is None else timer.kind


def work_of(timer: Timer | None) -> WorkKind:
    """Return the kind of work that its policy goes by."""
    return WorkKind.RUN if kind_of(timer) == "interjection" else WorkKind.EVENT


def type_name(record: IncomingRecord) -> str:
    """Return the event type that an unreadable record says it is of; empty: it does not say it."""
    return (record.header(TYPE_HEADER) or b"")[:200].decode(errors="replace")


def _called(
    function: PolicyFunction, failure: Failure, record: IncomingRecord | None, name: str, origin: WorkOrigin
) -> tuple[Retry, Failure]:
    """Call a policy function. What it raises, or returns that is no answer, stops the source with both errors: no
    record is passed without a decision."""
    if demands_stop(failure.error):  # whatever it would answer
        return STOP, failure
    attempts, error, _, _, elapsed = failure
    began = time.perf_counter()
    try:
        return answered(function(Failed(record, name, reason_of(error), attempts, elapsed, origin))), failure
    except BaseException as reason:  # a cancellation, too: the partition's task is not the one that is cancelled
        text = f"{describe(error)}; and its error policy {policy_name(function)}{location_of(function)} failed: "
        failed = PolicyFailed(text + describe(reason))
        failed.__cause__ = error
        return STOP, failure._replace(error=failed, is_final=True)
    finally:
        took = time.perf_counter() - began
        if took > LONGEST_SECONDS:
            _log.warning(
                "the error policy %s%s took %.0f ms; it runs on the event loop, and all partitions wait for it",
                policy_name(function),
                location_of(function),
                1000 * took,
            )
