"""Snapshots under a whole engine between fakes: a new machine goes on from them, and believes no other ones."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streams import StateConfig, Table
from streams.core.checkpoints import FolderMark
from streams.core.manifests import Block, Manifest, decode_manifest, encode_manifest
from streams.disk import RocksDB
from streams.errors import ConfigError
from streams.runtime.keeping import folder as folder_module
from streams.runtime.keeping import snapshotting
from streams.runtime.keeping.entries import Damaged
from streams.runtime.keeping.snapshots import SnapshotStore
from streams.topics import TopicIdentity
from tests.unit.kept_engine_kit import STORES, Kept, count, other_log
from tests.unit.runtime_kit import CHANGELOG, Bench, Group
from tests.unit.waiting import until

ALL = STORES | {"table on RocksDB": Table.factory(key=str, value=int, engine=RocksDB())}


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


@pytest.fixture
def kept(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Backed:
    monkeypatch.setattr(folder_module.os, "fsync", lambda handle: None)
    monkeypatch.setattr(snapshotting, "PATIENCE", 1.0)
    return Backed(bench, tmp_path)


# -- what they are for -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL)
async def test_a_new_machine_goes_on_from_a_snapshot(kept: Backed, kind: str) -> None:
    bench = kept.bench
    await kept.with_a_snapshot(ALL[kind])
    await bench.start()
    assert set(kept.contents()) >= {"a", "c"}
    assert kept.restored == [0, 1], "of the changelog only the record that the snapshot ends with is read"
    bench.broker.send("d")
    await bench.committed()
    assert "d" in set(kept.contents())


async def test_the_rest_of_the_changelog_follows(kept: Backed) -> None:
    await kept.with_a_snapshot()
    kept.bench.make(count, store=STORES["table"])  # another machine works on, without any state of its own
    await kept.bench.over("a-", "x", "c")
    await kept.bench.stop()
    kept.make()
    await kept.bench.start()
    assert kept.contents() == kept.from_log() == {"c": 2, "x": 1}
    assert kept.restored[-1] < len(kept.bench.broker.logs[CHANGELOG, 0])


async def test_a_folder_that_is_damaged_is_filled_from_a_snapshot(kept: Backed, caplog: Any) -> None:
    kept.make()
    await kept.bench.over("a", "b", "a")
    await kept.until_marked()
    await kept.until_saved()
    await kept.bench.stop()
    (data,) = (kept.folder / "group-g" / "topic-in" / "0").glob("data-*")
    data.write_bytes(data.read_bytes()[:-1] + b"!")
    with caplog.at_level(logging.WARNING):
        await kept.bench.start()
    assert "another checksum than its mark" in caplog.text
    assert kept.contents() == {"a": 2, "b": 1}
    assert kept.restored[-1] == 1


async def test_a_folder_that_is_there_is_not_replaced(kept: Backed) -> None:
    kept.make()
    await kept.bench.over("a")
    await kept.until_saved()
    for path in kept.place.rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    await kept.bench.stop()
    await kept.bench.start()
    assert (kept.contents(), kept.restored[-1]) == ({"a": 1}, 1)


async def test_without_snapshots_there_is_no_thread_and_no_import(kept: Backed) -> None:
    kept.make(snapshots="", snapshot_seconds=900.0)
    await kept.bench.over("a")
    assert kept.bench.engine.keeper is not None
    assert kept.bench.engine.keeper.snapshots is None
    assert not kept.root.exists()


# -- what is not believed ----------------------------------------------------------------------------------------------

SECRET = b"a secret of more than sixteen bytes"


def of_another(change: Callable[[Manifest], Manifest]) -> Callable[[Backed], object]:
    return lambda kept: kept.put(encode_manifest(change(kept.newest()), b""))


def with_mark(**changes: Any) -> Callable[[Backed], object]:
    def change(manifest: Manifest) -> Manifest:
        return msgspec.structs.replace(manifest, mark=msgspec.structs.replace(manifest.mark, **changes))

    return of_another(change)


def with_identity(**changes: Any) -> Callable[[Backed], object]:
    def change(manifest: Manifest) -> Manifest:
        identity = msgspec.structs.replace(manifest.mark.identity, **changes)
        return msgspec.structs.replace(manifest, mark=msgspec.structs.replace(manifest.mark, identity=identity))

    return of_another(change)


def with_blocks(*blocks: Block, size: int | None = None) -> Callable[[Backed], object]:
    def change(manifest: Manifest) -> Manifest:
        total = sum(block.size for block in blocks) if size is None else size
        mark = msgspec.structs.replace(manifest.mark, size=total)
        return msgspec.structs.replace(manifest, mark=mark, blocks=blocks)

    return of_another(change)


def each_block(change: Callable[[Path], object]) -> Callable[[Backed], object]:
    return lambda kept: [change(path) for path in (kept.place / "blocks").iterdir()]


def raw(data: bytes) -> Callable[[Backed], object]:
    return lambda kept: kept.put(data)


def other_content(kept: Backed) -> None:
    """A whole snapshot whose data is no data file."""
    data = b"no data file"
    sha = hashlib.sha256(data).hexdigest()
    (kept.place / "blocks" / sha).write_bytes(data)
    with_blocks(Block(sha, len(data)))(kept)


TEXT = b'{"mark":1}'
BAD: dict[str, tuple[Callable[[Backed], object], str]] = {
    "empty manifest": (raw(b""), "it is no manifest"),
    "another file": (raw(b"PK\x03\x04" * 100), "it is no manifest"),
    "cut manifest": (lambda kept: kept.put(kept.manifests[0].read_bytes()[:-9]), "its checksum is wrong"),
    "changed manifest": (
        lambda kept: kept.put(kept.manifests[0].read_bytes().replace(b'"offset":', b'"offset":9')),
        "its checksum is wrong",
    ),
    "unknown version": (raw(b"kes-snapshot 7 sha256 " + b"0" * 64 + b"\n{}"), "it has the format 7"),
    "absurd version": (raw(b"kes-snapshot " + b"9" * 40 + b" sha256 " + b"0" * 64 + b"\n{}"), "it is no manifest"),
    "no fields": (
        raw(b"kes-snapshot 1 sha256 " + hashlib.sha256(TEXT).hexdigest().encode() + b"\n" + TEXT),
        "it cannot be read",
    ),
    "signed": (lambda kept: kept.put(encode_manifest(kept.newest(), SECRET)), "it is signed"),
    "another cluster": (with_identity(cluster="x"), "its cluster is 'x'"),
    "another topic": (with_identity(topic="x"), "its topic is 'x'"),
    "another partition": (with_identity(partition=1), "its partition is 1"),
    "another codec": (with_identity(codec="x"), "its codec is 'x'"),
    "another format": (with_identity(format=9), "its format is 9"),
    "older than tombstones": (with_mark(as_of_ms=1), "the changelog keeps tombstones"),
    "of the future": (with_mark(as_of_ms=1 << 50), "in the future"),
    "wrong checksum": (with_mark(crc=7), "its data has another checksum than its mark"),
    "no data file": (other_content, "does not begin as such a file does"),
    "a path as block": (with_blocks(Block("../../../../etc/passwd", 12)), "it names the block '../../../../etc"),
    "no hash as block": (with_blocks(Block("A" * 64, 12)), "it names the block"),
    "absurd block": (with_blocks(Block("a" * 64, 1 << 60)), f"it has a block of {1 << 60} bytes"),
    "negative block": (with_blocks(Block("a" * 64, -1)), "it has a block of -1 bytes"),
    "absurd size": (with_blocks(*[Block("a" * 64, 64 << 20)] * 100_000), "bytes are free"),
    "other size": (with_blocks(Block("a" * 64, 12), size=13), "its blocks are not the 13 bytes"),
    "no blocks": (with_blocks(), "another checksum"),
    "blocks missing": (each_block(Path.unlink), "is missing"),
    "blocks empty": (each_block(lambda path: path.write_bytes(b"")), "is damaged"),
    "blocks cut": (each_block(lambda path: path.write_bytes(path.read_bytes()[:-1])), "is damaged"),
    "blocks changed": (each_block(lambda path: path.write_bytes(path.read_bytes()[:-1] + b"!")), "is damaged"),
    "blocks too long": (each_block(lambda path: path.write_bytes(path.read_bytes() * 1000)), "is damaged"),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_snapshot_is_named_and_not_used(kept: Backed, caplog: Any, name: str) -> None:
    spoil, reason = BAD[name]
    await kept.with_a_snapshot()
    spoil(kept)
    with caplog.at_level(logging.WARNING):
        await kept.bench.start()
    assert kept.contents() == kept.from_log() == {"a": 2, "c": 1}
    assert kept.restored[-1] == len(kept.bench.broker.logs[CHANGELOG, 0]), "all of the changelog was read"
    said = [record.getMessage() for record in caplog.records if "is not used: " in record.getMessage()]
    assert said, caplog.text
    assert "manifest-" in said[0]
    assert reason in said[0]


async def test_the_one_before_is_used(kept: Backed, caplog: Any) -> None:
    await kept.with_a_snapshot()
    (kept.place / "manifest-999999999999999-9-00").write_bytes(b"something else")
    with caplog.at_level(logging.WARNING):
        await kept.bench.start()
    assert "it is no manifest" in caplog.text
    assert (kept.contents(), kept.restored[-1]) == ({"a": 2, "c": 1}, 1)


async def test_a_snapshot_of_a_log_that_was_cut_is_tried_once(kept: Backed, caplog: Any) -> None:
    await kept.with_a_snapshot()
    other_log(kept, ["x"])
    with caplog.at_level(logging.WARNING):
        await kept.bench.over()
    assert kept.contents() == kept.from_log() == {"x": 1}
    assert "is not used" in caplog.text


async def test_a_changelog_that_was_recreated_has_snapshots_of_its_own(kept: Backed, monkeypatch: Any) -> None:
    await kept.with_a_snapshot()
    other_log(kept, ["x"])
    monkeypatch.setattr(Group, "identity", lambda *_: TopicIdentity("../x", 1))
    await kept.bench.over()
    assert kept.contents() == {"x": 1}
    await kept.bench.until(lambda: list((kept.root / "group-g" / "topic-in" / "..%2Fx" / "0").glob("m*")), "saved")


# -- secrets -----------------------------------------------------------------------------------------------------------


async def test_with_a_secret_manifests_are_signed_and_others_refused(kept: Backed, caplog: Any, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET + b"\n")
    await kept.with_a_snapshot(snapshot_secret_file=str(secret))
    signed = kept.manifests[0].read_bytes()
    assert SECRET not in signed
    await kept.bench.start()
    assert kept.restored[-1] == 1
    await kept.bench.stop()
    for forged, reason in (
        (encode_manifest(decode_manifest(signed, SECRET), b""), "it is not signed"),
        (encode_manifest(decode_manifest(signed, SECRET), SECRET + b"!"), "its signature is wrong"),
        (signed.replace(b'"offset":', b'"offset":1'), "its signature is wrong"),
    ):
        shutil.rmtree(kept.folder)
        kept.put(forged)
        caplog.clear()
        kept.make(snapshot_secret_file=str(secret), snapshot_seconds=900.0)
        everything = len(kept.bench.broker.logs[CHANGELOG, 0])
        with caplog.at_level(logging.WARNING):
            await kept.bench.start()
        assert kept.restored[-1] == everything
        assert reason in caplog.text
        await kept.bench.stop()


# -- making them -------------------------------------------------------------------------------------------------------


async def test_only_what_is_new_is_written_and_so_many_are_kept(kept: Backed) -> None:
    kept.make(snapshots_kept=2)
    await kept.bench.start()
    for number in range(5):
        kept.bench.broker.send(f"name {number}")
        await kept.bench.committed()
        await kept.until_marked()
        await kept.until_saved()
    await kept.bench.until(lambda: len(kept.manifests) == 2, "older ones are removed")
    there = {path.name for path in (kept.place / "blocks").iterdir()}
    assert {block.sha256 for block in kept.newest().blocks} <= there
    assert len(there) == 5, "blocks of an hour ago and less stay: they may be of a snapshot that is being made"


async def test_one_maker_is_enough(kept: Backed) -> None:
    """Another member has made a snapshot a moment ago."""
    await kept.with_a_snapshot()
    before = kept.manifests
    kept.make(snapshot_seconds=60.0)
    await kept.bench.over("x", "y")
    await kept.until_marked()
    keeper = kept.bench.engine.keeper
    assert keeper is not None
    await until(lambda: keeper.open_ones[0].snapshot_at_ms > 0, "it has seen that")
    assert kept.manifests == before


async def test_an_owner_waits_for_a_standby_to_make_it(kept: Backed, monkeypatch: Any) -> None:
    kept.make()
    await kept.bench.over("a")
    await kept.until_saved()
    monkeypatch.setattr(snapshotting, "PATIENCE", 1_000_000.0)
    kept.bench.broker.send("b")
    await kept.bench.committed()
    await kept.until_marked()
    keeper = kept.bench.engine.keeper
    assert keeper is not None
    snapshots = keeper.snapshots
    assert snapshots is not None
    snapshots._next.clear()
    await until(lambda: snapshots._next.get(0, 0.0) > keeper.now() + 1_000, "the owner leaves it to others")
    before = kept.manifests
    monkeypatch.setattr(kept.bench.engine, "at_work", lambda partition: None)  # as of a copy
    snapshots._next.clear()
    await kept.until_saved()
    assert len(kept.manifests) > len(before) or kept.manifests[0] != before[0]


async def test_a_copy_that_is_being_restored_makes_none(kept: Backed, monkeypatch: Any) -> None:
    kept.make()
    await kept.bench.over("a")
    await kept.until_saved()
    keeper = kept.bench.engine.keeper
    assert keeper is not None
    snapshots, (partition,) = keeper.snapshots, keeper.open_ones
    assert snapshots is not None
    assert partition.is_ready, "it was read up to the end before the work began"
    monkeypatch.setattr(kept.bench.engine, "at_work", lambda partition: None)  # as of a copy
    partition.is_ready = False
    saved: list[object] = []

    def save(*args: object) -> float:
        saved.append(args)
        return 0.0

    monkeypatch.setattr(snapshots, "_save_on_thread", save)
    await asyncio.sleep(0.3)  # several looks
    assert not saved
    partition.is_ready = True
    await until(lambda: saved, "it is saved when it is ready")


async def test_an_older_state_is_not_saved_again(kept: Backed) -> None:
    kept.make(snapshot_seconds=0.05)
    await kept.bench.over("a", "b")
    await kept.until_marked()
    await kept.until_saved()
    keeper = kept.bench.engine.keeper
    assert keeper is not None
    snapshots, (partition,) = keeper.snapshots, keeper.open_ones
    assert snapshots is not None
    mark = partition.folder.mark
    assert mark is not None
    partition.folder.mark = msgspec.structs.replace(mark, offset=mark.offset - 1)
    before = kept.manifests
    snapshots._save_on_thread(partition, 0.0)
    assert kept.manifests == before


@pytest.mark.parametrize(
    ("error", "file", "tries"),
    [
        (Damaged("cut"), "data-1", 1),  # the mark alone is new: the folder is damaged
        (Damaged("cut"), "data-{}", 3),  # it is rewritten again and again
        (FileNotFoundError("gone"), "data-{}", 1),  # by the store
    ],
    ids=["mark", "file", "store"],
)
async def test_a_save_is_tried_again_only_for_a_file_that_was_rewritten(
    kept: Backed, monkeypatch: Any, error: Exception, file: str, tries: int
) -> None:
    kept.make(snapshot_seconds=900.0)
    await kept.bench.over("a")
    await kept.until_marked()
    keeper = kept.bench.engine.keeper
    assert keeper is not None
    snapshots, (partition,) = keeper.snapshots, keeper.open_ones
    assert snapshots is not None
    tried: list[str] = []

    def save(_: object, mark: FolderMark, pieces: object) -> None:
        tried.append(mark.file)
        assert len(tried) < 10
        partition.folder.mark = msgspec.structs.replace(mark, offset=mark.offset + 1, file=file.format(len(tried) + 1))
        raise error

    monkeypatch.setattr(SnapshotStore, "save", save)
    with pytest.raises(type(error)):
        snapshots._save_on_thread(partition, 0.0)
    assert len(tried) == tries


async def test_a_store_that_fails_is_named_once_and_stops_nobody(kept: Backed, caplog: Any) -> None:
    kept.root.write_text("a file")
    kept.make()
    with caplog.at_level(logging.WARNING):
        await kept.bench.over("a")
        await kept.until_marked()
        await kept.bench.until(lambda: "no snapshot can be made" in caplog.text, "it is logged")
        kept.bench.broker.send("b")
        await kept.bench.committed()
    assert kept.contents() == {"a": 1, "b": 1}
    assert "snapshots cannot be used" in caplog.text
    assert caplog.text.count("no snapshot can be made") == 1


async def test_starts_wait_once_for_a_store_that_hangs(kept: Backed, monkeypatch: Any, caplog: Any) -> None:
    """Three partitions: one has its folder, and of the others only the first waits for the store's time-out."""
    state = StateConfig(folder=str(kept.folder), checkpoint_seconds=0.02, snapshots=str(kept.root))
    kept.bench.make(count, store=STORES["table"], partitions=3, state=state)
    await kept.bench.start("a")
    await kept.bench.committed()
    await kept.until_marked()
    await kept.bench.stop()
    tried: list[int] = []
    goes_on = threading.Event()

    def hangs(_: object, place: str, *more: object, **others: object) -> None:
        tried.append(int(place.rpartition("/")[2]))
        goes_on.wait(10)
        raise TimeoutError("the store of snapshots has not answered (list) for 60 s")

    monkeypatch.setattr(SnapshotStore, "manifests", hangs)
    caplog.set_level(logging.WARNING)
    kept.bench.run()
    try:
        await until(lambda: tried, "the store is needed")
        keeper = kept.bench.engine.keeper
        assert keeper is not None
        await until(lambda: keeper.open_ones, "the folder that is there is opened meanwhile")
        assert [one.partition for one in keeper.open_ones] == [0]
    finally:
        goes_on.set()
    await kept.bench.until_active()
    assert len(tried) == 1
    assert caplog.text.count("also of the partitions that start within 60 s") == 1


async def test_without_the_package_of_the_store_there_is_no_start(kept: Backed, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.fs", None)
    kept.make(snapshots="s3://bucket/x")
    with pytest.raises(ConfigError, match=r"pip install 'kafka-event-source\[snapshots\]'"):
        await kept.bench.run()
    kept.bench.tasks.clear()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"snapshots": "s3://key:pass@bucket/x"}, "has credentials in it"),
        ({"snapshots": "s3://bucket/x?secret_key=pass"}, "has credentials in it"),
        ({"snapshots": "ftp://host/x"}, "begins with file:, s3:"),
        ({"snapshots": "x", "folder": ""}, r"set StateConfig.folder"),
        ({"snapshots_kept": 1}, "must be 2 or more"),
        ({"snapshot_seconds": 0}, "must be more than 0"),
        ({"snapshot_secret_file": "/nowhere/at/all"}, "cannot be read"),
    ],
)
async def test_settings_that_cannot_be(kept: Backed, settings: dict[str, Any], reason: str) -> None:
    async def begin() -> None:
        kept.make(**settings)
        await kept.bench.run()

    with pytest.raises(ConfigError, match=reason) as caught:
        await begin()
    assert "=pass" not in str(caught.value)
    assert ":pass" not in str(caught.value)
    kept.bench.tasks.clear()
