"""The table of a global change log: typed, read-only, over all partitions, and read from any thread."""

from __future__ import annotations

import itertools
import sys
import threading
from typing import Any

import msgspec
import pytest

from streams import GlobalTable, IncomingRecord, JoinedTable, ViewSnapshot, event_type, upcaster
from streams.codecs import MsgpackCodec, int_codec
from streams.errors import DecodeError, StoreError
from streams.events import event_type_of
from streams.records import TYPE_HEADER, VERSION_HEADER, Headers
from streams.views.global_table import make_table
from streams.views.table import ViewTable

SECONDS = 30.0


def put(
    table: GlobalTable[Any, Any], key: bytes, value: bytes | None, partition: int = 0, headers: Headers | None = None
) -> None:
    table.receive(IncomingRecord("rates", partition, 0, key, value, headers))


def table_of(ordered: bool = False) -> GlobalTable[str, int]:
    return make_table("rates", str, int, ordered, None, None)


number = int_codec.encode


def test_all_partitions_are_one_table() -> None:
    table = table_of(ordered=True)
    for n, name in enumerate(["c", "a", "d", "b", "e"]):
        put(table, name.encode(), number(n), n % 3)
    put(table, b"d", None, 2)
    assert [table.get(name) for name in "abcde"] == [1, 3, 0, None, 4]
    assert list(table.items()) == [("a", 1), ("b", 3), ("c", 0), ("e", 4)]
    assert list(table.range("b", "e", reverse=True)) == [("c", 0), ("b", 3)]
    assert (table.first(), table.last(), len(table), "c" in table) == (("a", 1), ("e", 4), 4, True)
    assert list(table.prefix("b")) == [("b", 3)]
    assert list(table.of_partition(0).items()) == [("b", 3), ("c", 0)]
    assert len(table.of_partition(9)) == 0


def test_without_order_it_has_no_ranges() -> None:
    table = table_of()
    assert (table.get("a"), len(table), list(table.items())) == (None, 0, [])
    put(table, b"a", number(1), 1)
    put(table, b"b", number(2), 0)
    assert dict(table.items()) == {"a": 1, "b": 2}
    with pytest.raises(StoreError, match="no order"):
        table.first()


def test_a_key_of_two_partitions_has_no_one_value() -> None:
    table = table_of()
    put(table, b"k", number(1), 0)
    put(table, b"k", number(2), 3)
    for read in (table.get, table.__contains__):
        with pytest.raises(StoreError, match=r"rates: the key b'k' is in partitions 0, 3"):
            read("k")
    assert [table.of_partition(n).get("k") for n in range(4)] == [1, None, None, 2]
    assert sorted(table.values()) == [1, 2]
    put(table, b"k", None, 0)
    assert table.get("k") == 2


def test_tables_that_are_only_read_have_no_writing_methods() -> None:
    for kind in (GlobalTable, ViewTable, ViewSnapshot, JoinedTable):
        assert not {"put", "delete", "begin", "undo", "receive_change"} & set(dir(kind)), kind


def test_closed_it_refuses_everything_for_the_first_reason() -> None:
    table = table_of(ordered=True)
    put(table, b"k", number(1))
    part, scan = table.of_partition(0), table.items()
    assert next(scan) == ("k", 1)
    table.close("because")
    table.revoked()
    for read in (
        lambda: table.get("k"),
        table.first,
        lambda: len(table),
        lambda: part.get("k"),
        lambda: next(scan),
    ):
        with pytest.raises(StoreError, match="because"):
            read()
    with pytest.raises(StoreError, match="because"):
        put(table, b"new", number(1), 5)


@event_type("Rate", version=2)
class Rate(msgspec.Struct, frozen=True):
    currency: str
    micros: int


@upcaster(Rate, from_version=1)
def in_micros(old: dict[str, Any]) -> dict[str, Any]:
    return {"currency": old["currency"], "micros": round(old["rate"] * 1_000_000)}


@event_type("Packed", codec=MsgpackCodec(dict))
class Packed(dict[str, int]):
    pass


def test_older_versions_are_brought_up_and_others_refused() -> None:
    table = make_table("rates", str, Rate, False, None, None)
    present = event_type_of(Rate)
    rate = Rate("EUR", 1_100_000)
    put(table, b"new", present.encode(rate), 0, present.headers)
    put(table, b"old", b'{"currency":"EUR","rate":1.1}', 0, [(TYPE_HEADER, b"Rate")])
    put(table, b"plain", present.encode(rate))  # state of an event source has no headers
    assert [table.get(key) for key in ("new", "old", "plain")] == [rate] * 3
    for headers, text in (
        ([(TYPE_HEADER, b"Price")], "'Price' in a table of 'Rate'"),
        ([(TYPE_HEADER, b"Rate"), (VERSION_HEADER, b"3")], "newer"),
        ([(TYPE_HEADER, b"Rate"), (VERSION_HEADER, None)], "decimal digits"),
    ):
        with pytest.raises(DecodeError, match=text):
            put(table, b"new", b"{}", 0, headers)  # type: ignore[arg-type]
    with pytest.raises(DecodeError):
        put(table, b"new", b"{}")
    assert table.get("new") == rate


def test_a_class_with_a_codec_of_its_own() -> None:
    table = make_table("rates", str, Packed, False, None, None)
    put(table, b"k", event_type_of(Packed).encode({"a": 1}))  # type: ignore[arg-type]
    assert table.get("k") == {"a": 1}


@pytest.mark.parametrize("ordered", [False, True])
def test_it_is_read_while_it_is_written(ordered: bool) -> None:
    """Keys that are there all the time are seen exactly once by every scan, whatever comes and goes."""
    table = table_of(ordered)
    stable = [f"s{n:04}" for n in range(300)]
    for n, key in enumerate(stable):
        put(table, key.encode(), number(n), n % 3)
    stop, failures, others = threading.Event(), [], dict[str, int]()

    def write() -> None:
        for n in itertools.takewhile(lambda _: not stop.is_set(), itertools.count(1)):
            key = f"t{n * 7919 % 5003}"
            if n % 3:
                others[key] = n
            else:
                others.pop(key, None)
            put(table, key.encode(), number(n) if n % 3 else None, n * 7919 % 5003 % 3)
            put(table, stable[n % 300].encode(), number(n), n % 300 % 3)

    def read() -> None:
        try:
            while not stop.is_set():
                seen = [key for key, _ in table.items() if key.startswith("s")]
                assert (seen if ordered else sorted(seen)) == stable
                assert table.get("s0007") is not None
                assert len(table) >= 300
        except BaseException as error:
            failures.append(error)
            stop.set()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=work) for work in (write, read, read)]
    for thread in threads:
        thread.start()
    stop.wait(1.5)  # as long as nothing goes wrong
    stop.set()
    for thread in threads:
        thread.join(SECONDS)
    sys.setswitchinterval(before)
    assert failures == []
    assert {key: value for key, value in table.items() if key.startswith("t")} == others
