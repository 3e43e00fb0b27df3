"""What the demo shows while it runs: a live table on a terminal, a line every few seconds elsewhere.

All of it on stderr.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

LINE_EVERY_SECONDS = 3.0
RATE_OVER_SECONDS = 4.0
NOTES = 8


class Row(msgspec.Struct, frozen=True):
    """One line of the table: a topic being filled, a group or Spark at work. ``None`` where a column means nothing."""

    name: str
    done: int
    total: int | None = None
    rate: float | None = None
    lag: int | None = None
    commits: int | None = None
    workers: str = ""
    restarts: int | None = None


class Meter:
    """Events per second over the last few seconds. Time is an argument."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque()

    def rate(self, now: float, count: int) -> float:
        """Note that ``count`` were done by ``now``; return the rate."""
        self._points.append((now, count))
        while len(self._points) > 2 and self._points[0][0] < now - RATE_OVER_SECONDS:
            self._points.popleft()
        (then, before) = self._points[0]
        return max(0, count - before) / (now - then) if now > then else 0.0


class View:
    """Use it as a context manager. One thread at a time."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()
        self._phase = ""
        self._phase_began = self._began
        self._rows: Sequence[Row] = ()
        self._notes: deque[str] = deque(maxlen=NOTES)
        self._said = 0.0
        terminal = console.is_terminal and os.environ.get("TERM") != "dumb"
        self._live = Live(self, console=console, refresh_per_second=4, transient=True) if terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    @property
    def elapsed(self) -> float:
        """Seconds since the view was made."""
        return time.monotonic() - self._began

    def phase(self, what: str) -> None:
        """What is being done from now on."""
        self._phase, self._phase_began, self._rows = what, time.monotonic(), ()
        self._said = self._phase_began
        if self._live is None:
            self._say(f"{what} ...")

    def note(self, what: str) -> None:
        """Something worth keeping: it stays on the screen."""
        if self._live is None:
            self._say(what)
        else:
            self._live.console.print(self._stamped(what))

    def rows(self, rows: Sequence[Row]) -> None:
        """The state of things. Call it as often as there is something new."""
        self._rows = rows
        now = time.monotonic()
        if rows and self._live is None and now - self._said >= LINE_EVERY_SECONDS:
            self._said = now
            self._say("; ".join(line(row) for row in rows))

    def downloading(self, what: str, done: int, total: int) -> None:
        """Progress of a download, as the embedded broker reports it."""
        if 0 < total <= done:  # what follows has no figures: a finished bar would seem to hang
            self._phase = f"{what} is there; starting it"
        else:
            self._phase = f"{what}: {done / 1e6:.1f}" + (f" of {total / 1e6:.1f} MB" if total else " MB")
        now = time.monotonic()
        if self._live is None and now - self._said >= LINE_EVERY_SECONDS:
            self._said = now
            self._say(self._phase)

    def _say(self, what: str) -> None:
        self._console.print(self._stamped(what), soft_wrap=True)

    def _stamped(self, what: str) -> Text:
        return Text.assemble((f"{self.elapsed:6.1f} s  ", "dim"), what)

    def __rich__(self) -> RenderableType:
        head = Text.assemble(
            (f"{self.elapsed:6.1f} s  ", "dim"),
            (self._phase, "bold"),
            (f"  ({time.monotonic() - self._phase_began:.0f} s)", "dim"),
        )
        return Group(head, table(self._rows)) if self._rows else head


def line(row: Row) -> str:
    """A row as words."""
    words = [f"{row.name} {row.done:,}" + ("" if row.total is None else f" of {row.total:,}")]
    if row.rate:
        words.append(f"{row.rate:,.0f}/s")
    if row.lag is not None:
        words.append(f"lag {row.lag:,}")
    if row.commits is not None:
        words.append(f"{row.commits:,} commits")
    if row.restarts is not None:
        words.append(f"{row.workers} workers, {row.restarts} restarts")
    return ", ".join(words)


def table(rows: Sequence[Row]) -> Table:
    """The rows for a terminal."""
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    grid.add_column("")
    grid.add_column("")
    for name in ("done", "of", "per second", "lag", "commits", "workers", "restarts"):
        grid.add_column(name, justify="right")
    for row in rows:
        grid.add_row(
            row.name,
            ProgressBar(total=row.total or None, completed=row.done, width=24, pulse=not row.total),
            f"{row.done:,}",
            "" if row.total is None else f"{row.total:,}",
            "" if row.rate is None else f"{row.rate:,.0f}",
            "" if row.lag is None else f"{row.lag:,}",
            "" if row.commits is None else f"{row.commits:,}",
            row.workers,
            "" if row.restarts is None else f"{row.restarts:,}",
        )
    return grid
