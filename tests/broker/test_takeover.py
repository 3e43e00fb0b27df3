"""The questions of a take-over, asked of a real broker that holds what dead members left open."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka import KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from streams.clients.takeover import KafkaPythonTakeOver
from streams.errors import BrokerUnavailable, TopicError
from tests.broker.conftest import GuardedBroker
from tests.broker.membership_kit import (
    PARTITIONS,
    PATIENCE,
    STEADY_MS,
    Seat,
    Table,
    Transactor,
    in_time,
    laid_table,
    make_topic,
    seats,
    until,
)

pytestmark = pytest.mark.broker


@pytest.fixture
def table(kafka_broker: Any, topic_prefix: str) -> Iterator[Table]:
    with laid_table(kafka_broker.bootstrap_servers, topic_prefix) as table:
        yield table


@pytest.fixture
def seat(table: Table) -> Seat:
    seat = table.seat("alive")
    seat.owning(PARTITIONS)
    return seat


def soon(seconds: float = PATIENCE) -> float:
    return time.monotonic() + seconds


def metadata(seat: Seat) -> bytes:
    published = seat.membership.snapshot.metadata
    assert published is not None
    return published


def test_what_a_dead_instance_left_open_is_ended_at_once(table: Table, seat: Seat) -> None:
    """All its slots, and those of others with it."""
    names = [f"{table.group}.dead-{instance}.kes~{slot}" for instance in (1, 2) for slot in (0, 12)]
    left_open = [Transactor(table.servers, name, table.topic) for name in names]
    for partition, dead in enumerate(left_open):
        dead.open(metadata(seat), partition)

    def refused() -> bool:
        with pytest.raises(BrokerUnavailable) as told:
            seat.take_over.stable_offsets([3], soon(1.5))
        return "UnstableOffsetCommit" in str(told.value)

    until(refused, "it is not said why")
    before = time.monotonic()
    assert seat.take_over.fence_departed(["alive", "dead-2"], soon()) == names[:2]
    assert seat.take_over.fence_departed(["alive"], soon()) == names[2:]
    assert seat.take_over.fence_departed(["alive"], soon()) == []
    assert seat.take_over.stable_offsets(range(4), soon()) == dict.fromkeys(range(4))
    assert time.monotonic() - before < 30.0  # their transaction timeout is a minute
    with pytest.raises(KafkaException) as fenced:
        left_open[3].producer.commit_transaction(PATIENCE)
    assert fenced.value.args[0].fatal()


def test_the_living_and_other_groups_are_left_alone(table: Table, seat: Seat) -> None:
    """Ids that look alike: a longer group id, a group id with a dot, a name that is not an instance and a slot, and
    the form that ours had once, of a transaction that is not ours (none of it is in our changelog)."""
    names = [
        f"{table.group}.alive.kes~0",
        f"{table.group}2.dead.kes~0",
        f"{table.group}.b.dead.kes~0",
        f"{table.group}.dead",
        f"{table.group}.dead.0",
        f"{table.group}.dead.x",
    ]
    untouched = [Transactor(table.servers, name, table.topic) for name in names]
    for partition, producer in enumerate(untouched):
        producer.open(metadata(seat), partition)
    assert seat.take_over.fence_departed(["alive"], soon()) == []
    for producer in untouched:
        producer.producer.commit_transaction(PATIENCE)
    assert seat.take_over.stable_offsets(range(6), soon()) == dict.fromkeys(range(6), 1)


def test_what_a_version_before_the_mark_left_open_is_ended_if_it_is_ours(table: Table, topic_prefix: str) -> None:
    changelog = make_topic(table.servers, f"{topic_prefix}changelog", 1)
    seat = table.seat("upgraded", changelog=changelog)
    seat.owning(PARTITIONS)
    ids = [f"{table.group}.{instance}.0" for instance in ("dead", "present", "upgraded")]
    for name in ids:
        left_open = Transactor(table.servers, name, changelog)
        left_open.producer.begin_transaction()
        left_open.producer.produce(changelog, b"x")
        assert left_open.producer.flush(PATIENCE) == 0
    assert seat.take_over.fence_departed(["present", "upgraded"], soon()) == [ids[0], ids[2]]


def test_offsets_and_ranges_of_logs(table: Table, seat: Seat) -> None:
    """Transactions that are open or aborted count in the log, as do markers; what was deleted is not in it."""
    producer = Transactor(table.servers, f"{table.group}.alive.0", table.topic)
    for _ in range(2):
        assert producer.commit(metadata(seat), partition=2) == "ok"  # record and marker
    assert seat.take_over.stable_offsets([1, 2], soon()) == {1: None, 2: 2}
    assert seat.take_over.stable_offsets([], soon()) == {}
    producer.open(metadata(seat), partition=2)
    assert seat.take_over.log_range(table.topic, [1, 2], soon()) == {1: (0, 0), 2: (0, 5)}
    producer.producer.abort_transaction(PATIENCE)
    until(lambda: seat.take_over.log_range(table.topic, [2], soon()) == {2: (0, 6)}, "no abort marker")
    admin = AdminClient({"bootstrap.servers": table.servers})
    for future in admin.delete_records([TopicPartition(table.topic, 2, 3)]).values():
        future.result(PATIENCE)
    assert seat.take_over.log_range(table.topic, [2], soon()) == {2: (3, 6)}


def test_a_topic_that_was_made_again_has_another_id(table: Table, seat: Seat, topic_prefix: str) -> None:
    name = make_topic(table.servers, f"{topic_prefix}again", 1)
    first, partitions = seat.take_over.identity(name, soon())
    assert partitions == 1
    assert first == seat.take_over.identity(name, soon()).topic_id
    assert len(first) == 22  # as kafka-topics prints it
    admin = AdminClient({"bootstrap.servers": table.servers})
    admin.delete_topics([name])[name].result(PATIENCE)

    def made_again() -> bool:
        try:
            make_topic(table.servers, name, 1)
        except KafkaException:
            return False
        return True

    until(made_again, "the topic is not deleted")
    until(lambda: seat.take_over.identity(name, soon()).topic_id != first, "the broker has the old id")


def test_what_does_not_exist_is_a_topic_error(table: Table, seat: Seat) -> None:
    questions: list[tuple[str, Callable[[float], object]]] = [
        ("nowhere", lambda deadline: seat.take_over.log_range("nowhere", [0], deadline)),
        ("nowhere", lambda deadline: seat.take_over.identity("nowhere", deadline)),
        (str(PARTITIONS), lambda deadline: seat.take_over.log_range(table.topic, [PARTITIONS + 7], deadline)),
    ]
    for named, question in questions:

        def told(named: str = named, question: Callable[[float], object] = question) -> bool:
            with pytest.raises((TopicError, BrokerUnavailable)) as error:
                question(soon(1.0))
            return isinstance(error.value, TopicError) and named in str(error.value)  # the other one: no answer in time

        until(told, "it is no topic error")


def member_id(seat: Seat) -> str:
    return seat.membership.snapshot.member_id


@pytest.mark.parametrize("static", [True, False])
def test_a_member_is_removed_by_its_id(table: Table, seat: Seat, static: bool) -> None:
    """It is as good as dead: frozen, and so it neither leaves nor joins again."""
    stuck = table.seat("stuck", static=static)
    stuck.owning(PARTITIONS // 2)
    name, its_id = "stuck" if static else None, member_id(stuck)
    thaw = stuck.freeze()
    since = len(seat.events)
    assert seat.take_over.remove_member(its_id, name, soon())
    seat.owning(PARTITIONS, since, patience=STEADY_MS / 2000)  # long before its session ends
    assert not seat.take_over.remove_member(its_id, name, soon())
    thaw()
    assert stuck.lost().incarnation == 1


@pytest.mark.parametrize("static", [True, False])
def test_the_successor_of_a_dead_member_is_not_removed_in_its_place(table: Table, seat: Seat, static: bool) -> None:
    """What a supervisor says of a dead process may come after the process was started again."""
    name = "again" if static else None
    first = table.seat("again", static=static)
    first.owning(PARTITIONS // 2)
    old = member_id(first)
    first.membership.close(3.0)
    since = len(seat.events)
    if not static:
        seat.owning(PARTITIONS, since)
    successor = table.seat("again", static=static)
    successor.owning(PARTITIONS // 2)
    its_id = member_id(successor)
    assert its_id != old
    for instance in (name, "again", None):
        assert not seat.take_over.remove_member(old, instance, soon())
    with pytest.raises(ValueError, match="member id"):
        seat.take_over.remove_member("", "again", soon())
    assert seat.take_over.remove_member(its_id, name, soon())  # so it was in the group all the time
    assert successor.lost().incarnation == 1


def test_nobody_is_removed_from_a_group_that_is_not_there(table: Table, seat: Seat) -> None:
    gone = KafkaPythonTakeOver(seat.take_over._client, f"{table.group}.never", "t")
    assert not gone.remove_member("somebody", None, soon())
    assert not gone.remove_member("somebody", "x", soon())


def test_the_sizes_of_logs_are_those_on_disk(table: Table, seat: Seat) -> None:
    topic = make_topic(table.servers, f"{table.topic}.sized", 3)
    sizes, until = {}, soon()
    while len(sizes) < 3 and time.monotonic() < until:  # the log of a new topic may not be on disk yet
        sizes = seat.take_over.log_sizes(topic, [0, 1, 2], soon())
    assert sizes == {0: 0, 1: 0, 2: 0}
    producer = Producer({"bootstrap.servers": table.servers})
    for partition in (1, 2):
        for _ in range(10 * partition):
            producer.produce(topic, bytes(10_000), partition=partition)
    assert producer.flush(PATIENCE) == 0
    sizes = seat.take_over.log_sizes(topic, [1, 2], soon())
    assert set(sizes) == {1, 2}
    assert 100_000 <= sizes[1] <= 110_000
    assert 200_000 <= sizes[2] <= 220_000
    assert seat.take_over.log_sizes(topic, [], soon()) == {}


def test_sizes_that_nobody_tells_are_no_error(
    table: Table, seat: Seat, topic_prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="streams.clients.takeover")

    def lines() -> list[logging.LogRecord]:
        return [line for line in caplog.records if line.name == "streams.clients.takeover"]

    assert seat.take_over.log_sizes("nowhere", [0], soon(1.0)) == {}
    assert len(lines()) == 1
    assert seat.take_over.log_sizes(table.topic, [0, PARTITIONS], soon(1.0)) == {}
    assert len(lines()) == 2
    seat.membership.close(5.0)
    assert seat.take_over.log_sizes(table.topic, [0], soon()) == {}
    found: list[dict[int, int]] = []
    with seats() as make:
        alone = make("127.0.0.1:1", f"{topic_prefix}group", "t", "a")
        told = len(lines())
        asked = [lambda: found.append(alone.take_over.log_sizes("t", [0], soon(0.3)))] * 3
        assert in_time(1.0, *asked)
    assert found == [{}] * (len(lines()) - told)
    assert told == 3
    assert all(line.levelno == logging.DEBUG for line in lines())


@pytest.mark.slow
@pytest.mark.nightly
def test_without_the_right_to_it_there_are_no_sizes(
    guarded_broker: GuardedBroker, topic_prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    topic = make_topic(guarded_broker.bootstrap_servers, f"{topic_prefix}t")
    cluster = guarded_broker.rights("BROKER", "kafka-cluster")
    caplog.set_level(logging.DEBUG, logger="streams.clients.takeover")
    with seats() as make:
        seat = make(guarded_broker.bootstrap_servers, f"{topic_prefix}group", topic, "a")
        seat.owning(PARTITIONS)
        assert seat.take_over.log_sizes(topic, [0], soon()) == {0: 0}
        guarded_broker.set(cluster("CLUSTER_ACTION", "ALLOW"), cluster("ALTER", "ALLOW"), cluster("DESCRIBE", "DENY"))
        until(lambda: seat.take_over.log_sizes(topic, [0], soon()) == {}, "it is told all the same")
    assert "ClusterAuthorizationFailed" in caplog.text


def questions_of(seat: Seat) -> list[Callable[[float], object]]:
    ask = seat.take_over
    return [
        lambda deadline: ask.fence_departed([], deadline),
        lambda deadline: ask.stable_offsets([0], deadline),
        lambda deadline: ask.log_range("t", [0], deadline),
        lambda deadline: ask.identity("t", deadline),
        lambda deadline: ask.remove_member("some-id", None, deadline),
    ]


def test_without_a_broker_every_question_keeps_to_its_deadline(topic_prefix: str) -> None:
    with seats() as make:
        seat = make("127.0.0.1:1", f"{topic_prefix}group", "t", "a")
        for question in questions_of(seat):

            def ask(question: Callable[[float], object] = question) -> None:
                with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1:1"):
                    question(soon(0.3))

            assert in_time(1.0, ask, ask, ask)
        seat.membership.close(5.0)
        for question in questions_of(seat):
            with pytest.raises(BrokerUnavailable, match="closed"):
                question(soon())
