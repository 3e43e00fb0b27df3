from __future__ import annotations

import itertools
import logging
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]

from streams.clients.consumer import INPUT, LogConsumer
from streams.clients.settings import ClientSettings
from streams.errors import OffsetError, TopicError
from tests.unit.scripted_consumer import ScriptedConsumer


class Scripted(ScriptedConsumer):
    """Can be asked for the ends of logs. ``frozen``: no answer comes, and no failure."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: dict[int, int] = {}
        self.frozen = False
        self.admins = 0
        self.questions: list[Future[Any]] = []

    def list_offsets(self, asked: dict[TopicPartition, OffsetSpec], **_: Any) -> dict[TopicPartition, Future[Any]]:
        [place] = asked
        answer: Future[Any] = Future()
        self.questions.append(answer)
        if not self.frozen and self.answers:
            answer.set_result(SimpleNamespace(offset=self.ends.get(place.partition, 0)))
        elif not self.frozen:
            answer.set_exception(KafkaException(KafkaError(KafkaError._TRANSPORT)))
        return {place: answer}


@pytest.fixture
def script() -> Scripted:
    return Scripted()


@pytest.fixture
def consumer(script: Scripted, monkeypatch: pytest.MonkeyPatch) -> LogConsumer:
    monkeypatch.setattr("streams.clients.consumer.build", lambda *_: script)  # a real one tells of its own troubles

    def admin(_: object) -> Any:
        script.admins += 1
        return SimpleNamespace(list_offsets=script.list_offsets, poll=lambda _: 0)

    monkeypatch.setattr("streams.clients.consumer.AdminClient", admin)
    return LogConsumer(ClientSettings("127.0.0.1:1"), "t", INPUT)


def record(partition: int, offset: int, headers: Any = (("h", b"x"),)) -> Message:
    return Message(
        topic="t",
        partition=partition,
        offset=offset,
        key=b"k",
        value=b"%d" % offset,
        headers=headers and [*headers],
        timestamp=(1, 1000 + offset),
    )


def failure(code: int, partition: int, topic: str = "t") -> Message:
    return Message(topic=topic, partition=partition, offset=-1001, error=KafkaError(code, "why"))


def offsets(batch: Any) -> dict[int, list[int]]:
    return {partition: [record.offset for record in progress.records] for partition, progress in batch.items()}


def test_a_batch_is_sorted_by_partition_and_keeps_the_order(consumer: LogConsumer, script: Scripted) -> None:
    consumer.add(0, 10)
    consumer.add(1, 20)
    script.messages = [record(0, 10), record(1, 20), record(1, 21), record(0, 13), record(1, 22)]
    batch = consumer.poll_batch(0)
    assert offsets(batch) == {0: [10, 13], 1: [20, 21, 22]}
    first = batch[0].records[0]
    assert (first.topic, first.key, first.value, first.headers, first.timestamp_ms) == (
        "t", b"k", b"10", (("h", b"x"),), 1010,
    )  # fmt: skip


def test_a_partition_that_is_silent_although_there_is_more_is_fetched_anew(
    consumer: LogConsumer, script: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    consumer.add(0, 10)
    consumer.add(1, 20)
    script.ends = {0: 10, 1: 25}
    consumer.poll_batch(0)
    script.messages = [record(1, 20)]
    now += INPUT.silence_seconds - 1
    consumer.poll_batch(0)
    assert script.assigned == [(0, 10), (1, 20)]
    for _ in range(12):  # 0 is asked, and is at its end; 1 is not
        now += 1
        consumer.poll_batch(0)
    assert (script.assigned[2:], script.unassigned) == ([(1, 21)], [1])
    script.messages = [record(1, 21)]
    assert offsets(consumer.poll_batch(0)) == {1: [21]}


def test_a_broker_that_does_not_tell_the_end_holds_nobody_up(
    consumer: LogConsumer, script: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The question is not waited for: others are read meanwhile, and the answer counts when it comes."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    consumer.add(0, 10)
    consumer.add(1, 20)
    script.frozen = True
    for offset in range(30):
        now += 1
        script.messages = [record(1, 20 + offset)]
        assert offsets(consumer.poll_batch(0)) == {1: [20 + offset]}
    [question] = script.questions  # one at a time
    assert script.assigned == [(0, 10), (1, 20)]
    question.set_result(SimpleNamespace(offset=11))
    consumer.poll_batch(0)
    assert (script.assigned[2:], script.unassigned) == ([(0, 10)], [0])


def test_a_client_that_did_not_find_the_end_is_not_asked_again(
    consumer: LogConsumer, script: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restart of its broker librdkafka's admin client answers FENCED_LEADER_EPOCH for ever."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    consumer.add(0, 10)
    script.answers = False
    for _ in range(60):
        now += 1
        consumer.poll_batch(0)
    assert script.admins == len(script.questions) > 1


def test_the_end_of_a_partition_that_was_given_up_meanwhile_is_passed_over(
    consumer: LogConsumer, script: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    consumer.add(0, 10)
    script.frozen = True
    for _ in range(int(INPUT.silence_seconds) + 2):
        consumer.poll_batch(0)
        now += 1
    consumer.remove([0])
    script.questions[0].set_result(SimpleNamespace(offset=11))
    consumer.poll_batch(0)
    assert script.assigned == [(0, 10)]


def test_records_have_their_own_headers_and_share_what_is_the_same(consumer: LogConsumer, script: Scripted) -> None:
    """Each record that waits with a list of its own is what the garbage collector goes through again and again."""
    kinds: list[Any] = [
        (("__grt__", b"A"),),
        (("__grt__", b"B"),),
        (("__grt__", b"A"), ("__grv__", b"2")),
        (("__grt__", b"A"), ("trace", b"1")),
        (("__grt__", None),),
        None,
    ]
    wanted = [kind for kind in kinds for _ in range(3)] + kinds
    consumer.add(0, 0)
    script.messages = [record(0, offset, headers) for offset, headers in enumerate(wanted)]
    batch = consumer.poll_batch(0)
    found = [each.headers for each in batch[0].records]
    assert found == wanted
    for kind, first in enumerate(range(0, 18, 3)):
        assert found[first] is found[first + 1] is found[first + 2], f"equal ones in a row: {wanted[first]}"
        if kinds[kind] is None or len(kinds[kind]) == 1:
            assert found[18 + kind] is found[first], f"a type, wherever it comes: {wanted[first]}"


def test_after_an_outage_what_is_silent_although_there_is_more_is_fetched_anew(
    consumer: LogConsumer, script: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    consumer.add(0, 10)
    consumer._connection.on_error(KafkaError(KafkaError._ALL_BROKERS_DOWN))
    script.answers = False
    for _ in range(200):
        now += 1
        assert not consumer.poll_batch(0)
    assert script.assigned == [(0, 10)]
    script.answers, script.ends = True, {0: 11}
    for _ in range(int(INPUT.silence_seconds) + 2):
        now += 1
        consumer.poll_batch(0)
    assert script.assigned[1:2] == [(0, 10)], "soon, however long it was away"
    assert not consumer._connection.down


def test_failures_of_before_the_answer_are_not_told_as_another_outage(
    consumer: LogConsumer, script: Scripted, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The end is asked for past the queue that failures come by."""
    caplog.set_level(logging.INFO, logger="streams.clients.connection")
    now, queued = 100.0, [KafkaError(KafkaError._ALL_BROKERS_DOWN)] * 2

    def poll(_timeout: float) -> None:
        while queued:
            consumer._connection.on_error(queued.pop())

    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(script, "poll", poll)
    consumer.add(0, 10)
    consumer.poll_batch(0)
    now += INPUT.silence_seconds + 1
    consumer.poll_batch(0)  # asks
    consumer.poll_batch(0)  # hears the answer
    queued += [KafkaError(KafkaError._ALL_BROKERS_DOWN)] * 2
    consumer.poll_batch(0)
    assert not consumer._connection.down
    said = [record.getMessage() for record in caplog.records]
    assert ["answers again" in line for line in said] == [False, True], said


def test_an_answer_before_an_outage_is_no_answer_in_it(
    consumer: LogConsumer, script: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    consumer.add(0, 10)
    consumer.poll_batch(0)
    now += INPUT.silence_seconds + 1
    consumer.poll_batch(0)  # its end is asked for, and told while all is well
    lost = KafkaError(KafkaError._ALL_BROKERS_DOWN)
    monkeypatch.setattr(script, "poll", lambda _timeout: consumer._connection.on_error(lost))
    consumer.poll_batch(0)
    assert consumer._connection.down


def test_left_overs_of_an_earlier_position_are_dropped(consumer: LogConsumer, script: Scripted) -> None:
    consumer.add(0, 10)
    script.messages = [record(0, 9), record(0, 10), record(0, 10), record(0, 9), record(0, 11)]
    assert offsets(consumer.poll_batch(0)) == {0: [10, 11]}
    script.messages = [record(0, 11), record(0, 5)]
    assert not consumer.poll_batch(0)


def test_nothing_of_a_removed_partition_comes_out(consumer: LogConsumer, script: Scripted) -> None:
    consumer.add(0, 0)
    consumer.add(1, 0)
    consumer.remove([0, 5])
    script.messages = [record(0, 0), record(1, 0), failure(KafkaError._AUTO_OFFSET_RESET, 0)]
    assert offsets(consumer.poll_batch(0)) == {1: [0]}
    assert not consumer.take_failures()
    consumer.add(0, 7)
    script.messages = [record(0, 6), record(0, 7)]
    assert offsets(consumer.poll_batch(0)) == {0: [7]}


def test_a_paused_partition_is_silent_and_keeps_its_position(consumer: LogConsumer, script: Scripted) -> None:
    consumer.add(0, 0)
    script.messages = [record(0, 0), record(0, 1)]
    assert consumer.poll_batch(0)
    consumer.pause([0, 0, 5])
    consumer.pause([0])
    script.messages = [record(0, 2)]  # left over in the local queue
    assert not consumer.poll_batch(0)
    with pytest.raises(ValueError, match=r"t\[0\]"):
        consumer.add(0, 0)
    consumer.resume([0, 5])
    consumer.resume([0])
    assert script.assigned == [(0, 0), (0, 2)]
    script.messages = [record(0, 2)]
    assert offsets(consumer.poll_batch(0)) == {0: [2]}
    consumer.pause([0])
    consumer.remove([0])
    consumer.resume([0])
    assert script.assigned == [(0, 0), (0, 2)]
    assert script.unassigned == [0, 0]


def test_a_partition_is_added_once(consumer: LogConsumer) -> None:
    consumer.add(0, 0)
    with pytest.raises(ValueError, match=r"t\[0\]"):
        consumer.add(0, 5)


def _refuse(_: object) -> None:
    raise KafkaException(KafkaError(KafkaError._STATE))


def test_a_partition_whose_assignment_failed_can_be_added_again(
    consumer: LogConsumer, script: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(script, "incremental_assign", _refuse)
        with pytest.raises(KafkaException):
            consumer.add(0, 7)
    consumer.add(0, 7)
    assert script.assigned == [(0, 7)]


def test_the_limit_holds(consumer: LogConsumer, script: Scripted) -> None:
    consumer.add(0, 0)
    script.messages = [record(0, offset) for offset in range(10)]
    assert offsets(consumer.poll_batch(0, limit=4)) == {0: [0, 1, 2, 3]}
    assert offsets(consumer.poll_batch(0, limit=1)) == {0: [4]}


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (KafkaError._AUTO_OFFSET_RESET, OffsetError),
        (KafkaError.OFFSET_OUT_OF_RANGE, OffsetError),
        (KafkaError._LOG_TRUNCATION, OffsetError),
        (KafkaError.UNKNOWN_TOPIC_OR_PART, TopicError),
        (KafkaError._UNKNOWN_PARTITION, TopicError),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, TopicError),
    ],
)
def test_records_before_an_error_are_not_lost(
    consumer: LogConsumer, script: Scripted, code: int, error: type[Exception]
) -> None:
    consumer.add(0, 4711)
    consumer.add(1, 0)
    script.messages = [record(1, 0), failure(code, 0), record(1, 1)]
    assert offsets(consumer.poll_batch(0)) == {1: [0, 1]}
    [failed] = consumer.take_failures().items()
    assert failed[0] == 0
    assert isinstance(failed[1], error)
    assert "t[0]" in str(failed[1])
    if error is OffsetError:
        assert "4711" in str(failed[1])
    assert not consumer.poll_batch(0)
    assert not consumer.take_failures()  # told once


def test_an_error_of_the_topic_is_kept_while_everything_is_paused(consumer: LogConsumer, script: Scripted) -> None:
    consumer.add(0, 0)
    consumer.pause([0])
    script.messages = [failure(KafkaError.TOPIC_AUTHORIZATION_FAILED, -1)]
    assert not consumer.poll_batch(0)
    [failed] = consumer.take_failures().values()
    assert isinstance(failed, TopicError)


@pytest.mark.parametrize("code", [KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN, KafkaError.REQUEST_TIMED_OUT])
def test_what_passes_is_not_raised(consumer: LogConsumer, script: Scripted, code: int) -> None:
    consumer.add(0, 0)
    script.messages = [failure(code, 0), failure(code, -1), record(0, 0)]
    assert offsets(consumer.poll_batch(0)) == {0: [0]}
    assert not consumer.take_failures()


def test_every_interleaving_of_two_partitions_and_a_stranger(consumer: LogConsumer, script: Scripted) -> None:
    """Small and complete: all orders of partitions over six places."""
    for places in itertools.product((0, 1, 2), repeat=6):
        consumer.remove([0, 1])
        consumer.add(0, 0)
        consumer.add(1, 0)
        following = {0: 0, 1: 0, 2: 0}
        script.messages = []
        for partition in places:
            script.messages.append(record(partition, following[partition]))
            following[partition] += 1
        wanted = {partition: list(range(following[partition])) for partition in (0, 1) if following[partition]}
        assert offsets(consumer.poll_batch(0)) == wanted, places
        assert consumer._positions == {0: following[0], 1: following[1]}, places
