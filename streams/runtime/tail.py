"""The tail thread: follows changelog partitions and feeds what it reads to their warm copies and restores.

The thread starts at the first ``follow``; while nothing is followed it sleeps, and after a while without work it gives
its consumer back. What is new is handed over on this thread: applying a batch to a store takes time that the event
loop does not have, and a store that is only a copy has no other user.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Protocol

from streams.records import IncomingRecord
from streams.runtime.calm import Calm

_log = logging.getLogger(__name__)

IDLE_SECONDS = 30.0
"""The consumer is closed when nothing was followed for so long; until then the next ``follow`` is quick."""

BATCH = 500
"""Records of one poll: few enough that the event loop gets the interpreter back soon."""

Receive = Callable[[int, int, list[IncomingRecord], int, int], None]
Fail = Callable[[int, int, Exception], None]


class Progress(Protocol):
    """What is new in one partition (``clients.tail.Progress``)."""

    @property
    def records(self) -> list[IncomingRecord]: ...
    @property
    def position(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def at_end(self) -> bool: ...


class Consumer(Protocol):
    """What the thread drives (``clients.tail.ChangelogTail``)."""

    def add(self, partition: int, offset: int) -> None: ...
    def remove(self, partition: int) -> None: ...
    def poll_batch(self, timeout_seconds: float, limit: int) -> Mapping[int, Progress]: ...
    def take_failures(self) -> Mapping[int, Exception]: ...
    def close(self) -> None: ...


class Tail:
    """``ports.Tail`` over a consumer of its own. Methods may be called from any thread, and return at once.

    Once ``forget`` or a newer ``follow`` of a partition has returned, at most the call of ``receive`` that is under way
    still belongs to the old epoch, and none does on the thread that ``receive`` is called on. After ``close`` the same
    holds for all partitions; ``follow`` does nothing any more.
    """

    def __init__(self, connect: Callable[[], Consumer], *, idle_seconds: float = IDLE_SECONDS) -> None:
        self._connect = connect
        self._idle_seconds = idle_seconds
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._receive: Receive | None = None
        self._fail: Fail | None = None
        self._lock = threading.Lock()
        self._wanted: dict[int, int] = {}
        """Partition -> epoch, as it was asked for: what has another epoch is not handed over any more."""
        self._closed = False
        self._thread: threading.Thread | None = None
        # Of the thread only:
        self._calm = Calm()
        self._consumer: Consumer | None = None
        self._followed: dict[int, int] = {}
        """Partition -> epoch, as the consumer reads it."""

    def start(self, receive: Receive, fail: Fail) -> None:
        """Say who hears of it. ``receive`` and ``fail`` run on the tail's thread, and are never called at once. What
        ``receive`` raises ends its partition, by ``fail``; what ``fail`` raises is only logged."""
        self._receive, self._fail = receive, fail

    def follow(self, partition: int, offset: int, epoch: int) -> None:
        """Read a partition from this offset on (-1: from the start of its log), under this epoch; instead of what was
        followed of it before, if anything. ``RuntimeError`` before ``start``."""
        if self._receive is None:
            raise RuntimeError("the tail was not started")
        with self._lock:
            if self._closed:
                return
            self._wanted[partition] = epoch
            self._commands.put(lambda: self._add(partition, offset, epoch))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kes-tail", daemon=True)
                self._thread.start()

    def forget(self, partition: int) -> None:
        """Stop reading it. A call of ``receive`` that is under way goes on; no other follows."""
        with self._lock:
            if self._wanted.pop(partition, None) is not None:
                self._commands.put(lambda: self._remove(partition))

    def close(self) -> None:
        """End the thread and close the consumer, soon."""
        with self._lock:
            self._closed = True
            self._wanted.clear()
            self._commands.put(None)

    @property
    def ended(self) -> bool:
        """Whether no thread of it runs: not yet, or not any more."""
        return self._thread is None or not self._thread.is_alive()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while self._obey():
                try:
                    self._poll()
                except Exception as error:
                    self._start_anew(error)
        finally:
            self._drop_consumer()

    def _obey(self) -> bool:
        """Carry out what was asked for; wait for it while nothing is followed. ``False``: close."""
        while True:
            try:
                command = self._next_command()
            except queue.Empty:
                if self._followed:
                    return True
                self._drop_consumer()
                continue
            if command is None:
                return False
            command()
            self._calm.disturbed()

    def _next_command(self) -> Callable[[], None] | None:
        if self._followed:
            return self._commands.get(block=False)
        return self._commands.get(timeout=None if self._consumer is None else self._idle_seconds)

    def _add(self, partition: int, offset: int, epoch: int) -> None:
        self._remove(partition)
        if self._wanted.get(partition) != epoch:  # taken back before its turn came
            return
        try:
            if self._consumer is None:
                self._consumer = self._connect()
            self._consumer.add(partition, offset)
        except Exception as error:
            self._give_up(partition, epoch, error)
        else:
            self._followed[partition] = epoch

    def _remove(self, partition: int) -> None:
        if self._followed.pop(partition, None) is None or self._consumer is None:
            return
        try:
            self._consumer.remove(partition)
        except Exception as error:
            self._start_anew(error)

    def _poll(self) -> None:
        consumer = self._consumer
        assert consumer is not None  # something is followed
        news = consumer.poll_batch(self._calm.poll_seconds, BATCH)
        if news:
            self._calm.disturbed()
        for partition, progress in news.items():
            self._hand_over(partition, progress)
        for partition, error in consumer.take_failures().items():
            epoch = self._followed.pop(partition, None)
            if epoch is not None:
                self._give_up(partition, epoch, error)

    def _hand_over(self, partition: int, progress: Progress) -> None:
        receive, epoch = self._receive, self._followed.get(partition)
        assert receive is not None  # follow sees to it
        try:
            if epoch is None or self._wanted.get(partition) != epoch:
                return
            records, position, end = progress.records, progress.position, progress.end
            receive(partition, epoch, records, position, end)
            if records and progress.at_end and position != end and self._wanted.get(partition) == epoch:
                receive(partition, epoch, [], position, end)  # an open transaction keeps the end away
        except Exception as error:
            self._remove(partition)
            self._give_up(partition, epoch, error)

    def _give_up(self, partition: int, epoch: int | None, error: Exception) -> None:
        """Tell, unless it is not wanted any more."""
        with self._lock:
            if epoch is None or self._wanted.get(partition) != epoch:
                return
            del self._wanted[partition]
        assert self._fail is not None
        try:
            self._fail(partition, epoch, error)
        except Exception:
            _log.exception("the tail's failure of partition %d (%s) could not be told", partition, error)

    def _start_anew(self, error: Exception) -> None:
        """The consumer itself is broken: everything that it read has ended; the next ``follow`` makes another one."""
        followed, self._followed = self._followed, {}
        self._drop_consumer()
        for partition, epoch in followed.items():
            self._give_up(partition, epoch, error)

    def _drop_consumer(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.close()
