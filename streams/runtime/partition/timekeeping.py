"""The time of one partition's store, as its host sees it (``stores.parts.HostTime``): how far an event may move
it, what did not fit it, and the windows that could not be reported.

A window that closes is work of its own, although its effects are in the transaction of the event in front of which it
closes: that gives it its place in the order. If it fails, the attempt at the event is undone, and the window meets its
own policy (``Execution.window_failed``). Then the event is attempted again, as if it had not been; where the window
has its place, ``instead`` of its report comes what the policy said: its dead letter, or nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from streams.core.origin import Origin, window_origin
from streams.core.policy import Failure
from streams.core.timers import Timer
from streams.metrics import OutOfTime
from streams.outcomes import ErrorPolicy
from streams.records import IncomingRecord, OwnSample, TopicPartition, WindowOutput
from streams.runtime.partition.dead_letters import WINDOW
from streams.runtime.partition.failures import cancelled_inside, change_too_large
from streams.runtime.partition.host import Host
from streams.runtime.partition.state import Partition

_log = logging.getLogger(__name__)

LOG_SECONDS: Final = 60.0
"""Seconds between two log lines about one structure, at least."""
_TEXTS: Final = {
    "late": "%d item(s) of %s.%s in %s were late: their windows are closed (late= decides about them); the last: %s",
    "expired_early": "%d entries of %s.%s in %s expired before their time by the clock: an event came from the future; "
    "the last: %s",
}
_Structure = tuple[str, str, str]  # kind, store, part


class ClosedWindow(Timer, frozen=True, kw_only=True):
    """A window that could not be reported, as the event of a timer: ``due_ms`` is its end, ``key`` and ``value`` are
    its bytes in the store."""

    kind = "window"

    store: str
    start_ms: int

    @property
    def origin(self) -> Origin:
        """Return the origin of its effects."""
        return window_origin(self.name, self.key or b"", self.start_ms, self.due_ms)

    @property
    def title(self) -> str:
        """Name it in messages."""
        span = f"{shown_time(self.start_ms)} to {shown_time(self.due_ms)}"
        return f"the window {self.store}.{self.name} from {span} of the key {(self.key or b'')[:64]!r}"

    @property
    def facts(self) -> dict[str, str]:
        """Return what its dead letter names."""
        window = {"start_ms": str(self.start_ms), "end_ms": str(self.due_ms)}
        return {"kind": WINDOW, "window": f"{self.store}.{self.name}"} | window

    def record(self, partition: Partition) -> IncomingRecord:
        """Return it as a record of its partition, without an offset (-1)."""
        topic, number = partition.topic_partition
        return IncomingRecord(topic, number, -1, self.key, self.value, None, self.due_ms)


class WindowFailed(Exception):
    """A window could not be reported (``__cause__``): its own failure, and not that of the event in front of which it
    closes. ``policy``: its own; ``None``: the source's."""

    def __init__(self, window: ClosedWindow, function: Callable[..., Any], policy: ErrorPolicy | None) -> None:
        super().__init__(window.title)
        self.window, self.function, self.policy = window, function, policy


class Timekeeper:
    """The time of one partition's store. On the partition's task, or on the thread of its handler, never both at a
    time; ``settle`` on its task."""

    def __init__(self, partition: Partition, host: Host) -> None:
        self._partition, self._host = partition, host
        self.totals: Counter[str] = Counter()
        self._new: Counter[_Structure] = Counter()  # not measured yet
        self._unlogged: dict[_Structure, tuple[int, str]] = {}
        self._next_log: dict[_Structure, float] = {}
        self._last: dict[_Structure, tuple[TopicPartition, Origin, int]] = {}  # counted last: event and attempt
        self._tries: dict[Origin, tuple[int, float]] = {}
        self.instead: dict[Origin, Callable[[Any], None]] = {}
        self._used: list[tuple[Any, Origin]] = []
        self.closing: tuple[Any, ClosedWindow] | None = None
        """The window that is reported now, and the context in which it is. Read by the watchdog's thread, too."""

    @property
    def max_jump_ms(self) -> int:
        """Return how far ahead of the clock an event may move the partition's time, in milliseconds; 0: no bound."""
        return int(self._host.config.max_time_jump_seconds * 1000)

    def now_ms(self) -> int:
        """Return the time of day."""
        return self._host.wall_ms()

    # -- what does not fit the time ------------------------------------------------------------------------------------

    def out_of_time(self, ctx: Any, kind: str, store: str, part: str, items: int, last: str) -> None:
        """Count items of a structure, in the event of ``ctx``: see ``metrics.OutOfTime``. ``last``: what the last one
        is."""
        found, counted = (kind, store, part), (ctx.topic_partition, ctx._origin, ctx.attempt)
        before = self._last.get(found, counted)
        # The same event in another attempt: its items are counted already.
        if before[:2] == counted[:2] and before != counted:
            return
        self._last[found] = counted
        self.totals[kind] += items
        self._new[found] += items
        self._unlogged[found] = self._unlogged.get(found, (0, ""))[0] + items, last

    @property
    def has_news(self) -> bool:
        """Check for something that ``settle`` has to tell, now or later."""
        return bool(self._new or self._unlogged)

    def settle(self, *, is_end: bool = False) -> float | None:
        """Measure what is new, and log it, at most once a minute for each structure, or all that is left. Returns in
        how many seconds there is more to be logged; ``None``: nothing is left."""
        if not self._new and not self._unlogged:
            return None
        for (kind, store, part), items in self._new.items():
            self._host.measure(OutOfTime(self._partition.partition, kind, store, part, items))
        self._new.clear()
        now = self._host.now()
        for found, (items, last) in list(self._unlogged.items()):
            kind, store, part = found
            if is_end or now >= self._next_log.get(found, now):
                if kind in _TEXTS:  # each event that moved the time too far has its line, by its policy
                    _log.warning(_TEXTS[kind], items, store, part, self._partition.topic_partition, last)
                self._next_log[found] = now + LOG_SECONDS
                del self._unlogged[found]
        return min((self._next_log[found] - now for found in self._unlogged), default=None)

    # -- windows -------------------------------------------------------------------------------------------------------

    def close(
        self,
        ctx: Any,
        report: Callable[[Any], None],
        on_close: Callable[..., Any],
        window: tuple[str, str, bytes, int, int, bytes],
        policy: ErrorPolicy | None,
    ) -> None:
        """Report a window that closes: (store, part, key, start, end, value). Raises ``WindowFailed``."""
        store, name, key, start_ms, end_ms, value = window
        closed = ClosedWindow(name, end_ms, "", value, key=key, store=store, start_ms=start_ms)
        origin = closed.origin
        if (instead := self.instead.get(origin)) is not None:
            instead(ctx)
            self._used.append((ctx, origin))
            return
        # The timers as a copy: those that a failed report has set are taken back.
        outputs, journal, timers = ctx._outputs, ctx._journal, dict(ctx._timer_changes or ())
        sent, written, known = len(outputs), len(journal), self._partition.failures.meet(origin)
        try:
            if known is not None:
                raise known.error
            self.closing = ctx, closed
            report(ctx)
            for change in journal[written:]:
                if change.value is not None and len(change.value) > ctx._limit:
                    raise change_too_large(change, ctx._limit)
        # No await: a cancellation is one that the function has raised, and that of the task comes at no such place.
        except (Exception, asyncio.CancelledError) as error:
            # Undone here: a handler that called ``advance`` may go on.
            self._partition.store.undo(journal[written:])
            del outputs[sent:], journal[written:]
            ctx._timer_changes = timers or None
            raise WindowFailed(closed, on_close, policy) from cancelled_inside(error)
        finally:
            self.closing = None
        if self._tries:
            self._tries.pop(origin, None)
        for number in range(sent, len(outputs)):  # a refusal by the broker is the window's failure, too
            if not isinstance(outputs[number], OwnSample):
                outputs[number] = WindowOutput.of(outputs[number], origin)

    def tried(self, failed: WindowFailed) -> Failure:
        """Return the failure of a window, with all attempts since the first."""
        error, origin, now = failed.__cause__, failed.window.origin, self._host.now()
        assert error is not None
        attempts, began = self._tries.get(origin, (0, now))
        self._tries[origin] = attempts + 1, began
        return Failure(attempts + 1, error, elapsed_seconds=now - began)

    def decide(self, failed: WindowFailed, instead: Callable[[Any], None]) -> None:
        """Note what comes instead of the report of a window, at its place in the order."""
        self._tries.pop(failed.window.origin, None)
        self.instead[failed.window.origin] = instead

    def completed(self, ctx: Any) -> None:
        """Forget the windows that have closed in front of this event, which is complete."""
        for used, origin in self._used:
            if used is ctx:
                self.instead.pop(origin, None)
        self._used.clear()


def shown_time(time_ms: int) -> str:
    """Return a time for messages, to the millisecond; beyond the year 9999 as a number."""
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return f"{time_ms} ms"
