"""Accounts that take commands: no money goes out that is not there, each command counts once, its caller has an answer.

kes broker start
kes topics apply examples.accounts:source
(umask 077; head -c 32 /dev/urandom | base64 > secret)
KES_QUERIES_SECRET_FILE=secret kes run examples.accounts:source --queries 127.0.0.1:9200

``accounts_service.py`` is a web service for them.
"""

from __future__ import annotations

from datetime import timedelta

import msgspec

from streams import EventSource, EventSourceConfig, event_type
from streams.errors import Rejected
from streams.stores import Aggregate


@event_type("accounts.Deposit")
class Deposit(msgspec.Struct, frozen=True):
    """A command: take money in."""

    cents: int


@event_type("accounts.Withdraw")
class Withdraw(msgspec.Struct, frozen=True):
    """A command: give money out."""

    cents: int


@event_type("accounts.Deposited")
class Deposited(msgspec.Struct, frozen=True):
    """Money came in."""

    cents: int


@event_type("accounts.Withdrawn")
class Withdrawn(msgspec.Struct, frozen=True):
    """Money went out."""

    cents: int


class Account(msgspec.Struct, frozen=True):
    """State of one account."""

    cents: int = 0


source = EventSource(
    EventSourceConfig(group_id="accounts", topic="account-commands", num_partitions=4),
    store=Aggregate.factory(key=str, state=Account),
)
accounts = source.aggregate(Account(), events=source.output("account-events"), remember=timedelta(days=1))


@accounts.decide
def deposit(account: Account, command: Deposit) -> list[Deposited]:
    if command.cents <= 0:
        raise Rejected("not a sum of money")
    return [Deposited(command.cents)]


@accounts.decide
def withdraw(account: Account, command: Withdraw) -> list[Withdrawn]:
    if account.cents < command.cents:
        raise Rejected("not enough money", {"cents": account.cents})
    return [Withdrawn(command.cents)]


@accounts.evolve
def deposited(account: Account, event: Deposited) -> Account:
    return Account(account.cents + event.cents)


@accounts.evolve
def withdrawn(account: Account, event: Withdrawn) -> Account:
    return Account(account.cents - event.cents)


if __name__ == "__main__":
    source.run()
