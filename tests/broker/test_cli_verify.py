"""``kes verify``: a source that keeps the promise passes, one that goes around it is caught."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from streams.testing.fixtures import BrokerAddress

pytestmark = [pytest.mark.broker, pytest.mark.timeout(280)]

SHOP = """
import msgspec
from confluent_kafka import Producer

from streams import EventSource, EventSourceConfig, PoolConfig, Table, event_type


@event_type("Sold")
class Sold(msgspec.Struct, frozen=True):
    item: str
    count: int


def make(**pool):
    config = EventSourceConfig(group_id="shop", topic="sales", num_partitions=4, pool=PoolConfig(**pool))
    return EventSource(config, Table.factory(key=str, value=int))


source = make()
beside = make(batch_delay_seconds=0.5, target_batch_size=10_000)  # whenever it is killed, something is not committed
side = None


@source.register_event_type(Sold)
def sold(ctx, event):
    count = ctx.store.get(event.item, 0) + event.count
    ctx.store.put(event.item, count)
    ctx.forward("stock", Sold(event.item, count), key=event.item)


@beside.register_event_type(Sold)
def sold_beside(ctx, event):
    global side
    if side is None:
        side = Producer({"bootstrap.servers": beside.config.bootstrap_servers})
    count = ctx.store.get(event.item, 0) + event.count
    ctx.store.put(event.item, count)
    side.produce("stock", str(count).encode(), event.item.encode())
    side.poll(0)


def sales():
    for number in range(6000):
        yield f"item-{number % 40}", Sold(f"item-{number % 40}", number % 7 + 1)
"""


def verify(folder: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    (folder / "shop.py").write_text(SHOP)
    ended = subprocess.run(
        [sys.executable, "-m", "streams", "verify", *arguments, "--json"],
        cwd=folder,
        env={**os.environ, "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    print(ended.stderr)
    return ended.returncode, json.loads(ended.stdout) if ended.stdout else {}, ended.stderr


def test_kept_under_kills_and_a_freeze(tmp_path: Path) -> None:
    code, verdict, _ = verify(tmp_path, "shop:source", "--events", "shop:sales", "--kills", "2", "--freezes", "1")
    assert verdict["differences"] == []
    assert (code, verdict["records"], verdict["outputs"], verdict["keys"]) == (0, 6000, 6000, 40)


def test_outputs_beside_the_transaction_are_caught(tmp_path: Path) -> None:
    code, verdict, _ = verify(tmp_path, "shop:beside", "--events", "shop:sales", "--kills", "3", "--freezes", "0")
    assert code == 1
    assert any("stock, key" in text for text in verdict["differences"])


def test_no_input_is_told(kafka_broker: BrokerAddress, tmp_path: Path) -> None:
    servers = kafka_broker.bootstrap_servers
    code, _, said = verify(tmp_path, "shop:source", "--bootstrap-servers", servers)
    assert code == 1
    assert "does not exist" in said
    assert "Traceback" not in said
    code, _, said = verify(tmp_path, "shop:source", "--events", "shop:nothing")
    assert code == 1
    assert "name a function" in said
