"""From a seed to a plan. Profiles give every kind of trouble its share of the seeds; a plan draws its sizes besides."""

from __future__ import annotations

import random
from collections.abc import Callable

from .faults import Plan

ALL_KINDS = ("Add", "Add", "Add", "Slow", "Thread", "Flaky", "Skip", "Huge", "Drop")


def _times(rng: random.Random, count: int, end: float = 30.0) -> list[float]:
    return sorted(rng.uniform(1.0, end) for _ in range(count))


def _actions(rng: random.Random, kinds: tuple[str, ...], count: int) -> tuple[tuple[float, str], ...]:
    actions = []
    for at in _times(rng, count):
        kind = rng.choice(kinds)
        name = "" if kind in ("outage", "forget") else f" a{rng.randrange(3)}"
        actions.append((at, kind + name))
    return tuple(actions)


def _lost_replies(rng: random.Random) -> dict[str, object]:
    share = rng.choice((0.05, 0.15, 0.3))
    return {"strikes": dict.fromkeys(rng.sample(("send", "commit", "flush", "abort", "init"), 3), share)}


LONG = {"call_timeout": 2.0, "transaction_timeout": 20.0, "session": 24.0}
"""Transactions that outlive the patience with a call: what was abandoned may still have its effect."""


def _late(rng: random.Random) -> dict[str, object]:
    strikes = {"send": 0.2, "commit": 0.15, "abort": 0.3, "init": 0.3}
    return {"strikes": strikes, "members": rng.choice((1, 2)), **rng.choice((LONG, LONG, {}))}


def _slow_rebalances(rng: random.Random) -> dict[str, object]:
    """Members come and go while commits hang."""
    return {"strikes": {"send": 0.2, "commit": 0.2}, "actions": _actions(rng, ("start", "stop"), 16), **LONG}


def _rebalances(rng: random.Random) -> dict[str, object]:
    return {"actions": _actions(rng, ("start", "stop"), 16), "kinds": ("Add", "Slow")}


def _crashes(rng: random.Random) -> dict[str, object]:
    return {"actions": _actions(rng, ("start", "start", "crash", "freeze", "halt", "cancel"), 16)}


def _forgets(rng: random.Random) -> dict[str, object]:
    return {"actions": _actions(rng, ("forget", "forget", "start", "crash", "stop"), 8)}


def _outages(rng: random.Random) -> dict[str, object]:
    return {"actions": _actions(rng, ("outage", "outage", "start", "crash"), 5), "strikes": {"ask": 0.05}}


def _handlers(rng: random.Random) -> dict[str, object]:
    return {
        "kinds": ALL_KINDS,
        "interjections": True,
        "patient": rng.random() < 0.4,
        "actions": _actions(rng, ("interject", "interject", "start", "stop"), 14),
        "calm_at": 30.0,
    }


def _refused_under_way(rng: random.Random) -> dict[str, object]:
    """Events that the broker refuses, while slow ones run and partitions move."""
    return {
        "kinds": ("Add", "Slow", "Slow", "Huge"),
        "actions": _actions(rng, ("start", "stop", "interject"), 14),
        "max_batch": 10,
        "target_batch": 3,
        "strikes": {"commit": 0.05, "flush": 0.05},
    }


ALL_ACTIONS = (
    "start",
    "start",
    "stop",
    "halt",
    "cancel",
    "crash",
    "freeze",
    "outage",
    "forget",
    "interject",
    "interject",
)


def _everything(rng: random.Random) -> dict[str, object]:
    share = rng.choice((0.01, 0.03))
    return {
        "kinds": ALL_KINDS,
        "interjections": rng.random() < 0.5,
        "patient": rng.random() < 0.2,
        "strikes": dict.fromkeys(("send", "commit", "flush", "abort", "init", "ask"), share),
        "actions": _actions(rng, ALL_ACTIONS, 16),
    }


def _storm(rng: random.Random) -> dict[str, object]:
    """Everything, and much of it."""
    return {
        **_everything(rng),
        "strikes": dict.fromkeys(("send", "commit", "flush", "abort", "init", "ask"), 0.12),
        "actions": _actions(rng, ALL_ACTIONS, 50),
        **rng.choice((LONG, {})),
    }


PROFILES: tuple[Callable[[random.Random], dict[str, object]], ...] = (
    _lost_replies,
    _late,
    _rebalances,
    _slow_rebalances,
    _crashes,
    _forgets,
    _outages,
    _handlers,
    _refused_under_way,
    _everything,
    _storm,
)


def plan_of(seed: int, profile: str = "") -> Plan:
    """The plan of a seed; seeds take the profiles in turn, unless one is named."""
    rng = random.Random(f"plan {seed}")
    chosen = {made.__name__.strip("_"): made for made in PROFILES}.get(profile) or PROFILES[seed % len(PROFILES)]
    max_batch = rng.choice((5, 30, 100))
    sizes: dict[str, object] = {
        "members": rng.choice((1, 2, 2, 3)),
        "partitions": rng.choice((1, 2, 3, 5)),
        "keys": rng.choice((2, 6, 20)),
        "records": rng.choice((60, 150, 300)),
        "one_way": rng.choice((0.001, 0.005, 0.02)),
        "grid": rng.choice((0.0, 0.001, 0.005)),
        "queue_limit": rng.choice((3, 1_000)),
        "max_batch": max_batch,
        "target_batch": rng.randint(1, max_batch),
        "pending": rng.choice((1, 1, 2)),
        "max_queued": rng.choice((5, 100)),
        "slow_markers": rng.choice((0.005, 0.1)),
    }
    return Plan(**{**sizes, **chosen(rng)})  # type: ignore[arg-type]
