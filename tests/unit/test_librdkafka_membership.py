"""A librdkafka member against a Consumer that says what the test wants, in the order in which it hurts most."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka import KafkaError, TopicPartition

from streams.clients import group_wire
from streams.clients.librdkafka_connect import (
    broker_assignor,
    broker_session_ms,
    classic_assignors,
    connect_librdkafka_group,
    no_other_protocol,
)
from streams.clients.librdkafka_group import Member, Roster, explained
from streams.clients.librdkafka_membership import LibrdkafkaMembership
from streams.clients.librdkafka_term import GroupLog, parse_metadata
from streams.clients.settings import ClientSettings
from streams.errors import BrokerUnavailable, ConfigError, MembershipFatal
from streams.group import Assigned, Fatal, GroupEvent, Lost, Revoked

GROUP, TOPIC = "group", "topic"


def raw(generation: int, member_id: str) -> bytes:
    """Bytes as librdkafka writes them, also such as ours refuses to build."""
    return b"CGMDv2:" + generation.to_bytes(4, "little", signed=True) + f"{GROUP}\0{member_id}\0".encode() + b"\1"


class FakeConsumer:
    """Does what the test posted, on the thread that polls; says what the test set."""

    def __init__(self) -> None:
        self.generation, self.member_id = -1, ""
        self.todo: list[Callable[[], Any]] = []
        self.callbacks: dict[str, Any] = {}
        self.calls: list[str] = []
        self.closed = threading.Event()
        self.lock = threading.Lock()

    def subscribe(self, topics: list[str], **callbacks: Any) -> None:
        assert topics == [TOPIC]
        self.callbacks = callbacks

    def poll(self, seconds: float) -> Any:
        with self.lock:
            work = self.todo.pop(0) if self.todo else None
        if work is None:
            time.sleep(min(seconds, 0.002))
            return None
        return work()

    def consumer_group_metadata(self) -> bytes:
        return raw(self.generation, self.member_id)

    def incremental_assign(self, partitions: list[Any]) -> None:
        assert partitions == []
        self.calls.append("incremental_assign")

    def incremental_unassign(self, partitions: list[Any]) -> None:
        assert partitions == []
        self.calls.append("incremental_unassign")

    def assign(self, partitions: list[Any]) -> None:
        assert partitions == []
        self.calls.append("assign")

    def unassign(self) -> None:
        self.calls.append("unassign")

    def unsubscribe(self) -> None:
        self.calls.append("unsubscribe")

    def close(self) -> None:
        self.closed.set()

    def post(self, work: Callable[[], Any]) -> None:
        with self.lock:
            self.todo.append(work)

    def call_back(self, name: str, *numbers: int) -> None:
        partitions = [TopicPartition(TOPIC, number) for number in numbers]
        self.post(lambda: self.callbacks[name](self, partitions))

    def is_at(self, generation: int, member_id: str) -> None:
        self.generation, self.member_id = generation, member_id


class FakeTakeOver:
    def __init__(self) -> None:
        self.members: list[Roster | Exception] = []
        self.removed: list[tuple[str, str | None]] = []
        self.member_id: Callable[[], str] = str
        self.settings: dict[str, str] = {}

    def roster(self, deadline: float) -> Roster:
        answer = self.members[0] if len(self.members) == 1 else self.members.pop(0) if self.members else Roster()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def remove_member(self, member_id: str, instance: str | None, deadline: float) -> bool:
        self.removed.append((member_id, instance))
        return True

    def group_settings(self, deadline: float) -> dict[str, str]:
        return self.settings


class FakeClient:
    addresses = "nowhere:1"

    def start(self) -> None:
        pass

    def close(self, timeout_seconds: float) -> None:
        pass


class Stage:
    """A membership, the consumers that it built, and what it said."""

    def __init__(self, **settings: Any) -> None:
        self.consumers: list[FakeConsumer] = []
        self.logs: list[Any] = []
        self.heard: list[tuple[GroupEvent, Any]] = []
        self.take_over = FakeTakeOver()
        arguments: dict[str, Any] = {
            "eager": False,
            "broker_side": False,
            "static": False,
            "rebalance_seconds": 5.0,
            "alive": lambda: True,
            "check": lambda _: 1.0,
            **settings,
        }
        take_over: Any = self.take_over
        client: Any = FakeClient()
        build: Any = self._build
        self.membership = LibrdkafkaMembership(take_over, build, GROUP, TOPIC, "me", client=client, **arguments)

    def _build(self, log: Any) -> FakeConsumer:
        self.logs.append(log)
        self.consumers.append(FakeConsumer())
        return self.consumers[-1]

    def start(self) -> FakeConsumer:
        self.membership.start(lambda event: self.heard.append((event, self.membership.snapshot)))
        return self.consumer()

    def consumer(self, number: int = 0) -> FakeConsumer:
        until(lambda: len(self.consumers) > number and bool(self.consumers[number].callbacks), "no consumer")
        return self.consumers[number]

    def joined(self, *numbers: int, generation: int = 1) -> FakeConsumer:
        consumer = self.start()
        consumer.is_at(generation, "id-1")
        consumer.call_back("on_assign", *numbers)
        self.wait(Assigned)
        return consumer

    @property
    def events(self) -> list[GroupEvent]:
        return [event for event, _ in list(self.heard)]

    def wait(self, kind: type, since: int = 0) -> Any:
        def found() -> list[GroupEvent]:
            return [event for event in self.events[since:] if isinstance(event, kind)]

        until(lambda: bool(found()), f"no {kind.__name__}, only {self.events}")
        return found()[0]


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 5.0
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


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
        consumer.post(lambda: None)
        until(lambda: not consumer.todo, "it does not poll")
        assert stage.membership.snapshot.metadata is None
    consumer.call_back("on_assign", 0, 1)
    assert stage.wait(Assigned).added == frozenset({0, 1})
    seen = stage.heard[0][1]
    assert (seen.generation, seen.metadata) == (3, group_wire.group_metadata(GROUP, 3, "id-1", None))


def test_a_new_generation_is_published_between_callbacks_and_within_a_barrier(stages: Stages) -> None:
    stage = stages()
    consumer = stage.joined(0, 1)
    consumer.is_at(2, "id-1")
    until(lambda: stage.membership.snapshot.generation == 2, "not published")
    consumer.call_back("on_revoke", 1)
    stage.wait(Revoked)
    consumer.is_at(3, "id-1")
    until(lambda: stage.membership.snapshot.generation == 3, "not published while the barrier waits")
    assert "incremental_unassign" not in consumer.calls
    stage.membership.released([1, 7])
    until(lambda: "incremental_unassign" in consumer.calls, "the barrier does not end")
    assert stage.membership.snapshot.incarnation == 0


def test_lost_replaces_the_snapshot_first(stages: Stages) -> None:
    stage = stages()
    consumer = stage.joined(0, 1)
    consumer.call_back("on_lost", 0, 1)
    lost = stage.wait(Lost)
    seen = next(snapshot for event, snapshot in stage.heard if event is lost)
    assert (lost.incarnation, seen.incarnation, seen.generation, seen.metadata) == (1, 1, -1, None)


def test_a_new_member_id_before_its_assignment_is_nobody(stages: Stages) -> None:
    """After an eviction librdkafka shows the old generation with a new member id for a while."""
    stage = stages()
    consumer = stage.joined(0, 1, generation=3)
    consumer.is_at(3, "")
    stage.wait(Lost)
    consumer.is_at(3, "id-2")
    consumer.call_back("on_lost", 0, 1)
    until(lambda: not consumer.todo, "it does not poll")
    assert stage.membership.snapshot.metadata is None
    consumer.is_at(5, "id-2")
    consumer.call_back("on_assign", 1)
    event = stage.wait(Assigned, since=2)
    assert (event.incarnation, event.generation, event.added) == (1, 5, frozenset({1}))
    assert len(stage.consumers) == 1, "an orderly loss needs no other Consumer"
    assert [type(event) for event in stage.events] == [Assigned, Lost, Assigned]


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
    assert consumer.closed.wait(5.0)
    consumer.callbacks["on_revoke"](consumer, [TopicPartition(TOPIC, 0)])  # what its close calls back is not ours
    consumer.callbacks["on_assign"](consumer, [TopicPartition(TOPIC, 0)])
    successor.is_at(6, "id-3")
    successor.call_back("on_assign", 0)
    event = stage.wait(Assigned, since=3)
    assert (event.incarnation, event.owned) == (1, frozenset({0}))
    assert [type(event) for event in stage.events] == [Assigned, Revoked, Lost, Assigned]


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
    assert [type(event) for event in stage.events] == [Assigned, Lost]


def test_a_member_of_an_eager_strategy_gives_up_everything_and_takes_the_new_list(stages: Stages) -> None:
    stage = stages(eager=True)
    consumer = stage.joined(0, 1)
    consumer.call_back("on_revoke", 0, 1)
    assert stage.wait(Revoked).partitions == frozenset({0, 1})
    stage.membership.released([0, 1])
    until(lambda: consumer.calls == ["assign", "unassign"], f"it calls {consumer.calls}")
    consumer.is_at(2, "id-1")
    consumer.call_back("on_assign", 1)
    event = stage.wait(Assigned, since=2)
    assert (event.owned, event.added) == (frozenset({1}), frozenset({1}))


def test_a_barrier_has_the_rebalance_timeout(stages: Stages) -> None:
    stage = stages(rebalance_seconds=0.2)
    consumer = stage.joined(0, 1)
    consumer.call_back("on_revoke", 1)
    assert "not released" in stage.wait(Lost).reason
    stage.consumer(1)


def test_leaving(stages: Stages) -> None:
    stage = stages(static=True)
    consumer = stage.joined(0, 1)
    stage.membership.leave()
    until(lambda: "unsubscribe" in consumer.calls, "it does not unsubscribe")
    consumer.call_back("on_revoke", 0, 1)
    stage.wait(Revoked)
    stage.membership.released([0, 1])
    event = stage.wait(Assigned, since=1)
    assert (event.owned, event.assignment.quit) == (frozenset(), True)
    assert stage.membership.snapshot.metadata is None
    assert stage.take_over.removed == [("id-1", "me")]
    until(consumer.closed.is_set, "the consumer stays open")
    assert Lost not in [type(event) for event in stage.events]


def test_leaving_while_it_joins(stages: Stages) -> None:
    stage = stages()
    consumer = stage.start()
    stage.membership.leave()
    assert stage.wait(Assigned).owned == frozenset()
    assert consumer.closed.wait(5.0)


def test_closing_within_a_barrier_does_not_wait_for_it(stages: Stages) -> None:
    stage = stages()
    consumer = stage.joined(0, 1)
    consumer.call_back("on_revoke", 1)
    stage.wait(Revoked)
    began = time.monotonic()
    stage.membership.close(4.0)
    assert time.monotonic() - began < 2.0
    assert consumer.closed.is_set()
    assert stage.membership.snapshot.metadata is None


def test_the_broker_side_protocol_keeps_the_member_id(stages: Stages) -> None:
    stage = stages(broker_side=True)
    consumer = stage.start()
    consumer.is_at(0, "id-1")
    consumer.post(lambda: None)
    until(lambda: not consumer.todo, "it does not poll")
    assert not stage.events
    consumer.is_at(2, "id-1")  # a member without partitions hears of no assignment
    assert stage.wait(Assigned).owned == frozenset()
    consumer.call_back("on_assign", 0)
    stage.wait(Assigned, since=1)
    consumer.call_back("on_lost", 0)
    stage.wait(Lost)
    time.sleep(0.05)
    assert stage.membership.snapshot.metadata is None, "the old epoch is published again"
    consumer.is_at(0, "id-1")
    consumer.is_at(5, "id-1")
    event = stage.wait(Assigned, since=3)
    assert (event.incarnation, event.generation) == (1, 5)


def test_a_fatal_error_is_told_after_the_loss(stages: Stages) -> None:
    stage = stages(static=True)
    consumer = stage.joined(0)
    stage.logs[0].on_error(KafkaError(KafkaError.FENCED_INSTANCE_ID, "fenced", fatal=True))
    error = stage.wait(Fatal).error
    assert isinstance(error, MembershipFatal)
    assert "another process joined as instance 'me'" in str(error)
    assert isinstance(stage.events[-2], Lost)
    assert consumer.closed.wait(5.0)


def test_a_killed_predecessor_with_our_static_name_is_waited_out(stages: Stages) -> None:
    stage = stages(static=True, broker_side=True)
    stage.start()
    text = KafkaError(KafkaError.UNRELEASED_INSTANCE_ID).str()
    stage.logs[0].on_error(KafkaError(KafkaError._FATAL, f"Fatal error: {text}", fatal=True))
    stage.consumer(1)
    assert not stage.events


def test_a_name_that_is_taken_is_fatal_after_a_session(stages: Stages) -> None:
    stage = stages(rebalance_seconds=0.2, check=lambda _: 0.1)
    stage.take_over.members = [Roster("classic", "range", (Member("other", "me", None),))]
    stage.membership.start(lambda event: stage.heard.append((event, None)))
    assert "'me'" in str(stage.wait(Fatal).error)
    assert not stage.consumers, "it joined"


def test_the_coordinator_is_waited_for(stages: Stages) -> None:
    stage = stages()
    stage.take_over.members = [BrokerUnavailable("no answer"), BrokerUnavailable("no answer"), Roster()]
    stage.start()


def test_of_two_that_joined_at_once_the_larger_id_goes(stages: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streams.clients.librdkafka_membership._RIVAL_LOOK", 0.02)
    stage = stages(rebalance_seconds=0.2, check=lambda _: 0.1)
    both = Roster("classic", "range", (Member("id-0", "me", None), Member("id-1", "me", None)))
    stage.take_over.members = [Roster(), both]
    stage.joined(0)
    assert isinstance(stage.wait(Fatal).error, MembershipFatal)
    stays = stages(rebalance_seconds=0.2, check=lambda _: 0.1)
    stays.take_over.members = [Roster(), Roster("classic", "range", (Member("id-2", "me", None), *both.members[1:]))]
    stays.joined(0)
    time.sleep(0.6)
    assert len(stays.events) == 1


def test_an_engine_that_stands_still_is_given_up(stages: Stages) -> None:
    alive = threading.Event()
    stage = stages(alive=alive.is_set, rebalance_seconds=0.3)
    alive.set()
    consumer = stage.joined(0)
    alive.clear()
    assert "no progress" in stage.wait(Lost).reason
    assert consumer.closed.wait(5.0)
    time.sleep(0.3)
    assert len(stage.consumers) == 1, "it joined for an engine that stands still"
    alive.set()
    stage.consumer(1)


def test_what_metadata_mean() -> None:
    static = group_wire.group_metadata("g", 7, "m", "i")
    assert parse_metadata(static).member_id == "m"
    assert parse_metadata(static).generation == 7
    assert parse_metadata(static).is_member
    for data in (raw(-1, "m"), raw(0, "m"), raw(1, "")):
        assert not parse_metadata(data).is_member
    for data in (b"", b"CGMDv3:" + static[7:], b"CGMDv2:\1\0\0\0", static[:12]):
        with pytest.raises(ValueError, match="unknown version"):
            parse_metadata(data)


@pytest.mark.parametrize("strategies", [("cooperative-sticky",), ("range",), ("roundrobin",), ("roundrobin", "range")])
def test_strategies_that_librdkafka_runs(strategies: tuple[str, ...]) -> None:
    assert classic_assignors(strategies) == ",".join(strategies)
    membership, _ = connect_librdkafka_group(
        ClientSettings("127.0.0.1:1"), "g", "t", "i", strategies, broker_side=False
    )
    consumer = membership._make_consumer(GroupLog("127.0.0.1:1", "test"))  # librdkafka takes the settings
    consumer.close()
    membership.close(1.0)


@pytest.mark.parametrize(
    ("strategies", "what"),
    [
        (("incremental",), "membership 'streams'"),
        (("cooperative-sticky", "range"), "stop all members"),
        (("range", "incremental"), "'incremental'"),
    ],
)
def test_strategies_that_librdkafka_does_not_run(strategies: tuple[str, ...], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        connect_librdkafka_group(ClientSettings("127.0.0.1:1"), "g", "t", "i", strategies, broker_side=False)


def test_strategies_of_the_broker() -> None:
    assert broker_assignor(("cooperative-sticky",)) == "uniform"
    assert broker_assignor(("range",)) == "range"
    for strategies, what in [
        (("roundrobin",), "cannot run the strategy 'roundrobin'"),
        (("incremental",), "membership 'streams'"),
        (("range", "cooperative-sticky"), "takes one strategy"),
    ]:
        with pytest.raises(ConfigError, match=what):
            connect_librdkafka_group(ClientSettings("127.0.0.1:1"), "g", "t", "i", strategies, broker_side=True)


def test_librdkafka_wants_a_rebalance_timeout_that_is_not_below_the_session() -> None:
    with pytest.raises(ConfigError, match="rebalance_timeout_seconds"):
        connect_librdkafka_group(
            ClientSettings("127.0.0.1:1"), "g", "t", "i", ("range",), broker_side=False, rebalance_timeout_ms=5000
        )


def test_a_session_of_the_broker_that_is_too_short_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    take_over: Any = FakeTakeOver()
    assert broker_session_ms(take_over, "g", 5000) == 45_000
    assert "does not tell" in caplog.text
    take_over.settings = {"consumer.session.timeout.ms": "5000"}
    with pytest.raises(ConfigError, match=r"transaction_timeout_seconds \(5\).*kafka-configs"):
        broker_session_ms(take_over, "g", 5000)
    assert broker_session_ms(take_over, "g", 4999) == 5000


def test_a_group_of_our_own_protocol_is_not_taken_over_by_the_broker() -> None:
    no_other_protocol("g", Roster())
    no_other_protocol("g", Roster("consumer", "uniform"))
    no_other_protocol("g", Roster("classic", "cooperative-sticky"))
    with pytest.raises(MembershipFatal, match="membership 'streams'"):
        no_other_protocol("g", Roster("classic", "kes-incremental-1"))
    with pytest.raises(BrokerUnavailable):
        no_other_protocol("g", Roster("classic", ""))


def test_errors_that_pass_and_errors_that_do_not() -> None:
    assert explained("UNKNOWN_TOPIC_OR_PART", "", "g", "i") is None
    for code in [
        "FENCED_INSTANCE_ID",
        "UNRELEASED_INSTANCE_ID",
        "INCONSISTENT_GROUP_PROTOCOL",
        "INVALID_SESSION_TIMEOUT",
        "UNSUPPORTED_ASSIGNOR",
        "UNSUPPORTED_VERSION",
        "GROUP_AUTHORIZATION_FAILED",
        "GROUP_MAX_SIZE_REACHED",
        "INVALID_GROUP_ID",
    ]:
        error = explained(code, "text", "shop", "till-1")
        assert error is not None
        assert "shop" in str(error)
