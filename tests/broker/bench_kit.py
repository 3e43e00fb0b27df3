"""What the tests of one program on a real broker need: the topics of a group, what is in them, and processes that are
killed under load."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Self

from confluent_kafka import Producer

from streams.clients.admin import TopicAdmin
from streams.clients.reader import PartitionReader
from streams.clients.settings import ClientSettings
from streams.errors import BrokerUnavailable
from streams.records import TYPE_HEADER, IncomingRecord
from streams.topics import TopicSpec
from tests.broker.battery_kit import Worker, let_pass, wait_until


class Bench:
    """The topics of one test, and what is in them. ``worker``: a process of its program."""

    worker: type[Worker]
    inputs: Sequence[str] = ()

    def __init__(self, bootstrap: str, group: str) -> None:
        self.bootstrap, self.group = bootstrap, group
        self.settings = ClientSettings(bootstrap, {}, client_id="bench")
        self.admin = TopicAdmin(self.settings)
        self._producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, "log_level": 0})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.admin.close()

    def make(self, *names: str, partitions: int, **configs: str) -> None:
        """Create topics. ``configs``: with ``_`` for each dot."""
        given = {name.replace("_", "."): value for name, value in configs.items()}
        specs = [TopicSpec(name=name, partitions=partitions, replication_factor=1, configs=given) for name in names]
        self.admin.create(specs, 30.0)

    def produce(self, topic: str, value: bytes | None, key: str, partition: int, event: bytes | None = None) -> None:
        """Hand a record to the producer. ``event``: its name."""
        headers: Any = None if event is None else [(TYPE_HEADER, event)]
        self._producer.produce(topic, value, key, partition, headers=headers)

    def flush(self) -> None:
        assert self._producer.flush(60) == 0

    def handled(self) -> int:
        """Records of the inputs below the group's offsets, -1 while a transaction hides them."""
        try:
            return sum(sum(self.admin.committed(self.group, topic, 5.0).values()) for topic in self.inputs)
        except BrokerUnavailable:
            return -1

    def read(self, topic: str, *, stable: bool = False) -> dict[int, list[IncomingRecord]]:
        """Return all records, by partition. ``stable``: those below the first open transaction; else there is none."""
        marks = self.admin.watermarks(topic)
        ranges = {number: (mark.start, mark.stable if stable else mark.end) for number, mark in marks.items()}
        with closing(PartitionReader(self.settings)) as reader:
            found = reader.read_all(topic, ranges, stalled_after_seconds=60.0)
        return {number: found.get(number, []) for number in ranges}

    def start(self, name: str, folder: Path, **environment: str) -> Worker:
        return self.worker(self.bootstrap, self.group, name, folder, **environment)

    @contextmanager
    def started(self, folder: Path, *names: str) -> Iterator[dict[str, Worker]]:
        """Start processes by their names; all that are in the dictionary at the end are killed."""
        members = {name: self.start(name, folder) for name in names}
        try:
            yield members
        finally:
            for member in members.values():
                member.kill()


class LoadedBench(Bench):
    """A bench whose program is killed under load, and judged by a witness. ``sent``: so many records."""

    sent = 0

    def send(self, count: int, rng: random.Random) -> None:
        raise NotImplementedError

    def judge(self) -> None:
        raise NotImplementedError

    def kill_under_load(self, folder: Path, rng: random.Random, *, kills: int, records: int) -> None:
        """Kill one of two processes again and again, each time after so many records were sent; then judge."""
        with self.started(folder, "one", "two") as members:
            for _ in range(kills):
                before = self.handled()
                self.send(records, rng)
                wait_until(lambda before=before: self.handled() > before, "some are handled")  # type: ignore[misc]
                let_pass(rng.uniform(0.0, 0.3))
                wait_until(lambda: any(one.times("generation") for one in members.values()), "one has joined")
                name = rng.choice([name for name, member in sorted(members.items()) if member.times("generation")])
                members[name].kill()
                members[name] = self.start(name, folder)
            self.send(records, rng)
            wait_until(lambda: self.handled() == self.sent, "all are handled")
            wait_until(lambda: all(member.times("generation") for member in members.values()), "all have joined")
            assert all(member.stop() == 0 for member in members.values()), members["one"].last_words()
        self.judge()
