"""``kes verify``: a source that keeps the promise passes, one that goes around it is caught."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from streams.testing.fixtures import BrokerAddress

pytestmark = [pytest.mark.broker, pytest.mark.timeout(280)]

SHOP = """
import msgspec
from confluent_kafka import Producer

from streams import (
    PARK, EventSource, EventSourceConfig, ParkingConfig, PoolConfig, Record, Table, event_type
)
from streams.codecs import codec_for


@event_type("Sold")
class Sold(msgspec.Struct, frozen=True):
    item: str
    count: int


def make(**pool):
    pace = ParkingConfig(first_retry_seconds=0.2, max_retry_seconds=1.0)
    config = EventSourceConfig(
        group_id="shop", topic="sales", num_partitions=4, pool=PoolConfig(**pool), parking=pace
    )
    return EventSource(config, Table.factory(key=str, value=int))


source = make()
source.output("stock")
joined = make()
joined.output("stock")
prices = joined.join("prices", key=str, value=int)
taxes = joined.lookup("taxes", key=str, value=int)
parking = make()
parking.output("stock")
beside = make(batch_delay_seconds=0.5, target_batch_size=10_000)  # whenever it is killed, something is not committed
side = None


@source.register_event_type(Sold)
def sold(ctx, event):
    count = ctx.store.get(event.item, 0) + event.count
    ctx.store.put(event.item, count)
    ctx.forward("stock", Sold(event.item, count), key=event.item)
    ctx.schedule_in(3600.0, Sold(event.item, 0), name=event.item)


@parking.register_event_type(Sold, on_error=PARK)
def sold_or_parked(ctx, event):
    # Some fail once, and one key for ever, from an event on.
    count = ctx.store.get(event.item, 0) + event.count
    ctx.store.put(event.item, count)
    if ctx.offset % 50 == 0 and ctx.attempt == 1 or event.item == "item-7" and count > 100:
        raise ValueError("no stock")
    ctx.forward("stock", Sold(event.item, count), key=event.item)


@joined.register_event_type(Sold)
def sold_joined(ctx, event):
    total = ctx.store.get(event.item, 0) + event.count * ctx.joined(prices).get(event.item, 0)
    ctx.store.put(event.item, total)
    ctx.forward("stock", Sold(event.item, total + ctx.lookup(taxes).get("tax", 0)), key=event.item)


@joined.register_update(prices)
def priced(ctx, row):
    ctx.forward("stock", Sold(row.key, -row.new), key=row.key)


@beside.register_event_type(Sold)
def sold_beside(ctx, event):
    global side
    if side is None:
        side = Producer({"bootstrap.servers": beside.config.bootstrap_servers})
    count = ctx.store.get(event.item, 0) + event.count
    ctx.store.put(event.item, count)
    side.produce("stock", str(count).encode(), event.item.encode())
    side.poll(0)


def sales_with_rows():
    for price in (1, 2):
        yield from (Record("prices", codec_for(int).encode(price), b"item-%d" % number) for number in range(40))
    yield Record("taxes", codec_for(int).encode(7), b"tax", partition=2)
    yield from sales()


def sales():
    for number in range(6000):
        yield f"item-{number % 40}", Sold(f"item-{number % 40}", number % 7 + 1)
"""


def command(folder: Path, *arguments: str) -> list[str]:
    (folder / "shop.py").write_text(SHOP)
    (folder / "tmp").mkdir(exist_ok=True)
    return [sys.executable, "-m", "streams", "verify", *arguments, "--json"]


def surroundings(folder: Path) -> dict[str, Any]:
    environment = {**os.environ, "COLUMNS": "160", "TMPDIR": str(folder / "tmp")}
    return {"cwd": folder, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


def left_by(folder: Path) -> list[Path]:
    return list((folder / "tmp").glob("kes-verify-*"))


def verify(folder: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    ended = subprocess.run(command(folder, *arguments), timeout=250, **surroundings(folder))
    print(ended.stderr)
    return ended.returncode, json.loads(ended.stdout) if ended.stdout else {}, ended.stderr


@pytest.mark.nightly
def test_parked_events_are_worked_off_before_both_runs_are_compared(tmp_path: Path) -> None:
    """Those that wait at the end are the same ones in both."""
    code, verdict, _ = verify(tmp_path, "shop:parking", "--events", "shop:sales", "--kills", "2", "--freezes", "0")
    assert (code, verdict["differences"], verdict["timers"]) == (0, [], 0)
    assert 5_000 < verdict["outputs"] < 6_000
    assert left_by(tmp_path) == []


@pytest.mark.nightly
def test_kept_under_kills_and_a_freeze(tmp_path: Path) -> None:
    code, verdict, _ = verify(tmp_path, "shop:source", "--events", "shop:sales", "--kills", "2", "--freezes", "1")
    assert verdict["differences"] == []
    assert (code, verdict["records"], verdict["outputs"], verdict["keys"]) == (0, 6000, 6000, 40)
    assert verdict["timers"] == 40
    assert left_by(tmp_path) == []


@pytest.mark.slow
def test_outputs_beside_the_transaction_are_caught(tmp_path: Path) -> None:
    code, verdict, _ = verify(tmp_path, "shop:beside", "--events", "shop:sales", "--kills", "3", "--freezes", "0")
    assert code == 1
    assert any("stock, key" in text for text in verdict["differences"])
    assert [str(folder) for folder in left_by(tmp_path)] == [verdict["logs"]]
    assert {log.name for log in left_by(tmp_path)[0].iterdir()} >= {"undisturbed.log", "worker-0.log"}


@pytest.mark.nightly
def test_joined_tables_and_lookups_have_their_rows_before_the_first_event(tmp_path: Path) -> None:
    code, verdict, said = verify(tmp_path, "shop:joined", "--events", "shop:sales_with_rows", "--kills", "2")
    assert verdict["differences"] == []
    assert (code, verdict["records"], verdict["outputs"], verdict["keys"]) == (0, 6000, 6080, 40)
    assert "prices: 80 records of rows" in said
    assert "taxes: 1 records of rows" in said


@pytest.mark.nightly
def test_sigterm_leaves_nothing_behind(tmp_path: Path) -> None:
    trial = subprocess.Popen(command(tmp_path, "shop:source", "--events", "shop:sales"), **surroundings(tmp_path))
    deadline = time.monotonic() + 60
    while not any(folder.glob("undisturbed.log") for folder in left_by(tmp_path)):
        assert time.monotonic() < deadline
        assert trial.poll() is None
        time.sleep(0.05)
    trial.terminate()
    out, said = trial.communicate(timeout=60)
    assert (trial.returncode, out, left_by(tmp_path)) == (143, "", []), said


def test_no_input_is_told(kafka_broker: BrokerAddress, tmp_path: Path) -> None:
    servers = kafka_broker.bootstrap_servers
    code, _, said = verify(tmp_path, "shop:source", "--bootstrap-servers", servers)
    assert code == 1
    assert "does not exist" in said
    assert "Traceback" not in said
