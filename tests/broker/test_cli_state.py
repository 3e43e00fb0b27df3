"""``kes state`` on a real broker: the state that a source left behind, typed, while it runs and afterwards."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streams import EventContext, EventSource, Record, SimpleStore, StateConfig, Table
from streams.cli import state_writing
from streams.codecs import int_codec
from streams.stores import NamedTable, Stores
from tests.broker.engine_kit import Lab, Running, producer_to
from tests.unit.waiting import PATIENCE
from tests.vocabulary import TOTALS, Added, Ring, Words, count, write

pytestmark = [pytest.mark.broker, pytest.mark.asyncio, pytest.mark.timeout(120)]

PARTITIONS = 2
Kes = Callable[..., tuple[int, Any, str]]


async def test_partitions_keys_and_values(lab: Lab, kes: Kes) -> None:
    source = lab.source()

    def work(ctx: EventContext[Any], event: Added) -> None:
        if event.deed == "delete":
            ctx.store.delete(event.name)
        else:
            count(ctx, event)
        if event.deed == "timer":
            ctx.schedule_in(timedelta(days=1), Ring(event.name), name="t")

    source.register_event_type(Added, work)
    source.register_event_type(Ring, lambda ctx, event: None)
    await lab.create()

    async def run(*words: str) -> tuple[int, Any, str]:
        return await asyncio.to_thread(kes, source, "state", *words)

    assert f"{lab.changelog} does not exist: the source has not run yet" in (await run("ls"))[2]
    async with Running(source) as running:
        await lab.add("ada", "bob", "ada", "adam")
        await lab.add("bob", deed="delete")
        await lab.add("\x1b[31m", deed="timer", partition=1)
        await lab.add("ada", partition=1)
        await running.until_committed(7)
        code, answer, _ = await run("ls")
        rows = answer["partitions"]
        assert code == 0
        assert [(row["keys"], row["timers"], row["next_offset"]) for row in rows] == [(2, 0, 5), (2, 1, 2)]
        assert [row["bytes"] for row in rows] == [len("adaadam") + 2 * 8, len("\x1b[31mada") + 2 * 8]
        code, answer, err = await run("get", "ada")
        assert [(entry["partition"], entry["value"]) for entry in answer["entries"]] == [(0, 2), (1, 1)]
        assert "the key is in the partitions 0, 1, with a state of its own in each" in err
    code, answer, _ = await run("scan", "--prefix", "ada", "-p", "0", "-n", "1")
    assert (answer["keys"], [entry["key"] for entry in answer["entries"]]) == (2, ["ada"])
    code, answer, _ = await run("get", "bob")
    assert (code, answer["entries"]) == (1, [])
    assert "has the partitions 0 to 1, not 9" in (await run("scan", "-p", "9"))[2]
    code, answer, _ = await run("get", "\\x1b[31m")
    assert (code, answer["entries"][0]["key"]) == (0, "\x1b[31m"), "keys are typed as they are shown"


class Item(msgspec.Struct):
    id: str
    cents: int


@pytest.mark.parametrize(
    ("store", "key", "value", "shown", "problem"),
    [
        (TOTALS, b"a", b"many", ("a", "many"), "@0: "),
        (Table.factory(key=int, value=Item), b"\xff", b'{"id":"a","cents":1}', ({"base64": "/w=="}, {}), "@0: "),
        (SimpleStore.factory(Item, key=lambda item: item.id), b"a", b'{"id":"a","cents":1}', ("a", {"cents": 1}), ""),
        (Words, b"a", b"xyz", ("a", "xyz"), ""),
        (None, b"a", b"xyz", ("a", "xyz"), ""),
    ],
    ids=["bad value", "bad key", "simple store", "own store", "no store"],
)
async def test_stores_of_all_kinds_and_entries_that_they_cannot_read(
    lab: Lab, kes: Kes, store: Any, key: bytes, value: bytes, shown: tuple[Any, Any], problem: str
) -> None:
    source: EventSource[Any] = EventSource(lab.config(), store)
    source.register_event_type(Added, write)
    await lab.create(lab.changelog)
    record = Record(lab.changelog, value, key, partition=1)
    producer = producer_to(lab.bootstrap)
    producer.produce(record.topic, record.value, record.key, 1)
    assert producer.flush(PATIENCE) == 0
    code, answer, err = await asyncio.to_thread(kes, source, "state", "scan")
    assert code == 0, err
    [entry] = answer["entries"]
    assert entry["key"] == shown[0]
    assert entry["value"] == shown[1] or entry["value"].items() >= shown[1].items()
    assert (problem in entry["problem"], bool(entry["problem"])) == (True, bool(problem))


async def test_copies_of_state_are_compared_and_restored(lab: Lab, kes: Kes, tmp_path: Path) -> None:
    """A folder, snapshots, an export and the changelog are equal; each one that is spoiled is not."""
    state = StateConfig(folder=str(tmp_path / "state"), snapshots=str(tmp_path / "snapshots"), checkpoint_seconds=0.1)
    source = lab.source(state=state)
    source.register_event_type(Added, count)
    await lab.create()

    async def run(*words: str) -> tuple[int, Any, str]:
        return await asyncio.to_thread(kes, source, "state", *words)

    out = str(tmp_path / "out")
    async with Running(source) as running:
        await lab.add("ada", "bob", "ada")
        await lab.add("eve", partition=1)
        await running.until_committed(4)
        assert (await run("export", out))[0] == 0
    assert (await run("snapshot"))[0] == 0
    async with Running(source) as running:
        await lab.add("zoe", "ada")
        await running.until_committed(2)
        for side in ("folder", "snapshots", out, f"folder:{tmp_path / 'state'}"):
            code, answer, err = await run("diff", "changelog", side)
            assert code == 0, (side, answer, err)
            assert answer["differences"] == 0
    lines = Path(out).read_text().splitlines()
    Path(out).write_text("\n".join(line for line in lines if "bob" not in line) + "\n")
    code, answer, _ = await run("diff", out, "snapshots")
    assert (code, answer["differences"]) == (1, 1)
    assert answer["shown"] == [{"partition": 0, "key": "bob", "a": None, "b": 1}]
    assert (await run("verify", "--what", "snapshots"))[0] == 0
    assert (await run("drop", "--yes"))[0] == 0
    code, answer, err = await run("restore")
    assert code == 0, (answer, err)
    assert (await run("diff", "folder", "changelog"))[1]["differences"] == 0
    async with Running(source) as running:
        await lab.add("ada")
        await running.until_committed(1)
    code, answer, _ = await run("get", "ada")
    assert answer["entries"][0]["value"] == 4


class Plain(msgspec.Struct):
    cents: int


class Labelled(msgspec.Struct):
    cents: int
    name: str


class Before(Stores):
    people = NamedTable.of(str, Plain, expires=3_600)
    count = NamedTable.of(str, int)


class After(Stores):
    people = NamedTable.of(str, Labelled, expires=3_600, version=2, upcast={1: lambda old: {**old, "name": "?"}})
    count = NamedTable.of(str, int)


class Required(msgspec.Struct):
    text: str


class Wanting(Stores):
    people = NamedTable.of(str, Required)
    count = NamedTable.of(str, int)


async def test_state_is_imported_and_migrated(
    lab: Lab, kes: Kes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release with a newer version of values migrates them, an export brings the state before it back; the folder of
    the source reads both from the changelog. A value that another release cannot read is repaired. No member may be
    there."""
    monkeypatch.setattr(state_writing, "_MOST_CHANGES", 2)  # several transactions
    state = StateConfig(folder=str(tmp_path / "state"), checkpoint_seconds=0.1)

    def release(store: type[Stores]) -> EventSource[Any]:
        source: EventSource[Any] = EventSource(lab.config(state=state), store.factory())

        def work(ctx: EventContext[Any], event: Added) -> None:
            ctx.store.count.put(event.name, ctx.store.count.get(event.name, 0) + 1)
            ctx.store.people.put(event.name, Plain(1) if store is Before else Labelled(1, event.name))

        source.register_event_type(Added, work)
        return source

    async def run(store: type[Stores], *words: str) -> tuple[int, Any, str]:
        return await asyncio.to_thread(kes, release(store), "state", *words)

    out = str(tmp_path / "out")
    await lab.create()
    names = ["ada", "bob", "eve", "ada"]
    async with Running(release(Before)) as running:
        await lab.add(*names)
        await running.until_committed(4)
        code, _, err = await run(Before, "migrate", "--yes")
        assert code == 1
        assert "members" in err or "member" in err
    assert (await run(Before, "export", out))[0] == 0
    code, answer, _ = await run(After, "migrate", "--dry-run")
    assert (code, [row["put"] for row in answer["partitions"]]) == (0, [3])
    assert (await run(After, "migrate"))[0] == 2, "it cannot ask"
    code, answer, err = await run(After, "migrate", "--yes")
    assert (code, [row["put"] for row in answer["partitions"]]) == (0, [3]), err
    code, answer, _ = await run(After, "migrate", "--yes")
    assert (code, [row["put"] for row in answer["partitions"]]) == (0, [0])
    async with Running(source := release(After)) as running:
        await lab.add("zoe", "ada")
        await running.until_committed(2)
        store = running.source._run.engine.workers[0].store  # type: ignore[union-attr]
        assert sorted(store.people.items()) == [
            ("ada", Labelled(1, "ada")), ("bob", Labelled(1, "?")),
            ("eve", Labelled(1, "?")), ("zoe", Labelled(1, "zoe")),
        ]  # fmt: skip
    del source
    assert (await run(After, "diff", "changelog", "folder"))[1]["differences"] == 0
    code, answer, err = await run(Before, "import", out, "--yes", "-p", "0")
    assert code == 0, err
    assert [(row["put"], row["deleted"]) for row in answer["partitions"]] == [(4 + 1, 2)], "people, the time, one count"
    assert (await run(Before, "diff", "changelog", out, "-p", "0"))[1]["differences"] == 0
    Path(out).write_text("\n".join(Path(out).read_text().splitlines()[:1]))
    code, _, err = await run(Before, "import", out, "--yes")
    assert (code, "the file is cut" in err) == (1, True)
    code, answer, err = await run(Before, "set-time", "--to", "1d", "--yes")
    assert (code, [row["put"] for row in answer["partitions"]]) == (0, [5]), f"the time, its mark, three people: {err}"
    times = [row["time_ms"] for row in (await run(Before, "ls"))[1]["partitions"]]
    assert times[0] / 1000 == pytest.approx(time.time() - 86_400, abs=300)
    assert (await run(Before, "set-time", "--to", "1h", "--yes"))[1]["partitions"][0]["put"] == 0, "it only goes back"
    async with Running(release(Before)) as running:
        await lab.add("bob")
        await running.until_committed(1)
        store = running.source._run.engine.workers[0].store  # type: ignore[union-attr]
        assert sorted(store.count.items()) == [("ada", 2), ("bob", 2), ("eve", 1)]
    monkeypatch.chdir(tmp_path)  # where a repair keeps what it replaces
    bob = '["people","bob"]'
    code, answer, err = await run(Wanting, "get", bob)
    assert (code, "missing required field" in answer["entries"][0]["problem"]) == (0, True), err
    assert "no earlier value" in (await run(Wanting, "repair", bob, "--previous", "--yes"))[2]
    (mended := tmp_path / "mended").write_bytes(b'{"text":"bob"}')
    code, answer, err = await run(Wanting, "repair", bob, "--with", str(mended), "--yes")
    assert (code, [row["put"] for row in answer["partitions"]]) == (0, [1]), err
    assert (await run(Wanting, "get", bob))[1]["entries"][0]["value"] == {"text": "bob"}
    assert len(list(tmp_path.glob(f"{lab.changelog}-0-*.value"))) == 1
    code, answer, err = await run(Wanting, "repair", bob, "--delete", "--yes")
    assert (code, [row["deleted"] for row in answer["partitions"]]) == (0, [1]), err
    assert (await run(Wanting, "get", bob))[0] == 1
    assert (await run(Before, "diff", "changelog", "folder"))[1]["differences"] == 0
    await lab.check_settled(lab.changelog)


@pytest.mark.nightly
async def test_a_join_is_forgotten(lab: Lab, kes: Kes) -> None:
    """Its rows, its position and the group's offsets there: put back, the table is read anew."""
    table = f"{lab.topic}-table"
    await lab.create()
    await lab.create(table, cleanup_policy="compact")

    def release(*, joins: bool) -> EventSource[Any]:
        source = lab.source()
        register = source.join(table, key=str, value=int, partitioner=None) if joins else None

        def work(ctx: EventContext[Any], event: Added) -> None:
            row = None if register is None else ctx.joined(register).get(event.name)
            ctx.forward(Record(lab.output, b"%d" % (row or 0), b"k", partition=0))

        source.register_event_type(Added, work)
        return source

    async def run(source: EventSource[Any], *words: str) -> tuple[int, Any, str]:
        return await asyncio.to_thread(kes, source, "state", "forget", "--join", table, *words)

    async def handled(*, joins: bool) -> bytes | None:
        source, before = release(joins=joins), len(await lab.records())
        async with Running(source):
            await lab.add("ada")
            await lab.until_outputs(before + 1)
        return (await lab.records())[-1].value

    await lab.send(int_codec.encode(7), b"ada", None, topic=table)
    await lab.flush()
    assert await handled(joins=True) == b"7"
    assert "only rows of a join that the source no longer declares" in (await run(release(joins=True), "--yes"))[2]
    assert await handled(joins=False) == b"0"
    async with Running(release(joins=False)):
        code, _, err = await run(release(joins=False), "--yes")
        assert (code, "member" in err) == (1, True)
    code, answer, err = await run(release(joins=False), "--yes")
    assert (code, [row["deleted"] for row in answer["partitions"]]) == (0, [1]), err
    assert await asyncio.to_thread(lab.admin.committed, lab.group, table, 10.0) == {}
    assert "it has none of any table" in (await run(release(joins=False), "--yes"))[2]
    await lab.send(int_codec.encode(8), b"ada", None, topic=table)
    await lab.flush()
    assert await handled(joins=True) == b"8"
    await lab.check_settled(lab.changelog)
