"""A member with 400 partitions whose state is on disk, under a low ``ulimit -n``: it works, or names the limit."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from tests.broker.engine_kit import Lab

pytestmark = [pytest.mark.broker, pytest.mark.nightly, pytest.mark.timeout(300)]

PARTITIONS = 400
MEMBER = """
import asyncio, logging, os, resource, sys
from streams import EventContext, EventSource, EventSourceConfig, StateConfig, Table
from streams.disk import RocksDB, SQLite
from tests.vocabulary import Added

logging.basicConfig(level=logging.WARNING)
bootstrap, group, topic, folder, kind, limit, events = *sys.argv[1:6], int(sys.argv[6]), int(sys.argv[7])
engine = {"files": None, "SQLite": SQLite, "RocksDB": RocksDB}[kind]
state = StateConfig(folder=folder, checkpoint_seconds=0.5)
config = EventSourceConfig(
    group_id=group, topic=topic, num_partitions=400, bootstrap_servers=bootstrap, state=state,
)
source = EventSource(config, Table.factory(key=str, value=int, **({"engine": engine()} if engine else {})))

@source.on
def count(ctx: EventContext, event: Added) -> None:
    ctx.store.put(event.name, ctx.store.get(event.name, 0) + 1)

async def main():
    running, found = asyncio.create_task(source.consume_events()), None
    while not running.done():
        found = source.statistics()
        folders = found.folders
        if found.committed_events >= events and folders and all(
            folder.state == "kept" and folder.offset >= 0 and not folder.unwritten_bytes for folder in folders
        ):
            print(len(folders), len(os.listdir("/dev/fd")))
            await source.stop()
        await asyncio.wait([running], timeout=0.2)
    await running

resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("kind", "limit", "most_kept"),
    [
        ("files", 256, 200),
        ("files", 1024, 400),
        ("SQLite", 1024, 0),
        ("SQLite", 4096, 400),
        ("RocksDB", 1024, 0),
        ("RocksDB", 4096, 400),
    ],
)
async def test_four_hundred_partitions(lab: Lab, tmp_path: Path, kind: str, limit: int, most_kept: int) -> None:
    """In memory they work, and as many are kept as files allow; on an engine the source stops and names the limit. The
    second time it goes on from what the first one has left."""
    await lab.create(lab.topic)
    for events in (PARTITIONS, 1):
        for number in range(events):
            await lab.send(b'{"name": "%d"}' % number, b"%d" % number, partition=number)
        await lab.flush()
        words = [lab.bootstrap, lab.group, lab.topic, str(tmp_path / "state"), kind, str(limit), str(events)]
        command = [sys.executable, "-c", MEMBER, *words]
        found = await asyncio.to_thread(subprocess.run, command, check=False, capture_output=True, text=True)
        assert not list(tmp_path.rglob("*.aside")), found.stderr
        if not most_kept:
            assert found.returncode == 1, found.stderr
            last = found.stderr.strip().splitlines()[-1]
            assert last.startswith("streams.errors.StreamsError"), last
            assert f"may open {limit} (ulimit -n)" in last
            continue
        assert found.returncode == 0, found.stderr
        kept, files = map(int, found.stdout.split())
        assert files < limit - 50, "connections to brokers need some, too"
        if most_kept == PARTITIONS:
            assert kept == PARTITIONS
            assert "ulimit" not in found.stderr
        else:
            assert 100 < kept < most_kept
            assert f"may open {limit} (ulimit -n)" in found.stderr
