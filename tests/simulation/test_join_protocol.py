"""The group member over our own wire, in virtual time: each rule of its protocol, by the fault that it is for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from streams.core.assignor import sticky_plan
from streams.errors import ConfigError, MembershipFatal
from streams.kafka.group import join_protocol
from streams.model.group import Assigned, Fatal, Lost, Revoked
from streams.testing.simulation.classic_group import Joined, State
from streams.testing.simulation.faults import Strike
from streams.testing.simulation.virtual_time import VirtualTimeLoop, elapse

from .member_kit import BEAT, REBALANCE, SESSION, Member, ids_of, settled, until
from .wire_asker import GROUP, Asker, run

Scene = Callable[[Asker], Coroutine[Any, Any, None]]


async def two_share_and_one_that_leaves_gives_everything_back(asker: Asker) -> None:
    first = Member(asker, "a")
    await settled(first)
    second = Member(asker, "b")
    await settled(first, second)
    assert len(first.owned) == 2
    assert first.of(Lost) == second.of(Lost) == []
    second.membership.close(3.0)
    await settled(first)
    assert second.membership.group_metadata.generation == -1
    assert list(ids_of(asker)) == [first.id]


async def the_generation_is_published_before_sync_group(asker: Asker) -> None:
    member = Member(asker, "a")
    seen = []

    def note(name: str) -> None:
        if name == "SyncGroup":
            seen.append((member.generation, asker.groups.group.generation))

    member.machine.on_send = note
    await settled(member)
    assert seen == [(1, 1)]


async def a_coordinator_that_moves_in_the_middle_of_a_join_is_found(asker: Asker) -> None:
    first = Member(asker, "a", releases=False)
    await settled(first)
    second = Member(asker, "b")
    await until(lambda: first.of(Revoked))
    third = Member(asker, "c")
    await until(lambda: asker.groups.group.state is State.PREPARING and third.id)
    asker.wire.move(GROUP)
    first.releases = True
    (revoked,) = first.of(Revoked)
    first.membership.released(revoked.partitions, revoked.incarnation, revoked.generation)
    await settled(first, second, third)
    assert first.of(Lost) == []


async def a_coordinator_that_went_back_in_time_meets_no_id_again(asker: Asker) -> None:
    first, second = Member(asker, "a"), Member(asker, "b")
    await settled(first, second)
    before = {first.id, second.id}
    asker.groups.forget()
    await until(lambda: first.of(Lost) and second.of(Lost))
    await settled(first, second)
    assert not before & set(ids_of(asker))
    for member in (first, second):
        assert len(member.of(Lost)) == 1
        assert member.membership.group_metadata.incarnation == 1
        (lost_at,) = [time for time, event, _ in member.history if isinstance(event, Lost)]
        assert all(seen.generation < 0 for time, _, seen in member.history if time == lost_at)


async def an_old_generation_from_a_coordinator_is_not_taken(asker: Asker) -> None:
    """Its members are there, and its count is not."""
    member = Member(asker, "a")
    await settled(member)
    former = member.id
    asker.groups.group.generation = -1
    member.membership.leave()  # something to join for
    await until(lambda: member.of(Lost))
    await until(lambda: member.generation > 0)
    assert member.id != former
    assert list(ids_of(asker)) == [member.id], "the former id is given back"


async def an_id_whose_generation_is_refused_is_given_back(asker: Asker) -> None:
    member = Member(asker, "a")
    await settled(member)
    former, asker.groups.group.generation = member.id, 7
    await until(lambda: member.of(Lost))
    await settled(member)
    assert former not in ids_of(asker)
    assert member.machine.sent.count("LeaveGroup") == 1


async def a_heartbeat_without_an_answer_for_a_session_has_the_coordinator_looked_for(asker: Asker) -> None:
    member = Member(asker, "a", session=7.0)
    await settled(member)
    loop, sent = asker.loop, member.machine.sent
    began, before = loop.time(), sent.count("FindCoordinator")
    member.machine.strikes["Heartbeat"] = [Strike.HANGS]
    await until(lambda: sent.count("FindCoordinator") > before)
    assert 7.0 <= loop.time() - began < 7.0 + 2 * BEAT
    await elapse(10.0)
    assert member.of(Lost) == [] or len(member.of(Lost)) == 1
    await settled(member)


@pytest.mark.parametrize("name", ["JoinGroup", "SyncGroup", "Heartbeat", "FindCoordinator"])
@pytest.mark.parametrize(
    "strike", [Strike.REPLY_LOST, Strike.REQUEST_LOST, Strike.CUT, Strike.LATE, Strike.HANGS, Strike.MOVED,
               Strike.NOT_YET, Strike.FORGOTTEN],
)  # fmt: skip
@pytest.mark.parametrize("static", [False, True])
def test_every_request_may_be_lost_late_or_refused_for_once(name: str, strike: Strike, static: bool) -> None:
    """The first one, and one in a group that has two members."""

    async def script(loop: VirtualTimeLoop) -> None:
        asker = Asker(loop, nodes=2)
        first = Member(asker, "a", static=static)
        first.machine.strikes[name] = [strike]
        await settled(first)
        second = Member(asker, "b", static=static)
        second.machine.strikes[name] = [None, strike]
        await settled(first, second, seconds=90.0)
        first.machine.strikes[name] = [strike]
        third = Member(asker, "c", static=static)
        await settled(first, second, third, seconds=90.0)
        assert not any(member.is_fatal() for member in (first, second, third))

    run(script)


def test_a_late_first_join_of_a_static_member_does_not_fence_it() -> None:
    """The second JoinGroup has been answered when the first one comes, in some of these."""

    async def lost(asker: Asker, seed: int) -> list[str]:
        member = Member(asker, "a", static=True)
        member.machine.rng.seed(seed)
        member.machine.strikes["JoinGroup"] = [Strike.LATE]
        await settled(member)
        await elapse(20.0)
        await settled(member)
        assert not member.is_fatal()
        assert list(ids_of(asker)) == [member.id]
        return [event.reason for event in member.of(Lost)]

    found = [run(lambda loop, seed=seed: lost(Asker(loop, nodes=2), seed)) for seed in range(12)]  # type: ignore[misc]
    assert ["a late request of this member took its place"] in found
    assert [] in found


async def another_process_of_a_static_name_ends_the_first_one(asker: Asker) -> None:
    first = Member(asker, "shop", static=True)
    await settled(first)
    second = Member(asker, "shop", static=True)
    await until(lambda: first.is_fatal())
    (fatal,) = first.of(Fatal)
    assert isinstance(fatal.error, MembershipFatal)
    assert "another process joined as instance 'shop'" in str(fatal.error)
    assert isinstance(first.events[-2], Lost)
    await settled(second)
    assert second.of(Lost) == []
    await elapse(120.0)
    assert first.machine.sent.count("JoinGroup") == 1, "it joined behind its end"


async def a_barrier_that_never_ends_costs_the_membership_and_is_void_before_leave_group(asker: Asker) -> None:
    first = Member(asker, "a", releases=False, rebalance=3.0)
    await settled(first)
    void = []

    def note(name: str) -> None:
        if name == "LeaveGroup":
            void.append(first.membership.group_metadata.generation)

    first.machine.on_send = note
    second = Member(asker, "b", rebalance=3.0)
    await until(lambda: first.of(Revoked))
    began = asker.loop.time()
    await until(lambda: first.of(Lost))
    assert 3.0 <= asker.loop.time() - began <= 3.0 + 3 * BEAT
    await until(lambda: second.owned)
    assert void == [-1]


async def heartbeats_go_on_while_an_assignment_is_applied(asker: Asker) -> None:
    first = Member(asker, "a", releases=False)
    await settled(first)
    Member(asker, "b")
    await until(lambda: first.of(Revoked))
    await elapse(SESSION + 2.0)
    assert first.of(Lost) == []
    assert first.id in ids_of(asker)


async def an_engine_that_stands_still_gives_itself_up_once_and_comes_back(asker: Asker) -> None:
    member = Member(asker, "a", rebalance=5.0)
    await settled(member)
    former, member.is_alive = member.id, False
    left_with: list[int] = []
    member.machine.on_send = lambda name: left_with.extend([member.generation] if name == "LeaveGroup" else [])
    await until(lambda: member.of(Lost))
    await elapse(30.0)
    assert (len(member.of(Lost)), list(ids_of(asker))) == (1, [])
    assert left_with == [-1], "once, and when nothing of it is valid any more: another one has its partitions from then"
    member.is_alive = True
    await settled(member)
    assert member.id != former


async def an_engine_that_stands_still_in_a_barrier_stays_away(asker: Asker) -> None:
    """Else it would join and leave again, each rebalance timeout anew."""
    member = Member(asker, "a", releases=False, rebalance=3.0)
    await settled(member)
    other = Member(asker, "b", rebalance=3.0)
    await until(lambda: member.of(Revoked))
    member.is_alive = False
    await until(lambda: member.of(Lost))
    await elapse(20.0)
    assert list(ids_of(asker)) == [other.id]
    assert member.machine.sent.count("JoinGroup") == 3
    member.is_alive = member.releases = True
    await settled(member, other)


async def an_outage_is_no_reason_to_give_up(asker: Asker) -> None:
    """The coordinator is not found for longer than the rebalance timeout, while the member wants to join."""
    member = Member(asker, "a", rebalance=5.0, session=12.0)
    await settled(member)
    strikes = member.machine.strikes
    strikes["FindCoordinator"] = [Strike.REQUEST_LOST] * 10_000
    strikes["Heartbeat"] = [Strike.REQUEST_LOST]
    await elapse(2 * BEAT)
    member.membership.leave()
    await elapse(7.0)
    assert member.of(Lost) == []
    del strikes["FindCoordinator"]
    await until(lambda: [event for event in member.of(Assigned) if event.assignment.quit])
    assert member.of(Lost) == []


async def a_group_that_moved_away_from_a_silent_broker_is_joined_elsewhere(asker: Asker) -> None:
    """The broker keeps the connection, and the JoinGroup; a JoinGroup may take long."""
    member = Member(asker, "a", rebalance=60.0)
    await settled(member)
    began = asker.loop.time()
    member.machine.strikes["JoinGroup"] = [Strike.HANGS]
    member.membership.leave()
    await elapse(1.0)
    asker.wire.move(GROUP)
    await until(lambda: [event for event in member.of(Assigned) if event.assignment.quit])
    assert asker.loop.time() - began < 2 * SESSION


async def nothing_is_joined_behind_our_leave_group(asker: Asker) -> None:
    """A JoinGroup waits at the coordinator when the member goes, and it is refused while LeaveGroup has no answer."""
    busy = Member(asker, "a", releases=False)
    await settled(busy)
    other = Member(asker, "b")
    await until(lambda: busy.of(Revoked))
    third = Member(asker, "c")
    await until(lambda: third.id and asker.groups.group.state is State.PREPARING)
    third.machine.strikes["LeaveGroup"] = [Strike.REPLY_LOST]
    third.membership.close(3.0)
    (revoked,) = busy.of(Revoked)
    busy.membership.released(revoked.partitions, revoked.incarnation, revoked.generation)
    await until(lambda: busy.of(Assigned)[-1].assignment.members == ("a", "b") and len(busy.owned) == 2)
    await elapse(2.0)
    assert set(ids_of(asker)) == {busy.id, other.id}
    assert not asker.groups.group.pending


async def codes_that_are_none_are_named_once_and_tried_on(asker: Asker) -> None:
    member = Member(asker, "a")
    await settled(member)
    group, heartbeat, join = asker.groups.group, asker.groups.group.heartbeat, asker.groups.group.join
    group.heartbeat = lambda *_: 12_345  # type: ignore[method-assign]
    await elapse(SESSION / 4)
    group.heartbeat = heartbeat  # type: ignore[method-assign]
    group.join = lambda joining: group._now(Joined(-1, joining.member))  # type: ignore[method-assign]
    member.membership.leave()
    await elapse(SESSION / 4)
    group.join = join  # type: ignore[method-assign]
    await until(lambda: [event for event in member.of(Assigned) if event.assignment.quit])
    assert member.of(Lost) == []


async def a_session_that_the_broker_refuses_is_fatal_by_name(asker: Asker) -> None:
    member = Member(asker, "a", session=1.0)
    await until(member.is_fatal)
    (fatal,) = member.of(Fatal)
    assert isinstance(fatal.error, ConfigError)
    assert "group.min.session.timeout.ms" in str(fatal.error)


async def a_group_without_a_common_strategy_is_waited_for_and_then_fatal(asker: Asker) -> None:
    first = Member(asker, "a")
    await settled(first)
    began, second = asker.loop.time(), Member(asker, "b", assignors={"range": sticky_plan})
    await until(second.is_fatal)
    assert SESSION < asker.loop.time() - began < SESSION + 3.0
    assert "(range)" in str(second.of(Fatal)[0].error)
    assert first.of(Lost) == []


async def a_frozen_member_hears_that_it_was_evicted_and_joins_anew(asker: Asker) -> None:
    first, second = Member(asker, "a"), Member(asker, "b")
    await settled(first, second)
    former = first.id
    first.machine.frozen_until = asker.loop.time() + 2 * SESSION
    await settled(second)
    await settled(first, second)
    assert len(first.of(Lost)) == 1
    assert first.id != former


async def a_member_that_freezes_before_its_sync_group_is_not_waited_for(asker: Asker) -> None:
    """The leader, with the plan computed and not sent; and a follower. What they come back for is void."""
    first, second = Member(asker, "a"), Member(asker, "b")
    await settled(first, second)
    for frozen, other in ((first, second), (second, first)):
        former, before = frozen.id, [len(member.of(Lost)) for member in (frozen, other)]

        def freeze(name: str, frozen: Member = frozen) -> None:
            if name == "SyncGroup":
                frozen.machine.frozen_until = asker.loop.time() + 2 * SESSION
                frozen.machine.on_send = lambda _: None

        frozen.machine.on_send = freeze
        third = Member(asker, "c")
        await settled(other, third)
        await settled(first, second, third)
        assert [len(member.of(Lost)) for member in (frozen, other)] == [before[0] + 1, before[1]]
        assert frozen.id != former
        third.membership.close(3.0)
        await settled(first, second)


async def a_restarted_static_member_does_not_take_what_was_made_for_its_predecessor(asker: Asker) -> None:
    """The broker answers with the assignment that it has, which names the predecessor's id in orders."""
    first, other = Member(asker, "a", static=True), Member(asker, "b", static=True)
    await settled(first, other)
    made_for, former = first.generation, first.id
    first.membership.close(3.0)
    await elapse(BEAT)
    successor = Member(asker, "a", static=True)
    await settled(successor, other)
    assert successor.id != former
    assert successor.of(Assigned)[0].generation > made_for
    assert other.of(Lost) == other.of(Revoked) == []


async def four_members_join_for_400_partitions_at_once(asker: Asker) -> None:
    members = [Member(asker, name, partitions=400) for name in "abcd"]
    await settled(*members)
    assert [len(member.owned) for member in members] == [100] * 4
    assert asker.groups.group.generation <= 4


SCENES = [
    scene for scene in [*globals().values()] if asyncio.iscoroutinefunction(scene) and scene.__module__ == __name__
]


def play(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    async def script(loop: VirtualTimeLoop) -> None:
        await scene(Asker(loop, nodes=2))

    run(script)
    said = [
        record.getMessage()
        for record in caplog.records
        if "12345" in record.getMessage() or "UNKNOWN_SERVER" in record.getMessage()
    ]
    assert len(said) == (2 if scene is codes_that_are_none_are_named_once_and_tried_on else 0), said
    assert "unexpected failure" not in caplog.text
    assert "not understood" not in caplog.text


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_scene(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    play(scene, caplog)


def test_versions_are_those_of_the_codec_and_of_kafka_2_8() -> None:
    assert {request.value: version for request, version in join_protocol._VERSIONS.items()} == {
        "JoinGroup": 7,
        "SyncGroup": 5,
        "Heartbeat": 4,
    }
    assert REBALANCE > SESSION
