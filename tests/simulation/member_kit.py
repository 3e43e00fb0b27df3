"""A group member over our own wire against the simulated coordinators, in virtual time, with faults by request."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, cast

from streams.core.assignor import sticky_plan
from streams.kafka.group.group_settings import GroupSettings
from streams.kafka.group.membership import GroupMembership
from streams.kafka.wire.client import WireClient
from streams.kafka.wire.connection import connect
from streams.kafka.wire.security import PLAINTEXT
from streams.model.group import Assigned, Fatal, GroupEvent, Revoked
from streams.testing.simulation.faults import Conditions, Faults, Strike
from streams.testing.simulation.network import SimNetwork
from streams.testing.simulation.process import Process
from streams.testing.simulation.virtual_time import elapse

from .wire_asker import GROUP, Asker

SESSION, BEAT, REBALANCE = 6.0, 0.3, 15.0
_SEQUENCES = itertools.count(1, 1_000)
"""Counters of reports begin at the time of day: those of a restarted process are others."""


class Machine:
    """A process that has nothing but its network. ``strikes``: what befalls its next requests, by their names."""

    dead = False

    def __init__(self, asker: Asker) -> None:
        self.loop, self.broker, self.rng = asker.loop, asker.broker, random.Random(0)
        self.faults = Faults(Conditions(), self.rng)
        self.sent: list[str] = []
        self.strikes: dict[str, list[Strike | None]] = {}
        self.frozen_until = 0.0
        self.on_send: Callable[[str], None] = lambda name: None

    def travel_times(self) -> tuple[float, ...]:
        return (0.001,)

    def passes(self, point: str) -> None:
        name, _, when = point.replace("join", "JoinGroup").partition(".")
        if when == "before":
            self.sent.append(name)
            self.on_send(name)

    def strike(self, kind: str, share: float) -> Strike | None:
        planned = self.strikes.get(self.sent[-1])
        return planned.pop(0) if planned else None

    def frozen(self) -> float:
        return max(0.0, self.frozen_until - self.loop.time())


class SimClient(WireClient):
    """Its caller is on the loop: it does not wait."""

    def call(self, work: Callable[[], Any], deadline: float) -> Any:
        self.departure = self.spawn(work())

    def close(self, timeout_seconds: float = 0.0) -> None:
        self.departure.add_done_callback(lambda _: super(SimClient, self).close(timeout_seconds))


class Member:
    """One member, and what it tells. ``releases``: what is revoked is given up at once."""

    def __init__(self, asker: Asker, name: str, *, releases: bool = True, partitions: int = 4, **settings: Any) -> None:
        self.machine, self.releases, self.name, self.partitions = Machine(asker), releases, name, partitions
        network = SimNetwork(cast("Process", self.machine), asker.wire)
        connecting = partial(connect, client_id=name, security=PLAINTEXT, needed={})
        client = SimClient(network.addresses, name, loop=asker.loop, connecting=connecting)
        checked = GroupSettings(
            group_id=GROUP,
            topic="topic",
            partitions=self.partitions,
            instance=name,
            assignors=settings.pop("assignors", {"cooperative-sticky": sticky_plan}),
            session_timeout_ms=int(settings.pop("session", SESSION) * 1000),
            heartbeat_interval_ms=int(BEAT * 1000),
            rebalance_timeout_ms=int(settings.pop("rebalance", REBALANCE) * 1000),
            **settings,
        )
        self.is_alive, self.sequence = True, next(_SEQUENCES)
        self.membership = self.made(client, checked)
        self.events: list[GroupEvent] = []
        self.history: list[tuple[float, GroupEvent, Any]] = []
        self.membership.start(self._hear)

    def made(self, client: WireClient, settings: GroupSettings) -> GroupMembership:
        """Make the membership."""
        return GroupMembership(client, settings, lambda: self.is_alive, self.sequence, self.machine.loop.time)

    def _hear(self, event: GroupEvent) -> None:
        self.events.append(event)
        self.history.append((self.machine.loop.time(), event, self.membership.group_metadata))
        if isinstance(event, Revoked) and self.releases:
            self.membership.released(event.partitions, event.incarnation, event.generation)

    @property
    def owned(self) -> frozenset[int]:
        return next((event.owned for event in reversed(self.events) if isinstance(event, Assigned)), frozenset())

    @property
    def id(self) -> str:
        return self.membership.joining_as

    @property
    def generation(self) -> int:
        return self.membership.group_metadata.generation

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def is_fatal(self) -> bool:
        return bool(self.of(Fatal))


async def until(condition: Callable[[], object], seconds: float = 60.0, why: str = "") -> None:
    """Wait for a condition, in virtual time."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while not condition():
        assert loop.time() < deadline, why or "it does not come"
        await elapse(0.01)


async def settled(*members: Member, seconds: float = 60.0) -> None:
    """Wait until these share all partitions, in one generation, which all have applied."""

    def done() -> bool:
        owned = sorted(number for member in members for number in member.owned)
        last = {event.generation for member in members for event in member.of(Assigned)[-1:]}
        generations = {member.generation for member in members}
        return owned == [*range(members[0].partitions)] and generations == last and len(last) == 1

    await until(done, seconds, f"{[(member.name, member.owned, member.events[-1:]) for member in members]}")


def ids_of(asker: Asker) -> Collection[str]:
    """The members that the coordinator knows."""
    return asker.groups.group.members.keys()
