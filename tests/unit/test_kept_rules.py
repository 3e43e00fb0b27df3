"""The rules of state on disk, each taken out once: something must go wrong, and be right with it.

K1: only what is committed is written. K2: a mark never says more than the disk holds. K3: every change is kept, in its
order (``simulation/test_kept.py``). K4: when a folder is believed. K5: copies are cut at offset records
(``property/test_kept.py``). K6: one process per folder. K7: what waits is bounded. K8: the loop does not write. K9: a
stop makes a checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streams.core.checkpoints import FolderMark
from streams.model.topics import TopicIdentity
from streams.records import IncomingRecord
from streams.runtime.changelog import decode_offset
from streams.runtime.engine import Engine
from streams.runtime.keeping.folders import folder as folder_module
from streams.runtime.keeping.folders.entries import Damaged
from streams.runtime.keeping.folders.folder import StateFolder
from streams.runtime.keeping.keeper import StateKeeper
from streams.runtime.keeping.kept_partition import KeptPartition
from streams.runtime.ownership.replica import Replica
from tests.unit.kept_engine_kit import STORES, Kept, count, other_log, stays_full
from tests.unit.kept_kit import IDENTITY, Script, lose_power, now_ms, put, reopened
from tests.unit.runtime_kit import CHANGELOG, Bench, Group, Slot

Scenario = Callable[[Bench, Path], Any]


@pytest.fixture(autouse=True)
def rewritten(unflushed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are rewritten when they are small. Power is lost where that is said."""
    monkeypatch.setattr(folder_module, "LEAST_REWRITE", 600)


# -- of an engine ------------------------------------------------------------------------------------------------------


async def killed_while_a_transaction_is_open(kept: Kept, monkeypatch: Any) -> None:
    """K1: what is aborted, or was never committed, is not on disk."""
    bench = kept.bench
    kept.make()
    await bench.over("a")
    hangs = asyncio.Event()
    commit = Slot.commit

    async def never(self: Slot, requested: Any) -> None:
        hangs.set()
        await asyncio.Event().wait()

    Slot.commit = never  # type: ignore[method-assign]
    try:
        bench.broker.send("b", "c")
        await asyncio.wait_for(hangs.wait(), 20)
        bench.connections.membership.lose_and_rejoin()
        await bench.until(lambda: len(kept.restored) == 2, "it has its partition back")
        await bench.cancel()
    finally:
        Slot.commit = commit  # type: ignore[method-assign]
    await bench.start()
    await bench.committed()
    assert kept.contents() == kept.from_log() == {"a": 1, "b": 1, "c": 1}


def gathers_what_is_dropped(original: Any, self: Engine, txn: Any, committed: bool) -> None:
    original(self, txn, committed)
    for partition, cut in txn.cuts.items():
        if not committed:
            kept = self.workers[partition].kept
            kept._gathered.update(cut.changes)
            kept._is_marked = False


def forgets_how_far_it_goes(original: Any, self: KeptPartition, *of: Any) -> Any:
    self.point = None
    return original(self, *of)


async def stopped_in_good_order(kept: Kept, monkeypatch: Any) -> None:
    """K9: nothing but the last record is read again."""
    kept.make(checkpoint_seconds=3_600.0)
    await kept.bench.over("a", "b")
    await kept.bench.stop()
    await kept.bench.start()
    assert kept.restored[-1] == 1


def compact(kept: Kept, gone: Callable[[IncomingRecord], bool]) -> None:
    """Take records out of the changelog."""
    log = kept.bench.broker.logs[CHANGELOG, 0]
    log[:] = [IncomingRecord(CHANGELOG, 0, n, None, None, None) if gone(r) else r for n, r in enumerate(log)]


async def old_folder_after_compaction(kept: Kept, monkeypatch: Any) -> None:
    """K4: the tombstone that the folder lacks is gone, and the key must stay deleted."""
    monkeypatch.setattr(Replica, "refuse_if_outlived", nothing)  # which would find it, too
    await deleted_and_compacted(kept, monkeypatch)


async def old_copy_after_compaction(kept: Kept, monkeypatch: Any) -> None:
    """K4: the same of a folder that was opened in time, by a process that was frozen then."""
    monkeypatch.setattr(folder_module, "reason_to_distrust", no_reason)
    await deleted_and_compacted(kept, monkeypatch)


async def deleted_and_compacted(kept: Kept, monkeypatch: Any) -> None:
    bench = kept.bench
    await kept.ran("a", "b")
    bench.make(count, store=STORES["table"])
    await bench.over("b-", "c")
    await bench.stop()
    compact(kept, lambda record: record.key == b"b")
    real = Engine.wall_ms
    with monkeypatch.context() as later:
        later.setattr(Engine, "wall_ms", lambda self: real(self) + 25 * 3_600_000)
        kept.make()
        await bench.start()
        assert "b" not in kept.contents()
        await bench.stop()


async def cut_and_written_anew(kept: Kept, monkeypatch: Any) -> None:
    """K4: the record that the folder ends with is another one now."""
    bench = kept.bench
    await kept.ran("a", "b", "c")
    other_log(kept, [f"x{number}" for number in range(8)])
    bench.make(count, store=STORES["table"])
    await bench.over()
    await bench.stop()
    kept.make()
    await bench.start()
    assert kept.contents() == kept.from_log()


async def log_of_a_member_that_had_less(kept: Kept, monkeypatch: Any) -> None:
    """K4: written anew and compacted, so that nothing is at the mark any more; its input offset goes back."""
    bench = kept.bench
    await kept.ran("a", "b", "c")
    other_log(kept, ["x"])
    bench.make(count, store=STORES["table"])
    await bench.over()
    bench.broker.send("y")
    await bench.committed()
    await bench.stop()
    last = bench.broker.logs[CHANGELOG, 0][-1]
    bench.broker.append(CHANGELOG, 0, last.key, last.value, None)
    compact(kept, lambda record: record.key == last.key and record.offset < 4)
    assert bench.broker.logs[CHANGELOG, 0][kept.marked].key is None
    kept.make()
    await bench.start()
    assert kept.contents() == kept.from_log() == {"x": 1, "y": 1}


async def cut_while_it_is_worked_on(kept: Kept, monkeypatch: Any) -> None:
    """K4: the next transaction has a lower offset. With that as its mark the folder would be believed."""
    bench = kept.bench
    kept.make()
    await bench.over("a")
    log = bench.broker.logs[CHANGELOG, 0]
    end = len(log)
    for name in ("b", "c"):
        bench.broker.send(name)
        await bench.committed()
    await kept.until_marked()
    del log[end:]
    bench.broker.send("d")
    await bench.committed()
    await bench.stop()
    await bench.start()
    assert kept.contents() == kept.from_log()
    assert "b" not in kept.contents()


async def another_topic(kept: Kept, monkeypatch: Any) -> None:
    """K4: made again, and all that its records could be told apart by is compacted away."""
    bench = kept.bench
    await kept.ran("a", "b")
    other_log(kept, [f"x{number}" for number in range(8)])
    with monkeypatch.context() as other:
        other.setattr(Group, "identity", lambda *_: TopicIdentity("another", 1))
        bench.make(count, store=STORES["table"])
        await bench.over()
        await bench.stop()
        compact(kept, lambda record: record.offset <= kept.marked)
        kept.make()
        await bench.start()
        assert kept.contents() == kept.from_log()
        await bench.stop()


async def no_writes_on_the_loop(kept: Kept, monkeypatch: Any) -> None:
    """K8: the thread of the loop is never in a folder."""
    seen: set[int] = set()
    real = os.pwrite

    def pwrite(*of: Any) -> int:
        seen.add(threading.get_ident())
        return real(*of)

    with monkeypatch.context() as slow:
        slow.setattr(folder_module.os, "pwrite", pwrite)
        kept.make()
        await kept.bench.over("a", "b", "c")
        await kept.until_marked()
        await kept.bench.stop()
    assert seen
    assert threading.get_ident() not in seen


def write_at_once(self: StateKeeper, kept: KeptPartition) -> None:
    kept.write()


def partialmethod_of(function: Any, original: Any) -> Any:
    """A method that is given the one in whose place it is."""
    return lambda *of: function(original, *of)


def nothing(*_: Any, **__: Any) -> None:
    """Does nothing."""


def no_reason(*_: Any, **__: Any) -> str:
    """Believes everything."""
    return ""


RULES: dict[str, tuple[Any, str, Any, Any]] = {
    "K1, only what is committed": (
        Engine,
        "_settled",
        partialmethod_of(gathers_what_is_dropped, Engine._settled),
        killed_while_a_transaction_is_open,
    ),
    "K4, the topic id": (folder_module, "reason_to_distrust", no_reason, another_topic),
    "K4, the age of tombstones": (folder_module, "reason_to_distrust", no_reason, old_folder_after_compaction),
    "K4, the age of an open copy": (Replica, "refuse_if_outlived", nothing, old_copy_after_compaction),
    "K4, the record at the mark": (
        Replica,
        "examine",
        lambda self, *_: setattr(self, "witness", None),
        cut_and_written_anew,
    ),
    "K4, the offset record": (
        Replica,
        "_receive_offset",
        lambda self, record: setattr(self, "offset_record", decode_offset(record)),
        log_of_a_member_that_had_less,
    ),
    "K4, a log that goes back": (
        KeptPartition,
        "committed",
        partialmethod_of(forgets_how_far_it_goes, KeptPartition.committed),
        cut_while_it_is_worked_on,
    ),
    "K7, bounded": (StateKeeper, "_bound", nothing, stays_full),
    "K8, the loop does not write": (StateKeeper, "check", write_at_once, no_writes_on_the_loop),
    "K9, a stop checkpoints": (KeptPartition, "finish", KeptPartition.abandon, stopped_in_good_order),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("out", [False, True], ids=["with it", "without it"])
async def test_each_rule_is_missed(kept: Kept, monkeypatch: Any, rule: str, out: bool) -> None:
    owner, name, instead, scenario = RULES[rule]
    if not out:
        await scenario(kept, monkeypatch)
        return
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, instead)
        with pytest.raises(AssertionError):
            await scenario(kept, patch)
        if not kept.bench.tasks[-1].done():
            await kept.bench.cancel()


# -- of a folder -------------------------------------------------------------------------------------------------------


def power_is_lost(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    for seed in range(2):
        names: list[str] = []
        Script(tmp_path / f"all {seed}", seed).run(names.append)
        for number in range(len(names)):
            lose_power(tmp_path / f"{seed} {number}", patch, number, seed)


def bit_is_rotten_when_it_is_written_anew(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    folder = StateFolder.find(tmp_path, 0)
    folder.append([put(b"key", b"v" * 700)])
    folder.commit(IDENTITY, 1, b"{}", now_ms())
    data = next(folder.path.glob("data-*"))
    spoiled = bytearray(data.read_bytes())
    spoiled[-1] ^= 1
    data.write_bytes(spoiled)
    with pytest.raises(Damaged):
        folder.rewrite_if_due()
    folder.close()
    with pytest.raises(Damaged):
        reopened(tmp_path)


def data_is_spoiled(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    Script(tmp_path).run()
    before = reopened(tmp_path)
    data = next((tmp_path / "0").glob("data-*"))
    spoiled = bytearray(data.read_bytes())
    spoiled[-1] ^= 1
    data.write_bytes(spoiled)
    with contextlib.suppress(Damaged):
        assert reopened(tmp_path) == before


def two_want_it(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    first, second = StateFolder.find(tmp_path, 0), StateFolder.find(tmp_path, 0)
    for folder, value in ((first, b"1"), (second, b"22")):
        folder.append([put(b"a", value)])
        folder.commit(IDENTITY, 5, b"{}", now_ms())
    first.append([put(b"b", b"1")])
    first.commit(IDENTITY, 6, b"{}", now_ms())
    first.close()
    second.close()
    offset, state = reopened(tmp_path)
    assert (offset, state) == (6, {b"a": b"1", b"b": b"1"})


def mark_before_data(self: StateFolder, *point: Any) -> None:
    """The mark says too much until the data is flushed."""
    if self._data is None:
        self._open_data()
    self._replace_mark(FolderMark(point[0], *point[1:], self._file, self._size, self._crc, self._live))
    self._sync_data()


class NoChecksum:
    """``zlib`` whose checksums all fit."""

    @staticmethod
    def crc32(data: bytes, crc: int = 0) -> int:
        return 0


OF_FOLDERS: dict[str, tuple[Any, str, Any, Callable[[Path, pytest.MonkeyPatch], None]]] = {
    "K2, the mark comes behind the data": (StateFolder, "commit", mark_before_data, power_is_lost),
    "K2, the data is flushed": (StateFolder, "_sync_data", nothing, power_is_lost),
    "K2, names are flushed": (StateFolder, "_sync_folder", nothing, power_is_lost),
    "K4, the checksum": (folder_module, "zlib", NoChecksum, data_is_spoiled),
    "K4, the checksum of what is rewritten": (
        folder_module, "zlib", NoChecksum, bit_is_rotten_when_it_is_written_anew
    ),
    "K6, the lock": (folder_module, "lock_file", lambda _: True, two_want_it),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_FOLDERS)
def test_each_rule_of_folders_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    owner, attribute, instead, scenario = OF_FOLDERS[name]
    scenario(tmp_path / "with it", monkeypatch)
    monkeypatch.setattr(owner, attribute, instead)
    with pytest.raises((AssertionError, Damaged, FileNotFoundError, pytest.fail.Exception)):
        scenario(tmp_path / "without it", monkeypatch)
