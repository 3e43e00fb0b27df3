"""What other programs do to a topic: write to it, in transactions too, cut it off, delete it, make it again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic


def seed() -> int:
    """``SEED`` if it is set, else by the clock; printed, so that a run can be had again."""
    found = int(os.environ.get("SEED") or time.time_ns() % 1_000_000)
    print(f"SEED={found}")
    return found


def until(condition: Callable[[], object], what: str, seconds: float = 600.0) -> None:
    """Wait for a condition, with a deadline; never for luck."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain: {what}"
        time.sleep(0.02)


class Log:
    """Topics of one broker."""

    def __init__(self, servers: str) -> None:
        self.servers = servers
        self._admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
        self._producer = self._made()

    def _made(self) -> Producer:
        # Idempotent: without it a batch that is sent again at first comes behind later ones.
        return Producer({"bootstrap.servers": self.servers, "log_level": 0, "enable.idempotence": True})

    def send(self, topic: str, values: Iterable[Any], partitions: int = 1, **more: Any) -> None:
        """Value n goes to partition n modulo ``partitions``."""
        for number, value in enumerate(values):
            self._producer.produce(topic, str(value), partition=number % partitions, **more)
        self.flush()

    def produce(self, topic: str, value: bytes | str | None, *given: Any, **more: Any) -> None:
        self._producer.produce(topic, value, *given, **more)

    def flush(self) -> None:
        assert self._producer.flush(60) == 0

    def stamped(self, topic: str, times: Mapping[int, Iterable[int]]) -> None:
        """A record at each time, by partition."""
        for partition, stamps in times.items():
            for stamp in stamps:
                self._producer.produce(topic, str(stamp), partition=partition, timestamp=stamp)
        self.flush()

    def transaction(self, name: str) -> Producer:
        """A producer whose transactions before are settled, their markers written."""
        producer = Producer({"bootstrap.servers": self.servers, "transactional.id": name})
        producer.init_transactions(30)
        return producer

    def transactions(self, name: str, topic: str, *parts: tuple[list[str], bool], partition: int = 0) -> None:
        """Values and whether they are committed, one transaction after the other. All of them are settled then."""
        producer = self.transaction(name)
        for values, commit in parts:
            producer.begin_transaction()
            for value in values:
                producer.produce(topic, value, partition=partition)
            producer.flush(30)  # an abort must find them in the log, not in the client
            if commit:
                producer.commit_transaction(30)
            else:
                producer.abort_transaction(30)
        self.transaction(name)

    def create(self, topic: str, partitions: int = 1, **config: str) -> None:
        self._admin.create_topics([NewTopic(topic, partitions, 1, config=config)])[topic].result(30)

    def grow(self, topic: str, partitions: int) -> None:
        self._admin.create_partitions([NewPartitions(topic, partitions)])[topic].result(30)
        until(lambda: len(self._admin.list_topics(topic, timeout=10).topics[topic].partitions) == partitions, topic)
        self._producer = self._made()  # the one before does not know them yet

    def delete_up_to(self, topic: str, offset: int) -> None:
        place = TopicPartition(topic, 0, offset)
        self._admin.delete_records([place])[place].result(30)

    def delete(self, topic: str) -> None:
        self._admin.delete_topics([topic])[topic].result(30)
        until(lambda: topic not in self._admin.list_topics(timeout=10).topics, "the topic is gone")

    def make_again(self, topic: str, partitions: int = 1) -> None:
        self.delete(topic)
        self._producer = self._made()  # the one before may know that the topic is gone, and fail what is sent, unseen
        deadline = time.monotonic() + 60
        while True:
            try:
                return self.create(topic, partitions)
            except KafkaException as error:  # it is deleted in the background
                if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS or time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def forget_group(self, group: str) -> None:
        self._admin.delete_consumer_groups([group])[group].result(30)

    def records(self, topic: str, *, committed: bool = True) -> Iterator[Message]:
        """All records that readers see now, partition by partition in order."""
        consumer = Consumer(
            {
                "bootstrap.servers": self.servers,
                "group.id": "reader",
                "isolation.level": "read_committed" if committed else "read_uncommitted",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "log_level": 0,
            }
        )
        try:
            left = set(consumer.list_topics(topic, 30).topics[topic].partitions)
            consumer.assign([TopicPartition(topic, number, 0) for number in left])
            deadline = time.monotonic() + 600
            while left:
                assert time.monotonic() < deadline, f"{topic}{sorted(left)} cannot be read to the end"
                for message in consumer.consume(5000, 0.2):
                    error = message.error()
                    if error is None:
                        yield message
                    elif error.code() == KafkaError._PARTITION_EOF:
                        left.discard(message.partition() or 0)
                    elif not error.retriable():
                        raise KafkaException(error)
        finally:
            consumer.close()
