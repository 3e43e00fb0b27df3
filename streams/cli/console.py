"""Output of all commands: answers on stdout (a table, or JSON), everything else on stderr."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import orjson
from rich.box import SIMPLE_HEAD
from rich.console import Console, JustifyMethod, OverflowMethod, RenderableType
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from streams.looks.figures import LogLines, ShowProgress, figures
from streams.sak.harmless import harmless

_WIDEST = 1_000


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


def frameless(*names: str, title: str = "", show_footer: bool = False, min_width: int | None = None) -> Table:
    """An empty table without a frame, as all commands have it, with these columns."""
    table = Table(*names, box=SIMPLE_HEAD, pad_edge=False, show_footer=show_footer, min_width=min_width)
    table.title, table.title_justify = title or None, "left"
    return table


def plain_table(*names: str, right: Collection[str] = (), folded: Collection[str] = ()) -> Table:
    """An empty table without a frame. ``right``: the columns of numbers. ``folded``: those whose text may be folded."""
    table = frameless()
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
