"""Drawings made on the server, as SVG without styles of their own: the topology of a source, and a line of rates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from markupsafe import Markup, escape

from streams.looks.records import shortened
from streams.model.topology import Topology, TopologyTopic
from streams.sak.harmless import harmless

_WIDTH, _HEIGHT, _GAP = 250, 46, 14
_MIDDLE: Final = 300
_LONGEST: Final = 34
_MOST_HANDLERS: Final = 12
_READ: Final = ("source", "input", "table", "lookup", "visits")


def topology_svg(topology: Topology) -> Markup:
    """Draw what a source reads on the left, itself with its handlers in the middle, what it keeps and sends on the
    right."""
    left = [topic for topic in topology.topics if topic.purpose in _READ]
    right = [topic for topic in topology.topics if topic.purpose not in _READ]
    handlers = [f"{each.event}: {each.kind}" for each in topology.handlers]
    if len(handlers) > _MOST_HANDLERS:
        handlers = [*handlers[: _MOST_HANDLERS - 1], f"and {len(handlers) - _MOST_HANDLERS + 1} more"]
    middle = 62 + 16 * len(handlers)
    height = max(middle, _stack(left), _stack(right)) + 2 * _GAP
    x_middle, x_right = _WIDTH + 90, _WIDTH + 90 + _MIDDLE + 90
    top = (height - middle) / 2
    parts = [
        _box(
            x_middle,
            top,
            _MIDDLE,
            middle,
            "group",
            topology.group_id,
            "with a store" if topology.has_store else "stateless",
        )
    ]
    parts += [
        Markup('<text class="handler" x="{}" y="{}">{}</text>').format(
            x_middle + 14, top + 62 + 16 * number, _text(text)
        )
        for number, text in enumerate(handlers)
    ]
    for topics, x, edge in ((left, 0, _WIDTH), (right, x_right, x_right)):
        y = (height - _stack(topics)) / 2
        for topic in topics:
            parts.append(_topic(topic, x, y))
            beside = x_middle if x == 0 else x_middle + _MIDDLE
            ends = (edge, y + _HEIGHT / 2, beside, height / 2)
            parts.append(_edge(*ends) if x == 0 else _edge(ends[2], ends[3], ends[0], ends[1]))
            y += _HEIGHT + _GAP
    about = f"{topology.group_id} reads {_listed(left)}; it keeps and sends {_listed(right)}"
    return Markup(
        '<svg class="topology" role="img" viewBox="-1 0 {} {}" xmlns="http://www.w3.org/2000/svg"><title>{}</title>'
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z"/></marker></defs>{}</svg>'
    ).format(x_right + _WIDTH + 2, round(height), harmless(about), Markup("").join(parts))


def rates_svg(rates: Sequence[float], seconds: int = 120) -> Markup:
    """Draw rates as a line, the newest at the right."""
    most = max(rates, default=0.0)
    points = " ".join(
        f"{600 - 600 * (len(rates) - 1 - number) / (seconds - 1):.1f},{78 - (74 * rate / most if most else 0):.1f}"
        for number, rate in enumerate(rates)
    )
    return Markup(
        '<svg class="rates" role="img" viewBox="0 0 600 80" preserveAspectRatio="none" '
        'xmlns="http://www.w3.org/2000/svg"><title>{}</title><polyline points="{}"/></svg>'
    ).format(f"events a second, of the last {seconds} seconds; {most:,.0f} at most", points)


def _stack(topics: Sequence[TopologyTopic]) -> int:
    return len(topics) * (_HEIGHT + _GAP) - _GAP


def _topic(topic: TopologyTopic, x: float, y: float) -> Markup:
    return _box(x, y, _WIDTH, _HEIGHT, topic.purpose.replace(" ", "-"), topic.name, f"{topic.purpose}, {topic.size}")


def _box(x: float, y: float, width: int, height: int, kind: str, name: str, detail: str) -> Markup:
    return Markup(
        '<g class="box {}"><rect x="{}" y="{}" width="{}" height="{}" rx="6"/>'
        '<text class="name" x="{}" y="{}">{}</text><text x="{}" y="{}">{}</text></g>'
    ).format(
        kind,
        x,
        round(y),
        width,
        height,
        x + 14,
        round(y + 20),
        _text(name),
        x + 14,
        round(y + 37),
        _text(detail),
    )


def _edge(x1: float, y1: float, x2: float, y2: float) -> Markup:
    bend = (x2 - x1) / 2
    return Markup(
        '<path class="edge" marker-end="url(#tip)" d="M{:.0f} {:.0f} C{:.0f} {:.0f} {:.0f} {:.0f} {:.0f} {:.0f}"/>'
    ).format(x1, y1, x1 + bend, y1, x2 - bend, y2, x2, y2)


def _text(text: str) -> Markup:
    return escape(shortened(harmless(text), _LONGEST))


def _listed(topics: Sequence[TopologyTopic]) -> str:
    return ", ".join(topic.name for topic in topics) or "nothing"
