"""Bar charts as small SVG files, the same to the last byte for the same figures, for light and for dark pages."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from html import escape

import msgspec

from benchmarks.systems import REFERENCE

WIDTH, MARGIN, ROW, BAR = 760, 12, 26, 16
CHARACTER = 6.2
"""Width of a character, about."""
COLOURS = (
    "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1",
    "#a6761d", "#8fb339", "#e0524d", "#3a9d9d", "#b59b1f", "#5b7083", "#d9a6e0", "#4a4fb5",
)  # fmt: skip
OF_SYSTEMS = {"engine": "#d55e00", REFERENCE: "#7f8790"}
"""The same in every picture; seen on light and on dark pages."""
STYLE = (
    "text{font:12px sans-serif;fill:#24292f}line{stroke:#24292f}"
    "@media(prefers-color-scheme:dark){text{fill:#d6dbe1}line{stroke:#d6dbe1}}"
)


class Plot(msgspec.Struct, frozen=True, kw_only=True):
    """A bar per system, made of parts: ``bars[system][part]``. ``name``: of the file; ``x``: the unit. ``ranges``:
    least and most of the whole bar."""

    name: str
    title: str
    x: str
    bars: dict[str, dict[str, float]]
    ranges: dict[str, tuple[float, float]] = {}

    def __bool__(self) -> bool:
        """Whether there is anything to draw: after faults there may be nothing."""
        return any(self.bars.values())

    @classmethod
    def of(cls, name: str, title: str, x: str, values: Mapping[str, Sequence[float]]) -> Plot:
        """Describe a bar per system: the median of its values, with the least and the most."""
        some = {system: found for system, found in values.items() if found}
        return cls(
            name=name,
            title=title,
            x=x,
            bars={system: {x: statistics.median(found)} for system, found in some.items()},
            ranges={system: (min(found), max(found)) for system, found in some.items()},
        )

    @property
    def alt(self) -> str:
        """Describe it in words, for readers who cannot see it."""
        return f"{self.title}: {self.x} of {', '.join(self.bars)}"


def svg(plot: Plot) -> str:
    """Draw the picture."""
    parts = list(dict.fromkeys(part for bar in plot.bars.values() for part in bar))
    left = MARGIN + CHARACTER * max(map(len, plot.bars)) + 8
    most = max(max(sum(bar.values()), *plot.ranges.get(name, (0.0,))) for name, bar in plot.bars.items())
    scale = (WIDTH - left - 80) / (most or 1.0)
    drawn = [_text(MARGIN, 20, f"{plot.title} ({plot.x})", "font-weight:bold")]
    y = 32
    for place, (name, bar) in enumerate(plot.bars.items()):
        x, own = left, OF_SYSTEMS.get(name, COLOURS[place % len(COLOURS)])
        drawn.append(_text(left - 8, y + 13, name, "text-anchor:end"))
        for part, value in bar.items():
            colour = COLOURS[parts.index(part) % len(COLOURS)] if len(parts) > 1 else own
            drawn.append(_rect(x, y, value * scale, colour, f"{part}: {value:,.3g}"))
            x += value * scale
        least, highest = (left + value * scale for value in plot.ranges.get(name, (0.0, 0.0)))
        if highest > least:
            drawn.append(f'<line x1="{least:.1f}" x2="{highest:.1f}" y1="{y + 8}" y2="{y + 8}"/>')
        total = sum(bar.values())
        drawn.append(_text(max(x, highest) + 5, y + 13, f"{total:,.3g}" if total < 100 else f"{total:,.0f}"))
        y += ROW
    x = float(MARGIN)
    for place, part in enumerate(parts if len(parts) > 1 else ()):
        width = 30 + CHARACTER * len(part)
        x, y = (MARGIN, y + ROW) if x + width > WIDTH else (x, y)
        drawn += [_rect(x, y, BAR, COLOURS[place % len(COLOURS)], part), _text(x + BAR + 4, y + 13, part)]
        x += width
    height = y + (ROW if len(parts) > 1 else 6)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
    return "\n".join([head, f"<title>{escape(plot.title)}</title>", f"<style>{STYLE}</style>", *drawn, "</svg>\n"])


def _text(x: float, y: float, text: str, style: str = "") -> str:
    styled = f' style="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{styled}>{escape(text)}</text>'


def _rect(x: float, y: float, width: float, colour: str, title: str) -> str:
    box = f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{BAR}" fill="{colour}">'
    return f"{box}<title>{escape(title)}</title></rect>"
