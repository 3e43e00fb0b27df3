"""The smallest useful event source: accounts, and an output for every balance.

kes broker start
kes topics apply examples.bank:source
kes run examples.bank:source
"""

from __future__ import annotations

import msgspec

from streams import EventContext, EventSource, EventSourceConfig, Table, event_type


@event_type("Deposited")
class Deposited(msgspec.Struct, frozen=True):
    """Money came in (or went out, if negative)."""

    account: str
    cents: int


@event_type("Balance")
class Balance(msgspec.Struct, frozen=True):
    """What an account holds after an event."""

    account: str
    cents: int


class Account(msgspec.Struct):
    """State of one account."""

    cents: int = 0


source = EventSource(
    EventSourceConfig(group_id="bank", topic="bank-events", num_partitions=10),
    store=Table.factory(key=str, value=Account),
)
Context = EventContext[Table[str, Account]]
balances = source.output("bank-balances")


@source.on
def on_deposited(ctx: Context, event: Deposited) -> None:
    account = ctx.store.get(event.account) or Account()
    account.cents += event.cents
    ctx.store.put(event.account, account)
    ctx.forward(balances, Balance(event.account, account.cents), key=event.account)


@source.schedule_interjection(every=10.0, jitter=1.0)
def report(ctx: Context) -> None:
    total = sum(account.cents for _, account in ctx.store.items())
    print(f"{ctx.topic_partition}: {total / 100:.2f} in all accounts")


if __name__ == "__main__":
    source.run()
