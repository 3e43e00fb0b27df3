"""Counts of the work of the event loop under a paced load: tasks, timers, callbacks, wake-ups, requests and writes.

A drain has hundreds of events in a transaction, and these cost it nothing. Live traffic has twenty, and pays most for
them. They are counted where asyncio is called, so the numbers are the same in every run.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable
from contextvars import Context
from types import FrameType
from typing import Any, Final, TypeVarTuple, Unpack

from benchmarks.instructions.counting import OUTERMOST
from streams.testing.simulation.virtual_time import VirtualTimeLoop

Ts = TypeVarTuple("Ts")

TURNS: Final = {
    "tasks": "tasks made",
    "timers": "timers armed",
    "callbacks": "callbacks put into the loop's queue, wake-ups of tasks among them",
    "posts": "calls from other threads, each a byte in the loop's pipe",
    "requests": "requests to brokers",
    "writes": "writes to sockets, of one request or more",
    "polls": "polls of the consumer",
}
LATE_SECONDS: Final = 1e-7
"""Timers end so many seconds late."""
_FOR_OTHERS: Final = ("/runtime/signal.py", "/asyncio/", "/anyio/", "/testing/simulation/", "/instructions/turns.py")
"""Parts of the paths of files that call the loop for another's sake."""
_STAND_INS: Final = ("/benchmarks/instructions/", "/testing/simulation/")
_GO_BETWEENS: Final = frozenset(
    ("note", "create_task", "call_at", "call_soon", "call_soon_threadsafe", "_numbered", "__init__")
)
"""Functions of the stand-ins that are called by those who call the loop."""


class Turns:
    """Counts while ``is_counting``. ``callers``: by kind, and the function that caused it."""

    def __init__(self) -> None:
        self.is_counting = False
        self.transactions = 0
        """Committed meanwhile."""
        self.counts = dict.fromkeys(TURNS, 0)
        self.callers: Counter[tuple[str, str]] = Counter()

    def note(self, kind: str) -> None:
        """Count one, unless it is for the stand-ins' own sake."""
        if self.is_counting and (cause := _cause(sys._getframe(2))) is not None:
            self.counts[kind] += 1
            self.callers[kind, cause] += 1

    def count(self, kind: str) -> None:
        """Count one that a stand-in was called for."""
        self.counts[kind] += self.is_counting

    def per_transaction(self) -> dict[str, float]:
        """Return the counts per transaction; none where nothing was counted."""
        return {kind: number / self.transactions for kind, number in self.counts.items()} if self.transactions else {}


def _cause(frame: FrameType | None) -> str | None:
    """Name the first function that calls for its own sake; ``None``: one of the stand-ins."""
    while frame is not None and frame.f_code.co_name != "_run_once":  # a task that goes on by itself, or an answer
        path = frame.f_code.co_filename
        if any(part in path for part in _STAND_INS) and frame.f_code.co_name not in _GO_BETWEENS:
            return None
        if not any(part in path for part in _FOR_OTHERS):
            return f"{path.rpartition('/')[2]} {frame.f_code.co_qualname}"
        frame = frame.f_back
    return OUTERMOST


class CountedLoop(VirtualTimeLoop):
    """A loop in virtual time that counts."""

    def __init__(self, limit_seconds: float, turns: Turns) -> None:
        self.turns = turns
        super().__init__(limit_seconds)

    def jump(self, seconds: float | None) -> None:
        """Move the clock on, to a little behind the next timer, as real clocks do. Right at it the rounding of a sum
        makes a delay look as if it were not over, and it is waited for again and again."""
        super().jump(seconds + LATE_SECONDS if seconds else seconds)

    def create_task(self, coro: Any, **kwargs: Any) -> asyncio.Task[Any]:
        """Make a task, and count it."""
        self.turns.note("tasks")
        return super().create_task(coro, **kwargs)

    def call_at(
        self, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Arm a timer, and count it; ``call_later`` comes here."""
        self.turns.note("timers")
        return super().call_at(when, callback, *args, context=context)

    def call_soon(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Queue a callback, and count it."""
        self.turns.note("callbacks")
        return super().call_soon(callback, *args, context=context)

    def call_soon_threadsafe(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Queue a callback from another thread, and count both."""
        self.turns.note("posts")
        return self.call_soon(callback, *args, context=context)
