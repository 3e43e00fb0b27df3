"""Examples that work with a database, on a real broker: workers are killed, outcomes counted.

The others run in virtual time, with crashes at each point: ``tests/unit/test_examples_driven.py``.
"""

from __future__ import annotations

import contextlib
import random
import signal
import sqlite3
from collections import Counter, defaultdict
from pathlib import Path

import psycopg
import pytest

from examples.async_work import write_behind_fence, write_by_key
from examples.async_work.write_behind_fence import StockMoved
from examples.async_work.write_by_key import OrderChanged
from tests.broker.examples_kit import Make, example
from tests.broker.outbox_kit import PostgresServer

__all__ = ["example"]  # a fixture

pytestmark = [pytest.mark.broker, pytest.mark.timeout(480)]


def test_rows_that_are_written_by_key(example: Make, tmp_path: Path, seed: int) -> None:
    database = tmp_path / "orders.sqlite"
    with contextlib.closing(sqlite3.connect(database)) as connection, connection:
        connection.execute(write_by_key.TABLE)
        connection.execute("CREATE TABLE history (id TEXT, status TEXT)")  # every change of a row, as it happens
        for verb in ("INSERT", "UPDATE"):
            connection.execute(
                f"CREATE TRIGGER after_{verb} AFTER {verb} ON orders "
                "BEGIN INSERT INTO history VALUES (new.id, new.status); END"
            )
    orders = example(write_by_key, ORDERS=str(database))
    rng = random.Random(seed)
    changes = [OrderChanged(f"order-{rng.randrange(300)}", f"status {number}", number) for number in range(6_000)]
    with orders.run(tmp_path) as workers:
        sent = 0
        for until in (2_000, 4_000, 6_000):
            orders.send((change.order, change) for change in changes[sent:until])
            orders.until_handled(sent + 200, workers)
            workers.signal(rng.randrange(2))
            sent = until
        orders.until_handled(len(changes), workers)
    expected: dict[str, list[str]] = defaultdict(list)
    for change in changes:
        expected[change.order].append(change.status)
    found: dict[str, list[str]] = defaultdict(list)
    with contextlib.closing(sqlite3.connect(database)) as connection:
        for order, status in connection.execute("SELECT id, status FROM history ORDER BY rowid"):
            found[order].append(status)
        rows = dict(connection.execute("SELECT id, status FROM orders"))
    assert found == expected, "each event has changed its row once, in order"
    assert rows == {order: statuses[-1] for order, statuses in expected.items()}


@pytest.mark.nightly
def test_changes_behind_a_fence(example: Make, postgres: PostgresServer, tmp_path: Path, seed: int) -> None:
    database = postgres.make_database()
    stock = example(write_behind_fence, STOCK=database)
    rng = random.Random(seed)
    moves = [
        StockMoved(f"shop-{rng.randrange(50)}", f"product-{rng.randrange(20)}", rng.randrange(-50, 100))
        for _ in range(8_000)
    ]
    with stock.run(tmp_path) as workers:
        sent = 0
        for until, worker, what in ((2_000, 1, signal.SIGKILL), (4_000, 1, signal.SIGKILL), (6_000, 0, signal.SIGSTOP)):
            stock.send((move.shop, move) for move in moves[sent:until])
            stock.until_handled(sent + 200, workers)
            workers.signal(worker, what)
            sent = until
        stock.until_handled(sent, workers)  # by the other worker, which has taken over what the frozen one had
        workers.signal(0, signal.SIGCONT)
        stock.send((move.shop, move) for move in moves[sent:])
        stock.until_handled(len(moves), workers)
    expected: Counter[str] = Counter()
    for move in moves:
        expected[move.product] += move.count
    with psycopg.connect(database) as connection:
        counts = dict(connection.execute("SELECT product, count FROM stock").fetchall())
        fences = connection.execute("SELECT sum(next_offset) FROM kes_inbox").fetchone()
    assert counts == expected, "each event has changed its count once"
    assert fences == (len(moves),)
