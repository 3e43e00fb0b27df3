"""``kes state --folder``: the state on disk beside the process that writes it, without a broker or a trace."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from streams import Table
from streams.runtime.keeping.folders import folder as folder_module
from streams.runtime.keeping.folders import shelf
from streams.runtime.keeping.folders.entries import Damaged
from streams.runtime.keeping.folders.folder import StateFolder, read_mark
from streams.runtime.keeping.folders.shelf import read_state
from tests.unit.cli_kit import Kes
from tests.unit.kept_engine_kit import STORES, Kept, count
from tests.unit.kept_kit import IDENTITY, now_ms, put
from tests.unit.runtime_kit import Bench


@pytest.fixture
def kept(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    monkeypatch.setattr(folder_module.os, "fsync", lambda handle: None)
    monkeypatch.setenv("COLUMNS", "150")
    return Kept(bench, tmp_path / "state")


def named(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> str:
    module = ModuleType("shop")
    vars(module).update(source=kept.bench.source)
    monkeypatch.setitem(sys.modules, "shop", module)
    return "shop:source"


def trace(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file below, its size and time."""
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.rglob("*"))}


async def test_the_folder_of_a_running_source_is_read_and_left_as_it_is(
    kept: Kept, kes: Kes, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.make()
    await kept.bench.over("ada", "bob", "ada", "bob-", "eve")
    await kept.until_marked()
    source, folder = named(kept, monkeypatch), str(kept.folder)
    before = trace(kept.folder)

    async def data(*words: str, code: int = 0) -> Any:
        run = [words[0], source, *words[1:], "--folder", folder, "--json"]
        return (await asyncio.to_thread(kes, "state", *run, code=code)).data

    (row,) = (await data("ls"))["partitions"]
    assert (row["partition"], row["keys"], row["next_offset"]) == (0, 2, 5)
    entries = (await data("scan"))["entries"]
    assert [(entry["key"], entry["value"]) for entry in entries] == [("ada", 2), ("eve", 1)]
    mark = read_mark(kept.partition_folder)
    assert mark is not None
    assert entries[0]["changed_at_ms"] == mark.as_of_ms
    assert [entry["value"] for entry in (await data("get", "ada"))["entries"]] == [2]
    assert (await data("get", "bob", code=1))["entries"] == []
    assert [entry["key"] for entry in (await data("scan", "--prefix", "e", "-p", "0"))["entries"]] == ["eve"]
    assert trace(kept.folder) == before
    kept.bench.broker.send("zoe")
    await kept.bench.committed()


@pytest.mark.parametrize("store", ["table", "own store", "table on SQLite"])
async def test_how_the_state_began_goes_with_it(
    kept: Kept, kes: Kes, monkeypatch: pytest.MonkeyPatch, store: str
) -> None:
    def make() -> None:
        kept.make(STORES[store])
        settings = kept.bench.source.config
        kept.bench.make(
            count, store=STORES[store], start_at="0@1", state=settings.state, metrics_handler=kept._measured
        )

    make()
    await kept.bench.over("ada", "bob")
    await kept.until_marked()
    await kept.bench.stop()
    if store != "table on SQLite":  # which the command does not read
        words = ["state", "ls", named(kept, monkeypatch), "--folder", str(kept.folder), "--json"]
        (row,) = (await asyncio.to_thread(kes, *words)).data["partitions"]
        assert (row["begun"], row["keys"]) == ("start: in at 1 (0@1)", 1)
    make()
    await kept.bench.start("eve")
    await kept.bench.committed()
    assert (kept.contents(), kept.restored[-1] < 3) == ({"bob": 1, "eve": 1}, True)
    await kept.bench.stop()


async def refused(kept: Kept, kes: Kes, monkeypatch: pytest.MonkeyPatch, *more: str) -> str:
    folder = more[0] if more else str(kept.folder)
    run = ["ls", named(kept, monkeypatch), "--folder", folder, *more[1:]]
    return (await asyncio.to_thread(kes, "state", *run, code=1)).words


async def test_what_cannot_be_shown_is_named(kept: Kept, kes: Kes, monkeypatch: pytest.MonkeyPatch) -> None:
    await kept.ran("ada")
    place = kept.group_folder
    assert "no state of the group g is kept there" in await refused(kept, kes, monkeypatch, str(kept.folder / "x"))
    assert "has the partitions 0, not 7" in await refused(kept, kes, monkeypatch, str(kept.folder), "-p", "7")
    kept.make(Table.factory(key=str, value=bytes))
    assert "its codec is 'Table(StrCodec, IntCodec)'" in await refused(kept, kes, monkeypatch)
    kept.make(STORES["table"])
    data = next((place / "0").glob("data-*"))
    good = data.read_bytes()
    data.write_bytes(good[:-1] + b"?")
    assert "another checksum than its mark" in await refused(kept, kes, monkeypatch)
    data.write_bytes(good)
    (place / "0").chmod(0o777)
    assert "can be written to by other users" in await refused(kept, kes, monkeypatch)
    (place / "0").chmod(0o700)
    (place / "0" / "mark").write_bytes(b"00000000 x")
    assert "its mark has a wrong checksum" in await refused(kept, kes, monkeypatch)


def checkpoint(folder: StateFolder, offset: int, value: bytes) -> None:
    folder.append([put(b"a", value)], pause=False)
    folder.commit(IDENTITY, offset, b"{}", now_ms())


def test_a_file_that_is_written_anew_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module.os, "fsync", lambda handle: None)
    monkeypatch.setattr(folder_module, "LEAST_REWRITE", 10)
    folder = StateFolder.find(tmp_path, 0)
    for offset in range(3):
        checkpoint(folder, offset, b"%d" % offset)
    known = folder.mark
    marks = iter([known])

    def read_old_first(path: Path) -> Any:
        """The mark is read, and then the file that it names is replaced."""
        old = next(marks, None)
        if old is None:
            return read_mark(path)
        assert folder.rewrite_if_due(pause=False)
        return old

    monkeypatch.setattr(shelf, "read_mark", read_old_first)
    mark, changes = read_state(tmp_path, 0)
    assert known is not None
    assert mark.file != known.file
    assert [(change.key, change.value) for change in changes] == [(b"a", b"2")]
    folder.close()


def test_of_two_folders_the_farther_one_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module.os, "fsync", lambda handle: None)
    first, second = StateFolder.find(tmp_path, 0), StateFolder.find(tmp_path, 0)
    checkpoint(first, 5, b"5")
    checkpoint(second, 9, b"9")
    assert [change.value for change in read_state(tmp_path, 0)[1]] == [b"9"]
    first.close()
    second.close()
    with pytest.raises(Damaged, match="nothing in it yet"):
        read_state(tmp_path, 1)


def test_a_mark_cannot_lead_out_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module.os, "fsync", lambda handle: None)
    folder = StateFolder.find(tmp_path, 0)
    checkpoint(folder, 5, b"5")
    assert folder.mark is not None
    folder._replace_mark(msgspec.structs.replace(folder.mark, file="../../secret"))
    folder.close()
    with pytest.raises(Damaged, match="its mark names the file"):
        read_state(tmp_path, 0)
