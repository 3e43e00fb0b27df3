"""What the tests of state on disk under a whole engine need: stores of all kinds, and a bench with a folder."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from streams import Change, EventContext, SimpleStore, StateConfig, Table, TopicPartition
from streams.disk import RocksDB, SQLite
from streams.metrics import TakeOverDone
from streams.runtime.keeping.folders import folder as folder_module
from streams.runtime.keeping.folders.folder import StateFolder
from streams.runtime.keeping.keeper import StateKeeper
from streams.stores import Index, NamedTable, Stores
from tests.unit.runtime_kit import CHANGELOG, TOPIC, Bench
from tests.unit.waiting import until
from tests.vocabulary import Named

Scenario = Callable[[Bench, Path], Any]


class Plain:
    """A user's own ``StateStore``: a dictionary that reports its changes, and knows nothing of disks."""

    def __init__(self, _: TopicPartition) -> None:
        self.values: dict[bytes, bytes] = {}
        self.kinds: dict[bytes, str] = {}

    def receive_change(self, change: Change, /) -> None:
        if change.value is None:
            self.values.pop(change.key, None)
        else:
            self.values[change.key], self.kinds[change.key] = change.value, change.type

    def revoked(self) -> None: ...

    def count(self, ctx: EventContext[Any], name: str) -> None:
        change = Change(name.encode(), b"%d" % (int(self.values.get(name.encode(), b"0")) + 1), None, "kind")
        self.receive_change(change)
        ctx.record_change(change)

    def contents(self) -> dict[Any, Any]:
        assert set(self.kinds.values()) <= {"kind"}
        return {key.decode(): int(value) for key, value in self.values.items()}


BY_COUNT = {"count": Index(int, lambda number: number)}


class Counts(Stores):
    """The same table as a structure, with an index."""

    counts = NamedTable.of(str, int, bare=True, index=BY_COUNT)

    def get(self, name: str, default: int) -> int:
        return self.counts.get(name, default)

    def put(self, name: str, number: int) -> None:
        self.counts.put(name, number)

    def delete(self, name: str) -> None:
        self.counts.delete(name)

    def items(self) -> Any:
        found = list(self.counts.items())
        assert sorted(self.counts.by_range("count")) == sorted(found), "the index and its table"
        return found


def count(ctx: EventContext[Any], event: Named) -> None:
    """Count names; a name that ends with "-" deletes the one before it."""
    store = ctx.store
    if isinstance(store, Plain):
        store.count(ctx, event.name)
    elif isinstance(store, SimpleStore):
        store.put(Named(event.name))
    elif event.name.endswith("-"):
        store.delete(event.name[:-1])
    else:
        store.put(event.name, store.get(event.name, 0) + 1)


STORES: dict[str, Any] = {
    "table": Table.factory(key=str, value=int),
    "ordered table": Table.factory(key=str, value=int, ordered=True),
    "SimpleStore": SimpleStore.factory(Named, key=lambda item: item.name),
    "own store": Plain,
    "Stores": Counts.factory(),
}
for engine in (SQLite(), RocksDB()):
    name = type(engine).__name__
    STORES[f"table on {name}"] = Table.factory(key=str, value=int, engine=engine)
    STORES[f"SimpleStore on {name}"] = SimpleStore.factory(Named, key=lambda item: item.name, engine=engine)
    STORES[f"Stores on {name}"] = Counts.factory(engine=engine)


class Kept:
    """A bench whose sources keep their state in a folder."""

    def __init__(self, bench: Bench, folder: Path) -> None:
        self.bench, self.folder = bench, folder
        self.group_folder = folder / "group-g" / "topic-in"
        self.partition_folder = self.group_folder / "0"
        self.restored: list[int] = []

    def make(self, store: Any = STORES["table"], **settings: Any) -> None:
        state = {"folder": str(self.folder), "checkpoint_seconds": 0.02, **settings}
        self.bench.make(count, store=store, state=StateConfig(**state), metrics_handler=self._measured)

    async def ran(self, *names: str, store: Any = STORES["table"]) -> None:
        """Run a source over these names, and stop it."""
        self.make(store)
        await self.bench.over(*names)
        await self.bench.stop()

    def _measured(self, measurement: Any) -> None:
        if isinstance(measurement, TakeOverDone):
            self.restored.append(measurement.records)

    def contents(self) -> Any:
        store = self.bench.engine.workers[0].store
        if isinstance(store, Plain):
            return store.contents()
        return [item.name for item in store] if isinstance(store, SimpleStore) else dict(store.items())

    def from_log(self) -> dict[str, int]:
        """The state that the changelog tells."""
        table = STORES["table"](TopicPartition(TOPIC, 0))
        for record in self.bench.broker.logs[CHANGELOG, 0]:
            if record.key is not None:
                with suppress(Exception):
                    table.receive_change(Change(record.key or b"", record.value))
        return dict(table.items())

    @property
    def keeper(self) -> StateKeeper:
        """Of the engine that runs now."""
        keeper = self.bench.engine.keeper
        assert keeper is not None
        return keeper

    @property
    def marked(self) -> int:
        """The offset that the folder's mark has now, -1 without one."""
        mark = StateFolder(self.partition_folder, -1)._read_mark()
        return -1 if mark is None else mark.offset

    async def until_marked(self) -> None:
        """Everything that is committed is on disk."""
        log = self.bench.broker.logs[CHANGELOG, 0]
        await self.bench.until(lambda: self.marked == len(log) - 1, "the mark is at the end of the log")


def other_log(kept: Kept, names: list[str]) -> None:
    """The log was cut below the folder's end, and written anew: by a restored backup, say."""
    bench = kept.bench
    for place in ((CHANGELOG, 0), (TOPIC, 0)):
        bench.broker.logs[place] = []
    bench.broker.offsets.clear()
    bench.broker.send(*names)


async def stays_full(kept: Kept, monkeypatch: Any) -> None:
    """K7: a disk takes nothing, and what waits for it is bounded."""
    kept.make(checkpoint_bytes=300, unwritten_bytes=1_000)
    await kept.bench.over("a")
    await kept.until_marked()

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(folder_module.os, "pwrite", full)
    kept.bench.broker.send(*(f"some longer name {number}" for number in range(100)))
    engine = kept.bench.engine
    await kept.bench.until(lambda: engine.committed_events == 101, "all is committed")
    await until(lambda: kept.keeper._unwritten() <= 1_000, "memory is bounded", 3.0)
