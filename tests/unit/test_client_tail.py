"""The tail's consumer over a scripted one of librdkafka: what can not be had from a broker at will."""

from __future__ import annotations

import time

import pytest
from confluent_kafka import KafkaError, Message, TopicPartition

from streams.clients.consumer import LOG_START, TAIL, LogConsumer
from streams.clients.settings import ClientSettings
from streams.errors import TopicError
from tests.unit.scripted_consumer import ScriptedConsumer


class Scripted(ScriptedConsumer):
    """Knows the end of a log as the last fetch told it."""

    high = -1001

    def get_watermark_offsets(self, _partition: TopicPartition, *, cached: bool) -> tuple[int, int]:
        assert cached
        return -1001, self.high


def message(partition: int, offset: int) -> Message:
    return Message(topic="t", partition=partition, offset=offset, key=b"k", value=b"%d" % offset, timestamp=(1, 9))


def said(partition: int, offset: int, code: int = KafkaError._PARTITION_EOF) -> Message:
    return Message(topic="t", partition=partition, offset=offset, error=KafkaError(code))


@pytest.fixture
def script() -> Scripted:
    return Scripted()


@pytest.fixture
def tail(script: Scripted, monkeypatch: pytest.MonkeyPatch) -> LogConsumer:
    monkeypatch.setattr(
        "streams.clients.consumer.build", lambda *_: script
    )  # a real one would tell of its own troubles
    return LogConsumer(ClientSettings("127.0.0.1:1"), "t", TAIL)


def test_holes_of_compaction_move_the_position_and_are_no_records(tail: LogConsumer, script: Scripted) -> None:
    tail.add(0, LOG_START)
    tail.add(1, 40)
    assert script.assigned == [(0, 0), (1, 40)]
    script.messages = [message(0, 7), message(0, 19), said(1, 40), said(0, 60), message(1, 41)]
    script.high = 60
    found = tail.poll_batch(0)
    assert [record.offset for record in found[0].records] == [7, 19]
    assert found[0][1:] == (60, 60, True)
    assert [record.offset for record in found[1].records] == [41]
    assert found[1][1:] == (42, 60, False)  # the end that it had reached is not the end any more


def test_the_end_is_unknown_rather_than_below_the_position(tail: LogConsumer, script: Scripted) -> None:
    tail.add(0, 0)
    script.messages = [message(0, 0)]
    assert tail.poll_batch(0)[0][1:] == (1, -1, False)
    script.messages, script.high = [message(0, 1)], 1
    assert tail.poll_batch(0)[0][1:] == (2, -1, False)
    script.messages, script.high = [message(0, 2)], 3
    assert tail.poll_batch(0)[0][1:] == (3, 3, True)


def test_what_was_removed_or_had_already_is_dropped(tail: LogConsumer, script: Scripted) -> None:
    tail.add(0, 10)
    tail.add(1, 0)
    tail.remove([1])
    script.messages = [message(1, 0), message(0, 3), said(0, 4), said(1, 9), message(0, 10), message(1, 1)]
    found = tail.poll_batch(0)
    assert set(found) == {0}
    assert [record.offset for record in found[0].records] == [10]
    assert not found[0].at_end
    script.messages = [message(0, 10), said(1, 9)]
    assert tail.poll_batch(0) == {}


def test_the_limit_counts_ends_too(tail: LogConsumer, script: Scripted) -> None:
    tail.add(0, 0)
    script.messages = [message(0, 0), message(0, 1), said(0, 2)]
    assert not tail.poll_batch(0, limit=2)[0].at_end
    assert tail.poll_batch(0, limit=1)[0] == ([], 2, -1, True)


def test_a_log_that_does_not_begin_at_0_is_asked_where_it_does(tail: LogConsumer, script: Scripted) -> None:
    tail.add(0, LOG_START)
    tail.add(1, 0)
    script.messages = [said(number, -1001, KafkaError._AUTO_OFFSET_RESET) for number in range(2)]
    assert tail.poll_batch(0) == {}
    assert script.assigned == [(0, 0), (1, 0), (0, -2)]
    assert list(tail.take_failures()) == [1]  # that one was meant
    script.messages = [message(0, 70)]
    assert tail.poll_batch(0)[0].position == 71
    script.messages = [said(0, -1001, KafkaError._AUTO_OFFSET_RESET)]
    tail.poll_batch(0)
    assert list(tail.take_failures()) == [0]


def test_a_log_that_is_cut_while_it_is_read_from_its_start_has_a_hole_that_is_told(
    tail: LogConsumer, script: Scripted
) -> None:
    tail.add(0, LOG_START)
    script.messages = [message(0, 0), said(0, -1001, KafkaError._AUTO_OFFSET_RESET)]
    assert tail.poll_batch(0)[0].position == 1
    assert "offset 1 " in str(tail.take_failures()[0])


def test_errors_of_one_partition_and_of_all(tail: LogConsumer, script: Scripted) -> None:
    for partition in range(3):
        tail.add(partition, 5)
    script.messages = [
        message(0, 5),
        said(0, -1001, KafkaError._AUTO_OFFSET_RESET),
        said(1, -1001, KafkaError._TRANSPORT),  # passes
        said(9, -1001, KafkaError.TOPIC_AUTHORIZATION_FAILED),
        message(2, 5),
    ]
    found = tail.poll_batch(0)
    assert [record.offset for record in found[0].records + found[2].records] == [5, 5]
    failures = tail.take_failures()
    assert list(failures) == [0]
    assert "t[0]: offset 6 " in str(failures[0])
    assert script.unassigned == [0]
    assert tail.take_failures() == {}
    script.messages = [message(0, 6), said(-1, -1001, KafkaError.TOPIC_AUTHORIZATION_FAILED), message(2, 6)]
    assert set(tail.poll_batch(0)) == {2}
    failures = tail.take_failures()
    assert set(failures) == {1, 2}
    assert all(isinstance(error, TopicError) and "ACL" in str(error) for error in failures.values())


def test_no_right_to_the_group_is_no_matter(tail: LogConsumer, script: Scripted) -> None:
    tail.add(0, 5)
    tail._connection.on_error(KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED))
    script.messages = [said(-1, -1001, KafkaError.GROUP_AUTHORIZATION_FAILED), message(0, 5)]
    assert set(tail.poll_batch(0)) == {0}
    assert tail.take_failures() == {}


def test_a_failure_of_what_was_removed_meanwhile_is_not_told(tail: LogConsumer, script: Scripted) -> None:
    tail.add(0, 5)
    script.messages = [said(0, -1001, KafkaError._AUTO_OFFSET_RESET)]
    tail.poll_batch(0)
    tail.remove([0])
    tail.add(0, 0)
    assert tail.take_failures() == {}
    script.messages = [message(0, 0)]
    assert set(tail.poll_batch(0)) == {0}


def test_a_silent_partition_that_is_not_at_its_end_is_fetched_anew(
    tail: LogConsumer, script: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was on its way may have been dropped, and the end of a partition is told once only."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    tail.add(0, 5)
    tail.add(1, 5)
    script.high = 5
    script.messages = [said(1, 5)]
    assert tail.poll_batch(0)[1].at_end
    now += TAIL.silence_seconds
    tail.poll_batch(0)
    assert (script.unassigned, script.assigned[2:]) == ([0], [(0, 5)]), "partition 1 is at its end"
    now += TAIL.silence_seconds
    tail.poll_batch(0)
    assert script.unassigned == [0], "ever more rarely"
    script.messages = [message(0, 5), said(0, 6)]
    script.high = 7
    tail.poll_batch(0)
    now += TAIL.silence_seconds
    tail.poll_batch(0)  # both have an end beyond their positions now
    now += TAIL.silence_seconds
    tail.poll_batch(0)
    assert (sorted(script.unassigned), sorted(script.assigned[3:])) == ([0, 0, 1], [(0, 6), (1, 5)])


def test_a_silent_log_that_does_not_begin_at_0_is_not_fetched_from_there(
    tail: LogConsumer, script: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offset 0 was refused already; asked again for it, the broker would refuse it for good."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    tail.add(0, LOG_START)
    script.messages = [said(0, -1001, KafkaError._AUTO_OFFSET_RESET)]
    tail.poll_batch(0)
    now += TAIL.silence_seconds
    tail.poll_batch(0)
    assert script.assigned == [(0, 0), (0, -2), (0, -2)]


def test_after_an_outage_all_is_fetched_anew_as_soon_as_the_cluster_answers(
    tail: LogConsumer, script: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what was at its end: how far the log goes was told by the last fetch, and there is none."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    tail.add(0, 5)
    script.high = 5
    script.messages = [said(0, 5)]
    assert tail.poll_batch(0)[0].at_end
    tail._connection.on_error(KafkaError(KafkaError._ALL_BROKERS_DOWN))
    script.answers = False
    for _ in range(10):
        now += TAIL.silence_seconds
        assert tail.poll_batch(0) == {}
    assert script.assigned == [(0, 5)], "in vain, as long as nobody answers"
    script.answers = True
    for _ in range(20):
        now += TAIL.silence_seconds
        tail.poll_batch(0)
    assert script.assigned[1:3] == [(0, 5), (0, 5)], "until something comes"
    assert tail._connection.down, "failures of before may still be in the queue, and are told once"
    script.messages = [said(0, 5)]
    assert tail.poll_batch(0)[0].at_end
    assert not tail._connection.down
    script.assigned.clear()
    for _ in range(40):
        now += TAIL.silence_seconds
        tail.poll_batch(0)
    assert script.assigned == []


def test_overrides_of_the_user_win_over_the_bounds() -> None:
    seen: dict[str, object] = {}
    settings = ClientSettings("127.0.0.1:1", {"queued.max.messages.kbytes": 1234})

    def build(_factory: object, config: dict[str, object], _connection: object) -> None:
        seen.update(config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("streams.clients.consumer.build", build)
        LogConsumer(settings, "t", TAIL)
    assert seen["queued.max.messages.kbytes"] == 1234
    assert seen["fetch.max.bytes"] == 8 * 1024 * 1024
    LogConsumer(ClientSettings("127.0.0.1:1", {"message.max.bytes": 20_000_000}), "t", TAIL).close()  # records as large
    assert seen["enable.partition.eof"] is True
    assert seen["isolation.level"] == "read_committed"
