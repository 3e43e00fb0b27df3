"""``kes state export|verify|snapshot|drop`` on folders, beside the process that writes them, without a broker."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

from streams import EventSource, EventSourceConfig, NamedTable, SimpleStore, Stores
from streams.cli import state_files, state_sources, state_writing
from streams.runtime.changelog import JOIN_PREFIX
from streams.runtime.keeping.folders import folder as folder_module
from streams.runtime.keeping.folders.folder import StateFolder, read_mark
from streams.runtime.keeping.snapshots import snapshotting
from streams.runtime.partition.joined_rows import row_key
from tests.unit.cli_kit import Answer, Kes
from tests.unit.kept_engine_kit import STORES, Kept
from tests.unit.runtime_kit import Bench
from tests.unit.waiting import give_own


class Shell:
    """Commands on the state of a bench's source."""

    def __init__(self, kept: Kept, kes: Kes) -> None:
        self.kept, self._kes = kept, kes
        self.place = kept.group_folder
        self.store = kept.folder.parent / "snapshots"

    async def __call__(self, word: str, *more: str, code: int = 0) -> Answer:
        vars(module := ModuleType("shop")).update(source=self.kept.bench.source)
        sys.modules["shop"] = module
        try:
            return await asyncio.to_thread(self._kes, "state", word, "shop:source", *more, code=code)
        finally:
            del sys.modules["shop"]

    async def data(self, word: str, *more: str, code: int = 0) -> Any:
        return (await self(word, *more, "--json", code=code)).data

    def spoil(self) -> None:
        (data,) = (self.place / "0").glob("data-*")
        data.write_bytes(data.read_bytes()[:-1] + b"?")


@pytest.fixture
def shell(bench: Bench, tmp_path: Path, kes: Kes, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.setattr(folder_module.os, "fsync", lambda handle: None)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(state_files, "topic_id_of", lambda *_: ("id", 1))  # instead of the broker's
    monkeypatch.setattr(state_sources, "topic_id_of", lambda *_: ("id", 1))
    return Shell(Kept(bench, tmp_path / "state"), kes)


async def at_work(shell: Shell, store: Any = STORES["table"]) -> None:
    shell.kept.make(store)
    await shell.kept.bench.over("ada", "bob", "ada", "bob-", "eve")
    await shell.kept.until_marked()


async def test_a_folder_at_work_is_exported(shell: Shell, tmp_path: Path) -> None:
    await at_work(shell)
    found = await shell.data("export", str(tmp_path / "out"), "--from", "folder")
    assert found["partitions"] == [{"partition": 0, "offset": shell.kept.marked, "entries": 2}]
    *entries, end = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [(line["shown_key"], line["shown_value"]) for line in entries] == [("ada", 2), ("eve", 1)]
    assert base64.b64decode(entries[0]["key"]) == b"ada"
    assert end == {"partition": 0, "offset": shell.kept.marked}
    again = await shell("export", str(tmp_path / "out"), "--from", "folder", code=1)
    assert "File exists" in again.words
    read = state_sources.state_of(shell.kept.bench.source, str(tmp_path / "out"), "", 1.0, None)
    assert read == state_sources.state_of(shell.kept.bench.source, "folder", "", 1.0, None)


@pytest.mark.parametrize("text", [b"no json\n", b"{}\n", b'{"partition":0,"key":"?","value":""}\n'])
async def test_a_file_that_is_no_export(shell: Shell, tmp_path: Path, text: bytes) -> None:
    await at_work(shell)
    (tmp_path / "x").write_bytes(text)
    answer = await shell("export", str(tmp_path / "out"), "--from", str(tmp_path / "x"), code=1)
    assert "line 1 is not from an export" in answer.words
    missing = await shell("export", str(tmp_path / "out"), "--from", str(tmp_path / "y"), code=1)
    assert "a side is changelog, folder, snapshots, or a file" in missing.words


@pytest.mark.parametrize("kind", ["table", "table on SQLite"])
async def test_folders_are_verified(shell: Shell, kind: str) -> None:
    await at_work(shell, STORES[kind])
    (row,) = await shell.data("verify")
    is_database = kind != "table"
    assert (row["partition"], row["problem"] != "", row["skipped"]) == (0, is_database, is_database)
    await shell.kept.bench.stop()
    (row,) = await shell.data("verify")
    assert (row["offset"], row["problem"], row["skipped"]) == (shell.kept.marked, "", False)
    if is_database:
        for path in (shell.place / "0" / "data-sqlite1").glob("state.db*"):
            path.write_bytes(path.read_bytes().replace(b"ada", b"adb"))
    else:
        shell.spoil()
    (row,) = await shell.data("verify", code=1)
    assert "checksum" in row["problem"] or "rows" in row["problem"]
    assert "checksum" in (await shell("verify", code=1)).out or is_database
    (shell.place / "0" / "mark").write_bytes(b"x")
    assert "mark" in (await shell.data("verify", code=1))[0]["problem"]


class Longer(msgspec.Struct):
    """What the next release makes of ``Named``."""

    name: str
    place: str


async def test_values_that_this_release_cannot_read_are_named(shell: Shell) -> None:
    await at_work(shell, STORES["SimpleStore"])
    await shell.kept.bench.stop()
    (intact, decoded) = await shell.data("verify", "--decode")
    assert (intact["problem"], decoded["name"], decoded["problem"]) == ("", "4 entries", "")
    shell.kept.make(SimpleStore.factory(Longer, key=lambda item: item.name))
    assert [row["problem"] for row in await shell.data("verify")] == [""]
    (_, ada, *_, whole) = await shell.data("verify", "--decode", code=1)
    assert (ada["name"], whole["problem"]) == ("key ada", "4 of 4 entries cannot be read")
    assert "missing required field `place`" in ada["problem"]
    assert "use folder or snapshots" in (await shell("verify", "--what", "changelog", code=2)).words


async def test_snapshots_by_hand(shell: Shell) -> None:
    await at_work(shell)
    where = ("--snapshots", str(shell.store))
    (first,) = await shell.data("snapshot", *where)
    assert (first["offset"], first["written"]) == (shell.kept.marked, first["bytes"])
    (second,) = await shell.data("snapshot", *where)
    assert second["written"] == 0
    rows = await shell.data("verify", "--what", "snapshots", *where)
    assert [row["problem"] for row in rows] == ["", ""]
    (row,) = await shell.data("restore", *where, code=1)
    assert "there is a folder already" in row["problem"]
    await shell.kept.bench.stop()
    assert [row["name"] for row in await shell.data("drop", "--yes")] == ["0"]
    (row,) = await shell.data("restore", *where)
    assert row["name"] in (first["name"], second["name"])
    await shell.kept.bench.start()
    assert (shell.kept.contents(), shell.kept.restored[-1]) == ({"ada": 2, "eve": 1}, 1)
    for path in shell.store.rglob("blocks/*"):
        path.write_bytes(b"x")
    rows = await shell.data("verify", "--what", "snapshots", *where, code=1)
    assert ["is damaged" in row["problem"] for row in rows] == [True, True]


async def test_a_source_starts_on_folders_that_were_restored_on_a_new_machine(shell: Shell) -> None:
    await at_work(shell)
    where = ("--snapshots", str(shell.store))
    await shell.data("snapshot", *where)
    await shell.kept.bench.stop()
    shutil.rmtree(shell.kept.folder)
    before = os.umask(0o002)  # of many distributions: what is made can be written to by the group
    try:
        await shell.data("restore", *where)
    finally:
        os.umask(before)
    await shell.kept.bench.start()
    assert (shell.kept.contents(), shell.kept.restored[-1]) == ({"ada": 2, "eve": 1}, 1)


async def test_snapshots_that_are_not_used_are_named(shell: Shell, tmp_path: Path) -> None:
    await at_work(shell)
    where = ("--snapshots", str(shell.store))
    await shell.data("snapshot", *where)
    (good,) = shell.store.rglob("manifest-*")
    spoiled = good.with_name(f"manifest-{999999999999999}-{good.name.split('-', 2)[2]}")
    spoiled.write_bytes(good.read_bytes()[:-1] + b"?")
    answer = await shell("export", str(tmp_path / "out"), "--from", f"snapshots:{shell.store}")
    assert f"{spoiled.name} is not used: its checksum is wrong" in answer.words
    good.unlink()
    answer = await shell("export", str(tmp_path / "more"), "--from", f"snapshots:{shell.store}", code=1)
    assert "there is no snapshot that can be read" in answer.words


async def test_a_snapshot_by_hand_keeps_to_the_budget(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    shell.kept.make(snapshot_bytes_per_second=1_000)
    await shell.kept.bench.over("ada")
    await shell.kept.until_marked()
    slept: list[float] = []
    give_own(monkeypatch, "time", snapshotting, sleep=slept.append)
    (row,) = await shell.data("snapshot", "--snapshots", str(shell.store))
    assert sum(slept) >= 0.9 * row["written"] / 1_000 > 0


async def test_a_store_that_fails_is_named(shell: Shell) -> None:
    await at_work(shell)
    shell.store.write_text("a file")
    answer = await shell("verify", "--what", "snapshots", "--snapshots", str(shell.store), code=1)
    assert "Not a directory" in answer.words


async def test_a_damaged_folder_makes_no_snapshot(shell: Shell) -> None:
    await at_work(shell)
    await shell.kept.bench.stop()
    shell.spoil()
    answer = await shell("snapshot", "--snapshots", str(shell.store), code=1)
    assert "another checksum than its mark" in answer.words
    assert not list(shell.store.rglob("manifest-*"))


async def test_a_database_is_left_to_its_source(shell: Shell) -> None:
    await at_work(shell, STORES["table on SQLite"])
    answer = await shell("snapshot", "--snapshots", str(shell.store), code=1)
    assert "of which the source makes snapshots itself" in answer.words


@pytest.mark.parametrize(
    ("differs", "older_ms", "is_chosen"),
    [
        ({"topic_id": "other"}, 1, False),
        ({"codec": "other"}, -1, False),
        ({"topic": "other"}, -1, False),
        ({}, 1, True),
    ],
    ids=["a topic that was made again", "another codec", "another topic", "the same log"],
)
async def test_of_two_folders_that_is_chosen_which_a_start_would_choose(
    shell: Shell, differs: dict[str, str], older_ms: int, is_chosen: bool
) -> None:
    """Not the one that goes farther, if that is of another log."""
    await at_work(shell)
    await shell.kept.bench.stop()
    shutil.copytree(shell.place / "0", shell.place / "0.1")
    mark = read_mark(shell.place / "0")
    assert mark is not None
    identity = msgspec.structs.replace(mark.identity, **differs)
    farther = msgspec.structs.replace(
        mark, identity=identity, offset=mark.offset + 9, as_of_ms=mark.as_of_ms - older_ms
    )
    StateFolder(shell.place / "0.1", -1)._replace_mark(farther)
    chosen = farther if is_chosen else mark
    folder = str(shell.kept.folder)
    entries = (await shell.data("scan", "--folder", folder))["entries"]
    assert {entry["changed_at_ms"] for entry in entries} == {chosen.as_of_ms}
    (row,) = await shell.data("snapshot", "--folder", folder, "--snapshots", str(shell.store))
    assert row["offset"] == chosen.offset


async def test_folders_in_use_are_not_dropped(shell: Shell) -> None:
    await at_work(shell)
    (row,) = await shell.data("drop", "--yes", code=1)
    assert row == {"name": "0", "problem": "a process has it locked"}
    await shell.kept.bench.stop()
    (shell.place / "0.aside").mkdir()
    (shell.place / "other").mkdir()
    await shell("drop", "--json", code=2)
    assert [row["name"] for row in await shell.data("drop", "--yes")] == ["0", "0.aside"]
    assert (shell.place / "other").exists()
    assert "no state of the group g is kept there" in (await shell("drop", "--yes", code=1)).words


def test_the_topic_id_is_written_as_in_marks(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def admin_of(*_: Any) -> Iterator[Any]:
        yield SimpleNamespace(identity=lambda name, seconds: ("a+b/c", 3))

    monkeypatch.setattr(state_sources, "admin_of", admin_of)
    assert state_sources.topic_id_of(bench.make(), "nowhere:1", 1.0) == ("a-b_c", 3)


async def test_what_is_not_set_is_named(shell: Shell) -> None:
    await at_work(shell)
    assert "has no StateConfig.snapshots" in (await shell("snapshot", code=1)).words
    await shell("verify", "--what", "else", code=2)
    await shell.kept.bench.stop()
    shell.kept.bench.make(None)
    assert "has no StateConfig.folder" in (await shell("verify", code=1)).words


@dataclass(frozen=True)
class Sum:
    cents: int


class Shop(Stores):
    sums = NamedTable.of(str, Sum, version=2, upcast={1: lambda old: old}, bare=True)


def test_import_and_migrate_leave_rows_of_joined_tables_alone(
    kes: Kes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They belong to the position in the table's topic, which stays: without them the next start would lack them."""
    config = EventSourceConfig(group_id="g", topic="in", num_partitions=1)
    source: EventSource[Any] = EventSource(config, Shop.factory())
    source.join("customers", key=str, value=Sum)
    monkeypatch.setitem(sys.modules, "shop", module := ModuleType("shop"))
    vars(module).update(source=source)
    ann, bob = row_key("customers", b"ann"), row_key("customers", b"bob")
    value = b'{"cents":1}'
    there = state_sources.StateAt(9, {b"k": value, b"old": value, ann: value, JOIN_PREFIX + b"customers": b"3"})
    checks = SimpleNamespace(refuse_if_alive=lambda: None, committed=dict.fromkeys, last_records=lambda *_: {0: None})
    monkeypatch.setattr(state_writing, "GroupChecks", lambda *_, **__: nullcontext(checks))
    monkeypatch.setattr(state_writing, "position_of", lambda *_: None)
    monkeypatch.setattr(state_writing, "state_of", lambda *_: {0: there})
    written: list[dict[bytes, bytes | None]] = []
    monkeypatch.setattr(state_writing, "check_sizes", lambda changes, *_: written.append(changes))
    file = state_sources.StateAt(5, {b"k": b'{"cents":2}', bob: value})
    monkeypatch.setattr(state_writing, "from_export", lambda *_: {0: file})
    broker = "--bootstrap-servers", "nowhere:1"
    kes("state", "import", "shop:source", "out", "--dry-run", "--json", *broker)
    kes("state", "migrate", "shop:source", "--dry-run", "--json", *broker)
    imported, migrated = written
    assert imported == {b"k": b'{"cents":2}', b"old": None}
    assert migrated.keys() == {b"k", b"old"}
