"""Breadth-first search over all states of a configuration; the first broken invariant ends it, by a shortest trace."""

from __future__ import annotations

import gc
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, TypeVar

State = TypeVar("State")
Steps = list[tuple[str, State]]
"""What may happen next, in words, and the state it leads to."""


class Broken(Exception):
    """An invariant does not hold; the message says which, and how."""


def put(items: tuple, index: int, item: object) -> tuple:  # type: ignore[type-arg]
    """``items`` with ``item`` at ``index``."""
    return (*items[:index], item, *items[index + 1 :])


class Rules(Protocol[State]):
    """A model of a protocol, which may be without some of its rules."""

    def initial(self) -> State: ...

    def successors(self, world: State, /) -> tuple[Steps[State], Steps[State]]:
        """What leads on without faults, and what is faults and luck. Raises ``Broken``."""

    def done(self, world: State, /) -> bool: ...

    def stalled(self, world: State, /) -> str:
        """Why a state that is not done and leads nowhere is a broken one, or nothing."""


class Verdict(NamedTuple):
    """What a search found. ``trace`` is empty when every explored state holds; ``complete``: there are no others."""

    states: int
    transitions: int
    seconds: float
    complete: bool
    finished: int
    """States in which every record is processed exactly once."""
    problem: str
    trace: tuple[str, ...]

    def __str__(self) -> str:
        head = f"{self.states} states, {self.transitions} transitions, {self.seconds:.1f} s of CPU"
        if not self.problem:
            return f"{head}: holds" + ("" if self.complete else " (not all states explored)")
        steps = (f"  {number:2}. {step}" for number, step in enumerate(self.trace, 1))
        return "\n".join((f"{head}: BROKEN", *steps, f"  => {self.problem}"))


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep the garbage collector from going through all states again and again: they have no cycles."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@uncollected()
def search(model: Rules[Any], limit: int = 10_000_000) -> Verdict:
    """Explore at most ``limit`` states of ``model``, in the order of their distance from the start."""
    began = time.process_time()
    order = [model.initial()]
    seen = set(order)
    parents = array("q", [-1])
    transitions = finished = index = 0

    def verdict(problem: str = "") -> Verdict:
        spent = time.process_time() - began
        trace = steps_to(index) if problem else ()
        return Verdict(len(order), transitions, spent, index == len(order), finished, problem, trace)

    def steps_to(index: int) -> tuple[str, ...]:
        """Found again, so that the search need not keep them."""
        path = [index]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        told = []
        for before, after in zip(path[::-1], path[-2::-1], strict=False):
            steps, luck = model.successors(order[before])
            told.append(next(step for step, state in (*steps, *luck) if state == order[after]))
        return tuple(told)

    while index < len(order) and len(order) < limit:
        state = order[index]
        try:
            steps, luck = model.successors(state)
        except Broken as broken:
            return verdict(str(broken))
        if model.done(state):
            finished += 1
        elif not steps and (stuck := model.stalled(state)):
            return verdict(stuck)
        for _, after in (*steps, *luck):
            transitions += 1
            if after not in seen:
                seen.add(after)
                order.append(after)
                parents.append(index)
        index += 1
    return verdict()
