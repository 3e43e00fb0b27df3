"""``ports.Connections`` over the simulated broker: what one member's process is connected to.

Blocking calls run in fibers: they pause before and after their effect, may lose their answer, hang for ever, or have
their effect long after everybody has stopped waiting for it.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from streams.errors import BrokerUnavailable, Stopped, TransactionFailed
from streams.records import Headers, IncomingRecord, Record
from streams.runtime.bridge import DeadlinePassed
from streams.topics import TopicSpec

from .broker import Entry, Refuses
from .faults import Faults, Strike
from .group import SimMembership
from .virtual_time import ORDERED, Killed

T = TypeVar("T")
FOREVER = 1e7
REFUSED_VALUE = b"REFUSED"
"""A record whose value contains this is too large for its topic."""


class Process:
    """What the parts of one member share: its life, its clock, its faults."""

    def __init__(self, world: Any, name: str) -> None:
        self.world, self.name = world, name
        self.loop, self.rng, self.fibers = world.loop, world.rng, world.fibers
        self.broker, self.group = world.broker, world.group
        self.faults: Faults = world.faults
        self.dead = False
        self.frozen_until = 0.0
        self.memberships: list[SimMembership] = []

    def pause(self, seconds: float) -> None:
        """In a fiber: take time; longer while the process is frozen, for ever when it is dead."""
        if self.dead:
            raise Killed
        self.fibers.pause(seconds)
        while True:
            if self.dead:
                raise Killed
            left = self.frozen_until - self.loop.time()
            if left <= 0:
                return
            self.fibers.pause(left)

    def send(self, seconds: float = 0.0) -> None:
        """The way to the broker, in a fiber: a request that is under way arrives, whatever becomes of its sender."""
        if self.dead:
            raise Killed
        self.fibers.pause(seconds + self.faults.one_way())
        while (left := self.broker.down_until - self.loop.time()) > 0:
            self.fibers.pause(left + self.faults.one_way())

    def travel(self) -> None:
        """The way back: waits for the process, and for the broker."""
        self.pause(self.faults.one_way())
        while (left := self.broker.down_until - self.loop.time()) > 0:
            self.pause(left + self.faults.one_way())

    def travel_times(self) -> Any:
        """The same for coroutines: how long to sleep, again and again."""
        yield self.faults.one_way()
        while True:
            now = self.loop.time()
            left = max(self.frozen_until, self.broker.down_until, now + FOREVER if self.dead else 0.0) - now
            if left <= 0:
                return
            yield left

    def kill(self) -> None:
        self.dead = True
        for membership in self.memberships:
            membership.kill()


class SimConnections:
    """``ports.Connections``."""

    message_limit = 100_000

    def __init__(self, process: Process, config: Any) -> None:
        self.process, self.config = process, config

    def worker(self, name: str) -> SimWorker:
        return SimWorker(self.process)

    def producer(self, transactional_id: str, *, one_by_one: bool = False) -> SimProducer:
        return SimProducer(self.process, transactional_id, self.config.transaction_timeout_seconds, one_by_one)

    def input(self) -> SimInput:
        return SimInput(self.process, self.config.topic, self.config.max_poll_records)

    def reader(self) -> SimReader:
        return SimReader(self.process)

    def topics(self) -> SimTopics:
        return SimTopics()

    def group(self, alive: Callable[[], bool]) -> tuple[SimMembership, SimTakeOver]:
        process, config = self.process, self.config
        membership = SimMembership(
            process.group, config.instance_id, process.rng, process.travel_times, config.heartbeat_interval_seconds
        )
        process.memberships.append(membership)
        return membership, SimTakeOver(process, config.group_id)


class SimWorker:
    """``ports.Blocking``: one call at a time, in a fiber."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._jobs: deque[tuple[Callable[..., Any], tuple[Any, ...], asyncio.Future[Any] | None] | None] = deque()
        self._running = False

    async def call(self, function: Callable[..., T], *args: Any, timeout: float | None = None) -> T:
        loop = self._process.loop
        future: asyncio.Future[T] = loop.create_future()
        self._put((function, args, future))
        if timeout is None:
            return await future
        timer = loop.call_later(timeout, lambda: future.done() or future.set_exception(DeadlinePassed()))
        try:
            return await future
        finally:
            timer.cancel()

    def post(self, function: Callable[..., object], *args: Any) -> None:
        self._put((function, args, None))

    def abandon(self) -> None:
        self._put(None)

    def _put(self, job: Any) -> None:
        self._jobs.append(job)
        if not self._running:
            self._running = True
            self._process.loop.call_soon(self._process.fibers.run, self._work)

    def _work(self) -> None:
        process = self._process
        while self._jobs:
            job = self._jobs.popleft()
            if job is None:
                return  # and nothing runs afterwards: the thread has ended
            function, args, future = job
            process.pause(process.faults.switch())
            outcome: Callable[[asyncio.Future[Any]], None]
            try:
                result = function(*args)
                outcome = lambda waiting, result=result: waiting.set_result(result)  # noqa: E731
            except Exception as error:
                outcome = lambda waiting, error=error: waiting.set_exception(error)  # noqa: E731
            process.pause(process.faults.switch())
            if future is not None and not future.done():
                outcome(future)
        self._running = False


@dataclass
class Refused:
    """``ports.Refusal``."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes | None
    reason: str = "MSG_SIZE_TOO_LARGE"


class SimProducer:
    """``ports.Producer``, with the errors that ``clients.translate`` makes of librdkafka's."""

    def __init__(self, process: Process, name: str, transaction_timeout: float, one_by_one: bool) -> None:
        self._one_by_one = one_by_one
        self._process, self._name, self._transaction_timeout = process, name, transaction_timeout
        self._broker, self._faults = process.broker, process.faults
        self._epoch = -1
        self._queue: deque[tuple[str, int, Entry]] = deque()
        self._sending = self._closed = self._begun = False
        self._failed: TransactionFailed | None = None
        self._sent_any = False
        self._born = process.loop.time()
        self.refused: list[Refused] = []

    def init(self, timeout_seconds: float) -> None:
        deadline = self._process.loop.time() + timeout_seconds
        strike = self._faults.strike("init", self._process.loop.time())
        if strike is Strike.HANGS:
            self._process.pause(FOREVER)
        if strike is Strike.REQUEST_LOST:
            self._no_answer("init_transactions", timeout_seconds)
        while True:
            self._process.send()
            epoch = self._broker.init(self._name, self._transaction_timeout)
            if strike is Strike.REPLY_LOST:
                self._no_answer("init_transactions", timeout_seconds)
            self._process.travel()
            if epoch is not None:
                self._epoch = epoch
                return
            if self._process.loop.time() > deadline:
                raise TransactionFailed("init_transactions", "_TIMED_OUT", "unknown")
            self._process.pause(0.02)

    def warm_up(self, topics: Collection[str], timeout_seconds: float) -> None:
        self._process.travel()

    def begin(self) -> None:
        if self._begun:
            raise TransactionFailed("begin_transaction", "_STATE", "unknown", "a transaction is under way")
        self._begun, self._sent_any, self._failed, self.refused = True, False, None, []

    def produce(self, record: Record) -> bool:
        partition = -1 if record.partition is None else record.partition
        return self.produce_raw(record.topic, record.value, record.key, partition, record.headers)

    def produce_raw(
        self, topic: str, value: bytes | None, key: bytes | None, partition: int, headers: Headers | None
    ) -> bool:
        if self._failed is not None and self._failed.kind == "fenced":
            raise self._failed
        if self._closed or not self._begun:
            raise TransactionFailed("produce", "_STATE", "unknown", "no transaction")
        if len(self._queue) >= self._faults.queue_limit:
            return False
        if partition < 0:
            partition = zlib.crc32(key or b"") % self._broker.partitions
        self._queue.append((topic, partition, Entry(key, value, headers, None)))
        self._schedule()
        return True

    def poll(self) -> None:
        pass

    def _schedule(self) -> None:
        if not self._sending:
            self._sending = True
            self._process.loop.call_later(self._faults.one_way(), self._send)

    def _send(self) -> None:
        """librdkafka's own thread sends what is queued, in order."""
        self._sending = False
        process, now = self._process, self._process.loop.time()
        if self._closed or process.dead or self._failed is not None:
            self._queue.clear()
            return
        wait = max(process.frozen_until, self._broker.down_until) - now
        if wait > 0:
            self._sending = True
            process.loop.call_later(wait + self._faults.one_way(), self._send)
            return
        for _ in range(min(len(self._queue), self._faults.rng.randint(1, 30))):
            topic, partition, entry = self._queue[0]
            if entry.value is not None and REFUSED_VALUE in entry.value:
                self._refuse(topic, partition)
                self._failed = TransactionFailed("flush", "MSG_SIZE_TOO_LARGE", "abortable", "too large")
                self._queue.clear()
                return
            try:
                if not self._broker.produce(self._name, self._epoch, topic, partition, entry):
                    break
            except Refuses as refuses:
                self._failed = TransactionFailed("flush", refuses.code, refuses.kind)
                self._queue.clear()
                return
            self._sent_any = True
            self._queue.popleft()
        if self._queue:
            self._schedule()

    def _refuse(self, topic: str, partition: int) -> None:
        """The broker's answer is to a batch: whoever travels with the record that is too large is named too."""
        batch = [queued for queued in self._queue if queued[:2] == (topic, partition)]
        size = 1 if self._one_by_one else self._faults.rng.randint(1, 3)
        self.refused += [Refused(topic, partition, entry.key, entry.value) for _, _, entry in batch[:size]]

    def flush(self, timeout_seconds: float) -> None:
        process, deadline = self._process, self._process.loop.time() + timeout_seconds
        strike = self._faults.strike("flush", process.loop.time())
        if strike is not None:
            if strike is Strike.HANGS:
                process.pause(FOREVER)
            if strike is Strike.ABORTABLE:
                raise TransactionFailed("flush", "INJECTED", "abortable")
            if strike is Strike.REPLY_LOST:
                self._no_answer("flush", timeout_seconds)
        process.travel()
        while self._queue and self._failed is None:
            if process.loop.time() > deadline:
                raise TransactionFailed("flush", "_TIMED_OUT", "unknown")
            process.pause(0.003)
        self._raise_if_failed()
        process.travel()

    def send_offsets(self, topic: str, offsets: Mapping[int, int], metadata: bytes, timeout_seconds: float) -> None:
        generation, member = metadata.decode().split(":")

        def effect() -> bool:
            return self._broker.send_offsets(self._name, self._epoch, int(generation), member, dict(offsets))

        if self._born < self._broker.last_outage and self._faults.rng.random() < 0.7:
            self._process.pause(FOREVER)  # librdkafka issues 5456 and 5511
        self._request("send_offsets_to_transaction", timeout_seconds, effect)
        self._sent_any = True

    def commit(self, timeout_seconds: float) -> None:
        self._end("commit_transaction", timeout_seconds, True)

    def abort(self, timeout_seconds: float) -> None:
        self._queue.clear()
        self._failed = None if self._failed is not None and self._failed.kind != "fenced" else self._failed
        self._end("abort_transaction", timeout_seconds, False)

    def close(self) -> None:
        self._closed = True
        self._queue.clear()

    def _end(self, call: str, timeout_seconds: float, commit: bool) -> None:
        self._raise_if_failed()
        if self._sent_any:
            self._request(call, timeout_seconds, lambda: self._broker.end(self._name, self._epoch, commit))
        self._begun = False

    def _request(self, call: str, timeout_seconds: float, effect: Callable[[], bool]) -> None:
        process, deadline = self._process, self._process.loop.time() + timeout_seconds
        strike = self._faults.strike(call.split("_")[0], process.loop.time())
        if strike is Strike.REQUEST_LOST:
            self._no_answer(call, timeout_seconds)
        if strike is Strike.HANGS:
            process.pause(FOREVER)
        late = self._faults.rng.uniform(1.0, 6.0) * timeout_seconds if strike is Strike.LATE else 0.0
        if strike is Strike.ABORTABLE:
            process.travel()
            raise TransactionFailed(call, "INJECTED", "abortable")
        if strike is Strike.FORGOTTEN:
            process.travel()
            raise TransactionFailed(call, "UNKNOWN_MEMBER_ID", "lost")
        while True:
            if self._closed:
                raise TransactionFailed(call, "_DESTROY", "unknown")
            process.send(late)
            try:
                done = effect()
            except Refuses as refuses:
                process.travel()
                raise TransactionFailed(call, refuses.code, refuses.kind) from None
            if strike is Strike.REPLY_LOST:
                self._no_answer(call, timeout_seconds)
            process.travel()
            if done:
                return
            if process.loop.time() > deadline:
                raise TransactionFailed(call, "_TIMED_OUT", "unknown")
            process.pause(0.02)

    def _no_answer(self, call: str, timeout_seconds: float) -> None:
        self._process.pause(timeout_seconds if self._faults.rng.random() < 0.5 else FOREVER)
        raise TransactionFailed(call, "_TIMED_OUT", "unknown")

    def _raise_if_failed(self) -> None:
        if self._failed is not None:
            raise self._failed


class SimInput:
    """``ports.Input``: polls while there is something to read."""

    def __init__(self, process: Process, topic: str, limit: int) -> None:
        self._process, self._topic, self._limit = process, topic, limit
        self._positions: dict[int, int] = {}
        self._epochs: dict[int, int] = {}
        self._paused: set[int] = set()
        self._outstanding = 0
        self._arrives_at = self._thawed = 0.0
        self._closed = self._polling = False
        process.world.inputs.append(self)

    def start(self, deliver: Callable[[Any], None], fail: Callable[[Exception], None]) -> None:
        self._deliver = deliver

    def add(self, partition: int, offset: int, epoch: int) -> None:
        self._positions[partition] = offset
        self._epochs = self._epochs | {partition: epoch}
        self._paused.discard(partition)
        self.wake()

    def remove(self, partitions: Collection[int]) -> None:
        for partition in partitions:
            self._positions.pop(partition, None)
        self._epochs = {number: epoch for number, epoch in self._epochs.items() if number not in partitions}

    def pause(self, partition: int) -> None:
        self._paused.add(partition)

    def resume(self, partition: int) -> None:
        self._paused.discard(partition)
        self.wake()

    def handled(self, records: int, size: int) -> None:
        self._outstanding -= records
        assert self._outstanding >= 0, "more records were handled than delivered"
        self.wake()

    def close(self) -> None:
        self._closed = True

    def wake(self) -> None:
        if not self._polling and not self._closed:
            self._polling = True
            self._process.loop.call_later(self._process.faults.one_way(), self._poll)

    def _poll(self) -> None:
        process = self._process
        if self._closed or process.dead:
            return
        wait = max(process.frozen_until, process.broker.down_until) - process.loop.time()
        if wait > 0:
            process.loop.call_later(wait + process.faults.one_way(), self._poll)
            return
        self._polling = False
        batch: dict[int, list[IncomingRecord]] = {}
        for partition, position in list(self._positions.items()):
            if partition in self._paused or self._outstanding >= 8 * self._limit:
                continue
            log = process.broker.log(self._topic, partition)
            records = list(log.committed(position, position + process.rng.randint(1, self._limit)))
            if records:
                batch[partition] = records
                self._positions[partition] = records[-1].offset + 1
                self._outstanding += len(records)
        if batch:
            self._arrives_at = max(self._arrives_at + ORDERED, process.loop.time() + process.faults.poll())
            process.loop.call_at(self._arrives_at, self._hand_over, batch, self._epochs)
            self.wake()

    def _hand_over(self, batch: Any, epochs: Any) -> None:
        wait = self._process.frozen_until - self._process.loop.time()
        if wait > 0:
            self._thawed += ORDERED
            self._process.loop.call_at(self._process.frozen_until + self._thawed, self._hand_over, batch, epochs)
        elif not self._process.dead:
            self._deliver((batch, epochs))


class SimReader:
    """``ports.Reader``: ``read_committed``."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def read(
        self,
        topic: str,
        ranges: Mapping[int, tuple[int, int]],
        receive: Callable[[int, list[IncomingRecord]], None],
        *,
        stalled_after_seconds: float,
        cancelled: Callable[[], bool],
    ) -> None:
        process = self._process
        positions = {number: start for number, (start, _) in ranges.items()}
        progress = process.loop.time()
        while any(positions[number] < end for number, (_, end) in ranges.items()):
            if cancelled():
                raise Stopped("cancelled")
            process.travel()
            for number, (_, end) in ranges.items():
                log, start = process.broker.log(topic, number), positions[number]
                reached = min(end, log.stable, start + process.rng.randint(1, 200))
                if reached <= start:
                    continue
                records = list(log.committed(start, reached))
                positions[number] = reached
                progress = process.loop.time()
                if records:
                    receive(number, records)
            if process.loop.time() - progress > stalled_after_seconds:
                raise BrokerUnavailable(f"no progress in {topic}")
            process.pause(0.005)

    def close(self) -> None:
        pass


class SimTopics:
    """``ports.Topics``: everything is there."""

    def create(self, specs: Sequence[TopicSpec], timeout_seconds: float) -> list[str]:
        return []

    def differences(self, specs: Sequence[TopicSpec]) -> list[str]:
        return []

    def delete(self, names: Collection[str], timeout_seconds: float) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


class SimTakeOver:
    """``group.TakeOver``."""

    def __init__(self, process: Process, group_id: str) -> None:
        self._process, self._prefix = process, group_id + "."

    def _ask(self, what: str, deadline: float, effect: Callable[[], T | None]) -> T:
        process = self._process
        strike = process.faults.strike("ask", process.loop.time())
        while True:
            process.travel()
            answer = effect()
            process.travel()
            if strike is not None or process.loop.time() > deadline:
                raise BrokerUnavailable(f"{what}: no answer")
            if answer is not None:
                return answer
            process.pause(0.01)

    def fence_departed(self, members: Collection[str], deadline: float) -> list[str]:
        broker = self._process.broker
        departed = [
            name
            for name in self._ask("listing transactions", deadline, broker.open_ids)
            if name.startswith(self._prefix) and name[len(self._prefix) :].rpartition(".")[0] not in members
        ]
        for name in departed:
            self._ask(f"fencing {name}", deadline, lambda name=name: broker.init(name, 5.0))
        return departed

    def stable_offsets(self, partitions: Collection[int], deadline: float) -> dict[int, int | None]:
        return self._ask("offsets", deadline, lambda: self._process.broker.stable_offsets(sorted(partitions)))

    def log_range(self, topic: str, partitions: Collection[int], deadline: float) -> dict[int, tuple[int, int]]:
        broker = self._process.broker
        return self._ask("range", deadline, lambda: {n: (0, broker.log(topic, n).end) for n in partitions})

    def topic_id(self, topic: str, deadline: float) -> str:
        return self._ask("topic id", deadline, lambda: "id")
