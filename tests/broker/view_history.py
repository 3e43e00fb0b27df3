"""The judge of what views answered: the history of each key is a register, written by commits and read by views."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from streams import IncomingRecord


class Read(NamedTuple):
    """An answer, with the offsets below which everything had to be in it. ``reader``: its answers must not go back."""

    reader: str
    key: str
    value: bytes | None
    floors: Mapping[int, int]


def wrong_reads(reads: Iterable[Read], committed: Iterable[IncomingRecord]) -> list[str]:
    """Say what is wrong with the reads, which are in their order, for each reader. ``committed``: all that was, in the
    order of the log; the values of a key must all differ."""
    places: dict[str, dict[bytes | None, int]] = defaultdict(lambda: {None: 0})
    offsets: dict[str, list[tuple[int, int]]] = defaultdict(lambda: [(0, -1)])
    for record in committed:
        key = (record.key or b"").decode(errors="replace")
        assert record.value not in places[key], f"{record.where}: {key} had {record.value!r} before"
        places[key][record.value] = len(offsets[key])
        offsets[key].append((record.partition, record.offset))
    last: dict[tuple[str, str], int] = defaultdict(int)
    wrong = []
    for read in reads:
        place = places[read.key].get(read.value)
        if place is None:
            wrong.append(f"dirty: {read}")
            continue
        if place < last[read.reader, read.key]:
            wrong.append(f"backwards from {offsets[read.key][last[read.reader, read.key]]}: {read}")
        last[read.reader, read.key] = place
        missed = [at for at in offsets[read.key][place + 1 :] if at[1] < read.floors.get(at[0], 0)]
        if missed:
            wrong.append(f"stale, {missed[-1]} was there: {read}")
    return wrong
