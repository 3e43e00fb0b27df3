"""The way of each event, put together from what the log, the system under test and the reader tell, and summed up.

Nothing on the way carries a number of the event. It is known by its place: input and output are partitioned alike, and
a right system sends the outputs of a partition in the order of its events, so the n-th output is that of the n-th
event. The sending time that both carry is compared, so a wrong pair is seen.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import msgspec

from benchmarks.committed import percentiles
from benchmarks.tracing import POINTS, Marks

STRETCHES = {
    "input": "it is in the broker's log",
    "fetch": "a poll has returned it to the system",
    "handle": "its handler, and those of its slice, are done",
    "fill": "its transaction is sealed",
    "send": "its last records are sent, and a thread begins to wait",
    "flush": "all of the transaction is acknowledged",
    "turn": "the transaction's commit begins",
    "offsets": "the offsets are part of the transaction",
    "commit": "the commit is answered",
    "read": "a reader of what is committed has the output",
}
"""What each lasts until, by name, in order: it begins where the one before ends, the first at the generator's clock."""
MIDDLE, SLOWEST = (0.45, 0.55), (0.99, 1.0)
"""Shares of the events, in the order of their whole latency, that are looked at together."""


class Mismatch(Exception):
    """The parts do not belong together, or one is missing."""


class Sent(msgspec.Struct, frozen=True):
    """One event of the input: its offset, when it was sent, and when it was in the log. Seconds since the epoch."""

    offset: int
    sent: float
    appended: float


class Way(msgspec.Struct, frozen=True):
    """One event: when it was sent, the ms of each stretch, and in which commit it was (its time)."""

    sent: float
    stretches: tuple[float, ...]
    committed: float

    @property
    def whole(self) -> float:
        """The ms of all stretches: from the generator's clock to the reader."""
        return sum(self.stretches)


class Stretch(msgspec.Struct, frozen=True):
    """Milliseconds: percentiles over all events, and means over the events whose whole way was about the median and
    over the slowest 1 %. Those means add up to the mean of these events' whole ways; percentiles do not."""

    p50: float
    p99: float
    middle: float
    slowest: float


def ways(
    events: Mapping[int, Sequence[Sent]], marks: Marks, seen: Mapping[int, Sequence[tuple[float, float]]], skip: int
) -> list[Way]:
    """Every event but the first ``skip``, in the order of sending. ``events`` and ``seen`` (when sent, when read) by
    partition, in order. Raises ``Mismatch``."""
    found: list[Way] = []
    for partition, mine in events.items():
        outputs = seen.get(partition, ())
        if [one.sent for one in mine] != [sent for sent, _ in outputs]:
            raise Mismatch(f"the outputs of partition {partition} are not those of its events, one by one")
        passed = [_passed(marks, point, partition) for point in POINTS]
        for one, (_, read) in zip(mine, outputs, strict=True):
            at = [one.appended, *(when(one.offset) for when in passed)]
            found.append(Way(one.sent, _stretches(one.sent, at, read), at[-1]))
    return sorted(found, key=lambda way: way.sent)[skip:]


def _passed(marks: Marks, point: str, partition: int) -> Callable[[int], float]:
    """When an event had passed a point: at the first mark beyond it."""
    offsets: list[int] = []
    times: list[float] = []
    for offset, seconds in marks.get(point, {}).get(partition, ()):
        if not offsets or offset > offsets[-1]:
            offsets.append(offset)
            times.append(seconds)

    def when(offset: int) -> float:
        place = bisect_right(offsets, offset)
        if place == len(times):
            raise Mismatch(f"the system does not tell when event {offset} of partition {partition} was {point}")
        return times[place]

    return when


def _stretches(sent: float, at: Sequence[float], read: float) -> tuple[float, ...]:
    """Of a way that ends where it was read: an answer that comes later than the reader's has no time of its own."""
    stops = [sent]
    for seconds in at:
        stops.append(max(stops[-1], min(seconds, read)))
    stops.append(max(stops[-1], read))
    return tuple((end - begin) * 1000 for begin, end in pairwise(stops))


def summed_up(found: Sequence[Way]) -> dict[str, Stretch]:
    """By the names of ``STRETCHES``. There must be events."""
    middle, last = _part(found, *MIDDLE), slowest(found)
    told = {}
    for number, name in enumerate(STRETCHES):
        p50, _, p99, _ = percentiles([way.stretches[number] for way in found])
        told[name] = Stretch(p50, p99, *(_mean([way.stretches[number] for way in part]) for part in (middle, last)))
    return told


def slowest(found: Sequence[Way]) -> Sequence[Way]:
    """Those with the longest whole ways: 1 %, at least one."""
    return _part(found, *SLOWEST)


def transactions(found: Sequence[Way]) -> int:
    """In how many they were committed."""
    return len({way.committed for way in found})


def _part(found: Sequence[Way], begin: float, end: float) -> Sequence[Way]:
    """Those between two shares in the order of their whole ways; at least one."""
    in_order = sorted(found, key=lambda way: way.whole)
    first = min(int(len(in_order) * begin), len(in_order) - 1)
    return in_order[first : max(int(len(in_order) * end), first + 1)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
