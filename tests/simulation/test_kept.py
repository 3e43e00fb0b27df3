"""Worlds whose members keep their state on disk: they are killed, lost and moved, and go on from their folders.

At the end each folder is what was committed up to its mark, besides everything that holds in other worlds.
``KEPT_SEEDS=500`` runs so many of each kind.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import msgspec
import pytest

from streams.core.checkpoints import FolderMark
from streams.core.transaction import Transaction
from streams.metrics import TakeOverDone
from streams.runtime.engine import Engine
from streams.runtime.keeping.folders import folder as folder_module
from streams.runtime.keeping.folders.entries import Point
from streams.runtime.keeping.folders.folder import StateFolder
from streams.runtime.keeping.kept_partition import KeptPartition
from streams.runtime.keeping.on_disk import DatabaseFolder
from streams.runtime.keeping.snapshots.bundles import SnapshotStore
from streams.runtime.ownership.replica import Replica
from tests.broker.gate import gate, nightly
from tests.unit.waiting import give_own

from .plans import Plan, plan_of
from .safeguards import Safeguard, stand_in
from .test_safeguards import assert_missed
from .test_simulation import explain
from .world import World, simulate

pytestmark = pytest.mark.usefixtures("quiet", "unflushed")

COUNT = int(os.environ.get("KEPT_SEEDS", "3"))
KINDS = (
    "crashes",
    "everything",
    "forgets",
    "handlers",
    "lost_replies",
    "moves",
    "pendulum",
    "rolling",
    "standbys",
    "twins",
)
TRIES = 12
Patch = pytest.MonkeyPatch


@pytest.fixture
def unflushed(monkeypatch: Patch) -> None:
    """Nobody loses power in a simulation."""
    monkeypatch.setattr(folder_module.os, "fsync", lambda handle: None)
    give_own(monkeypatch, "time", folder_module, sleep=lambda seconds: None)
    monkeypatch.setattr(folder_module, "LEAST_REWRITE", 500)


def kept(seed: int, profile: str) -> Plan:
    return msgspec.structs.replace(plan_of(seed, profile), kept=True)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("profile", KINDS)
def test_exactly_once_with_folders(profile: str) -> None:
    for seed in range(COUNT):
        world = simulate(seed, kept(seed, profile))
        assert not world.differences, explain(seed, world)


def on_disk(plan: Plan) -> Plan:
    return msgspec.structs.replace(plan, on_disk=True, patient=False)


DISK_KINDS = ("crashes", "moves", "lost_replies", "everything", "standbys")


@pytest.mark.timeout(0)
@pytest.mark.parametrize("profile", gate(DISK_KINDS, "crashes"))
def test_exactly_once_with_a_table_on_disk(profile: str) -> None:
    for seed in range(COUNT):
        world = simulate(seed, on_disk(kept(seed, profile)))
        assert not world.differences, explain(seed, world)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("database", [False, nightly(True)], ids=["memory", "disk"])
@pytest.mark.parametrize("profile", gate(DISK_KINDS, "crashes"))
def test_exactly_once_with_machines_that_are_lost(profile: str, database: bool) -> None:
    for seed in range(COUNT):
        plan = msgspec.structs.replace(kept(seed, profile), snapshots=True)
        world = simulate(seed, on_disk(plan) if database else plan)
        assert not world.differences, explain(seed, world)


def test_snapshots_are_used(monkeypatch: Patch) -> None:
    """Otherwise the worlds above prove nothing."""
    met: Counter[str] = Counter()
    fill, save = SnapshotStore.fill, SnapshotStore.save

    def count_fill(*of: Any, **more: Any) -> str:
        name = fill(*of, **more)
        met["filled"] += bool(name)
        return name

    monkeypatch.setattr(SnapshotStore, "fill", count_fill)
    monkeypatch.setattr(SnapshotStore, "save", lambda *of: (met.update(["saved"]), save(*of))[1])
    for seed in range(3):
        assert not simulate(seed, msgspec.structs.replace(kept(seed, "crashes"), snapshots=True)).differences
    assert met["filled"] >= 2, met
    assert met["saved"] >= 5, met


@pytest.mark.filterwarnings("ignore")
def test_a_snapshot_that_says_too_much_is_missed(monkeypatch: Patch) -> None:
    """K2: its mark is later than its data."""
    save = SnapshotStore.save

    def save_later(self: SnapshotStore, mark: FolderMark, pieces: Any) -> Any:
        return save(self, msgspec.structs.replace(mark, offset=mark.offset + 2), pieces)

    monkeypatch.setattr(SnapshotStore, "save", save_later)
    for seed in range(TRIES):
        if simulate(seed, msgspec.structs.replace(kept(seed, "crashes"), snapshots=True)).differences:
            return
    pytest.fail("nothing was noticed")


def test_folders_are_used(monkeypatch: Patch) -> None:
    """Otherwise the worlds above prove nothing."""
    met: Counter[str] = Counter()
    begin = Replica.begin_from

    def begin_from(self: Replica, point: Point) -> None:
        met["loaded"] += 1
        begin(self, point)

    measured = World.measured

    def measure(self: World, name: str, measurement: Any) -> None:
        measured(self, name, measurement)
        if isinstance(measurement, TakeOverDone):
            met["take-overs"] += 1

    for owner, name in ((StateFolder, "rewrite_if_due"), (StateFolder, "commit")):
        real = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *of, real=real, name=name, **more: (met.update([name]), real(*of, **more))[1]
        )
    monkeypatch.setattr(Replica, "begin_from", begin_from)
    monkeypatch.setattr(World, "measured", measure)
    for seed in range(2):
        assert not simulate(seed, kept(seed, "crashes")).differences
    assert met["loaded"] >= 5, met
    assert met["commit"] >= 20, met


# -- without each safeguard --------------------------------------------------------------------------------------------


def dropped_work_is_gathered(original: Any, self: Engine, txn: Transaction, committed: bool) -> None:
    """K1: what is dropped may be committed by the next owner in another way."""
    original(self, txn, committed)
    for partition, cut in txn.cuts.items():
        worker = self.workers.get(partition)
        if not committed and worker is not None and worker.kept is not None:
            worker.kept._gathered.update(cut.changes)
            worker.kept._is_marked = False


def marks_say_more(original: Any, self: StateFolder, identity: Any, offset: int, record: bytes, as_of_ms: int) -> None:
    """K2: as if what will be written next were there."""
    original(self, identity, offset + 3, record, as_of_ms)


def changes_come_without_their_mark(self: KeptPartition, changes: Any, point: Any, pause: bool) -> None:
    """K2: the mark goes on, and what it stands for is not written."""
    with self._lock:
        self._writing = 0


def timers_are_not_kept(original: Any, self: StateFolder, changes: Any, **more: Any) -> None:
    """K3: they are a part of the state, as in the changelog."""
    original(self, [change for change in changes if not change.key.startswith(b"\xff")], **more)


def tombstones_are_not_kept(original: Any, self: StateFolder, changes: Any, **more: Any) -> None:
    """K3: a deletion is a change."""
    original(self, [change for change in changes if change.value is not None], **more)


def a_copy_is_read_from_behind_the_mark(original: Any, self: Replica, point: Point) -> None:
    """K2: what lies between is in no store."""
    original(self, point)
    self.witness = None
    self.begin_at(point.offset + 4)


def stores_are_not_told(self: Replica, changes: Any) -> None:
    """A folder is trusted, and not loaded."""


def locks_are_for_nothing(handle: int) -> bool:
    """K6: two processes write to one folder."""
    return True


def databases_keep_deleted_keys(original: Any, self: DatabaseFolder, changes: Any, *of: Any) -> None:
    """K3: a deletion is a change."""
    original(self, [change for change in changes if change.value is not None], *of)


def databases_are_marked_too_far(
    original: Any, self: DatabaseFolder, changes: Any, identity: Any, point: Point | None
) -> None:
    """K2: as if what will be written next were there."""
    original(self, changes, identity, point and point._replace(offset=point.offset + 3))


def databases_have_marks_alone(original: Any, self: DatabaseFolder, changes: Any, identity: Any, point: Any) -> None:
    """K2: the mark goes on, and what it stands for is not written."""
    original(self, [], identity, point)


OUT: dict[str, Safeguard] = {}
for _owner, _name, _new, _profiles, _seed in (
    (Engine, "_settled", dropped_work_is_gathered, ("forgets", "crashes", "lost_replies"), 44),
    (StateFolder, "commit", marks_say_more, ("crashes", "moves"), 0),
    (KeptPartition, "_append", changes_come_without_their_mark, ("crashes",), 0),
    (StateFolder, "append", timers_are_not_kept, ("crashes", "everything"), 3),
    (StateFolder, "append", tombstones_are_not_kept, ("handlers", "everything"), 0),
    (Replica, "begin_from", a_copy_is_read_from_behind_the_mark, ("moves", "crashes"), 0),
    (Replica, "restore", stores_are_not_told, ("crashes",), 0),
    (folder_module, "lock_file", locks_are_for_nothing, ("twins", "moves", "standbys"), 9),
    (DatabaseFolder, "write", databases_keep_deleted_keys, ("handlers", "everything"), 0),
    (DatabaseFolder, "write", databases_are_marked_too_far, ("crashes", "moves"), 7),
    (DatabaseFolder, "write", databases_have_marks_alone, ("crashes",), 0),
):
    OUT[_new.__name__] = Safeguard(
        _new.__doc__ or "", lambda patch, o=_owner, n=_name, f=_new: stand_in(patch, o, n, f), _profiles, _seed
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [nightly(name) if name.startswith("databases") else name for name in OUT])
def test_it_is_missed(name: str) -> None:
    plan = (lambda seed, profile: on_disk(kept(seed, profile))) if name.startswith("databases") else kept
    assert_missed(OUT[name], plan, TRIES)
