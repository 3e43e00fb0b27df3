"""Faults for a ``TestDriver``, drawn from a seed: their kinds, their points, and the delays of things."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, Final, Literal, get_args

import msgspec

from streams.errors import ConfigError
from streams.testing.driver import Call, TestDriver
from streams.testing.fault_points import POINTS, Point
from streams.testing.simulation.faults import Conditions

Fault = Literal[
    "crash",
    "freeze",
    "leave",
    "join",
    "evict",
    "fence",
    "abort",
    "lose_reply",
    "lose_request",
    "delay",
    "refuse",
    "outage",
    "forget_group",
    "compact",
]
"""Faults of a search: the methods of ``TestDriver`` with these names. A member that crashes or leaves comes back."""

FAULTS: Final[tuple[Fault, ...]] = get_args(Fault)
_RARE_POINTS: Final[tuple[Point, ...]] = ("init.before", "init.after", "join.before", "lost.before")
_POINTS: Final[tuple[Point, ...]] = tuple(point for point in POINTS if point not in _RARE_POINTS)
_COMMON: Final[tuple[Point, ...]] = tuple(
    point
    for point in _POINTS
    if point.startswith(("handler", "produce", "flush", "send_offsets", "commit", "poll", "begin"))
)
_TRANSACTION_CALLS: Final[tuple[Call, ...]] = ("flush", "send_offsets", "commit", "abort")
MOST_MEMBERS: Final = 5


def conditions_of(seed: int) -> Conditions:
    """Draw the delays of things in the run of this seed."""
    rng = random.Random(f"conditions {seed}")
    return Conditions(
        one_way=rng.choice((0.001, 0.005, 0.02)),
        grid=rng.choice((0.0, 0.0, 0.001)),
        slow_markers=rng.choice((0.002, 0.02, 0.1)),
        queue_limit=rng.choice((10, 1_000)),
        tail_batch=rng.choice((5, 50, 200)),
        hear=rng.choice(((0.0, 0.001), (0.0, 0.001, 0.02, 1.0))),
        post=rng.choice(((0.0, 0.001), (0.0, 0.001, 0.5))),
    )


def check_faults(faults: Collection[str]) -> None:
    """Raises ``ConfigError`` for names that are none."""
    unknown = sorted(set(faults) - set(FAULTS))
    if unknown:
        raise ConfigError(f"there are no faults {', '.join(unknown)}; the faults are {', '.join(FAULTS)}")


class Chaos:
    """Sets traps for one driver; ``happened`` counts what they did. After ``stop`` nothing goes wrong any more."""

    def __init__(self, driver: TestDriver[Any], seed: int, faults: Collection[Fault]) -> None:
        self._driver, self._world = driver, driver._world
        self._rng = random.Random(f"chaos {seed}")
        self._stopped = False
        self._coming: set[int] = set()
        self.happened: Counter[str] = Counter()
        names: list[Fault] = [fault for fault in FAULTS if fault in faults]
        for _ in range(self._rng.choice((1, 1, 2, 3, 5, 8)) if names else 0):
            point = self._rng.choice(self._rng.choice((_COMMON, _POINTS)))
            skip = self._rng.choice((0, 0, 1, 2, 3, 5, 8, 13, 30))
            driver.at(point, self._action(self._rng.choice(names)), skip=skip)

    def stop(self) -> None:
        """End all faults: members that are down come back, frozen ones go on."""
        self._stopped = True
        self._world.traps.clear()
        plan = self._world.faults.plan
        self._world.faults.plan = msgspec.structs.replace(plan, strikes={}, marker_strikes={})
        self._world.broker.down_until = 0.0
        for member in self._world.running():
            member.process.forced.clear()
            member.process.frozen_until = 0.0

    def _action(self, fault: Fault) -> Callable[[int], None]:
        def strike(member: int) -> None:
            if self._stopped or self._world.members[member].is_down:
                return
            self.happened[fault] += 1
            self._strike(fault, member)

        strike.__name__ = fault
        return strike

    def _strike(self, fault: Fault, member: int) -> None:
        driver, rng = self._driver, self._rng
        match fault:
            case "crash":
                driver.crash(member)
                self._come_back(member, rng.choice((0.0, 0.1, 1.0, 8.0)))
            case "leave":
                driver.leave(member)
                self._come_back(member, rng.choice((1.0, 3.0, 12.0)))
            case "freeze":
                driver.freeze(member, rng.choice((0.5, 3.0, 8.0, 12.0)))
            case "outage":
                driver.outage(rng.choice((0.5, 3.0, 8.0)))
            case "join":
                if len(self._world.running()) < MOST_MEMBERS:
                    driver.join()
            case "lose_reply" | "lose_request":
                calls = _TRANSACTION_CALLS[1:] if fault == "lose_request" else _TRANSACTION_CALLS
                getattr(driver, fault)(rng.choice(calls), member)
            case "delay":
                driver.delay(rng.choice(("send_offsets", "commit", "abort")), member)
            case "refuse":
                driver.refuse(rng.choice(("flush", "send_offsets", "commit")), member)
            case "forget_group" | "compact":
                getattr(driver, fault)()
            case _:
                getattr(driver, fault)(member)

    def _come_back(self, number: int, seconds: float) -> None:
        """Start a member again; one that is stopping still is waited for."""
        world = self._world
        if number in self._coming:
            return
        self._coming.add(number)
        world.awaited += 1

        def start() -> None:
            if not world.members[number].is_down:
                world.loop.call_later(0.5, start)
                return
            self._coming.discard(number)
            world.awaited -= 1
            world.start(number)

        world.loop.call_later(seconds, start)
