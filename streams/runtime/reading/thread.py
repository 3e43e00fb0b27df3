"""The thread that owns a consumer: it carries out commands between two polls, and paces the polls.

A command waits until the poll under way is over: confluent-kafka lets no other thread near a consumer meanwhile, and
has no way to end a poll. So polls are short, except when nothing happens.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Generic, TypeVar

from streams.records import PolledPartition
from streams.runtime.ports import LogSource

SourceT = TypeVar("SourceT", bound=LogSource)

POLL_SECONDS = 0.02
"""A poll waits so many seconds for a first record. No command waits longer for its turn."""

LONG_POLL_SECONDS = 0.1
"""A long poll waits so many seconds. A record ends either kind at once."""

LONG_AFTER_SECONDS = 1.0
"""Polls are long after so many seconds without a record and without a command."""


class ReadingThread(Generic[SourceT]):
    """Partitions that are read, each under an epoch. Methods may be called from any thread, and return at once; those
    that begin with ``_`` are the thread's.

    The thread starts at the first ``add``. While nothing is read it sleeps, and after ``idle_seconds`` (``None``:
    never) it closes its consumer. A consumer that is broken ends all that it read; the next ``add`` makes another one.
    """

    def __init__(self, connect: Callable[[], SourceT], name: str, limit: int, idle_seconds: float | None) -> None:
        self._connect = connect
        self._name = name
        self._limit = limit
        self._idle_seconds = idle_seconds
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._wanted: dict[int, int] = {}
        """Partition -> epoch, as the last call has it: news and failures under another epoch are left-overs."""
        self._closed = False
        self._thread: threading.Thread | None = None
        # Of the thread only:
        self._long_polls_at = 0.0
        self._pause_seconds = 0.0  # until the next poll; a command ends it
        self._consumer: SourceT | None = None
        self._epochs: dict[int, int] = {}
        """Partition -> epoch, as the consumer reads it. Never changed in place."""

    def add(self, partition: int, offset: int, epoch: int) -> None:
        """See ``ports.Reading``. The new epoch replaces an earlier one. Does nothing after ``close``."""
        with self._lock:
            if self._closed:
                return
            self._launch()
            self._wanted[partition] = epoch
            self._commands.put(partial(self._add, partition, offset, epoch))

    def remove(self, partitions: Collection[int]) -> None:
        gone = frozenset(partitions)
        with self._lock:
            # This takes effect at once, and not with the command: what the poll under way brings is a left-over from
            # now on.
            for partition in gone:
                self._wanted.pop(partition, None)
            self._commands.put(partial(self._remove, gone))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._wanted.clear()
            self._commands.put(None)

    @property
    def ended(self) -> bool:
        """Check that its thread does not run: not yet, or not any more."""
        return self._thread is None or not self._thread.is_alive()

    # -- for subclasses ------------------------------------------------------------------------------------------------

    def _received(self, news: Mapping[int, PolledPartition]) -> None:
        """Hand over the news of one poll."""
        raise NotImplementedError

    def _failed(self, partition: int, epoch: int, error: Exception) -> None:
        """Report that a partition is not read any more."""
        raise NotImplementedError

    def _poll_seconds(self) -> float:
        """Return the longest wait of the next poll."""
        return POLL_SECONDS if time.monotonic() < self._long_polls_at else LONG_POLL_SECONDS

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _launch(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            while self._carry_out_commands():
                try:
                    self._poll()
                except Exception as error:
                    self._start_anew(error)
        finally:
            # Every use of the consumer is on this thread, its end included.
            self._drop_consumer()

    def _carry_out_commands(self) -> bool:
        """Carry out the commands; wait for one while nothing is read. ``False``: close."""
        while True:
            try:
                command = self._next_command()
            except queue.Empty:
                if self._epochs:
                    return True
                self._drop_consumer()
                continue
            if command is None:
                return False
            try:
                command()
            except Exception as error:
                self._start_anew(error)
            self._note_activity()

    def _next_command(self) -> Callable[[], None] | None:
        if self._epochs:
            pause, self._pause_seconds = self._pause_seconds, 0.0
            return self._commands.get(timeout=pause) if pause else self._commands.get(block=False)
        return self._commands.get(timeout=None if self._consumer is None else self._idle_seconds)

    def _poll(self) -> None:
        consumer = self._consumer
        assert consumer is not None  # something is read
        news = consumer.poll_batch(self._poll_seconds(), self._limit)
        if news:
            self._note_activity()
            self._received(news)
        for partition, error in consumer.take_failures().items():
            self._give_up(partition, error)

    def _note_activity(self) -> None:
        """Note that something came, or a command: more of it is likely."""
        self._long_polls_at = time.monotonic() + LONG_AFTER_SECONDS

    def _connected(self) -> SourceT:
        if self._consumer is None:
            self._consumer = self._connect()
        return self._consumer

    def _add(self, partition: int, offset: int, epoch: int) -> None:
        self._remove([partition])
        if self._wanted.get(partition) != epoch:  # taken back before its turn came
            return
        self._epochs = self._epochs | {partition: epoch}
        try:
            self._connected().add(partition, offset)
        except Exception as error:
            self._give_up(partition, error)

    def _remove(self, partitions: Collection[int]) -> None:
        if not self._epochs.keys().isdisjoint(partitions):
            self._epochs = {number: epoch for number, epoch in self._epochs.items() if number not in partitions}
            try:
                self._connected().remove(partitions)
            except Exception as error:
                self._start_anew(error)

    def _give_up(self, partition: int, error: Exception) -> None:
        """Report the end of a partition, unless it is not wanted any more. The consumer has removed it."""
        epochs = self._epochs
        self._epochs = {number: epoch for number, epoch in epochs.items() if number != partition}
        with self._lock:
            # Comparison and removal are one step: an ``add`` that comes now has another epoch, and is not ended by
            # this.
            if partition not in epochs or self._wanted.get(partition) != epochs[partition]:
                return
            del self._wanted[partition]
        self._failed(partition, epochs[partition], error)

    def _start_anew(self, error: Exception) -> None:
        self._drop_consumer()
        for partition in self._epochs:
            self._give_up(partition, error)

    def _drop_consumer(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.close()
