"""An operator's act on the queue of a parked key, and the letters of the events that it lets go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from streams.core.jobs import JobEnd
from streams.core.parking import Queued
from streams.core.parking_rules import Action, Seen, acted
from streams.core.timers import Timer
from streams.records import IncomingRecord, TopicPartition
from streams.runtime.partition.dead_letters import DeadLetter, dead_letter
from streams.runtime.partition.event_context import EventContext
from streams.runtime.partition.timers import as_record
from streams.settings.config import EventSourceConfig


class LetGo(Exception):
    """The error in the letter of a parked event that an operator has let go."""


def letters(
    config: EventSourceConfig,
    partition: int,
    gone: Sequence[Queued],
    timer_of: Callable[[str], Timer | None],
    error: str,
    now_ms: int,
    limit: int,
) -> list[DeadLetter]:
    """Make the letters of events that an operator lets go; ``error``: the last one of the first of them."""
    made: list[DeadLetter] = []
    for queued in gone:
        timer = timer_of(queued.topic) if queued.is_timer else JobEnd.of_queued(queued) if queued.is_result else None
        if timer is None:
            record = as_parked_record(queued, partition)
        else:
            record = as_record(timer, TopicPartition(config.topic, partition))
        reason = LetGo(f"let go by an operator while it was parked{f': {error}' if error and not made else ''}")
        made.append(dead_letter(config.dead_letters, record, reason, 0, now_ms, timer).within(limit))
    return made


def as_parked_record(queued: Queued, partition: int) -> IncomingRecord:
    """Return a parked event as the record that it was."""
    return IncomingRecord(
        queued.topic, partition, queued.offset, queued.key, queued.value, queued.headers, queued.timestamp_ms
    )


def act(ctx: EventContext[Any], action: Action, seen: Seen, *, as_letters: bool) -> bool:
    """Carry out an operator's act, in an interjection. ``False``: the queue is another one by now, and nothing is
    done."""
    timers = ctx._timers
    assert timers is not None  # an interjection has its turn

    def due_of(name: str) -> int | None:
        timer = timers.get(name)
        return None if timer is None else timer.due_ms

    parked = timers.parked.by_name.get(seen.name)
    done = acted(timers.parked, seen, action, timers.now_ms(), due_of)
    if done is None or parked is None:
        return False
    changes, gone = done
    # One interjection may act on several queues; each is a queue of its own, so none of the changes meet.
    ctx._timer_changes = changes if ctx._timer_changes is None else ctx._timer_changes | changes
    if as_letters:
        number, origin, error = ctx.topic_partition.partition, ctx._origin, parked.state.error
        for letter in letters(timers.config, number, gone, timers.get, error, timers.now_ms(), ctx._limit):
            ctx._outputs.append(msgspec.structs.replace(letter, origin=origin))
    return True
