"""A Consumer, a coordinator and a client that say what a test wants, and a librdkafka member between them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from confluent_kafka import TopicPartition

from streams.kafka.group.librdkafka_group import Roster
from streams.kafka.group.librdkafka_membership import LibrdkafkaMembership
from streams.model.group import Assigned, GroupEvent, Revoked
from tests.unit.waiting import PATIENCE, wait_until

GROUP, TOPIC = "group", "topic"


def raw(generation: int, member_id: str) -> bytes:
    """Bytes as librdkafka writes them, also such as ours refuses to build."""
    return b"CGMDv2:" + generation.to_bytes(4, "little", signed=True) + f"{GROUP}\0{member_id}\0".encode() + b"\1"


class FakeConsumer:
    """Does what the test posted, on the thread that polls; says what the test set."""

    def __init__(self) -> None:
        self.generation, self.member_id = -1, ""
        self.todo: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self.callbacks: dict[str, Any] = {}
        self.calls: list[str] = []
        self.closed = threading.Event()
        self.close, self.post = self.closed.set, self.todo.put
        for name in ("incremental_assign", "incremental_unassign", "assign", "unassign", "unsubscribe"):
            setattr(self, name, partial(self._called, name))

    def _called(self, name: str, partitions: Sequence[Any] = ()) -> None:
        assert not partitions
        self.calls.append(name)

    def subscribe(self, topics: list[str], **callbacks: Any) -> None:
        assert topics == [TOPIC]
        self.callbacks = callbacks

    def poll(self, seconds: float) -> Any:
        try:
            return self.todo.get(timeout=min(seconds, 0.002))()
        except queue.Empty:
            return None

    def consumer_group_metadata(self) -> bytes:
        return raw(self.generation, self.member_id)

    def polled(self) -> None:
        """Return after all that was posted is done."""
        done = threading.Event()
        self.post(done.set)
        assert done.wait(PATIENCE), "it does not poll"

    def call_back(self, name: str, *numbers: int) -> None:
        partitions = [TopicPartition(TOPIC, number) for number in numbers]
        self.post(lambda: self.callbacks[name](self, partitions))

    def is_at(self, generation: int, member_id: str) -> None:
        self.generation, self.member_id = generation, member_id


class FakeTakeOver:
    def __init__(self) -> None:
        self.members: list[Roster | Exception] = []
        self.removed: list[tuple[str, str | None]] = []
        self.member_id: Callable[[], str] = str
        self.settings: dict[str, str] = {}

    def roster(self, deadline: float) -> Roster:
        answer = self.members[0] if len(self.members) == 1 else self.members.pop(0) if self.members else Roster()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def remove_member(self, member_id: str, instance: str | None, deadline: float) -> bool:
        self.removed.append((member_id, instance))
        return True

    def group_settings(self, deadline: float) -> dict[str, str]:
        return self.settings


class Stage:
    """A membership, the consumers that it built, and what it said."""

    def __init__(self, **settings: Any) -> None:
        self.consumers: list[FakeConsumer] = []
        self.logs: list[Any] = []
        self.heard: list[tuple[GroupEvent, Any]] = []
        self.take_over = FakeTakeOver()
        arguments: dict[str, Any] = {
            "eager": False,
            "broker_side": False,
            "static": False,
            "rebalance_seconds": 5.0,
            "alive": lambda: True,
            "check": lambda _: 1.0,
            "client": SimpleNamespace(addresses="nowhere:1", start=lambda: None, close=lambda _: None),
            "take_over": self.take_over,
            **settings,
        }
        build: Any = self._build
        self.membership = LibrdkafkaMembership(consumer=build, group_id=GROUP, topic=TOPIC, instance="me", **arguments)

    def _build(self, log: Any) -> FakeConsumer:
        self.logs.append(log)
        self.consumers.append(FakeConsumer())
        return self.consumers[-1]

    def begin(self) -> None:
        self.membership.start(lambda event: self.heard.append((event, self.membership.group_metadata)))

    def start(self) -> FakeConsumer:
        self.begin()
        return self.consumer()

    def consumer(self, number: int = 0) -> FakeConsumer:
        wait_until(lambda: len(self.consumers) > number and bool(self.consumers[number].callbacks), "no consumer")
        return self.consumers[number]

    def joined(self, *numbers: int, generation: int = 1) -> FakeConsumer:
        consumer = self.start()
        consumer.is_at(generation, "id-1")
        consumer.call_back("on_assign", *numbers)
        self.wait(Assigned)
        return consumer

    def release(self, *numbers: int) -> None:
        """Answer the barrier that stands."""
        now = self.membership.group_metadata
        self.membership.released(numbers, self.wait(Revoked).incarnation, now.generation)

    @property
    def events(self) -> list[GroupEvent]:
        return [event for event, _ in list(self.heard)]

    @property
    def kinds(self) -> list[type]:
        return [type(event) for event in self.events]

    def wait(self, kind: type, since: int = 0) -> Any:
        def found() -> list[GroupEvent]:
            return [event for event in self.events[since:] if isinstance(event, kind)]

        wait_until(lambda: bool(found()), f"no {kind.__name__}, only {self.events}")
        return found()[0]
