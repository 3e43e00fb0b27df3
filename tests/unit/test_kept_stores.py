"""State on disk under a whole engine between fakes: what survives, what is not believed, and who waits for whom."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from streams import Change, EventContext, SimpleStore, StateConfig, Table, TopicPartition
from streams.errors import ConfigError
from streams.metrics import TakeOverDone
from streams.records import IncomingRecord
from streams.runtime.engine import Engine
from streams.runtime.keeping import folder as folder_module
from streams.runtime.keeping import keeper as keeper_module
from streams.runtime.keeping.folder import StateFolder
from streams.runtime.keeping.keeper import Keeper, KeptPartition
from streams.runtime.ownership.replicas import Replica
from streams.topics import TopicIdentity
from tests.unit.runtime_kit import CHANGELOG, TOPIC, Bench, Group, Named, Slot

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
}


class Kept:
    """A bench whose sources keep their state in a folder."""

    def __init__(self, bench: Bench, folder: Path) -> None:
        self.bench, self.folder = bench, folder
        self.restored: list[int] = []

    def make(self, store: Any = STORES["table"], **settings: Any) -> None:
        state = {"folder": str(self.folder), "checkpoint_seconds": 0.02, **settings}
        self.bench.make(count, store=store, state=StateConfig(**state), metrics_handler=self._measured)

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
    def marked(self) -> int:
        """The offset that the folder's mark has now, -1 without one."""
        mark = StateFolder(self.folder / "group-g" / "topic-in" / "0", -1)._read_mark()
        return -1 if mark is None else mark.offset

    async def until_marked(self) -> None:
        """Everything that is committed is on disk."""
        log = self.bench.broker.logs[CHANGELOG, 0]
        await self.bench.until(lambda: self.marked == len(log) - 1, "the mark is at the end of the log")


@pytest.fixture
def kept(bench: Bench, tmp_path: Path) -> Kept:
    return Kept(bench, tmp_path / "state")


@pytest.fixture(autouse=True)
def unflushed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody loses power here."""
    monkeypatch.setattr(folder_module.os, "fsync", lambda handle: None)


# -- what survives -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_every_store_survives(kept: Kept, kind: str, end: str) -> None:
    bench = kept.bench
    kept.make(STORES[kind])
    await bench.over("a", "b", "a", "c")
    if end == "stop":
        before = kept.contents()
        await bench.stop()
    else:
        await kept.until_marked()
        before = kept.contents()
        await bench.cancel()
    await bench.start()
    assert kept.contents() == before
    assert kept.restored == [0, 1], "of the changelog only the record that the folder ends with is read"
    bench.broker.send("a")
    await bench.committed()
    assert kept.contents() != before or kind == "SimpleStore"


async def test_only_the_rest_of_the_changelog_is_read(kept: Kept) -> None:
    bench = kept.bench
    kept.make()
    await bench.over("a", "b", "b-")
    await bench.stop()
    bench.make(count, store=STORES["table"])  # without a folder, on another machine
    await bench.over("c", "a", "d", "a-")
    await bench.stop()
    newer = len(bench.broker.logs[CHANGELOG, 0]) - 1 - kept.marked
    kept.make()
    await bench.start()
    assert kept.contents() == {"c": 1, "d": 1} == kept.from_log()
    assert kept.restored[-1] == newer + 1


async def test_without_a_folder_there_is_no_file_and_no_thread(bench: Bench, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    bench.make(count, store=STORES["table"])
    await bench.over("a")
    assert bench.engine.keeper is None
    assert not list(tmp_path.iterdir())
    assert not [thread for thread in threading.enumerate() if thread.name == "kes-keeper"]
    assert bench.engine.workers[0].kept is None


async def test_a_lost_membership_and_a_restart_keep_the_folder(kept: Kept) -> None:
    bench = kept.bench
    kept.make()
    await bench.over("a", "b")
    bench.connections.membership.lose_and_rejoin()
    await bench.until(lambda: len(kept.restored) == 2, "it has it back")
    await bench.until_active()
    assert kept.restored == [0, 1]
    bench.broker.send("a")
    await bench.committed()
    assert kept.contents() == {"a": 2, "b": 1}


# -- what is not believed ----------------------------------------------------------------------------------------------


async def begins_anew(kept: Kept, caplog: Any, reason: str) -> None:
    """Start again: all of the changelog is read, the state is right, and the reason is named once."""
    bench = kept.bench
    with caplog.at_level(logging.WARNING):
        await bench.start()
    assert kept.contents() == kept.from_log()
    assert kept.restored[-1] == len(bench.broker.logs[CHANGELOG, 0])
    said = [record.getMessage() for record in caplog.records if reason in record.getMessage()]
    assert said, caplog.text
    assert str(kept.folder) in said[0] or "changelog[0]" in said[0]
    bench.broker.send("again")
    await bench.committed()
    await kept.until_marked()


async def test_a_folder_of_another_topic_id(kept: Kept, caplog: Any, monkeypatch: Any) -> None:
    kept.make()
    await kept.bench.over("a", "b")
    await kept.bench.stop()
    other_log(kept, ["x", "y"])
    monkeypatch.setattr(Group, "identity", lambda *_: TopicIdentity("another", 1))
    with caplog.at_level(logging.WARNING):
        await kept.bench.over()
    assert kept.contents() == {"x": 1, "y": 1}
    assert "its topic id is 'id', not 'another'; it is set aside" in caplog.text
    assert (kept.folder / "group-g" / "topic-in" / "0.aside" / "mark").exists()


async def test_a_folder_of_other_codecs(kept: Kept, caplog: Any) -> None:
    kept.make()
    await kept.bench.over("a", "b")
    await kept.bench.stop()
    kept.make(Table.factory(key=str, value=bytes))
    with caplog.at_level(logging.WARNING):
        await kept.bench.start()
    assert "its codec is 'Table(StrCodec, IntCodec)', not 'Table(StrCodec, BytesCodec)'" in caplog.text
    assert kept.restored[-1] == len(kept.bench.broker.logs[CHANGELOG, 0])


async def test_a_folder_that_is_older_than_tombstones(kept: Kept, caplog: Any, monkeypatch: Any) -> None:
    kept.make()
    await kept.bench.over("a", "b")
    await kept.bench.stop()
    real = Engine.wall_ms
    monkeypatch.setattr(Engine, "wall_ms", lambda self: real(self) + 23 * 3_600_000 + 60_000)
    await begins_anew(kept, caplog, "the changelog keeps tombstones for 24 h")


def damage(kept: Kept) -> None:
    data = next((kept.folder / "group-g" / "topic-in" / "0").glob("data-*"))
    spoiled = bytearray(data.read_bytes())
    spoiled[-1] ^= 0x20
    data.write_bytes(spoiled)


async def test_a_folder_with_a_flipped_byte(kept: Kept, caplog: Any) -> None:
    kept.make()
    await kept.bench.over("a", "b")
    await kept.bench.stop()
    damage(kept)
    await begins_anew(kept, caplog, "another checksum than its mark")


async def test_a_folder_that_turns_bad_while_it_is_loaded(kept: Kept, caplog: Any, monkeypatch: Any) -> None:
    """A part of it is in the store then: the store is dropped with it."""
    kept.make()
    await kept.bench.over("a", "b")
    await kept.bench.stop()
    check = StateFolder.check

    def check_then_spoil(self: StateFolder, *of: Any, **more: Any) -> bool:
        found = check(self, *of, **more)
        if found:
            damage(kept)
        return found

    monkeypatch.setattr(StateFolder, "check", check_then_spoil)
    await begins_anew(kept, caplog, "another checksum than its mark")


def other_log(kept: Kept, names: list[str]) -> None:
    """The log was cut below the folder's end, and written anew: by a restored backup, say."""
    bench = kept.bench
    for place in ((CHANGELOG, 0), (TOPIC, 0)):
        bench.broker.logs[place] = []
    bench.broker.offsets.clear()
    bench.broker.send(*names)


@pytest.mark.parametrize("names", [["x"], ["x", "y", "z", "x", "y", "z"]], ids=["shorter", "longer"])
async def test_a_log_that_was_cut_and_written_anew(kept: Kept, caplog: Any, names: list[str]) -> None:
    bench = kept.bench
    kept.make()
    await bench.over("a", "b", "c")
    await bench.stop()
    other_log(kept, names)
    bench.make(count, store=STORES["table"])
    await bench.over()
    await bench.stop()
    kept.make()
    await begins_anew(kept, caplog, "its warm copy begins anew")
    assert "set aside" in caplog.text


async def test_an_input_offset_that_goes_back(kept: Kept, caplog: Any) -> None:
    """The marked record is there, and what follows is of a member that had less."""
    bench = kept.bench
    kept.make()
    await bench.over("a", "b", "c")
    await bench.stop()
    log = bench.broker.logs[CHANGELOG, 0]
    value = log[-1].value.replace(b'"offset":3', b'"offset":2')  # type: ignore[union-attr]
    assert value != log[-1].value
    bench.broker.append(CHANGELOG, 0, log[-1].key, value, None)
    bench.broker.offsets[0] = 2
    with caplog.at_level(logging.WARNING):
        await bench.start()
    assert "goes back from 3 to 2" in caplog.text
    assert kept.restored[-1] == len(log)


# -- disks that refuse -------------------------------------------------------------------------------------------------


async def test_a_root_that_cannot_be_used_stops_the_start(kept: Kept) -> None:
    kept.folder.write_text("")
    kept.make()
    with pytest.raises(ConfigError, match=r"StateConfig.folder is .*state"):
        await kept.bench.run()


async def test_a_folder_that_cannot_be_used_costs_nothing_but_the_restore(kept: Kept, caplog: Any) -> None:
    kept.make()
    await kept.bench.over("a", "b")
    await kept.bench.stop()
    (kept.folder / "group-g" / "topic-in" / "0").chmod(0o777)
    with caplog.at_level(logging.WARNING):
        await kept.bench.start()
    assert "changelog[0] is not kept on disk" in caplog.text
    assert kept.contents() == {"a": 1, "b": 1}
    kept.bench.broker.send("a")
    await kept.bench.committed()


async def test_a_full_disk_stops_nobody_and_is_written_to_again(kept: Kept, caplog: Any, monkeypatch: Any) -> None:
    kept.make()
    await kept.bench.over("a")
    await kept.until_marked()
    real = os.pwrite

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with caplog.at_level(logging.WARNING):
        monkeypatch.setattr(folder_module.os, "pwrite", full)
        kept.bench.broker.send("a", "b")
        await kept.bench.committed()
        await kept.bench.until(lambda: "cannot be written to" in caplog.text, "it is logged")
        kept.bench.broker.send("a")
        await kept.bench.committed()
    assert "bytes are free" in caplog.text
    assert caplog.text.count("cannot be written to") == 1, "once"
    monkeypatch.setattr(folder_module.os, "pwrite", real)
    await kept.until_marked()
    await kept.bench.cancel()
    await kept.bench.start()
    assert kept.contents() == {"a": 3, "b": 1}
    assert kept.restored[-1] == 1


async def test_a_disk_that_stays_full_leaves_the_folder_at_its_mark(kept: Kept, caplog: Any, monkeypatch: Any) -> None:
    await stays_full(kept, monkeypatch)
    assert "is left at its mark" in caplog.text
    monkeypatch.undo()
    await kept.bench.stop()
    await kept.bench.start()
    assert kept.contents() == kept.from_log()
    assert kept.restored[-1] > 1, "what the folder lacks"


async def stays_full(kept: Kept, monkeypatch: Any) -> None:
    kept.make(checkpoint_bytes=300, unwritten_bytes=1_000)
    await kept.bench.over("a")
    await kept.until_marked()

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(folder_module.os, "pwrite", full)
    for number in range(100):
        kept.bench.broker.send(f"some longer name {number}")
    await kept.bench.committed()
    await asyncio.sleep(0.2)
    keeper = kept.bench.engine.keeper
    assert keeper is not None
    assert keeper._unwritten() <= 1_000, "memory is bounded"


async def test_a_folder_that_another_process_holds(kept: Kept) -> None:
    kept.make()
    await kept.bench.over("a", "b")
    await kept.bench.stop()
    frozen = StateFolder.open(kept.folder / "group-g" / "topic-in" / "0")
    assert frozen is not None
    await kept.bench.start()
    assert kept.restored[-1] == len(kept.bench.broker.logs[CHANGELOG, 0])
    await kept.bench.stop()
    frozen.close()
    await kept.bench.start()
    assert kept.restored[-1] == 1
    assert kept.contents() == {"a": 1, "b": 1}


async def test_a_quiet_partition_renews_its_mark(kept: Kept, monkeypatch: Any) -> None:
    monkeypatch.setattr(keeper_module, "RENEW_MS", 100)
    kept.make()
    await kept.bench.over("a")
    await kept.until_marked()
    before = kept.marked
    await kept.bench.until(lambda: kept.marked > before, "another offset record is sent")
    await kept.bench.stop()
    await kept.bench.start()
    assert kept.contents() == {"a": 1}


# -- without each rule -------------------------------------------------------------------------------------------------


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
        await asyncio.sleep(0.1)
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
    bench = kept.bench
    kept.make()
    await bench.over("a", "b")
    await bench.stop()
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
    kept.make()
    await bench.over("a", "b", "c")
    await bench.stop()
    other_log(kept, [f"x{number}" for number in range(8)])
    bench.make(count, store=STORES["table"])
    await bench.over()
    await bench.stop()
    kept.make()
    await bench.start()
    assert kept.contents() == kept.from_log()


async def another_topic(kept: Kept, monkeypatch: Any) -> None:
    """K4: made again, and all that its records could be told apart by is compacted away."""
    bench = kept.bench
    kept.make()
    await bench.over("a", "b")
    await bench.stop()
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
        time.sleep(0.01)
        return real(*of)

    with monkeypatch.context() as slow:
        slow.setattr(folder_module.os, "pwrite", pwrite)
        kept.make()
        await kept.bench.over("a", "b", "c")
        await kept.until_marked()
        await kept.bench.stop()
    assert seen
    assert threading.get_ident() not in seen


def write_at_once(self: Keeper, kept: KeptPartition) -> None:
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
    "K4, the record at the mark": (
        Replica,
        "examine",
        lambda self, *_: setattr(self, "witness", None),
        cut_and_written_anew,
    ),
    "K7, bounded": (Keeper, "_bound", nothing, stays_full),
    "K8, the loop does not write": (Keeper, "look", write_at_once, no_writes_on_the_loop),
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
