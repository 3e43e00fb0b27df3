"""The rows of the measure ``stores``: each is a function that returns figures of one run, in a folder of its own."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from streams.core.checkpoints import LogIdentity
from streams.core.manifests import BLOCK_BYTES
from streams.disk import RocksDB, SQLite
from streams.disk.blobs import open_blobs
from streams.records import Change, TopicPartition
from streams.runtime.keeping.folders.folder import StateFolder
from streams.runtime.keeping.snapshots.bundles import SnapshotStore
from streams.stores import Table

IDENTITY: Final = LogIdentity("benchmark", "changelog", "topic-id", 0, "benchmark")
TOMBSTONES_MS: Final = 86_400_000
HOT_KEYS: Final = 10_000
CHECKPOINT: Final = 20_000
"""Events between two writes to a database."""
ENGINES: Final[dict[str, Callable[[], Any]]] = {"memory": lambda: None, "SQLite": SQLite, "RocksDB": RocksDB}
MEMORY_BYTES: Final = 64 << 20


def key_of(number: int) -> bytes:
    """Return a key of 16 bytes, in no order."""
    return b"%016x" % (number * 0x9E3779B97F4A7C15 % (1 << 64))


def value_of(rng: random.Random) -> bytes:
    """Return a value of 100 bytes, a half of which compresses."""
    return rng.randbytes(50) + b"x" * 50


class OnEngine:
    """A table, and its way to the disk as the engine of the source goes it: gathered, written, let go of."""

    def __init__(self, place: Path, name: str, keys: int, cached_share: float) -> None:
        engine = ENGINES[name]()
        self.table: Any = Table.factory(key=bytes, value=bytes, engine=engine)(TopicPartition("in", 0))
        self.database = None
        if engine is not None:
            place.mkdir(parents=True)
            self.database = engine.open(str(place), memory_bytes=MEMORY_BYTES, partitions=1)
            self.table.attach(self.database, lambda why: None)
            self.table.limit_cache(int(keys * 116 * cached_share))
        self._gathered: dict[bytes, Change] = {}

    def receive(self, numbers: range, rng: random.Random) -> None:
        """Fill it as a restore does."""
        for number in numbers:
            change = Change(key_of(number), value_of(rng))
            self.table.receive_change(change)
            self._gathered[change.key] = change
            if len(self._gathered) >= CHECKPOINT:
                self.write()
        self.write()

    def event(self, key: bytes, value: bytes) -> None:
        """Read and write a key, in an event."""
        journal: list[Change] = []
        self.table.begin(journal)
        self.table.get(key)
        self.table.put(key, value)
        self.table.end()
        self._gathered.update((change.key, change) for change in journal)
        if len(self._gathered) >= CHECKPOINT:
            self.write()

    def write(self) -> None:
        """Make a checkpoint."""
        changes, self._gathered = list(self._gathered.values()), {}
        if self.database is not None:
            self.database.write([(change.key, change.value) for change in changes], b"mark")
            self.table.written(changes)
            self.table.relieve()

    def close(self) -> None:
        """Free everything."""
        self.table.revoked()
        if self.database is not None:
            self.database.close()


def events(place: Path, seed: int, keys: int, count: int) -> Iterator[tuple[str, str, float, str]]:
    """Yield the processor time of an event that reads and writes a key: few keys, and many with a tenth cached."""
    for name in ENGINES:
        for what, among, cached in (("10,000 keys", HOT_KEYS, 1.0), ("many keys, a tenth cached", keys, 0.1)):
            rng = random.Random(seed)
            table = OnEngine(place / f"{name}-{among}", name, among, cached)
            table.receive(range(among), rng)
            work = [(key_of(rng.randrange(among)), value_of(rng)) for _ in range(count)]
            began = time.process_time()
            for key, value in work:
                table.event(key, value)
            table.write()
            spent = time.process_time() - began
            table.close()
            yield f"get and put, {what}", name, spent / count * 1e6, "us"


def restores(place: Path, seed: int, keys: int, count: int) -> Iterator[tuple[str, str, float, str]]:
    """Yield records of a changelog that are taken in a second of processor time, and a loop over rocksdict by hand."""
    for name in ENGINES:
        rng = random.Random(seed)
        table = OnEngine(place / name, name, keys, 0.1)
        began = time.process_time()
        table.receive(range(keys), rng)
        yield "restore from a changelog", name, keys / (time.process_time() - began), "records/s"
        table.close()
    from rocksdict import Options, Rdict, WriteBatch, WriteOptions

    options = Options(raw_mode=True)
    options.create_if_missing(True)
    database = Rdict(str(place / "by-hand"), options)
    fast = WriteOptions()
    fast.disable_wal = True
    database.set_write_options(fast)
    rng = random.Random(seed)
    began = time.process_time()
    for start in range(0, keys, 250):
        batch = WriteBatch(raw_mode=True)
        for number in range(start, min(start + 250, keys)):
            batch.put(key_of(number), value_of(rng))
        database.write(batch)
    database.flush(True)
    yield "restore from a changelog", "rocksdict by hand", keys / (time.process_time() - began), "records/s"
    database.close()


def snapshots(place: Path, seed: int, keys: int, count: int) -> Iterator[tuple[str, str, float, str]]:
    """Yield the load of a folder, a snapshot, what the next one writes after 1 % of changes, and a restore, beside
    copying the same files."""
    rng = random.Random(seed)
    store = SnapshotStore(open_blobs(str(place / "store")), "g", "t", wall_ms=_wall_ms)
    folder = StateFolder.find(place / "disk", 0)
    folder.append((Change(key_of(number), value_of(rng)) for number in range(keys)), pause=False)
    folder.commit(IDENTITY, 1, b"{}", _wall_ms())
    table: Any = Table.factory(key=bytes, value=bytes)(TopicPartition("in", 0))
    began = time.perf_counter()
    folder.check(IDENTITY, now_ms=_wall_ms(), tombstones_ms=TOMBSTONES_MS)
    for changes in folder.load():
        for change in changes:
            table.receive_change(change)
    yield "load of a kept table", "memory", keys / (time.perf_counter() - began), "records/s"
    size = _save(store, folder).size
    folder.append([Change(key_of(number), value_of(rng)) for number in range(keys // 100)], pause=False)
    folder.commit(IDENTITY, 2, b"{}", _wall_ms())
    saved = _save(store, folder)
    yield "written by a snapshot after 1 % of changes", "memory", 100 * saved.uploaded / size, "%"
    folder.close()
    began = time.perf_counter()
    store.fill(
        partial(StateFolder.find, place / "new", 0),
        IDENTITY,
        set(),
        lambda done, all: None,
        tombstones_ms=TOMBSTONES_MS,
    )
    yield "restore from a snapshot", "memory", saved.size / (time.perf_counter() - began) / 1e6, "MB/s"
    began = time.perf_counter()
    copied = 0
    for path in sorted((place / "store").rglob("blocks/*")):
        shutil.copyfile(path, place / f"copy-{path.name}")
        copied += path.stat().st_size
        with open(place / f"copy-{path.name}", "rb") as file:
            os.fsync(file.fileno())
    yield "restore from a snapshot", "copying the files", copied / (time.perf_counter() - began) / 1e6, "MB/s"


def _save(store: SnapshotStore, folder: StateFolder) -> Any:
    data = folder.data(BLOCK_BYTES)
    assert data is not None
    return store.save(*data)


def _wall_ms() -> int:
    return int(time.time() * 1000)


ROWS: Final = {"events": events, "restores": restores, "snapshots": snapshots}
