"""Plan the reads: how much of which partition, and by how many tasks. Plain functions over numbers.

Positions are offsets between records: a range holds ``begin`` and everything up to, without, ``end``. Offsets without
a record (transaction markers, aborted and compacted records) count like the others, as they do for Spark's own Kafka
connector: what they hold is not known before they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from streams.records import TopicPartition

K = TypeVar("K")


class Bounds(NamedTuple):
    """The offsets that one partition's log has now.

    ``end`` is where this reader ends: the last stable offset for a reader of committed records. ``high`` is the high
    watermark; between the two are records of transactions that are still open.
    """

    first: int
    end: int
    high: int


@dataclass(frozen=True)
class TopicLog:
    """One topic as it is now. ``id`` differs between a topic and another of the same name made after it."""

    id: str
    partitions: Mapping[int, Bounds]


Logs = Mapping[str, TopicLog]
"""The topics that are there, by name."""


@dataclass(frozen=True)
class Positions:
    """The positions of a reader by partition, and the ids of the topics that this was said about."""

    ids: Mapping[str, str]
    at: Mapping[TopicPartition, int]


@dataclass
class Advance:
    """The next ranges of a reader: ``begin`` and ``end`` of each partition; ``losses``: what it should have, but
    cannot."""

    begin: dict[TopicPartition, int] = field(default_factory=dict)
    end: dict[TopicPartition, int] = field(default_factory=dict)
    losses: list[str] = field(default_factory=list)


def advance(start: Positions, logs: Logs) -> Advance:
    """Plan from ``start`` to the present ends of the logs.

    A partition or topic that ``start`` does not know is new: it is read from its beginning, which is offset 0. So one
    that ``start`` knows must not be forgotten when a broker does not know it yet: that is a loss, too. Where records
    are gone the range begins at the next one there is, and ``losses`` names it.
    """
    found = Advance()
    for topic, log in sorted(logs.items()):
        known = start.ids.get(topic)
        made_again = bool(known) and known != log.id
        if made_again:
            found.losses.append(
                f"{topic} was deleted and recreated (id {known} then, {log.id} now): {_stood(start, topic)}; what it "
                "held after that is gone"
            )
        for partition, bounds in sorted(log.partitions.items()):
            where = TopicPartition(topic, partition)
            at = 0 if made_again else start.at.get(where, 0)
            if at < bounds.first:
                if not made_again:
                    found.losses.append(f"{where}: offsets {at} to {bounds.first - 1} are gone (retention)")
                at = bounds.first
            elif at > bounds.high:
                found.losses.append(
                    f"{where}: the log ends at {bounds.high}, but had been read up to {at} (truncated or restored)"
                )
                at = bounds.end
            found.begin[where] = at
            found.end[where] = max(at, bounds.end)  # at > end: an open transaction in what was read before
        if not made_again:
            for where in sorted(where for where in start.at if where.topic == topic and where not in found.end):
                found.losses.append(
                    f"{where} is not there any more, or not chosen: it had been read up to {start.at[where]}"
                )
    for topic in sorted({where.topic for where in start.at} - set(logs)):
        found.losses.append(f"{topic} was deleted: {_stood(start, topic)}")
    return found


def between(start: Positions, end: Positions) -> Advance:
    """The ranges of a batch whose start and end are known."""
    found = Advance()
    for where, stop in sorted(end.at.items()):
        same_topic = start.ids.get(where.topic, "") in ("", end.ids.get(where.topic, ""))
        found.begin[where] = start.at.get(where, 0) if same_topic else 0
        found.end[where] = stop
    return found


def still_there(planned: Advance, ids: Mapping[str, str], logs: Logs) -> Advance:
    """Return the part that is left of ranges that were planned some time ago, about the topics with these ``ids``."""
    found = Advance()
    for where, begin in planned.begin.items():
        end = planned.end[where]
        log = logs.get(where.topic)
        bounds = log.partitions.get(where.partition) if log is not None else None
        if begin >= end:
            continue
        if log is None or bounds is None:
            found.losses.append(f"{where} was deleted before offsets {begin} to {end - 1} were read")
        elif ids.get(where.topic, log.id) != log.id:
            found.losses.append(
                f"{where.topic} was deleted and recreated (id {ids[where.topic]} then, {log.id} now) before offsets "
                f"{begin} to {end - 1} of {where} were read"
            )
        else:
            found.begin[where] = min(max(begin, bounds.first), end)
            found.end[where] = max(found.begin[where], min(end, bounds.high))
            if begin < bounds.first:
                found.losses.append(f"{where}: offsets {begin} to {found.begin[where] - 1} are gone (retention)")
            if end > bounds.high:
                found.losses.append(f"{where}: the log ends at {bounds.high}, below {end} (truncated or restored)")
    return found


def _stood(start: Positions, topic: str) -> str:
    places = sorted((where, at) for where, at in start.at.items() if where.topic == topic)
    return "it had been read up to " + ", ".join(f"{where} offset {at}" for where, at in places)


def share(waiting: Mapping[K, int], limit: int) -> dict[K, int]:
    """Divide ``limit`` among those that wait, in proportion to what waits for each.

    Each partition that waits gets something: with more of them than ``limit``, each gets 1. Otherwise exactly
    ``limit`` is given, or all there is. Keys that wait for 0 get 0.
    """
    hungry = {key: size for key, size in waiting.items() if size > 0}
    total = sum(hungry.values())
    if total <= max(limit, len(hungry)):
        return dict(waiting)
    extra = max(0, limit - len(hungry))
    rest = total - len(hungry)
    given = dict.fromkeys(waiting, 0)
    remainders = []
    for order, (key, size) in enumerate(hungry.items()):
        whole, remainder = divmod(extra * (size - 1), rest)
        given[key] = 1 + whole
        remainders.append((-remainder, order, key))
    left = len(hungry) + extra - sum(given.values())
    for _, _, key in sorted(remainders, key=lambda entry: entry[:2])[:left]:
        given[key] += 1
    return given


def split(
    spans: Mapping[K, tuple[int, int]], *, min_partitions: int | None, max_records: int | None
) -> list[tuple[K, int, int]]:
    """Cut ranges into pieces of about the same size: at least ``min_partitions`` pieces where there are that many
    offsets, none larger than ``max_records`` offsets. Empty ranges vanish. The pieces are in order."""
    sizes = {key: end - begin for key, (begin, end) in spans.items() if end > begin}
    pieces = share(sizes, min_partitions or 0)
    found = []
    for key, size in sizes.items():
        count = pieces[key] if min_partitions else 1
        if max_records is not None:
            count = max(count, -(-size // max_records))
        begin = spans[key][0]
        edges = [begin + size * number // count for number in range(count + 1)]
        found += [(key, edges[number], edges[number + 1]) for number in range(count)]
    return found
