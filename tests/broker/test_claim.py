"""Claims on a real broker: who takes one is the only writer, and knows what was written before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from streams.errors import RecordsRefused, TopicError, TransactionFailed
from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.settings import ClientSettings
from streams.model.topics import TopicSpec
from streams.records import Output
from streams.runtime.claim import Claim

pytestmark = [pytest.mark.broker, pytest.mark.timeout(120)]


@pytest.fixture
def topic(admin: TopicAdmin, topic_prefix: str) -> str:
    admin.create([TopicSpec(name=topic_prefix + "log", partitions=2, replication_factor=1)])
    return topic_prefix + "log"


@pytest.fixture
def claims(settings: ClientSettings, topic: str) -> Iterator[list[Claim]]:
    """Three processes that may write to the second partition."""
    with ExitStack() as opened:
        yield [opened.enter_context(Claim(settings, f"{topic}.writer", topic, 1)) for _ in range(3)]


def output(topic: str, value: bytes, partition: int = 1) -> Output:
    return Output(topic, value, b"key", None, partition, 0, 0, -1)


def assert_settled(claim: Claim) -> None:
    """Nothing is open: not even a reader of committed records waits."""
    mark = claim._admin.watermarks(claim.topic, [claim.partition])[claim.partition]
    assert mark.stable == mark.end


def values(claim: Claim, start: int, end: int) -> list[bytes | None]:
    return [record.value for record in claim.read(start, end)]


def test_a_successor_reads_what_was_written_and_the_predecessor_writes_no_more(claims: list[Claim], topic: str) -> None:
    first, second, _ = claims
    mark = first.take()
    assert (mark.start, mark.end) == (0, 0)
    assert first.append([output(topic, b"a"), output(topic, b"elsewhere", 0), output(topic, b"b")]) == 2
    assert first.append([output(topic, b"c")]) == 4  # behind a marker
    mark = second.take()
    assert (mark.end, mark.stable) == (5, 5)
    assert values(second, mark.start, mark.end) == [b"a", b"b", b"c"]
    assert values(second, 4, mark.end) == []  # a marker is all there is
    with pytest.raises(TransactionFailed) as failed:
        first.append([output(topic, b"late")])
    assert failed.value.kind == "fenced"
    assert second.append([output(topic, b"d")]) > 5
    mark = first.take()  # by the order of its own clock: nobody is wrong, and one at a time writes
    assert values(first, 5, mark.end) == [b"d"]
    with pytest.raises(TransactionFailed):
        second.append([output(topic, b"late")])


def test_what_a_predecessor_left_open_is_ended_before_the_end_is_looked_up(claims: list[Claim], topic: str) -> None:
    first, second, third = claims
    first.take()
    first._slot.send([output(topic, b"open")])  # and then it freezes
    mark = second.take()
    assert mark.stable == mark.end >= 2  # the record, and the marker of its abort
    assert values(second, 0, mark.end) == []
    with pytest.raises(TransactionFailed):
        first._slot.commit()
    assert third.take().end == mark.end


def test_an_answer_that_was_lost_is_settled_by_taking_the_claim_again(claims: list[Claim], topic: str) -> None:
    first = claims[0]
    before = first.take().end
    first._slot.send([output(topic, b"kept")])
    first._slot.commit()  # and its answer never comes
    assert values(first, before, first.take().end) == [b"kept"]
    before = first.take().end
    first._slot.send([output(topic, b"dropped")])  # the commit never arrives
    assert values(first, before, first.take().end) == []


def test_records_that_are_refused_leave_nothing(claims: list[Claim], topic: str) -> None:
    first = claims[0]
    before = first.take().end
    with pytest.raises(RecordsRefused):
        first.append([output(topic, b"fine"), output(topic + "-missing", b"x", 0)])
    assert_settled(first)
    mark = first.take()
    assert values(first, before, mark.end) == []
    assert first.append([output(topic, b"fine")]) > before


def test_a_transaction_that_the_log_would_not_tell_of_is_refused(claims: list[Claim], topic: str) -> None:
    claims[0].take()
    with pytest.raises(ValueError, match=r"without a record in .*log\[1\]"):
        claims[0].append([output(topic, b"elsewhere", 0)])


def test_a_missing_topic_has_no_identity(settings: ClientSettings, claims: list[Claim], topic: str) -> None:
    assert claims[0].identity()[1] == 2
    with Claim(settings, "x", topic + "-missing") as claim, pytest.raises(TopicError, match="does not exist"):
        claim.identity()
