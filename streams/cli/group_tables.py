"""The tables of ``kes group``: members, partitions, and what is on its way. Pure functions."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from streams.cli.console import frameless
from streams.kafka.questions.group_view import GroupView, MemberView
from streams.kafka.wire.group_bytes import ranges
from streams.looks.figures import duration
from streams.looks.group_folders import on_disk
from streams.looks.group_live import Live, rebalances, waiting_texts
from streams.looks.group_picture import (
    PartitionRow,
    Picture,
    doing,
    headline,
    names,
    owned_here,
    partition_rows,
    short_id,
    standing,
    under_way,
)


def shown(picture: Picture, now: float, clock: str = "") -> RenderableType:
    """Everything for people. ``now`` in seconds since the epoch; ``clock`` is put before the head line."""
    parts: list[RenderableType] = [_cell(f"{clock}{headline(picture)}", "bold")]
    if picture.stale:
        parts.append(
            Text("this is the state before the rebalance; the new one is shown when the rebalance is through", "yellow")
        )
    if picture.view.members:
        parts.append(member_table(picture, now))
    rows = partition_rows(picture)
    if rows:
        parts.append(partition_table(rows))
    parts += [_cell(text, "yellow") for text in waiting_texts(picture.live, now)]
    for entry in rebalances(picture.live, names(picture.view)):
        parts.append(_cell(f"generation {entry.generation} at {_clock(entry.at_ms)}: {entry.cause}"))
    parts += [_cell(note, "yellow") for note in picture.notes]
    return Group(*parts)


def member_table(picture: Picture, now: float) -> Table:
    """A row per member."""
    view, called = picture.view, names(picture.view)
    grid = frameless()
    disks = on_disk(view.members)
    more = ["on disk"] * bool(disks) + ["doing"] * bool(picture.live)
    for name in ("member", "id", "host", "for", "partitions", "standby", "moves", *more):
        grid.add_column(name, overflow="fold")
    donors = {p: member.member_id for member in view.members if member.assignment for p in member.assignment.release}
    for member in view.members:
        report = member.report
        cells = [
            called[member.member_id] + (" (static)" if member.static else ""),
            short_id(member),
            member.host,
            "-" if member.since is None else duration(max(0.0, now - member.since)),
            _owned(member, picture.live, len(_topics(view)) > 1),
            _ranges(member.assignment.standby) if member.assignment else "-",
            _moves(member, called, donors, under_way(picture.live)),
        ]
        if disks:
            cells.append(disks.get(member.member_id, "-"))
        if picture.live:
            cells.append(doing(picture.live.get(member.member_id)))
        style = "red" if member.problem else "yellow" if report and report.leaving else ""
        grid.add_row(*map(_cell, cells), style=style)
    return grid


def partition_table(rows: list[PartitionRow]) -> Table:
    """A row per partition, and the sum of what is behind."""
    several = len({row.topic for row in rows}) > 1
    grid = frameless(show_footer=any(row.lag for row in rows))
    grid.add_column("partition", footer="all", overflow="fold")
    for name in ("owner", "standby", "move"):
        grid.add_column(name, overflow="fold")
    for name in ("committed", "end", "lag"):
        grid.add_column(name, justify="right")
    for row in rows:
        lag = row.lag
        cells = [
            f"{row.topic} {row.partition}" if several else str(row.partition),
            ", ".join(row.owners) or "no member",
            ", ".join(f"{copy.member}{_in_brackets(standing(copy))}" for copy in row.standbys),
            _move(row),
            "-" if lag is None or lag.committed is None else f"{lag.committed:,}",
            "-" if lag is None else f"{lag.end:,}",
            "-" if lag is None else f"{lag.lag:,}",
        ]
        style = "red" if not row.owners else "yellow" if row.preparing or row.restoring else ""
        grid.add_row(*map(_cell, cells), style=style)
    grid.columns[6].footer = f"{sum(row.lag.lag for row in rows if row.lag):,}"
    return grid


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""


def _moves(member: MemberView, called: Mapping[str, str], donors: Mapping[int, str], moving: Collection[int]) -> str:
    words = ["leaving"] if member.report and member.report.leaving else []
    assignment = member.assignment
    if assignment is not None:
        going = {partition: to for partition, to in assignment.release.items() if partition in moving}
        words += [f"{ranges(numbers)} to {to}" for to, numbers in _by_peer(going, called)]
        coming = {partition: donors.get(partition, "") for partition in assignment.incoming if partition in moving}
        words += [f"{ranges(numbers)} from {peer or 'one that is gone'}" for peer, numbers in _by_peer(coming, called)]
        if assignment.preparing:
            words.append(f"prepares {ranges(assignment.preparing)}")
    if member.target is not None:
        expected = {t: p - member.owned.get(t, frozenset()) for t, p in member.target.items()}
        words += [f"expects {ranges(partitions)}" for partitions in expected.values() if partitions]
    if member.problem:
        words.append(member.problem)
    return "; ".join(words)


def _by_peer(moves: Mapping[int, str], called: Mapping[str, str]) -> list[tuple[str, list[int]]]:
    found: dict[str, list[int]] = {}
    for partition, peer in moves.items():
        found.setdefault(called.get(peer, peer and f"{peer} (gone)"), []).append(partition)
    return sorted(found.items())


def _move(row: PartitionRow) -> str:
    words = [f"{row.move[0]} → {row.move[1]}"] if row.move else []
    verbs = {"late": "is late", "failed": "failed to read", "restoring": "restores"}
    for copy in (*row.restoring, *row.preparing):
        detail = standing(copy) if standing(copy) != copy.state else ""
        words.append(f"{copy.member} {verbs.get(copy.state, 'prepares')}{_in_brackets(detail)}")
    return ", ".join(words)


def _owned(member: MemberView, live: Live, several: bool) -> str:
    if member.assignment is not None:
        return _ranges(owned_here(member, live))
    if not several:
        return _ranges(frozenset().union(*member.owned.values()))
    return "; ".join(f"{topic} {ranges(partitions)}" for topic, partitions in sorted(member.owned.items())) or "-"


def _clock(at_ms: int) -> str:
    try:
        return time.strftime("%H:%M:%S", time.localtime(at_ms / 1000))
    except (ValueError, OverflowError, OSError):  # a number that is no time; it is other people's
        return "?"


def _cell(text: str, style: str = "") -> Text:
    """Format a name; it is a foreign text, so characters that control a terminal are replaced."""
    return Text("".join(letter if letter.isprintable() else "?" for letter in text), style=style)


def _topics(view: GroupView) -> set[str]:
    return {topic for member in view.members for topic in member.topics}


def _ranges(partitions: frozenset[int]) -> str:
    return ranges(partitions) if partitions else "-"
