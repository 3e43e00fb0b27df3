"""Decide which input of a partition comes next: one pure function over what is known of each input now.

An input is a topic that an event source reads; partition p of all its inputs has one order. Kafka gives none between
topics, and none is promised: time is a preference, the committed positions are the truth. The order of the questions is
the point.

1. A joined table that was not read up to its end yet: no event meets half a table.
2. Requests for visits; the loop's records: what was begun is finished before more is taken in.
3. The input whose next record is the oldest, up to the next record of another input; ties by order of declaration.

An input that has nothing here, and is not known to be at its end, may have an older record on its way: the others wait
for it, for a bounded time, once. The wait begins when it has nothing (``missing_since``) and is over for good when the
time is; a record or an end of it, and nothing else, makes it an input that is waited for again. So an input that is at
its end, silent, or whose broker is away holds up the others no longer than that.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from streams.records import IncomingRecord


class InputKind(enum.Enum):
    """The kind of an input. ``UNREAD_TABLE``: a joined table until its records up to the end that it had at the
    take-over are handled; an ``EVENTS`` input from then on."""

    LOOP = "loop"
    UNREAD_TABLE = "unread table"
    EVENTS = "events"


_LOOP, _UNREAD = InputKind.LOOP, InputKind.UNREAD_TABLE  # found faster than by the names of their class


class InputHead(NamedTuple):
    """One input of a partition. ``next_ms``: the time of its next record, ``None``: it has none here.
    ``missing_since``: since when it has none and is not known to be at its end; ``None``: it has one, or is there."""

    kind: InputKind
    next_ms: int | None
    missing_since: float | None = None


class Take(NamedTuple):
    """Records of this input (its place in the order of declaration) come next: the first one, and those behind it up to
    one that is younger than ``until_ms`` (``None``: all)."""

    input_number: int
    until_ms: int | None


class Wait(NamedTuple):
    """Nothing may be handled before something new is known, or before ``until`` (``None``: however long that takes).
    ``missing``: the places of the inputs that are waited for; empty: no input has a record."""

    until: float | None
    missing: tuple[int, ...]


def next_input(inputs: Sequence[InputHead], now: float, patience_seconds: float) -> Take | Wait:
    """Decide what comes next. ``inputs``: in the order of their declarations; ``patience_seconds``: the wait for one
    that is missing."""
    heads: list[tuple[int, int]] = []
    unread: list[int] = []
    awaited: dict[int, float] = {}
    table = loop = None  # the first one of the kind that has a record here
    for number, (kind, next_ms, missing_since) in enumerate(inputs):  # one pass: each run of records takes one
        if next_ms is not None:
            heads.append((next_ms, number))
            if kind is _LOOP and loop is None:
                loop = number
            elif kind is _UNREAD and table is None:
                table = number
        elif missing_since is not None and missing_since + patience_seconds > now:
            awaited[number] = missing_since + patience_seconds
        if kind is _UNREAD:
            unread.append(number)
    if not heads:
        return Wait(None, tuple(unread))
    if unread:  # before all else: no event may meet half a table
        return Wait(None, tuple(unread)) if table is None else Take(table, None)
    if loop is not None:  # without a wait for others: what was begun is finished before more is taken in
        return Take(loop, None)
    if awaited:
        # The loop alone if it is late: its records come before those of the others, whatever their time.
        late = {number: until for number, until in awaited.items() if inputs[number].kind is _LOOP}
        return _wait(late or awaited)
    _, oldest = min(heads)
    # Of records of one time those of the input that was declared first come first. So in front of such an input the run
    # ends a millisecond earlier.
    return Take(
        oldest, min((next_ms - (number < oldest) for next_ms, number in heads if number != oldest), default=None)
    )


def _wait(awaited: Mapping[int, float]) -> Wait:
    return Wait(min(awaited.values()), tuple(awaited))


def run_length(records: Sequence[IncomingRecord], start: int, stop: int, until_ms: int | None) -> int:
    """Return how many of the records from ``start`` to ``stop`` a ``Take`` goes: one at least. Times need not ascend:
    the run ends in front of the first one that is younger."""
    if until_ms is None:
        return stop - start
    position = start + 1
    while position < stop and records[position].timestamp_ms <= until_ms:
        position += 1
    return position - start
