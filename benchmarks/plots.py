"""Pictures of what was measured, as small SVG files that are the same for the same figures."""

from __future__ import annotations

import msgspec


class Point(msgspec.Struct, frozen=True, array_like=True):
    """A median, and the least and most that it stands for."""

    x: float
    y: float
    least: float
    most: float


class Lines(msgspec.Struct, frozen=True, kw_only=True):
    """A line per system. ``name``: of the file. ``alt``: what a reader who cannot see it is told. ``ticks``: labels at
    places on the x axis. ``equal``: an x axis in steps, where labels alone count."""

    name: str
    title: str
    x: str
    y: str
    series: dict[str, list[Point]]
    log_x: bool = False
    log_y: bool = False
    ticks: dict[float, str] = {}
    alt: str = ""


class Bars(msgspec.Struct, frozen=True, kw_only=True):
    """A bar per system, made of parts: ``bars[system][part]``."""

    name: str
    title: str
    x: str
    bars: dict[str, dict[str, float]]
    alt: str = ""


Plot = Lines | Bars
