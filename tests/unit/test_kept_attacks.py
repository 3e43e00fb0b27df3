"""Attacks on state on disk that take their time: aborts without end, a hot key, readers beside processes that die."""

from __future__ import annotations

import os
import random
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from streams import EventContext, StateConfig, Table
from streams.disk import RocksDB, SQLite
from streams.errors import StoreError, TransactionFailed
from streams.runtime.keeping.folders.folder import StateFolder
from streams.runtime.keeping.folders.shelf import read_state
from tests.unit.kept_engine_kit import STORES, Kept
from tests.unit.kept_kit import IDENTITY, Script, contents, now_ms, put
from tests.unit.runtime_kit import CHANGELOG, Slot
from tests.vocabulary import Named

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("unflushed")]


def keys_on_disk(kept: Kept) -> set[bytes]:
    place = kept.group_folder
    path = place / "0" / "data-sqlite1" / "state.db"
    if not path.exists():
        return {change.key for change in read_state(place, 0)[1]}
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        return {key for (key,) in connection.execute("SELECT key FROM state")}
    finally:
        connection.close()


@pytest.mark.parametrize("kind", ["table", "table on SQLite"])
async def test_a_transaction_that_is_aborted_again_and_again_while_checkpoints_run(
    kept: Kept, monkeypatch: Any, kind: str
) -> None:
    bench, commit, aborted, is_over = kept.bench, Slot.commit, [0], [False]
    kept.make(STORES[kind], checkpoint_bytes=1)
    await bench.over("a", "b")
    await kept.until_marked()
    before, end = keys_on_disk(kept), len(bench.broker.logs[CHANGELOG, 0])

    async def aborts(self: Slot, requested: Any) -> None:
        if is_over[0]:
            await commit(self, requested)
            return
        aborted[0] += 1
        raise TransactionFailed("commit_transaction", "INVALID_TXN_STATE", "abortable")

    monkeypatch.setattr(Slot, "commit", aborts)
    bench.broker.send("c", "a-", "d")
    keeper = kept.keeper
    for turn in range(1, 7):  # with the eighth the source stops
        await bench.until(lambda least=turn: aborted[0] >= least, "it is aborted once more")
        await keeper._thread.call(keeper.open_ones[0].write)
        assert keys_on_disk(kept) == before, f"after {aborted[0]} aborts"
    assert len(bench.broker.logs[CHANGELOG, 0]) == end
    is_over[0] = True
    await bench.committed()
    await kept.until_marked()
    assert kept.contents() == kept.from_log() == {"b": 1, "c": 1, "d": 1}


HOT, COLD, ROUNDS = 1_000, 1_000, 300


def test_a_key_that_is_written_all_the_time_beside_many_that_are_written_once(tmp_path: Path) -> None:
    """The file is rewritten, and never much larger than what counts."""
    folder, most = StateFolder.find(tmp_path, 0), 0.0
    for number in range(ROUNDS):
        folder.append([put(b"hot", b"%0100d" % turn) for turn in range(HOT)], pause=False)
        folder.append([put(b"%d %d" % (number, turn), bytes(100)) for turn in range(COLD)], pause=False)
        folder.commit(IDENTITY, number, b"{}", now_ms())
        folder.rewrite_if_due(pause=False)
        live = (number + 1) * COLD * 118
        most = max(most, sum(path.stat().st_size for path in folder.path.glob("data-*")) / max(live, 1 << 20))
    folder.close()
    assert most <= 2.5
    folder = StateFolder.find(tmp_path, 0)
    offset, state = contents(folder)
    folder.close()
    assert (offset, len(state), int(state[b"hot"])) == (ROUNDS - 1, ROUNDS * COLD + 1, HOT - 1)


@pytest.mark.parametrize("engine", [SQLite(), RocksDB()], ids=["SQLite", "RocksDB"])
def test_the_same_in_a_database(tmp_path: Path, engine: Any) -> None:
    rng, path = random.Random(1), tmp_path / "db"
    database = engine.open(str(path), memory_bytes=32 << 20, partitions=1)
    for number in range(ROUNDS):
        cold = [(b"%d %d" % (number, turn), rng.randbytes(100)) for turn in range(COLD)]
        database.write([(b"hot", b"%0100d" % number), *cold], b"%d" % number)
    assert int(database.get(b"hot")) == ROUNDS - 1
    database.close()
    size = sum(file.stat().st_size for file in path.iterdir())
    assert size <= 2.5 * ROUNDS * COLD * 110


WRITER = """
import sys
from pathlib import Path
from streams.runtime.keeping.folders import folder as folder_module
from tests.unit.kept_kit import Script
folder_module.LEAST_REWRITE = 600
Script(Path(sys.argv[1]), int(sys.argv[2])).run(rounds=100_000)
"""


def test_folders_are_read_beside_processes_that_are_killed(tmp_path: Path) -> None:
    """What ``kes state --folder`` shows is a checkpoint, each time."""
    seed = int(os.environ.get("SEED") or time.time_ns() % 1_000_000)
    print(f"SEED={seed}")
    for turn in range(10):
        parent, found = tmp_path / str(turn), []
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(parent), str(seed + turn)])
        until = time.monotonic() + 60
        try:
            while len(found) < 20 + 7 * turn:
                assert time.monotonic() < until, "it writes nothing"
                if (parent / "0" / "mark").exists():
                    found.append(state_in(parent))
        finally:
            process.kill()
            process.wait()
        found.append(state_in(parent))
        script = Script(tmp_path / f"{turn} again", seed + turn)
        script.run(rounds=found[-1][0] // 10 + 1)
        for offset, state in found:
            assert state == script.states[offset], f"not the state at {offset}"


def state_in(parent: Path) -> tuple[int, dict[bytes, bytes]]:
    mark, changes = read_state(parent, 0)
    last = {change.key: change.value for change in changes}
    return mark.offset, {key: value for key, value in last.items() if value is not None}


AT_THE_EDGES = {
    b"": b"an empty key",
    b"an empty value": b"",
    b"\0": b"\0",
    b"k" * 102_400: b"a key of 100 KiB",
    b"\xff": b"1",
    b"\xff\xff": b"2",
    b"\xff\xffkes": b"3",
    b"\xff\xffz": b"behind the toolkit's keys",
    b"a large value": bytes(range(256)) * 3_900,
}


@pytest.mark.parametrize("engine", [None, SQLite(), RocksDB()], ids=["files", "SQLite", "RocksDB"])
async def test_keys_and_values_at_the_edges(kept: Kept, engine: Any) -> None:
    bench, more = kept.bench, {} if engine is None else {"engine": engine}

    def put_all(ctx: EventContext[Any], event: Named) -> None:
        for key, value in AT_THE_EDGES.items():
            ctx.store.put(key, value)
        with pytest.raises(StoreError, match="reserved"):
            ctx.store.put(b"\xff\xffkes.offset", b"")
        if event.name == "without":
            for key in list(AT_THE_EDGES)[::2]:
                ctx.store.delete(key)

    state = StateConfig(folder=str(kept.folder), checkpoint_seconds=0.02)
    bench.make(put_all, store=Table.factory(key=bytes, value=bytes, **more), state=state)
    expected = AT_THE_EDGES
    for name in ("all", "without"):
        await bench.over(name)
        if name == "without":
            expected = dict(list(AT_THE_EDGES.items())[1::2])
        await kept.until_marked()
        await bench.stop()
        await bench.start()
        assert dict(kept.contents()) == expected
        assert kept.contents().keys() == expected.keys()
        await bench.stop()
