"""The questions of a take-over, asked of a real broker that holds what dead members left open."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import pytest
from confluent_kafka import KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from streams.errors import BrokerUnavailable, TopicError
from streams.kafka.questions.takeover import WireTakeOver
from tests.broker.membership_kit import PARTITIONS, PATIENCE, Desk, Seat, Transactor, make_topic, until

pytestmark = [pytest.mark.broker, pytest.mark.timeout(180)]


@pytest.fixture
def session_ms() -> int:
    return 30_000


@pytest.fixture
def seat(desk: Desk) -> Seat:
    seat = desk.seat("alive")
    seat.owning(PARTITIONS)
    return seat


def soon(seconds: float = PATIENCE) -> float:
    return time.monotonic() + seconds


def test_what_a_dead_instance_left_open_is_ended_at_once(desk: Desk, seat: Seat) -> None:
    """All its slots, and those of others with it."""
    names = [f"{desk.group}.dead-{instance}.kes~{slot}" for instance in (1, 2) for slot in (0, 12)]
    left_open = [Transactor(desk.servers, name, desk.topic) for name in names]
    for partition, dead in enumerate(left_open):
        dead.open(seat.metadata, partition)

    def refused() -> bool:
        with pytest.raises(BrokerUnavailable) as told:
            seat.take_over.stable_offsets([3], soon(1.5))
        return "UNSTABLE_OFFSET_COMMIT" in str(told.value)

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


def test_the_living_and_other_groups_are_left_alone(desk: Desk, seat: Seat) -> None:
    """Ids that look alike: a longer group id, a group id with a dot, a name that is not an instance and a slot, and
    one without the mark."""
    names = [
        f"{desk.group}.alive.kes~0",
        f"{desk.group}2.dead.kes~0",
        f"{desk.group}.b.dead.kes~0",
        f"{desk.group}.dead",
        f"{desk.group}.dead.0",
        f"{desk.group}.dead.x",
    ]
    untouched = [Transactor(desk.servers, name, desk.topic) for name in names]
    for partition, producer in enumerate(untouched):
        producer.open(seat.metadata, partition)
    assert seat.take_over.fence_departed(["alive"], soon()) == []
    for producer in untouched:
        producer.producer.commit_transaction(PATIENCE)
    assert seat.take_over.stable_offsets(range(6), soon()) == dict.fromkeys(range(6), 1)


def test_offsets_and_ranges_of_logs(desk: Desk, seat: Seat) -> None:
    """Transactions that are open or aborted count in the log, as do markers; what was deleted is not in it."""
    producer = Transactor(desk.servers, f"{desk.group}.alive.0", desk.topic)
    for _ in range(2):
        assert producer.commit(seat.metadata, partition=2) == "ok"  # record and marker
    assert seat.take_over.stable_offsets([1, 2], soon()) == {1: None, 2: 2}
    assert seat.take_over.stable_offsets([], soon()) == {}
    producer.open(seat.metadata, partition=2)
    assert seat.take_over.log_range(desk.topic, [1, 2], soon()) == {1: (0, 0), 2: (0, 5)}
    producer.producer.abort_transaction(PATIENCE)
    until(lambda: seat.take_over.log_range(desk.topic, [2], soon()) == {2: (0, 6)}, "no abort marker")
    admin = AdminClient({"bootstrap.servers": desk.servers})
    for future in admin.delete_records([TopicPartition(desk.topic, 2, 3)]).values():
        future.result(PATIENCE)
    assert seat.take_over.log_range(desk.topic, [2], soon()) == {2: (3, 6)}


def test_what_does_not_exist_is_a_topic_error(desk: Desk, seat: Seat) -> None:
    identity = seat.take_over.identity(desk.topic, soon())
    assert (len(identity.topic_id), identity.partitions) == (22, PARTITIONS), "the id as kafka-topics prints it"
    questions: list[tuple[str, Callable[[float], object]]] = [
        ("nowhere", lambda deadline: seat.take_over.log_range("nowhere", [0], deadline)),
        ("nowhere", lambda deadline: seat.take_over.identity("nowhere", deadline)),
        (str(PARTITIONS), lambda deadline: seat.take_over.log_range(desk.topic, [PARTITIONS + 7], deadline)),
    ]
    for named, question in questions:

        def told(named: str = named, question: Callable[[float], object] = question) -> bool:
            with pytest.raises((TopicError, BrokerUnavailable)) as error:
                question(soon(1.0))
            return isinstance(error.value, TopicError) and named in str(error.value)  # the other one: no answer in time

        until(told, "it is no topic error")


@pytest.mark.parametrize("static", [True, False])
def test_a_member_is_removed_by_its_id(desk: Desk, seat: Seat, static: bool) -> None:
    """It is as good as dead: frozen, and so it neither leaves nor joins again."""
    stuck = desk.seat("stuck", static=static)
    stuck.owning(PARTITIONS // 2)
    name, its_id = "stuck" if static else None, stuck.membership.group_metadata.member_id
    thaw = stuck.freeze()
    since = len(seat.events)
    assert seat.take_over.remove_member(its_id, name, soon())
    seat.owning(PARTITIONS, since, patience=desk.session_ms / 2000)  # long before its session ends
    assert not seat.take_over.remove_member(its_id, name, soon())
    thaw()
    assert stuck.lost().incarnation == 1


@pytest.mark.parametrize("static", [True, False])
def test_the_successor_of_a_dead_member_is_not_removed_in_its_place(desk: Desk, seat: Seat, static: bool) -> None:
    """What a supervisor says of a dead process may come after the process was started again."""
    name = "again" if static else None
    first = desk.seat("again", static=static)
    first.owning(PARTITIONS // 2)
    old = first.membership.group_metadata.member_id
    first.close()
    since = len(seat.events)
    if not static:
        seat.owning(PARTITIONS, since)
    successor = desk.seat("again", static=static)
    successor.owning(PARTITIONS // 2)
    its_id = successor.membership.group_metadata.member_id
    assert its_id != old
    for instance in (name, "again", None):
        assert not seat.take_over.remove_member(old, instance, soon())
    with pytest.raises(ValueError, match="member id"):
        seat.take_over.remove_member("", "again", soon())
    assert seat.take_over.remove_member(its_id, name, soon())  # so it was in the group all the time
    assert successor.lost().incarnation == 1


def test_nobody_is_removed_from_a_group_that_is_not_there(desk: Desk, seat: Seat) -> None:
    gone = WireTakeOver(seat.take_over._client, f"{desk.group}.never", "t")
    assert not gone.remove_member("somebody", None, soon())
    assert not gone.remove_member("somebody", "x", soon())


def test_the_sizes_of_logs_are_those_on_disk(desk: Desk, seat: Seat) -> None:
    topic = make_topic(desk.servers, f"{desk.topic}.sized", 3)
    sizes, until = {}, soon()
    while len(sizes) < 3 and time.monotonic() < until:  # the log of a new topic may not be on disk yet
        sizes = seat.take_over.log_sizes(topic, [0, 1, 2], soon())
    assert sizes == {0: 0, 1: 0, 2: 0}
    producer = Producer({"bootstrap.servers": desk.servers})
    for partition in (1, 2):
        for _ in range(10 * partition):
            producer.produce(topic, bytes(10_000), partition=partition)
    assert producer.flush(PATIENCE) == 0
    sizes = seat.take_over.log_sizes(topic, [1, 2], soon())
    assert set(sizes) == {1, 2}
    assert 100_000 <= sizes[1] <= 110_000
    assert 200_000 <= sizes[2] <= 220_000
    assert seat.take_over.log_sizes(topic, [], soon()) == {}


def test_sizes_that_nobody_tells_are_no_error(desk: Desk, seat: Seat, topic_prefix: str) -> None:
    for topic, partitions in (("nowhere", [0]), (desk.topic, [0, PARTITIONS])):
        assert seat.take_over.log_sizes(topic, partitions, soon(1.0)) == {}
    seat.close()
    assert seat.take_over.log_sizes(desk.topic, [0], soon()) == {}
    with contextlib.closing(Seat("streams", "127.0.0.1:1", f"{topic_prefix}group", "t", "a")) as alone:
        assert alone.take_over.log_sizes("t", [0], soon(0.3)) == {}
