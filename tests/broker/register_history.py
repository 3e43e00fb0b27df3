"""Histories of a register that holds one number, and a check whether they are linearizable.

A history is *linearizable* if each operation can be given one moment between its call and its answer, so that every
read has the number of the last write before it. An operation without an answer may have happened at any moment after
its call, or not at all.
"""

from __future__ import annotations

from typing import NamedTuple


class Operation(NamedTuple):
    """``kind``: "write" or "read". ``answered``: ``None``: it never was, and for a read then nothing is known."""

    kind: str
    value: int
    called: float
    answered: float | None


def is_linearizable(history: list[Operation], first: int = 0) -> bool:
    """Search for an order (Wing and Gong), with the states that lead nowhere noted."""
    operations = [one for one in history if one.kind == "write" or one.answered is not None]
    everything = frozenset(range(len(operations)))
    needed = frozenset(index for index in everything if operations[index].answered is not None)
    seen: set[tuple[frozenset[int], int]] = set()
    waiting = [(everything, first)]
    while waiting:
        left, value = waiting.pop()
        if not left & needed:
            return True
        if (left, value) in seen:
            continue
        seen.add((left, value))
        # The next one must have been called before any other that is left was answered.
        bound = min(operations[index].answered or float("inf") for index in left & needed)
        for index in left:
            one = operations[index]
            if one.called <= bound and (one.kind == "write" or one.value == value):
                waiting.append((left - {index}, one.value))
    return False
