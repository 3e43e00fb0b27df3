"""Parked keys of a ``TestDriver``'s source: what waits, and an operator's acts on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from streams.core.parking import Queue, queue_name
from streams.core.parking_rules import Action, Seen
from streams.errors import ConfigError
from streams.records import IncomingRecord
from streams.runtime.partition.event_context import EventContext
from streams.runtime.partition.parking_acts import act, as_parked_record
from streams.runtime.partition.worker import PartitionWorker
from streams.testing.driven_visits import DrivenVisits


class ParkedKey(msgspec.Struct, frozen=True):
    """A parked key: its ``events`` in order (a timer without value), how many ``attempts`` at the first one have
    failed, and the last ``error``. ``seen``: for acts."""

    partition: int
    key: bytes | None
    events: tuple[IncomingRecord, ...]
    attempts: int
    error: str
    next_retry_ms: int
    seen: Seen


class DrivenParking(DrivenVisits):
    """The part of ``TestDriver`` about parked keys."""

    if TYPE_CHECKING:

        def interject(self, partition: int, handler: Callable[[EventContext[Any]], Any]) -> Any: ...

    def parked(self, partition: int | None = None) -> list[ParkedKey]:
        """Return the parked keys of all partitions that are worked on, or of one, by their members; the one that waits
        longest is the first of its partition."""
        found: list[ParkedKey] = []
        for number in self._partitions() if partition is None else [partition]:
            worker = self._worker(number)
            queues = [] if worker is None else list(worker.timers.parked.by_name.values())
            found += [_shown(number, queue) for queue in sorted(queues, key=lambda queue: queue.state.since_ms)]
        return found

    def retry_parked(self, key: str | bytes) -> bool:
        """Have the first event of a parked key tried at once. ``False``: the key is not parked (any more)."""
        return self._act("retry", key, as_letters=False)

    def skip_head(self, key: str | bytes, *, dead_letter: bool = False) -> bool:
        """Let the first event of a parked key go, as a dead letter if it is to be kept; the rest goes on. ``False``:
        the key is not parked (any more)."""
        return self._act("skip-head", key, as_letters=dead_letter)

    def drop_parked(self, key: str | bytes, *, dead_letter: bool = False) -> bool:
        """Let all events of a parked key go, as dead letters if they are to be kept. ``False``: the key is not parked
        (any more)."""
        return self._act("drop", key, as_letters=dead_letter)

    def _act(self, action: Action, key: str | bytes, *, as_letters: bool) -> bool:
        name = queue_name(key.encode() if isinstance(key, str) else key)
        for each in self.parked():
            if each.seen.name == name:

                def handle(ctx: EventContext[Any], seen: Seen = each.seen) -> None:
                    if not act(ctx, action, seen, as_letters=as_letters):
                        raise ConfigError(f"the queue of {key!r} has changed meanwhile; look again")

                self.interject(each.partition, handle)
                return True
        return False

    def _worker(self, partition: int) -> PartitionWorker | None:
        """Return the worker of the member on which a partition is active."""
        self._check_partition(partition)
        for member in self._world.running():
            engine = member.engine
            worker = None if engine is None or member.is_frozen else engine.workers.get(partition)
            if worker is not None and worker.state.value == "active":
                return worker
        return None


def _shown(partition: int, queue: Queue) -> ParkedKey:
    state = queue.state
    events = tuple(as_parked_record(queue.events[number], partition) for number in sorted(queue.events))
    seen = Seen(queue.name, state.head, state.next)
    return ParkedKey(partition, queue.key, events, state.attempts, state.error, queue.record.due_ms, seen)
