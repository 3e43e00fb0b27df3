"""The examples that work with databases, on a real broker: workers are killed under load, rows are counted."""

from __future__ import annotations

import contextlib
import random
import sqlite3
from collections import defaultdict
from pathlib import Path

import pytest

from examples.async_work import seed_from_database
from examples.async_work.seed_from_database import AccountBalance, MoneyMoved
from tests.broker.battery_kit import seed_of
from tests.broker.examples_kit import Make, example

__all__ = ["example"]  # a fixture

pytestmark = [pytest.mark.broker, pytest.mark.timeout(180)]


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
