"""Runs at fixed rates: what each of them is told by, and systems in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec

from benchmarks.cluster import Cluster
from benchmarks.systems import System

if TYPE_CHECKING:
    from benchmarks.bench import Bench


class AtRate(msgspec.Struct, frozen=True):
    """One run by one system. ``fault``: what was not exactly once, or that the system failed; then there is no
    figure."""

    system: str
    round: int
    rate: int
    seconds: float
    seed: int
    fault: str


R = TypeVar("R", bound=AtRate)
Run = Callable[[Cluster, System, int, int, float, int], R]
"""Of cluster, system, seed, rate, seconds and round."""


def runs_at(
    bench: Bench,
    what: str,
    run: Run[R],
    result: type[R],
    rate: int,
    seconds: float,
    rounds: int,
    systems: Sequence[System] | None = None,
) -> Iterator[R]:
    """All systems (or these) in turn at one rate."""

    def one(system: System, turn: int) -> R:
        return run(bench.cluster, system, bench.seed + turn, rate, seconds, turn)

    def failed(system: System, turn: int, why: str) -> R:
        return result(system.label, turn, rate, seconds, bench.seed + turn, why)

    yield from bench.in_turn(f"{what} at {rate:,}/s", rounds, one, failed, systems)
