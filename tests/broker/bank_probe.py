"""What the bank shows of itself and lets be done to it: dumps of its stores, restores that wait.

BANK_DUMP=FILE           SIGUSR1 writes every store of this member there
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
from streams.records import Change, TopicPartition
from streams.testing.faults import FaultPlan, settled_hook

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
