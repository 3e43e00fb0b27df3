"""A ``LogConsumer`` over a consumer that stands in for confluent-kafka's, and a clock."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from streams.kafka import connection
from streams.kafka.reading import consumer
from streams.kafka.reading.consumer import LogConsumer
from streams.kafka.settings import ClientSettings
from streams.kafka.wire.connection import LostConnection
from streams.records import PolledPartition
from tests.unit.waiting import give_own

DOWN = KafkaError(KafkaError._ALL_BROKERS_DOWN)


class ScriptedConsumer:
    """Returns what the test put into ``messages``, and remembers what it was told. It knows the ends of logs, too.
    ``frozen``: no answer comes, and no failure. ``high``: the end of a log, as the last fetch told it."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.assigned: list[tuple[int, int]] = []
        self.unassigned: list[int] = []
        self.answers, self.frozen = True, False
        self.high = -1001
        self.ends: dict[int, int] = {}
        self.questions: list[Future[int]] = []
        self.looked_at: list[tuple[int, int]] = []

    def list_topics(self, _topic: str, _timeout: float) -> None:
        if not self.answers:
            raise KafkaException(KafkaError(KafkaError._TRANSPORT))

    def poll(self, _timeout: float) -> Any:
        return self.messages.pop(0) if self.messages else None

    def consume(self, limit: int, _timeout: float) -> list[Any]:
        taken, self.messages = self.messages[:limit], self.messages[limit:]
        return taken

    def incremental_assign(self, positions: list[TopicPartition]) -> None:
        self.assigned += [(position.partition, position.offset) for position in positions]

    def incremental_unassign(self, positions: list[TopicPartition]) -> None:
        self.unassigned += [position.partition for position in positions]

    def get_watermark_offsets(self, _partition: TopicPartition, *, cached: bool) -> tuple[int, int]:
        assert cached
        return -1001, self.high

    def ask(self, _topic: str, partition: int, _timeout: float) -> Future[int]:
        answer: Future[int] = Future()
        self.questions.append(answer)
        if not self.frozen and self.answers:
            answer.set_result(self.ends.get(partition, 0))
        elif not self.frozen:
            answer.set_exception(LostConnection("b:1: Connection refused"))
        return answer

    def ask_next(self, _topic: str, partition: int, position: int, _timeout: float) -> Future[int]:
        self.looked_at.append((partition, position))
        return self.ask(_topic, partition, _timeout)

    def close(self) -> None: ...


class Reading:
    """The consumer, its script, and the time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, ends: bool) -> None:
        self.script, self.now = ScriptedConsumer(), 100.0

        # A real one tells of its own troubles.
        monkeypatch.setattr("streams.kafka.reading.consumer.build", lambda *_: self.script)
        monkeypatch.setattr("streams.kafka.reading.consumer.LogEnds", lambda _: self.script)
        give_own(monkeypatch, "time", connection, consumer, monotonic=lambda: self.now)
        self.consumer = LogConsumer(ClientSettings("127.0.0.1:1"), "t", ends=ends)

    def add(self, **offsets: int) -> None:
        """``p0=10``: partition 0 from offset 10 on."""
        for name, offset in offsets.items():
            self.consumer.add(int(name[1:]), offset)

    def poll(self, *messages: Message, after: float = 0.0, limit: int = 500) -> dict[int, PolledPartition]:
        self.now += after
        self.script.messages += messages
        return self.consumer.poll_batch(0, limit)

    def poll_each(self, seconds: float, times: float) -> None:
        """Poll so often, and find nothing."""
        for _ in range(int(times)):
            assert not self.poll(after=seconds)

    def offsets(self, *messages: Message, after: float = 0.0, limit: int = 500) -> dict[int, list[int]]:
        """``poll``; only the offsets of its records."""
        found = self.poll(*messages, after=after, limit=limit)
        return {number: [record.offset for record in progress.records] for number, progress in found.items()}

    def lose_brokers(self) -> None:
        self.consumer._connection.on_error(DOWN)

    @property
    def is_down(self) -> bool:
        return self.consumer._connection.down


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


def failure(code: int, partition: int) -> Message:
    return Message(topic="t", partition=partition, offset=-1001, error=KafkaError(code, "why"))


def end(partition: int, offset: int) -> Message:
    return Message(topic="t", partition=partition, offset=offset, error=KafkaError(KafkaError._PARTITION_EOF))
