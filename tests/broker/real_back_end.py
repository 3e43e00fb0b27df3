"""Scenarios of ``back_ends_kit`` over a real broker: sources on one event loop beside the test.

A crash is made on the line: a proxy cuts the member off at that moment (nothing of it arrives any more, nothing
reaches it), and its task is cancelled. That is all that a broker ever sees of a process that is killed.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from confluent_kafka import KafkaError, Message, Producer

from streams import EventSource, EventSourceConfig, IncomingRecord
from streams.errors import NotOwned
from streams.group import transactional_id
from streams.records import Headers
from streams.statistics import SourceState
from streams.testing import Point
from streams.testing.checks import contents_of
from streams.testing.faults import FaultPlan, consume_with_faults
from streams.testing.proxy import KafkaProxy
from streams.testing.proxy_rules import Rule
from streams.topics import TopicSpec
from tests.broker.back_ends_kit import BackEnd, Make, Scenario
from tests.broker.engine_kit import STEADY, Lab

T = TypeVar("T")

PATIENCE = 60.0
STEP = 0.02
"""Seconds between two looks of a wait."""
IMPATIENT = {"session_timeout_seconds": 2.0, "transaction_timeout_seconds": 1.5, "heartbeat_interval_seconds": 0.2}
"""Settings of scenarios with faults: a member that is gone is missed soon."""


class Strike(FaultPlan):
    """Calls ``deed`` once, when ``point`` is passed."""

    def __init__(self) -> None:
        super().__init__()
        self.deed: Callable[[], None] | None = None

    def hit(self, point: str) -> None:
        if self.deed is not None and point == self.point:
            deed, self.deed = self.deed, None
            deed()


class Member:
    """One source and its task."""

    def __init__(self, number: int, source: EventSource[Any]) -> None:
        self.number, self.source, self.strike = number, source, Strike()
        self.task: asyncio.Task[None]
        self.told = False

    @property
    def runs(self) -> bool:
        return not self.task.done()

    def active(self) -> list[int]:
        """Partitions that it works on."""
        if not self.runs or self.source.state is not SourceState.RUNNING:
            return []
        return [one.partition for one in self.source.statistics().partitions if one.state == "active"]


class RealBackEnd(BackEnd):
    """Everything that asks the broker runs on the loop's thread, or on threads of its own."""

    def __init__(self, scenario: Scenario, prefix: str, bootstrap: str) -> None:
        super().__init__(scenario, prefix)
        self._bootstrap, self._lab = bootstrap, Lab(bootstrap, prefix, scenario.partitions)
        self._proxy = KafkaProxy(bootstrap).start() if scenario.faulty else None
        self._members: dict[int, Member] = {}
        self._last: dict[int, int] = {}
        self._strikes: dict[int, Point] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="real-back-end", daemon=True)
        self._thread.start()

    @property
    def bootstrap(self) -> str:
        return self._bootstrap if self._proxy is None else self._proxy.bootstrap_servers

    def run(self, make: Make, members: int = 1, *, start: bool = True, **settings: Any) -> None:
        settings = {**(IMPATIENT if self.scenario.faulty else STEADY), **settings}
        self._make, self._settings, self._first = make, settings, members
        specs = [
            TopicSpec(
                name=self.name(topic),
                partitions=partitions,
                replication_factor=1,
                configs=dict(self.scenario.configs.get(topic, {})),
            )
            for topic, partitions in {"in": self.scenario.partitions, **self.scenario.topics}.items()
        ]
        self._lab.admin.create(specs, PATIENCE)
        if start:
            self.start()

    def start(self) -> None:
        for number in range(self._first):
            self._start(number)
        self._balance()

    def _start(self, number: int) -> None:
        config = self.config(**{**self._settings, "instance_id": f"member-{number}"})
        member = Member(number, self._make(config))
        if number in self._strikes:
            self._arm(member, self._strikes.pop(number))

        async def begin() -> None:
            member.task = asyncio.create_task(consume_with_faults(member.source, member.strike))

        self._wait(begin())
        self._members[number] = member

    # -- input ---------------------------------------------------------------------------------------------------------

    def send_raw(
        self,
        value: bytes | None,
        key: bytes | None = None,
        *,
        partition: int | None = None,
        headers: Headers | None = None,
        timestamp_ms: int | None = None,
    ) -> int:
        producer, delivered = _producer(self._bootstrap), _Delivered()
        where = -1 if partition is None else partition
        own: Any = headers
        producer.produce(self.topic, value, key, where, on_delivery=delivered, timestamp=timestamp_ms or 0, headers=own)
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
            shares = [member.active() for member in self._running()]
            counts = [len(share) for share in shares]
            owned = sorted(partition for share in shares for partition in share)
            return owned == list(range(self.scenario.partitions)) and max(counts) - min(counts) <= 1

        self.until(done, "the partitions are spread evenly")

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE)

    # -- deeds ---------------------------------------------------------------------------------------------------------

    def interject(self, partition: int, handler: Callable[[Any], Any]) -> Any:
        for member in self._running():
            if partition in member.active():
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
        self._wait(_ended(self._members[member].task))  # a crash may be under way
        if self._proxy is not None:
            self._proxy.disconnect(client=f"*member-{member}*")  # what a dead one would not have sent is lost
            self._proxy.restore()
        self._start(member)
        self._balance()

    def crash(self, member: int = 0) -> None:
        found = self._members[member]
        self._cut_off(found)
        self._wait(_ended(found.task))

    def crash_at(self, point: Point, member: int = 0) -> None:
        known = self._members.get(member)
        if known is None:
            self._strikes[member] = point
        else:
            self._arm(known, point)

    def _arm(self, member: Member, point: Point) -> None:
        member.strike.point, member.strike.deed = point, lambda: self._cut_off(member)

    def _cut_off(self, member: Member) -> None:
        assert self._proxy is not None, "a scenario with faults needs faulty=True"
        self._proxy.cut_off(client=f"{self.group}.member-{member.number}*")
        self._proxy.cut_off(client=f"member-{member.number}")
        self._loop.call_soon_threadsafe(member.task.cancel)

    def lose_commit_reply(self, member: int = 0) -> None:
        assert self._proxy is not None, "a scenario with faults needs faulty=True"
        client = f"{self.group}.member-{member}*"
        self._proxy.add(Rule(apis={"EndTxn"}, on="reply", action="drop", client=client, times=1))

    def fence(self, member: int = 0) -> None:
        config: EventSourceConfig = self._members[member].source.config
        for number in range(config.pool.pool_size):
            name = transactional_id(config.group_id, config.instance_id, number)
            Producer({"bootstrap.servers": self._bootstrap, "transactional.id": name}).init_transactions(PATIENCE)

    # -- what came of it -----------------------------------------------------------------------------------------------

    def records(self, topic: str) -> Sequence[IncomingRecord]:
        return self._wait(self._lab.records(topic))

    def committed(self) -> dict[int, int]:
        return self._wait(self._lab.committed())

    def stores(self) -> dict[int, object]:
        async def look() -> dict[int, object]:
            found = {}
            for member in self._running():
                engine = member.source._engine
                for partition in member.active():
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
        if self._proxy is not None:
            self._proxy.restore()
        try:
            for member in self._running():
                self._wait(_ended(member.task, stop=member.source))
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(PATIENCE)
            self._loop.close()
            if self._proxy is not None:
                self._proxy.disconnect()
                deadline = time.monotonic() + PATIENCE
                while self._proxy._links and time.monotonic() < deadline:
                    time.sleep(STEP)
                self._proxy.stop()


async def _ended(task: asyncio.Task[None], stop: EventSource[Any] | None = None) -> None:
    if stop is not None:
        await stop.stop()
    await asyncio.wait([task], timeout=PATIENCE)
    assert task.done(), "a member does not end"


class _Delivered:
    """Hears of one record."""

    def __init__(self) -> None:
        self.partition = self.offset = -1
        self.error: KafkaError | None = None

    def __call__(self, error: KafkaError | None, message: Message) -> None:
        self.error = error
        self.partition, self.offset = int(message.partition() or 0), int(message.offset() or 0)


@functools.cache
def _producer(bootstrap: str) -> Producer:
    """One for all scenarios, as Java's clients partition."""
    return Producer(
        {
            "bootstrap.servers": bootstrap,
            "linger.ms": 0,
            "partitioner": "murmur2_random",
            "enable.idempotence": True,  # what is compared is the order, too
            "message.max.bytes": 8 << 20,
            "log_level": 0,
        }
    )
