"""Writes changelogs and has them restored, by both systems in turn."""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec

from benchmarks.cluster import Cluster
from benchmarks.restore.workload import KEY_BYTES, VALUE_BYTES, Job, Restored, changes, digest, partition_of
from benchmarks.systems import running
from streams.runtime.changelog import OFFSET_KEY, OffsetRecord

SYSTEMS = ("handwritten", "engine")
SHAPES = ((200_000, 1), (200_000, 8), (1_000_000, 1), (1_000_000, 8))
"""Records and partitions."""
PATIENCE_SECONDS = 120.0


class Restore(msgspec.Struct, frozen=True):
    """One restore by one system. ``fault`` is empty if exactly the right state came out."""

    system: str
    records: int
    partitions: int
    round: int
    seconds: float
    wall_seconds: float
    load_average: float
    fault: str

    @property
    def per_second(self) -> float:
        """Records a second."""
        return self.records / self.seconds

    @property
    def megabytes_per_second(self) -> float:
        """Keys and values, in 1,000,000 bytes."""
        return self.per_second * (KEY_BYTES + VALUE_BYTES) / 1e6


class Log:
    """A changelog of one shape, and the state that is in it."""

    def __init__(self, cluster: Cluster, records: int, partitions: int, seed: int) -> None:
        self._cluster = cluster
        self.records, self.partitions = records, partitions
        name = f"restore-{records}-{partitions}"
        self._source, self._changelog = f"{name}-in", f"{name}-changelog"
        self._runs = 0
        cluster.create(self._source, partitions)
        cluster.create(self._changelog, partitions, {"cleanup.policy": "compact", "segment.bytes": "1073741824"})
        state: dict[bytes, bytes] = {}

        def written() -> Iterator[tuple[str, bytes, bytes, int]]:
            for key, value in changes(records, seed):
                state[key] = value
                yield self._changelog, key, value, partition_of(key, partitions)
            last = msgspec.json.encode(OffsetRecord(0, "benchmark", 1, 1))
            for partition in range(partitions):
                yield self._changelog, OFFSET_KEY, last, partition

        cluster.write(written())
        self._due = digest(state.items())

    def restored(self, system: str, round_: int) -> Restore:
        """Have it restored once. Raises ``Failed``."""
        self._runs += 1
        job = Job(
            bootstrap_servers=self._cluster.bootstrap_servers,
            group=f"{self._changelog}-{self._runs}",
            source=self._source,
            changelog=self._changelog,
            partitions=self.partitions,
        )
        with running(f"benchmarks.restore.{system}", job) as child:
            found = msgspec.json.decode(child.result(PATIENCE_SECONDS), type=Restored)
        load = os.getloadavg()[0]
        fault = fault_of(found, self.records, self._due)
        return Restore(system, self.records, self.partitions, round_, found.seconds, found.wall_seconds, load, fault)

    def forget(self) -> None:
        """Delete the topics."""
        self._cluster.delete(self._source, self._changelog)


def fault_of(found: Restored, records: int, due: tuple[int, int]) -> str:
    """Empty if so many records were read and the right state is there, else what is wrong."""
    if found.records != records:
        return f"{found.records} of {records} records were read"
    if (found.keys, found.digest) != due:
        return f"the state of {found.keys} keys is not that of the {due[0]} keys that were written"
    return ""
