"""What is committed of each partition, kept beside its store: whatever else is in the store has to be under way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from streams.codecs import RESERVED_KEY_PREFIX
from streams.core.transaction import Cut
from streams.runtime.ownership.partitions import Partitions
from streams.runtime.partition.worker import PartitionWorker


class Shadows:
    """Compares stores whenever a query may have its turn. ``looks``: how often, ``under_way``: while something of the
    partition was; ``wrong``: keys that have neither their committed value nor a change under way, and positions."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.looks = self.under_way = 0
        self.wrong: list[str] = []
        self._committed: dict[PartitionWorker, dict[bytes, bytes]] = {}
        start_at, committed, between = PartitionWorker.start_at, Partitions.committed, PartitionWorker._between

        def started(worker: PartitionWorker, position: Any) -> None:
            start_at(worker, position)
            self._committed[worker] = dict(worker.store.dump())

        def settled(partitions: Partitions, cuts: Mapping[int, Cut]) -> None:
            committed(partitions, cuts)
            for number, cut in cuts.items():
                self._take(self._committed.get(partitions.workers[number], {}), cut)

        async def turn(worker: PartitionWorker) -> bool:
            if worker.state.admits and worker.store is not None:
                self._look(worker)
            return await between(worker)

        patch.setattr(PartitionWorker, "start_at", started)
        patch.setattr(Partitions, "committed", settled)
        patch.setattr(PartitionWorker, "_between", turn)

    @staticmethod
    def _take(known: dict[bytes, bytes], cut: Cut) -> None:
        for key, change in cut.changes.items():
            if change.value is None:
                known.pop(key, None)
            elif not key.startswith(RESERVED_KEY_PREFIX):
                known[key] = change.value

    def _look(self, worker: PartitionWorker) -> None:
        pending = worker.engine.read_proofs.pending(worker.partition)  # type: ignore[attr-defined]
        here, known = dict(worker.store.dump()), self._committed[worker]
        self.looks += 1
        self.under_way += bool(pending)
        for key in here.keys() | known.keys():
            if here.get(key) != known.get(key) and not any(key in changes for changes in pending):
                self.wrong.append(f"{worker.topic_partition}: {key!r} is {here.get(key)!r}, not {known.get(key)!r}")
        if not pending and worker.position != worker.committed:
            self.wrong.append(f"{worker.topic_partition}: {worker.position}, where {worker.committed} is committed")
