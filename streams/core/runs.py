"""Merge the queued records of several inputs, run by run. A leaf (``sak/leaves.py``).

A run is some records of one input in a row. ``core/merging.py`` decides which input comes next; what it would answer
run after run, while nothing new is known of any input, is found here at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

from streams.core.origin import OF_EACH_INPUT
from streams.records import Change, IncomingRecord, Output
from streams.sak import leaves

Run: TypeAlias = tuple[int, int, int, int]
"""The number of its input; its end among the records; its first offset, and the one behind its last."""

CLASSES: Final = (Change, IncomingRecord, Output)
"""Whose fields are read by their places in memory when this is compiled."""


def merge(
    input_numbers: list[int], batches: list[list[IncomingRecord]], starts: list[int], most: int
) -> tuple[list[IncomingRecord], list[Run]]:
    """Return the next records of these inputs, ``most`` of them at most, and their runs: as ``merging.next_input``
    takes them, the oldest first, ties by number. ``input_numbers`` ascend; ``batches``: the first records that each has
    queued, from ``starts`` on. The last one of a batch ends it: what is behind is not known here."""
    heads, at = [], list(starts)
    for number, start in enumerate(starts):
        record = batches[number][start]
        heads.append(record.timestamp_ms)
    records: list[IncomingRecord] = []
    runs: list[Run] = []
    count = len(heads)
    taken = 0
    while taken < most:
        oldest = 0
        for number in range(1, count):
            if heads[number] < heads[oldest]:  # at one time the input that was declared first comes first
                oldest = number
        until_ms = 1 << 62
        for number in range(count):
            if number != oldest:
                # In front of an input that was declared before this one, the run ends a millisecond earlier.
                limit = heads[number] - (number < oldest)
                if limit < until_ms:
                    until_ms = limit
        batch = batches[oldest]
        size = len(batch)
        first = at[oldest]
        position, stop = first + 1, min(size, first + most - taken)
        while position < stop:
            record = batch[position]
            if record.timestamp_ms > until_ms:
                break
            position += 1
        records += batch[first:position]
        taken += position - first
        record = batch[first]
        last = batch[position - 1]
        runs.append((input_numbers[oldest], taken, record.offset, last.offset + 1))
        if position == size:  # the next record of this input is not known: it may be the oldest of all
            break
        at[oldest] = position
        record = batch[position]
        heads[oldest] = record.timestamp_ms
    return records, runs


def advance(records: list[IncomingRecord], runs: Sequence[Run], stop: int, offsets: list[int]) -> list[Run]:
    """Return the runs of the records up to ``stop``, and set the offsets behind them, by the places of the inputs."""
    done: list[Run] = []
    start = 0
    for input_number, end, first, behind in runs:
        if start == stop:
            break
        if end > stop:
            last = records[stop - 1]
            end, behind = stop, last.offset + 1
        done.append((input_number, end, first, behind))
        offsets[input_number] = behind
        start = end
    return done


def count(runs: Sequence[Run], stop: int, counts: list[int]) -> int:
    """Add the records up to ``stop`` to the counts, by the numbers of their inputs. Returns that of the last one's
    input."""
    start = last = 0
    for input_number, end, _, _ in runs:
        if start == stop:
            break
        end = min(end, stop)
        counts[input_number] += end - start
        start, last = end, input_number
    return last


def name_input(
    input_number: int,
    outputs: list[Output],
    sent: int,
    stop_sent: int,
    changes: list[Change],
    written: int,
    stop_written: int,
) -> None:
    """Name the input in the origins of these effects, which are the bare offsets of its events. Those below 0 belong to
    no input."""
    if not input_number:
        return
    shift = input_number * OF_EACH_INPUT
    while sent < stop_sent:
        output = outputs[sent]
        if output.origin >= 0:
            output.origin += shift
        sent += 1
    while written < stop_written:
        change = changes[written]
        if change.origin >= 0:
            change.origin += shift
        written += 1


leaves.use(globals())
