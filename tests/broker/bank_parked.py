"""The bank with events that fail, and wait in the queues of their keys: those of a tenth of the accounts.

While the file ``BANK_PARK`` is there, each of them fails; else one in ten does, once or twice. ``BANK_STEP`` is a
step of parking, ``name[:count]``: at its count-th passage the process is struck, or from then on at ``KES_FAULT``.
``BANK_SECRET``: the file of the group's secret; the member answers operators then, at an address of its own.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from streams import EventContext, EventSource
from streams.core.parking import ParkedKeys, Queue
from streams.outcomes import ErrorResponse, Retry
from streams.runtime.partition.heads_ahead import HeadsAhead
from streams.runtime.partition.parked_events import ParkedEvents
from streams.runtime.partition.parked_heads import ParkedHeads
from streams.runtime.queries import parked as acts
from streams.settings import ParkingConfig, QueryConfig
from streams.testing.faults import FaultPlan

STEPS: dict[str, tuple[Any, str]] = {
    "failed": (ParkedEvents, "begun"),
    "queued": (ParkedEvents, "behind"),
    "noted": (ParkedHeads, "_note"),
    "begun ahead": (HeadsAhead, "_entry"),
    "tried": (ParkedHeads, "_turn"),
    "failed again": (Queue, "failed"),
    "left": (ParkedKeys, "_remove_event"),
    "opened": (ParkedKeys, "_remove"),
    "operated": (acts, "act"),
}
"""The engine's calls that change queues. Each change becomes part of a transaction, as all changes do."""


class SteppedPlan(FaultPlan):
    """A plan that is armed by a step of parking."""

    def __init__(self, step: str, planned: FaultPlan) -> None:
        super().__init__(planned.point, 1, planned.action)
        self._left = planned._left
        name, _, count = step.partition(":")
        self._passages = int(count or 1)
        owner, method = _steps()[name]
        original = getattr(owner, method)

        def passed(*given: Any, **named: Any) -> Any:
            self._passages -= 1
            if self._passages == 0 and not self.point:
                FaultPlan.hit(self, "")
            return original(*given, **named)

        setattr(owner, method, passed)

    def hit(self, point: str) -> None:
        """Passing this point: nothing, before the step."""
        if self._passages <= 0:
            super().hit(point)


def _steps() -> dict[str, tuple[Any, str]]:
    if not os.environ.get("BANK_HOOKS"):
        return STEPS
    from tests.broker import bank_jobs

    return bank_jobs.STEPS


def plan() -> FaultPlan:
    """The plan of this process."""
    step, planned = os.environ.get("BANK_STEP", ""), FaultPlan.from_environment()
    return SteppedPlan(step, planned) if step else planned


def is_bad(account: str) -> bool:
    """Whether the account is one of those whose events fail."""
    return zlib.crc32(account.encode()) % 10 == 0


def settings() -> dict[str, Any]:
    """Return the settings of the bank's source with parked keys."""
    if not os.environ.get("BANK_PARK"):
        return {}
    retry = Retry(attempts=2, backoff_seconds=0.02, waits="key", then=ErrorResponse.PARK)
    pace = ParkingConfig(first_retry_seconds=0.05, max_retry_seconds=0.5, max_key_events=100_000)
    secret = os.environ.get("BANK_SECRET", "")
    queries = QueryConfig(secret_file=secret, operate=bool(secret))
    return {"error_policy": retry, "parking": pace, "queries": queries}


def failing(deposit: Callable[..., None]) -> Callable[..., None]:
    """The handler: it fails behind its changes, which are undone."""
    if not (park := os.environ.get("BANK_PARK")):
        return deposit
    broken = Path(park)

    def handle(ctx: EventContext[Any], event: Any) -> None:
        deposit(ctx, event)
        if is_bad(event.account) and (ctx.attempt <= 2 - event.cents % 20 or broken.exists()):
            raise ConnectionError(f"no answer for {event.account}")

    return handle


def answering(source: EventSource[Any]) -> AbstractContextManager[object]:
    """Answer operators as long as this is open, if there is a secret."""
    if not os.environ.get("BANK_SECRET"):
        return nullcontext()
    from streams.queries import QueryServer

    return QueryServer(source, "127.0.0.1:0")
