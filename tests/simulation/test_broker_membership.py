"""A member of a group that the broker shares out (KIP-848), in virtual time: each rule by the fault that it is for."""

from __future__ import annotations

from uuid import uuid4

import pytest

from streams.errors import BrokerUnavailable, MembershipFatal
from streams.kafka.wire.codes import Code
from streams.model.group import Assigned, Lost, Revoked
from streams.testing.simulation.faults import Strike
from streams.testing.simulation.virtual_time import VirtualTimeLoop, elapse

from .broker_kit import BEAT, PARTITIONS, SESSION, BrokerMember, Scene, SharedGroup, fatal, play, scenes_of, shared
from .member_kit import until
from .wire_asker import GROUP, Asker, run


def release(member: BrokerMember) -> None:
    revoked = member.of(Revoked)[-1]
    member.membership.released(revoked.partitions, revoked.incarnation, revoked.generation)


async def two_share_and_one_that_closes_gives_everything_back(asker: Asker, group: SharedGroup) -> None:
    first = BrokerMember(asker, "a")
    await shared(first)
    second = BrokerMember(asker, "b")
    await shared(first, second)
    assert [event.partitions for event in first.of(Revoked)] == [second.owned]
    assert first.of(Lost) == second.of(Lost) == []
    second.membership.close(3.0)
    await shared(first)
    assert second.membership.group_metadata.generation == -1
    assert [*group.members] == [first.id]
    assert group.beats[-1].member_epoch > 0


async def nothing_is_published_before_the_join_is_answered_and_the_epoch_is_the_metadata(
    asker: Asker, group: SharedGroup
) -> None:
    member = BrokerMember(asker, "a")
    seen: list[int] = []
    member.machine.on_send = lambda name: seen.append(member.membership.group_metadata.generation)
    await shared(member)
    assert seen[0] == -1
    _, event, told = member.history[0]
    assert isinstance(event, Assigned)
    assert (event.added, event.incarnation) == (PARTITIONS, 0)
    epoch = group.members[member.id].epoch
    assert (told.generation, told.member_id, told.instance_id) == (epoch, member.id, None)


async def a_revoked_partition_is_named_until_it_is_released_and_heartbeats_go_on(
    asker: Asker, group: SharedGroup
) -> None:
    first = BrokerMember(asker, "a", releases=False)
    await shared(first)
    second = BrokerMember(asker, "b")
    await until(lambda: first.of(Revoked))
    (revoked,) = first.of(Revoked)
    await elapse(SESSION + 2.0)
    assert not second.owned
    first.membership.released(revoked.partitions, revoked.incarnation + 1, revoked.generation)
    first.membership.released([*revoked.partitions][:1], revoked.incarnation, revoked.generation)
    await elapse(2 * BEAT)
    assert not second.owned
    beats, former = group.beats, len(group.beats)
    await until(lambda: first.id in [beat.member_id for beat in beats[former:]])
    (named,) = [beat for beat in beats[former:] if beat.member_id == first.id]
    assert set(named.topic_partitions[0].partitions) > PARTITIONS - revoked.partitions
    former = len(beats)
    first.membership.released(revoked.partitions, revoked.incarnation, revoked.generation)
    await until(lambda: first.id in [beat.member_id for beat in beats[former:]], BEAT / 2, "it waits for a heartbeat")
    await until(lambda: second.owned == revoked.partitions)
    assert first.of(Lost) == []


async def a_member_without_partitions_is_told_so(asker: Asker, group: SharedGroup) -> None:
    members = [BrokerMember(asker, name) for name in "abcde"]
    await until(lambda: all(member.of(Assigned) for member in members))
    await shared(*members)
    assert sorted(len(member.owned) for member in members) == [0, 1, 1, 1, 1]


async def an_eviction_voids_everything_before_it_is_told(asker: Asker, group: SharedGroup) -> None:
    member = BrokerMember(asker, "a")
    await shared(member)
    former = member.id
    group.evict(former)
    await until(lambda: member.of(Lost))
    _, _, seen = next(entry for entry in member.history if isinstance(entry[1], Lost))
    assert (seen.incarnation, seen.generation) == (1, -1)
    await until(lambda: member.generation > 0 and member.owned == PARTITIONS)
    assert member.id != former
    assert member.of(Assigned)[-1].incarnation == 1
    assert [type(event) for event in member.events] == [Assigned, Lost, Assigned]


async def an_eviction_within_a_barrier_ends_it(asker: Asker, group: SharedGroup) -> None:
    first = BrokerMember(asker, "a", releases=False)
    await shared(first)
    second = BrokerMember(asker, "b")
    await until(lambda: first.of(Revoked))
    group.evict(first.id)
    await until(lambda: first.of(Lost))
    first.releases = second.releases = True
    await shared(first, second)
    assert [type(event) for event in first.events][:3] == [Assigned, Revoked, Lost]
    assert first.of(Assigned)[-1].incarnation == 1


async def a_barrier_has_the_rebalance_timeout(asker: Asker, group: SharedGroup) -> None:
    first = BrokerMember(asker, "a", releases=False, rebalance=3.0)
    await shared(first)
    second = BrokerMember(asker, "b", rebalance=3.0)
    await until(lambda: first.of(Revoked))
    began = asker.loop.time()
    await until(lambda: first.of(Lost))
    assert asker.loop.time() - began <= 3.0 + 3 * BEAT
    await until(lambda: second.owned)


async def leaving_is_a_barrier_and_then_nothing(asker: Asker, group: SharedGroup) -> None:
    other, leaves = BrokerMember(asker, "a"), BrokerMember(asker, "b", releases=False)
    await shared(other, leaves)
    mine, former = leaves.owned, leaves.id
    leaves.membership.leave()
    await until(lambda: leaves.of(Revoked) and leaves.of(Revoked)[-1].partitions == mine)
    await elapse(2.0)
    assert former in group.members
    release(leaves)
    await until(lambda: other.owned == PARTITIONS)
    (event,) = [event for event in leaves.of(Assigned) if event.assignment.quit]
    assert event.owned == frozenset()
    assert leaves.membership.group_metadata.generation == -1
    sent = len(leaves.machine.sent)
    leaves.membership.close(3.0)
    await elapse(SESSION)
    assert leaves.of(Lost) == []
    assert leaves.machine.sent[sent:].count("ConsumerGroupHeartbeat") == 0


async def leaving_while_it_joins(asker: Asker, group: SharedGroup) -> None:
    member = BrokerMember(asker, "a")
    member.membership.leave()
    await until(lambda: member.of(Assigned))
    assert member.of(Assigned)[0].assignment.quit
    assert not group.members


async def closing_within_a_barrier_does_not_wait_for_it(asker: Asker, group: SharedGroup) -> None:
    first = BrokerMember(asker, "a", releases=False)
    await shared(first)
    second = BrokerMember(asker, "b")
    await until(lambda: first.of(Revoked))
    first.membership.close(3.0)
    assert first.membership.group_metadata.generation >= 0
    await until(lambda: second.owned == PARTITIONS, 2.0)
    assert first.membership.group_metadata.generation == -1


async def an_epoch_that_is_fenced_gives_the_id_back(asker: Asker, group: SharedGroup) -> None:
    member = BrokerMember(asker, "a")
    await shared(member)
    former = member.id
    group.members[former].epoch = group.members[former].before = 77
    await until(lambda: member.of(Lost))
    await shared(member)
    assert former not in group.members
    assert [beat.member_epoch for beat in group.beats if beat.member_id == former][-1] == -1


async def a_fenced_static_member_joins_when_its_name_is_free_again(asker: Asker, group: SharedGroup) -> None:
    member = BrokerMember(asker, "a", static=True)
    await shared(member)
    group.members[member.id].epoch = group.members[member.id].before = 77
    member.machine.strikes["ConsumerGroupHeartbeat"] = [None, Strike.REQUEST_LOST]  # the farewell of the old id
    await until(lambda: member.of(Lost))
    await shared(member)
    assert Code.UNRELEASED_INSTANCE_ID not in group.codes


async def a_coordinator_that_forgot_the_group_is_joined_anew_under_another_id(asker: Asker, group: SharedGroup) -> None:
    first, second = BrokerMember(asker, "a"), BrokerMember(asker, "b")
    await shared(first, second)
    before = {first.id, second.id}
    group.forget()
    await until(lambda: first.of(Lost) and second.of(Lost))
    await shared(first, second)
    assert not before & set(group.members)


async def a_coordinator_that_counts_anew_meets_no_id_again(asker: Asker, group: SharedGroup) -> None:
    """Its members are there, and its epochs are old ones."""
    member = BrokerMember(asker, "a")
    await shared(member)
    former, seen = member.id, group.members[member.id]
    seen.before, seen.epoch, group.epoch = member.generation, 0, 0
    await until(lambda: member.of(Lost))
    await until(lambda: member.generation > 0)
    assert member.id != former


async def a_static_member_that_is_back_gets_its_partitions_and_nobody_hears_of_it(
    asker: Asker, group: SharedGroup
) -> None:
    other, goes = BrokerMember(asker, "a", static=True), BrokerMember(asker, "b", static=True)
    await shared(other, goes)
    mine, heard = goes.owned, len(other.events)
    goes.membership.close(3.0)
    await elapse(1.0)
    assert -2 in [beat.member_epoch for beat in group.beats]
    back = BrokerMember(asker, "b", static=True)
    await until(lambda: back.owned == mine)
    assert len(other.events) == heard


async def a_static_member_that_leaves_gives_its_name_back(asker: Asker, group: SharedGroup) -> None:
    member = BrokerMember(asker, "a", static=True)
    await shared(member)
    member.membership.leave()
    await until(lambda: not group.members)
    assert group.beats[-1].member_epoch == -1


async def a_static_name_of_a_killed_predecessor_is_waited_for(asker: Asker, group: SharedGroup) -> None:
    dead = BrokerMember(asker, "a", static=True)
    await shared(dead)
    dead.machine.frozen_until = asker.loop.time() + 1000.0
    successor = BrokerMember(asker, "a", static=True)
    await shared(successor)
    assert not successor.is_fatal()


async def a_static_name_that_is_taken_is_fatal_by_name(asker: Asker, group: SharedGroup) -> None:
    first = BrokerMember(asker, "shop", static=True, rebalance=3.0)
    await shared(first)
    began, second = asker.loop.time(), BrokerMember(asker, "shop", static=True, rebalance=3.0)
    await until(second.is_fatal)
    assert SESSION + 3.0 < asker.loop.time() - began < SESSION + 5.0
    assert isinstance(fatal(second), MembershipFatal)
    assert "'shop'" in str(fatal(second))
    assert first.of(Lost) == []
    assert second.of(Lost) == []


async def a_fenced_static_member_has_nothing_before_it_is_told_why(asker: Asker, group: SharedGroup) -> None:
    member = BrokerMember(asker, "me", static=True)
    await shared(member)
    group.refuses = [Code.FENCED_INSTANCE_ID]
    await until(member.is_fatal)
    assert "another process joined as instance 'me'" in str(fatal(member))
    assert isinstance(member.events[-2], Lost)


async def a_name_that_is_taken_is_not_joined_and_fatal_after_a_session(asker: Asker, group: SharedGroup) -> None:
    first = BrokerMember(asker, "shop")
    await shared(first)
    began, second = asker.loop.time(), BrokerMember(asker, "shop", rebalance=3.0)
    await until(second.is_fatal)
    assert asker.loop.time() - began > SESSION + 3.0
    assert "'shop'" in str(fatal(second))
    assert "ConsumerGroupHeartbeat" not in second.machine.sent
    assert first.of(Lost) == []


async def of_two_that_joined_at_once_the_larger_id_goes(asker: Asker, group: SharedGroup) -> None:
    for theirs, goes in (("0", True), ("z", False)):
        member = BrokerMember(asker, "me", rebalance=3.0)
        await until(lambda member=member: member.of(Assigned))  # type: ignore[misc]
        group.foreign = [("me", theirs)]
        await elapse(SESSION + 3.0 + 3.0)
        assert member.is_fatal() is goes
        group.foreign = []
        if not goes:
            assert member.of(Lost) == []


async def an_engine_that_stands_still_gives_itself_up_once_and_comes_back(asker: Asker, group: SharedGroup) -> None:
    member = BrokerMember(asker, "a", rebalance=5.0)
    await shared(member)
    former, member.is_alive = member.id, False
    await until(lambda: member.of(Lost))
    await elapse(30.0)
    assert (len(member.of(Lost)), group.members) == (1, {})
    member.is_alive = True
    await until(lambda: member.owned == PARTITIONS and member.generation > 0)
    assert member.id != former


async def the_interval_is_that_of_the_answer_and_each_heartbeat_is_a_full_one(asker: Asker, group: SharedGroup) -> None:
    member = BrokerMember(asker, "a", server_assignor="range")
    await shared(member)
    await elapse(5 * BEAT)
    before = len(group.beats)
    await elapse(10 * BEAT)
    assert 9 <= len(group.beats) - before <= 11
    beat = group.beats[-1]
    assert (beat.subscribed_topic_names, beat.server_assignor, beat.rebalance_timeout_ms) == (["topic"], "range", 15000)
    assert {(each.topic_id, *each.partitions) for each in beat.topic_partitions} == {(group.topic_id, *PARTITIONS)}


async def a_topic_that_was_made_anew_is_another_one(asker: Asker, group: SharedGroup) -> None:
    member = BrokerMember(asker, "a")
    await shared(member)
    asker.broker.recreate("topic")
    group.topic_id = asker.broker.topic_id("topic")
    await until(lambda: member.of(Lost))
    await until(lambda: member.owned == PARTITIONS and member.generation > 0)
    await until(lambda: group.beats[-1].topic_partitions)
    assert group.beats[-1].topic_partitions[0].topic_id == group.topic_id


async def a_join_that_names_an_unknown_topic_is_one(asker: Asker, group: SharedGroup) -> None:
    """And the question for the topic fails: heartbeats begin all the same, and tell the rest."""
    member = BrokerMember(asker, "a")
    group.topic_id = uuid4()

    def note(name: str) -> None:
        if name == "ConsumerGroupHeartbeat" and not group.members:
            member.machine.strikes["Metadata"] = [Strike.REQUEST_LOST]

    member.machine.on_send = note
    await until(lambda: member.generation > 0)
    await elapse(SESSION + 2.0)
    assert (member.of(Lost), member.owned) == ([], frozenset())
    group.topic_id = asker.broker.topic_id("topic")
    await shared(member)


async def a_coordinator_that_moves_is_found(asker: Asker, group: SharedGroup) -> None:
    member = BrokerMember(asker, "a")
    await shared(member)
    asker.wire.move(GROUP)
    before = len(group.beats)
    await elapse(5 * BEAT)
    assert len(group.beats) > before
    assert member.of(Lost) == []


async def nobody_is_fenced_by_a_list_that_does_not_have_ourselves(asker: Asker, group: SharedGroup) -> None:
    member = BrokerMember(asker, "a")
    await shared(member)
    group.foreign = [("b", "another")]
    assert await member.take_over._present((), asker.loop.time() + 5.0) == {"a", "b"}
    del group.members[member.id]
    with pytest.raises(BrokerUnavailable, match="no member is fenced"):
        await member.take_over._present((), asker.loop.time() + 5.0)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", ["ConsumerGroupHeartbeat", "FindCoordinator"])
@pytest.mark.parametrize(
    "strike", [Strike.REPLY_LOST, Strike.REQUEST_LOST, Strike.CUT, Strike.LATE, Strike.HANGS, Strike.MOVED,
               Strike.NOT_YET, Strike.FORGOTTEN],
)  # fmt: skip
def test_every_request_may_be_lost_late_or_refused_for_once(name: str, strike: Strike, static: bool) -> None:
    async def script(loop: VirtualTimeLoop) -> None:
        asker = Asker(loop, nodes=2)
        SharedGroup(asker)
        first = BrokerMember(asker, "a", static=static)
        first.machine.strikes[name] = [strike]
        await shared(first, seconds=120.0)
        second = BrokerMember(asker, "b", static=static)
        second.machine.strikes[name] = [None, strike]
        await shared(first, second, seconds=120.0)
        first.machine.strikes[name] = [strike]
        third = BrokerMember(asker, "c", static=static)
        await shared(first, second, third, seconds=120.0)
        assert not any(member.is_fatal() for member in (first, second, third))

    run(script)


@pytest.mark.parametrize("scene", scenes_of(globals()), ids=lambda scene: scene.__name__)
def test_scene(scene: Scene) -> None:
    play(scene)
