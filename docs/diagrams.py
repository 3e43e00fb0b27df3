"""Draws the engine's state machines from their tables of legal moves, and the picture of ``docs/concepts.md``:
``python docs/diagrams.py`` does it again.

``docs/diagrams/*.svg``, and the tables in ``docs/ARCHITECTURE.md`` and ``docs/guides/journal.md`` between the marks
``<!-- moves: NAME -->`` and ``<!-- end -->``. A test compares them with the tables. Where a state stands in the
picture, and what each move means, is listed here; a state or a move that is missing here, or too many, is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from streams.core import journal, partition, transaction

HERE = Path(__file__).resolve().parent
PAGE = HERE / "ARCHITECTURE.md"

WIDTH, HEIGHT = 104, 34  # of a box
COLUMN, ROW = 150, 110  # from box to box
MARGIN = 20


class Machine(NamedTuple):
    """One machine: where its states stand (column, row), how far an arrow bends (pixels, to its left), its moves."""

    name: str
    first: str
    places: dict[str, tuple[float, float]]
    bends: dict[tuple[str, str], float]
    moves: dict[tuple[str, str], str]
    table: Mapping[Any, Iterable[Any]]
    page: Path = PAGE


TRANSACTION = Machine(
    name="transaction",
    first="open",
    places={
        "open": (0, 1),
        "sendable": (1, 1),
        "sending": (2, 1),
        "flushed": (3, 1),
        "committing": (4, 1),
        "committed": (5, 1),
        "dropped": (2, 2),
    },
    bends={("sending", "sendable"): 34, ("flushed", "sendable"): 80, ("committing", "sendable"): 126},
    moves={
        ("open", "sendable"): "sealed: by the batching rule, or at once for a barrier",
        ("sendable", "sending"): "its turn to be sent: a slot, all records, the offsets with the group's metadata",
        ("sending", "flushed"): "every record is acknowledged, the offsets are accepted",
        (
            "flushed",
            "committing",
        ): "it is the oldest: a second check of the membership, then the end is requested",
        ("committing", "committed"): "it answered, or the changelog says so",
        ("sending", "sendable"): "a failure: known to be aborted, to be sent again",
        ("flushed", "sendable"): "an older one failed: ended, to be sent again after it",
        ("committing", "sendable"): "refused, or the changelog says that it is not committed",
        ("open", "dropped"): "the membership is lost, or nothing is left in it",
        ("sendable", "dropped"): "the same",
        ("sending", "dropped"): "the membership is lost",
        ("flushed", "dropped"): "the same",
        ("committing", "dropped"): "the same",
    },
    table=transaction.LEGAL_MOVES,
)

PARTITION = Machine(
    name="partition",
    first="restoring",
    places={
        "restoring": (0, 0.6),
        "active": (1.5, 0.6),
        "releasing": (3, 0),
        "draining": (3, 1.0),
        "released": (4.5, 0.5),
        "restarting": (1.5, 1.7),
        "void": (3, 2.7),
    },
    bends={
        ("restoring", "draining"): -60,
        ("restoring", "void"): 100,
        ("active", "void"): -26,
        ("releasing", "void"): -90,
        ("releasing", "restarting"): 20,
    },
    moves={
        ("restoring", "active"): "its store is complete: intake begins",
        ("active", "restarting"): "its state can not stand: a refused record, a store that can not be undone",
        ("active", "releasing"): "it moves away: what runs may end, the last transaction carries the marker",
        ("releasing", "released"): "the marker is committed: the receiver has it; the store stays as a copy, or goes",
        ("releasing", "restarting"): "its state can not stand: it comes back to work, and is handed over then",
        ("releasing", "draining"): "revoked, or the source stops",
        ("active", "draining"): "the same: what runs may end, what is complete is committed",
        ("restoring", "draining"): "the same, before it ever worked",
        ("restarting", "draining"): "the same",
        ("draining", "released"): "nothing of it is unsettled: the store goes, the group is answered",
        ("restoring", "void"): "the membership is lost: nothing may be sent, the store is closed",
        ("active", "void"): "the same",
        ("restarting", "void"): "the same; or a new one takes its place, restoring from the changelog",
        ("releasing", "void"): "the same",
        ("draining", "void"): "the same, or a record was refused during the drain",
    },
    table=partition.LEGAL_MOVES,
)

MEMBER = Machine(
    name="member",
    first="loading",
    places={
        "loading": (0, 0),
        "following": (1.5, 0),
        "catching up": (3, 0),
        "leading": (4.5, 0),
        "settling": (4.5, 1.3),
        "rebuilding": (3, 1.3),
        "stopped": (1.5, 2.3),
    },
    bends={("following", "catching up"): 14, ("catching up", "following"): 14, ("settling", "stopped"): -30},
    moves={
        ("loading", "following"): "the newest snapshot is loaded, or there is none: the log is followed",
        ("following", "catching up"): "elected, the claim is taken, the term's entry is in the log",
        ("catching up", "leading"): "everything before the term's entry is applied: it decides",
        ("catching up", "following"): "the term has ended before that",
        (
            "leading",
            "settling",
        ): "the term ends: left, lost, fenced; or a half applied event; nothing is begun any more",
        ("settling", "following"): "every decision of the term is committed: the state is that of the log",
        ("settling", "rebuilding"): "one is not: the state ran ahead of the log, and is dropped",
        ("rebuilding", "following"): "it is loaded again, from the newest snapshot",
        ("loading", "stopped"): "topic, snapshot or `load` is at fault, or the block is left",
        ("following", "stopped"): "the log is damaged, `apply` has raised, the group refuses it; or the block is left",
        ("catching up", "stopped"): "the same",
        ("settling", "stopped"): "the same",
        ("rebuilding", "stopped"): "the same",
    },
    table=journal.LEGAL_MOVES,
    page=HERE / "guides" / "journal.md",
)

TERM = Machine(
    name="term",
    first="claiming",
    places={
        "claiming": (0, 0),
        "open": (1.5, 0),
        "committing": (3.6, 0),
        "settling": (2.5, 1.0),
        "ended": (1.5, 2.0),
    },
    bends={
        ("open", "committing"): 14,
        ("committing", "open"): 14,
        ("committing", "settling"): 12,
        ("settling", "committing"): 12,
        ("committing", "ended"): -70,
    },
    moves={
        ("claiming", "open"): "the id is taken, which fences the predecessor; the term's entry is committed",
        ("claiming", "ended"): "no broker answers, or the log is no journal's; the next attempt is another term",
        ("open", "committing"): "appends that wait go together into one transaction",
        ("committing", "open"): "it is committed: each append has its position",
        ("committing", "settling"): "it was refused, fenced, or not answered: the log decides",
        ("settling", "open"): "the claim is taken again, and the log has the entries; or the broker refuses one",
        ("settling", "committing"): "the claim is taken again, and the log does not have them: they are sent again",
        ("settling", "ended"): "a younger term has begun, the group does not confirm this one, or it is given up",
        ("open", "ended"): "it is left, or the group has ended it: what waits is refused",
        ("committing", "ended"): "the loop is closed meanwhile; what was sent is committed, or not",
    },
    table=journal.TERM_MOVES,
    page=HERE / "guides" / "journal.md",
)

MACHINES = (TRANSACTION, PARTITION, MEMBER, TERM)


def outputs() -> dict[Path, str]:
    """Every file that is drawn, with what it should hold."""
    drawn = {machine.page: machine.page.read_text() for machine in MACHINES}
    for machine in MACHINES:
        check(machine)
        drawn[HERE / "diagrams" / f"{machine.name}.svg"] = svg(machine)
        drawn[machine.page] = with_table(drawn[machine.page], machine)
    return drawn | {HERE / "diagrams" / "concepts.svg": concepts()}


def check(machine: Machine) -> None:
    """Check that the states and moves here are those of the code. Raises ``ValueError``."""
    states = {state.value for state in machine.table}
    moves = {(state.value, new.value) for state, following in machine.table.items() for new in following}
    for what, told, real in (("states", set(machine.places), states), ("moves", set(machine.moves), moves)):
        if told != real:
            raise ValueError(f"{machine.name}, {what}: missing here {real - told}, unknown to the code {told - real}")


def with_table(page: str, machine: Machine) -> str:
    """The page with this machine's table written anew. Raises ``ValueError`` when the marks are not there."""
    rows = "\n".join(f"| {old} | {new} | {why} |" for (old, new), why in machine.moves.items())
    text = f"<!-- moves: {machine.name} -->\n| from | to | when |\n|---|---|---|\n{rows}\n<!-- end -->"
    page, found = re.subn(rf"<!-- moves: {machine.name} -->.*?<!-- end -->", lambda _: text, page, flags=re.DOTALL)
    if found != 1:
        raise ValueError(f"{machine.page.name}: the marks of {machine.name} are there {found} times")
    return page


class Point(NamedTuple):
    """A place in the picture, in pixels."""

    x: float
    y: float


HEAD = (
    '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8"'
    ' orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="#456"/></marker></defs>'
)


def opening(width: float, height: float, title: str) -> list[str]:
    """The beginning of a picture: its size in pixels, its title, the head of its arrows, a white ground."""
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}"'
        f' height="{height:g}" font-family="sans-serif" font-size="14">',
        f"<title>{title}</title>",
        HEAD,
        f'<rect width="{width:g}" height="{height:g}" rx="8" fill="#fff"/>',
    ]


def svg(machine: Machine) -> str:
    """The picture: a box per state, an arrow per move. Ends have a double frame, the first state a thick one."""
    centers = {
        state: Point(MARGIN + WIDTH / 2 + column * COLUMN, MARGIN + HEIGHT / 2 + row * ROW)
        for state, (column, row) in machine.places.items()
    }
    width = max(center.x for center in centers.values()) + WIDTH / 2 + MARGIN
    height = max(center.y for center in centers.values()) + HEIGHT / 2 + MARGIN
    ends = {state.value for state, following in machine.table.items() if not following}
    return "\n".join(
        [
            *opening(
                width,
                height,
                f"Moves of a {machine.name}: {', '.join(f'{old} to {new}' for old, new in machine.moves)}",
            ),
            *(arrow(centers[old], centers[new], machine.bends.get((old, new), 0.0)) for old, new in machine.moves),
            *(box(state, center, machine.first == state, state in ends) for state, center in centers.items()),
            "</svg>\n",
        ]
    )


def box(state: str, center: Point, first: bool, end: bool) -> str:
    """One state."""
    x, y = center.x - WIDTH / 2, center.y - HEIGHT / 2
    frame = f'<rect x="{x:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#eef3fa" stroke="#245"'
    inner = (
        f'<rect x="{x + 3:g}" y="{y + 3:g}" width="{WIDTH - 6}" height="{HEIGHT - 6}" rx="4" fill="none"'
        ' stroke="#245"/>'
        if end
        else ""
    )
    text = f'<text x="{center.x:g}" y="{center.y + 5:g}" text-anchor="middle" fill="#123">{state}</text>'
    return f'{frame} stroke-width="{2.5 if first else 1}"/>{inner}{text}'


def arrow(start: Point, stop: Point, bend: float) -> str:
    """One move, bent to its left by so many pixels."""
    dx, dy = stop.x - start.x, stop.y - start.y
    length = (dx * dx + dy * dy) ** 0.5
    over = Point((start.x + stop.x) / 2 - 2 * bend * dy / length, (start.y + stop.y) / 2 + 2 * bend * dx / length)
    begin, end = edge(start, over), edge(stop, over)
    return (
        f'<path d="M{begin.x:.0f},{begin.y:.0f} Q{over.x:.0f},{over.y:.0f} {end.x:.0f},{end.y:.0f}" fill="none"'
        ' stroke="#456" marker-end="url(#head)"/>'
    )


def edge(center: Point, towards: Point) -> Point:
    """Where the way from a box's center to a point leaves the box."""
    dx, dy = towards.x - center.x, towards.y - center.y
    share = min(WIDTH / 2 / abs(dx) if dx else 1e9, HEIGHT / 2 / abs(dy) if dy else 1e9)
    return Point(center.x + dx * share, center.y + dy * share)


def concepts() -> str:
    """The picture of the page of concepts: one partition's way from its topic to its copy."""
    offsets = (40, 41, 42, 43, 44)
    cells = [
        frame(20 + 36 * at, 92, 36, 34, str(offset), fill="#ffe9c2" if offset == 42 else "#eef3fa")
        for at, offset in enumerate(offsets)
    ]
    return "\n".join(
        [
            *opening(900, 372, "A partition, its owner, a transaction, the changelog and a copy"),
            label(110, 36, "input topic", bold=True),
            label(20, 82, "partition 0", anchor="start"),
            *cells,
            label(20, 150, "handled", anchor="start", small=True),
            label(110, 150, "its turn", small=True),
            label(200, 150, "waiting", anchor="end", small=True),
            label(20, 186, "partition 1: another order,", anchor="start", small=True),
            label(20, 203, "perhaps another owner", anchor="start", small=True),
            frame(264, 14, 232, 212, fill="#f7f9fc"),
            label(380, 36, "member A, the owner", bold=True),
            frame(312, 92, 136, 34, "your handler"),
            frame(312, 172, 136, 34, "store of partition 0"),
            way(200, 109, 310, 109),
            way(370, 126, 370, 170),
            way(390, 172, 390, 128),
            frame(548, 14, 140, 212, fill="#fdf6e7", dashed=True),
            label(618, 36, "one transaction", bold=True),
            frame(566, 60, 104, 34, "outputs"),
            frame(566, 116, 104, 34, "changes"),
            frame(566, 172, 104, 34, "input offset"),
            way(448, 103, 564, 79),
            way(448, 113, 564, 131),
            way(448, 121, 564, 185),
            frame(748, 60, 132, 34, "output topic"),
            frame(748, 116, 132, 90),
            label(814, 158, "changelog"),
            label(814, 178, "of partition 0", small=True),
            way(670, 77, 746, 77),
            way(670, 133, 746, 133),
            way(670, 189, 746, 189),
            frame(264, 266, 232, 92, fill="#f7f9fc"),
            label(380, 288, "member B", bold=True),
            frame(312, 306, 136, 34, "copy of the store"),
            '<path d="M814,206 L814,323 L450,323" fill="none" stroke="#456" marker-end="url(#head)"/>',
            label(632, 314, "follows the changelog", small=True),
            "</svg>\n",
        ]
    )


def frame(
    x: float, y: float, width: float, height: float, text: str = "", *, fill: str = "#eef3fa", dashed: bool = False
) -> str:
    """A box by its upper left corner, with a text in its middle."""
    dashes = ' stroke-dasharray="6 4"' if dashed else ""
    shape = (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{fill}" stroke="#245"{dashes}/>'
    )
    return shape + (label(x + width / 2, y + height / 2 + 5, text) if text else "")


def label(x: float, y: float, text: str, *, anchor: str = "middle", bold: bool = False, small: bool = False) -> str:
    """A line of text at a place of its base line."""
    weight, size = ' font-weight="bold"' if bold else "", ' font-size="12"' if small else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="#123"{weight}{size}>{text}</text>'


def way(x: float, y: float, to_x: float, to_y: float) -> str:
    """A straight arrow."""
    return f'<path d="M{x:g},{y:g} L{to_x:g},{to_y:g}" fill="none" stroke="#456" marker-end="url(#head)"/>'


def main() -> None:
    """Write what differs."""
    for path, text in outputs().items():
        path.parent.mkdir(exist_ok=True)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


if __name__ == "__main__":
    main()
