"""What the tests of snapshots need: a bench whose sources have some, and a place with some of one partition."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

from streams.core.manifests import Manifest, decode_manifest
from streams.disk.blobs import Blobs, open_blobs
from streams.runtime.keeping.folders.folder import StateFolder
from streams.runtime.keeping.snapshots.bundles import SavedSnapshot, SnapshotStore
from tests.unit.kept_engine_kit import STORES, Kept
from tests.unit.kept_kit import DAY_MS, IDENTITY, State, now_ms, put, reopened
from tests.unit.runtime_kit import CHANGELOG, Bench
from tests.unit.steps_kit import StepsOfBlobs


class Backed(Kept):
    """A bench whose sources have snapshots, too."""

    def __init__(self, bench: Bench, folder: Path) -> None:
        super().__init__(bench, folder / "state")
        self.root = folder / "snapshots"
        self.place = self.root / "group-g" / "topic-in" / "id" / "0"

    def make(self, store: Any = STORES["table"], **settings: Any) -> None:
        super().make(store, **{"snapshots": str(self.root), "snapshot_seconds": 0.05, **settings})

    @property
    def manifests(self) -> list[Path]:
        """The newest first."""
        return sorted(self.place.glob("manifest-*"), reverse=True)

    def newest(self, secret: bytes = b"") -> Manifest:
        return decode_manifest(self.manifests[0].read_bytes(), secret)

    def put(self, data: bytes) -> None:
        """Replace all snapshots by this one."""
        for path in self.manifests:
            path.unlink()
        (self.place / "manifest-000000000000001-3-00").write_bytes(data)

    async def until_saved(self) -> None:
        """The newest snapshot has everything that is committed."""
        end = len(self.bench.broker.logs[CHANGELOG, 0]) - 1
        found = self.manifests
        await self.bench.until(lambda: (found := self.manifests) and f"-{end}-" in found[0].name, f"saved: {found}")

    async def with_a_snapshot(self, store: Any = STORES["table"], **settings: Any) -> None:
        """Work, make a snapshot of all, end, and lose the machine."""
        self.make(store, **settings)
        await self.bench.over("a", "b", "a", "c", "b-")
        await self.until_marked()
        await self.until_saved()
        await self.bench.stop()
        shutil.rmtree(self.folder)


class Disk:
    """Snapshots of one partition at a place, whose folder is written here."""

    def __init__(self, root: Path, blobs: Blobs | None = None, **more: Any) -> None:
        self.root = root
        self.steps = StepsOfBlobs(blobs or open_blobs(str(root / "store")))
        self.store = SnapshotStore(self.steps, "g", "t", wall_ms=now_ms, **more)

    def write(self, offset: int, names: int) -> StateFolder:
        folder = StateFolder.find(self.root / "disk", 0)
        try:
            folder.check(IDENTITY, now_ms=now_ms(), tombstones_ms=DAY_MS)
            folder.append([put(b"key %d" % number, b"value %d" % offset) for number in range(names)], pause=False)
            folder.commit(IDENTITY, offset, b"{}", now_ms())
        finally:
            folder.close()
        return folder

    def save(self, folder: StateFolder, length: int = 64) -> SavedSnapshot:
        data = folder.data(length)
        assert data is not None
        return self.store.save(*data)

    def restored(self, name: str) -> tuple[int, State]:
        """Offset and state that a new machine gets."""
        place = self.root / name
        self.store.fill(
            partial(StateFolder.find, place, 0), IDENTITY, set(), lambda done, size: None, tombstones_ms=DAY_MS
        )
        return reopened(place)
