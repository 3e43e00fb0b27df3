"""The life of one partition's folder, killed at each of its steps: checkpoints, rewriting, snapshots, a folder that is
set aside and filled from a snapshot. In files, and in the databases of both engines.

Whenever it is killed, the folder is what its changelog says at its mark. It goes on from there, and at the end folder,
changelog and snapshot are the same bytes.
"""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from streams import disk
from streams.disk.blobs import open_blobs
from streams.protocols import DiskDatabase
from streams.records import Change
from streams.runtime.keeping.folders import folder as folder_module
from streams.runtime.keeping.folders.entries import Point
from streams.runtime.keeping.folders.folder import StateFolder
from streams.runtime.keeping.on_disk import DatabaseFolder
from streams.runtime.keeping.snapshots.bundles import SnapshotStore
from streams.testing.engine_suite import MEMORY_BYTES, scan_all
from tests.broker.gate import gate
from tests.unit.kept_kit import DAY_MS, IDENTITY, State, contents, now_ms, put
from tests.unit.steps_kit import At, StepsOfBlobs, no_step, steps_of_folders, watch_database
from tests.unit.test_engines import ENGINES
from tests.unit.waiting import open_below, threads_since

CHECKPOINTS, SAVED, ASIDE, PIECE = 10, (30, 60), 40, 512
KINDS = ("files", "SQLite", "RocksDB")
CASES = gate([(kind, seed) for kind in KINDS for seed in range(5)], ("files", 0), ("SQLite", 0))


class Watched:
    """An engine whose databases call ``at`` with the names of their steps."""

    def __init__(self, name: str, at: At) -> None:
        self._engine, self._at = getattr(disk, name)(), at
        self.name = self._engine.name

    def open(self, folder: str, /, *, memory_bytes: int, partitions: int) -> DiskDatabase:
        database: DiskDatabase = self._engine.open(folder, memory_bytes=memory_bytes, partitions=partitions)
        watch_database(database, self._at)
        return database


class Life:
    """The same for each seed. ``engine``: nothing for files."""

    def __init__(self, root: Path, engine: str, seed: int) -> None:
        self.root, self._engine = root, engine
        rng, state = random.Random(seed), State()
        self.log: dict[int, list[Change]] = {}
        """Changes by the offset record behind them."""
        self.states: dict[int, State] = {-1: {}}
        for offset in range(0, 10 * CHECKPOINTS, 10):
            keys = {b"key %d" % rng.randrange(60) for _ in range(rng.randint(1, 40))}
            self.log[offset] = [put(key, rng.randbytes(30) if rng.random() < 0.7 else None) for key in sorted(keys)]
            for change in self.log[offset]:
                if change.value is None:
                    state.pop(change.key, None)
                else:
                    state[change.key] = change.value
            self.states[offset] = dict(state)

    def find(self, at: At = no_step, where: str = "disk") -> StateFolder:
        kind = DatabaseFolder if self._engine else StateFolder
        folder = kind.find(self.root / where, 0)
        if isinstance(folder, DatabaseFolder):
            folder.engine, folder.memory_bytes, folder.partitions = Watched(self._engine, at), MEMORY_BYTES, 4
        return folder

    def snapshots(self, at: At = no_step) -> SnapshotStore:
        self.root.mkdir(exist_ok=True)
        blobs = StepsOfBlobs(open_blobs(str(self.root / "store")), at)
        return SnapshotStore(blobs, "g", "t", wall_ms=now_ms, keep=1)

    def run(self, at: At = no_step) -> None:
        """Bring the folder to the end of the log. ``safe``: the offset that a kill leaves it at, at the least."""
        with steps_of_folders(at):
            self._run(at)

    def _run(self, at: At) -> None:
        folder, store = self.find(at), self.snapshots(at)
        try:
            position = contents_of(folder)[0]
            self.save(folder, store)
            for offset, changes in self.log.items():
                if offset <= position:
                    continue
                self.write(folder, offset, changes)
                self.is_safe(offset)
                folder.rewrite_if_due(pause=False)
                self.save(folder, store)
                if offset == ASIDE:
                    folder = self.begin_anew(folder, store, at)
                    contents_of(folder)
                    for again in range(SAVED[0] + 10, ASIDE + 10, 10):
                        self.write(folder, again, self.log[again])
        finally:
            folder.close()

    def begin_anew(self, folder: StateFolder, store: SnapshotStore, at: At) -> StateFolder:
        self.is_safe(-1)
        folder.set_aside()
        folder.close()
        assert store.fill(lambda distrust: self.find(at), IDENTITY, set(), lambda *_: None, tombstones_ms=DAY_MS)
        self.is_safe(SAVED[0])
        return self.find(at)

    def save(self, folder: StateFolder, store: SnapshotStore) -> None:
        data = folder.data(PIECE)
        if data is not None and data[0].offset in SAVED and not store.has(data[0]):
            store.save(*data)

    def write(self, folder: StateFolder, offset: int, changes: list[Change]) -> None:
        if isinstance(folder, DatabaseFolder):
            folder.write(changes, IDENTITY, Point(offset, b"{}", now_ms()))
        else:
            folder.append(changes, pause=False)
            folder.commit(IDENTITY, offset, b"{}", now_ms())

    def is_safe(self, offset: int) -> None:
        (self.root / "safe").write_text(str(offset))

    def check(self, where: str = "disk", least: int = -1) -> None:
        """The folder is the state of the log at its mark."""
        folder = self.find(where=where)
        try:
            offset, state = contents_of(folder)
        finally:
            folder.close()
        assert offset >= least, f"it is back at {offset}, and {least} was safe"
        assert state == self.states[offset], f"not the state at {offset}"

    def check_after_kill(self) -> None:
        safe = self.root / "safe"
        self.check(least=int(safe.read_text()) if safe.exists() else -1)
        self.run()
        self.check_at_end()

    def check_at_end(self) -> None:
        """Folder, changelog and snapshot are the same bytes."""
        self.check(least=max(self.log))
        filled = self.snapshots().fill(
            lambda distrust: self.find(where="new"), IDENTITY, set(), lambda *_: None, tombstones_ms=DAY_MS
        )
        assert filled
        self.check(where="new", least=SAVED[-1])


def contents_of(folder: StateFolder) -> tuple[int, State]:
    """Offset of the mark, and the state up to it."""
    if not isinstance(folder, DatabaseFolder):
        return contents(folder)
    if not folder.check(IDENTITY, now_ms=now_ms(), tombstones_ms=DAY_MS):
        return -1, {}
    assert folder.mark is not None
    return folder.mark.offset, dict(scan_all(folder.open_database()))


KILLED = """
import sys
from pathlib import Path
from streams.runtime.keeping.folders import folder
from tests.unit.kept_kit import kill_at_each
from tests.unit.test_crash_suite import Life

folder.LEAST_REWRITE = 600
root, engine, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
kill_at_each(map(int, sys.argv[4:]), lambda number, at: Life(root / str(number), engine, seed).run(at))
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("kind", "seed"), CASES)
def test_killed_at_each_step_it_goes_on(tmp_path: Path, kind: str, seed: int, monkeypatch: Any) -> None:
    engine = "" if kind == "files" else kind
    monkeypatch.setattr(folder_module, "LEAST_REWRITE", 600)
    whole, steps = Life(tmp_path / "whole", engine, seed), list[str]()
    whole.root.mkdir()
    whole.run(steps.append)
    whole.check_at_end()
    rng = random.Random(seed)
    chosen = {rng.choice([at for at, step in enumerate(steps) if step == name]): name for name in sorted(set(steps))}
    assert len(chosen) >= 12, f"too few steps: {set(steps)}"
    for number in chosen:
        (tmp_path / str(number)).mkdir()
    command = [sys.executable, "-c", KILLED, str(tmp_path), engine, str(seed), *map(str, chosen)]
    subprocess.run(command, check=True, timeout=200)
    for number, name in chosen.items():
        try:
            Life(tmp_path / str(number), engine, seed).check_after_kill()
        except Exception as error:
            raise AssertionError(f"killed at step {number}, {name!r}") from error


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_thousand_opens_and_closes_leave_nothing_open(tmp_path: Path, engine: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(folder_module.os, "fsync", lambda handle: None)
    life, before = Life(tmp_path, engine, 0), threading.enumerate()
    for number in range(1_002):
        if number == 2:
            before = threading.enumerate()
        folder = life.find()
        offset, state = contents_of(folder)
        assert (offset, len(state)) == (number - 1, number)
        life.write(folder, number, [put(b"%d" % number, b"")])
        folder.close()
    assert (threads_since(before), open_below(tmp_path)) == ([], [])
    assert {path.name for path in tmp_path.iterdir()} == {"disk"}
