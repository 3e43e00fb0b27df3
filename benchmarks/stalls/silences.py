"""From arrivals to silences: how long each output partition was silent, and what the time of a move was spent on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from benchmarks.stalls.member import Measured
from benchmarks.stalls.traces import Traces
from benchmarks.stalls.workload import Seen


class Silence(msgspec.Struct, frozen=True):
    """The longest time without an output of one partition. ``moves``: how often its writer changed meanwhile;
    ``at_move``: the longest silence at such a change, in milliseconds; ``chain``: where they went, in order."""

    partition: int
    milliseconds: float
    moves: int
    at_move: float = 0.0
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


def longest(outputs: Sequence[Seen], window: Window) -> float | None:
    """The longest silence in the window, in seconds; one that had begun before counts as a whole, one that goes on
    afterwards up to the end of the window."""
    within = [(a, b) for a, b in pairwise(outputs) if b.arrived >= window.since and a.arrived <= window.until]
    return max((min(b.arrived, window.until) - a.arrived for a, b in within), default=None)


def changes(outputs: Sequence[Seen], window: Window) -> list[tuple[Seen, Seen]]:
    """The neighbours that were written by different processes."""
    return [(a, b) for a, b in pairwise(outputs) if a.by != b.by and window.since <= b.arrived <= window.until]


def silences(seen: Sequence[Seen], window: Window, traces: Traces) -> list[Silence]:
    """The longest silence of every partition in the window."""
    found = []
    for partition, outputs in sorted(by_partition(seen).items()):
        seconds = longest(outputs, window)
        if seconds is None:
            continue
        moved = changes(outputs, window)
        worst = max(moved, key=lambda pair: pair[1].arrived - pair[0].arrived, default=None)
        if worst is None:
            found.append(Silence(partition, _ms(seconds), 0))
        else:
            at_move = _ms(worst[1].arrived - worst[0].arrived)
            found.append(Silence(partition, _ms(seconds), len(moved), at_move, chain_of(*worst, window, traces)))
    return found


def chain_of(last: Seen, first: Seen, window: Window, traces: Traces) -> dict[str, float]:
    """What happened between the old writer's last event and the new one's first output, as milliseconds per step: for
    a move from the end of the intake on, else from the action (or the last output) on.

    Times of different processes are of one machine's clock. A step that was not traced is left out.
    """
    partition = last.partition
    out = _latest(traces, last.by, "PartitionMoved", partition, window.since, first.arrived, direction="out")
    taken = _latest(traces, first.by, "TakeOverDone", partition, window.since, first.arrived)
    marks: list[tuple[str, float]] = []
    if out is not None:
        before = out.at - out.fields["seconds"]
        marks.append(("marker committed", out.at))
    else:
        before = max(window.since, last.arrived)
    if taken is not None:
        restored = taken.at - taken.fields["restore_seconds"]
        barrier = restored - taken.fields["barrier_seconds"]
        marks.append(("plan heard", barrier - taken.fields["fence_seconds"]))
        marks += [("fenced", barrier), ("offsets known", restored)]
    for name, what in (("started", "activated"), ("first event", "first event")):
        times = traces.notes(first.by, what, partition, window.since, first.arrived)
        if times:
            marks.append((name, times[-1]))
    marks.append(("seen by the reader", first.arrived))
    chain = {}
    for name, at in marks:
        chain[name] = _ms(at - before)
        before = at
    return chain


def _latest(
    traces: Traces, name: str, kind: str, partition: int, since: float, until: float, **fields: str
) -> Measured | None:
    wanted = {"partition": partition, **fields}
    found = [
        line
        for line in traces.measured(name, kind, since, until)
        if all(line.fields[field] == value for field, value in wanted.items())
    ]
    return found[-1] if found else None


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 1)
