"""The machine under a run of the engine, besides its connections: the time of day, randomness, and the watchdog of its
event loop. Tests give it a simulated one."""

from __future__ import annotations

import gc
import logging
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Final, NoReturn, Protocol

import anyio

_log = logging.getLogger(__name__)
_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

PULSE_SECONDS = 0.25
"""The watchdog looks, and the loop beats, every so many seconds."""
SLOW_SECONDS = 1.0
"""A pause of the loop is logged if it is longer than so many seconds: the transactions of all partitions wait
meanwhile."""


def elapsed_seconds() -> float:
    """Return the time of a clock that never jumps, and goes on while the machine sleeps, where there is such a one:
    sleep makes no proof younger."""
    return time.clock_gettime(_CLOCK)


class Watchdog:
    """Watches one event loop from a thread: a plain handler that takes long stops all partitions, and is logged.

    It is named by ``events``, which also learns of one that has stopped the loop for ``limit_seconds``.
    ``alive`` is false once the loop has stood still for ``limit_seconds``: then the membership leaves, so that others
    take over the partitions that this process cannot work on (``max.poll.interval.ms`` in other clients). ``run`` is
    for the loop, the rest for any thread.
    """

    def __init__(self, limit_seconds: float) -> None:
        self._limit = limit_seconds
        self._events: LoopEvents | None = None
        self._beat = time.monotonic()
        self._stopped = threading.Event()
        self._loop_thread = 0

    def alive(self) -> bool:
        return time.monotonic() - self._beat < self._limit

    async def run(self, events: LoopEvents | None = None) -> None:
        self._loop_thread, self._events = threading.get_ident(), events
        threading.Thread(target=self._watch, name="kes-watchdog", daemon=True).start()
        try:
            while True:
                self._beat = time.monotonic()
                if events is not None:
                    events.check()
                await anyio.sleep(PULSE_SECONDS)
        finally:
            self.stop()

    def stop(self) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        warned_for = given_up_for = 0.0
        checked_at = time.monotonic()
        while not self._stopped.wait(PULSE_SECONDS):
            beat, before, checked_at = self._beat, checked_at, time.monotonic()
            still = checked_at - beat
            if still > SLOW_SECONDS and warned_for != beat:
                # A pause is logged once: it is known by the last beat before it.
                warned_for = beat
                frame = self._frame()
                _log.warning(
                    "the event loop has stood still for %.1f s in %s%s; all partitions wait meanwhile: make that "
                    "handler async, or register it with blocking=True",
                    still,
                    _location(frame),
                    "" if self._events is None else self._events.name(frame),
                )
                del frame  # or its locals would live as long as this one
            if checked_at - before > SLOW_SECONDS:
                continue  # the process as a whole stood still: no handler is to blame before the next check
            if still > self._limit and given_up_for != beat and self._events is not None:
                # One note for a pause: a second one would say the same.
                given_up_for = beat
                self._events.give_up(self._frame(), still)

    def _frame(self) -> FrameType | None:
        # Python before 3.11.9 may collect garbage within this call, under a lock that threads need to begin and to end.
        # A finalizer that gives the GIL away then makes the whole process stand still for good (gh-106883).
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames().get(self._loop_thread)
        finally:
            if was_enabled:
                gc.enable()


def _location(frame: FrameType | None) -> str:
    if frame is None:
        return "an unknown place"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_qualname})"


class LoopEvents(Protocol):
    """Knows the events on a loop (``ownership.blocked`` documents the methods). ``check`` is called on the loop, the
    others on the watchdog's thread."""

    def check(self) -> None: ...
    def name(self, frame: FrameType | None) -> str: ...
    def give_up(self, frame: FrameType | None, seconds: float) -> None: ...


class LoopWatch(Protocol):
    """Watches whether the event loop goes on (``Watchdog`` documents the methods)."""

    def alive(self) -> bool: ...
    async def run(self, events: LoopEvents | None = None) -> None: ...
    def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Environment:
    """The system interface of a run. ``rng``: makes the generator of one run. ``wall_seconds``: seconds since 1970.
    ``elapsed_seconds``: of a clock that goes on while the machine sleeps. ``watchdog``: called with the seconds for
    which the loop may stand still. ``look_up_records``: a look-up begins so many records before what one transaction of
    ours can have written. ``topic_check_seconds``: between two checks whether source and changelog are still the same
    topics. ``exit``: ends the process at once."""

    rng: Callable[[], random.Random] = random.Random
    wall_seconds: Callable[[], float] = time.time
    elapsed_seconds: Callable[[], float] = elapsed_seconds
    watchdog: Callable[[float], LoopWatch] = Watchdog
    look_up_records: int = 1_000
    topic_check_seconds: float = 10.0
    exit: Callable[[int], NoReturn] = os._exit


MACHINE = Environment()
"""A real run has this one."""
