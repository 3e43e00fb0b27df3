"""Views on disk, over a topic in memory: they read the same, go on from their folder, and are filled anew from one that
is not to be trusted."""

from __future__ import annotations

import asyncio
import errno
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from streams import SKIP, Index, Retry, View, ViewState
from streams.disk.sqlite import SQLite, SQLiteDatabase
from streams.errors import ConfigError, DiskDamaged, NotCaughtUp, StoreError, StreamsError
from streams.runtime.keeping.folders.folder import StateFolder
from streams.runtime.keeping.on_disk import DatabaseFolder
from streams.runtime.reading.log_follower import FROM_START
from streams.views import on_disk
from streams.views import view as view_module
from tests.unit.global_log_kit import MemoryTopic, Partition
from tests.unit.view_kit import changed, number, view_of, viewed_topic
from tests.unit.waiting import PATIENCE, until

KEYS = [f"key {n:03}" for n in range(40)]


@pytest.fixture
def topic(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryTopic]:
    monkeypatch.setattr(on_disk, "MOST_WAITING", 7)
    yield from viewed_topic(monkeypatch)


def disk_view(topic: MemoryTopic, folder: Path, **settings: Any) -> View[str, int]:
    return view_of(topic, engine=SQLite(), folder=str(folder), **settings)


async def filled(topic: MemoryTopic, folder: Path) -> dict[str, int]:
    """Have a folder that a whole view has left."""
    contents = {}
    for n, key in enumerate(KEYS):
        topic.put(key.encode(), number(n), n % 2)
        contents[key] = n
    async with disk_view(topic, folder) as view:
        await view.ready(PATIENCE)
    topic.followed.clear()
    return contents


def place(folder: Path, partition: int = 0) -> Path:
    return folder / "group-" / "topic-rates" / str(partition)


async def test_it_goes_on_from_its_folder(topic: MemoryTopic, tmp_path: Path) -> None:
    contents = await filled(topic, tmp_path)
    topic.put(KEYS[0].encode(), None, 0)
    topic.put(b"new", number(70), 1)
    del contents[KEYS[0]]
    contents["new"] = 70
    view = disk_view(topic, tmp_path, index={"value": Index(int, lambda value: value)})
    for ends in ((20, 20), (21, 21), (21, 21)):
        async with view:
            await view.ready(PATIENCE)
            await until(lambda: len(topic.followed) == 2)  # it may be ready before anything is read
            assert sorted(topic.followed) == list(enumerate(ends)), "what it has is not read again"
            assert dict(view.items()) == contents
            assert dict(view.by_range("value", 30)) == {key: value for key, value in contents.items() if value >= 30}
            assert (view.get(KEYS[0]), view.get("new"), KEYS[1] in view, len(view)) == (None, 70, True, 40)
            assert abs(view.statistics().keys - 40) <= 14
            assert view.positions == {0: 21, 1: 21}
        topic.followed.clear()
        with pytest.raises(StoreError, match="stopped"):
            view.get("new")
    async with disk_view(topic, tmp_path) as one, disk_view(topic, tmp_path) as other:  # each has a folder of its own
        await one.ready(PATIENCE)
        await other.ready(PATIENCE)
        assert dict(one.items()) == dict(other.items()) == contents


async def test_it_reads_as_a_view_in_memory_does(topic: MemoryTopic, tmp_path: Path) -> None:
    rng = random.Random(7)
    frozen: list[tuple[Any, dict[str, int]]] = []
    contents: dict[str, int] = {}
    async with disk_view(topic, tmp_path) as view, view_of(topic) as memory:
        await view.ready(PATIENCE)
        await memory.ready(PATIENCE)
        for _ in range(60):
            ends = {}
            for _ in range(rng.randrange(1, 12)):
                key = rng.choice(KEYS)
                partition = KEYS.index(key) % 2
                value = rng.choice((None, rng.randrange(1000)))
                ends[partition] = topic.put(key.encode(), None if value is None else number(value), partition) + 1
                contents.pop(key, None)
                if value is not None:
                    contents[key] = value
            await view.wait_for(ends, PATIENCE)
            await memory.wait_for(ends, PATIENCE)
            low, high = sorted(rng.sample(KEYS, 2))
            for read in (
                lambda each: list(each.items()),
                lambda each: list(each.range(low, high, reverse=True, include_high=True)),  # noqa: B023
                lambda each: list(each.range(low, high)),  # noqa: B023
                lambda each: list(each.prefix("key 01")),
                lambda each: (each.first(), each.last(), len(each), each.get(low)),  # noqa: B023
            ):
                assert read(view) == read(memory)
            assert dict(view.items()) == contents
            frozen.append((view.snapshot(), contents.copy()))
        for snapshot, then in frozen:
            with snapshot:
                assert dict(snapshot.items()) == then
                assert len(snapshot) == len(then)
                assert [*snapshot.keys()] == sorted(then)


async def test_readers_on_other_threads_never_see_a_key_go_back_or_away(topic: MemoryTopic, tmp_path: Path) -> None:
    async with disk_view(topic, tmp_path) as view:
        await view.wait_for({0: topic.put(b"a", number(0)) + 1}, PATIENCE)
        await view.ready(PATIENCE)
        over, wrong, reads = threading.Event(), list[str](), [0, 0]

        def read(place: int) -> None:
            last = 0
            while not over.is_set():
                reads[place] += 1
                found = view.get("a") if place else dict(view.items()).get("a")
                if found is None or found < last:
                    wrong.append(f"{found} after {last}")
                last = found or last

        readers = [threading.Thread(target=read, args=(place,)) for place in range(2)]
        for reader in readers:
            reader.start()
        for n in range(300):
            topic.put(b"a", number(n))
            for other in range(7):
                sent = topic.put(f"other {other}".encode(), None if n % 2 else number(n))
            await view.wait_for({0: sent + 1}, PATIENCE)
        over.set()
        for reader in readers:
            reader.join()
        assert (wrong, min(reads) > 20) == ([], True), reads


async def test_changes_have_the_value_that_was_on_disk(topic: MemoryTopic, tmp_path: Path) -> None:
    contents = await filled(topic, tmp_path)
    async with disk_view(topic, tmp_path, ordered=False) as view:
        await view.ready(PATIENCE)
        changes = view.changes()
        topic.put(KEYS[2].encode(), number(5), 0)
        topic.put(KEYS[3].encode(), None, 1)
        found = [await anext(changes), await anext(changes)]
        expected = [changed(KEYS[2], contents[KEYS[2]], 5), changed(KEYS[3], contents[KEYS[3]], None, 1)]
        assert sorted(found, key=lambda change: change.key) == expected


def _garbage(topic: MemoryTopic, folder: Path) -> None:
    data = next(place(folder).rglob("state.db"))
    content = bytearray(data.read_bytes())
    for at in range(0, len(content), 64):
        content[at] ^= 0x55
    data.write_bytes(content)


def _missing(topic: MemoryTopic, folder: Path) -> None:
    shutil.rmtree(next(place(folder).glob("data-*")))


def _made_anew(topic: MemoryTopic, folder: Path) -> None:
    topic.identity = "id-2"


def _cut(topic: MemoryTopic, folder: Path) -> None:
    log = topic.logs[0]
    log.records.pop()
    log.stable = log.end = log.end - 1


@pytest.mark.parametrize("harm", [_garbage, _missing, _made_anew, _cut])
async def test_a_folder_that_is_not_to_be_trusted_is_filled_anew(
    topic: MemoryTopic, tmp_path: Path, harm: Callable[[MemoryTopic, Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    contents = await filled(topic, tmp_path)
    harm(topic, tmp_path)
    if harm is _cut:
        del contents[KEYS[38]]
    async with disk_view(topic, tmp_path) as view:
        await view.ready(PATIENCE)
        assert (0, FROM_START) in topic.followed
        assert dict(view.items()) == contents
    assert f"{place(tmp_path)} is not used" in caplog.text
    topic.followed.clear()
    async with disk_view(topic, tmp_path) as view:  # now it is whole
        await view.ready(PATIENCE)
        await until(lambda: len(topic.followed) == 2)
        assert (0, FROM_START) not in topic.followed
        assert dict(view.items()) == contents


@pytest.mark.parametrize("harm", [_garbage, _missing])
async def test_a_folder_that_is_less_far_takes_the_place_of_a_damaged_one(
    topic: MemoryTopic, tmp_path: Path, harm: Callable[[MemoryTopic, Path], None]
) -> None:
    contents = await filled(topic, tmp_path)
    shutil.copytree(place(tmp_path), tmp_path / "less far")
    topic.put(b"new", number(70))
    async with disk_view(topic, tmp_path) as view:
        await view.ready(PATIENCE)
        await view.wait_for({0: 21}, PATIENCE)
    topic.followed.clear()
    harm(topic, tmp_path)
    (tmp_path / "less far").rename(place(tmp_path).with_name("0.1"))
    async with disk_view(topic, tmp_path) as view:
        await view.ready(PATIENCE)
        await until(lambda: len(topic.followed) == 2)
        assert sorted(topic.followed) == [(0, 20), (1, 20)]
        assert dict(view.items()) == {**contents, "new": 70}
    assert not place(tmp_path).exists(), "the other one is kept"


async def test_another_type_or_an_old_folder_is_filled_anew(
    topic: MemoryTopic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await filled(topic, tmp_path)
    settings = {"engine": SQLite(), "folder": str(tmp_path), "bootstrap_servers": "memory:9092"}
    async with View(topic.name, key=str, value=bytes, **settings) as view:  # type: ignore[arg-type]
        await view.ready(PATIENCE)
        assert [start for _, start in topic.followed] == [FROM_START] * 2
    topic.followed.clear()
    monkeypatch.setattr(on_disk, "TOMBSTONES_MS", 1)
    async with View(topic.name, key=str, value=bytes, **settings) as view:  # type: ignore[arg-type]
        await view.ready(PATIENCE)
        assert [start for _, start in topic.followed] == [FROM_START] * 2, "a tombstone may be gone"


async def test_a_view_that_was_never_complete_leaves_nothing_to_go_on_from(topic: MemoryTopic, tmp_path: Path) -> None:
    for n, key in enumerate(KEYS):
        topic.put(key.encode(), number(n), n % 2)
    topic.open_transaction(0)
    topic.logs[0].stable = 0
    async with disk_view(topic, tmp_path) as view:
        topic.answers = False
        await until(lambda: view.positions.get(1) == 20)
        with pytest.raises(NotCaughtUp):
            view.get(KEYS[0])
    topic.answers = True
    topic.end_transaction(0)
    topic.followed.clear()
    async with disk_view(topic, tmp_path) as view:
        await view.ready(PATIENCE)
        assert len(view) == 40


async def test_what_a_killed_process_left_is_gone_on_from(
    topic: MemoryTopic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder is copied at any moment, as it is on disk, while the view goes on."""
    contents = await filled(topic, tmp_path / "first")
    async with disk_view(topic, tmp_path / "first") as view:
        await view.ready(PATIENCE)
        for n in range(30):
            key = KEYS[n % 20 * 2]
            sent = topic.put(key.encode(), None if n % 3 else number(1000 + n), 0)
            contents.pop(key, None)
            if not n % 3:
                contents[key] = 1000 + n
            await view.wait_for({0: sent + 1}, PATIENCE)
            if n in (0, 6, 7, 29):
                copy = tmp_path / f"copy {n}"
                shutil.copytree(tmp_path / "first", copy)
                async with disk_view(topic, copy) as late:
                    await late.ready(PATIENCE)
                    assert dict(late.items()) == contents


async def test_a_disk_that_refuses_fails_the_view_whatever_its_policy_is(
    topic: MemoryTopic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await filled(topic, tmp_path)

    def full(self: SQLiteDatabase, changes: Any, mark: Any, /) -> None:
        raise OSError(28, "No space left on device")

    for settings in ({}, {"on_error": SKIP}, {"on_error": Retry(attempts=1000, backoff_seconds=0.01)}):
        with monkeypatch.context() as patch:
            view = disk_view(topic, tmp_path, **settings)

            async def fill_it(view: View[str, int] = view, patch: pytest.MonkeyPatch = patch) -> None:
                async with view:
                    await view.ready(PATIENCE)
                    patch.setattr(SQLiteDatabase, "write", full)
                    for n in range(20):
                        topic.put(f"new {n}".encode(), number(1), 0)
                    await asyncio.Event().wait()  # it is cancelled

            with pytest.raises(StreamsError, match="No space left"):
                await fill_it()
            assert _refuses(view)
    async with disk_view(topic, tmp_path) as view:
        await view.ready(PATIENCE)
        assert view.get("new 19") == 1


async def test_a_disk_that_refuses_a_new_partition_fails_the_view_and_no_row_is_passed_over(
    topic: MemoryTopic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = await filled(topic, tmp_path)
    find = DatabaseFolder.find

    def short(parent: Path, partition: int, *rest: Any) -> StateFolder:
        if partition == 2:
            raise OSError(errno.EMFILE, "Too many open files")
        return find(parent, partition, *rest)

    view = disk_view(topic, tmp_path, on_error=SKIP)

    async def meet_it(patch: pytest.MonkeyPatch) -> None:
        async with view:
            await view.ready(PATIENCE)
            patch.setattr(DatabaseFolder, "find", short)
            topic.logs.append(Partition())
            await view.wait_for({2: topic.put(b"new", number(70), 2) + 1}, PATIENCE)
            await asyncio.Event().wait()  # it is cancelled

    with monkeypatch.context() as patch, pytest.raises(StreamsError, match="Too many open files"):
        await meet_it(patch)
    async with view:
        await view.ready(PATIENCE)
        assert dict(view.items()) == {**contents, "new": 70}


async def test_a_partition_that_does_not_exist_has_no_folder(topic: MemoryTopic, tmp_path: Path) -> None:
    contents = await filled(topic, tmp_path)
    async with disk_view(topic, tmp_path) as view:
        await view.ready(PATIENCE)
        assert [len(view.of_partition(each)) for each in (0, 1, 7, -1)] == [20, 20, 0, 0]
        assert list(view.of_partition(7).range("a", "z")) == []
        assert dict(view.items()) == contents
    assert sorted(path.name for path in place(tmp_path).parent.iterdir() if path.is_dir()) == ["0", "1"]


def _refuses(view: View[str, int]) -> bool:
    try:
        view.get("new 1")
    except StoreError:
        return True
    return False


async def test_damage_that_a_read_meets_fails_the_view_and_the_next_one_is_right(
    topic: MemoryTopic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = await filled(topic, tmp_path)
    monkeypatch.setattr(view_module, "MARK_SECONDS", 0.05)

    def damaged(self: SQLiteDatabase, key: bytes, /) -> bytes | None:
        raise DiskDamaged("a row has a wrong checksum")

    view = disk_view(topic, tmp_path)

    async def meet_it(patch: pytest.MonkeyPatch) -> None:
        async with view:
            await view.ready(PATIENCE)
            patch.setattr(SQLiteDatabase, "get", damaged)
            with pytest.raises(DiskDamaged):
                view.get(KEYS[0])
            await asyncio.Event().wait()  # it is cancelled

    with monkeypatch.context() as patch, pytest.raises(StreamsError, match="wrong checksum"):
        await meet_it(patch)
    assert view.state is ViewState.FAILED
    async with view:
        await view.ready(PATIENCE)
        assert (0, FROM_START) in topic.followed
        assert dict(view.items()) == contents


def test_engine_and_folder_go_together(topic: MemoryTopic, tmp_path: Path) -> None:
    for settings in ({"engine": SQLite()}, {"folder": str(tmp_path)}):
        with pytest.raises(ConfigError, match="go together"):
            view_of(topic, **settings)


async def test_a_folder_that_cannot_be_used_is_named(topic: MemoryTopic, tmp_path: Path) -> None:
    (file := tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=f"the folder of a view is .*{file}.*, and cannot be used"):
        async with disk_view(topic, file):
            pass
