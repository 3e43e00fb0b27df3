"""Reading partitions up to a position, and questions about topics and offsets, on a real broker."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from confluent_kafka import TopicPartition

from streams.errors import BrokerUnavailable, OffsetError, Stopped, TopicError
from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.reading.reader import PartitionReader
from streams.kafka.settings import ClientSettings
from streams.kafka.wire.group_bytes import metadata_of_no_member
from streams.model.topics import TopicSpec
from streams.records import IncomingRecord
from streams.testing.faults import KafkaProxy, Rule
from tests.broker.client_kit import PATIENCE, Writer, create, numbers, rows, truncate, writing

pytestmark = [pytest.mark.broker, pytest.mark.timeout(180)]

Read = Callable[..., dict[int, list[str]]]


@pytest.fixture
def topic(admin: TopicAdmin, topic_prefix: str) -> str:
    create(admin, topic_prefix + "t")
    return topic_prefix + "t"


@pytest.fixture
def reader(settings: ClientSettings) -> Iterator[PartitionReader]:
    reader = PartitionReader(settings)
    yield reader
    reader.close()


@pytest.fixture
def read(reader: PartitionReader, topic: str) -> Read:
    return lambda ranges, **more: read_by(reader, topic, ranges, **more)


def read_by(
    reader: PartitionReader,
    topic: str,
    ranges: dict[int, tuple[int, int]],
    seconds: float = PATIENCE,
    cancelled: Callable[[], bool] = lambda: False,
) -> dict[int, list[str]]:
    """Partition -> the values of its records."""
    got: dict[int, list[str]] = {}

    def receive(partition: int, records: list[IncomingRecord]) -> None:
        assert records
        got.setdefault(partition, []).extend((record.value or b"").decode() for record in records)

    reader.read(topic, ranges, receive, stalled_after_seconds=seconds, cancelled=cancelled)
    return got


def test_several_partitions_up_to_their_ends(read: Read, writer: Writer, admin: TopicAdmin, topic: str) -> None:
    for partition in range(2):
        writer.commit(*rows(partition, *numbers(0, 1500)))
    ends = {number: marks.end for number, marks in admin.watermarks(topic).items()}
    writer.commit(*rows(0, "later"))
    assert read({number: (0, end) for number, end in ends.items()}) == dict.fromkeys(range(2), numbers(0, 1500))
    assert read({0: (1498, ends[0]), 1: (5, 7)}) == {0: ["1498", "1499"], 1: ["5", "6"]}
    assert read({0: (7, 7)}) == {}


def test_a_fetch_that_takes_its_time_is_not_given_up(settings: ClientSettings, writer: Writer, topic: str) -> None:
    """A slow line: fetching anew would drop the answer that is on its way, again and again."""
    writer.commit(*rows(0, *["x" * 1_000] * 100))
    with KafkaProxy(settings.bootstrap_servers) as proxy:
        proxy.add(Rule(apis=["Fetch"], action="slow", bytes_per_second=30_000))
        reader = PartitionReader(ClientSettings(proxy.bootstrap_servers))
        try:
            found = read_by(reader, topic, {0: (0, 101)})
        finally:
            reader.close()
        assert len(found[0]) == 100
        assert proxy.passed["Fetch"] <= 3, "one for the records: given up, it would be asked for again each second"


def test_the_end_may_be_markers_and_aborted_records(read: Read, writer: Writer, admin: TopicAdmin, topic: str) -> None:
    writer.commit(*rows(0, "a"))
    for _ in range(5):
        writer.abort(*rows(0, *["aborted"] * 20))
    end = admin.watermarks(topic)[0].end
    assert end > 100
    assert read({0: (0, end)}) == {0: ["a"]}
    assert read({0: (2, end)}) == {}


def test_an_open_transaction_holds_the_end_back_until_it_ends(
    read: Read, writer: Writer, settings: ClientSettings, admin: TopicAdmin, topic: str
) -> None:
    writer.commit(*rows(0, "a"))
    writer.begin(*rows(0, "open"))
    with writing(settings, topic, "other") as other:
        other.commit(*rows(0, "b"))
    marks = admin.watermarks(topic)[0]
    assert marks.stable < marks.end
    assert read({0: (0, marks.stable)}) == {0: ["a"]}
    began = time.monotonic()
    with pytest.raises(BrokerUnavailable, match="no progress for 1 s") as caught:
        read({0: (0, marks.end)}, seconds=1.0)
    assert time.monotonic() - began < PATIENCE / 2
    assert f"{topic}[0] at {marks.stable} of {marks.end}" in str(caught.value)
    asked = 0

    def commits_at_the_tenth_question() -> bool:
        nonlocal asked
        asked += 1
        if asked == 10:
            writer.commit()
        return False

    assert read({0: (0, marks.end)}, cancelled=commits_at_the_tenth_question) == {0: ["a", "open", "b"]}
    assert asked >= 10


def test_what_ends_a_reading_and_the_reader_can_be_used_again(
    read: Read, reader: PartitionReader, writer: Writer, settings: ClientSettings, topic: str
) -> None:
    writer.commit(*rows(0, *numbers(0, 10)))
    truncate(settings, topic, 0, 5)
    with pytest.raises(OffsetError) as caught:
        read({0: (2, 10)})
    assert f"{topic}[0]: offset 2 " in str(caught.value)
    with pytest.raises(TopicError, match=r"\.nope"):
        read_by(reader, topic + ".nope", {0: (0, 5)})
    with pytest.raises(Stopped, match=topic):
        read({0: (5, 10)}, cancelled=lambda: True)

    def broken(_partition: int, _records: list[IncomingRecord]) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        reader.read(topic, {0: (5, 10)}, broken, stalled_after_seconds=PATIENCE, cancelled=lambda: False)
    assert read({0: (5, 10)}) == {0: numbers(5, 10)}


def test_create_describe_compare_delete(admin: TopicAdmin, topic_prefix: str) -> None:
    spec = TopicSpec(name=topic_prefix + "a", partitions=4, replication_factor=1, configs={"cleanup.policy": "compact"})
    assert admin.describe([spec.name]) == {spec.name: None}
    assert admin.differences([spec]) == [f"topic {spec.name} does not exist"]
    assert admin.create([spec]) == [spec.name]
    assert admin.create([spec]) == []
    assert admin.differences([spec, spec]) == []
    found = admin.describe([spec.name])[spec.name]
    assert found is not None
    assert (found.partitions, found.replication_factor) == (4, 1)
    assert found.configs["cleanup.policy"] == "compact"
    admin.delete([spec.name, topic_prefix + "never-there"])
    assert admin.describe([spec.name]) == {spec.name: None}
    admin.create([spec])
    again = admin.describe([spec.name])[spec.name]
    assert again is not None
    assert again.topic_id != found.topic_id


@pytest.mark.parametrize(
    ("ending", "replicas", "configs", "told"),
    [
        ("", 99, {}, "INVALID_REPLICATION_FACTOR"),
        ("", 1, {"no.such": "x"}, "INVALID_CONFIG"),
        ("/", 1, {}, "TOPIC_EXCEPTION"),
    ],
)
def test_what_cannot_be_created_is_said(
    admin: TopicAdmin, topic_prefix: str, ending: str, replicas: int, configs: dict[str, str], told: str
) -> None:
    name = topic_prefix + "a" + ending
    with pytest.raises(TopicError, match=f"{name}.*{told}"):
        admin.create([TopicSpec(name=name, partitions=1, replication_factor=replicas, configs=configs)])


def test_pending_offsets_are_waited_for(admin: TopicAdmin, writer: Writer, topic: str) -> None:
    group = topic + ".group"
    assert admin.committed(group, topic) == {}
    writer.begin()
    writer.producer.send_offsets_to_transaction([TopicPartition(topic, 0, 7)], metadata_of_no_member(group), PATIENCE)
    with pytest.raises(BrokerUnavailable, match="is still open"):
        admin.committed(group, topic, timeout_seconds=2.0)
    writer.commit()
    assert admin.committed(group, topic) == {0: 7}


def test_offsets_of_what_is_not_there(admin: TopicAdmin, topic: str) -> None:
    with pytest.raises(TopicError, match=r"\.nope does not exist"):
        admin.watermarks(topic + ".nope")
    with pytest.raises((TopicError, BrokerUnavailable), match=r"\[9\]"):
        admin.watermarks(topic, [0, 9], timeout_seconds=2.0)
