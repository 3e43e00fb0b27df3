"""What the tests of the engine need: one test's topics and group, a source that runs beside the test, and waiting."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import msgspec
from confluent_kafka import KafkaError, Message, Producer

from streams import DEAD_LETTER, EventContext, EventSource, EventSourceConfig, IncomingRecord
from streams.codecs import RESERVED_KEY_PREFIX
from streams.kafka.questions.admin import TopicAdmin, Watermarks
from streams.kafka.reading.reader import PartitionReader
from streams.kafka.settings import ClientSettings
from streams.metrics import Measurement
from streams.model.topics import TopicSpec
from streams.records import Headers
from streams.runtime.changelog import OFFSET_KEY, decode_offset
from streams.runtime.partition.dead_letters import PREFIX
from tests.broker.client_kit import truncate
from tests.unit.waiting import PATIENCE, until
from tests.vocabulary import ADDED, INTS, TOTALS, Added, Total, Totals, added, config_of, count, register, tell_total

STEADY = {"session_timeout_seconds": 14.0, "transaction_timeout_seconds": 12.0}
"""A machine that stands still for some seconds costs nobody his membership, and no transaction."""

Condition = Callable[[], Any]


@functools.cache
def producer_to(bootstrap: str) -> Producer:
    """One for all tests, which partitions as Java's clients do: it takes half a second until its first record is
    on its way. Idempotent: without that, the first records to a topic that was made a moment ago were out of order once
    in 512 times (0 in 1,414 with it)."""
    return Producer(
        {
            "bootstrap.servers": bootstrap,
            "linger.ms": 1,
            "log_level": 0,
            "partitioner": "murmur2_random",
            "message.max.bytes": 32 << 20,
            "enable.idempotence": True,
            "max.in.flight.requests.per.connection": 1,
        }
    )


class Lab:
    """One test's input topic, output topic and group. What asks the broker runs on a thread, the loop stays free."""

    def __init__(self, bootstrap: str, prefix: str, partitions: int = 1) -> None:
        self.bootstrap, self.partitions = bootstrap, partitions
        self.group, self.topic, self.output = f"{prefix}group", f"{prefix}in", f"{prefix}out"
        self.settings = ClientSettings(bootstrap, {}, client_id="engine-test")
        self.admin = TopicAdmin(self.settings)
        self._producer = producer_to(bootstrap)
        self._failed: list[KafkaError] = []
        self._instances = itertools.count()

    # -- before ----------------------------------------------------------------------------------------------------

    async def create(self, *names: str, partitions: int | None = None, **configs: str) -> None:
        """Create topics (input and output, if none is named). ``configs``: with ``_`` for each dot."""
        specs = [
            TopicSpec(
                name=name,
                partitions=self.partitions if partitions is None else partitions,
                replication_factor=1,
                configs={key.replace("_", "."): value for key, value in configs.items()},
            )
            for name in names or (self.topic, self.output)
        ]
        await asyncio.to_thread(self.admin.create, specs, 30.0)

    def config(self, **settings: Any) -> EventSourceConfig:
        return config_of(
            **{
                "group_id": self.group,
                "topic": self.topic,
                "num_partitions": self.partitions,
                "bootstrap_servers": self.bootstrap,
                "instance_id": f"member-{next(self._instances)}",
                **STEADY,
                **settings,
            }
        )

    def source(self, **settings: Any) -> EventSource[Totals]:
        """A source with a ``Totals`` table, without handlers."""
        return EventSource(self.config(**settings), TOTALS)

    def telling(self, **settings: Any) -> EventSource[Totals]:
        """A source that adds, and tells totals in the output."""
        source = self.source(**settings)
        register(source, lambda ctx, event: tell_total(ctx, event, self.output))
        return source

    async def send(
        self,
        value: bytes | None,
        key: bytes | None = b"k",
        headers: Headers | None = ADDED,
        partition: int = 0,
        topic: str | None = None,
    ) -> None:
        """Hand one record to the producer; ``flush`` waits for the broker."""
        name: Any = topic or self.topic
        self._producer.produce(name, value, key, partition, self._on_delivery, headers=headers)

    def _on_delivery(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self._failed.append(error)

    async def flush(self) -> None:
        assert await asyncio.to_thread(self._producer.flush, PATIENCE) == 0
        assert not self._failed

    async def add(self, *names: str, partition: int = 0, deed: str = "", amount: int = 1) -> None:
        """Produce events, one for each name, and wait for the broker."""
        for name in names:
            await self.send(added(name, amount, deed), name.encode(), partition=partition)
        await self.flush()

    # -- after -----------------------------------------------------------------------------------------------------

    @property
    def changelog(self) -> str:
        return self.config().changelog

    @property
    def dead_letter_topic(self) -> str:
        return self.config().dead_letters

    async def watermarks(self, topic: str) -> dict[int, Watermarks]:
        return await asyncio.to_thread(self.admin.watermarks, topic)

    async def records(self, topic: str | None = None, partition: int | None = None) -> list[IncomingRecord]:
        """Everything in a topic (the output, by default) as ``read_committed`` readers see it, by partition."""
        return await asyncio.to_thread(self._records, topic or self.output, partition)

    def _records(self, topic: str, partition: int | None) -> list[IncomingRecord]:
        marks = self.admin.watermarks(topic)
        ranges = {n: (mark.start, mark.end) for n, mark in sorted(marks.items()) if partition in (None, n)}
        with contextlib.closing(PartitionReader(self.settings)) as reader:
            found = reader.read_all(topic, ranges, stalled_after_seconds=PATIENCE)
        return [record for records in found.values() for record in records]

    async def totals(self, partition: int | None = None) -> list[tuple[str, int]]:
        """The outputs, decoded: what each event said, in order."""
        events = [
            msgspec.json.decode(record.value or b"", type=Total) for record in await self.records(None, partition)
        ]
        return [(event.name, event.amount) for event in events]

    async def until_outputs(self, count: int, seconds: float = 2 * PATIENCE) -> None:
        """Wait until so many are there."""
        deadline = time.monotonic() + seconds
        while (found := len(await self.records())) < count:
            assert time.monotonic() < deadline, f"{found} of {count} outputs"
            await asyncio.sleep(0.05)

    async def dead_letters(self) -> list[tuple[IncomingRecord, dict[str, str]]]:
        """The dead letters, each with its added headers (without their prefix)."""
        return [(record, facts(record)) for record in await self.records(self.dead_letter_topic)]

    async def state(self, partition: int = 0) -> dict[bytes, bytes]:
        """The changelog's last value per key, without the toolkit's own records."""
        last: dict[bytes, bytes] = {}
        for record in await self.records(self.changelog, partition):
            if record.key is None or record.key.startswith(RESERVED_KEY_PREFIX):
                continue
            if record.value is None:
                last.pop(record.key, None)
            else:
                last[record.key] = record.value
        return last

    async def counts(self, partition: int = 0) -> dict[str, int]:
        """``state`` of a ``Totals`` table, decoded."""
        return {key.decode(): INTS.decode(value) for key, value in (await self.state(partition)).items()}

    async def changelog_offset(self, partition: int = 0) -> int | None:
        found = [record for record in await self.records(self.changelog, partition) if record.key == OFFSET_KEY]
        return decode_offset(found[-1]).offset if found else None

    async def committed(self) -> dict[int, int]:
        """The group's committed offsets. What a dead one left open hides them until its time is over."""
        return await asyncio.to_thread(self.admin.committed, self.group, self.topic, PATIENCE)

    async def check_settled(self, *topics: str) -> None:
        """No transaction hangs, and the group's offsets are the changelog's."""
        for name in topics or (self.topic, self.output, self.changelog):
            for number, mark in (await self.watermarks(name)).items():
                assert mark.stable == mark.end, f"{name}[{number}]: a transaction hangs"
        for number, offset in (await self.committed()).items():
            assert await self.changelog_offset(number) == offset

    async def delete_records(self, topic: str, before: Mapping[int, int]) -> None:
        """Cut the log: what is below these offsets is gone."""
        for number, offset in before.items():
            await asyncio.to_thread(truncate, self.settings, topic, number, offset)

    async def delete(self, *names: str) -> None:
        await asyncio.to_thread(self.admin.delete, names, 30.0)


def facts(letter: IncomingRecord) -> dict[str, str]:
    """What the toolkit added to a dead letter's headers."""
    return {
        name.removeprefix(PREFIX): (value or b"").decode()
        for name, value in letter.headers or ()
        if name.startswith(PREFIX)
    }


class Running:
    """A source that runs beside the test: ``async with Running(source) as run``. Stopped in good order at the end.

    ``active``: how many partitions must be at work before the test goes on (all of them by default).
    """

    def __init__(self, source: EventSource[Any], *, active: int | None = None) -> None:
        self.source = source
        self._active = source.config.num_partitions if active is None else active
        self.task: asyncio.Task[None]

    async def __aenter__(self) -> Self:
        self.task = asyncio.create_task(self.source.consume_events())
        try:
            await self.until(lambda: self.active >= self._active, "the partitions are at work")
        except BaseException:
            await self._cancel()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None or self.task.done():
            await self._cancel()
            return
        await asyncio.wait_for(self.source.stop(), PATIENCE)
        await self.task

    async def _cancel(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task], timeout=PATIENCE)
        if not self.task.cancelled():
            self.task.exception()  # taken note of: the test has its own failure

    @property
    def active(self) -> int:
        return len(self.numbers)

    @property
    def numbers(self) -> frozenset[int]:
        """Partitions that it works on."""
        return frozenset(p.partition for p in self.source.statistics().partitions if p.state == "active")

    @property
    def ready(self) -> frozenset[int]:
        """Partitions whose copies are warm."""
        return frozenset(copy.partition for copy in self.source.statistics().copies if copy.state == "ready")

    async def until(self, condition: Condition, what: str, seconds: float = PATIENCE) -> None:
        """Wait for a condition; what makes the source stop meanwhile is raised here."""

        def ended_or() -> Any:
            if self.task.done():
                self.task.result()
                raise AssertionError(f"the source stopped before: {what}")
            return condition()

        await until(ended_or, what, seconds)

    async def until_committed(self, events: int) -> None:
        """Wait until so many events (interjections count) are committed since the start."""
        await self.until(
            lambda: self.source.statistics().committed_events >= events,
            f"{events} events are committed",
        )

    async def until_handled(self, *offsets: int) -> None:
        """Wait until the partitions are at work at these offsets (in their order), and all of it is committed."""

        def handled() -> bool:
            now = self.source.statistics()
            there = [(partition.state, partition.next_offset) for partition in now.partitions]
            return there == [("active", offset) for offset in offsets] and not now.unsettled_transactions

        await self.until(handled, f"offsets {offsets} are reached and committed")

    async def failure(self) -> BaseException:
        """Wait until the source stops with an error, and give it."""
        await asyncio.wait([self.task], timeout=PATIENCE)
        assert self.task.done(), "the source did not stop"
        error = self.task.exception()
        assert error is not None, "the source stopped without an error"
        return error


async def start_failure(source: EventSource[Any]) -> BaseException:
    """Start a source that is expected to stop by itself, and give the error that it stops with."""
    run = Running(source, active=0)
    run.task = asyncio.create_task(source.consume_events())
    try:
        return await run.failure()
    finally:
        await run._cancel()


def source_of(lab: Lab, **settings: Any) -> EventSource[Totals]:
    """A source that counts."""
    source = lab.source(**settings)
    register(source, count)
    return source


async def handle(lab: Lab, *names: str, until_offset: int, **settings: Any) -> list[Measurement]:
    """Produce, and let a source handle it. Returns what it measured."""
    measured: list[Measurement] = []
    if names:
        await lab.add(*names)
    source = source_of(lab, metrics_handler=measured.append, **settings)
    async with Running(source) as run:
        await run.until_handled(until_offset)
    return measured


def picky(lab: Lab, broken: dict[str, bool], **settings: Any) -> EventSource[Totals]:
    """Build a source that tells totals, and fails for events with a deed while ``broken["is"]``."""
    source = lab.source(**settings)

    def work(ctx: EventContext[Totals], event: Added) -> None:
        tell_total(ctx, event, lab.output)
        if event.deed and broken["is"]:
            raise ValueError(f"no {event.deed}")

    source.register_event_type(Added, work, on_error=DEAD_LETTER)
    return source
