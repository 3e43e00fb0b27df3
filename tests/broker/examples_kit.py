"""An example as its users run it: its topics, events for it, ``kes run`` that may lose a worker, and what came out."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from confluent_kafka import Producer

from streams import EventSource, IncomingRecord
from streams.clients.admin import TopicAdmin
from streams.clients.reader import PartitionReader
from streams.clients.settings import ClientSettings
from streams.events import event_type_of
from streams.testing.fixtures import BrokerAddress
from streams.topics import TopicSpec

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 90.0


def until(condition: Callable[[], Any], what: str, seconds: float = PATIENCE) -> None:
    """Wait for a condition, with a deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain: {what}"
        time.sleep(0.02)


class Example:
    """One module of ``examples/async_work`` on a broker. Its topics are new: what an earlier run left is deleted.

    ``outputs``: the topics that its handlers forward to. ``environment``: what the module reads when it is imported.
    """

    def __init__(self, servers: str, module: ModuleType, *outputs: str, **environment: str) -> None:
        self.source: EventSource[Any] = module.source
        self.servers, self.module = servers, module.__name__
        self.environment = {**os.environ, **environment, "KES_BOOTSTRAP_SERVERS": servers, "PYTHONPATH": str(ROOT)}
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
        producer = Producer({"bootstrap.servers": self.servers, "enable.idempotence": True, "linger.ms": 5})
        for key, event in events:
            kind = event_type_of(type(event))
            producer.produce(self.source.config.topic, kind.encode(event), key=key, headers=kind.headers)
        assert producer.flush(PATIENCE) == 0

    def records(self, topic: str) -> list[IncomingRecord]:
        """Everything in a topic as ``read_committed`` readers see it, by partition."""
        marks = self._admin.watermarks(topic)
        found: dict[int, list[IncomingRecord]] = {number: [] for number in sorted(marks)}
        ranges = {n: (mark.start, mark.stable) for n, mark in marks.items() if mark.start < mark.stable}
        if ranges:
            reader = PartitionReader(self._settings)
            try:
                reader.read(
                    topic,
                    ranges,
                    lambda number, batch: found[number].extend(batch),
                    stalled_after_seconds=PATIENCE,
                    cancelled=lambda: False,
                )
            finally:
                reader.close()
        return [record for partition in found.values() for record in partition]

    def events(self, topic: str, *classes: type[Any]) -> list[Any]:
        """``records``, decoded: each partition in order."""
        types = {event_type_of(cls).name: event_type_of(cls) for cls in classes}
        return [types[record.record_type or ""].decode(record.value or b"") for record in self.records(topic)]

    def until_outputs(self, topic: str, count: int, workers: Workers) -> None:
        """Wait until there are so many records."""

        def there() -> bool:
            assert workers.process.poll() is None, f"kes run has ended:\n{workers.log.read_text()[-3000:]}"
            return len(self.records(topic)) >= count

        until(there, f"{count} records in {topic}; see {workers.log}")

    def until_handled(self, count: int, workers: Workers) -> None:
        """Wait until the group has committed so many input records."""
        config = self.source.config

        def there() -> bool:
            assert workers.process.poll() is None, f"kes run has ended:\n{workers.log.read_text()[-3000:]}"
            return sum(self._admin.committed(config.group_id, config.topic).values()) >= count

        until(there, f"{count} records of {config.topic} are handled; see {workers.log}")

    @contextlib.contextmanager
    def run(self, folder: Path, workers: int = 2) -> Iterator[Workers]:
        """``kes run`` beside the test; at the end it is stopped in good order, if the test has not failed."""
        running = Workers(self, folder, workers)
        try:
            yield running
            running.process.terminate()
            assert running.process.wait(PATIENCE) == 0, running.log.read_text()[-3000:]
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


class Workers:
    """``kes run`` and its worker processes."""

    def __init__(self, example: Example, folder: Path, workers: int) -> None:
        self.log = folder / "kes.log"
        self._said: list[dict[str, Any]] = []
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "streams", "-v", "run", f"{example.module}:source", "--json",
                 "--workers", str(workers), "--instance-prefix", "w", "--max-crashes", "100"],
                cwd=ROOT,
                env=example.environment,
                stdout=subprocess.PIPE,
                stderr=log,
            )  # fmt: skip
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._said.append(json.loads(line))

    def _pids(self) -> list[int]:
        return [line["pid"] for line in list(self._said) if line["event"] == "started"]

    def kill(self, worker: int = 0, number: signal.Signals = signal.SIGKILL) -> None:
        """A signal to the process that is this worker now; after SIGKILL its supervisor starts another one."""

        def struck() -> bool:
            pid = self._pid(worker)
            try:
                if pid is not None:
                    os.kill(pid, number)
            except ProcessLookupError:  # its end is not told yet
                return False
            return pid is not None

        until(struck, f"worker {worker} runs; see {self.log}")

    def _pid(self, worker: int) -> int | None:
        """Of the process, if the last that was said of it is not its end."""
        said = [line for line in list(self._said) if line.get("worker") == f"w-{worker}" and "pid" in line]
        return said[-1]["pid"] if said and said[-1]["event"] != "exited" else None

    def close(self) -> None:
        self.process.kill()
        for pid in self._pids():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        self.process.wait(PATIENCE)
        self._reading.join(PATIENCE)
        assert self.process.stdout is not None
        self.process.stdout.close()
