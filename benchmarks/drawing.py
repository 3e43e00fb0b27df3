"""Draws pictures as small SVG files, the same to the last byte for the same figures, for light and for dark pages.

Text stays text. Colours of ink and paper are replaced where the reader's system is dark; those of the systems are seen
on both.
"""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Iterable, Sequence
from itertools import count
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from benchmarks.plots import Bars, Lines, Plot
from benchmarks.systems import REFERENCE

WIDTH, HEIGHT = 7.0, 3.6  # inches, of 72 points each
PAPER, INK, GRID = "#ffffff", "#24292f", "#d8dee4"
DARK = {PAPER: "#1c2026", INK: "#d6dbe1", GRID: "#3a424c"}
COLOURS = (
    "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1",
    "#a6761d", "#8fb339", "#e0524d", "#3a9d9d", "#b59b1f", "#5b7083", "#d9a6e0", "#4a4fb5",
)  # fmt: skip
OF_SYSTEMS = {"engine": "#d55e00", REFERENCE: "#7f8790"}
"""The same in every picture."""
MARKERS = "osD^vPX*<>"
MOST_TICKS = 8
"""At places that were measured; with more, they are where they are round."""
CHARACTERS = 84
"""In the width of a picture."""
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "benchmarks",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana"],
    "font.size": 9,
    "axes.titlesize": 10,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": GRID,
    "axes.facecolor": PAPER,
    "figure.facecolor": PAPER,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "path.simplify": True,
}


def svg(plot: Plot) -> str:
    """The picture."""
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, "backend": "agg", **STYLE}):
        figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(plot.title, loc="left")
        axes.set_axisbelow(True)
        if isinstance(plot, Lines):
            _lines(axes, plot)
        else:
            figure.set_figheight(1.1 + 0.28 * len(plot.bars) + (0.25 if _parts(plot)[1:] else 0))
            _bars(axes, plot)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None, "Title": plot.title})
    return _for_both(drawn.getvalue())


def alt(plot: Plot) -> str:
    """What a reader who cannot see it is told."""
    if isinstance(plot, Lines):
        return f"{plot.title}: {plot.y} by {plot.x} of {', '.join(plot.series)}"
    return f"{plot.title}: {plot.x} of {', '.join(plot.bars)}"


def colours(names: Iterable[str]) -> dict[str, str]:
    """A colour for each: its own, or the next one that nobody has."""
    found, places = {}, count()
    for name in names:
        found[name] = OF_SYSTEMS.get(name) or COLOURS[next(places) % len(COLOURS)]
    return found


def _lines(axes: Any, plot: Lines) -> None:
    by_name = colours(plot.series)
    for place, (name, points) in enumerate((name, points) for name, points in plot.series.items() if points):
        x = [point.x for point in points]
        axes.plot(
            x,
            [point.y for point in points],
            label=name,
            color=by_name[name],
            marker=MARKERS[place % len(MARKERS)],
            markersize=4,
            linewidth=1.4,
        )
        least, most = [point.least for point in points], [point.most for point in points]
        axes.vlines(x, least, most, color=by_name[name], linewidth=3, alpha=0.35)
    if plot.log_x:
        axes.set_xscale("log")
    if plot.log_y:
        axes.set_yscale("log")
        heights = [value for points in plot.series.values() for point in points for value in (point.least, point.most)]
        axes.set_ylim(min(heights) / 1.3, max(heights) * 1.3)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.minorticks_off()
    else:
        axes.set_ylim(bottom=0)
    values = sorted({point.x for points in plot.series.values() for point in points})
    ticks = plot.ticks or ({value: f"{value:,.10g}" for value in values} if len(values) <= MOST_TICKS else {})
    if ticks:
        axes.set_xticks(list(ticks), list(ticks.values()))
        axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.set_xlabel(plot.x)
    axes.set_ylabel(plot.y)
    axes.grid(axis="y", linewidth=0.6)
    axes.figure.legend(loc="outside lower center", ncols=_columns(plot.series))


def _bars(axes: Any, plot: Bars) -> None:
    parts, names = _parts(plot), list(plot.bars)
    places = range(len(names))
    left = [0.0] * len(names)
    by_name = colours(names if len(parts) == 1 else parts)
    for part in parts:
        widths = [plot.bars[name].get(part, 0.0) for name in names]
        own = by_name[part] if len(parts) > 1 else [by_name[name] for name in names]
        axes.barh(places, widths, left=left, height=0.62, color=own, label=part, linewidth=0)
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    for place, (name, end) in enumerate(zip(names, left, strict=True)):
        least, most = plot.ranges.get(name, (end, end))
        if least < most:
            axes.plot([least, most], [place, place], color=INK, linewidth=1, marker="|", markersize=5)
        axes.annotate(f"{end:,.3g}" if end < 100 else f"{end:,.0f}", (max(end, most), place), (4, 0),
                      textcoords="offset points", va="center")  # fmt: skip
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.set_xlabel(plot.x)
    axes.grid(axis="x", linewidth=0.6)
    if len(parts) > 1:
        axes.figure.legend(loc="outside lower center", ncols=_columns(parts))


def _columns(names: Collection[str]) -> int:
    """As many as fit below the picture."""
    return max(min(len(names), CHARACTERS // (max(map(len, names)) + 8)), 1)


def _parts(plot: Bars) -> Sequence[str]:
    return list(dict.fromkeys(part for bar in plot.bars.values() for part in bar))


def _for_both(drawn: str) -> str:
    """Without what nobody reads, and with other ink and paper where it is dark."""
    drawn = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", drawn, flags=re.DOTALL)
    drawn = re.sub(r"\n\s*", "\n", re.sub(r"\n\s*\n", "\n", drawn))
    rules = "".join(
        f'[style*="{what}: {light}"]{{{what}:{dark}!important}}'
        for light, dark in DARK.items()
        for what in ("fill", "stroke")
    )
    # text without a style of its own is black
    style = f"text{{fill:{INK}}}@media (prefers-color-scheme:dark){{{rules}text{{fill:{DARK[INK]}!important}}}}"
    return drawn.replace("<defs>", f"<style>{style}</style>\n<defs>", 1)
