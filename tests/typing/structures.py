"""What the type checkers must see in ``Stores``. Checked by mypy and pyright, never run; see ``events_and_stores``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, assert_type

import msgspec

from streams import (
    EventContext,
    EventSource,
    EventSourceConfig,
    Heap,
    Index,
    JournalledStore,
    NamedTable,
    ObservingStore,
    Stores,
    TopicPartition,
    Window,
    Windows,
    event_type,
)


class Account(msgspec.Struct):
    owner: str
    cents: int = 0


@event_type
class Paid(msgspec.Struct):
    cents: int


def owner(account: Account) -> str:
    return account.owner


def add(cents: int | None, event: Paid) -> int:
    return (cents or 0) + event.cents


def report(ctx: EventContext[Any], key: str, window: Window, cents: int) -> None: ...


def aside(ctx: EventContext[Any], key: str, event: Paid, at_ms: int) -> None: ...


class Bank(Stores):
    accounts = NamedTable.of(
        str,
        Account,
        index={"owner": Index(str, owner), "cents": Index(int, lambda account: account.cents, unique=True)},
        expires=timedelta(days=7),
        version=2,
        upcast={1: lambda old: old | {"cents": 0}},
    )
    jobs = Heap.of(int, Account, priority=Index(int, lambda account: account.cents))
    sums = Windows.tumbling(str, int, size=60, add=add, on_close=report, late=aside)
    visits = Windows.session(str, int, gap=timedelta(minutes=5), add=add, merge=lambda one, two: one + two, late="fail")


def parts(bank: Bank) -> None:
    assert_type(bank.accounts, NamedTable[str, Account])
    assert_type(bank.accounts.get("a"), Account | None)
    assert_type(bank.accounts.by("owner", "ada"), Iterator[tuple[str, Account]])
    assert_type(bank.jobs, Heap[int, Account])
    assert_type(bank.jobs.pop_min(), tuple[int, Account] | None)
    assert_type(bank.sums, Windows[str, int, Paid])
    assert_type(bank.sums.add("a", Paid(1)), list[Window])
    assert_type(bank.visits.of("a"), Iterator[tuple[Window, int]])
    bank.accounts.put(1, Account("a"))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    bank.sums.add("a", 1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    journalled: JournalledStore = bank
    observing: ObservingStore = bank
    print(journalled, observing)


def sources(config: EventSourceConfig) -> None:
    assert_type(Bank.factory(), Callable[[TopicPartition], Bank])
    source = EventSource(config, store=Bank.factory())

    @source.register_event_type(Paid)
    def paid(ctx: EventContext[Bank], event: Paid) -> None:
        assert_type(ctx.store.sums, Windows[str, int, Paid])


def wrong() -> None:
    Index(str, owner, unique=1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    Windows.tumbling(str, str, size=60, add=add)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    Windows.tumbling(str, int, size=60, add=add, late="skip")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
