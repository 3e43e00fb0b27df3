"""The example of a fence in virtual time: members crash and freeze, transactions fail before and after their commit.

With a real PostgreSQL: tests/broker/test_examples_databases.py.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections import Counter
from collections.abc import Sequence
from typing import Any, Self

import psycopg
import pytest

from examples.async_work import write_behind_fence
from examples.async_work.write_behind_fence import StockMoved
from streams.testing import TestDriver


class Database:
    """What the example needs of PostgreSQL, over SQLite: transactions, one after the other, that fail at times."""

    def __init__(self, seed: int) -> None:
        self.sqlite = sqlite3.connect(":memory:", isolation_level=None)
        self.sqlite.executescript(write_behind_fence.TABLES.partition("\n")[2].partition("\n")[2])
        self.random = random.Random(seed)
        self.lock = asyncio.Lock()
        self.done_but_failed = 0

    async def connect(self, *_: object, **__: object) -> Transaction:
        return Transaction(self)

    async def takes_time(self) -> None:
        await asyncio.sleep(self.random.random() / 5)


class Transaction:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._may_fail = False

    async def __aenter__(self) -> Self:
        await self._database.lock.acquire()
        self._database.sqlite.execute("BEGIN")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        database = self._database
        luck = database.random.random() if self._may_fail else 1.0
        database.sqlite.execute("ROLLBACK" if kind is not None or luck < 0.2 else "COMMIT")
        database.lock.release()
        if kind is None:
            await database.takes_time()
            if luck < 0.5:
                database.done_but_failed += luck >= 0.2
                raise psycopg.OperationalError("the connection is lost")

    async def execute(self, sql: str, arguments: Sequence[Any] = ()) -> Answer:
        await self._database.takes_time()
        if sql is write_behind_fence.TABLES:
            return Answer(None)
        self._may_fail = True
        if sql is write_behind_fence.CHANGE:  # SQLite has no unnest
            sql = "INSERT INTO stock VALUES (?, ?) ON CONFLICT DO UPDATE SET count = stock.count + excluded.count"
            self._database.sqlite.executemany(sql, zip(*arguments, strict=True))
            return Answer(None)
        return Answer(self._database.sqlite.execute(sql.replace("%s", "?"), arguments).fetchone())


class Answer:
    def __init__(self, row: tuple[Any, ...] | None) -> None:
        self._row = row

    async def fetchone(self) -> tuple[Any, ...] | None:
        return self._row


@pytest.mark.parametrize("seed", range(12))
def test_each_event_changes_its_count_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    database = Database(seed)
    monkeypatch.setattr(psycopg.AsyncConnection, "connect", database.connect)
    moves = [StockMoved(f"shop-{number % 11}", f"product-{number % 3}", number) for number in range(400)]
    with TestDriver(write_behind_fence.source, members=2, seed=seed) as driver:
        for first in range(0, len(moves), 100):
            for number, move in enumerate(moves[first : first + 100]):
                driver.send(move, key=move.shop, wait=False)
                if number % 5 == 0:
                    driver.advance(rng.random() / 5)
            victim = rng.choice(driver.members)
            if rng.random() < 0.5:
                driver.crash(victim)
                driver.advance(rng.random() * 12)
                driver.restart(victim)
            else:
                driver.freeze(victim, 12.0)
                driver.advance(rng.random() * 20)
        driver.settle()
        driver.check()
    expected = Counter[str]()
    for move in moves:
        expected[move.product] += move.count
    assert dict(database.sqlite.execute("SELECT product, count FROM stock")) == expected
    assert database.done_but_failed, "a transaction was done and reported as failed"
    database.sqlite.close()
