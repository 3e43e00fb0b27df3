"""Where the reorder buffer's workers get their records from, and where they put what is complete: lists."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from streams.records import Change, Output
from streams.runtime.signal import Broadcast

if TYPE_CHECKING:
    from tests.property.reorder_buffer_kit import LineWorld


class Pool:
    """``host.Admission``: commits all that is there, again and again; full until it does."""

    def __init__(self, world: LineWorld) -> None:
        self._world = world
        self._room = Broadcast()
        self.waiting: list[tuple[int, int, list[Output], list[Change], Any]] = []

    @property
    def is_full(self) -> bool:
        return len(self.waiting) >= self._world.settings.pool_room

    async def wait_room(self) -> None:
        await self._room.wait()

    def admit(
        self,
        partition: int,
        offset: int,
        outputs: list[Output],
        changes: list[Change],
        waiter: Any = None,
        events: int = 1,
    ) -> None:
        if not self.waiting:
            asyncio.get_running_loop().call_later(self._world.settings.pool_seconds, self.commit)
        self.waiting.append((partition, offset, outputs, changes, waiter))

    def commit(self) -> None:
        waiting, self.waiting = self.waiting, []
        for partition, offset, outputs, changes, waiter in waiting:
            self._world.committed(partition, offset, outputs, changes)
            if waiter is not None:
                waiter(None)
        self._room.notify()
        self._world.progress.notify()

    def drop(self, partition: int) -> None:
        for entry in self.waiting:
            if entry[0] == partition and entry[4] is not None:
                entry[4](RuntimeError("lost"))
        self.waiting = [entry for entry in self.waiting if entry[0] != partition]
        self._room.notify()

    def pump(self) -> None: ...

    def last_with(self, partition: int) -> None:
        return None


class Input:
    """``ports.Input``: hands out records while a partition is not paused."""

    def __init__(self, world: LineWorld) -> None:
        self._world = world
        self.positions: dict[int, int] = {}
        self.paused: set[int] = set()
        self.outstanding = 0

    def pause(self, partition: int) -> None:
        self.paused.add(partition)

    def resume(self, partition: int) -> None:
        assert partition in self.paused
        self.paused.discard(partition)
        self._later()

    def handled(self, records: int, size: int) -> None:
        self.outstanding -= records
        assert self.outstanding >= 0, "more records were handled than delivered"

    def add(self, partition: int, offset: int) -> None:
        self.positions[partition] = offset
        self.paused.discard(partition)
        self._later()

    def remove(self, partitions: Collection[int]) -> None:
        for partition in partitions:
            self.positions.pop(partition, None)

    def _later(self) -> None:
        asyncio.get_running_loop().call_later(0.01, self._poll)

    def _poll(self) -> None:
        world = self._world
        for partition, position in list(self.positions.items()):
            records = world.logs[partition][position : position + world.settings.batch]
            if records and partition not in self.paused:
                self.positions[partition] += len(records)
                self.outstanding += len(records)
                world.workers[partition].inbox.add(records, 0)
                self._later()

    def start(self, *_: Any) -> None: ...
    def close(self) -> None: ...
