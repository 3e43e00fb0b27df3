"""The poll thread: takes records from the input consumer and hands them to the loop, a batch at a time.

Two bounds keep memory flat. The thread stops polling while ``room`` records (or bytes) are on their way to handlers;
and a partition whose own queue is full is paused, and no longer counts. When there is no room for a while although
nobody's queue is full, an empty batch asks the engine to pause whoever has most: so a slow partition holds up only
itself.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Collection
from typing import Protocol

from streams.records import IncomingRecord, ReceivedHeaders, headers_bytes
from streams.runtime.bridge import Inlet
from streams.runtime.calm import POLL_SECONDS, Calm
from streams.runtime.ports import Batch

_log = logging.getLogger(__name__)

STARVED_POLLS = 5
"""After so many polls without room the engine is asked to make some: the queue of somebody slow is holding it."""

Records = dict[int, list[IncomingRecord]]


def size_of(records: list[IncomingRecord]) -> int:
    """Bytes of keys, values and headers. Those that follow each other mostly have the same headers: priced once."""
    size = price = 0
    headers: ReceivedHeaders | None = None
    for record in records:
        if record.headers is not headers:
            headers = record.headers
            price = headers_bytes(headers)
        size += len(record.value or b"") + len(record.key or b"") + price
    return size


class Consumer(Protocol):
    """What the thread drives (``clients.consumer.InputConsumer``)."""

    def add(self, partition: int, offset: int) -> None: ...
    def remove(self, partitions: Collection[int]) -> None: ...
    def pause(self, partitions: Collection[int]) -> None: ...
    def resume(self, partitions: Collection[int]) -> None: ...
    def poll_batch(self, timeout_seconds: float, limit: int) -> Records | None: ...
    def close(self) -> None: ...


class Poller:
    """``ports.Input`` over a consumer of its own. Methods may be called from any thread, and return at once."""

    def __init__(self, connect: Callable[[], Consumer], *, max_poll_records: int, room: int, room_bytes: int) -> None:
        self._connect = connect
        self._limit = max_poll_records
        self._room = room
        self._room_bytes = room_bytes
        self._commands: queue.SimpleQueue[Callable[[Consumer], None] | None] = queue.SimpleQueue()
        self._epochs: dict[int, int] = {}
        # Of the thread only:
        self._calm = Calm()
        self._paused: set[int] = set()
        self._awaited: frozenset[int] = frozenset()
        # Under the lock:
        self._outstanding = 0
        self._outstanding_bytes = 0
        self._asked = False
        self._lock = threading.Lock()
        self._has_room = threading.Event()
        self._has_room.set()

    def start(self, deliver: Callable[[Batch], None], fail: Callable[[Exception], None]) -> None:
        """Start the thread. ``deliver`` and ``fail`` run on the loop that calls this."""
        inlet, failures = Inlet(deliver), Inlet(fail)
        threading.Thread(target=self._run, args=(inlet, failures), name="kes-poll", daemon=True).start()

    def expect(self, partitions: Collection[int]) -> None:
        """These may be added soon: until they are, or others are expected, polls stay short."""
        awaited = frozenset(partitions)

        def command(_: Consumer) -> None:
            self._awaited = awaited

        self._commands.put(command)

    def add(self, partition: int, offset: int, epoch: int) -> None:
        """Read a partition from this offset on, under this epoch."""

        def command(consumer: Consumer) -> None:
            consumer.add(partition, offset)
            self._epochs = self._epochs | {partition: epoch}
            self._awaited -= {partition}

        self._commands.put(command)

    def remove(self, partitions: Collection[int]) -> None:
        """Stop reading these. Batches that are on their way may still come."""
        gone = frozenset(partitions)

        def command(consumer: Consumer) -> None:
            consumer.remove(gone)
            self._paused -= gone
            self._epochs = {partition: epoch for partition, epoch in self._epochs.items() if partition not in gone}

        self._commands.put(command)

    def pause(self, partition: int) -> None:
        """Read nothing more of it for now."""

        def command(consumer: Consumer) -> None:
            consumer.pause([partition])
            self._paused.add(partition)

        self._commands.put(command)

    def resume(self, partition: int) -> None:
        """Go on reading it."""

        def command(consumer: Consumer) -> None:
            consumer.resume([partition])
            self._paused.discard(partition)

        self._commands.put(command)

    def handled(self, records: int, size: int) -> None:
        """So many records, of so many bytes, do not count any more."""
        with self._lock:
            self._outstanding -= records
            self._outstanding_bytes -= size
            self._asked = False
            if self._outstanding < self._room and self._outstanding_bytes < self._room_bytes:
                self._has_room.set()

    def close(self) -> None:
        """End the thread and close the consumer, soon."""
        self._commands.put(None)
        self._has_room.set()

    def _run(self, inlet: Inlet[Batch], failures: Inlet[Exception]) -> None:
        consumer: Consumer | None = None
        try:
            consumer = self._connect()
            waited = 0
            while self._obey(consumer):
                if not self._has_room.wait(POLL_SECONDS):
                    waited += 1
                    if waited >= STARVED_POLLS and not self._asked:
                        self._asked = True
                        inlet.put(Batch({}, {}, self._epochs))
                    continue
                waited = 0
                records = consumer.poll_batch(self._poll_seconds(), self._limit)
                if records:
                    self._calm.disturbed()
                    sizes = {partition: size_of(found) for partition, found in records.items()}
                    self._count(sum(map(len, records.values())), sum(sizes.values()))
                    inlet.put(Batch(records, sizes, self._epochs))
        except Exception as error:
            failures.put(error)
        finally:
            if consumer is not None:
                consumer.close()

    def _poll_seconds(self) -> float:
        """Somebody waits for a command that will come: to add what is awaited, to resume what is paused, or because an
        event fails that is still queued."""
        if self._awaited or self._paused or self._outstanding:
            return POLL_SECONDS
        return self._calm.poll_seconds

    def _count(self, records: int, size: int) -> None:
        with self._lock:
            self._outstanding += records
            self._outstanding_bytes += size
            if self._outstanding >= self._room or self._outstanding_bytes >= self._room_bytes:
                self._has_room.clear()

    def _obey(self, consumer: Consumer) -> bool:
        """Carry out what was asked for; wait for it while there is nothing to poll. ``False``: close."""
        while True:
            try:
                command = self._commands.get(block=not self._epochs)
            except queue.Empty:
                return True
            if command is None:
                return False
            command(consumer)
            self._calm.disturbed()
