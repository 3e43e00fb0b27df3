"""The same consumer for the tail of a log, whose ends are told, too."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError

from streams.clients.consumer import LOG_START, TAIL, LogConsumer
from streams.clients.settings import ClientSettings
from streams.errors import TopicError
from tests.unit.scripted_consumer import Reading, end, failure, record

NOT_IN_LOG, FORBIDDEN = KafkaError._AUTO_OFFSET_RESET, KafkaError.TOPIC_AUTHORIZATION_FAILED
SILENCE = TAIL.silence_seconds


@pytest.fixture
def tail(monkeypatch: pytest.MonkeyPatch) -> Reading:
    return Reading(TAIL, monkeypatch)


def test_holes_of_compaction_move_the_position_and_are_no_records(tail: Reading) -> None:
    tail.add(p0=LOG_START, p1=40)
    assert tail.script.assigned == [(0, 0), (1, 40)]
    tail.script.high = 60
    found = tail.poll(record(0, 7), record(0, 19), end(1, 40), end(0, 60), record(1, 41))
    assert [each.offset for each in found[0].records] == [7, 19]
    assert found[0][1:] == (60, 60, True)
    assert [each.offset for each in found[1].records] == [41]
    assert found[1][1:] == (42, 60, False)  # the end that it had reached is not the end any more


def test_the_end_is_unknown_rather_than_below_the_position(tail: Reading) -> None:
    tail.add(p0=0)
    assert tail.poll(record(0, 0))[0][1:] == (1, -1, False)
    tail.script.high = 1
    assert tail.poll(record(0, 1))[0][1:] == (2, -1, False)
    tail.script.high = 3
    assert tail.poll(record(0, 2))[0][1:] == (3, 3, True)


def test_what_was_removed_or_had_already_is_dropped(tail: Reading) -> None:
    tail.add(p0=10, p1=0)
    tail.consumer.remove([1])
    [(number, found)] = tail.poll(
        record(1, 0), record(0, 3), end(0, 4), end(1, 9), record(0, 10), record(1, 1)
    ).items()  # fmt: skip
    assert (number, [each.offset for each in found.records], found.at_end) == (0, [10], False)
    assert tail.poll(record(0, 10), end(1, 9)) == {}


def test_the_limit_counts_ends_too(tail: Reading) -> None:
    tail.add(p0=0)
    assert not tail.poll(record(0, 0), record(0, 1), end(0, 2), limit=2)[0].at_end
    assert tail.poll(limit=1)[0] == ([], 2, -1, True)


def test_a_log_that_does_not_begin_at_0_is_asked_where_it_does(tail: Reading) -> None:
    tail.add(p0=LOG_START, p1=0)
    assert tail.poll(failure(NOT_IN_LOG, 0), failure(NOT_IN_LOG, 1)) == {}
    assert tail.script.assigned == [(0, 0), (1, 0), (0, -2)]
    assert list(tail.consumer.take_failures()) == [1]  # that one was meant
    tail.poll_each(SILENCE, 1)
    assert tail.script.assigned[3:] == [(0, -2)], "silent: asked again for 0, the broker would refuse it for good"
    assert tail.poll(record(0, 70))[0].position == 71
    tail.poll(failure(NOT_IN_LOG, 0))
    assert list(tail.consumer.take_failures()) == [0]


def test_a_log_that_is_cut_while_it_is_read_from_its_start_has_a_hole_that_is_told(tail: Reading) -> None:
    tail.add(p0=LOG_START)
    assert tail.poll(record(0, 0), failure(NOT_IN_LOG, 0))[0].position == 1
    assert "offset 1 " in str(tail.consumer.take_failures()[0])


def test_errors_of_one_partition_and_of_all(tail: Reading) -> None:
    tail.add(p0=5, p1=5, p2=5)
    passes, of_another = failure(KafkaError._TRANSPORT, 1), failure(FORBIDDEN, 9)
    found = tail.offsets(record(0, 5), failure(NOT_IN_LOG, 0), passes, of_another, record(2, 5))
    assert found == {0: [5], 2: [5]}
    failures = tail.consumer.take_failures()
    assert list(failures) == [0]
    assert "t[0]: offset 6 " in str(failures[0])
    assert tail.script.unassigned == [0]
    assert tail.consumer.take_failures() == {}
    assert set(tail.poll(record(0, 6), failure(FORBIDDEN, -1), record(2, 6))) == {2}
    failures = tail.consumer.take_failures()
    assert set(failures) == {1, 2}
    assert all(isinstance(error, TopicError) and "ACL" in str(error) for error in failures.values())


def test_no_right_to_the_group_is_no_matter(tail: Reading) -> None:
    tail.add(p0=5)
    tail.consumer._connection.on_error(KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED))
    assert set(tail.poll(failure(KafkaError.GROUP_AUTHORIZATION_FAILED, -1), record(0, 5))) == {0}
    assert tail.consumer.take_failures() == {}


def test_a_failure_of_what_was_removed_meanwhile_is_not_told(tail: Reading) -> None:
    tail.add(p0=5)
    tail.poll(failure(NOT_IN_LOG, 0))
    tail.consumer.remove([0])
    tail.add(p0=0)
    assert tail.consumer.take_failures() == {}
    assert set(tail.poll(record(0, 0))) == {0}


def test_a_silent_partition_that_is_not_at_its_end_is_fetched_anew(tail: Reading) -> None:
    """What was on its way may have been dropped, and the end of a partition is told once only."""
    tail.add(p0=5, p1=5)
    tail.script.high = 5
    assert tail.poll(end(1, 5))[1].at_end
    tail.poll_each(SILENCE, 1)
    assert (tail.script.unassigned, tail.script.assigned[2:]) == ([0], [(0, 5)]), "partition 1 is at its end"
    tail.poll_each(SILENCE, 1)
    assert tail.script.unassigned == [0], "ever more rarely"
    tail.script.high = 7
    tail.poll(record(0, 5), end(0, 6))
    tail.poll_each(SILENCE, 2)  # both have an end beyond their positions now
    assert (sorted(tail.script.unassigned), sorted(tail.script.assigned[3:])) == ([0, 0, 1], [(0, 6), (1, 5)])


def test_after_an_outage_all_is_fetched_anew_as_soon_as_the_cluster_answers(tail: Reading) -> None:
    """Also what was at its end: how far the log goes was told by the last fetch, and there is none."""
    tail.add(p0=5)
    tail.script.high = 5
    assert tail.poll(end(0, 5))[0].at_end
    tail.lose_brokers()
    tail.script.answers = False
    tail.poll_each(SILENCE, 10)
    assert tail.script.assigned == [(0, 5)], "in vain, as long as nobody answers"
    tail.script.answers = True
    tail.poll_each(SILENCE, 20)
    assert tail.script.assigned[1:3] == [(0, 5), (0, 5)], "until something comes"
    assert tail.is_down, "failures of before may still be in the queue, and are told once"
    assert tail.poll(end(0, 5))[0].at_end
    assert not tail.is_down
    tail.script.assigned.clear()
    tail.poll_each(SILENCE, 40)
    assert tail.script.assigned == []


def test_overrides_of_the_user_win_over_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, object] = {}
    settings = ClientSettings("127.0.0.1:1", {"queued.max.messages.kbytes": 1234})
    with monkeypatch.context() as patch:
        patch.setattr("streams.clients.consumer.build", lambda _factory, config, _connection: seen.update(config))
        LogConsumer(settings, "t", TAIL)
    assert seen["queued.max.messages.kbytes"] == 1234
    assert seen["fetch.max.bytes"] == 8 * 1024 * 1024
    assert seen["enable.partition.eof"] is True
    assert seen["isolation.level"] == "read_committed"
    LogConsumer(ClientSettings("127.0.0.1:1", {"message.max.bytes": 20_000_000}), "t", TAIL).close()  # records as large
