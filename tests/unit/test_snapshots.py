"""Snapshots under a whole engine between fakes: a new machine goes on from them, and believes no other ones."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streams.core.manifests import Block, Manifest, decode_manifest, encode_manifest
from streams.model.topics import TopicIdentity
from streams.runtime.keeping.folders import folder as folder_module
from streams.runtime.keeping.snapshots import snapshotting
from tests.unit.kept_engine_kit import STORES, count, other_log
from tests.unit.private_kit import private
from tests.unit.runtime_kit import CHANGELOG, Bench, Group
from tests.unit.snapshots_kit import Backed


@pytest.fixture
def kept(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Backed:
    monkeypatch.setattr(folder_module.os, "fsync", lambda handle: None)
    monkeypatch.setattr(snapshotting, "PATIENCE", 1.0)
    return Backed(bench, tmp_path)


# -- what they are for -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", STORES)
async def test_a_new_machine_goes_on_from_a_snapshot(kept: Backed, kind: str) -> None:
    bench = kept.bench
    await kept.with_a_snapshot(STORES[kind])
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
    (data,) = kept.partition_folder.glob("data-*")
    data.write_bytes(data.read_bytes()[:-1] + b"!")
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
    await kept.bench.start()
    assert "it is no manifest" in caplog.text
    assert (kept.contents(), kept.restored[-1]) == ({"a": 2, "c": 1}, 1)


async def test_a_snapshot_of_a_log_that_was_cut_is_tried_once(kept: Backed, caplog: Any) -> None:
    await kept.with_a_snapshot()
    other_log(kept, ["x"])
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
    secret = private(tmp_path / "secret", SECRET + b"\n")
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
        await kept.bench.start()
        assert kept.restored[-1] == everything
        assert reason in caplog.text
        await kept.bench.stop()
