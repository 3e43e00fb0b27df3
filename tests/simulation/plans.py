"""From a seed to a plan. Profiles give every kind of trouble its share of the seeds; a plan draws its sizes besides."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

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
    structures: bool = False
    """A store of several structures: the plain table, indexed, and windows and entries that expire beside it."""
    kinds: tuple[str, ...] = ("Add",)
    ahead: bool = True
    """Work of some kind may run ahead of its turn. Without it partitions handle records where they are delivered."""
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
    nodes: int = 1
    transaction_version: int = 2
    verifies: bool = True
    kills: float = 0.0
    """Share of the wire's requests at which their process is killed, right before or after."""
    moved: float = 0.0
    """Share of the rebalances in whose middle, between JoinGroup and SyncGroup, the group moves."""
    kept: bool = False
    """State is kept in one folder on disk, by all members: they are processes of one machine."""
    on_disk: bool = False
    """The store is on SQLite, in that folder."""
    snapshots: bool = False
    """Each member has a machine of its own, which is lost with its disk in a crash; snapshots are in one place."""
    smooth: bool = False
    """Nothing goes wrong: moves have to be quick."""
    parks: bool = False
    """Some events are parked, and handled in a later attempt."""
    once: bool = False
    """Some events are handled once, by an id that others have, too."""
    jobs: bool = False
    """Some events start durable jobs, or cancel them."""
    struck: bool = False
    """An operator acts on parked keys, events end processes that try them, and some have no key."""


ALL_KINDS = ("Add", "Add", "Add", "Slow", "Thread", "Flaky", "Skip", "Huge", "Drop")
JOB_KINDS = ("Add", "Fetch", "Fetch", "Crunch", "Chained", "Turn", "Turn", "Wobbly", "Hopeless", "Slow")
AHEAD = frozenset(
    ("Fetch", "Crunch", "Chained", "Turn", "Wobbly", "Hopeless", "ParkedTurn", "ParkedFetch", "SingleTurn")
)
PARKED_KINDS = ("Parked", "ParkedTurn", "ParkedFetch", "ParkedBulk", "Add")
ONCE_KINDS = ("Single", "Single", "SingleTurn", "SingleBulk", "Add")
JOBS_KINDS = ("Hire", "Hire", "HireNamed", "HireNamed", "Fire", "HireThread", "HireFails", "HireDeath", "Add")
STRUCK_KINDS = (*PARKED_KINDS[:-1], "ParkedDeath", "Add")
BULK_KINDS = (("Bulk",), ("Bulk", "Bulk", "Bulk", "Add"), ("Bulk", "Bulk", "Slow", "Turn", "Flaky"))
CALLS = ("send", "commit", "flush", "abort", "init", "ask", "member", "leader")
COMING = ("start", "start", "stop")
ALL_ACTIONS = (
    *(*COMING, "halt", "cancel", "crash", "freeze", "outage", "forget", "move", "compact"),
    *("interject", "interject"),
)
VERBS = ("crash", "crash", "freeze", "freeze", "evict", "halt", "cancel", "stop", "start", "outage", "forget", "move")
ALL_STRATEGIES = ("incremental", "cooperative-sticky", "range", "roundrobin")
LONG: dict[str, Any] = {"call_timeout": 2.0, "transaction_timeout": 20.0, "session": 24.0}
"""Transactions that outlive the patience with a call: what was abandoned may still have its effect."""
MOSTLY_V1 = (1, 1, 2)
"""Versions of transactions: under v2 an end without an answer is requested again, so hardly an outcome is unclear."""

Actions = tuple[tuple[float, str], ...]


def _times(rng: random.Random, count: int, end: float = 30.0) -> list[float]:
    return sorted(rng.uniform(1.0, end) for _ in range(count))


def _actions(rng: random.Random, kinds: tuple[str, ...], count: int) -> Actions:
    actions = []
    for at in _times(rng, count):
        kind = rng.choice(kinds)
        name = "" if kind in ("outage", "forget", "move", "compact", "operate") else f" a{rng.randrange(3)}"
        actions.append((at, kind + name))
    return tuple(actions)


def _traps(rng: random.Random, verbs: tuple[str, ...], count: int) -> Actions:
    """Something happens to somebody in the middle of a move."""
    who = ("donor", "target", "donor", "target", "other")
    return tuple(
        (at, f"on {rng.choice(STEPS)} {rng.choice(verbs)} {rng.choice(who)}") for at in _times(rng, count, 25.0)
    )


def _merged(*lists: Actions) -> Actions:
    return tuple(sorted(action for actions in lists for action in actions))


def _lost_replies(rng: random.Random) -> dict[str, Any]:
    share = rng.choice((0.05, 0.15, 0.3))
    return {"strikes": dict.fromkeys(rng.sample(CALLS[:5], 3), share)}


def _everything(rng: random.Random) -> dict[str, Any]:
    share = rng.choice((0.01, 0.03))
    return {
        "kinds": ALL_KINDS,
        "interjections": rng.random() < 0.5,
        "patient": rng.random() < 0.2,
        "strikes": dict.fromkeys(CALLS, share),
        "actions": _merged(_actions(rng, ALL_ACTIONS, 16), _traps(rng, VERBS, rng.choice((0, 3)))),
    }


def _migrations(rng: random.Random) -> dict[str, Any]:
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


Profiles = dict[str, Callable[[random.Random], dict[str, Any]]]
WORK: Profiles = {
    "lost_replies": _lost_replies,
    "late": lambda rng: {
        "strikes": {"send": 0.2, "commit": 0.15, "abort": 0.3, "init": 0.3},
        "members": rng.choice((1, 2)),
        "transaction_version": rng.choice(MOSTLY_V1),
        **rng.choice((LONG, LONG, {})),
    },
    "rebalances": lambda rng: {
        "actions": _actions(rng, ("start", "stop"), 16),
        "kinds": ("Add", "Slow"),
        "strategies": ((rng.choice(ALL_STRATEGIES[1:]),),),
    },
    # Members come and go while commits hang.
    "slow_rebalances": lambda rng: {
        "strikes": {"send": 0.2, "commit": 0.2},
        "actions": _actions(rng, ("start", "stop"), 16),
        **LONG,
    },
    "crashes": lambda rng: {"actions": _actions(rng, ("start", "start", "crash", "freeze", "halt", "cancel"), 16)},
    "forgets": lambda rng: {"actions": _actions(rng, ("forget", "forget", "start", "crash", "stop"), 8)},
    "outages": lambda rng: {
        "actions": _actions(rng, ("outage", "outage", "start", "crash"), 5),
        "strikes": {"ask": 0.05},
    },
    "handlers": lambda rng: {
        "kinds": ALL_KINDS,
        "interjections": True,
        "patient": rng.random() < 0.4,
        "actions": _actions(rng, ("interject", "interject", "start", "stop"), 14),
        "calm_at": 30.0,
    },
    # Events that the broker refuses, while slow ones run and partitions move.
    "refused_under_way": lambda rng: {
        "kinds": ("Add", "Slow", "Slow", "Huge"),
        "actions": _actions(rng, ("start", "stop", "interject"), 14),
        "max_batch": 10,
        "target_batch": 3,
        "strikes": {"commit": 0.05, "flush": 0.05},
    },
    "everything": _everything,
    # Everything, and much of it.
    "storm": lambda rng: {
        **_everything(rng),
        "strikes": dict.fromkeys(CALLS, 0.12),
        "actions": _actions(rng, ALL_ACTIONS, 50),
        **rng.choice((LONG, {})),
    },
    # Work runs ahead of its turn, while members come and go, die, freeze and are thrown out.
    "ahead": lambda rng: {
        "kinds": tuple(rng.sample(JOB_KINDS, rng.choice((2, 4, len(JOB_KINDS))))),
        "patient": rng.random() < 0.3,
        "interjections": rng.random() < 0.5,
        "drain_timeout": rng.choice((0.3, 8.0)),
        "strikes": dict.fromkeys(("send", "commit", "flush"), rng.choice((0.0, 0.03))),
        "actions": _merged(
            _actions(rng, (*COMING, "crash", "freeze", "evict", "halt", "cancel", "interject"), 14),
            _traps(rng, VERBS, rng.choice((0, 2))),
        ),
    },
    # Lists of events, some of which fail or are refused, between others, while members come and go.
    "batches": lambda rng: {
        "kinds": rng.choice(BULK_KINDS),
        "patient": rng.random() < 0.3,
        "interjections": rng.random() < 0.3,
        "max_queued": 100,
        "strikes": dict.fromkeys(("send", "commit", "flush"), rng.choice((0.0, 0.03))),
        "actions": _actions(rng, (*COMING, "crash", "freeze", "evict", "interject"), rng.choice((4, 14))),
    },
}
MOVES: Profiles = {
    # Members come and go, and work on.
    "moves": lambda rng: {
        "actions": _actions(rng, COMING, 14),
        "kinds": ("Add", "Add", "Slow"),
        "drain_timeout": rng.choice((0.3, 8.0)),
    },
    # Nothing goes wrong at all: no partition may stand still for long.
    "smooth_moves": lambda rng: {
        "actions": _actions(rng, COMING, 6),
        "kinds": ("Add",),
        "hear": (0.0, 0.001),
        "post": (0.0, 0.001),
        "polls": (0.0, 0.001),
        "one_way": rng.choice((0.001, 0.005)),
        "slow_markers": 0.005,
        "smooth": True,
    },
    # Donors and receivers are struck at each step of a move.
    "struck_moves": lambda rng: {
        "actions": _merged(_actions(rng, COMING, 12), _traps(rng, VERBS, 6)),
        "kinds": rng.choice((("Add",), ("Add", "Slow"))),
        "drain_timeout": rng.choice((0.3, 8.0)),
        "members": rng.choice((2, 3)),
    },
    # Answers are lost around the transaction with the marker.
    "unclear_moves": lambda rng: {
        "actions": _merged(_actions(rng, (*COMING, "compact"), 14), _traps(rng, ("crash", "freeze", "evict"), 2)),
        "marker_strikes": dict.fromkeys(("flush", "send", "commit"), rng.choice((0.2, 0.4))),
        "transaction_version": rng.choice(MOSTLY_V1),
        **rng.choice((LONG, {}, {})),
    },
    # While the donor does not know yet whether its marker is committed, the receiver writes much.
    "overtaken": lambda rng: {
        "actions": _actions(rng, (*COMING, "compact"), 12),
        "partitions": 2,
        "records": 600,
        "max_batch": 5,
        "target_batch": rng.choice((1, 5)),
        "marker_strikes": {"commit": 0.7},
        "transaction_version": rng.choice(MOSTLY_V1),
    },
    # Copies take so long that they are late, or that everything has changed when they are ready.
    "slow_restores": lambda rng: {
        "actions": _merged(_actions(rng, (*COMING, "crash", "evict", "compact"), 14), _traps(rng, VERBS, 2)),
        "tail_batch": rng.choice((5, 20)),
        "tail_pause": rng.choice((0.01, 0.05, 0.1)),
        "preparation_timeout": rng.choice((1.0, 4.0, 20.0)),
        "leave_timeout": rng.choice((1.0, 10.0)),
        "strikes": {"tail": rng.choice((0.0, 0.1))},
    },
    # One member comes and goes, so partitions go to and fro between the others; copies lose their places.
    "pendulum": lambda rng: {
        "actions": _merged(
            tuple((at, rng.choice(("start a2", "start a2", "stop a2"))) for at in _times(rng, 24)),
            _actions(rng, ("compact",), 1),
        ),
        "members": 2,
        "partitions": rng.choice((3, 5)),
        "num_standbys": rng.choice((1, 2)),
        "tail_batch": rng.choice((2, 5)),
        "strikes": {"tail": rng.choice((0.05, 0.2))},
    },
    # Owners die, and spare copies are promoted.
    "standbys": lambda rng: {
        "actions": _actions(rng, ("start", "start", "crash", "crash", "freeze", "evict", "compact"), 14),
        "members": 3,
        "num_standbys": rng.choice((1, 1, 2)),
    },
    # All members are restarted, one after the other.
    "rolling": lambda rng: {
        "actions": _merged(((rng.uniform(2.0, 8.0), "roll"),), _actions(rng, ("crash", "freeze", "evict"), 2)),
        "members": rng.choice((2, 3)),
    },
    "migrations": _migrations,
    # The group throws members out, or forgets all of them, and they come back at once.
    "evictions": lambda rng: {
        "actions": _merged(_actions(rng, ("evict", "evict", "start", "stop"), 10), _traps(rng, ("evict", "forget"), 4)),
        "members": rng.choice((2, 3)),
    },
    # Engine and membership hear of each other when much has happened since.
    "laggards": lambda rng: {
        "actions": _merged(
            _actions(rng, (*COMING, "evict", "crash", "compact"), 16),
            _traps(rng, ("evict", "stop", "start"), 3),
            tuple((at, f"on {rng.choice(('taking', 'closed'))} evict target") for at in _times(rng, 4)),
        ),
        "members": rng.choice((2, 3)),
        "hear": rng.choice(((0.0, 0.02, 1.0, 4.0), (0.0, 0.001))),
        "post": (0.0, 0.02, 1.0, 4.0),
        "marker_strikes": dict.fromkeys(("flush", "send", "commit"), rng.choice((0.0, 0.2))),
    },
    # What members and take-overs ask is lost, late, torn, doubled or refused; the group moves to other coordinators, or
    # to one without memory.
    "coordinators": lambda rng: {
        "actions": _merged(
            _actions(rng, (*COMING, "move", "move", "forget", "freeze", "crash"), 14),
            _traps(rng, ("move", "freeze", "crash"), 3),
        ),
        "members": rng.choice((2, 3)),
        "moved": rng.choice((0.0, 0.1, 0.3)),
        "strikes": {"member": rng.choice((0.02, 0.1)), "leader": 0.05, "ask": rng.choice((0.0, 0.05))},
    },
    # Two processes have the same name, for a while.
    "twins": lambda rng: {
        "actions": _merged(
            _actions(rng, ("start", "twin", "stop", "crash", "freeze", "evict"), 12), _traps(rng, ("twin", "evict"), 2)
        ),
        "members": rng.choice((2, 3)),
    },
}
"""All with the incremental strategy."""


def _parked(rng: random.Random, kinds: tuple[str, ...], acts: int) -> dict[str, object]:
    return {
        "kinds": tuple(rng.sample(kinds, rng.choice((2, 5)))),
        "parks": True,
        "members": 2,
        "partitions": rng.choice((1, 2)),
        "records": 80,
        "patient": rng.random() < 0.2,
        "strikes": dict.fromkeys(("send", "commit", "flush"), rng.choice((0.0, 0.03))),
        "actions": _actions(rng, (*COMING, "crash", "freeze", "evict", "compact", *["operate"] * acts), 8 + acts),
        "calm_at": 15.0,
    }


PROFILES = {**WORK, **MOVES}
APART: Profiles = {
    # Events wait in the queues of their keys, which are short, while members come and go.
    "parked": lambda rng: _parked(rng, PARKED_KINDS, 0),
    # Besides, an operator lets events go, events end their processes, and some have no key.
    "struck": lambda rng: {**_parked(rng, STRUCK_KINDS, 2), "struck": True},
    # Ids that come again, in a slice and over deaths, moves and lost transactions.
    "once": lambda rng: {
        "kinds": tuple(rng.sample(ONCE_KINDS, rng.choice((1, 3, 5)))),
        "once": True,
        "keys": rng.choice((2, 6)),
        "patient": rng.random() < 0.2,
        "strikes": dict.fromkeys(("send", "commit", "flush"), rng.choice((0.0, 0.03))),
        "actions": _actions(rng, (*COMING, "crash", "freeze", "evict", "compact"), 10),
        "calm_at": 20.0,
    },
    # Durable jobs run while members come and go, die and freeze, and transactions are lost; some keys are parked.
    "jobs": lambda rng: {
        "kinds": (*rng.sample(JOBS_KINDS, rng.choice((2, 5, 9))), *rng.choice(((), ("Parked",)))),
        "jobs": True,
        "parks": True,
        "partitions": rng.choice((1, 2)),
        "records": rng.choice((30, 60)),
        "strategies": ((rng.choice(("incremental", *ALL_STRATEGIES)),),),
        "patient": rng.random() < 0.2,
        "drain_timeout": rng.choice((0.3, 8.0)),
        "strikes": dict.fromkeys(("send", "commit", "flush"), rng.choice((0.0, 0.03))),
        "actions": _actions(rng, (*COMING, *COMING, "crash", "freeze", "evict", "compact"), 14),
        "calm_at": 15.0,
    },
}
"""Not among those that seeds take in turn."""


def plan_of(seed: int, profile: str = "") -> Plan:
    """The plan of a seed; seeds take the profiles in turn, unless one is named."""
    rng = random.Random(f"plan {seed}")
    profile = profile or list(PROFILES)[seed % len(PROFILES)]
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
    if profile in MOVES:
        sizes["strategies"] = (("incremental",),)
    timers = random.Random(f"timers {seed}").random() < 0.4
    own = (PROFILES | APART)[profile](rng)
    ahead = random.Random(f"ahead {seed}").random() < 0.5 or not AHEAD.isdisjoint(own.get("kinds", ()))
    rng = random.Random(f"wire {seed}")
    wire: dict[str, object] = {
        "nodes": rng.choice((1, 2, 3)),
        "transaction_version": rng.choice((1, 2, 2)),
        "verifies": rng.random() < 0.5,
        "kills": 0.0 if own.get("smooth") else rng.choice((0.0, 0.003, 0.01)),
    }
    return Plan(**{**sizes, **wire, **own, "timers": timers, "ahead": ahead})
