"""A coordinator that shares a group out by itself (KIP-848), in bytes, and members of such a group, in virtual time.

The rules are those of Kafka's ``GroupMetadataManager``: a member's epoch moves on once it has given up what was taken
away; a partition is assigned when no other member holds it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from streams.kafka.group.broker_group import RosterTakeOver
from streams.kafka.group.broker_membership import BrokerMembership
from streams.kafka.group.group_settings import GroupSettings
from streams.kafka.wire.client import WireClient
from streams.kafka.wire.codes import Code
from streams.model.group import Fatal
from streams.testing.simulation.faults import Strike
from streams.testing.simulation.virtual_time import VirtualTimeLoop
from streams.testing.simulation.wire_requests import Request

from .member_kit import Member, until
from .wire_asker import GROUP, Asker, run

SESSION, BEAT = 6.0, 0.5
PARTITIONS = frozenset(range(4))
_OF_GROUPS = 32


@dataclass
class Seen:
    """A member as the coordinator knows it. ``held``: assigned to it, or taken away and not given up yet."""

    client: str
    instance: str | None
    epoch: int = 0
    before: int = 0
    held: frozenset[int] = frozenset()
    target: frozenset[int] = frozenset()
    is_away: bool = False
    timers: list[asyncio.TimerHandle] = field(default_factory=list)


class SharedGroup:
    """The coordinator of the asker's group. ``refuses``: codes for the next heartbeats; ``configs``: of the group, or
    the code of their refusal; ``classic``: the protocol of classic members that are in it."""

    def __init__(self, asker: Asker) -> None:
        self.loop, self.wire = asker.loop, asker.wire
        self.members: dict[str, Seen] = {}
        self.epoch = 0
        self.exists = False
        self.refuses: list[int] = []
        self.configs: dict[str, str] | int = {"consumer.session.timeout.ms": str(int(SESSION * 1000))}
        self.classic: str | None = None
        self.foreign: list[tuple[str, str]] = []  # client id and member id of members that nothing else is known of
        self.classics: list[str] = []  # client ids of members by the classic protocol that came behind the others
        self.topic_id = asker.broker.topic_id("topic")
        self.beats: list[Any] = []
        self.codes: list[int] = []
        asker.wire.serve(
            {
                "ConsumerGroupHeartbeat": self._heartbeat,
                "ConsumerGroupDescribe": self._describe,
                "DescribeGroups": self._classic,
                "DescribeConfigs": self._configs,
            }
        )
        asker.wire.on_move = lambda name: None

    def forget(self) -> None:
        """Restart without a log."""
        for member in [*self.members]:
            self._out(member)
        self.epoch, self.exists = 0, False

    def evict(self, member_id: str) -> None:
        self._out(member_id)
        self._share()

    def _out(self, member_id: str) -> None:
        for timer in self.members.pop(member_id).timers:
            timer.cancel()

    def _share(self) -> None:
        """Make a new target: sticky, and even."""
        self.epoch += 1
        here = sorted(name for name, member in self.members.items() if not member.is_away)
        free = PARTITIONS
        for place, name in enumerate(here):
            size = len(PARTITIONS) // len(here) + (place < len(PARTITIONS) % len(here))
            kept = frozenset(sorted(self.members[name].target & free)[:size])
            self.members[name].target = kept
            free -= kept
        for place, name in enumerate(here):
            size = len(PARTITIONS) // len(here) + (place < len(PARTITIONS) % len(here))
            more = frozenset(sorted(free)[: size - len(self.members[name].target)])
            self.members[name].target |= more
            free -= more

    def _heartbeat(self, node: int, request: Request, strike: Strike | None) -> bytes:
        body = request.body
        self.beats.append(body)
        code = self.wire.not_here(GROUP, node, strike) or (self.refuses.pop(0) if self.refuses else 0)
        code = code or self._admit(body, request.client_id)
        self.codes.append(code)
        if code or body.member_epoch < 0:
            return request.encoded(error_code=code, member_id=body.member_id, member_epoch=body.member_epoch)
        member = self.members[body.member_id]
        owned = frozenset(number for each in body.topic_partitions for number in each.partitions)
        self._reconcile(body, member, owned)
        of = request.answer_class.Assignment
        shown = sorted(member.held & member.target)
        return request.encoded(
            member_id=body.member_id,
            member_epoch=member.epoch,
            heartbeat_interval_ms=int(BEAT * 1000),
            assignment=of(topic_partitions=[of.TopicPartitions(topic_id=self.topic_id, partitions=shown)]),
        )

    def _admit(self, body: Any, client: str) -> int:
        held_by = {seen.instance: name for name, seen in self.members.items() if seen.instance}.get(body.instance_id)
        if body.member_epoch == 0:
            assert body.member_id
            assert not body.topic_partitions
            self.exists = True
            if held_by is not None and held_by != body.member_id:
                if not self.members[held_by].is_away:
                    return Code.UNRELEASED_INSTANCE_ID
                self.members[body.member_id] = self.members.pop(held_by)
                self.members[body.member_id].is_away = False
                self._bump(self.members[body.member_id])
            elif body.member_id not in self.members:
                self.members[body.member_id] = Seen(client, body.instance_id)
                self._share()
            return 0
        if not self.exists:
            return Code.GROUP_ID_NOT_FOUND
        member = self.members.get(body.member_id)
        if member is None:
            return Code.FENCED_INSTANCE_ID if held_by else Code.UNKNOWN_MEMBER_ID
        if body.member_epoch == -2:
            member.is_away = True
        elif body.member_epoch == -1:
            self.evict(body.member_id)
        elif body.member_epoch != member.epoch:
            owned = frozenset(number for each in body.topic_partitions for number in each.partitions)
            if body.member_epoch != member.before or not owned <= member.held:
                return Code.FENCED_MEMBER_EPOCH
        return 0

    def _bump(self, member: Seen) -> None:
        member.before, member.epoch = member.epoch, self.epoch

    def _reconcile(self, body: Any, member: Seen, owned: frozenset[int]) -> None:
        for timer in member.timers[:1]:
            timer.cancel()
        session = self.loop.call_later(SESSION, self.evict, body.member_id)
        member.timers[:1] = [session]
        taken = member.held - member.target
        if taken & owned or (taken and body.member_epoch == 0):
            if len(member.timers) == 1:
                member.timers.append(self.loop.call_later(body.rebalance_timeout_ms / 1000, self.evict, body.member_id))
            return
        for timer in member.timers[1:]:
            timer.cancel()
        del member.timers[1:]
        others = [seen.held for seen in self.members.values() if seen is not member]
        member.held = member.target - frozenset[int]().union(*others) | member.held & member.target
        if member.epoch != self.epoch:
            self._bump(member)

    def _describe(self, node: int, request: Request, strike: Strike | None) -> bytes:
        of = request.answer_class.DescribedGroup
        seen = [(seen.client, name) for name, seen in self.members.items()] + self.foreign
        members = [of.Member(member_id=name, client_id=client, member_epoch=1, member_type=1) for client, name in seen]
        members += [
            of.Member(member_id=name, client_id=name, client_host="/h", member_type=0) for name in self.classics
        ]
        code = 0 if self.exists or self.foreign else Code.GROUP_ID_NOT_FOUND
        group = of(group_id=GROUP, error_code=code, assignor_name="uniform", members=members)
        return request.encoded(groups=[group])

    def _classic(self, node: int, request: Request, strike: Strike | None) -> bytes:
        of = request.answer_class.DescribedGroup
        if self.classic is None:
            return request.encoded(groups=[of(group_id=GROUP, group_state="Dead")])
        member = of.DescribedGroupMember(member_id="classic", client_id="another", client_host="/10.0.0.7")
        return request.encoded(
            groups=[of(group_id=GROUP, group_state="Stable", protocol_data=self.classic, members=[member])]
        )

    def _configs(self, node: int, request: Request, strike: Strike | None) -> bytes:
        (resource,) = request.body.resources
        assert (resource.resource_type, resource.resource_name) == (_OF_GROUPS, GROUP)
        of = request.answer_class.DescribeConfigsResult
        code, configs = (self.configs, {}) if isinstance(self.configs, int) else (0, self.configs)
        entries = [of.DescribeConfigsResourceResult(name=name, value=value) for name, value in configs.items()]
        return request.encoded(results=[of(error_code=code, resource_name=GROUP, resource_type=32, configs=entries)])


class BrokerMember(Member):
    """A member of such a group."""

    def __init__(self, asker: Asker, name: str, **settings: Any) -> None:
        self.transaction_ms = settings.pop("transaction_ms", 5000)
        super().__init__(
            asker, name, assignors={}, server_assignor=settings.pop("server_assignor", "uniform"), **settings
        )

    def made(self, client: WireClient, settings: GroupSettings) -> BrokerMembership:
        self.client = client
        self.take_over = RosterTakeOver(client, GROUP, "topic")
        clock = self.machine.loop.time
        return BrokerMembership(client, settings, self.take_over, lambda: self.is_alive, self.transaction_ms, clock)


Scene = Callable[[Asker, SharedGroup], Coroutine[Any, Any, None]]


def scenes_of(names: dict[str, Any]) -> list[Scene]:
    """List the scenes of a module."""
    return [
        each for each in names.values() if asyncio.iscoroutinefunction(each) and each.__module__ == names["__name__"]
    ]


def play(scene: Scene) -> None:
    """Run a scene on two nodes, in virtual time."""

    async def script(loop: VirtualTimeLoop) -> None:
        asker = Asker(loop, nodes=2)
        await scene(asker, SharedGroup(asker))

    run(script)


async def shared(*members: BrokerMember, seconds: float = 60.0) -> None:
    """Wait until these share all partitions evenly, and are members."""

    def done() -> bool:
        owned = sorted(number for member in members for number in member.owned)
        counts = [len(member.owned) for member in members]
        is_even = max(counts) - min(counts) <= 1
        return is_even and owned == sorted(PARTITIONS) and all(member.generation > 0 for member in members)

    await until(done, seconds, f"{[(member.name, member.owned, member.events[-2:]) for member in members]}")


def fatal(member: BrokerMember) -> Exception:
    (event,) = member.of(Fatal)
    return event.error  # type: ignore[no-any-return]
