"""The simulated group coordinator keeps Kafka's rules: requests in bytes, and what is answered when."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import pytest

from streams.kafka.wire.schemas.heartbeat import HeartbeatRequest
from streams.kafka.wire.schemas.offset_commit import OffsetCommitRequest
from streams.kafka.wire.schemas.offset_fetch import OffsetFetchRequest
from streams.testing.simulation.classic_group import State
from streams.testing.simulation.faults import Strike
from streams.testing.simulation.virtual_time import elapse

from .wire_asker import GROUP, Asker, run

T = TypeVar("T")
Scene = Callable[[Asker], Coroutine[Any, Any, None]]
UNKNOWN, ILLEGAL, REBALANCE, ID_REQUIRED, FENCED, INCONSISTENT = 25, 22, 27, 79, 82, 23


async def now(work: Awaitable[T]) -> T:
    """Take an answer that is there at once."""
    return await asyncio.wait_for(work, 0.001)


def begun(work: Any) -> asyncio.Task[Any]:
    """Send a request whose answer comes later."""
    return asyncio.get_running_loop().create_task(work)


async def waits(task: asyncio.Task[Any]) -> None:
    """Check that a request has no answer yet."""
    await elapse(0.01)
    assert not task.done()


async def pair(asker: Asker, **fields: Any) -> tuple[str, str, int]:
    """A stable group of two: leader, follower, generation."""
    first = await asker.member(**fields)
    second = begun(asker.member(**fields))
    await elapse(0.01)
    assert await asker.heartbeat(first.member_id, first.generation_id) == REBALANCE
    again, joined = await asyncio.gather(asker.join(first.member_id, ("a", b"2"), **fields), second)
    leader, follower, generation = again.member_id, joined.member_id, joined.generation_id
    assert joined.leader == again.leader == leader
    assert [each.member_id for each in again.members] == [leader, follower]
    assert [bytes(each.metadata) for each in again.members] == [b"2", b"1"]
    assert not joined.members
    got = begun(asker.sync(follower, generation, {}))
    await waits(got)
    assert (await asker.sync(leader, generation, {leader: b"L", follower: b"F"})).assignment == b"L"
    assert (await got).assignment == b"F"
    return leader, follower, generation


async def an_id_is_given_first_and_is_waited_for(asker: Asker) -> None:
    first = await asker.member()
    pending = await now(asker.join())
    assert (pending.error_code, pending.generation_id) == (ID_REQUIRED, -1)
    assert await asker.heartbeat(pending.member_id, first.generation_id) == UNKNOWN
    again = begun(asker.join(first.member_id, ("a", b"2")))
    await waits(again)  # for the pending one
    joined = await asker.join(pending.member_id)
    assert joined.generation_id == (await again).generation_id == first.generation_id + 1


async def a_pending_id_ends_with_its_session_or_by_leaving(asker: Asker) -> None:
    first = await asker.member()
    one, other = await asker.join(), await asker.join(session=6.0)
    again = begun(asker.join(first.member_id, ("a", b"2")))
    assert await asker.leave(one.member_id) == 0
    await waits(again)
    await elapse(6.0)
    assert (await now(again)).error_code == 0
    for gone in (one, other):
        assert (await asker.join(gone.member_id)).error_code == UNKNOWN


async def old_versions_join_without_an_id(asker: Asker) -> None:
    for version in range(4):
        joined = await now(asker.join(version=version))
        assert (joined.error_code, joined.protocol_name) == (0, "a")
        assert (await asker.sync(joined.member_id, joined.generation_id, {}, version=min(version, 2))).error_code == 0
        assert await asker.heartbeat(joined.member_id, joined.generation_id, version=min(version, 2)) == 0
        assert await asker.leave(joined.member_id, version=min(version, 2)) == 0


async def strangers_and_stale_generations_are_refused(asker: Asker) -> None:
    leader, follower, generation = await pair(asker)
    assert (await now(asker.join("nobody"))).error_code == UNKNOWN
    assert (await now(asker.sync("nobody", generation, {}))).error_code == UNKNOWN
    assert await asker.heartbeat("nobody", generation) == await asker.leave("nobody") == UNKNOWN
    for wrong in (generation - 1, generation + 1):
        assert (await now(asker.sync(follower, wrong, {}))).error_code == ILLEGAL
        assert await asker.heartbeat(follower, wrong) == ILLEGAL
    assert (await now(asker.sync(leader, generation, {}, protocol_name="b"))).error_code == INCONSISTENT


async def who_joins_again_with_the_same_bytes_gets_the_same_answer(asker: Asker) -> None:
    leader, follower, generation = await pair(asker)
    same = await now(asker.join(follower))
    assert (same.error_code, same.generation_id, list(same.members)) == (0, generation, [])
    again = begun(asker.join(leader, ("a", b"2")))  # the leader's join always begins a rebalance
    await waits(again)
    assert await asker.heartbeat(follower, generation) == REBALANCE
    joined = await asker.join(follower)
    assert (joined.generation_id, (await again).generation_id) == (generation + 1, generation + 1)
    same = await now(asker.join(leader, ("a", b"2")))  # its answer was lost: it gets it again, with the members
    assert (same.generation_id, len(same.members)) == (generation + 1, 2)
    assert await asker.heartbeat(follower, generation + 1) == 0  # while the plan is made
    again = begun(asker.join(follower, ("a", b"3")))
    await waits(again)
    assert (await now(asker.sync(leader, generation + 1, {}))).error_code == REBALANCE


async def a_rebalance_ends_the_wait_for_assignments(asker: Asker) -> None:
    leader, follower, generation = await pair(asker)
    again = begun(asker.join(leader, ("a", b"3")))
    await asker.join(follower, ("a", b"3"))
    await again
    got = begun(asker.sync(follower, generation + 1, {}))
    await waits(got)
    assert await asker.leave(leader) == 0
    assert (await now(got)).error_code == REBALANCE
    assert (await now(asker.join(follower, ("a", b"4")))).leader == follower


async def a_silent_member_ends_with_its_session(asker: Asker) -> None:
    leader, follower, generation = await pair(asker, session=8.0)
    codes = []
    for _ in range(3):
        await elapse(3.9)
        codes.append(await asker.heartbeat(follower, generation))
    assert codes == [0, 0, REBALANCE]
    joined = await now(asker.join(follower, ("a", b"2")))
    assert (joined.leader, len(joined.members)) == (follower, 1)
    assert await asker.heartbeat(leader, generation) == UNKNOWN


async def who_does_not_join_in_time_is_left_out(asker: Asker) -> None:
    leader, follower, generation = await pair(asker, session=60.0, rebalance=15.0)
    again = begun(asker.join(follower, ("a", b"3"), session=60.0))
    for _ in range(2):
        await elapse(7.0)
        assert await asker.heartbeat(leader, generation) == REBALANCE
    await waits(again)
    await elapse(1.0)
    joined = await now(again)
    assert (joined.leader, len(joined.members), joined.generation_id) == (follower, 1, generation + 1)
    assert await asker.heartbeat(leader, generation) == UNKNOWN


async def who_asks_for_no_assignment_in_time_is_left_out(asker: Asker) -> None:
    leader, follower, generation = await pair(asker, session=60.0, rebalance=15.0)
    again = begun(asker.join(leader, ("a", b"3"), session=60.0))
    await asker.join(follower, ("a", b"3"), session=60.0)
    await again
    assert (await now(asker.sync(leader, generation + 1, {}))).error_code == 0
    await elapse(14.0)
    assert await asker.heartbeat(leader, generation + 1) == 0
    await elapse(1.1)
    assert await asker.heartbeat(leader, generation + 1) == REBALANCE
    assert await asker.heartbeat(follower, generation + 1) == UNKNOWN


async def a_new_member_that_waits_does_not_expire_with_its_session(asker: Asker) -> None:
    first = await asker.member(session=60.0, rebalance=50.0)
    second = begun(asker.member(session=6.0))
    await elapse(40.0)
    await waits(second)
    await asker.join(first.member_id, ("a", b"2"))
    assert (await now(second)).error_code == 0


async def the_protocol_is_one_that_all_have_by_majority(asker: Asker) -> None:
    first = await asker.member(("a", b"1"), ("b", b"2"), ("c", b"3"))
    assert first.protocol_name == "a"
    tasks = [begun(asker.member(("b", b"4"), ("c", b"5"))) for _ in range(2)]
    await elapse(0.01)
    again = await asker.join(first.member_id, ("c", b"6"), ("b", b"7"))
    assert {each.protocol_name for each in (again, *await asyncio.gather(*tasks))} == {"b"}
    assert [bytes(each.metadata) for each in again.members] == [b"7", b"4", b"4"]
    assert (await now(asker.join("", ("a", b"1")))).error_code == INCONSISTENT
    assert (await now(asker.join("", protocol_type="connect"))).error_code == INCONSISTENT


async def a_static_member_comes_back_without_a_rebalance(asker: Asker) -> None:
    first = await now(asker.join(group_instance_id="i"))
    assert (await asker.sync(first.member_id, 1, {first.member_id: b"mine"}, group_instance_id="i")).error_code == 0
    back = await now(asker.join(group_instance_id="i"))
    assert (back.error_code, back.generation_id, back.skip_assignment) == (0, 1, True)
    assert back.leader == back.member_id != first.member_id
    assert (await now(asker.sync(back.member_id, 1, {}, group_instance_id="i"))).assignment == b"mine"
    assert await asker.heartbeat(first.member_id, 1, "i") == await asker.leave(first.member_id, "i") == FENCED
    assert (await now(asker.join(first.member_id, group_instance_id="i"))).error_code == FENCED
    assert await asker.leave("", "i") == 0


async def a_static_member_that_waits_is_fenced_by_its_successor(asker: Asker) -> None:
    await asker.member(session=60.0)
    waiting = begun(asker.join(group_instance_id="i"))
    await waits(waiting)
    successor = begun(asker.join(group_instance_id="i"))
    await elapse(0.01)
    assert (await now(waiting)).error_code == FENCED
    await waits(successor)


async def offsets_are_for_members_of_the_generation(asker: Asker) -> None:
    assert await commit(asker, "", -1) == 0  # from outside, while it is empty
    leader, follower, generation = await pair(asker)
    assert await commit(asker, follower, generation, note="by me") == 0
    assert asker.broker.notes == {1: "by me"}
    assert await commit(asker, "", -1) == await commit(asker, "nobody", generation) == UNKNOWN
    assert await commit(asker, follower, generation - 1) == ILLEGAL
    again = begun(asker.join(leader, ("a", b"3")))
    await waits(again)
    assert await commit(asker, follower, generation) == 0  # it is still the old generation
    await asker.join(follower, ("a", b"3"))
    assert await commit(asker, follower, generation + 1) == REBALANCE
    assert await fetch(asker, "changelog") == (0, "by me", 0)
    assert await fetch(asker, "source") == (5, "", 0)
    assert await fetch(asker, "source", 7) == (5, "", 0)
    for name in ("one", "two"):
        asker.broker.init(name, 5.0)
    asker.broker.send_offsets("one", 0, generation + 1, follower, {1: 9})
    assert await fetch(asker, "source") == (-1, "", 88)
    assert await fetch(asker, "source", stable=False) == (5, "", 0)
    assert asker.broker.end("one", 0, True)
    await elapse(1.0)
    assert await fetch(asker, "source") == (9, "", 0)


async def another_coordinator_goes_on_from_the_log(asker: Asker) -> None:
    leader, follower, generation = await pair(asker)
    again = begun(asker.join(leader, ("a", b"3")))
    newcomer = begun(asker.member())
    await elapse(0.01)
    assert (await asker.join(follower, strike=Strike.MOVED)).error_code == 16
    assert (await again).error_code == (await newcomer).error_code == 16
    assert asker.groups.group.state is State.STABLE
    assert await asker.heartbeat(leader, generation) == await asker.heartbeat(follower, generation) == 0
    assert (await now(asker.sync(follower, generation, {}))).assignment == b"F"
    asker.groups.forget()
    assert await asker.heartbeat(leader, generation) == UNKNOWN
    assert (await asker.member()).generation_id == 1  # again


async def a_node_that_does_not_coordinate_says_so(asker: Asker) -> None:
    kind = HeartbeatRequest
    request = kind(group_id=GROUP, generation_id=1, member_id="m", group_instance_id=None)
    wrong = 1 - asker.wire.node_of(GROUP)
    assert (await asker.ask(request, 4, node=wrong)).error_code == 16
    assert (await asker.join(strike=Strike.NOT_YET)).error_code == 14
    assert (await asker.join(strike=Strike.FORGOTTEN)).error_code == 25
    assert (await asker.join(group_id="")).error_code == 24
    assert (await asker.join(session=5.0)).error_code == (await asker.join(session=1801.0)).error_code == 26


SCENES: tuple[Scene, ...] = (
    an_id_is_given_first_and_is_waited_for,
    a_pending_id_ends_with_its_session_or_by_leaving,
    old_versions_join_without_an_id,
    strangers_and_stale_generations_are_refused,
    who_joins_again_with_the_same_bytes_gets_the_same_answer,
    a_rebalance_ends_the_wait_for_assignments,
    a_silent_member_ends_with_its_session,
    who_does_not_join_in_time_is_left_out,
    who_asks_for_no_assignment_in_time_is_left_out,
    a_new_member_that_waits_does_not_expire_with_its_session,
    the_protocol_is_one_that_all_have_by_majority,
    a_static_member_comes_back_without_a_rebalance,
    a_static_member_that_waits_is_fenced_by_its_successor,
    offsets_are_for_members_of_the_generation,
    another_coordinator_goes_on_from_the_log,
    a_node_that_does_not_coordinate_says_so,
)


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_rules_of_a_group(scene: Scene) -> None:
    run(lambda loop: scene(Asker(loop, nodes=2)))


def test_an_empty_group_waits_for_more_members() -> None:
    async def script(loop: Any) -> None:
        asker = Asker(loop, initial_delay=3.0)
        tasks = [begun(asker.member()) for _ in range(3)]
        await elapse(2.9)
        assert not any(task.done() for task in tasks)
        assert {answer.generation_id for answer in await asyncio.gather(*tasks)} == {1}

    run(script)


async def commit(asker: Asker, member: str, generation: int, note: str = "") -> int:
    kind = OffsetCommitRequest
    of = kind.OffsetCommitRequestTopic
    entry = of.OffsetCommitRequestPartition(
        partition_index=1, committed_offset=0 if note else 5, committed_leader_epoch=-1, committed_metadata=note
    )
    topics = [of(name="changelog" if note else "source", partitions=[entry])]
    request = kind(
        group_id=GROUP, generation_id_or_member_epoch=generation, member_id=member,
        group_instance_id=None, topics=topics,
    )  # fmt: skip
    return int((await asker.ask(request, 8)).topics[0].partitions[0].error_code)


async def fetch(asker: Asker, topic: str, version: int = 8, *, stable: bool = True) -> tuple[int, str, int]:
    kind = OffsetFetchRequest
    if version >= 8:
        of = kind.OffsetFetchRequestGroup
        topics = [of.OffsetFetchRequestTopics(name=topic, partition_indexes=[1])]
        groups = [of(group_id=GROUP, topics=topics)]
        answer = await asker.ask(kind(groups=groups, require_stable=stable), version)
        found = answer.groups[0].topics[0].partitions[0]
    else:
        topics = [kind.OffsetFetchRequestTopic(name=topic, partition_indexes=[1])]
        request = kind(group_id=GROUP, topics=topics, require_stable=stable)
        found = (await asker.ask(request, version)).topics[0].partitions[0]
    return found.committed_offset, found.metadata, found.error_code
