"""``kes state`` on a real broker: the state that a source left behind, typed, while it runs and afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streams import EventContext, EventSource, Record, SimpleStore, StateConfig, Table
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
