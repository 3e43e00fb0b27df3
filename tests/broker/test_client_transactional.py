"""The transactional producer on a real broker: what becomes visible, who is fenced, which records are refused."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import pytest

from streams.clients.admin import TopicAdmin
from streams.clients.reader import PartitionReader
from streams.clients.settings import ClientSettings
from streams.clients.transactional import TransactionalProducer
from streams.errors import RecordRefused, Stopped, TransactionFailed
from streams.records import Change, Output
from tests.broker.client_kit import create, group_metadata, output
from tests.unit.waiting import wait_until

pytestmark = [pytest.mark.broker, pytest.mark.timeout(180)]

Make = Callable[..., TransactionalProducer]


@pytest.fixture
def topic(admin: TopicAdmin, topic_prefix: str) -> str:
    create(admin, topic_prefix + "t", 2)
    return topic_prefix + "t"


@pytest.fixture
def small(admin: TopicAdmin, topic_prefix: str) -> str:
    """A topic that takes small records only."""
    create(admin, topic_prefix + "small", 1, max_message_bytes="1000")
    return topic_prefix + "small"


@pytest.fixture
def make(settings: ClientSettings, topic_prefix: str) -> Iterator[Make]:
    producers: list[TransactionalProducer] = []

    def build(name: str = "slot", **options: bool) -> TransactionalProducer:
        producer = TransactionalProducer(settings, topic_prefix + name, transaction_timeout_ms=60_000, **options)
        producers.append(producer)
        producer.init(20)
        return producer

    yield build
    for producer in producers:
        producer.close()


def begin(producer: TransactionalProducer, *outputs: Output) -> None:
    """Open a transaction with these, all acknowledged."""
    producer.begin()
    for each in outputs:
        assert producer.produce(each)
    producer.flush(20)


def committed(settings: ClientSettings, admin: TopicAdmin, topic: str) -> list[tuple[bytes | None, bytes | None]]:
    """Every committed record of the topic; waits for what is still open."""
    ranges = {number: (marks.start, marks.end) for number, marks in admin.watermarks(topic).items()}
    with contextlib.closing(PartitionReader(settings)) as reader:
        found = reader.read_all(topic, ranges, stalled_after_seconds=20)
    return [(record.key, record.value) for records in found.values() for record in records]


def test_what_is_committed_is_there_with_its_offsets_and_what_is_aborted_is_not(
    make: Make, settings: ClientSettings, admin: TopicAdmin, topic: str
) -> None:
    group = topic + ".group"
    assert admin.committed(group, topic) == {}
    producer = make()
    producer.warm_up([topic], 10)
    for number in range(4):
        producer.begin()
        assert producer.produce(output(topic, b"%d" % number, b"k", -1, [("h", b"x"), ("h", None)], timestamp_ms=5))
        assert producer.produce(output(topic, None, b"gone", 1, None))
        producer.poll()
        producer.flush(20)
        producer.send_offsets(topic, {0: number + 1, 1: 7}, group_metadata(group), 20)
        (producer.commit if number < 3 else producer.abort)(20)
    assert producer.refused == []
    assert admin.committed(group, topic) == {0: 3, 1: 7}
    found = committed(settings, admin, topic)
    assert sorted(found, key=repr) == [(b"gone", None)] * 3 + [(b"k", b"0"), (b"k", b"1"), (b"k", b"2")]
    lag = admin.lag(group, topic)
    assert [part.committed for part in lag] == [3, 7]
    assert all(part.lag == max(part.end - (part.committed or 0), 0) for part in lag)


def test_a_later_producer_with_the_same_id_fences_the_earlier_one(
    make: Make, settings: ClientSettings, admin: TopicAdmin, topic: str
) -> None:
    first = make()
    begin(first, output(topic, b"zombie", b"k", 0))
    second = make()
    with pytest.raises(TransactionFailed) as caught:
        first.commit(20)
    assert caught.value.kind == "fenced"
    assert first.transactional_id in str(caught.value)
    assert "a process with the same instance_id?" in str(caught.value), "what to do about it"
    for again in (first.begin, lambda: first.abort(5)):
        with pytest.raises(TransactionFailed) as caught:
            again()
        assert caught.value.kind in {"fenced", "unknown"}
    begin(second, output(topic, b"alive", b"k", 0))
    second.commit(20)
    assert committed(settings, admin, topic) == [(b"k", b"alive")]


def test_offsets_with_metadata_that_is_not_the_groups(make: Make, admin: TopicAdmin, topic: str) -> None:
    """Here of a group without members; who is none among members: ``test_membership_contract.py``."""
    group = topic + ".group"
    admin.committed(group, topic)
    producer = make()
    begin(producer, output(topic, b"v", b"k", 0))
    with pytest.raises(TransactionFailed) as caught:
        producer.send_offsets(topic, {0: 1}, group_metadata(group, 5, "nobody"), 20)
    assert (caught.value.kind, caught.value.code) == ("stale", "ILLEGAL_GENERATION")
    producer.abort(20)
    producer.begin()
    producer.abort(20)


def test_an_unknown_topic_refuses_the_flush_and_is_not_created(make: Make, admin: TopicAdmin, topic: str) -> None:
    make("asks").warm_up([topic, topic + ".nope"], 10)
    producer = make()
    producer.begin()
    producer.produce(output(topic, b"good", b"k", 0))
    producer.produce(output(topic + ".nope", b"bad", b"k"))
    began = time.monotonic()
    with pytest.raises(TransactionFailed, match=r"\.nope") as caught:
        producer.flush(20)
    assert time.monotonic() - began < 15  # the flush may take 20
    assert (caught.value.kind, caught.value.code) == ("blocked", "UNKNOWN_TOPIC_OR_PART")
    assert "create the topic" in str(caught.value)
    assert [(bad.topic, bad.is_own) for bad in producer.refused] == [(topic + ".nope", False)]
    with pytest.raises(TransactionFailed) as caught:  # also when nobody minds the flush
        producer.commit(20)
    assert caught.value.kind in ("abortable", "blocked")
    producer.abort(20)
    assert len(producer.refused) == 1
    producer.begin()
    assert producer.refused == []
    producer.abort(20)
    assert admin.describe([topic + ".nope"]) == {topic + ".nope": None}


def test_a_batch_names_the_innocent_and_one_by_one_does_not(make: Make, small: str) -> None:
    twins = [output(small, b"x" * 5000, b"big", 0) for _ in range(2)]
    for one_by_one in (False, True):
        producer = make(f"slot-{one_by_one}", one_by_one=one_by_one)
        producer.warm_up([small], 10)
        producer.begin()
        for number in range(3):
            producer.produce(output(small, b"x" * 400, b"fits%d" % number, 0))
        for twin in twins:
            producer.produce(twin)
        with pytest.raises(TransactionFailed) as caught:
            producer.flush(20)
        assert (caught.value.kind, caught.value.code) == ("abortable", "MSG_SIZE_TOO_LARGE")
        assert {(bad.topic, bad.partition, bad.is_own) for bad in producer.refused} == {(small, 0, True)}
        named = [bad.output for bad in producer.refused]
        if one_by_one:
            assert all(any(bad is twin for twin in twins) for bad in named)
        else:
            assert set(named) == {None}
        producer.abort(20)


def test_what_the_client_refuses_is_not_part_of_the_transaction(
    make: Make, settings: ClientSettings, admin: TopicAdmin, topic: str
) -> None:
    producer = make()
    producer.warm_up([topic], 10)
    producer.begin()
    with pytest.raises(RecordRefused, match=r"\[9\].*_UNKNOWN_PARTITION"):
        producer.produce(output(topic, b"v", b"k", 9))
    with pytest.raises(RecordRefused, match="MSG_SIZE_TOO_LARGE") as caught:
        producer.produce(output(topic, b"x" * 2_000_000, b"big", 0))
    assert f"{topic}[0]" in str(caught.value)
    assert "b'big'" in str(caught.value)
    many = [output(topic, b"v", b"k", 0), output(topic, b"x" * 2_000_000, b"big", 0), output(topic, b"w", b"k", 0)]
    assert [producer.produce_many(many, first) for first in range(3)] == [1, 1, 3]
    changes = [Change(b"c", b"v"), Change(b"c", b"x" * 2_000_000), Change(b"c", None, type="A")]
    assert [producer.produce_changes(topic, 0, changes, first) for first in range(3)] == [1, 1, 3]
    producer.flush(20)
    producer.commit(20)
    assert committed(settings, admin, topic) == [(b"k", b"v"), (b"k", b"w"), (b"c", b"v"), (b"c", None)]


def test_a_full_queue_says_so_and_the_record_is_not_taken(
    settings: ClientSettings, admin: TopicAdmin, topic: str
) -> None:
    narrow = ClientSettings(settings.bootstrap_servers, {"queue.buffering.max.messages": 10, "linger.ms": 100})
    producer = TransactionalProducer(narrow, topic + ".full", transaction_timeout_ms=60_000)
    producer.init(20)
    producer.begin()
    many = [output(topic, b"%d" % number, b"k", 0) for number in range(15)]
    assert producer.produce_many(many, 0) == 10
    assert not producer.produce(many[10])

    def there_is_room() -> bool:
        producer.poll()
        return producer.produce(output(topic, b"last", b"k", 0))

    wait_until(there_is_room)
    producer.flush(20)
    producer.commit(20)
    assert [value for _, value in committed(settings, admin, topic)] == [*(b"%d" % n for n in range(10)), b"last"]
    producer.close()


def test_calls_out_of_place(make: Make, topic: str) -> None:
    """Without a transaction, without offsets, after the end, which is quick."""
    took, closed = [], make("slot")
    for producer in (make("other"), make("third"), closed):
        with pytest.raises(TransactionFailed) as caught:
            producer.produce(output(topic, b"v", b"k", 0))
        assert caught.value.call == "produce"
        producer.begin()
        with pytest.raises(ValueError, match="not fenced"):
            producer.send_offsets(topic, {}, group_metadata("g"), 5)
        producer.produce(output(topic, b"v", b"k", 0))
        began = time.monotonic()
        producer.close()
        producer.close()
        took.append(time.monotonic() - began)
    assert min(took) < 1, took
    for call in (
        closed.begin,
        closed.poll,
        lambda: closed.produce(output(topic, b"v", None)),
        lambda: closed.commit(1),
    ):
        with pytest.raises(Stopped):
            call()
