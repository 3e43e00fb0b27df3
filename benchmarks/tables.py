"""From runs to tables: medians with least and most, ratios round by round; a run with a fault has no rate."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from rich.table import Table

T = TypeVar("T")
Value = Callable[[Any], float]


def table(title: str, words: Sequence[str], numbers: Sequence[str]) -> Table:
    """Make an empty one: columns of words first, then of numbers."""
    empty = Table(title=title, title_justify="left")
    for name in words:
        empty.add_column(name, no_wrap=True)
    for name in numbers:
        empty.add_column(name, justify="right")
    return empty


def right(found: Iterable[T]) -> list[T]:
    """Select the runs without a fault that count (round 0 does not)."""
    return [one for one in found if not getattr(one, "fault", "") and getattr(one, "round", 1)]


def of_system(found: Iterable[T], system: str) -> list[T]:
    """Select the runs of one system."""
    return [one for one in found if getattr(one, "system", "") == system]


def by_what(found: Iterable[T]) -> dict[str, list[T]]:
    """Group the runs by what they measure, in the order of its first run."""
    groups: dict[str, list[T]] = {}
    for one in found:
        groups.setdefault(getattr(one, "what", ""), []).append(one)
    return groups


def names(found: Iterable[Any]) -> list[str]:
    """List the systems, in the order of their first run."""
    return list(dict.fromkeys(one.system for one in found))


def spread(values: Iterable[float], form: str = ",.0f") -> str:
    """``median (least; most)``; ``-`` of nothing, the value itself of one."""
    found = list(values)
    if not found:
        return "-"
    told = [format(value, form) for value in (statistics.median(found), min(found), max(found))]
    return told[0] if len(found) == 1 else f"{told[0]} ({told[1]}; {told[2]})"


def ratios(found: Sequence[Any], system: str, reference: str, value: Value) -> list[float]:
    """Divide system by reference, in each round in which both were right: a drifting machine moves both."""
    mine, theirs = ({one.round: value(one) for one in right(of_system(found, name))} for name in (system, reference))
    return [mine[turn] / theirs[turn] for turn in sorted(mine.keys() & theirs.keys()) if theirs[turn]]


def of_rounds(found: Sequence[Any]) -> str:
    """Describe the figures of a table."""
    rounds = len({one.round for one in found if one.round})
    return f"median (least; most) of {rounds} rounds" if rounds > 1 else "one round"


def loads(found: Sequence[Any]) -> str:
    """Show the range of the load averages."""
    values = [one.load_average for one in right(found) or found] or [0.0]
    return f"load {min(values):.1f} to {max(values):.1f}"


def verdict(found: Sequence[Any]) -> str:
    """Show ``yes`` if every run was right, else the number of wrong ones."""
    wrong = sum(bool(one.fault) for one in found)
    return f"no: {wrong} of {len(found)} runs" if wrong else "yes"


def markdown(shown: Table) -> str:
    """Show the same table in Markdown, with its title above."""
    rows = zip(*(map(_cell, column.cells) for column in shown.columns), strict=True)
    lines = [
        f"**{_cell(shown.title or '')}**",
        "",
        _row(_cell(column.header) for column in shown.columns),
        _row("--:" if column.justify == "right" else "---" for column in shown.columns),
        *map(_row, rows),
    ]
    return "\n".join(lines)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(content: object) -> str:
    return str(content).replace("|", "\\|").replace("*", "\\*").replace("_", "\\_").replace("<", "&lt;")
