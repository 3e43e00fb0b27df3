"""``ports.LogClients`` over the simulated broker: the clients of a lookup, for one member's process."""

from __future__ import annotations

from collections.abc import Collection

from streams.kafka.questions.admin import TopicDescription, Watermarks
from streams.testing.simulation.process import Process, SimWorker
from streams.testing.simulation.tail import SimTail

_MISSING = 3
"""UNKNOWN_TOPIC_OR_PARTITION."""


class SimLogClients:
    """``ports.LogClients``, and its ``ports.TopicRequests``."""

    addresses = "simulated"

    def __init__(self, process: Process, topic: str) -> None:
        self._process, self._topic = process, topic

    def worker(self) -> SimWorker:
        return SimWorker(self._process)

    def topics(self) -> SimLogClients:
        return self

    def tail(self) -> SimLogTail:
        return SimLogTail(self._process, self._topic)

    def identity(self, name: str, timeout_seconds: float) -> tuple[str, int] | None:
        process = self._process
        process.travel()
        found = None if process.broker.unusable(name) == _MISSING else process.broker.identity(name)
        process.travel()
        return None if found is None else (found.topic_id, found.partitions)

    def watermarks(
        self, topic: str, partitions: Collection[int] | None, timeout_seconds: float
    ) -> dict[int, Watermarks]:
        process, broker = self._process, self._process.broker
        process.travel()
        numbers = range(broker.identity(topic).partitions) if partitions is None else partitions
        logs = [broker.log(topic, number) for number in numbers]
        marks = {log.partition: Watermarks(log.start, log.stable, log.end) for log in logs}
        process.travel()
        return marks

    def describe(self, names: list[str], timeout_seconds: float) -> dict[str, TopicDescription | None]:
        return dict.fromkeys(names)


class SimLogTail(SimTail):
    """``ports.LogTail``."""

    @property
    def ended(self) -> bool:
        return self._closed
