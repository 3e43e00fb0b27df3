"""The consumer of an input over a scripted one of librdkafka, alone and beside others: what can not be had from a
broker at will."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from streams.errors import OffsetError, TopicError
from streams.kafka.reading import received as received_module
from streams.kafka.reading.consumer import LOG_START, SILENCE_SECONDS
from streams.kafka.reading.received import received
from tests.unit.scripted_consumer import DOWN, Reading, end, failure, record

SILENCE = SILENCE_SECONDS
NOT_IN_LOG, FORBIDDEN = KafkaError._AUTO_OFFSET_RESET, KafkaError.TOPIC_AUTHORIZATION_FAILED


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Reading:
    return Reading(monkeypatch, ends=False)


def test_a_batch_is_sorted_by_partition_and_keeps_the_order(reading: Reading) -> None:
    reading.add(p0=10, p1=20)
    batch = reading.poll(record(0, 10), record(1, 20), record(1, 21), record(0, 13), record(1, 22))
    assert {number: [each.offset for each in found.records] for number, found in batch.items()} == {
        0: [10, 13], 1: [20, 21, 22],
    }  # fmt: skip
    first = batch[0].records[0]
    assert (first.topic, first.key, first.value, first.headers, first.timestamp_ms) == (
        "t", b"k", b"10", (("h", b"x"),), 1010,
    )  # fmt: skip


def test_a_partition_that_is_silent_although_there_is_more_is_fetched_anew(reading: Reading) -> None:
    reading.add(p0=10, p1=20)
    reading.script.ends = {0: 10, 1: 25}
    reading.poll()
    reading.poll(record(1, 20), after=SILENCE - 1)
    assert reading.script.assigned == [(0, 10), (1, 20)]
    reading.poll_each(1, 12)  # 0 is asked, and is at its end; 1 is not
    assert (reading.script.assigned[2:], reading.script.unassigned) == ([(1, 21)], [1])
    assert reading.offsets(record(1, 21)) == {1: [21]}


def test_a_broker_that_does_not_tell_the_end_holds_nobody_up(reading: Reading) -> None:
    """The question is not waited for: others are read meanwhile, and the answer counts when it comes."""
    reading.add(p0=10, p1=20)
    reading.script.frozen = True
    for offset in range(20, 50):
        assert reading.offsets(record(1, offset), after=1) == {1: [offset]}
    [question] = reading.script.questions  # one at a time
    assert reading.script.assigned == [(0, 10), (1, 20)]
    question.set_result(11)
    reading.poll()
    assert (reading.script.assigned[2:], reading.script.unassigned) == ([(0, 10)], [0])


def test_an_end_that_was_not_found_is_asked_for_again(reading: Reading) -> None:
    reading.add(p0=10)
    reading.script.answers = False
    reading.poll_each(1, 60)
    assert len(reading.script.questions) > 1
    reading.script.answers, reading.script.ends = True, {0: 11}
    reading.poll_each(1, 120)
    assert (0, 10) in reading.script.assigned[1:]


def test_the_end_of_a_partition_that_was_given_up_meanwhile_is_passed_over(reading: Reading) -> None:
    reading.add(p0=10)
    reading.script.frozen = True
    reading.poll_each(1, SILENCE + 2)
    reading.consumer.remove([0])
    reading.script.questions[0].set_result(11)
    reading.poll()
    assert reading.script.assigned == [(0, 10)]


def test_an_end_is_where_nothing_but_markers_is_left(reading: Reading) -> None:
    """A question each, and no wait: with the answer the next look knows."""
    reading.add(p0=10, p1=LOG_START)
    ends, script = reading.consumer.ends, reading.script
    script.high, script.ends = 12, {0: 12}
    assert (ends()[0], script.looked_at) == (12, [(0, 10)])
    assert (ends()[0], ends()[0], script.looked_at) == (10, 10, [(0, 10)])
    script.high, script.answers = 13, False  # one more, which the answer did not see
    assert [ends()[0] for _ in range(6)] == [13] * 6, "nor is there another answer"
    script.answers, script.ends = True, {0: 13}
    assert 10 in [ends()[0] for _ in range(3)]
    reading.poll(record(0, 13))
    script.high, looked_at = 99, len(script.looked_at)
    assert (ends()[0], len(script.looked_at)) == (99, looked_at), "that is more than markers"


def test_records_have_their_own_headers_and_share_what_is_the_same(reading: Reading) -> None:
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
    reading.add(p0=0)
    batch = reading.poll(*(record(0, offset, headers) for offset, headers in enumerate(wanted)))
    found = [each.headers for each in batch[0].records]
    assert found == wanted
    for kind, first in enumerate(range(0, 18, 3)):
        assert found[first] is found[first + 1] is found[first + 2], f"equal ones in a row: {wanted[first]}"
        if kinds[kind] is None or len(kinds[kind]) == 1:
            assert found[18 + kind] is found[first], f"a type, wherever it comes: {wanted[first]}"


def test_headers_that_each_record_has_of_its_own_do_not_pile_up() -> None:
    assert received([]) == ()
    for number in range(5_000):
        assert received([("trace", b"%d" % number)]) == (("trace", b"%d" % number),)
        assert received([("__grt__", b"A"), ("trace", b"%d" % number)])
    assert len(received_module._shared) <= 1024


def test_after_an_outage_what_is_silent_although_there_is_more_is_fetched_anew(reading: Reading) -> None:
    reading.add(p0=10)
    reading.lose_brokers()
    reading.script.answers = False
    reading.poll_each(1, 200)
    assert reading.script.assigned == [(0, 10)]
    reading.script.answers, reading.script.ends = True, {0: 11}
    reading.poll_each(1, SILENCE + 2)
    assert reading.script.assigned[1:2] == [(0, 10)], "soon, however long it was away"
    assert not reading.is_down


def test_failures_of_before_the_answer_are_not_told_as_another_outage(
    reading: Reading, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The end is asked for past the queue that failures come by."""
    caplog.set_level(logging.INFO, logger="streams.kafka.connection")
    queued = [DOWN] * 2

    def poll(_timeout: float) -> None:
        while queued:
            reading.consumer._connection.on_error(queued.pop())

    monkeypatch.setattr(reading.script, "poll", poll)
    reading.add(p0=10)
    reading.poll()
    reading.poll(after=SILENCE + 1)  # asks
    reading.poll()  # hears the answer
    queued += [DOWN] * 2
    reading.poll()
    assert not reading.is_down
    said = [line.getMessage() for line in caplog.records]
    assert ["answers again" in line for line in said] == [False, True], said


def test_an_answer_before_an_outage_is_no_answer_in_it(reading: Reading, monkeypatch: pytest.MonkeyPatch) -> None:
    reading.add(p0=10)
    reading.poll()
    reading.poll(after=SILENCE + 1)  # its end is asked for, and told while all is well
    monkeypatch.setattr(reading.script, "poll", lambda _timeout: reading.lose_brokers())
    reading.poll()
    assert reading.is_down


def test_left_overs_of_an_earlier_position_are_dropped(reading: Reading) -> None:
    reading.add(p0=10)
    assert reading.offsets(*(record(0, offset) for offset in (9, 10, 10, 9, 11))) == {0: [10, 11]}
    assert not reading.poll(record(0, 11), record(0, 5))


def test_nothing_of_a_removed_partition_comes_out(reading: Reading) -> None:
    reading.add(p0=0, p1=0)
    reading.consumer.remove([0, 5])
    assert reading.offsets(record(0, 0), record(1, 0), failure(KafkaError._AUTO_OFFSET_RESET, 0)) == {1: [0]}
    assert not reading.consumer.take_failures()
    reading.add(p0=7)
    assert reading.offsets(record(0, 6), record(0, 7)) == {0: [7]}


def test_a_paused_partition_is_silent_and_keeps_its_position(reading: Reading) -> None:
    consumer = reading.consumer
    reading.add(p0=0)
    assert reading.poll(record(0, 0), record(0, 1))
    consumer.pause([0, 0, 5])
    consumer.pause([0])
    assert not reading.poll(record(0, 2))  # left over in the local queue
    with pytest.raises(ValueError, match=r"t\[0\]"):
        reading.add(p0=0)
    consumer.resume([0, 5])
    consumer.resume([0])
    assert reading.script.assigned == [(0, 0), (0, 2)]
    assert reading.offsets(record(0, 2)) == {0: [2]}
    with pytest.raises(ValueError, match=r"t\[0\]"):
        reading.add(p0=5)
    consumer.pause([0])
    consumer.remove([0])
    consumer.resume([0])
    assert reading.script.assigned == [(0, 0), (0, 2)]
    assert reading.script.unassigned == [0, 0]


def test_a_partition_whose_assignment_failed_can_be_added_again(
    reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise KafkaException(KafkaError(KafkaError._STATE))

    with monkeypatch.context() as broken:
        broken.setattr(reading.script, "incremental_assign", refuse)
        with pytest.raises(KafkaException):
            reading.add(p0=7)
    reading.add(p0=7)
    assert reading.script.assigned == [(0, 7)]


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
def test_records_before_an_error_are_not_lost(reading: Reading, code: int, error: type[Exception]) -> None:
    reading.add(p0=4711, p1=0)
    assert reading.offsets(record(1, 0), failure(code, 0), record(1, 1)) == {1: [0, 1]}
    [(number, failed)] = reading.consumer.take_failures().items()
    assert (number, type(failed)) == (0, error)
    assert "t[0]" in str(failed)
    assert error is not OffsetError or "4711" in str(failed)
    assert not reading.poll()
    assert not reading.consumer.take_failures()  # told once


def test_an_error_of_the_topic_is_kept_while_everything_is_paused(reading: Reading) -> None:
    reading.add(p0=0)
    reading.consumer.pause([0])
    assert not reading.poll(failure(KafkaError.TOPIC_AUTHORIZATION_FAILED, -1))
    [failed] = reading.consumer.take_failures().values()
    assert isinstance(failed, TopicError)


@pytest.mark.parametrize("code", [KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN, KafkaError.REQUEST_TIMED_OUT])
def test_what_passes_is_not_raised(reading: Reading, code: int) -> None:
    reading.add(p0=0)
    assert reading.offsets(failure(code, 0), failure(code, -1), record(0, 0)) == {0: [0]}
    assert not reading.consumer.take_failures()


def test_every_interleaving_of_two_partitions_and_a_stranger(reading: Reading) -> None:
    """Small and complete: all orders of partitions over six places."""
    for places in itertools.product((0, 1, 2), repeat=6):
        reading.consumer.remove([0, 1])
        reading.add(p0=0, p1=0)
        found = reading.offsets(*(record(number, places[:at].count(number)) for at, number in enumerate(places)))
        counts = {number: places.count(number) for number in (0, 1)}
        assert found == {number: list(range(count)) for number, count in counts.items() if count}, places
        assert reading.consumer._positions == counts, places


# -- one of several inputs, whose ends are told, too -------------------------------------------------------------------


@pytest.fixture
def several(monkeypatch: pytest.MonkeyPatch) -> Reading:
    return Reading(monkeypatch, ends=True)


def test_holes_of_compaction_move_the_position_and_are_no_records(several: Reading) -> None:
    several.add(p0=LOG_START, p1=40)
    assert several.script.assigned == [(0, 0), (1, 40)]
    several.script.high = 60
    found = several.poll(record(0, 7), record(0, 19), end(1, 40), end(0, 60), record(1, 41))
    assert [each.offset for each in found[0].records] == [7, 19]
    assert found[0][1:] == (60, 60, True)
    assert [each.offset for each in found[1].records] == [41]
    assert found[1][1:] == (42, 60, False)  # the end that it had reached is not the end any more


def test_the_end_is_unknown_rather_than_below_the_position(several: Reading) -> None:
    several.add(p0=0)
    assert several.poll(record(0, 0))[0][1:] == (1, -1, False)
    several.script.high = 1
    assert several.poll(record(0, 1))[0][1:] == (2, -1, False)
    several.script.high = 3
    assert several.poll(record(0, 2))[0][1:] == (3, 3, True)


def test_the_limit_counts_ends_too(several: Reading) -> None:
    several.add(p0=0)
    assert not several.poll(record(0, 0), record(0, 1), end(0, 2), limit=2)[0].at_end
    assert several.poll(limit=1)[0] == ([], 2, -1, True)


def test_a_log_that_does_not_begin_at_0_is_asked_where_it_does(several: Reading) -> None:
    several.add(p0=LOG_START, p1=0)
    assert several.poll(failure(NOT_IN_LOG, 0), failure(NOT_IN_LOG, 1)) == {}
    assert several.script.assigned == [(0, 0), (1, 0), (0, -2)]
    assert list(several.consumer.take_failures()) == [1]  # that one was meant
    several.poll_each(SILENCE, 1)
    assert several.script.assigned[3:] == [(0, -2)], "silent: asked again for 0, the broker would refuse it for good"
    assert several.poll(record(0, 70))[0].position == 71
    several.poll(failure(NOT_IN_LOG, 0))
    assert list(several.consumer.take_failures()) == [0]


def test_a_log_that_is_cut_while_it_is_read_from_its_start_has_a_hole_that_is_told(several: Reading) -> None:
    several.add(p0=LOG_START)
    assert several.poll(record(0, 0), failure(NOT_IN_LOG, 0))[0].position == 1
    assert "offset 1 " in str(several.consumer.take_failures()[0])


def test_errors_of_one_partition_and_of_all(several: Reading) -> None:
    several.add(p0=5, p1=5, p2=5)
    passes, of_another = failure(KafkaError._TRANSPORT, 1), failure(FORBIDDEN, 9)
    found = several.offsets(record(0, 5), failure(NOT_IN_LOG, 0), passes, of_another, record(2, 5))
    assert found == {0: [5], 2: [5]}
    failures = several.consumer.take_failures()
    assert list(failures) == [0]
    assert "t[0]: offset 6 " in str(failures[0])
    assert several.script.unassigned == [0]
    assert several.consumer.take_failures() == {}
    assert set(several.poll(record(0, 6), failure(FORBIDDEN, -1), record(2, 6))) == {2}
    failures = several.consumer.take_failures()
    assert set(failures) == {1, 2}
    assert all(isinstance(error, TopicError) and "kafka-acls" in str(error) for error in failures.values())


def test_no_right_to_the_group_is_no_matter(several: Reading) -> None:
    several.add(p0=5)
    several.consumer._connection.on_error(KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED))
    assert set(several.poll(failure(KafkaError.GROUP_AUTHORIZATION_FAILED, -1), record(0, 5))) == {0}
    assert several.consumer.take_failures() == {}


def test_a_failure_of_what_was_removed_meanwhile_is_not_told(several: Reading) -> None:
    several.add(p0=5)
    several.poll(failure(NOT_IN_LOG, 0))
    several.consumer.remove([0])
    several.add(p0=0)
    assert several.consumer.take_failures() == {}
    assert set(several.poll(record(0, 0))) == {0}


def test_a_silent_partition_that_is_not_at_its_end_is_fetched_anew(several: Reading) -> None:
    """What was on its way may have been dropped, and the end of a partition is told once only."""
    several.add(p0=5, p1=5)
    several.script.high = 5
    assert several.poll(end(1, 5))[1].at_end
    several.poll_each(SILENCE, 1)
    assert (several.script.unassigned, several.script.assigned[2:]) == ([0], [(0, 5)]), "partition 1 is at its end"
    several.poll_each(SILENCE, 1)
    assert several.script.unassigned == [0], "ever more rarely"
    several.script.high = 7
    several.poll(record(0, 5), end(0, 6))
    several.poll_each(SILENCE, 2)  # both have an end beyond their positions now
    assert (sorted(several.script.unassigned), sorted(several.script.assigned[3:])) == ([0, 0, 1], [(0, 6), (1, 5)])


def test_after_an_outage_all_is_fetched_anew_as_soon_as_the_cluster_answers(several: Reading) -> None:
    """Also what was at its end: how far the log goes was told by the last fetch, and there is none."""
    several.add(p0=5)
    several.script.high = 5
    assert several.poll(end(0, 5))[0].at_end
    several.lose_brokers()
    several.script.answers = False
    several.poll_each(SILENCE, 10)
    assert several.script.assigned == [(0, 5)], "in vain, as long as nobody answers"
    several.script.answers = True
    several.poll_each(SILENCE, 20)
    assert several.script.assigned[1:3] == [(0, 5), (0, 5)], "until something comes"
    assert several.is_down, "failures of before may still be in the queue, and are told once"
    assert several.poll(end(0, 5))[0].at_end
    assert not several.is_down
    several.script.assigned.clear()
    several.poll_each(SILENCE, 40)
    assert several.script.assigned == []
