"""State that begins with what a database knows: its row is read when a key is seen for the first time.

kes topics apply examples.async_work.seed_from_database:source
OLD_BANK=bank.sqlite kes run examples.async_work.seed_from_database:source
"""

from __future__ import annotations

import contextlib
import os
import sqlite3

import msgspec

from streams import AsyncJobScheduler, EventContext, EventSource, EventSourceConfig, Table, event_type
from streams.settings import SLOW_NETWORK

BALANCES = "balances"
DATABASE = os.environ.get("OLD_BANK", "bank.sqlite")


@event_type("MoneyMoved")
class MoneyMoved(msgspec.Struct, frozen=True):
    """The input. Its record's key is the account."""

    account: str
    cents: int


@event_type("AccountBalance")
class AccountBalance(msgspec.Struct, frozen=True):
    """What an account holds after an event."""

    account: str
    cents: int


source = EventSource(
    EventSourceConfig(group_id="new-bank", topic="money-moved", num_partitions=4),
    store=Table.factory(key=str, value=int),
)
source.output(BALANCES)
Context = EventContext[Table[str, int]]

seeded: set[str] = set()
"""Accounts that this process has met in a store. It spares reads, and nothing depends on it."""


def opening_balance(event: MoneyMoved) -> int | None:
    """The job, on a thread: reads ahead, while earlier events are still on their way."""
    return None if event.account in seeded else balance_in_database(event.account)


def balance_in_database(account: str) -> int:
    with contextlib.closing(sqlite3.connect(f"file:{DATABASE}?mode=ro", uri=True)) as database:
        row = database.execute("SELECT cents FROM accounts WHERE account = ?", (account,)).fetchone()
    return 0 if row is None else int(row[0])


def move(ctx: Context, event: MoneyMoved, opening: int | None) -> None:
    """The finalizer: the store is right; what was read counts only where the store has nothing."""
    balance = ctx.store.get(event.account, opening)
    if balance is None:  # it was in the store once, but that was never committed
        balance = balance_in_database(event.account)
    ctx.store.put(event.account, balance + event.cents)
    ctx.forward(BALANCES, AccountBalance(event.account, balance + event.cents), key=event.account)
    seeded.add(event.account)


openings = AsyncJobScheduler(source, opening_balance, move, config=SLOW_NETWORK)
openings.register_event_type(MoneyMoved, key=lambda event: event.account)

if __name__ == "__main__":
    source.run()
