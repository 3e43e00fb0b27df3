"""The stage of ``BatchProducer``: records sent outside of transactions, and acknowledged before their event's turn."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from streams.core.policy import Answered
from streams.errors import BrokerUnavailable, Stopped
from streams.model.tracing import stamped
from streams.outcomes import ExecutionState
from streams.records import Acknowledgement, Delivery, Record
from streams.runtime.async_work.async_stage import AtTurn, Blocked, ItemsStage, ItemsWork, TurnEntry, described
from streams.runtime.partition.host import Host
from streams.runtime.partition.reorder_buffer import Entry
from streams.runtime.ports import Blocking, Connections, PlainProducer
from streams.runtime.signal import Signal
from streams.statistics import StageStatistics

POLL_SECONDS = 0.1
"""Seconds that the thread waits for reports between two checks whether it is still needed."""


class Outlet:
    """Sends deliveries in their order, by one producer on a thread of its own. They wait here while the producer has no
    room. On the loop.

    ``connect`` builds a producer (blocking). ``is_wanted`` is called before a delivery is sent. ``report`` is called
    once for each one that was sent; ``refused`` if there cannot be a producer, with all deliveries that wait for it.
    """

    def __init__(
        self,
        worker: Blocking,
        connect: Callable[[], PlainProducer],
        is_wanted: Callable[[Delivery], bool],
        report: Callable[[Acknowledgement], None],
        refused: Callable[[list[Delivery], Exception], None],
    ) -> None:
        self._worker = worker
        self._connect = connect
        self._is_wanted = is_wanted
        self._report = report
        self._refused = refused
        self._queue: deque[Delivery] = deque()
        self._producer: PlainProducer | None = None
        self._unreported: dict[int, Delivery] = {}  # by their ids
        self._more = Signal()
        self._task = asyncio.get_running_loop().create_task(self._run(), name="kes-outlet")
        self._task.add_done_callback(self._ended)

    @property
    def waiting(self) -> int:
        """Return the number of deliveries that the producer has not taken yet."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Return the number of deliveries that are not reported yet."""
        return len(self._unreported)

    def send(self, delivery: Delivery) -> None:
        """Queue a delivery behind all others."""
        self._queue.append(delivery)
        self._flush()

    def close(self) -> asyncio.Task[None]:
        """Close the producer, and drop the unreported deliveries."""
        self._queue.clear()
        self._task.cancel()
        return self._task

    async def _run(self) -> None:
        while True:
            while not self._queue:
                await self._more.wait()
            try:
                self._producer = await self._worker.call(self._connect)
            except Exception as error:
                waiting, self._queue = list(self._queue), deque()
                self._refused(waiting, error)
                continue
            self._flush()
            while not self._producer.is_broken:
                await self._serve(self._producer)
            self._drop()

    async def _serve(self, producer: PlainProducer) -> None:
        """Wait for reports while there may be any."""
        if not self._unreported and not self._queue:
            await self._more.wait()
            return
        for report in await self._worker.call(producer.poll, POLL_SECONDS):
            if self._unreported.pop(id(report.token), None) is not None:
                self._report(report)
        self._flush()

    def _flush(self) -> None:
        """Hand over the deliveries that the producer takes."""
        self._more.notify()
        producer = self._producer
        while producer is not None and self._queue and not producer.is_broken:
            delivery = self._queue.popleft()
            if not self._is_wanted(delivery):
                continue
            try:
                taken = producer.produce(delivery.record, delivery)
            except Exception as error:  # refused, or a part of it is of a wrong type
                self._report(Acknowledgement(delivery, -1, -1, error))
                continue
            if not taken:
                self._queue.appendleft(delivery)  # it is the next one again: deliveries are sent in their order
                return
            self._unreported[id(delivery)] = delivery

    def _drop(self) -> None:
        """Drop a broken producer, with the deliveries that it will never report."""
        producer, self._producer = self._producer, None
        if producer is not None:
            self._worker.post(producer.close)
        lost, self._unreported = self._unreported, {}
        for delivery in lost.values():
            error = BrokerUnavailable(f"{delivery.record.topic}: the producer broke before it acknowledged the record")
            self._report(Acknowledgement(delivery, -1, -1, error))

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Handle the end of the task. Not in the task itself: one that is cancelled at once never runs."""
        self._drop()
        self._worker.abandon()
        if not task.cancelled() and task.exception() is not None:
            raise task.exception()  # type: ignore[misc]


@dataclass(frozen=True, eq=False, kw_only=True)
class ProducerDefinition:
    """The definition of a ``BatchProducer``. A pickled copy has neither address nor settings."""

    name: str
    finalizer: AtTurn | None
    on_failure: AtTurn | None
    max_queued_records: int
    delivery_timeout_seconds: float
    bootstrap_servers: str = ""
    client_settings: Mapping[str, object] = field(default_factory=dict, repr=False)

    @property
    def described(self) -> tuple[str, ...]:
        return described(self.finalizer, self.on_failure)

    def open(self, host: Host) -> ProducerStage:
        return ProducerStage(self, host)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "bootstrap_servers": "", "client_settings": {}}


class ProducerStage(ItemsStage[list[Record], ItemsWork[Delivery]]):
    """One running producer."""

    def __init__(self, definition: ProducerDefinition, host: Host) -> None:
        super().__init__(definition.finalizer, definition.on_failure)
        self._definition = definition
        self._host = host
        self._outlet: Outlet | None = None
        self._works: dict[int, ItemsWork[Delivery]] = {}  # by the id of a delivery that is not reported
        self._queued: dict[int, int] = {}  # records per partition
        self._blocked = Blocked()

    def admits(self, entry: Entry, plan: list[Record]) -> bool:
        queued = self._queued.get(entry.record.partition, 0)
        if not queued or queued + len(plan) <= self._definition.max_queued_records:
            return True
        self._blocked.add(entry)
        return False

    def start(self, entry: Entry, plan: list[Record]) -> ItemsWork[Delivery]:
        if entry.trace is not None:
            carrier = entry.trace.carrier
            plan = [msgspec.structs.replace(record, headers=stamped(record.headers, carrier)) for record in plan]
        work = ItemsWork(self, entry, [Delivery(record) for record in plan])
        entry.work = work
        entry.begun = True  # a record that the producer has cannot be taken back
        if not plan or self._host.connections is None:  # a replay is connected to nothing, and sends nothing twice
            self.all_done(work)
            return work
        partition = entry.record.partition
        self._queued[partition] = self._queued.get(partition, 0) + work.left
        # Before the first is sent: one that is refused at once is reported inside of ``send``.
        for delivery in work.items:
            self._works[id(delivery)] = work
        outlet = self._outlet = self._outlet or self._open_outlet(self._host.connections)
        for delivery in work.items:
            outlet.send(delivery)
        return work

    def statistics(self) -> StageStatistics:
        outlet = self._outlet
        running, waiting = (0, 0) if outlet is None else (outlet.running, outlet.waiting)
        return StageStatistics(self._definition.name, running, waiting, 0)

    def close(self) -> list[asyncio.Task[None]]:
        works, self._works = self._works, {}
        for work in works.values():
            # A handler waits for these. The other entries are dropped with their buffers.
            if isinstance(work.entry, TurnEntry):
                work.entry.fail(Stopped("the event source stops"), 1)
        return [] if self._outlet is None else [self._outlet.close()]

    def _open_outlet(self, connections: Connections) -> Outlet:
        definition = self._definition

        def connect() -> PlainProducer:
            return connections.plain_producer(
                definition.bootstrap_servers, definition.client_settings, definition.delivery_timeout_seconds
            )

        worker = connections.worker(f"kes-producer-{definition.name}")
        return Outlet(worker, connect, self._is_wanted, self._reported, self._refused)

    def _is_wanted(self, delivery: Delivery) -> bool:
        return id(delivery) in self._works

    def _reported(self, report: Acknowledgement) -> None:
        delivery: Delivery = report.token
        work = self._works.get(id(delivery))
        if work is None:
            return  # it is not awaited any more
        delivery.partition, delivery.offset, delivery.error = report.partition, report.offset, report.error
        self._forget(work, delivery)
        self.item_done(work)
        self._blocked.wake()

    def _refused(self, deliveries: list[Delivery], error: Exception) -> None:
        """Stop the source: there cannot be a producer with these settings. No error policy decides about that."""
        for delivery in deliveries:
            self._reported(Acknowledgement(delivery, -1, -1, Answered(ExecutionState.FATAL, error)))

    def cancel(self, work: ItemsWork[Delivery]) -> None:
        """Forget the deliveries of work that is not awaited any more."""
        left = [delivery for delivery in work.items if id(delivery) in self._works]
        if left:
            for delivery in left:
                self._forget(work, delivery)
            self._blocked.wake()

    def _forget(self, work: ItemsWork[Delivery], delivery: Delivery) -> None:
        del self._works[id(delivery)]
        left = self._queued[work.entry.record.partition] - 1
        if left:
            self._queued[work.entry.record.partition] = left
        else:
            del self._queued[work.entry.record.partition]
