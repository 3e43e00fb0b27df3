"""What is done to a member's connections and coordinators by somebody who means harm, in virtual time."""

from __future__ import annotations

import asyncio
import ssl
import struct
from collections.abc import Callable
from typing import Any

import pytest

from streams.kafka.wire.connection import LostConnection
from streams.model.group import Lost
from streams.testing.simulation.classic_group import State
from streams.testing.simulation.faults import Strike
from streams.testing.simulation.virtual_time import elapse
from streams.testing.simulation.wire_requests import Request

from .member_kit import BEAT, SESSION, Member, ids_of, settled, until
from .test_join_protocol import Scene, play
from .test_wire_groups import ILLEGAL, UNKNOWN, commit
from .wire_asker import GROUP, Asker

REQUESTS = ("FindCoordinator", "JoinGroup", "SyncGroup", "Heartbeat")
By = Callable[[Callable[[], Any], int, Request], Any]
"""Answers a request at a node; it gets what the broker itself answers."""


def served(asker: Asker, name: str, by: By) -> Callable[[], None]:
    """Have requests of a name answered ``by`` something, which gets the broker's own answers. Returns what ends it."""
    wire = asker.wire
    own = wire.answer

    def answer(node: int, host: str, request: Request, strike: Strike | None) -> Any:
        if request.name != name:
            return own(node, host, request, strike)
        return by(lambda: own(node, host, request, strike), node, request)

    wire.answer = answer  # type: ignore[method-assign]
    return lambda: setattr(wire, "answer", own)


async def delayed(answer: Any, seconds: Callable[[bytes], float]) -> bytes:
    data = answer if isinstance(answer, bytes) else await answer
    await elapse(seconds(data))
    return data  # type: ignore[no-any-return]


def later(asker: Asker, name: str, seconds: Callable[[bytes], float]) -> Callable[[], None]:
    """Delay the answers to a request."""

    def answer(own: Callable[[], Any], node: int, request: Request) -> Any:
        return asker.loop.create_task(delayed(own(), seconds))

    return served(asker, name, answer)


async def garbage_in_place_of_each_answer(asker: Asker) -> None:
    first = Member(asker, "a")
    rng = first.machine.rng
    for name in REQUESTS:
        left = [5]

        def garbage(own: Callable[[], Any], node: int, request: Request, left: list[int] = left) -> Any:
            if not left[0]:
                return own()
            left[0] -= 1
            data = struct.pack(">i", request._correlation) + rng.randbytes(rng.choice((0, 1, 7, 40)))
            return struct.pack(">i", len(data)) + data

        ends = served(asker, name, garbage)
        comes = Member(asker, name)
        await settled(first, comes, seconds=120.0)
        ends()
        assert not left[0]
        comes.membership.close(3.0)
        await settled(first, seconds=120.0)
    assert not first.is_fatal()


async def an_hour_of_throttling_in_each_answer(asker: Asker) -> None:
    first, second = Member(asker, "a"), Member(asker, "b")
    for member in (first, second):
        member.machine.strikes |= {name: [Strike.THROTTLED] * 10_000 for name in REQUESTS}
    await settled(first, second)
    assert first.of(Lost) == second.of(Lost) == []


async def heartbeats_are_answered_late_by_just_the_session(asker: Asker) -> None:
    """The coordinator has them in time, so nobody is evicted; the member closes the connection, or just does not."""
    first, second = Member(asker, "a"), Member(asker, "b")
    await settled(first, second)
    for seconds in (SESSION - 0.01, SESSION, SESSION + 0.01):
        ends = later(asker, "Heartbeat", lambda _, seconds=seconds: seconds)
        await elapse(5 * SESSION)
        ends()
        await settled(first, second)
    third = Member(asker, "c")
    await settled(first, second, third)
    assert not any(member.is_fatal() for member in (first, second, third))
    for member in (first, second):
        assert all(seen.generation < 0 for _, event, seen in member.history if isinstance(event, Lost))


async def two_coordinators_that_both_answer(asker: Asker) -> None:
    """The former one takes heartbeats of a member that the group has evicted. Its commits are refused all the same."""
    first, second = Member(asker, "a"), Member(asker, "b")
    await settled(first, second)
    former = asker.wire.node_of(GROUP)

    def both(own: Callable[[], Any], node: int, request: Request) -> Any:
        return request.encoded(error_code=0) if node == former and request.client_id == "a" else own()

    ends = served(asker, "Heartbeat", both)
    asker.wire.move(GROUP)
    await settled(second, seconds=3 * SESSION)
    assert first.owned
    assert not first.of(Lost)
    metadata = first.membership.group_metadata
    assert await commit(asker, metadata.member_id, metadata.generation) in (UNKNOWN, ILLEGAL)
    ends()
    await until(lambda: first.of(Lost))
    await settled(first, second)


async def a_leader_that_dies_with_the_plan_computed_and_not_sent(asker: Asker) -> None:
    first, second = Member(asker, "a"), Member(asker, "b")
    await settled(first, second)
    leader, other = (first, second) if asker.groups.group.leader == first.id else (second, first)

    def die(name: str) -> None:
        leader.machine.dead = leader.machine.dead or name == "SyncGroup"
        if leader.machine.dead:
            leader.machine.frozen_until = 1e9

    leader.machine.on_send = die
    third = Member(asker, "c")
    await until(lambda: leader.machine.dead)
    await settled(other, third)
    assert other.of(Lost) == []
    assert leader.id not in ids_of(asker)


@pytest.mark.parametrize("count", [1, 4])
def test_a_login_that_ends_in_the_middle_of_a_rebalance(count: int, caplog: pytest.LogCaptureFixture) -> None:
    """A token that expires: what is under way gets its answer, and the next request goes over a new connection."""

    async def scene(asker: Asker) -> None:
        members = [Member(asker, name) for name in "abcd"[:count]]
        await settled(*members)
        expired: list[int] = []

        def expire(name: str, member: Member) -> None:
            if name in ("JoinGroup", "SyncGroup"):
                joining: Any = member.membership._protocol
                joining._line._connection.expires_at = asker.loop.time()
                expired.append(1)

        for member in members:
            member.machine.on_send = lambda name, member=member: expire(name, member)  # type: ignore[misc]
        comes = Member(asker, "comes")
        await settled(*members, comes)
        assert len(expired) >= count
        assert not any(member.of(Lost) for member in members)

    play(scene, caplog)


async def a_certificate_that_expires_in_the_middle_of_a_rebalance(asker: Asker) -> None:
    """It may be renewed on one broker after the other: a member that is in the group tries on."""
    first, second = Member(asker, "a"), Member(asker, "b", session=30.0)
    member: Any = second.membership
    connect, refused = member._client._connect, [0]

    async def handshake(*of: Any, **more: Any) -> Any:
        refused[0] += 1
        raise LostConnection("b:1: certificate has expired", "_SSL") from ssl.SSLCertVerificationError("expired")

    await settled(first, second)
    member._client._connect = handshake
    member._protocol._line._connection.close()
    third = Member(asker, "c")
    await until(lambda: asker.groups.group.state is State.PREPARING)
    await until(lambda: refused[0] > 3)
    member._client._connect = connect
    await settled(first, second, third)
    assert second.of(Lost) == []
    assert not second.is_fatal()


async def answers_at_10_kilobytes_a_second(asker: Asker) -> None:
    """Four members join for 400 partitions: the leader's answer has all reports."""
    members = [Member(asker, name, partitions=400) for name in "abcd"]
    ends = [later(asker, name, lambda data: len(data) / 10_000) for name in ("JoinGroup", "SyncGroup", "Heartbeat")]
    await settled(*members, seconds=300.0)
    await elapse(10 * BEAT)
    assert [len(member.owned) for member in members] == [100] * 4
    assert not any(member.of(Lost) for member in members)
    for end in reversed(ends):
        end()


SCENES = [
    scene for scene in [*globals().values()] if asyncio.iscoroutinefunction(scene) and scene.__module__ == __name__
]
SCENES.remove(delayed)


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_attack(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    play(scene, caplog)
