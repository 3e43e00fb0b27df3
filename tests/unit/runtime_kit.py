"""What the tests of a whole engine need: broker and group as lists in memory. The threads are real."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from streams import EventSource
from streams.errors import OffsetError
from streams.events import event_type_of
from streams.model.group import Assigned, Assignment, GroupEvent, GroupMetadata, Lost
from streams.model.topics import TopicIdentity
from streams.records import Change, Headers, IncomingRecord, Output, PolledPartition, changelog_record
from streams.runtime.bridge import Worker, in_process
from streams.runtime.changelog import OFFSET_KEY, decode_offset
from streams.runtime.engine import Engine
from streams.runtime.reading.poller import Poller
from streams.source.declaring_handlers import Handler
from tests.unit.waiting import PATIENCE, until
from tests.vocabulary import TOTALS, Named, config_of

TOPIC, OUT, CHANGELOG = "in", "out", "g.in.changelog"


def nothing(*_: Any, **__: Any) -> None:
    """A method without effect."""


class Broker:
    """Logs, and the group's offsets. From any thread."""

    def __init__(self) -> None:
        self.logs: dict[tuple[str, int], list[IncomingRecord]] = defaultdict(list)
        self.offsets: dict[int, int] = {}
        self._lock = threading.Lock()

    def append(
        self, topic: str, partition: int, key: bytes | None, value: bytes | None, headers: Headers | None
    ) -> None:
        with self._lock:
            log = self.logs[topic, partition]
            log.append(IncomingRecord(topic, partition, len(log), key, value, headers))

    def send(self, *names: str, partition: int = 0) -> None:
        kind = event_type_of(Named)
        for name in names:
            self.append(TOPIC, partition, name.encode(), kind.encode(Named(name)), kind.headers)

    def outputs(self) -> list[str]:
        """The names in the output topic."""
        return [msgspec.json.decode(record.value or b"", type=Named).name for record in self.logs[OUT, 0]]

    def reached(self, partition: int = 0) -> int | None:
        """The input offset that the changelog tells."""
        found = [record for record in self.logs[CHANGELOG, partition] if record.key == OFFSET_KEY]
        return decode_offset(found[-1]).offset if found else None


class Records:
    """``EncodedTransaction`` that are not encoded."""

    def __init__(self) -> None:
        self.outputs: list[Output] = []
        self.behind: dict[tuple[str, int], int] = {}

    def sizes(self) -> dict[str, int]:
        return {}

    def ends(self) -> dict[tuple[str, int], int]:
        return self.behind

    def fill(self, outputs: Sequence[Output]) -> None: ...

    async def complete(self, outputs: Sequence[Output]) -> None:
        self.outputs += outputs

    async def add_changes(self, topic: str, partition: int, changes: Sequence[Change]) -> None:
        self.outputs += [changelog_record(topic, partition, change) for change in changes]

    async def add(self, output: Output) -> None:
        self.outputs.append(output)


class Slot:
    """``ports.TransactionSlot``."""

    is_open = True
    is_shaken = False
    settled = nothing

    def __init__(self, transactional_id: str, broker: Broker) -> None:
        self.transactional_id, self._broker = transactional_id, broker

    async def reopen(self, topics: Collection[str], *, may_open: Any) -> None:
        await may_open()

    abandon = nothing

    async def flush(self, records: Records, offsets: Mapping[str, Mapping[int, int]], fence: Any) -> None:
        fence()
        ((_, found),) = offsets.items()
        self._pending, self._offsets = records.outputs, dict(found)
        for output in records.outputs:
            place = output.topic, max(output.partition, 0)
            records.behind[place] = records.behind.get(place, len(self._broker.logs[place])) + 1

    async def commit(self, requested: Any) -> None:
        requested()
        for output in self._pending:
            self._broker.append(output.topic, max(output.partition, 0), output.key, output.value, output.headers)
        self._broker.offsets |= self._offsets

    async def abort(self) -> None: ...


class FakeConsumer:
    """``ports.LogConsumer`` without a log: positions, pauses and failures; a test says what a poll brings."""

    def __init__(self) -> None:
        self.positions: dict[int, int] = {}
        self.paused: set[int] = set()
        self.failures: dict[int, Exception] = {}
        self.closed = threading.Event()

    def add(self, partition: int, offset: int) -> None:
        self.positions[partition] = offset
        self.paused.discard(partition)

    def remove(self, partitions: Collection[int]) -> None:
        for partition in partitions:
            self.positions.pop(partition, None)

    def pause(self, partitions: Collection[int]) -> None:
        self.paused.update(partitions)

    def resume(self, partitions: Collection[int]) -> None:
        self.paused.difference_update(partitions)

    @property
    def live(self) -> list[int]:
        return [number for number in self.positions if number not in self.paused]

    def moved(self, batch: Mapping[int, list[IncomingRecord]]) -> dict[int, PolledPartition]:
        """Go on behind these records: the answer of a poll."""
        for number, records in batch.items():
            self.positions[number] += len(records)
        return {
            number: PolledPartition(records, self.positions[number], -1, False) for number, records in batch.items()
        }

    def take_failures(self) -> dict[int, Exception]:
        failures, self.failures = self.failures, {}
        return failures

    def ends(self) -> dict[int, int]:
        return {}

    def close(self) -> None:
        self.closed.set()


class Consumer(FakeConsumer):
    """What the poll thread drives."""

    def __init__(self, broker: Broker) -> None:
        super().__init__()
        self._broker = broker

    def poll_batch(self, timeout_seconds: float, limit: int) -> dict[int, PolledPartition]:
        logs = {number: self._broker.logs[TOPIC, number][self.positions[number] :][:limit] for number in self.live}
        batch = {number: records for number, records in logs.items() if records}
        if not batch:
            self.closed.wait(0.001)
        return self.moved(batch)

    def ends(self) -> dict[int, int]:
        return {number: len(self._broker.logs[TOPIC, number]) for number in self.positions}


class Tail:
    """``ports.Tail``: what the changelog holds when a partition is added."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def start(self, receive: Any, fail: Any) -> None:
        self._receive, self._fail = receive, fail

    def add(self, partition: int, offset: int, epoch: int) -> None:
        threading.Thread(target=self._read, args=(partition, max(offset, 0), epoch)).start()

    def _read(self, partition: int, offset: int, epoch: int) -> None:
        log = self._broker.logs[CHANGELOG, partition]
        try:
            if offset > len(log):
                raise OffsetError(f"{CHANGELOG}[{partition}]: {offset} is not in the log")
            there = [record for record in log[offset:] if record.key is not None]  # the others are compacted away
            self._receive(partition, epoch, there, len(log), len(log))
        except Exception as error:
            self._fail(partition, epoch, error)

    remove = close = nothing


class Group:
    """``group.Membership`` and ``group.TakeOver``: one member that has everything, until it is told otherwise."""

    def __init__(self, broker: Broker, partitions: int) -> None:
        self._broker, self._all = broker, frozenset(range(partitions))
        self.group_metadata = GroupMetadata(0, 1, "m")
        self.closed = threading.Event()
        self.asked = threading.Event()
        self.answer = threading.Event()
        self.answer.set()

    def start(self, deliver: Callable[[GroupEvent], None]) -> None:
        self._deliver = deliver
        self._assign()

    def _assign(self) -> None:
        now = self.group_metadata
        assignment = Assignment(own=self._all, members=("me",))
        self._deliver(Assigned(now.incarnation, now.generation, self._all, self._all, assignment))

    def lose_and_rejoin(self) -> None:
        """The session expires, and the next generation gives everything back."""
        number = self.group_metadata.incarnation + 1
        self.group_metadata = GroupMetadata(number, number + 1, "m")
        self._deliver(Lost(number, "test"))
        self._assign()

    released = handed_over = took = report = leave = nothing

    def close(self, timeout_seconds: float) -> None:
        self.closed.set()

    def fence_departed(self, members: Collection[str], deadline: float) -> list[str]:
        self.asked.set()
        self.answer.wait(3 * PATIENCE)
        return []

    def stable_offsets(self, partitions: Collection[int], deadline: float, topic: str = "") -> dict[int, int | None]:
        return {number: self._broker.offsets.get(number) for number in partitions}

    def notes(self, partitions: Collection[int], deadline: float) -> dict[int, str]:
        return {}

    def note(self, partition: int, text: str, member: GroupMetadata, deadline: float) -> bool:
        return False

    def log_range(self, topic: str, partitions: Collection[int], deadline: float) -> dict[int, tuple[int, int]]:
        return {number: (0, len(self._broker.logs[topic, number])) for number in partitions}

    def is_member(self, member_id: str, generation: int, deadline: float, settled: bool = False) -> bool:
        return True

    def identity(self, topic: str, deadline: float) -> TopicIdentity:
        return TopicIdentity("id", len(self._all))

    def log_sizes(self, topic: str, partitions: Collection[int], deadline: float) -> dict[int, int]:
        return {}


class Connections:
    """``ports.Connections`` of one run."""

    def __init__(self, broker: Broker, partitions: int) -> None:
        self._broker = broker
        self.membership = Group(broker, partitions)
        self.consumer = Consumer(broker)

    def worker(self, name: str) -> Worker:
        return Worker(name)

    async def in_process(self, function: Callable[..., Any], *args: Any) -> Any:
        return await in_process(function, *args)

    def place_by(self, partitioners: Mapping[str, Any], null_keys: Mapping[str, Any]) -> None: ...

    def records(self, topics: Collection[str] | None = None) -> Records:
        return Records()

    def slot(self, transactional_id: str) -> Slot:
        return Slot(transactional_id, self._broker)

    def input(self) -> Poller:
        return Poller(lambda: self.consumer, max_poll_records=50, room=400, room_bytes=1 << 24)

    def group(self, alive: Callable[[], bool]) -> tuple[Any, Any]:
        return self.membership, self.membership

    def status_board(self) -> Connections:
        return self

    publish = remove = close = nothing

    def tail(self) -> Tail:
        return Tail(self._broker)

    def reader(self) -> Connections:
        return self

    topics = reader

    def read(self, topic: str, ranges: Mapping[int, tuple[int, int]], receive: Any, **_: Any) -> None:
        for number, (start, end) in ranges.items():
            receive(number, self._broker.logs[topic, number][start:end])

    def create(self, *_: Any) -> list[str]:
        return []

    differences = create

    def describe(self, names: Collection[str], timeout_seconds: float) -> dict[str, None]:
        return dict.fromkeys(names)


class Bench:
    """One broker, and sources that run over it, one after another."""

    def __init__(self) -> None:
        self.broker = Broker()
        self.source: EventSource[Any]
        self.connections: Connections
        self.tasks: list[asyncio.Task[None]] = []
        self._before = set(threading.enumerate())

    @property
    def engine(self) -> Engine:
        engine = self.source._run.engine
        assert engine is not None
        return engine

    def make(
        self,
        handler: Handler[Any, Named] | None = None,
        *,
        partitions: int = 1,
        store: Any = TOTALS,
        blocking: bool = False,
        **settings: Any,
    ) -> EventSource[Any]:
        config = config_of(
            group_id="g",
            topic=TOPIC,
            num_partitions=partitions,
            bootstrap_servers="nowhere",
            instance_id="me",
            **settings,
        )
        self.source = EventSource(config, store)
        if handler is not None:
            self.source.register_event_type(Named, handler, blocking=blocking)
        return self.source

    def run(self) -> asyncio.Task[None]:
        self.connections = Connections(self.broker, self.source.config.num_partitions)
        self.tasks.append(asyncio.create_task(self.source._run.consume(lambda _: self.connections)))  # type: ignore[arg-type]
        return self.tasks[-1]

    def begin(self, *names: str) -> asyncio.Task[None]:
        """Run over these events."""
        self.broker.send(*names)
        return self.run()

    async def start(self, *names: str) -> asyncio.Task[None]:
        """Run until the partitions are at work."""
        task = self.begin(*names)
        await self.until_active()
        return task

    async def over(self, *names: str) -> None:
        """Run over these events until all of partition 0 is committed."""
        self.begin(*names)
        await self.committed()

    async def committed(self) -> None:
        goal = len(self.broker.logs[TOPIC, 0])
        await self.until(lambda: self.broker.offsets.get(0) == goal, f"offset {goal} is committed")

    async def until(self, condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, f"waited in vain: {what}"
            if self.tasks[-1].done() and not self.tasks[-1].cancelled():
                self.tasks[-1].result()
            await asyncio.sleep(0.002)

    async def until_active(self) -> None:
        all_active = ["active"] * self.source.config.num_partitions
        await self.until(lambda: [one.state for one in self.source.statistics().partitions] == all_active, "all active")

    async def stop(self) -> None:
        """In good order."""
        await asyncio.wait_for(self.source.stop(), PATIENCE)
        await self.tasks[-1]

    async def end(self) -> None:
        if self.tasks and not self.tasks[-1].done():
            await self.stop()
        await self.until_all_threads_ended()

    async def cancel(self) -> None:
        self.tasks[-1].cancel()
        await asyncio.wait(self.tasks[-1:], timeout=PATIENCE)
        assert self.tasks[-1].cancelled()

    async def until_all_threads_ended(self) -> None:
        def left() -> list[str]:
            return sorted({thread.name for thread in threading.enumerate() if thread.name.startswith("kes-")} - names)

        names = {thread.name for thread in self._before}
        await until(lambda: not left(), f"no thread lives on of {left()}")
