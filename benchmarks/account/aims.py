"""The aims for throughput and latency of the engine, side by side with the loops and with peers."""

from __future__ import annotations

import operator
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.account.report import held, reference_of
from benchmarks.drain import DrainResult
from benchmarks.measures import Aim, at_least, at_most
from benchmarks.steady import SteadyResult
from benchmarks.systems import REFERENCE
from benchmarks.tables import names, of_system, ratios, right

ENGINE = "engine"
OF_RATE = {REFERENCE: 1.2, "kafka-streams": 2.0, "quixstreams": 4.0}
"""At least so many times as fast as each; of a peer with several settings, its fastest."""
MOST_US = 2.0
"""Of processor time per event above the loop."""
OF_CPU = 1.1
"""Of the loop's processor time per event, all threads."""
OF_BEFORE = 1.3
"""Of the rate of a checkout of the engine that is compared with; its broker must not have had less to do."""
MOST_MS = {2_000: {"p50": 10.0, "p99": 30.0}, 20_000: {"p50": 20.0, "p99": 100.0}}
"""By rate."""
OF_TIME = {("p50", "gkes"): 1.0, ("p99", "gkes"): 1.0, ("p99", "kafka-streams"): 0.5, ("p99", "quixstreams"): 0.5}
"""At most this part of the time of each; of a peer with several settings, its best."""
OF_LOOP = 0.8
"""Of the throughput of the asyncio loop."""


def aims_of_drains(found: Sequence[DrainResult]) -> list[Aim]:
    """Compare the rates of the largest backlog, and the processor time."""
    size = max(one.records for one in found)
    here = [one for one in found if one.records == size]
    aims = []
    for kind, least in OF_RATE.items():
        if best := _beside(here, kind, lambda one: one.per_second, min):
            aims.append(at_least(f"drain, to `{best[0]}`", least, best[1]))
    by_hand = {one.round: one.cpu_us_per_record for one in right(of_system(here, REFERENCE))}
    mine = right(of_system(here, ENGINE))
    if extra := [one.cpu_us_per_record - by_hand[one.round] for one in mine if one.round in by_hand]:
        aims.append(at_most("drain, processor time above the loop's", MOST_US, extra, "us"))
        shares = ratios(here, ENGINE, REFERENCE, lambda one: one.cpu_us_per_record)
        aims.append(at_most("drain, processor time to the loop's", OF_CPU, shares))
    for name in (name for name in names(here) if name.startswith(f"{ENGINE}@")):
        faster = ratios(here, ENGINE, name, lambda one: one.per_second)
        lighter = ratios(here, ENGINE, name, lambda one: one.broker_cpu_us_per_record)
        if faster:
            aims.append(at_least(f"drain, to `{name}`", OF_BEFORE, faster))
            aims.append(at_most(f"drain, the broker's processor time to `{name}`", 1.0, lighter))
    return aims


def aims_of_live(found: Sequence[SteadyResult]) -> list[Aim]:
    """Look whether the engine held the rate in the most partitions."""
    mine = of_system([one for one in found if one.partitions == max(one.partitions for one in found)], ENGINE)
    if not mine:
        return []
    kept = len(held(right(mine)))
    what = f"{mine[0].rate:,}/s in {mine[0].partitions} partitions"
    return [Aim(what, "held", f"{kept} of {len(mine)} runs", kept == len(mine))]


def aims_of_latency(found: Sequence[SteadyResult]) -> list[Aim]:
    """Compare latencies at two rates. A run that fell behind has none: it would grow with the length of the run."""
    aims = []
    for rate, limits in MOST_MS.items():
        here = [one for one in found if one.rate == rate]
        mine = right(of_system(here, ENGINE))
        for name, most in limits.items() if mine else ():
            times = [getattr(one, name) for one in held(mine)]
            aims.append(at_most(f"{name} at {rate:,}/s", most, times if mine == held(mine) else [], "ms"))
        for (name, kind), part in OF_TIME.items() if mine else ():
            best = _beside(held(here), kind, operator.attrgetter(name), max)
            if mine != held(mine) and _labels(here, kind):
                aims.append(at_most(f"{name} at {rate:,}/s, to `{kind}`", part, []))
            elif best:
                aims.append(at_most(f"{name} at {rate:,}/s, to `{best[0]}`", part, best[1]))
            elif _labels(here, kind):
                told = f"`{kind}` did not hold the rate, or was not right"
                aims.append(Aim(f"{name} at {rate:,}/s, to `{kind}`", f"at most {part:g}", told, None))
    return aims


def aims_of_async(found: Sequence[DrainResult]) -> list[Aim]:
    """Compare with the asyncio loop of the same number of slots."""
    aims = []
    for name in names(found):
        reference = reference_of(name, names(found))
        compared = ratios(found, name, reference, lambda one: one.per_second)
        if compared and name.startswith(("scheduler", "concurrency")):
            aims.append(at_least(f"async work, `{name}` to `{reference}`", OF_LOOP, compared))
    return aims


def _labels(found: Sequence[Any], kind: str) -> list[str]:
    """Select the systems of a kind, or the one of that very label."""
    return [name for name in names(found) if kind in {name, name.partition(":")[0]}]


def _beside(
    found: Sequence[Any], kind: str, value: Callable[[Any], float], worst: Callable[..., str]
) -> tuple[str, list[float]] | None:
    """Return the ratios of the engine to the best system of a kind, with its label."""
    by_name = {name: ratios(found, ENGINE, name, value) for name in _labels(found, kind)}
    compared = {name: found for name, found in by_name.items() if found}
    if not compared:
        return None
    name = worst(compared, key=lambda name: statistics.median(compared[name]))
    return name, compared[name]
