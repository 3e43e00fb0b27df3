"""An example as its users run it: its topics, events for it, ``kes run`` that may lose a worker, and what came out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from confluent_kafka import Producer

from streams import EventSource, IncomingRecord
from streams.events import event_type_of
from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.settings import ClientSettings
from streams.model.topics import TopicSpec
from streams.testing.fixtures import BrokerAddress
from tests.broker.battery_kit import PATIENCE, wait_until
from tests.broker.client_kit import read_topic
from tests.broker.kes_kit import ROOT, KesRun


class Example:
    """One module of ``examples/async_work`` on a broker. Its topics are new: what an earlier run left is deleted.

    ``outputs``: the topics that its handlers forward to. ``environment``: what the module reads when it is imported.
    """

    def __init__(self, servers: str, module: ModuleType, *outputs: str, **environment: str) -> None:
        self.source: EventSource[Any] = module.source
        self.servers, self.module = servers, module.__name__
        self.environment = {**environment, "KES_BOOTSTRAP_SERVERS": servers}
        self._settings = ClientSettings(servers, {}, client_id="examples-test")
        self._admin = TopicAdmin(self._settings)
        partitions = self.source.config.num_partitions
        specs = [
            *self.source.specs(),
            *(TopicSpec(name=name, partitions=partitions, replication_factor=1) for name in outputs),
        ]
        self._admin.delete([spec.name for spec in specs], PATIENCE)
        self._admin.create(specs, PATIENCE)

    def close(self) -> None:
        self._admin.close()

    def send(self, events: Iterable[tuple[str, object]]) -> None:
        """Produce (key, event) in this order, and wait for the broker."""
        settings = {"bootstrap.servers": self.servers, "partitioner": "murmur2_random", "enable.idempotence": True}
        producer = Producer({**settings, "linger.ms": 5})
        for key, event in events:
            kind = event_type_of(type(event))
            producer.produce(self.source.config.topic, kind.encode(event), key=key, headers=kind.headers)
        assert producer.flush(PATIENCE) == 0

    def records(self, topic: str) -> list[IncomingRecord]:
        """Everything in a topic as ``read_committed`` readers see it, by partition."""
        found = read_topic(self._settings, topic, stable=True)
        return [record for records in found.values() for record in records]

    def events(self, topic: str, *classes: type[Any]) -> list[Any]:
        """``records``, decoded: each partition in order."""
        types = {event_type_of(cls).name: event_type_of(cls) for cls in classes}
        return [types[record.record_type or ""].decode(record.value or b"") for record in self.records(topic)]

    def until_outputs(self, topic: str, count: int, workers: KesRun) -> None:
        """Wait until there are so many records."""

        self._until(lambda: len(self.records(topic)) >= count, f"{count} records in {topic}", workers)

    def until_handled(self, count: int, workers: KesRun) -> None:
        """Wait until the group has committed so many input records."""
        group, topic = self.source.config.group_id, self.source.config.topic
        what = f"{count} records of {topic} are handled"
        self._until(lambda: sum(self._admin.committed(group, topic).values()) >= count, what, workers)

    @staticmethod
    def _until(condition: Callable[[], bool], what: str, workers: KesRun) -> None:
        def there() -> bool:
            assert workers.process.poll() is None, f"kes run has ended:\n{workers.log.read_text()[-3000:]}"
            return condition()

        wait_until(there, f"{what}; see {workers.log}")

    @contextlib.contextmanager
    def run(self, folder: Path, workers: int = 2, options: Sequence[str] = ()) -> Iterator[KesRun]:
        """``kes run`` beside the test; at the end it is stopped in good order, if the test has not failed."""
        running = KesRun(f"{self.module}:source", workers, folder / "kes.log", ROOT, self.environment, options)
        try:
            yield running
            assert running.stop() == 0, (running.lines[-8:], running.log.read_text()[-3000:])
        finally:
            running.close()


Make = Callable[..., Example]
"""The type of the fixture ``example``: called with the arguments of ``Example`` but the first."""


@pytest.fixture
def example(kafka_broker: BrokerAddress) -> Iterator[Make]:
    with contextlib.ExitStack() as examples:

        def make(module: ModuleType, *outputs: str, **environment: str) -> Example:
            made = Example(kafka_broker.bootstrap_servers, module, *outputs, **environment)
            return examples.enter_context(contextlib.closing(made))

        yield make
