"""The work of parked heads whose handlers run ahead of their turn: the partition goes on meanwhile.

Each head has a reorder buffer of its own, with one entry. The head is set aside until its work has ended; then it is
due again, and only its turn is taken between two events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from streams.core.parking import Queue
from streams.core.router import Route
from streams.records import IncomingRecord
from streams.runtime.partition.failures import of_policy
from streams.runtime.partition.host import Host
from streams.runtime.partition.reorder_buffer import AsideEntry, Entry, ReorderBuffer, Waiting
from streams.runtime.partition.state import Partition


class HeadsAhead:
    """The heads of one partition whose work is under way, by the names of their queues. On its task. ``wake`` is called
    when the work of one has ended."""

    def __init__(self, partition: Partition, host: Host, wake: Callable[[], None]) -> None:
        self._partition = partition
        self._host = host
        self._wake = wake
        self._under_way: dict[str, tuple[int, Entry]] = {}  # with the number of the head
        self._refused: set[str] = set()  # by their stages, for lack of room

    def __bool__(self) -> bool:
        return bool(self._under_way)

    @property
    def first_ended(self) -> str | None:
        """Return the name of a queue whose head waits for its turn."""
        return next((name for name, (_, entry) in self._under_way.items() if entry.is_settled), None)

    def waits(self, queue: Queue) -> bool:
        """Check whether the work of a queue's head is under way. Then the head is set aside until it has ended."""
        _, entry = self._under_way.get(queue.name, (0, None))
        if entry is None or entry.is_settled or queue.name in self._refused:
            return False
        # Again: an event that has queued meanwhile has set the queue's record, which is due.
        self._partition.timers.set_aside(queue.name)
        return True

    def ended(self, queue: Queue, record: IncomingRecord, route: Route, event: Any) -> Entry | None:
        """Return the entry of a head whose work has ended; it is to be dropped behind its turn. ``None``: the work has
        begun, or waits for room."""
        name = queue.name
        _, entry = self._under_way.get(name, (0, None))
        if entry is None:
            entry = self._entry(queue, record, route, event)
            self._under_way[name] = queue.state.head, entry
        self._refused.discard(name)
        # The head's own buffer, not the partition's: behind it all events would wait.
        if not entry.is_settled and not self._host.stages.get(route.ahead.stage).begin(entry):
            self._refused.add(name)
        if not entry.is_settled:
            self._partition.timers.set_aside(name)
            return None
        del self._under_way[name]
        return entry

    def withdraw_gone(self) -> None:
        """Withdraw the work of heads that an operator has let go: its end would be taken for that of the next head."""
        queues = self._partition.timers.parked.by_name
        for name, (number, _) in list(self._under_way.items()):
            queue = queues.get(name)
            if queue is None or queue.state.head != number:
                self.withdraw(name)

    def withdraw(self, name: str) -> None:
        """Withdraw the work of the head of this queue, if there is any."""
        _, entry = self._under_way.pop(name, (0, None))
        if entry is not None:
            entry.drop()
            self._ended(name)

    def cut(self) -> None:
        """Begin no new work: forget the heads whose work has not begun."""
        for name, (_, entry) in list(self._under_way.items()):
            if not entry.begun:
                del self._under_way[name]
                entry.drop()

    def drop(self) -> None:
        """Withdraw all work: the partition is given up."""
        entries, self._under_way = self._under_way, {}
        for _, entry in entries.values():
            entry.drop()

    def _entry(self, queue: Queue, record: IncomingRecord, route: Route, event: Any) -> Entry:
        name = queue.name
        buffer = ReorderBuffer(lambda: self._ended(name))
        # One lane for all heads: of the keys of their stage each is in one job at a time.
        entry = AsideEntry(("parked", self._partition.epoch), record, route, event, buffer)
        entry.attempts = queue.state.attempts
        buffer.entries.append(entry)
        try:
            entry.plan = route.ahead.plan(record, event)
        except BaseException as error:
            entry.fail(of_policy(error, record.where), 1)
        return entry

    def _ended(self, name: str) -> None:
        """Have a head tried whose work has ended, and those that may find room now."""
        for one in (name, *self._refused):
            self._partition.timers.call_back(one)
        self._wake()


def resume(waiting: Waiting) -> Callable[[Any], Any]:
    """Return the handler that lets one go on which has come to its turn, and waits for its end."""

    async def handle(_: Any) -> None:
        ended: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()

        def end(error: BaseException | None) -> None:
            if not ended.done():
                ended.set_result(error)

        error = waiting.error if waiting.arrive(end) else await ended
        if error is not None:
            raise error

    return handle
