"""A librdkafka member against a Consumer that says what the test wants, in the order in which it hurts most."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka import KafkaError, TopicPartition

from streams.errors import BrokerUnavailable, MembershipFatal
from streams.kafka.group.librdkafka_group import Roster, RosterMember, RosterTakeOver
from streams.kafka.wire import group_bytes
from streams.kafka.wire.client import WireClient
from streams.model.group import Assigned, Fatal, Lost, Revoked
from tests.unit.librdkafka_kit import GROUP, TOPIC, Stage
from tests.unit.waiting import PATIENCE, stays, wait_until


@pytest.fixture
def stages() -> Iterator[Callable[..., Stage]]:
    made: list[Stage] = []

    def make(**settings: Any) -> Stage:
        made.append(Stage(**settings))
        return made[-1]

    yield make
    for stage in made:
        stage.membership.close(3.0)


Stages = Callable[..., Stage]


def test_nothing_is_published_before_the_first_assignment(stages: Stages) -> None:
    stage = stages()
    consumer = stage.start()
    for generation, member_id in [(-1, ""), (-1, "id-1"), (3, ""), (3, "id-1")]:
        consumer.is_at(generation, member_id)
        consumer.polled()
        assert stage.membership.group_metadata.metadata is None
    consumer.call_back("on_assign", 0, 1)
    assert stage.wait(Assigned).added == frozenset({0, 1})
    seen = stage.heard[0][1]
    assert (seen.generation, seen.metadata) == (3, group_bytes.group_metadata(GROUP, 3, "id-1", None))


def test_a_new_generation_is_published_between_callbacks_and_within_a_barrier(stages: Stages) -> None:
    stage = stages()
    consumer = stage.joined(0, 1)
    consumer.is_at(2, "id-1")
    wait_until(lambda: stage.membership.group_metadata.generation == 2, "not published")
    consumer.call_back("on_revoke", 1)
    revoked = stage.wait(Revoked)
    consumer.is_at(3, "id-1")
    wait_until(lambda: stage.membership.group_metadata.generation == 3, "not published while the barrier waits")
    stage.membership.released([1], revoked.incarnation + 1, revoked.generation)
    stays(lambda: "incremental_unassign" not in consumer.calls, 0.05, "it ended by an answer of another incarnation")
    stage.membership.released([1, 7], revoked.incarnation, revoked.generation)
    wait_until(lambda: "incremental_unassign" in consumer.calls, "the barrier does not end")
    assert stage.membership.group_metadata.incarnation == 0


def test_a_new_member_id_before_its_assignment_is_nobody(stages: Stages) -> None:
    """After an eviction librdkafka shows the old generation with a new member id for a while."""
    stage = stages()
    consumer = stage.joined(0, 1, generation=3)
    consumer.is_at(3, "")
    assert stage.wait(Lost).incarnation == 1
    seen = stage.heard[-1][1]
    assert (seen.incarnation, seen.generation, seen.metadata) == (1, -1, None), "before the loss was told"
    consumer.is_at(3, "id-2")
    consumer.call_back("on_lost", 0, 1)
    consumer.polled()
    assert stage.membership.group_metadata.metadata is None
    consumer.is_at(5, "id-2")
    consumer.call_back("on_assign", 1)
    event = stage.wait(Assigned, since=2)
    assert (event.incarnation, event.generation, event.added) == (1, 5, frozenset({1}))
    assert len(stage.consumers) == 1, "an orderly loss needs no other Consumer"
    assert stage.kinds == [Assigned, Lost, Assigned]


@pytest.mark.parametrize(("generation", "member_id"), [(3, ""), (-1, "id-1"), (4, "id-2"), (2, "id-1"), (0, "id-1")])
def test_evicted_within_a_barrier(stages: Stages, generation: int, member_id: str) -> None:
    """librdkafka tells nobody then, joins again, and believes to hold the rest: it is not believed."""
    stage = stages()
    consumer = stage.joined(0, 1, 2, generation=3)
    consumer.call_back("on_revoke", 2)
    stage.wait(Revoked)
    consumer.is_at(generation, member_id)
    assert stage.wait(Lost).incarnation == 1
    successor = stage.consumer(1)
    assert consumer.closed.wait(PATIENCE)
    consumer.callbacks["on_revoke"](consumer, [TopicPartition(TOPIC, 0)])  # what its close calls back is not ours
    consumer.callbacks["on_assign"](consumer, [TopicPartition(TOPIC, 0)])
    successor.is_at(6, "id-3")
    successor.call_back("on_assign", 0)
    event = stage.wait(Assigned, since=3)
    assert (event.incarnation, event.owned) == (1, frozenset({0}))
    assert stage.kinds == [Assigned, Revoked, Lost, Assigned]


def test_joined_again_behind_our_back(stages: Stages) -> None:
    """The loss was answered by an assignment that was on its way: the rest of what it holds may be somebody else's."""
    stage = stages()
    consumer = stage.joined(0, 1, generation=3)

    def evicted_and_back() -> None:
        consumer.is_at(5, "id-2")
        consumer.callbacks["on_assign"](consumer, [TopicPartition(TOPIC, 2)])

    consumer.post(evicted_and_back)
    stage.wait(Lost)
    stage.consumer(1)
    assert stage.kinds == [Assigned, Lost]


def test_a_member_of_an_eager_strategy_gives_up_everything_and_takes_the_new_list(stages: Stages) -> None:
    stage = stages(eager=True)
    consumer = stage.joined(0, 1)
    consumer.call_back("on_revoke", 0, 1)
    assert stage.wait(Revoked).partitions == frozenset({0, 1})
    stage.release(0, 1)
    wait_until(lambda: consumer.calls == ["assign", "unassign"], f"it calls {consumer.calls}")
    consumer.is_at(2, "id-1")
    consumer.call_back("on_assign", 1)
    event = stage.wait(Assigned, since=2)
    assert (event.owned, event.added) == (frozenset({1}), frozenset({1}))


def test_a_barrier_has_the_rebalance_timeout(stages: Stages) -> None:
    stage = stages(rebalance_seconds=0.2)
    stage.joined(0, 1).call_back("on_revoke", 1)
    assert "not released" in stage.wait(Lost).reason
    stage.consumer(1)


def test_leaving(stages: Stages) -> None:
    stage = stages(static=True)
    consumer = stage.joined(0, 1)
    stage.membership.leave()
    wait_until(lambda: "unsubscribe" in consumer.calls, "it does not unsubscribe")
    consumer.call_back("on_revoke", 0, 1)
    stage.release(0, 1)
    event = stage.wait(Assigned, since=1)
    assert (event.owned, event.assignment.quit) == (frozenset(), True)
    assert stage.membership.group_metadata.metadata is None
    assert stage.take_over.removed == [("id-1", "me")]
    assert consumer.closed.wait(PATIENCE)
    assert Lost not in stage.kinds


def test_leaving_while_it_joins(stages: Stages) -> None:
    stage = stages()
    consumer = stage.start()
    stage.membership.leave()
    assert stage.wait(Assigned).owned == frozenset()
    assert consumer.closed.wait(PATIENCE)


def test_closing_within_a_barrier_does_not_wait_for_it(stages: Stages) -> None:
    stage = stages(rebalance_seconds=4 * PATIENCE)
    consumer = stage.joined(0, 1)
    consumer.call_back("on_revoke", 1)
    stage.wait(Revoked)
    began = time.monotonic()
    stage.membership.close(2 * PATIENCE)
    assert time.monotonic() - began < PATIENCE
    assert consumer.closed.is_set()
    assert stage.membership.group_metadata.metadata is None


def test_the_broker_side_protocol_keeps_the_member_id(stages: Stages) -> None:
    stage = stages(broker_side=True)
    consumer = stage.start()
    consumer.is_at(0, "id-1")
    consumer.polled()
    assert not stage.events
    consumer.is_at(2, "id-1")  # a member without partitions hears of no assignment
    assert stage.wait(Assigned).owned == frozenset()
    consumer.call_back("on_assign", 0)
    stage.wait(Assigned, since=1)
    consumer.call_back("on_lost", 0)
    stage.wait(Lost)
    stays(lambda: stage.membership.group_metadata.metadata is None, 0.1, "the old epoch is published again")
    consumer.is_at(0, "id-1")
    consumer.is_at(5, "id-1")
    event = stage.wait(Assigned, since=3)
    assert (event.incarnation, event.generation) == (1, 5)


def fatal(code: int) -> KafkaError:
    """As librdkafka says it of another error."""
    return KafkaError(KafkaError._FATAL, f"Fatal error: {KafkaError(code).str()}", fatal=True)


def test_a_fatal_error_is_told_after_the_loss(stages: Stages) -> None:
    stage = stages(static=True)
    consumer = stage.joined(0)
    stage.logs[0].on_error(KafkaError(KafkaError.FENCED_INSTANCE_ID, "fenced", fatal=True))
    error = stage.wait(Fatal).error
    assert isinstance(error, MembershipFatal)
    assert "another process joined as instance 'me'" in str(error)
    assert stage.kinds[-2] is Lost
    assert consumer.closed.wait(PATIENCE)


def test_a_coordinator_that_lost_its_memory_is_joined_anew(stages: Stages) -> None:
    """librdkafka gives up for good when a KIP-848 group is not there any more."""
    stage = stages(broker_side=True)
    consumer = stage.joined(0)
    stage.logs[0].on_error(fatal(KafkaError.GROUP_ID_NOT_FOUND))
    assert stage.wait(Lost).incarnation == 1
    assert consumer.closed.wait(PATIENCE)
    successor = stage.consumer(1)
    successor.is_at(1, "id-2")
    successor.call_back("on_assign", 0)
    wait_until(lambda: any(isinstance(event, Assigned) and event.added for event in stage.events[2:]))
    assert Fatal not in stage.kinds


def test_a_killed_predecessor_with_our_static_name_is_waited_out(stages: Stages) -> None:
    stage = stages(static=True, broker_side=True)
    stage.start()
    stage.logs[0].on_error(fatal(KafkaError.UNRELEASED_INSTANCE_ID))
    stage.consumer(1)
    assert not stage.events


def roster(*ids: str) -> Roster:
    return Roster("classic", "range", tuple(RosterMember(member_id, "me", None) for member_id in ids))


def test_a_name_that_is_taken_is_fatal_after_a_session(stages: Stages) -> None:
    stage = stages(rebalance_seconds=0.2, check=lambda _: 0.1)
    stage.take_over.members = [roster("other")]
    stage.begin()
    assert "'me'" in str(stage.wait(Fatal).error)
    assert not stage.consumers, "it joined"


def test_the_coordinator_is_waited_for(stages: Stages) -> None:
    stage = stages()
    stage.take_over.members = [BrokerUnavailable("no answer"), BrokerUnavailable("no answer"), Roster()]
    stage.start()


def test_of_two_that_joined_at_once_the_larger_id_goes(stages: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streams.kafka.group.librdkafka_membership._RIVAL_SECONDS", 0.02)
    goes, remains = (stages(rebalance_seconds=0.2, check=lambda _: 0.1) for _ in range(2))
    goes.take_over.members = [Roster(), roster("id-0", "id-1")]
    goes.joined(0)
    assert isinstance(goes.wait(Fatal).error, MembershipFatal)
    remains.take_over.members = [Roster(), roster("id-2", "id-1")]
    remains.joined(0)
    stays(lambda: len(remains.events) == 1, 0.6, "both go")


def test_an_engine_that_stands_still_is_given_up(stages: Stages) -> None:
    alive = threading.Event()
    alive.set()
    stage = stages(alive=alive.is_set, rebalance_seconds=0.3)
    consumer = stage.joined(0)
    alive.clear()
    assert "no progress" in stage.wait(Lost).reason
    assert consumer.closed.wait(PATIENCE)
    stays(lambda: len(stage.consumers) == 1, 0.3, "it joined for an engine that stands still")
    alive.set()
    stage.consumer(1)


def test_one_outage_is_told_once(
    stages: Stages, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The client would warn, too, when one question takes it long enough: as long as it takes to stand still for."""
    monkeypatch.setattr("streams.kafka.wire.client._LOG_UNREACHABLE_AFTER", -1.0)  # at once
    monkeypatch.setattr("streams.kafka.group.librdkafka_membership._ASK_SECONDS", 0.05)
    client = WireClient("127.0.0.1:1", "me")
    take_over, asked = RosterTakeOver(client, GROUP, TOPIC), queue.SimpleQueue[int]()

    def roster(deadline: float) -> Roster:
        asked.put(1)
        return RosterTakeOver.roster(take_over, deadline)

    monkeypatch.setattr(take_over, "roster", roster)
    stage = stages(take_over=take_over, client=client)
    stage.begin()
    for _ in range(3):  # the third question is asked after what the first two had to tell
        asked.get(timeout=PATIENCE)
    told = [record.getMessage() for record in caplog.records if "127.0.0.1:1" in record.getMessage()]
    assert len(told) == 1, told
    assert f"group {GROUP}: no broker answers at 127.0.0.1:1" in told[0]
    assert told[0].endswith("trying on")
