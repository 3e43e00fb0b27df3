"""Breadth-first search over all states of a configuration; the first broken invariant ends it, by a shortest trace."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Hashable
from typing import NamedTuple, TypeVar

from .actions import describe, successors
from .rules import Model
from .state import Broken, World, done, initial

State = TypeVar("State", bound=Hashable)
Step = tuple[tuple[object, ...], State]
Steps = tuple[list[Step[State]], list[Step[State]]]
"""What leads on without faults, and what is faults and luck."""


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


def search(model: Model, limit: int = 10_000_000) -> Verdict:
    """Explore at most ``limit`` states of ``model``, in the order of their distance from the start."""
    return explore(
        initial(model.config),
        successors=lambda world: successors(world, model),
        done=lambda world: done(world, model.config),
        stalled=_stalled,
        describe=lambda label: describe(label, model),
        limit=limit,
    )


def _stalled(world: World) -> str:
    """Why a state that leads nowhere is a broken one."""
    if any(member.alive for member in world.members):
        return "stalled: records are open, and without another fault, restart or timeout nothing happens any more"
    return ""


def explore(
    start: State,
    *,
    successors: Callable[[State], Steps[State]],
    done: Callable[[State], bool],
    stalled: Callable[[State], str],
    describe: Callable[[tuple[object, ...]], str],
    limit: int,
) -> Verdict:
    """The search itself. ``stalled`` is asked of states that are not done and lead nowhere."""
    began = time.process_time()
    seen = {start: 0}
    order = [start]
    parents = array("q", [-1])
    transitions = finished = index = 0

    def verdict(problem: str = "", trace: tuple[str, ...] = ()) -> Verdict:
        spent = time.process_time() - began
        return Verdict(len(order), transitions, spent, index == len(order), finished, problem, trace)

    def trace(index: int) -> tuple[str, ...]:
        """The steps that lead to a state: found again, so that the search need not keep them."""
        path = [index]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        sentences = []
        for before, after in zip(path[::-1], path[-2::-1], strict=False):
            steps, luck = successors(order[before])
            label = next(label for label, state in (*steps, *luck) if state == order[after])
            sentences.append(describe(label))
        return tuple(sentences)

    while index < len(order) and len(order) < limit:
        state = order[index]
        try:
            steps, luck = successors(state)
        except Broken as broken:
            return verdict(str(broken), trace(index))
        if done(state):
            finished += 1
        elif not steps and (stuck := stalled(state)):
            return verdict(stuck, trace(index))
        for group in (steps, luck):
            for _, after in group:
                transitions += 1
                if after not in seen:
                    seen[after] = len(order)
                    order.append(after)
                    parents.append(index)
        index += 1
    return verdict()
