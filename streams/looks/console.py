"""Output of all commands: answers on stdout (a table, or JSON), everything else on stderr."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import msgspec
import orjson
from rich.box import SIMPLE_HEAD
from rich.console import Console, JustifyMethod, OverflowMethod, RenderableType
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from streams.sak.harmless import harmless

LOG_EVERY_SECONDS = 5.0
_WIDEST = 1_000
_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB")


class ShowProgress(Protocol):
    """Called with what is being done, how much of it is done, and how much there is (0: not known)."""

    def __call__(self, what: str, done: int, total: int, /) -> None: ...


def answers() -> Console:
    """The console of answers: stdout."""
    return Console(highlight=False)


def notices() -> Console:
    """The console of everything that is not an answer: stderr."""
    return Console(stderr=True, highlight=False)


def emit(data: Any, json: bool, table: Callable[[], RenderableType]) -> None:
    """Print an answer: ``data`` as one line of JSON, or what ``table`` makes for people (not called for JSON).

    A table that is wider than the terminal gets longer lines: names that were cut or folded could not be copied.
    """
    if json:
        sys.stdout.write(as_json(data))
        sys.stdout.flush()
    else:
        print_whole(answers(), table())


def plain_table(*names: str, right: Collection[str] = (), folded: Collection[str] = ()) -> Table:
    """An empty table without a frame. ``right``: the columns of numbers. ``folded``: those whose text may be folded."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in names:
        side: JustifyMethod = "right" if name in right else "left"
        overflow: OverflowMethod = "fold" if name in folded else "ellipsis"
        table.add_column(name, justify=side, no_wrap=name not in folded, overflow=overflow)
    return table


def print_whole(console: Console, shown: RenderableType) -> None:
    """Print a table on a console of as many columns as it needs."""
    widest = Measurement.get(console, console.options.update(max_width=_WIDEST), shown).maximum
    console.width = max(console.width, widest)
    console.print(shown)


def as_json(data: Any) -> str:
    """One line of JSON, with its end. What JSON has no form for becomes its text."""
    plain = msgspec.to_builtins(data, str_keys=True, enc_hook=str)
    return orjson.dumps(plain, option=orjson.OPT_APPEND_NEWLINE).decode()


def complain(message: str, hint: str = "") -> None:
    """One problem on stderr: no markup is read in its text, and a terminal cannot obey what it quotes."""
    console = notices()
    with suppress(OSError):  # its disk is full, or its reader gone: the exit code says how it ended
        console.print(Text("kes: ", style="bold red") + Text(harmless(message, keep="\n")), soft_wrap=True)
        if hint:
            console.print(Text(harmless(hint, keep="\n")), soft_wrap=True)


@contextmanager
def progress(unit: str = "") -> Iterator[ShowProgress]:
    """Show how work moves on, with rate and time left: bars on a terminal, a line now and then elsewhere.

    ``unit`` is what is counted (``"events"``); ``"bytes"`` is written as kB, MB and so on.
    """
    console = notices()
    if console.is_terminal and os.environ.get("TERM") != "dumb":
        with Progress(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), _Figures(unit), console=console
        ) as bars:
            yield _Bars(bars)
    else:
        yield LogLines(unit, time.monotonic, console.print)


class _Bars:
    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, what: str, done: int, total: int, /) -> None:
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what, total=None)
        self._bars.update(self._tasks[what], completed=done, total=total or None)


class _Figures(ProgressColumn):
    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    def render(self, task: Task) -> Text:
        return Text(figures(int(task.completed), int(task.total or 0), task.speed or 0.0, self._unit))


class LogLines:
    """Progress without a terminal: a line at the first call, every five seconds, and at the end of each work."""

    def __init__(self, unit: str, now: Callable[[], float], write: Callable[[str], None]) -> None:
        self._unit = unit
        self._now = now
        self._write = write
        self._began: dict[str, tuple[float, int]] = {}
        self._written: dict[str, float] = {}

    def __call__(self, what: str, done: int, total: int, /) -> None:
        now = self._now()
        began, first = self._began.setdefault(what, (now, done))
        written = self._written.get(what, -LOG_EVERY_SECONDS)
        ended = 0 < total <= done
        if now - written < LOG_EVERY_SECONDS and what in self._written and not ended:
            return
        if ended:  # a work of the same name may follow
            del self._began[what]
        self._written[what] = now
        rate = (done - first) / (now - began) if now > began else 0.0
        self._write(f"{what}: {figures(done, total, rate, self._unit)}")


def figures(done: int, total: int, rate: float, unit: str) -> str:
    """``12,000 of 48,000 events (25 %), 3,000/s, 12 s left``; what is not known is left out."""
    amount = f"{_amount(done, unit)} of {_amount(total, unit)}" if total else _amount(done, unit)
    counted = f" {unit}" if unit and unit != "bytes" else ""
    words = [amount + counted + (f" ({done * 100 // total} %)" if total else "")]
    if rate >= 1:
        words.append(f"{_amount(int(rate), unit)}/s")
    if rate > 0 and total > done:
        words.append(f"{duration((total - done) / rate)} left")
    return ", ".join(words)


def duration(seconds: float) -> str:
    """``8 s``, ``2 min 05 s``, ``1 h 10 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _amount(number: int, unit: str) -> str:
    if unit != "bytes":
        return f"{number:,}"
    size, name = float(number), _BYTE_UNITS[0]
    for larger in _BYTE_UNITS[1:]:
        if size < 1000:
            break
        size, name = size / 1000, larger
    return f"{size:.0f} {name}" if name == "B" else f"{size:.1f} {name}"
