"""Both back ends of ``back_ends_kit``, a ``TestDriver`` and sources over a real broker; and a scenario run on both."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from confluent_kafka import KafkaError, Message, Producer

from streams import IncomingRecord
from streams.errors import NotOwned
from streams.records import Headers, Record
from streams.testing import TestDriver
from streams.testing.quiescence import contents_of
from streams.testing.simulation.broker import Broker, LogEntry
from streams.testing.world import committed_records
from tests.broker.back_ends_kit import BackEnd, Make, Scenario, differences, observed
from tests.broker.engine_kit import STEADY, Lab, Running, producer_to

T = TypeVar("T")

SIMULATED_STEP, STEP = 0.05, 0.02
"""Seconds between two looks of a wait."""
SIMULATED_PATIENCE, PATIENCE = 120.0, 60.0


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
            self.driver.advance(SIMULATED_STEP)
            epoch = broker.init(name, 60.0)
        for partition, key, value, headers in records:
            broker.produce(name, epoch, self.topic, partition, LogEntry(key, value, headers, None))
        broker.end(name, epoch, commit)
        self.driver.advance(SIMULATED_STEP)  # until the markers are written

    def settle(self) -> None:
        self.driver.settle()

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = self.driver.now + SIMULATED_PATIENCE
        while not condition():
            assert self.driver.now < deadline, f"waited {SIMULATED_PATIENCE:g} simulated seconds in vain: {what}"
            self.driver.advance(SIMULATED_STEP)

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


class Member(Running):
    """One source and its task."""

    told = False

    @property
    def runs(self) -> bool:
        return not self.task.done()

    @property
    def at_work(self) -> list[int]:
        """Partitions that it works on."""
        return sorted(self.numbers) if self.runs else []


class RealBackEnd(BackEnd):
    """Everything that asks the broker runs on the loop's thread, or on threads of its own."""

    def __init__(self, scenario: Scenario, prefix: str, bootstrap: str) -> None:
        super().__init__(scenario, prefix)
        self._bootstrap, self._lab = bootstrap, Lab(bootstrap, prefix, scenario.partitions)
        self._members: dict[int, Member] = {}
        self._last: dict[int, int] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="real-back-end", daemon=True)
        self._thread.start()

    @property
    def bootstrap(self) -> str:
        return self._bootstrap

    def run(self, make: Make, members: int = 1, *, start: bool = True, **settings: Any) -> None:
        self._make, self._settings, self._first = make, {**STEADY, **settings}, members
        for topic, partitions in {"in": self.scenario.partitions, **self.scenario.topics}.items():
            configs = self.scenario.configs.get(topic, {})
            self._wait(self._lab.create(self.name(topic), partitions=partitions, **configs))
        if start:
            self.start()

    def start(self) -> None:
        for number in range(self._first):
            self._start(number)
        self._balance()

    def _start(self, number: int) -> None:
        config = self.config(**{**self._settings, "instance_id": f"member-{number}"})
        member = Member(self._make(config))

        async def begin() -> None:
            member.task = asyncio.create_task(member.source.consume_events())

        self._wait(begin())
        self._members[number] = member

    # -- input ---------------------------------------------------------------------------------------------------------

    def send_record(self, record: Record) -> int:
        producer, delivered = producer_to(self._bootstrap), _Delivered()
        where = -1 if record.partition is None else record.partition
        content: Any = {"headers": record.headers, "timestamp": record.timestamp_ms or 0}
        producer.produce(record.topic, record.value, record.key, where, on_delivery=delivered, **content)
        assert producer.flush(PATIENCE) == 0
        assert delivered.error is None, delivered.error
        self._last[delivered.partition] = delivered.offset
        return delivered.offset

    def send_transaction(self, *records: tuple[int, bytes, bytes, Headers], commit: bool) -> None:
        producer = Producer({"bootstrap.servers": self._bootstrap, "transactional.id": f"{self.prefix}feeder"})
        producer.init_transactions(PATIENCE)
        producer.begin_transaction()
        reports = [_Delivered() for _ in records]
        for (partition, key, value, headers), report in zip(records, reports, strict=True):
            own: Any = headers
            producer.produce(self.topic, value, key, partition, on_delivery=report, headers=own)
        assert producer.flush(PATIENCE) == 0
        if commit:
            producer.commit_transaction(PATIENCE)
            self._last |= {report.partition: report.offset for report in reports}
        else:
            producer.abort_transaction(PATIENCE)
        self.until(lambda: not self._hanging(self.topic), "the markers are written")

    # -- waiting -------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        def done() -> bool:
            committed = self.committed()
            if any(committed.get(partition, 0) <= offset for partition, offset in self._last.items()):
                return False
            return not any(self._unsettled(member) for member in self._running())

        if self._running() or self._failures():
            self.until(done, "everything is committed")

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while True:
            runs = bool(self._running())
            for member in self._failures():
                member.told = True
                member.task.result()
            if not runs or condition():
                return
            assert time.monotonic() < deadline, f"waited {PATIENCE:g} s in vain: {what}"
            time.sleep(STEP)

    def _failures(self) -> list[Member]:
        ended = [one for one in self._members.values() if one.task.done() and not one.told and not one.task.cancelled()]
        return [member for member in ended if member.task.exception() is not None]

    def _running(self) -> list[Member]:
        return [member for member in self._members.values() if member.runs]

    @staticmethod
    def _unsettled(member: Member) -> bool:
        return bool(member.source.statistics().unsettled_transactions)

    def _balance(self) -> None:
        """Until the partitions are spread evenly over those that run, each in one place."""

        def done() -> bool:
            shares = [member.at_work for member in self._running()]
            counts = [len(share) for share in shares]
            owned = sorted(partition for share in shares for partition in share)
            return owned == list(range(self.scenario.partitions)) and max(counts) - min(counts) <= 1

        self.until(done, "the partitions are spread evenly")

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE)

    # -- deeds ---------------------------------------------------------------------------------------------------------

    def interject(self, partition: int, handler: Callable[[Any], Any]) -> Any:
        for member in self._running():
            if partition in member.at_work:
                return self._wait(member.source.interject(partition, handler))
        raise NotOwned(f"{self.topic}[{partition}] is not active on any member")

    def join(self) -> int:
        number = max(self._members) + 1
        self._start(number)
        self._balance()
        return number

    def leave(self, member: int = 0) -> None:
        self._wait(self._members[member].source.stop())
        if self._running():
            self._balance()

    def restart(self, member: int = 0) -> None:
        self._wait(asyncio.wait([self._members[member].task], timeout=PATIENCE))
        self._start(member)
        self._balance()

    # -- what came of it -----------------------------------------------------------------------------------------------

    def records(self, topic: str) -> Sequence[IncomingRecord]:
        return self._wait(self._lab.records(topic))

    def committed(self) -> dict[int, int]:
        return self._wait(self._lab.committed())

    def stores(self) -> dict[int, object]:
        async def look() -> dict[int, object]:
            found = {}
            for member in self._running():
                engine = member.source._run.engine
                for partition in member.at_work:
                    assert engine is not None
                    found[partition] = contents_of(engine.workers[partition].store)
            return dict(sorted(found.items()))

        return self._wait(look())

    def hanging(self) -> list[str]:
        config = self.config()
        topics = [self.topic, *map(self.name, self.scenario.topics), config.changelog, config.dead_letters]
        return [where for topic in topics for where in self._hanging(topic)]

    def _hanging(self, topic: str) -> list[str]:
        marks = self._wait(self._lab.watermarks(topic))
        return [f"{topic}[{partition}]" for partition, mark in marks.items() if mark.stable != mark.end]

    def close(self) -> None:
        try:
            for member in self._running():
                self._wait(_ended(member))
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(PATIENCE)
            self._loop.close()


async def _ended(member: Member) -> None:
    await member.source.stop()
    await asyncio.wait([member.task], timeout=PATIENCE)
    assert member.task.done(), "a member does not end"


class _Delivered:
    """Hears of one record."""

    def __init__(self) -> None:
        self.partition = self.offset = -1
        self.error: KafkaError | None = None

    def __call__(self, error: KafkaError | None, message: Message) -> None:
        self.error = error
        self.partition, self.offset = int(message.partition() or 0), int(message.offset() or 0)


def played(end: BackEnd) -> dict[str, Any]:
    """What the scenario leaves behind there."""
    try:
        end.scenario.play(end)
        return observed(end)
    finally:
        end.close()


def real(scenario: Scenario, bootstrap: str) -> tuple[str, dict[str, Any]]:
    """Over the broker: (prefix of all names, what it left behind)."""
    prefix = f"two-{scenario}-{uuid.uuid4().hex[:8]}-"
    return prefix, played(RealBackEnd(scenario, prefix, bootstrap))


def must_be_equal(scenario: Scenario, bootstrap: str, seeds: range = range(3)) -> None:
    """Fail with the differences between the broker and the driver, with each of some seeds."""
    prefix, expected = real(scenario, bootstrap)
    for seed in seeds:
        found = differences(played(DrivenBackEnd(scenario, prefix, seed)), expected)
        assert not found, "\n".join([f"seed {seed}", *found])
