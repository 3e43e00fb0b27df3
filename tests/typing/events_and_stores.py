"""What the type checkers must see in events, codecs and stores. Checked by mypy and pyright, never run.

An ``ignore`` here is an assertion too: strict mypy reports it as soon as the mistake below it is no longer refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, assert_type

import msgspec

from streams import (
    EventContext,
    EventSource,
    EventSourceConfig,
    GlobalChangeLog,
    GroupConfig,
    Joined,
    Lookup,
    ReadTable,
    TimeoutConfig,
    View,
)
from streams.codecs import JsonCodec, MsgpackCodec, TupleCodec, bytes_codec, codec_for, int_codec, str_codec
from streams.events import EventType, event_type, event_type_of, upcaster
from streams.protocols import Codec, JournalledStore, StateStore, StateStoreFactory
from streams.records import Change, TopicPartition
from streams.stores import HashEngine, KeyValueEngine, OrderedEngine, OrderedKeyValueEngine, SimpleStore, Table

HERE = TopicPartition("t", 0)


class Account(msgspec.Struct):
    cents: int = 0


@event_type("Deposited", version=2)
class Deposited(msgspec.Struct, frozen=True):
    account: str
    cents: int


@event_type
@dataclass
class Bare:
    n: int


@event_type(codec=MsgpackCodec(Account))
class Packed(msgspec.Struct):
    pass


@upcaster(Deposited, from_version=1)
def step(old: dict[str, Any]) -> dict[str, Any]:
    return old


def events() -> None:
    assert_type(Deposited("a", 1), Deposited)
    assert_type(Bare(1), Bare)
    assert_type(step({}), dict[str, Any])
    assert_type(event_type_of(Deposited), EventType[Deposited])
    assert_type(event_type_of(Deposited).decode(b"", 2), Deposited)
    assert_type(event_type_of(Bare).encode(Bare(1)), bytes)
    Deposited("a", "1")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    event_type_of(Bare).encode(Deposited("a", 1))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

    @upcaster(Deposited, from_version=1)  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
    def wrong(old: int) -> str:
        return str(old)


def codecs() -> None:
    assert_type(codec_for(Account), Codec[Account])
    assert_type(codec_for(str).decode(b""), str)
    assert_type(JsonCodec(Account).decode(b""), Account)
    assert_type(JsonCodec(list[int]).decode(b""), list[int])
    text: Codec[str] = str_codec
    number: Codec[int] = int_codec
    raw: Codec[bytes] = bytes_codec
    pair: Codec[tuple[str, int]] = TupleCodec(str, int)
    packed: Codec[Account] = MsgpackCodec(Account)
    wrong: Codec[int] = str_codec  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    print(text, number, raw, pair, packed, wrong)


def tables() -> None:
    factory = Table.factory(key=str, value=Account)
    assert_type(factory, Callable[[TopicPartition], Table[str, Account]])
    to_the_source: StateStoreFactory = factory
    table = factory(HERE)
    assert_type(table, Table[str, Account])
    assert_type(table.get("a"), Account | None)
    assert_type(table.get("a", 0), Account | int)
    assert_type(table.get("a") or Account(), Account)
    assert_type(table.delete("a"), bool)
    assert_type(table.items(), Iterator[tuple[str, Account]])
    assert_type(table.keys(), Iterator[str])
    assert_type(table.values(), Iterator[Account])
    assert_type(table.range("a", "b", reverse=True), Iterator[tuple[str, Account]])
    assert_type(table.prefix("a"), Iterator[tuple[str, Account]])
    assert_type(table.first(), tuple[str, Account] | None)
    assert_type(Table.factory(key=tuple[str, int], value=list[int])(HERE), Table[tuple[str, int], list[int]])
    assert_type(Table.factory(key=int, value=int, ordered=True, key_codec=int_codec)(HERE), Table[int, int])
    table.put("a", Account())
    table.put(1, Account())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    table.put("a", None)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    table.put("a", 1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    table.get(None)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    print(to_the_source)


def read_tables(view: View[str, Account]) -> None:
    """Tables that their readers do not write: a ``put`` is refused before it runs."""
    rows = GlobalChangeLog("accounts").table(key=str, value=Account)
    rows.put("a", Account())  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    rows.delete("a")  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    rows.of_partition(0).put("a", Account())  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    with view.snapshot() as frozen:
        frozen.put("a", Account())  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    view.of_partition(0).put("a", Account())  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]

    def look(ctx: EventContext[Any], joined: Joined[str, Account], looked_up: Lookup[str, Account]) -> None:
        ctx.joined(joined).put("a", Account())  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
        ctx.lookup(looked_up).put("a", Account())  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]

    written = Table.factory(key=str, value=Account)(HERE)
    read: list[ReadTable[str, Account]] = [rows, rows.of_partition(0), frozen, written]
    state: StateStore = rows  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    print(look, read, state)


def viewed(source: EventSource[Table[str, Account]], other: EventSource[SimpleStore[Account]]) -> None:
    assert_type(View.of(source), View[str, Account])
    View.of(other)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def contracts(table: Table[str, Account], simple: SimpleStore[Account]) -> None:
    state: StateStore = table
    journalled: JournalledStore = table
    also: JournalledStore = simple
    wrong: JournalledStore = HashEngine()  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    engine: KeyValueEngine = HashEngine()
    ordered: OrderedKeyValueEngine = OrderedEngine()
    other: OrderedKeyValueEngine = HashEngine()  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    print(state, journalled, also, wrong, engine, ordered, other)


def simple_stores() -> None:
    def name_of(account: Account) -> str:
        return str(account.cents)

    store = SimpleStore.factory(Account, key=name_of)(HERE)
    assert_type(store, SimpleStore[Account])
    assert_type(SimpleStore.factory(Account, key=lambda account: str(account.cents))(HERE), SimpleStore[Account])
    assert_type(store.put(Account()), Change)
    assert_type(store.delete("a"), Change | None)
    assert_type(store.get("a"), Account | None)
    assert_type(list(store), list[Account])
    store.put("a")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


class MyEngine:
    """An engine of a user's own, with plain methods."""

    def get(self, key: bytes, /) -> bytes | None:
        return key

    def put(self, key: bytes, value: bytes, /) -> None: ...

    def delete(self, key: bytes, /) -> None: ...

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        yield b"", b""

    def clear(self) -> None: ...

    def __len__(self) -> int:
        return 0


own_engine: KeyValueEngine = MyEngine()


def settings_in_groups() -> None:
    config = EventSourceConfig(
        group_id="g",
        topic="t",
        num_partitions=1,
        timeouts=TimeoutConfig(call_timeout_seconds=3),
        group=GroupConfig(num_standbys=1),
    )
    assert_type(config.group.num_standbys, int)
    assert_type(config.timeouts.session_timeout_seconds, float)
    GroupConfig(num_standbys="1")  # type: ignore[arg-type]
    EventSourceConfig(group_id="g", topic="t", num_partitions=1, num_standbys=1)  # type: ignore[call-arg]
