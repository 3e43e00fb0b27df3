"""From arrivals to silences: how long each output partition was silent, and what the time of a move was spent on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from benchmarks.stalls.traces import Traces
from benchmarks.stalls.workload import Seen


class Silence(msgspec.Struct, frozen=True):
    """The longest time without an output of one partition. ``moves``: how often its writer changed meanwhile.
    ``chain``: where the milliseconds of its (longest) move went, in order; empty if it did not move."""

    partition: int
    milliseconds: float
    moves: int
    chain: dict[str, float] = {}


class Window(msgspec.Struct, frozen=True):
    """From an action to a while after everybody had settled; seconds since the epoch."""

    since: float
    until: float


def by_partition(seen: Sequence[Seen]) -> dict[int, list[Seen]]:
    """Outputs per partition, in order."""
    found: dict[int, list[Seen]] = {}
    for one in seen:
        found.setdefault(one.partition, []).append(one)
    return found


def longest(outputs: Sequence[Seen], window: Window) -> tuple[Seen, Seen] | None:
    """The neighbours with the longest silence between them that reaches into the window."""
    within = [(a, b) for a, b in pairwise(outputs) if b.arrived >= window.since and a.arrived <= window.until]
    return max(within, key=lambda pair: pair[1].arrived - pair[0].arrived, default=None)


def changes(outputs: Sequence[Seen], window: Window) -> list[tuple[Seen, Seen]]:
    """The neighbours that were written by different processes."""
    return [(a, b) for a, b in pairwise(outputs) if a.by != b.by and window.since <= b.arrived and a.arrived <= window.until]


def silences(seen: Sequence[Seen], window: Window, traces: Traces) -> list[Silence]:
    """The longest silence of every partition in the window."""
    found = []
    for partition, outputs in sorted(by_partition(seen).items()):
        pair = longest(outputs, window)
        if pair is None:
            continue
        moved = changes(outputs, window)
        worst = max(moved, key=lambda pair: pair[1].arrived - pair[0].arrived, default=None)
        chain = {} if worst is None else chain_of(*worst, window, traces)
        found.append(Silence(partition, _ms(pair[1].arrived - pair[0].arrived), len(moved), chain))
    return found


def chain_of(last: Seen, first: Seen, window: Window, traces: Traces) -> dict[str, float]:
    """What happened between the old writer's last output and the new one's first, as milliseconds per step.

    Times of different processes are of one machine's clock. A step that was not traced is left out.
    """
    marks: list[tuple[str, float]] = []
    partition = last.partition
    moved = traces.measured(last.by, "PartitionMoved", window.since, first.arrived)
    out = [line for line in moved if line.fields["partition"] == partition and line.fields["direction"] == "out"]
    if out:
        marks.append(("until intake ends", out[-1].at - out[-1].fields["seconds"]))
        marks.append(("marker committed", out[-1].at))
    else:
        marks.append(("until the action", max(window.since, last.arrived)))
        taken = traces.measured(first.by, "TakeOverDone", window.since, first.arrived)
        mine = [line for line in taken if line.fields["partition"] == partition]
        if mine:
            at, fields = mine[-1].at, mine[-1].fields
            restored = at - fields["restore_seconds"]
            barrier = restored - fields["barrier_seconds"]
            marks.append(("plan heard", barrier - fields["fence_seconds"]))
            marks += [("fenced", barrier), ("barrier", restored)]
    for name, what in (("started", "activated"), ("first event", "first event")):
        times = traces.notes(first.by, what, partition, window.since, first.arrived)
        if times:
            marks.append((name, times[-1]))
    marks.append(("seen by the reader", first.arrived))
    chain, before = {}, last.arrived
    for name, at in marks:
        chain[name] = _ms(at - before)
        before = at
    return chain


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 1)
