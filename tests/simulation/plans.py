"""From a seed to a plan. Profiles give every kind of trouble its share of the seeds; a plan draws its sizes besides."""

from __future__ import annotations

import random
from collections.abc import Callable

from streams.testing.simulation.faults import Conditions

from .watch import STEPS


class Plan(Conditions, frozen=True, kw_only=True):
    """One seed's world: sizes, speeds and what happens in it."""

    members: int = 2
    partitions: int = 3
    keys: int = 6
    records: int = 120
    target_batch: int = 10
    max_batch: int = 30
    pending: int = 1
    max_queued: int = 50
    patient: bool = False
    """Non-journalled store."""
    kinds: tuple[str, ...] = ("Add",)
    interjections: bool = False
    timers: bool = False
    """Some events set timers."""
    actions: tuple[tuple[float, str], ...] = ()
    call_timeout: float = 5.0
    transaction_timeout: float = 5.0
    session: float = 6.0
    strategies: tuple[tuple[str, ...], ...] = (("incremental",),)
    """What members are started with, the wanted one first; each ``migrate`` goes on to the next entry."""
    num_standbys: int = 0
    max_moves: int = 64
    preparation_timeout: float = 20.0
    leave_timeout: float = 10.0
    drain_timeout: float = 8.0
    smooth: bool = False
    """Nothing goes wrong: moves have to be quick."""


ALL_KINDS = ("Add", "Add", "Add", "Slow", "Thread", "Flaky", "Skip", "Huge", "Drop")


def _times(rng: random.Random, count: int, end: float = 30.0) -> list[float]:
    return sorted(rng.uniform(1.0, end) for _ in range(count))


def _actions(rng: random.Random, kinds: tuple[str, ...], count: int) -> tuple[tuple[float, str], ...]:
    actions = []
    for at in _times(rng, count):
        kind = rng.choice(kinds)
        name = "" if kind in ("outage", "forget", "compact") else f" a{rng.randrange(3)}"
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
    return {
        "actions": _actions(rng, ("start", "stop"), 16),
        "kinds": ("Add", "Slow"),
        "strategies": ((rng.choice(ALL_STRATEGIES[1:]),),),
    }


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
    "compact",
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
        "actions": _merged(_actions(rng, ALL_ACTIONS, 16), _traps(rng, VERBS, rng.choice((0, 3)))),
    }


VERBS = ("crash", "crash", "freeze", "freeze", "evict", "halt", "cancel", "stop", "start", "outage", "forget")


def _traps(rng: random.Random, verbs: tuple[str, ...], count: int) -> tuple[tuple[float, str], ...]:
    """Something happens to somebody in the middle of a move."""
    return tuple(
        (
            at,
            f"on {rng.choice(STEPS)} {rng.choice(verbs)} {rng.choice(('donor', 'target', 'donor', 'target', 'other'))}",
        )
        for at in _times(rng, count, 25.0)
    )


def _merged(*lists: tuple[tuple[float, str], ...]) -> tuple[tuple[float, str], ...]:
    return tuple(sorted(action for actions in lists for action in actions))


INCREMENTAL = {"strategies": (("incremental",),)}


def _moves(rng: random.Random) -> dict[str, object]:
    """Members come and go, and work on."""
    return {
        "actions": _actions(rng, ("start", "start", "stop"), 14),
        "kinds": ("Add", "Add", "Slow"),
        "drain_timeout": rng.choice((0.3, 8.0)),
        **INCREMENTAL,
    }


def _smooth_moves(rng: random.Random) -> dict[str, object]:
    """Nothing goes wrong at all: no partition may stand still for long."""
    return {
        "actions": _actions(rng, ("start", "start", "stop"), 6),
        "kinds": ("Add",),
        "hear": (0.0, 0.001),
        "post": (0.0, 0.001),
        "polls": (0.0, 0.001),
        "one_way": rng.choice((0.001, 0.005)),
        "slow_markers": 0.005,
        "smooth": True,
        **INCREMENTAL,
    }


def _struck_moves(rng: random.Random) -> dict[str, object]:
    """Donors and receivers are struck at each step of a move."""
    return {
        "actions": _merged(_actions(rng, ("start", "start", "stop"), 12), _traps(rng, VERBS, 6)),
        "kinds": rng.choice((("Add",), ("Add", "Slow"))),
        "drain_timeout": rng.choice((0.3, 8.0)),
        "members": rng.choice((2, 3)),
        **INCREMENTAL,
    }


def _unclear_moves(rng: random.Random) -> dict[str, object]:
    """Answers are lost around the transaction with the marker."""
    return {
        "actions": _merged(
            _actions(rng, ("start", "start", "stop", "compact"), 14), _traps(rng, ("crash", "freeze", "evict"), 2)
        ),
        "marker_strikes": dict.fromkeys(("flush", "send", "commit"), rng.choice((0.2, 0.4))),
        **rng.choice((LONG, {}, {})),
        **INCREMENTAL,
    }


def _overtaken(rng: random.Random) -> dict[str, object]:
    """While the donor does not know yet whether its marker is committed, the receiver writes much."""
    return {
        "actions": _actions(rng, ("start", "start", "stop", "compact"), 12),
        "partitions": 2,
        "records": 600,
        "max_batch": 5,
        "target_batch": rng.choice((1, 5)),
        "marker_strikes": {"commit": 0.7},
        **INCREMENTAL,
    }


def _slow_restores(rng: random.Random) -> dict[str, object]:
    """Copies take so long that they are late, or that everything has changed when they are ready."""
    return {
        "actions": _merged(
            _actions(rng, ("start", "start", "stop", "crash", "evict", "compact"), 14), _traps(rng, VERBS, 2)
        ),
        "tail_batch": rng.choice((5, 20)),
        "tail_pause": rng.choice((0.01, 0.05, 0.1)),
        "preparation_timeout": rng.choice((1.0, 4.0, 20.0)),
        "leave_timeout": rng.choice((1.0, 10.0)),
        "strikes": {"tail": rng.choice((0.0, 0.1))},
        **INCREMENTAL,
    }


def _pendulum(rng: random.Random) -> dict[str, object]:
    """One member comes and goes, so partitions go to and fro between the others; copies lose their places."""
    return {
        "actions": _merged(
            tuple((at, rng.choice(("start a2", "start a2", "stop a2"))) for at in _times(rng, 24)),
            _actions(rng, ("compact",), 1),
        ),
        "members": 2,
        "partitions": rng.choice((3, 5)),
        "num_standbys": rng.choice((1, 2)),
        "tail_batch": rng.choice((2, 5)),
        "strikes": {"tail": rng.choice((0.05, 0.2))},
        **INCREMENTAL,
    }


def _standbys(rng: random.Random) -> dict[str, object]:
    """Owners die, and spare copies are promoted."""
    return {
        "actions": _actions(rng, ("start", "start", "crash", "crash", "freeze", "evict", "compact"), 14),
        "members": 3,
        "num_standbys": rng.choice((1, 1, 2)),
        **INCREMENTAL,
    }


def _rolling(rng: random.Random) -> dict[str, object]:
    """All members are restarted, one after the other."""
    return {
        "actions": _merged(((rng.uniform(2.0, 8.0), "roll"),), _actions(rng, ("crash", "freeze", "evict"), 2)),
        "members": rng.choice((2, 3)),
        **INCREMENTAL,
    }


ALL_STRATEGIES = ("incremental", "cooperative-sticky", "range", "roundrobin")


def _migrations(rng: random.Random) -> dict[str, object]:
    """A running group changes its strategy by rolling restarts."""
    before, after = rng.sample(ALL_STRATEGIES, 2)
    if rng.random() < 0.7 and "incremental" not in (before, after):
        after = "incremental"
    return {
        "actions": _merged(
            ((rng.uniform(2.0, 5.0), "migrate"), (rng.uniform(15.0, 25.0), "migrate")),
            _actions(rng, ("start", "crash", "freeze", "evict"), 3),
        ),
        "members": rng.choice((2, 3)),
        "strategies": ((before,), (after, before), (after,)),
    }


def _evictions(rng: random.Random) -> dict[str, object]:
    """The group throws members out, or forgets all of them, and they come back at once."""
    return {
        "actions": _merged(_actions(rng, ("evict", "evict", "start", "stop"), 10), _traps(rng, ("evict", "forget"), 4)),
        "members": rng.choice((2, 3)),
        **INCREMENTAL,
    }


def _laggards(rng: random.Random) -> dict[str, object]:
    """Engine and membership hear of each other when much has happened since."""
    return {
        "actions": _merged(
            _actions(rng, ("start", "start", "stop", "evict", "crash", "compact"), 16),
            _traps(rng, ("evict", "stop", "start"), 3),
            tuple((at, f"on {rng.choice(('taking', 'closed'))} evict target") for at in _times(rng, 4)),
        ),
        "members": rng.choice((2, 3)),
        "hear": rng.choice(((0.0, 0.02, 1.0, 4.0), (0.0, 0.001))),
        "post": (0.0, 0.02, 1.0, 4.0),
        "marker_strikes": dict.fromkeys(("flush", "send", "commit"), rng.choice((0.0, 0.2))),
        **INCREMENTAL,
    }


def _twins(rng: random.Random) -> dict[str, object]:
    """Two processes have the same name, for a while."""
    return {
        "actions": _merged(
            _actions(rng, ("start", "twin", "stop", "crash", "freeze", "evict"), 12), _traps(rng, ("twin", "evict"), 2)
        ),
        "members": rng.choice((2, 3)),
        **INCREMENTAL,
    }


JOB_KINDS = ("Add", "Fetch", "Fetch", "Crunch", "Chained", "Turn", "Turn", "Wobbly", "Hopeless", "Slow")


def _ahead(rng: random.Random) -> dict[str, object]:
    """Work runs ahead of its turn, while members come and go, die, freeze and are thrown out."""
    verbs = ("start", "start", "stop", "crash", "freeze", "evict", "halt", "cancel", "interject")
    return {
        "kinds": tuple(rng.sample(JOB_KINDS, rng.choice((2, 4, len(JOB_KINDS))))),
        "patient": rng.random() < 0.3,
        "interjections": rng.random() < 0.5,
        "drain_timeout": rng.choice((0.3, 8.0)),
        "strikes": dict.fromkeys(("send", "commit", "flush"), rng.choice((0.0, 0.03))),
        "actions": _merged(_actions(rng, verbs, 14), _traps(rng, VERBS, rng.choice((0, 2)))),
    }


def _batches(rng: random.Random) -> dict[str, object]:
    """Lists of events, some of which fail or are refused, between others, while members come and go."""
    verbs = ("start", "start", "stop", "crash", "freeze", "evict", "interject")
    return {
        "kinds": rng.choice((("Bulk",), ("Bulk", "Bulk", "Bulk", "Add"), ("Bulk", "Bulk", "Slow", "Turn", "Flaky"))),
        "patient": rng.random() < 0.3,
        "interjections": rng.random() < 0.3,
        "max_queued": 100,
        "strikes": dict.fromkeys(("send", "commit", "flush"), rng.choice((0.0, 0.03))),
        "actions": _actions(rng, verbs, rng.choice((4, 14))),
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
    _ahead,
    _batches,
    _moves,
    _smooth_moves,
    _struck_moves,
    _unclear_moves,
    _overtaken,
    _slow_restores,
    _pendulum,
    _standbys,
    _rolling,
    _migrations,
    _evictions,
    _laggards,
    _twins,
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
        "num_standbys": rng.choice((0, 0, 1, 2)),
        "max_moves": rng.choice((1, 2, 64)),
        "tail_batch": rng.choice((20, 200)),
        "strategies": ((rng.choice(("incremental", "incremental", *ALL_STRATEGIES)),),),
    }
    timers = random.Random(f"timers {seed}").random() < 0.4
    return Plan(**{**sizes, **chosen(rng), "timers": timers})  # type: ignore[arg-type]
