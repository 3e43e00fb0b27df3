"""``kes transactions`` without a broker: what is shown, what is asked first, and what is said without an answer."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streams.cli import transactions
from streams.errors import OffsetError
from streams.group import OpenTransaction
from tests.unit.cli_kit import Kes

SHOP = "shop_of_transactions:source"
SOURCE = """
from streams import EventSource, EventSourceConfig

config = EventSourceConfig(group_id="shop", topic="orders", num_partitions=2, bootstrap_servers="127.0.0.1:1")
source = EventSource(config)
"""
HANGING = OpenTransaction(
    topic="shop.orders.changelog",
    partition=1,
    producer_id=7,
    producer_epoch=3,
    coordinator_epoch=0,
    start_offset=40,
    last_timestamp_ms=1_000,
)
KNOWN = OpenTransaction(
    topic="shop.orders.changelog",
    partition=0,
    producer_id=8,
    producer_epoch=0,
    coordinator_epoch=0,
    start_offset=5,
    last_timestamp_ms=1_000,
    transactional_id="shop.a.kes~0",
    state="Ongoing",
)
PLACE = ("--topic", HANGING.topic, "--partition", "1", "--start-offset", "40")


class Questions:
    def __init__(self) -> None:
        self.aborted: list[tuple[str, int, int]] = []
        self.refusal: Exception | None = None

    def find(self, topic: str, partitions: Collection[int], deadline: float) -> list[OpenTransaction]:
        return [txn for txn in (KNOWN, HANGING) if txn.topic == topic and txn.partition in partitions]

    def abort(
        self, topic: str, partition: int, start_offset: int, deadline: float, *, min_age_seconds: float
    ) -> OpenTransaction:
        if self.refusal is not None:
            raise self.refusal
        self.aborted.append((topic, partition, start_offset))
        return HANGING


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Questions:
    (tmp_path / "shop_of_transactions.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    made = Questions()

    @contextmanager
    def questions(servers: str, config: Any) -> Iterator[Questions]:
        yield made

    @contextmanager
    def admin(servers: str, config: Any, timeout: float) -> Iterator[Any]:
        known = SimpleNamespace(partitions=2)
        yield SimpleNamespace(describe=lambda names, _: {name: None if name == "nowhere" else known for name in names})

    monkeypatch.setattr(transactions, "_questions", questions)
    monkeypatch.setattr(transactions, "admin_of", admin)
    monkeypatch.setattr(transactions, "await_listener", lambda servers, timeout: None)
    return made


def test_what_is_open_and_what_hangs(kes: Kes, asked: Questions) -> None:
    found = kes("transactions", "list", SHOP, "--json").data["transactions"]
    assert [(entry["partition"], entry["hanging"]) for entry in found] == [(0, False), (1, True)]
    told = kes("transactions", "hanging", SHOP)
    assert "none" in told.out
    assert "kes~0" not in told.out
    assert f"kes transactions abort shop_of_transactions:source {' '.join(PLACE)}" in told.err
    assert "no hanging transactions" in kes("transactions", "hanging", SHOP, "--topic", "other").out


def test_nothing_is_ended_unasked(kes: Kes, asked: Questions, monkeypatch: pytest.MonkeyPatch) -> None:
    for answer in ("", "n\n"):  # nobody is there to answer, or says no
        monkeypatch.setattr("sys.stdin", io.StringIO(answer))
        kes("transactions", "abort", SHOP, *PLACE, code=1)
    assert asked.aborted == []
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    kes("transactions", "abort", SHOP, *PLACE)
    asked.aborted.clear()
    assert "ended: shop.orders.changelog[1]" in kes("transactions", "abort", SHOP, *PLACE, "--yes").out
    assert asked.aborted == [(HANGING.topic, 1, 40)]
    assert kes("transactions", "abort", SHOP, *PLACE, "--yes", "--json").data["aborted"]["producer_id"] == 7


def test_problems_are_one_line(kes: Kes, asked: Questions) -> None:
    asked.refusal = OffsetError("shop.orders.changelog[1]: the transaction at offset 40 is not hanging")
    said = kes("transactions", "abort", SHOP, *PLACE, "--yes", code=1)
    assert "kes: offset error: shop.orders.changelog[1]" in said.err
    assert "topic nowhere does not exist" in kes("transactions", "list", SHOP, "--topic", "nowhere", code=1).err
    kes("transactions", "abort", SHOP, "--topic", "t", code=2)
