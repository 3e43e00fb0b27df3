"""What the bank shows of itself and lets be done to it: dumps of its stores, faults in the transaction that hands a
partition over, restores that wait.

BANK_DUMP=FILE           SIGUSR1 writes every store of this member there
BANK_FAULT_IN=marker     the points of KES_FAULT that lie in a transaction count in those with a release marker only
BANK_GATE=FILE           restoring takes BANK_GATE_MS for each change as long as this file is not there
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from streams import EventSource
from streams.metrics import Measurement, TransactionSettled
from streams.records import Change, Output, TopicPartition
from streams.runtime.changelog import RELEASE_KEY
from streams.runtime.connections import KafkaConnections
from streams.testing.faults import (
    FaultPlan,
    FaultyConnections,
    FaultyProducer,
    FaultySlot,
    consume_with_faults,
    settled_hook,
)

_log = logging.getLogger("bank")

Store = dict[bytes, bytes]


class Held(msgspec.Struct, frozen=True):
    """One store of a member: ``role`` is ``active``, or the state of a copy; ``left``: records it does not contain."""

    partition: int
    role: str
    left: int
    queued: int
    items: list[tuple[bytes, bytes]]


class Dump(msgspec.Struct, frozen=True):
    """All stores of a member at one moment. ``moves``: how many are under way."""

    member: str
    moves: int
    stores: list[Held]


def measure(plan: FaultPlan) -> Callable[[Measurement], None]:
    """The metrics handler: passes ``settle.after``, and logs what is rare."""
    hook = settled_hook(plan)

    def handler(measurement: Measurement) -> None:
        if not isinstance(measurement, TransactionSettled):
            _log.info("%r", measurement)
        hook(measurement)

    return handler


def write_dump(source: EventSource[Any], path: Path) -> None:
    """On the loop of the source. The file appears complete, or not at all."""
    engine = source._engine
    stores: list[Held] = []
    if engine is not None:
        for partition, worker in engine.workers.items():
            if worker.state.value == "active":
                items = list(worker.store.dump())
                stores.append(Held(partition, "active", 0, worker.inbox.records, items))
        states = {copy.partition: copy.state for copy in engine.replicas.statistics()}
        with engine.replicas._lock:
            for partition, copy in engine.replicas._copies.items():
                left = copy.behind if copy.caught_up else max(copy.behind, 1)
                stores.append(Held(partition, states.get(partition, "new"), left, 0, list(copy.store.dump())))
    moves = 0 if engine is None else len(engine.handover.statistics())
    draft = path.with_suffix(".draft")
    draft.write_bytes(msgspec.json.encode(Dump(source.config.instance_id, moves, stores)))
    draft.replace(path)


def gated(factory: Callable[[TopicPartition], Any]) -> Callable[[TopicPartition], Any]:
    """Stores that restore slowly, while the gate is shut."""
    gate, seconds = Path(os.environ["BANK_GATE"]), float(os.environ.get("BANK_GATE_MS", "3")) / 1000

    def make(partition: TopicPartition) -> Any:
        store = factory(partition)
        receive = store.receive_change

        def slowly(change: Change, /) -> None:
            until = time.monotonic() + seconds
            while not gate.exists() and time.monotonic() < until:
                time.sleep(seconds)  # what a slow disk does
            receive(change)

        store.receive_change = slowly
        return store

    return make


class _InMarkers(FaultPlan):
    """Passes a point on only in transactions with a release marker."""

    def __init__(self, plan: FaultPlan) -> None:
        super().__init__()
        self._plan = plan
        self.armed = False

    def hit(self, point: str) -> None:
        if self.armed:
            self._plan.hit(point)


class _Watched:
    """A producer that arms the plan when a release marker goes through it, until the next transaction."""

    def __init__(self, real: Any, plan: _InMarkers) -> None:
        self._real, self._plan = real, plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def begin(self) -> None:
        self._plan.armed = False
        self._real.begin()

    def produce(self, output: Output) -> Any:
        self._plan.armed = self._plan.armed or output.key == RELEASE_KEY
        return self._real.produce(output)


class _MarkerFaults(FaultyConnections):
    def producer(self, transactional_id: str, *, one_by_one: bool = False) -> Any:
        gate = _InMarkers(self.plan)
        real = KafkaConnections.producer(self, transactional_id, one_by_one=one_by_one)
        return _Watched(FaultyProducer(real, gate), gate)

    def slot(self, transactional_id: str) -> Any:
        gate = _InMarkers(self.plan)
        real = KafkaConnections.slot(self, transactional_id)
        return None if real is None else _Watched(FaultySlot(real, gate), gate)


async def consume(source: EventSource[Any], plan: FaultPlan) -> None:
    """``consume_events`` with the faults that the environment names."""
    if os.environ.get("BANK_FAULT_IN") == "marker":
        await source._consume(lambda config: _MarkerFaults(config, plan))
    else:
        await consume_with_faults(source, plan)
