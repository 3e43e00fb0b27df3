from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from streams.codecs import RESERVED_KEY_PREFIX, JsonCodec, int64_codec
from streams.errors import ConfigError, DecodeError, EncodeError, StoreError
from streams.records import Change, TopicPartition
from streams.stores import SimpleStore, Table
from streams.stores.engines import after_prefix
from streams.stores.journalled import JournalledBytes

HERE = TopicPartition("bank", 3)


class Account(msgspec.Struct):
    name: str = ""
    cents: int = 0


@contextmanager
def event(store: JournalledBytes) -> Iterator[list[Change]]:
    journal: list[Change] = []
    store.begin(journal)
    try:
        yield journal
    finally:
        store.end()


def hash_table() -> Table[str, Account]:
    return Table.factory(key=str, value=Account)(HERE)


def ordered_table() -> Table[str, Account]:
    return Table.factory(key=str, value=Account, ordered=True)(HERE)


def simple_store() -> SimpleStore[Account]:
    return SimpleStore.factory(Account, key=lambda account: account.name)(HERE)


tables = pytest.mark.parametrize("make", [hash_table, ordered_table])
stores = pytest.mark.parametrize("make", [hash_table, ordered_table, simple_store])


@tables
def test_reading_and_writing(make: Callable[[], Table[str, Account]]) -> None:
    """Nobody holds a reference into the store."""
    table, account = make(), Account("a", 1)
    with event(table) as journal:
        table.put("a", account)
        account.cents = 99
        table.put("a", Account("a", 2))
        assert table.delete("a")
        assert not table.delete("a")
        table.put("b", Account("b"))
    one, two, nothing = b'{"name":"a","cents":1}', b'{"name":"a","cents":2}', b'{"name":"b","cents":0}'
    steps = ((b"a", one, None), (b"a", two, one), (b"a", None, two), (b"b", nothing, None))
    assert journal == [Change(*step) for step in steps]
    assert [table.get("a"), table.get("a", 7), table.get("b", 7)] == [None, 7, Account("b")]
    assert ("a" in table, "b" in table, len(table)) == (False, True, 1)
    assert list(table.items()) == [("b", Account("b"))] == list(zip(table.keys(), table.values(), strict=True))
    assert list(table.dump()) == [(b"b", nothing)]
    read = table.get("b")
    assert read is not None
    read.cents = 98
    assert table.get("b") == Account("b")


@stores
def test_writes_outside_of_an_event_are_refused(make: Callable[[], Any]) -> None:
    store = make()
    put = (lambda: store.put(Account("a"))) if isinstance(store, SimpleStore) else (lambda: store.put("a", Account()))
    for _ in range(2):
        with pytest.raises(StoreError, match=r"bank\[3\] was written to outside of an event"):
            put()
        with pytest.raises(StoreError, match="outside of an event"):
            store.delete("a")
        with event(store):
            put()
    with event(store), pytest.raises(StoreError, match="in an event already"):
        store.begin([])


@stores
def test_a_revoked_store_refuses_everything(make: Callable[[], Any]) -> None:
    store = make()
    for number in range(100):
        store.receive_change(Change(b"%d" % number, b'{"name":"x"}'))
    scans = [iter(store), store.prefix("")] if isinstance(store, SimpleStore) else [store.items(), store.keys()]
    for scan in scans:
        next(scan)
    store.begin([])
    store.revoked()
    for scan in scans:
        with pytest.raises(StoreError, match="revoked"):
            list(scan)
    value = (Account("a"),) if isinstance(store, SimpleStore) else ("a", Account())
    uses: list[Callable[[], object]] = [
        lambda: store.get("a"),
        lambda: store.put(*value),
        lambda: store.delete("a"),
        lambda: store.begin([]),
        lambda: store.receive_change(Change(b"a", b"")),
        lambda: store.receive_change(Change(b"a", None)),
        lambda: store.undo([Change(b"a", b"", b"")]),
        lambda: "a" in store,
        lambda: len(store),
        lambda: list(store.dump()),
    ]
    for use in uses:
        with pytest.raises(StoreError, match="revoked"):
            use()


@tables
def test_null_keys_none_values_and_reserved_keys(make: Callable[[], Table[str, Account]]) -> None:
    table: Any = make()
    with event(table) as journal:
        for use in (table.get, table.delete, table.__contains__, lambda key: table.put(key, Account())):
            with pytest.raises(StoreError, match="null key"):
                use(None)
        with pytest.raises(StoreError, match=r"delete\(key\)"):
            table.put("a", None)
        with pytest.raises(EncodeError):
            table.put("a", "not an account")
        with pytest.raises(EncodeError):
            table.put("\ud800", Account())
        with pytest.raises(EncodeError):
            table.put(5, Account())
    assert journal == []
    assert len(table) == 0
    with pytest.raises(StoreError, match="reserved"):
        table.receive_change(Change(RESERVED_KEY_PREFIX + b"offset", b"x"))

    raw = Table.factory(key=bytes, value=bytes)(HERE)
    with event(raw):
        with pytest.raises(StoreError, match="reserved"):
            raw.put(RESERVED_KEY_PREFIX, b"")
        raw.put(b"\xff\xffkes", b"below")
        raw.put(b"\xff\xffkes/", b"above")
    raw.receive_change(Change(b"\xff\xffkes/", None))
    assert list(raw.items()) == [(b"\xff\xffkes", b"below")]


def test_what_a_value_codec_refuses_is_refused_in_its_words_and_asked_once() -> None:
    asked: list[object] = []

    class Picky:
        def encode(self, value: object, /) -> bytes:
            asked.append(value)
            raise EncodeError("not today")

        def decode(self, data: bytes, /) -> object:
            return data

    class Reading(msgspec.Struct):
        value: Any = None

    class Better(Reading):
        pass

    picky = Table.factory(key=str, value=Reading, value_codec=Picky())(HERE)
    readings = Table.factory(key=str, value=Reading)(HERE)
    with event(picky) as first, event(readings) as second:
        for table, value, words in (
            (picky, Reading(), "not today"),
            (readings, Better(), "Reading expected, got Better (subclasses lose what they add)"),
            (readings, Reading("\ud800"), "Reading cannot be encoded: "),
            (readings, Reading(float("nan")), "Reading holds nan, which JSON cannot carry; use None, or MsgpackCodec"),
        ):
            with pytest.raises(EncodeError, match=f"^{re.escape(words)}"):
                table.put("a", value)
        readings.put("a", Reading())
    assert len(asked) == 1
    assert (first, [change.value for change in second]) == ([], [b'{"value":null}'])


def test_a_state_that_cannot_be_read_names_the_place_and_the_key() -> None:
    table = hash_table()
    table.receive_change(Change(b"a", b"{"))
    with pytest.raises(DecodeError, match=r"state of bank\[3\], key 'a': not a Account"):
        table.get("a")
    with pytest.raises(DecodeError, match=r"key 'a'"):
        list(table.items())


def ordered_ints(*keys: int) -> Table[int, int]:
    table = Table.factory(key=int, value=int, ordered=True)(HERE)
    with event(table):
        for key in keys:
            table.put(key, key * 10)
    return table


def keys_of(found: Iterator[tuple[Any, Any]]) -> list[Any]:
    return [key for key, _ in found]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("include_high", [False, True])
@pytest.mark.parametrize("low", [None, 0, 3, 7, 500, 1999])
def test_long_ranges_see_each_key_once(low: int | None, include_high: bool, reverse: bool) -> None:
    table = ordered_ints(*range(2000))
    for high in (None, 0, 7, 8, 9, 1000, 1999):
        end = 2000 if high is None else high + include_high
        expected = list(range(low or 0, end))
        found = keys_of(table.range(low, high, reverse=reverse, include_high=include_high))
        assert found == (expected[::-1] if reverse else expected)


def test_prefixes() -> None:
    pairs = Table.factory(key=tuple[str, int], value=int, ordered=True)(HERE)
    with event(pairs):
        for pair in (("a", 2), ("a", -1), ("ab", 0), ("a\x00", 5), ("", 0)):
            pairs.put(pair, 0)
    assert keys_of(pairs.prefix(("a",))) == [("a", -1), ("a", 2)]
    assert keys_of(pairs.range()) == [("", 0), ("a", -1), ("a", 2), ("a\x00", 5), ("ab", 0)]
    with pytest.raises(StoreError, match="no prefixes"):
        ordered_ints(1).prefix(1)
    assert [after_prefix(prefix) for prefix in (b"a\xff\xff", b"\xff", b"")] == [b"b", None, None]


def test_order_is_asked_for() -> None:
    for read in (hash_table().range, lambda: hash_table().prefix("a")):
        with pytest.raises(StoreError, match="ordered=True"):
            read()
    for codec in (int64_codec, JsonCodec(int)):
        with pytest.raises(ConfigError, match="does not keep keys in order"):
            Table.factory(key=int, value=int, ordered=True, key_codec=codec)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_writing_while_scanning(ordered: bool, reverse: bool) -> None:
    table = Table.factory(key=int, value=int, ordered=ordered)(HERE)
    with event(table):
        for key in range(5000):
            table.put(key, 0)
        seen = []
        for key, value in table.range(reverse=reverse) if ordered else table.items():
            assert value == 0
            seen.append(key)
            table.delete(key)
            table.put(key, 1)  # again, behind the scan: not seen twice
            table.put(10_000 + key, 0) if reverse else table.put(-1 - key, 0)
            if key % 2 == 0:
                table.delete(key ^ 1)
    assert len(seen) == len(set(seen))
    assert set(range(0, 5000, 2)) <= set(seen), "what is there all the time is seen"
    assert seen == sorted(seen, reverse=reverse) or not ordered


def test_changes_of_a_simple_store() -> None:
    store = simple_store()
    with event(store) as journal:
        changelog = [store.put(Account("a", 2)), store.delete("a"), store.put(Account("ab", 4))]
        assert store.delete("a") is None
    assert journal == changelog


def test_recording_a_simple_stores_change_again_does_no_harm() -> None:
    store = simple_store()
    with event(store):
        store.put(Account("a", 1))
    with event(store) as journal:
        for cents in (2, 3):
            journal.append(store.put(Account("a", cents)))
        journal.append(store.to_change(Account("a", 4)))
        journal.append(store.delete("a"))  # type: ignore[arg-type]
        journal.append(store.to_change(Account("b", 4)))
    assert list(store) == []
    store.undo(journal)
    assert list(store) == [Account("a", 1)]


def test_simple_store_refuses_null() -> None:
    store: Any = simple_store()
    with event(store):
        with pytest.raises(StoreError, match=r"delete\(key\)"):
            store.put(None)
        with pytest.raises(StoreError, match="null key"):
            store.put(Account(None))  # type: ignore[arg-type]
        with pytest.raises(StoreError, match="null key"):
            store.get(None)
    store.receive_change(Change(b"a", b"{"))
    with pytest.raises(DecodeError):
        store.get("a")
