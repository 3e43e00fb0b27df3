"""Questions about topics and offsets on a real broker."""

from __future__ import annotations

import pytest
from confluent_kafka import TopicPartition

from streams.errors import BrokerUnavailable, TopicError
from streams.kafka.questions.admin import TopicAdmin
from streams.model.topics import TopicSpec
from tests.broker.client_kit import PATIENCE, Writer, as_librdkafka, create

pytestmark = [pytest.mark.broker, pytest.mark.timeout(180)]


@pytest.fixture
def topic(admin: TopicAdmin, topic_prefix: str) -> str:
    create(admin, topic_prefix + "t")
    return topic_prefix + "t"


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
    writer.producer.send_offsets_to_transaction([TopicPartition(topic, 0, 7)], as_librdkafka(group), PATIENCE)
    with pytest.raises(BrokerUnavailable, match="is still open"):
        admin.committed(group, topic, timeout_seconds=2.0)
    writer.commit()
    assert admin.committed(group, topic) == {0: 7}


def test_offsets_of_what_is_not_there(admin: TopicAdmin, topic: str) -> None:
    with pytest.raises(TopicError, match=r"\.nope does not exist"):
        admin.watermarks(topic + ".nope")
    with pytest.raises((TopicError, BrokerUnavailable), match=r"\[9\]"):
        admin.watermarks(topic, [0, 9], timeout_seconds=2.0)
