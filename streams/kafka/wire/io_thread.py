"""The thread ``kes-group`` of a process: the event loop of all ``WireClient``, so that a handler which blocks the
application's loop stops no heartbeat."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import ClassVar

from streams.errors import ConfigError
from streams.sak.forks import MadeHere

_log = logging.getLogger(__name__)


class IoThread:
    """A thread with an event loop, for as long as it has users. ``acquire`` makes one, or returns that of the process.

    Threads: all methods may be called from any thread; ``release`` of the last user does not wait on its own thread.
    """

    _lock: ClassVar = threading.Lock()
    _shared: ClassVar[IoThread | None] = None

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._here, self._users = MadeHere("a Kafka client", ConfigError, _forget), 0
        self._is_ending = False
        self._listeners: list[Callable[[BaseException], None]] = []
        self._thread = threading.Thread(target=self._run, name="kes-group", daemon=True)

    @classmethod
    def acquire(cls, on_crash: Callable[[BaseException], None]) -> IoThread:
        """Return the running thread of this process, with one user more. ``on_crash``: called on the thread when it
        ends by an error."""
        # In one step: else two first users make a thread each, one of which never ends, and the last user that goes
        # meanwhile ends the thread of the new one.
        with cls._lock:
            shared = cls._shared
            if shared is None or not shared.is_alive():
                shared = cls._shared = cls()
                shared._thread.start()
            shared._users += 1
            shared._listeners.append(on_crash)
            return shared

    def release(self, on_crash: Callable[[BaseException], None], timeout_seconds: float) -> bool:
        """Take one user away; the last one ends the thread. ``False``: it did not end in time."""
        with self._lock:
            self._listeners.remove(on_crash)
            self._users -= 1
            if self._users or not self.is_alive():
                return True
            # Forgotten before it is stopped: a client that comes now gets a new thread, not one that is ending.
            if type(self)._shared is self:
                type(self)._shared = None
        self.loop.call_soon_threadsafe(self.loop.stop)
        # Without the lock: the thread's own last callbacks may acquire or release.
        if not self.is_current():
            self._thread.join(timeout_seconds)
            return not self._thread.is_alive()
        return True

    def check(self) -> None:
        """Raise ``ConfigError`` in a child of the process that made it."""
        self._here.check()

    def is_alive(self) -> bool:
        """Check whether the thread serves its loop. It does not in a forked process."""
        # The loop of a fork shares the pipe that wakes it up with that of the parent: it must not be touched.
        return not self._here.is_foreign and not self._is_ending and self._thread.is_alive()

    def is_current(self) -> bool:
        """Check whether this is the thread."""
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        try:
            self.loop.run_forever()
        except BaseException as error:  # of a task, SystemExit and KeyboardInterrupt: all others stay in their task
            _log.exception("the I/O thread of the Kafka clients failed")
            # Before the listeners, which fail all that waits: what comes later is refused, and nothing is in between.
            self._is_ending = True
            for listener in [*self._listeners]:
                listener(error)
        finally:
            self.loop.run_until_complete(_ended(1.0))
            self.loop.close()


async def _ended(timeout_seconds: float) -> None:
    """Cancel all tasks but this one, and wait until nothing follows from it."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=timeout_seconds)
    await asyncio.sleep(0)  # what is called when a task is done comes a turn later
    await asyncio.sleep(0)


def _forget() -> None:
    """Begin anew in a child: the thread is the parent's, and any thread of it may have had the lock."""
    IoThread._lock, IoThread._shared = threading.Lock(), None
