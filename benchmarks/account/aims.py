"""What throughput and latency of the engine should be, side by side with the loop and with peers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.drain import DrainResult
from benchmarks.measures import Aim
from benchmarks.steady import SteadyResult
from benchmarks.systems import REFERENCE
from benchmarks.tables import names, of_system, ratios, right, spread

ENGINE, ANCESTOR = "engine", "gkes"
OF_RATE = {REFERENCE: 1.0, "kafka-streams": 1.6, "quixstreams": 3.0}
"""At least so many times as fast as each; of a peer with several settings, its fastest."""
MOST_US = 4.0
"""Of processor time per event above the loop."""
RATES = (2_000, 20_000)
MOST_MS = {"p50": 10.0, "p99": 30.0}
PEERS = ("kafka-streams", "quixstreams")


def aims_of_drains(found: Sequence[DrainResult]) -> list[Aim]:
    """Of the largest backlog."""
    size = max(one.records for one in found)
    here = [one for one in found if one.records == size]
    aims = []
    for kind, least in OF_RATE.items():
        compared = {name: ratios(here, ENGINE, name, lambda one: one.per_second) for name in labels(here, kind)}
        by_name = {name: found for name, found in compared.items() if found}
        if by_name:
            name = min(by_name, key=lambda name: statistics.median(by_name[name]))
            is_met = statistics.median(by_name[name]) >= least
            aims.append(Aim(f"drain, to `{name}`", f"at least {least:g}", spread(by_name[name], ".2f"), is_met))
    extra = pairs(here, ENGINE, REFERENCE, lambda one: one.cpu_us_per_record, lambda mine, theirs: mine - theirs)
    if extra:
        is_met = statistics.median(extra) <= MOST_US
        aims.append(
            Aim(
                "drain, processor time above the loop's",
                f"at most {MOST_US:g} us",
                f"{spread(extra, '.1f')} us",
                is_met,
            )
        )
    return aims


def aims_of_latency(found: Sequence[SteadyResult]) -> list[Aim]:
    """At two rates. A run that fell behind has no latency to be compared with: it grows with the length of the run."""
    aims = []
    for rate in RATES:
        here = [one for one in found if one.rate == rate]
        mine = right(of_system(here, ENGINE))
        for name, most in MOST_MS.items() if mine else ():
            times = [getattr(one, name) for one in mine if not one.behind]
            is_met = len(times) == len(mine) and statistics.median(times) <= most
            told = f"{spread(times, '.1f')} ms" if times else "the rate was not held"
            aims.append(Aim(f"{name} at {rate:,}/s", f"at most {most:g} ms", told, is_met))
        for kind, most in ((ANCESTOR, 1.0), *((peer, 0.5) for peer in PEERS)):
            if mine and labels(here, kind):
                aims.append(_beside(here, f"p99 at {rate:,}/s, to", kind, most))
    return aims


def _beside(here: Sequence[SteadyResult], what: str, kind: str, most: float) -> Aim:
    """Of a peer with several settings, its best. Where a run fell behind there is nothing to be compared."""
    held, of_us = [one for one in here if not one.behind], right(of_system(here, ENGINE))
    if any(one.behind for one in of_us):
        return Aim(f"{what} `{kind}`", f"at most {most:g}", "the rate was not held", False)
    by_name = {name: ratios(held, ENGINE, name, lambda one: one.p99) for name in labels(here, kind)}
    compared = {name: found for name, found in by_name.items() if found}
    if not compared:
        return Aim(f"{what} `{kind}`", f"at most {most:g}", f"`{kind}` did not hold the rate, or was not right", None)
    name = max(compared, key=lambda name: statistics.median(compared[name]))
    found = compared[name]
    return Aim(f"{what} `{name}`", f"at most {most:g}", spread(found, ".2f"), statistics.median(found) <= most)


def labels(found: Sequence[Any], kind: str) -> list[str]:
    """The systems of a kind, or the one of that very label."""
    return [name for name in names(found) if kind in {name, name.partition(":")[0]}]


def pairs(
    found: Sequence[Any],
    system: str,
    reference: str,
    value: Callable[[Any], float],
    combine: Callable[[float, float], float],
) -> list[float]:
    """What comes of both values, of each round in which both were right."""
    mine, theirs = ({one.round: value(one) for one in right(of_system(found, name))} for name in (system, reference))
    return [combine(mine[turn], theirs[turn]) for turn in sorted(mine.keys() & theirs.keys())]
