"""The time at which the first event of a parked key is tried again, and what an operator may do with its queue."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Final, Literal, NamedTuple, TypeAlias

from streams.core.parking import NEVER_MS, ParkedKeys, Queue, Queued
from streams.core.timers import Timer
from streams.errors import DecodeError, RecordRefused
from streams.outcomes import Retry
from streams.sak.backoff import backoff_seconds
from streams.settings.groups import ParkingConfig

FOUND_EACH_MS: Final = 100
"""Milliseconds between the first attempts of a new owner at the heads that it has found."""
NEVER_BETTER: Final = (DecodeError, RecordRefused)
"""Errors that the same bytes always give in one release: no attempt by time."""

Action: TypeAlias = Literal["retry", "skip-head", "drop"]
"""The acts of an operator on a queue."""


class Seen(NamedTuple):
    """A queue as an operator has seen it: so a request that is repeated, or crosses an attempt, does nothing. Events
    that have queued since do not matter where only the head goes."""

    name: str
    head: int
    next: int


def acted(
    parked: ParkedKeys, seen: Seen, action: Action, now_ms: int, due_of: Callable[[str], int | None]
) -> tuple[dict[str, Timer | None], list[Queued]] | None:
    """Return the changes of an operator's act, and the events that go. ``None``: the queue is another one by now.
    ``due_of``: the due time of a timer, by its name, while it is set."""
    queue = parked.by_name.get(seen.name)
    if queue is None or queue.state.head != seen.head or (action == "drop" and queue.state.next != seen.next):
        return None
    if action == "retry":
        return queue.due(now_ms), []
    gone = [queue.head] if action == "skip-head" else [queue.events[number] for number in sorted(queue.events)]
    changes = queue.left(queue.state.owner, now_ms) if action == "skip-head" else queue.dropped()
    there = [each for each in gone if not each.is_timer or due_of(each.topic) == each.timestamp_ms]
    # A timer whose place is given up does not fire.
    return changes | {each.topic: None for each in there if each.is_timer}, there


def found_by(
    queues: Iterable[Queue], owner: str, now_ms: int, config: ParkingConfig, rng: random.Random
) -> dict[str, Timer | None]:
    """Return the records of the queues that a new owner has found, in memory: each head is due, the oldest first. One
    that another owner was going to try, which is gone, counts as tried, and waits."""
    changes: dict[str, Timer | None] = {}
    for queue in sorted(queues, key=lambda each: each.state.since_ms):
        state = queue.state
        if not queue.is_found_by(owner):
            continue
        if state.noted:
            attempts = state.attempts + 1
            due_ms = now_ms + round(1000 * pause_seconds(config, attempts, rng))
            error = state.error or "the process that tried it is gone"
            changes |= queue.failed(owner, attempts, due_ms, error, state.handler, now_ms)
        else:
            changes |= queue.due(now_ms + FOUND_EACH_MS * len(changes))
    return changes


def pause_seconds(config: ParkingConfig, attempts: int, rng: random.Random) -> float:
    """Return the pause of a parked key after so many attempts by its pace."""
    first, most = config.first_retry_seconds, config.max_retry_seconds
    return backoff_seconds(max(1, attempts), min(first, most), most, 2.0, jitter=0.25, rng=rng)


def next_due_ms(
    error: BaseException, attempts: int, policy: Retry, config: ParkingConfig, now_ms: int, rng: random.Random
) -> int:
    """Return when a head that its policy parks is tried again."""
    if isinstance(error, NEVER_BETTER):
        return NEVER_MS
    return now_ms + round(1000 * pause_seconds(config, attempts - policy.attempts + 1, rng))
