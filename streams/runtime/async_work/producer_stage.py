"""The stage of ``BatchProducer``: records sent outside of transactions, and acknowledged before their event's turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from streams.core.policy import Answered
from streams.errors import Stopped
from streams.outcomes import ExecutionState
from streams.records import Acknowledgement, Delivery, Record
from streams.runtime.async_work.async_stage import Blocked, ItemsStage, ItemsWork, TurnEntry, described
from streams.runtime.async_work.producer_outlet import Outlet
from streams.runtime.partition.event_context import EventContext
from streams.runtime.partition.reorder_buffer import Entry
from streams.runtime.ports import PlainProducer
from streams.statistics import StageStatistics

if TYPE_CHECKING:
    from streams.runtime.partition.host import Host


@dataclass(frozen=True, eq=False, kw_only=True)
class ProducerDefinition:
    """The definition of a ``BatchProducer``. A pickled copy has neither address nor settings."""

    name: str
    finalizer: Callable[[EventContext[Any], list[Delivery]], Any] | None
    on_failure: Callable[[EventContext[Any], list[Delivery]], Any] | None
    max_queued_records: int
    delivery_timeout_seconds: float
    bootstrap_servers: str = ""
    client_settings: Mapping[str, object] = field(default_factory=dict, repr=False)

    @property
    def described(self) -> tuple[str, ...]:
        """See ``async_stage.StageDefinition``."""
        return described(self.finalizer, self.on_failure)

    def open(self, host: Host) -> ProducerStage:
        """Open the stage for one run."""
        return ProducerStage(self, host)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "bootstrap_servers": "", "client_settings": {}}


class ProducerStage(ItemsStage[list[Record], ItemsWork[Delivery]]):
    """One running producer."""

    def __init__(self, definition: ProducerDefinition, host: Host) -> None:
        super().__init__(definition)
        self._definition = definition
        self._host = host
        self._outlets: dict[bool, Outlet] = {}  # by whether each record travels in a batch of its own
        self._works: dict[int, ItemsWork[Delivery]] = {}  # by the id of a delivery that is not reported
        self._queued: dict[int, int] = {}  # records per partition
        self._blocked = Blocked()

    def admits(self, entry: Entry, plan: list[Record]) -> bool:
        """See ``async_stage.AsyncStage``."""
        queued = self._queued.get(entry.record.partition, 0)
        if not queued or queued + len(plan) <= self._definition.max_queued_records:
            return True
        self._blocked.add(entry)
        return False

    def start(self, entry: Entry, plan: list[Record]) -> ItemsWork[Delivery]:
        """See ``async_stage.AsyncStage``."""
        work = ItemsWork(self, entry, [Delivery(record) for record in plan])
        entry.work = work
        entry.begun = True  # a record that the producer has cannot be taken back
        if not plan or self._host.connections is None:  # the latter: a replay
            self.all_done(work)
            return work
        partition = entry.record.partition
        self._queued[partition] = self._queued.get(partition, 0) + work.left
        for delivery in work.items:
            self._works[id(delivery)] = work
        outlet = self._outlet(alone=False)
        for delivery in work.items:
            outlet.send(delivery)
        return work

    def statistics(self) -> StageStatistics:
        """Return the statistics of the records under way."""
        running = sum(outlet.running for outlet in self._outlets.values())
        waiting = sum(outlet.waiting for outlet in self._outlets.values())
        return StageStatistics(self._definition.name, running, waiting, 0)

    def close(self) -> list[asyncio.Task[None]]:
        """See ``async_stage.Stage``."""
        works, self._works = self._works, {}
        for work in works.values():
            if isinstance(work.entry, TurnEntry):
                work.entry.fail(Stopped("the event source stops"), 1)
        return [outlet.close() for outlet in self._outlets.values()]

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
            return  # it is not awaited any more
        if report.send_alone:
            self._outlet(alone=True).send(delivery)
            return
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
