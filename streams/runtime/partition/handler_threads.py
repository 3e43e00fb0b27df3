"""The threads of blocking handlers, one per partition that has such a handler; and those of jobs, as many as run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from streams.runtime.ports import Blocking

T = TypeVar("T")


class HandlerThreads:
    """The threads of one run, made when they are first needed. Called on the loop."""

    def __init__(self, make: Callable[[str], Blocking]) -> None:
        self._make = make
        self._threads: dict[int, Blocking] = {}
        self._idle: list[Blocking] = []
        self._made = 0

    async def call(self, partition: int, function: Callable[..., T], *args: object) -> T:
        """Run a function on the partition's thread. When the caller is cancelled the call goes on, but no other waits
        behind it."""
        thread = self._threads.get(partition)
        if thread is None:
            thread = self._threads[partition] = self._make(f"kes-handler-{partition}")
        try:
            return await thread.call(function, *args)
        except Exception:
            raise
        except BaseException:  # cancelled: the call goes on in its thread, so the next call gets another one
            # Two callers may be cancelled on it: the second one finds a newer thread here.
            if self._threads.get(partition) is thread:
                del self._threads[partition]
                thread.abandon()
            raise

    async def run(self, function: Callable[..., T], *args: object) -> T:
        """Run a function on a thread that is idle, or a new one. When the caller is cancelled the call goes on, and its
        thread ends with it."""
        if self._idle:
            thread = self._idle.pop()
        else:
            self._made += 1
            thread = self._make(f"kes-job-{self._made}")
        try:
            result = await thread.call(function, *args)
        except Exception:
            self._idle.append(thread)
            raise
        except BaseException:  # cancelled: the call goes on, so the thread is not idle
            thread.abandon()
            raise
        self._idle.append(thread)
        return result

    def close(self) -> None:
        """End all threads."""
        for thread in self._idle:
            thread.abandon()
        self._idle.clear()
        for thread in self._threads.values():
            thread.abandon()
        self._threads.clear()
