"""Scenarios of ``back_ends_kit`` in a ``TestDriver``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from streams import IncomingRecord
from streams.records import Headers, Record
from streams.testing import TestDriver
from streams.testing.checks import contents_of
from streams.testing.simulation.broker import Broker, LogEntry
from streams.testing.world import committed_records
from tests.broker.back_ends_kit import BackEnd, Make, Scenario

STEP = 0.05
"""Simulated seconds between two looks of a wait."""
PATIENCE = 120.0


class DrivenBackEnd(BackEnd):
    """No broker, no waiting."""

    def __init__(self, scenario: Scenario, prefix: str, seed: int = 0) -> None:
        super().__init__(scenario, prefix)
        self._seed = seed
        self.driver: TestDriver[Any]

    def run(self, make: Make, members: int = 1, *, start: bool = True, **settings: Any) -> None:
        config = self.config(**settings)
        topics = {self.name(topic): count for topic, count in self.scenario.topics.items()}
        self.driver = TestDriver(lambda: make(config), members, self._seed, topics=topics, start=False)
        for topic, configs in self.scenario.configs.items():
            if "max_message_bytes" in configs:
                self.broker.limits[self.name(topic)] = int(configs["max_message_bytes"])
        if start:
            self.start()

    @property
    def bootstrap(self) -> str:
        return "simulated"

    @property
    def broker(self) -> Broker:
        """The simulated one."""
        return self.driver._world.broker

    def start(self) -> None:
        self.driver.start()

    def send_record(self, record: Record) -> int:
        return self.driver.send_record(record, wait=False).offset

    def send_transaction(self, *records: tuple[int, bytes, bytes, Headers], commit: bool) -> None:
        broker, name = self.broker, f"{self.prefix}feeder"
        epoch = broker.init(name, 60.0)
        while epoch is None:  # its last one is being ended
            self.driver.advance(STEP)
            epoch = broker.init(name, 60.0)
        for partition, key, value, headers in records:
            broker.produce(name, epoch, self.topic, partition, LogEntry(key, value, headers, None))
        broker.end(name, epoch, commit)
        self.driver.advance(STEP)  # until the markers are written

    def settle(self) -> None:
        self.driver.settle()

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = self.driver.now + PATIENCE
        while not condition():
            assert self.driver.now < deadline, f"waited {PATIENCE:g} simulated seconds in vain: {what}"
            self.driver.advance(STEP)

    def interject(self, partition: int, handler: Callable[[Any], Any]) -> Any:
        return self.driver.interject(partition, handler)

    def join(self) -> int:
        return self.driver.join()

    def leave(self, member: int = 0) -> None:
        self.driver.leave(member)

    def restart(self, member: int = 0) -> None:
        self.driver.restart(member)

    def records(self, topic: str) -> Sequence[IncomingRecord]:
        return [record for _, record in committed_records(self.broker, topic)]

    def committed(self) -> dict[int, int]:
        return self.driver.committed_offsets()

    def stores(self) -> dict[int, object]:
        if self.driver.members:
            self.driver.check()
        return {partition: contents_of(store) for partition, store in self.driver.stores().items()}

    def hanging(self) -> list[str]:
        return [f"{log.topic}[{log.partition}]" for log in self.broker.logs.values() if log.stable != log.end]

    def close(self) -> None:
        if hasattr(self, "driver"):
            self.driver.close()
