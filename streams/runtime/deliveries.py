"""The stage of ``BatchProducer``: records sent outside of transactions, and acknowledged before their event's turn."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from streams.errors import Stopped
from streams.outcomes import ExecutionState
from streams.records import Acknowledgement, Delivery, Record
from streams.runtime.event_context import EventContext
from streams.runtime.failures import Answered
from streams.runtime.line import Entry
from streams.runtime.outlet import Outlet
from streams.runtime.ports import PlainProducer
from streams.runtime.stages import Blocked, described
from streams.statistics import StageStatistics

if TYPE_CHECKING:
    from streams.runtime.host import Host


@dataclass(frozen=True, eq=False, kw_only=True)
class ProducerDefinition:
    """What ``BatchProducer`` knows. A copy of it has neither address nor settings: they stay where they are."""

    name: str
    finalizer: Callable[[EventContext[Any], list[Delivery]], Any] | None
    on_failure: Callable[[EventContext[Any], list[Delivery]], Any] | None
    max_queued_records: int
    delivery_timeout_seconds: float
    bootstrap_servers: str = ""
    client_settings: Mapping[str, object] = field(default_factory=dict, repr=False)

    @property
    def described(self) -> tuple[str, ...]:
        """See ``stages.StageDefinition``."""
        return described(self.finalizer, self.on_failure)

    def open(self, host: Host) -> DeliveryStage:
        """For one run."""
        return DeliveryStage(self, host)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "bootstrap_servers": "", "client_settings": {}}


class _Work:
    """The records of one event, until all of them are reported."""

    __slots__ = ("deliveries", "done", "left", "partition", "stage")

    def __init__(
        self, stage: DeliveryStage, partition: int, records: Sequence[Record], done: Callable[[_Work], None]
    ) -> None:
        self.stage = stage
        self.partition = partition
        self.deliveries = [Delivery(record) for record in records]
        self.left = len(self.deliveries)
        self.done = done

    @property
    def error(self) -> Exception | None:
        """Of the first record that failed."""
        return next((delivery.error for delivery in self.deliveries if delivery.error is not None), None)

    def withdraw(self) -> None:
        """See ``line.Work``."""
        self.stage.cancel(self)


class DeliveryStage:
    """One running producer. On the loop; nothing here blocks or waits."""

    def __init__(self, definition: ProducerDefinition, host: Host) -> None:
        self._definition = definition
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._outlets: dict[bool, Outlet] = {}  # by whether each record travels in a batch of its own
        self._works: dict[int, _Work] = {}  # by the id of a delivery that is not reported
        self._queued: dict[int, int] = {}  # records per partition
        self._turns: dict[asyncio.Future[None], None] = {}
        self._blocked = Blocked()

    def begin(self, entry: Entry) -> bool:
        """See ``stages.Stage``."""
        records: list[Record] | None = entry.plan
        if records is None:
            entry.settle(_nothing)
            return True
        queued = self._queued.get(entry.record.partition, 0)
        if queued and queued + len(records) > self._definition.max_queued_records:
            self._blocked.add(entry)
            return False

        def done(work: _Work) -> None:
            error = work.error
            if error is None or (self._definition.on_failure is not None and not isinstance(error, Answered)):
                entry.settle(self._finish(work.deliveries))
            else:
                entry.fail(error, 1)

        work = _Work(self, entry.record.partition, records, done)
        entry.work = work
        entry.begun = True  # what is handed to the producer can not be taken back
        self._send(work)
        return True

    async def produce(self, ctx: EventContext[Any], records: Sequence[Record]) -> list[Delivery]:
        """Records of a handler that has its turn. Returns when all are reported; raises the first error."""
        work = await self._settled(ctx, records)
        if work.error is not None:
            raise work.error
        return work.deliveries

    async def in_turn(self, ctx: EventContext[Any], records: list[Record] | None) -> Any:
        """All that an event's plan asks for, finalizer included, when the event has its turn already."""
        if records is None:
            return None
        work = await self._settled(ctx, records)
        error = work.error
        if error is not None and (self._definition.on_failure is None or isinstance(error, Answered)):
            raise error
        answer = self._finish(work.deliveries)(ctx)
        return await answer if isinstance(answer, Awaitable) else answer

    async def _settled(self, ctx: EventContext[Any], records: Sequence[Record]) -> _Work:
        future: asyncio.Future[None] = self._loop.create_future()
        partition = ctx.topic_partition.partition
        work = _Work(self, partition, records, lambda _: None if future.done() else future.set_result(None))
        self._turns[future] = None
        self._send(work)
        try:
            await future
        finally:
            del self._turns[future]
            self.cancel(work)
        return work

    def statistics(self) -> StageStatistics:
        """What is under way."""
        running = sum(outlet.running for outlet in self._outlets.values())
        waiting = sum(outlet.waiting for outlet in self._outlets.values())
        return StageStatistics(self._definition.name, running, waiting, 0)

    def close(self) -> list[asyncio.Task[None]]:
        """See ``stages.Stage``."""
        self._works.clear()
        for future in self._turns:
            if not future.done():
                future.set_exception(Stopped("the event source stops"))
        return [outlet.close() for outlet in self._outlets.values()]

    def _send(self, work: _Work) -> None:
        if not work.deliveries:
            work.done(work)
            return
        if self._host.connections is None:  # a replay
            work.left = 0
            work.done(work)
            return
        self._queued[work.partition] = self._queued.get(work.partition, 0) + work.left
        for delivery in work.deliveries:
            self._works[id(delivery)] = work
        outlet = self._outlet(alone=False)
        for delivery in work.deliveries:
            outlet.send(delivery)

    def _outlet(self, *, alone: bool) -> Outlet:
        outlet = self._outlets.get(alone)
        if outlet is None:
            connections, definition = self._host.connections, self._definition
            assert connections is not None

            def connect() -> PlainProducer:
                return connections.plain_producer(
                    definition.bootstrap_servers,
                    definition.client_settings,
                    definition.delivery_timeout_seconds,
                    one_by_one=alone,
                )

            worker = connections.worker(f"kes-producer-{definition.name}")
            outlet = Outlet(worker, connect, self._is_wanted, self._reported, self._refused)
            self._outlets[alone] = outlet
        return outlet

    def _is_wanted(self, delivery: Delivery) -> bool:
        return id(delivery) in self._works

    def _reported(self, report: Acknowledgement) -> None:
        delivery: Delivery = report.token
        work = self._works.get(id(delivery))
        if work is None:
            return  # nobody waits for it any more
        if report.send_alone:
            self._outlet(alone=True).send(delivery)
            return
        delivery.partition, delivery.offset, delivery.error = report.partition, report.offset, report.error
        self._forget(work, delivery)
        work.left -= 1
        if not work.left:
            work.done(work)
        self._blocked.wake()

    def _refused(self, deliveries: list[Delivery], error: Exception) -> None:
        """There cannot be a producer with these settings: that ends the source, whatever the error policy says."""
        for delivery in deliveries:
            self._reported(Acknowledgement(delivery, -1, -1, Answered(ExecutionState.FATAL, error)))

    def cancel(self, work: _Work) -> None:
        """Nobody waits for it any more."""
        left = [delivery for delivery in work.deliveries if id(delivery) in self._works]
        if left:
            for delivery in left:
                self._forget(work, delivery)
            self._blocked.wake()

    def _forget(self, work: _Work, delivery: Delivery) -> None:
        del self._works[id(delivery)]
        left = self._queued[work.partition] - 1
        if left:
            self._queued[work.partition] = left
        else:
            del self._queued[work.partition]

    def _finish(self, deliveries: list[Delivery]) -> Callable[[EventContext[Any]], Any]:
        failed = any(delivery.error is not None for delivery in deliveries)
        function = self._definition.on_failure if failed else self._definition.finalizer
        return _nothing if function is None else lambda ctx: function(ctx, deliveries)


def _nothing(_: EventContext[Any]) -> None:
    """Nothing to do."""
