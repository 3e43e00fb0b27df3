"""What a picture shows, told by a measure; ``benchmarks.drawing`` draws it."""

from __future__ import annotations

import msgspec


class Point(msgspec.Struct, frozen=True, array_like=True):
    """A median, and the least and most that it stands for."""

    x: float
    y: float
    least: float
    most: float


class Lines(msgspec.Struct, frozen=True, kw_only=True):
    """A line per system, with the least and the most around it. ``name``: of the file. ``x`` and ``y``: of the axes.
    ``ticks``: the labels of the x axis, by place; without them it shows numbers."""

    name: str
    title: str
    x: str
    y: str
    series: dict[str, list[Point]]
    log_x: bool = False
    log_y: bool = False
    ticks: dict[float, str] = {}

    def __bool__(self) -> bool:
        """Whether there is anything to draw: after faults there may be nothing."""
        return any(self.series.values())


class Bars(msgspec.Struct, frozen=True, kw_only=True):
    """A bar per system, made of parts: ``bars[system][part]``. ``ranges``: least and most of the whole bar."""

    name: str
    title: str
    x: str
    bars: dict[str, dict[str, float]]
    ranges: dict[str, tuple[float, float]] = {}

    def __bool__(self) -> bool:
        """Whether there is anything to draw."""
        return any(self.bars.values())


Plot = Lines | Bars
