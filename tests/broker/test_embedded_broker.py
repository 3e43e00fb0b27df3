"""The embedded Kafka as its users meet it: started, shared, killed, restarted, left behind."""

from __future__ import annotations

from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from streams.testing.fixtures import BrokerAddress


def make_topic(servers: str, name: str) -> None:
    admin = AdminClient({"bootstrap.servers": servers})
    for done in admin.create_topics([NewTopic(name, 1, 1)]).values():
        done.result(30)


def produce(servers: str, topic: str, values: list[str]) -> None:
    producer = Producer({"bootstrap.servers": servers, "acks": "all"})
    for value in values:
        producer.produce(topic, value.encode())
    assert producer.flush(30) == 0


def consume(servers: str, topic: str, count: int) -> list[str]:
    consumer = Consumer({"bootstrap.servers": servers, "group.id": f"{topic}-readers", "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    try:
        messages = consumer.consume(count, 30)
        return [(message.value() or b"").decode() for message in messages]
    finally:
        consumer.close()


def test_records_go_through_the_session_broker(kafka_broker: BrokerAddress, topic_prefix: str) -> None:
    topic = topic_prefix + "rows"
    make_topic(kafka_broker.bootstrap_servers, topic)
    produce(kafka_broker.bootstrap_servers, topic, ["a", "b"])
    assert consume(kafka_broker.bootstrap_servers, topic, 2) == ["a", "b"]
