"""The membership without a broker: what it says of itself, and what it refuses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import anyio.lowlevel
import msgspec
import pytest

from streams.core.assignor import sticky_plan
from streams.errors import ConfigError
from streams.kafka.group.connect import connect_group
from streams.kafka.group.group_settings import GroupSettings
from streams.kafka.group.membership import GroupMembership
from streams.kafka.wire import group_bytes
from streams.kafka.wire.client import WireClient
from streams.model.group import (
    Assigned,
    Assignment,
    Assignor,
    Copies,
    Fatal,
    GroupEvent,
    GroupMetadata,
    Lost,
    MemberReport,
    Order,
    Revoked,
)
from tests.unit.waiting import PATIENCE, wait_until


class Stack:
    """A membership on a loop of its own, whose coroutines are driven by hand."""

    def __init__(self) -> None:
        settings = GroupSettings(
            group_id="g", topic="t", partitions=4, instance="a", assignors={"cooperative-sticky": sticky_plan}
        )
        self._loop = asyncio.new_event_loop()
        self._tasks: dict[Any, asyncio.Task[Any]] = {}
        self.membership = GroupMembership(WireClient("127.0.0.1:1", "a", loop=self._loop), settings)

    def run(self, steps: Any) -> None:
        """A coroutine that does not have to wait."""
        task = self._tasks.pop(steps, None) or self._loop.create_task(steps)
        self._loop.run_until_complete(asyncio.wait_for(task, 5.0))

    def wait(self, steps: Any) -> None:
        """A coroutine that has to wait."""
        if steps not in self._tasks:
            self._tasks[steps] = self._loop.create_task(steps)
        self.drain()
        assert not self._tasks[steps].done()

    def drain(self) -> None:
        """Do what was posted."""

        async def turns() -> None:
            for _ in range(5):
                await anyio.lowlevel.checkpoint()

        self._loop.run_until_complete(turns())

    def close(self) -> None:
        async def close() -> None:
            self.membership.close(1.0)

        self._loop.run_until_complete(close())
        self._loop.close()


@pytest.fixture
def stack() -> Iterator[Stack]:
    made = Stack()
    yield made
    made.membership._deliver = None  # none of them started: there is nobody to leave the group
    made.close()


def report(membership: GroupMembership) -> bytes:
    """The bytes of the next JoinGroup."""
    ((protocol, data),) = membership.subscriptions()
    assert protocol == "kes-cooperative-sticky-2"
    return data


class Member:
    """A membership that is driven by hand: reports, plans, and what the engine says in between."""

    def __init__(self, stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stack, self.membership, self.generation = stack, stack.membership, 0
        self.run, self.wait, self.drain = stack.run, stack.wait, stack.drain
        self.heard: list[GroupEvent] = []
        self.membership._deliver = self.heard.append
        self.joins = 0
        monkeypatch.setattr(self.membership, "_request_rejoin", self._joins_again)

    def _joins_again(self) -> None:
        self.joins += 1

    def plan(self, assignment: Assignment, meanwhile: Callable[[], None] = lambda: None) -> Any:
        """A rebalance: report, what comes ``meanwhile``, and the coroutine that applies the assignment."""
        self.generation += 1
        report(self.membership)
        self.membership.published(self.generation, "me")
        meanwhile()
        self.drain()
        told = msgspec.structs.replace(assignment, sequence=self.reported.sequence)
        return self.membership.joined(self.generation, group_bytes.encode_assignment("t", told))

    def release(self, partition: int, incarnation: int) -> None:
        self.membership.released([partition], incarnation, self.membership.group_metadata.generation)
        self.drain()

    @property
    def reported(self) -> MemberReport:
        return self.membership._state.holdings.reported

    @property
    def owned(self) -> frozenset[int]:
        return self.membership._state.holdings.owned


@pytest.fixture
def member(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> Member:
    return Member(stack, monkeypatch)


def test_another_member_id_is_another_incarnation(member: Member) -> None:
    membership = member.membership
    membership.published(3, "m-1")
    before = membership.group_metadata
    membership.published(4, "m-1")
    assert (membership.group_metadata.incarnation, membership.group_metadata.generation) == (before.incarnation, 4)
    membership.published(5, "m-2")
    assert membership.group_metadata == GroupMetadata(before.incarnation + 1, 5, "m-2")
    assert [type(event) for event in member.heard] == [Lost]


def test_an_assignment_that_comes_after_the_loss_is_not_applied(member: Member) -> None:
    """Lost between the answers to JoinGroup and SyncGroup."""
    member.run(member.plan(Assignment(own=frozenset({1})), lambda: member.membership.voided("session expired")))
    data = group_bytes.encode_assignment("t", Assignment(own=frozenset({1}), sequence=member.reported.sequence))
    member.run(member.membership.joined(-1, data))
    assert [type(event) for event in member.heard] == [Lost]
    assert member.owned == frozenset()


def test_what_is_awaited_and_not_ours_any_more_is_revoked_too(member: Member) -> None:
    """The marker may be there before the engine hears that somebody else gets it."""
    member.run(member.plan(Assignment(own=frozenset({1}), incoming={3: 0})))
    barrier = member.plan(Assignment())
    member.wait(barrier)
    assert member.heard[-1] == Revoked(0, 2, frozenset({1, 3}))
    member.membership.took(3, 1)
    member.drain()
    assert member.owned == frozenset({1}), "that was another incarnation's"
    member.membership.took(3, 0)
    member.release(1, 0)
    member.wait(barrier)
    member.release(3, 0)
    member.run(barrier)
    assert isinstance(member.heard[-1], Assigned)
    assert member.owned == frozenset()


def test_what_is_handed_over_meanwhile_ends_the_barrier(member: Member) -> None:
    for plan in (Assignment(own=frozenset({2})), Assignment(release={2: "other"})):
        member.run(member.plan(plan))
    barrier = member.plan(Assignment())
    for to in ("another", "other"):
        member.wait(barrier)
        member.membership.handed_over(2, Order(to, 2))
        member.drain()
    member.run(barrier)
    assert isinstance(member.heard[-1], Assigned)
    assert member.owned == frozenset()


def test_an_announcement_joins_again_once_it_has_something_new(member: Member) -> None:
    member.run(member.plan(Assignment()))
    before = member.joins
    copies = Copies(ready=frozenset({1}))
    for announce, count in ((False, 0), (True, 1)):
        member.membership.report(copies, announce=announce)
        member.drain()
        assert member.joins - before == count
    member.run(member.plan(Assignment(), lambda: member.membership.report(Copies(), announce=True)))
    assert member.joins - before == 3, "once at the time, and once when it has joined"
    member.run(member.plan(Assignment()))
    assert member.joins - before == 3


def test_leaving_is_told_once_and_what_comes_meanwhile_at_once(member: Member) -> None:
    member.run(member.plan(Assignment()))
    before = member.joins
    member.run(member.plan(Assignment(incoming={3: 0}), member.membership.leave))
    assert member.joins - before == 2, "it came while the join was under way"
    member.run(member.plan(Assignment(incoming={3: 1})))
    assert member.reported.leaving
    member.membership.leave()
    member.drain()
    assert member.joins - before == 2
    member.membership.took(3, 0)
    member.drain()
    assert member.joins - before == 3


def test_the_leader_decides_by_the_strategy_that_the_broker_chose() -> None:
    chosen: list[tuple[str, int, dict[str, MemberReport]]] = []

    def strategy(name: str) -> Assignor:
        def plan(partitions: int, reports: Mapping[str, MemberReport]) -> dict[str, Assignment]:
            chosen.append((name, partitions, dict(reports)))
            return {member: Assignment() for member in reports}

        return plan

    membership, _ = connect_group("127.0.0.1:1", "g", "t", 4, "a", {name: strategy(name) for name in ("new", "old")})
    offered = membership.subscriptions()
    assert [protocol for protocol, _ in offered] == ["kes-new-2", "kes-old-2"]
    assert offered[0][1] == offered[1][1], "one report, not two: the assignment echoes its counter"
    other = group_bytes.encode_report("t", MemberReport(instance="b", owned=frozenset({1, 4})))
    plan = membership.lead("kes-old-2", {"m-a": offered[1][1], "m-b": other, "m-c": b"\xff\xff"})
    assert plan.keys() == {"m-a", "m-b", "m-c"}
    assert all(group_bytes.decode_assignment(data, 4, member) == Assignment() for member, data in plan.items())
    ((name, partitions, reports),) = chosen
    assert (name, partitions) == ("old", 4)
    assert reports["m-b"].owned == frozenset({1}), "a partition that the topic does not have"
    assert reports["m-c"].leaving, "what is not understood gets nothing"
    membership.close(1.0)


@pytest.mark.parametrize("beats", [True, False], ids=["with heartbeats", "before the first join"])
def test_a_thread_that_fails_is_fatal(beats: bool) -> None:
    """Its loop has ended by then; the heartbeats are a task of it."""
    member, _ = connect_group("127.0.0.1:1", "g", "t", 4, "a", {"range": sticky_plan})
    heard: list[GroupEvent] = []
    member.start(heard.append)

    async def join() -> None:
        protocol = member._protocol = member._new_protocol()
        protocol._beats = member._client.spawn(asyncio.get_running_loop().create_future()) if beats else None

    def fail() -> None:
        raise SystemExit("an error")

    member._client.call(join, time.monotonic() + PATIENCE)
    member._client.post(fail)
    wait_until(lambda: heard, "it says that it is over", PATIENCE)
    (fatal,) = heard
    assert isinstance(fatal, Fatal)
    assert "the thread of the membership failed: SystemExit" in str(fatal.error)
    member.close(1.0)


def test_started_once() -> None:
    membership, _ = connect_group("127.0.0.1:1", "g", "t", 4, "a", {"range": sticky_plan})
    membership.start(lambda event: None)
    with pytest.raises(RuntimeError, match="once"):
        membership.start(lambda event: None)
    membership.close(1.0)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"group_id": "gruppe-ä"}, r"group\.id"),
        ({"instance": "host.example"}, "dot"),
        ({"instance": ""}, "instance"),
        ({"partitions": 0}, "0 partitions"),
        ({"heartbeat_interval_ms": 6000}, "heartbeat"),
        ({"heartbeat_interval_ms": 0}, "heartbeat"),
        ({"rebalance_timeout_ms": 0}, "rebalance timeout"),
        ({"assignors": {}}, "strategy"),
        ({"assignors": {"gerecht ü": sticky_plan}}, "strategy"),
        ({"bootstrap_servers": "nowhere"}, "bootstrap"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    settings: dict[str, Any] = {
        "bootstrap_servers": "127.0.0.1:1",
        "group_id": "g",
        "topic": "t",
        "partitions": 4,
        "instance": "a",
        "assignors": {"cooperative-sticky": sticky_plan},
    }
    with pytest.raises(ConfigError, match=named):
        connect_group(**{**settings, **changes})
