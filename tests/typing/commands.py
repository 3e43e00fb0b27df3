"""What the type checkers must see in commands. Checked by mypy and pyright, never run.

An ``ignore`` here is an assertion too: strict mypy reports it as soon as the mistake below it is no longer refused.
"""

from __future__ import annotations

from typing import assert_type

import msgspec

from streams import EventContext, EventSource, EventSourceConfig, Table, event_type
from streams.queries import CommandClient, CommandDone
from streams.source import AggregateRules
from streams.stores import Aggregate, Versioned


@event_type
class Withdraw(msgspec.Struct, frozen=True):
    cents: int


@event_type
class Withdrawn(msgspec.Struct, frozen=True):
    cents: int


class Account(msgspec.Struct, frozen=True):
    cents: int = 0


source = EventSource(
    EventSourceConfig(group_id="g", topic="t", num_partitions=1), store=Aggregate.factory(key=str, state=Account)
)
accounts = source.aggregate(Account(), events="events")
assert_type(source, EventSource[Table[str, Versioned[Account]]])
assert_type(accounts, AggregateRules[Account])


@accounts.decide
def withdraw(account: Account, command: Withdraw) -> list[Withdrawn]:
    return [Withdrawn(command.cents)]


@accounts.decide  # type: ignore[arg-type]
def of_another_state(account: int, command: Withdraw) -> list[Withdrawn]:
    return []


@accounts.evolve
def withdrawn(account: Account, event: Withdrawn) -> Account:
    return Account(account.cents - event.cents)


@accounts.evolve  # type: ignore[arg-type]
def without_a_state(account: Account, event: Withdrawn) -> None: ...


def on_withdrawn(ctx: EventContext[Table[str, Versioned[Account]]], event: Withdrawn) -> None:
    assert_type(accounts.apply(ctx, "ada", [event]), Versioned[Account])


async def ask() -> None:
    async with CommandClient.of(source) as client:
        assert_type(client, CommandClient[str, Account])
        assert_type(await client.ask(Withdraw(1), key="ada", id="1"), CommandDone)
        assert_type((await client.get("ada")).value, Versioned[Account] | None)
        await client.ask(Withdraw(1), key=1, id="1")  # type: ignore[arg-type]
        await client.ask(Withdraw(1), key="ada")  # type: ignore[call-arg]


plain = EventSource(
    EventSourceConfig(group_id="g", topic="t", num_partitions=1), store=Table.factory(key=str, value=Account)
)
plain.aggregate(Account(), events="events")  # type: ignore[misc, arg-type]
