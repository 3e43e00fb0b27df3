"""Several structures in one store: their names, indexes and heaps, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from streams.cli.state import _entry
from streams.disk import SQLite
from streams.errors import ConfigError, DecodeError, EncodeError, StoreError
from streams.protocols import JournalledStore, ObservingStore
from streams.records import Change, IncomingRecord
from streams.stores import Heap, Index, NamedTable, Stores, Table, Windows
from streams.stores.framed import FRAME, LAST_VERSION
from tests.property.test_disk_table import MemoryDatabase
from tests.unit.structures_kit import HERE, One, Order, Two, at, entries, loaded

# -- several tables ----------------------------------------------------------------------------------------------------


def test_each_table_has_its_own_keys() -> None:
    store = Two.factory()(HERE)
    assert isinstance(store, JournalledStore)
    assert isinstance(store, ObservingStore)

    def work() -> None:
        store.orders.put("a", Order("ada"))
        store.stock.put("a", 1)
        store.stock.put("b", 2)

    state = at(store, 0, work)
    assert sorted(state) == [b"\xfeorders\x00a", b"\xfestock\x00a", b"\xfestock\x00b"]
    assert state[b"\xfeorders\x00a"] == b'{"customer":"ada","cents":0}', "as a table of its own writes it"
    assert list(store.stock.prefix("")) == [("a", 1), ("b", 2)]
    assert store.stock.last() == ("b", 2)
    assert len(store) == 3
    assert store.decode_key(b"\xfestock\x00b") == ("stock", "b")
    assert store.decode_entry(b"\xfestock\x00b", state[b"\xfestock\x00b"]) == 2
    record = IncomingRecord("changelog", 0, 7, b"\xfestock\x00b", state[b"\xfestock\x00b"], None)
    shown = _entry(record, store)
    assert (shown.key, shown.value, shown.problem) == (("stock", "b"), 2, "")
    unknown = _entry(msgspec.structs.replace(record, key=b"\xfeother\x00b"), store)
    assert "of no structure of Two" in unknown.problem


def test_what_a_release_has_no_name_for_is_carried(caplog: pytest.LogCaptureFixture) -> None:
    """A table is gone for one release, and there again with the next."""
    store = Two(HERE)

    def work() -> None:
        store.orders.put("a", Order("ada"))
        store.stock.put("x", 1)
        store.stock.put("y", 2)

    state = at(store, 0, work)
    older = loaded(One.factory(), state)
    assert caplog.text.count("entries of a structure 'stock', which One does not have") == 1
    assert dict(older.carried()) == {key: value for key, value in state.items() if b"stock" in key}
    state = at(older, 1, lambda: older.orders.put("b", Order("bob")))
    with pytest.raises(DecodeError, match="of no structure of One"):
        older.decode_key(b"\xfestock\x00x")
    with pytest.raises(DecodeError, match="of no structure of One"):
        older.decode_entry(b"\xfestock\x00x", b"1")
    newer = loaded(Two.factory(), state)
    assert dict(newer.stock.items()) == {"x": 1, "y": 2}
    assert {key for key, _ in newer.orders.items()} == {"a", "b"}
    newer.receive_change(Change(b"\xfestock\x00x", None))
    assert len(newer.stock) == 1


@pytest.mark.parametrize("bare", [False, True])
def test_on_disk_what_a_release_has_no_name_for_is_carried(caplog: pytest.LogCaptureFixture, bare: bool) -> None:
    """It is seen when the database is opened, and stays there."""
    raw = {b"bare": b"1", b"\xfegone\x00a": b"2", b"\xfegone\x00b": b"3", b"\xfezero\x00a": b"4"}
    own = {b"\xfe\x00time": b"5", b"\xff\xffkes.timer.t": b"6"}
    at(store := Two(HERE), 0, lambda: (store.orders.put("a", Order("ada")), store.stock.put("x", 1)))
    state = entries(store)

    class Bare(Stores):
        orders = NamedTable.of(str, Order, index={"customer": Index(str, lambda order: order.customer)})
        stock = NamedTable.of(str, int)
        rest = NamedTable.of(str, str, bare=True)

    database = MemoryDatabase()
    database.rows = {**state, **raw, **own}
    found: Any = (Bare if bare else Two).factory(engine=SQLite())(HERE)
    found.attach(database, lambda why: None)
    assert {name for name in ("gone", "zero", "without a name") if name in caplog.text} == {
        "gone", "zero", *([] if bare else ["without a name"]),
    }  # fmt: skip
    carried = {key: value for key, value in raw.items() if not bare or key != b"bare"}
    assert dict(found.carried()) == carried
    assert dict(found.dump()) == {**state, **raw, b"\xfe\x00time": b"5"}
    assert not bare or dict(found.rest.items()) == {"bare": "1"}
    assert [key for key, _ in found.orders.by("customer", "ada")] == ["a"]
    assert found.own(b"\xfe\x00time") == b"5"
    assert list(found.stock.range("x", "y", reverse=True)) == [("x", 1)]
    found.receive_change(Change(b"\xfelater\x00a", b"1"))
    assert "later" in caplog.text
    scan = found.orders.items()
    found.revoked()
    for use in (
        lambda: list(scan),
        lambda: found.orders.by("customer", "ada"),
        found.estimated_len,
        lambda: len(found),
    ):
        with pytest.raises(StoreError, match="revoked"):
            use()


def test_the_only_table_of_a_source_becomes_one_of_several() -> None:
    table = Table.factory(key=str, value=Order)(HERE)
    state = at(table, 0, lambda: table.put("a", Order("ada")))

    class Grown(Stores):
        orders = NamedTable.of(str, Order, bare=True)
        stock = NamedTable.of(str, int)

    store = loaded(Grown.factory(), state)
    assert store.orders.get("a") == Order("ada")
    state = at(store, 0, lambda: (store.orders.put("b", Order("bob")), store.stock.put("b", 1)))
    assert sorted(state) == [b"a", b"b", b"\xfestock\x00b"]
    assert loaded(Grown.factory(), state).decode_key(b"b") == ("orders", "b")


def test_bare_keys_do_not_look_like_those_of_another_table() -> None:
    class Odd(Stores):
        raw = NamedTable.of(bytes, bytes, bare=True)

    store = Odd(HERE)
    with pytest.raises(EncodeError, match="bare keys that begin with"):
        at(store, 0, lambda: store.raw.put(b"\xfestock\x00a", b""))
    with pytest.raises(EncodeError, match="values that begin with"):
        at(store, 0, lambda: store.raw.put(b"a", FRAME + b"x"))


def test_a_structure_is_called_as_its_owner_likes() -> None:
    class Renamed(Stores):
        sales = NamedTable.of(str, Order, name="orders")

    state = at(store := One(HERE), 0, lambda: store.orders.put("a", Order("ada")))
    assert loaded(Renamed.factory(), state).sales.get("a") == Order("ada")


def test_a_subclass_has_the_structures_of_its_base() -> None:
    class More(One):
        jobs = Heap.of(str, Order, priority=Index(int, lambda order: order.cents))

    store = More.factory()(HERE)
    assert at(store, 0, lambda: (store.orders.put("a", Order("ada")), store.jobs.put("b", Order("bob"))))
    assert not isinstance(More.orders, NamedTable), "the class has the declaration"


def test_after_a_revocation_everything_is_refused() -> None:
    store = Two(HERE)
    at(store, 0, lambda: store.orders.put("a", Order("ada")))
    scan = store.orders.by("customer", "ada")
    store.revoked()
    refused: list[Callable[[], Any]] = [
        lambda: store.orders.get("a"),
        lambda: list(store.orders.by("customer", "ada")),
        lambda: list(scan),
        lambda: store.begin([]),
        lambda: len(store),
    ]
    for use in refused:
        with pytest.raises(StoreError, match="was revoked"):
            use()


def test_writes_outside_of_events_are_refused() -> None:
    store = Two(HERE)
    for write in (lambda: store.orders.put("a", Order("")), lambda: store.advance(1), lambda: store.stock.delete("a")):
        with pytest.raises(StoreError, match="outside of an event"):
            write()


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "no structure": (lambda: Stores.factory(), "names no structure"),
    "a name": (lambda: NamedTable.of(str, int, name="a b"), "letters, digits"),
    "no order": (lambda: NamedTable.of(dict, int, ordered=True), "does not keep keys in order"),
    "an index that is a function": (lambda: NamedTable.of(str, Order, index={"a": len}), "give an Index"),  # type: ignore[dict-item]
    "an index of floats": (lambda: Index(float, len), "str, bytes, int or tuples"),
    "an index of nothing": (lambda: Index(str, None), "needs a function"),  # type: ignore[arg-type]
    "no time": (lambda: NamedTable.of(str, int, expires=0), "of 1 ms at least"),
    "a time that is a text": (lambda: NamedTable.of(str, int, expires="1"), "timedelta, or seconds"),  # type: ignore[arg-type]
    "version 0": (lambda: NamedTable.of(str, Order, version=0), "a number from 1"),
    "a version that is too high": (lambda: NamedTable.of(str, Order, version=LAST_VERSION + 1), "a number from 1"),
    "no upcaster": (lambda: NamedTable.of(str, Order, version=3, upcast={1: dict}), "from each version from 1 to 2"),
    "an upcaster from the version itself": (
        lambda: NamedTable.of(str, Order, version=2, upcast={1: dict, 2: dict}),
        "from each version from 1 to 1",
    ),
    "no dict form": (lambda: NamedTable.of(str, int, version=2, upcast={1: dict}), "no dict form"),
    "a hop that is too long": (
        lambda: Windows.hopping(str, int, size=1, advance=2, add=lambda old, _: old or 0),
        "1 to 1000 windows",
    ),
    "no size": (lambda: Windows.tumbling(str, int, size=0, add=lambda old, _: old or 0), "size is 0"),
    "grace below zero": (lambda: Windows.tumbling(str, int, size=1, grace=-1, add=lambda old, _: 0), "grace is -1"),
    "no function": (lambda: Windows.tumbling(str, int, size=1, add=None), "give a function"),  # type: ignore[arg-type]
    "no merge": (
        lambda: Windows.session(str, int, gap=1, add=lambda old, _: 0, merge=None),  # type: ignore[arg-type]
        "function of two values",
    ),
    "no policy": (
        lambda: Windows.tumbling(str, int, size=1, add=lambda old, _: 0, late="skip"),  # type: ignore[arg-type]
        "give 'drop', 'fail' or",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_declarations(name: str) -> None:
    declare, reason = WRONG[name]
    with pytest.raises(ConfigError, match=reason):
        declare()


def test_two_of_one_name() -> None:
    class Twice(Stores):
        one = NamedTable.of(str, int, name="same")
        two = NamedTable.of(str, int, name="same")

    class Bare(Stores):
        one = NamedTable.of(str, int, bare=True)
        two = NamedTable.of(str, int, bare=True)

    with pytest.raises(ConfigError, match="two structures of the name 'same'"):
        Twice.factory()
    with pytest.raises(ConfigError, match="one and two have bare keys"):
        Bare.factory()


# -- indexes and heaps -------------------------------------------------------------------------------------------------


def test_an_index_is_declared_later() -> None:
    state = at(store := One(HERE), 0, lambda: [store.orders.put(name, Order(name[0])) for name in ("ab", "aa", "b")])
    indexed = loaded(Two.factory(), state)
    assert [key for key, _ in indexed.orders.by("customer", "a")] == ["aa", "ab"]
    with pytest.raises(StoreError, match="'orders' has no index 'due'; it has customer"):
        indexed.orders.by("due", 1)
    with pytest.raises(EncodeError, match=r"the index 'customer' of 'orders' \(t\[0\]\): str expected"):
        indexed.orders.by("customer", 1)


def test_a_unique_index_refuses_before_anything_is_changed() -> None:
    class Unique(Stores):
        users = NamedTable.of(str, Order, index={"mail": Index(str, lambda user: user.customer or None, unique=True)})

    store = Unique(HERE)

    def work() -> None:
        store.users.put("a", Order("x"))
        store.users.put("a", Order("x", 1))  # its own
        store.users.put("b", Order(""))
        store.users.put("c", Order(""))  # those that are not in the index do not meet
        with pytest.raises(StoreError, match=r"the index 'mail' .* is unique: 'b' was put with what 'a' has already"):
            store.users.put("b", Order("x"))
        store.users.delete("a")
        store.users.put("b", Order("x"))

    at(store, 0, work)
    assert dict(store.users.by("mail", "x")) == {"b": Order("x")}
    # made unique later, over two that are equal already: both are found, and neither is lost
    twice = {b"\xfeusers\x00a": b'{"customer":"x"}', b"\xfeusers\x00b": b'{"customer":"x"}'}
    found = loaded(Unique.factory(), twice)
    assert len(list(found.users.by("mail", "x"))) == 2


def test_a_function_of_an_index_that_fails() -> None:
    class Broken(Stores):
        orders = NamedTable.of(str, Order, index={"share": Index(int, lambda order: 100 // order.cents)})

    store = Broken(HERE)
    with pytest.raises(ZeroDivisionError):
        at(store, 0, lambda: store.orders.put("a", Order("", 0)))
    assert not len(store)
    state = at(bare := One(HERE), 0, lambda: [bare.orders.put("a", Order("", 0)), bare.orders.put("b", Order("", 1))])
    later = loaded(Broken.factory(), state)
    with pytest.raises(
        StoreError, match=r"the index 'share' .* cannot be built: 1 value\(s\), that of 'a' first: Zero"
    ):
        later.orders.by("share", 100)
    at(later, 0, lambda: later.orders.put("c", Order("", 1)))  # all else goes on
    assert later.orders.get("c") == Order("", 1)
    at(later, 0, lambda: later.orders.delete("c"))
    later.receive_change(Change(b"\xfeorders\x00a", None))  # a copy: its owner has deleted it
    assert [key for key, _ in later.orders.by("share", 100)] == ["b"]
    later.begin([])


def test_a_scan_of_an_index_while_it_is_written_to() -> None:
    store = Two(HERE)

    def work() -> None:
        for number in range(1000):
            store.orders.put(f"{number:03}", Order("ada"))
        seen = []
        for key, _ in store.orders.by("customer", "ada"):
            seen.append(key)
            store.orders.put(key, Order("bob"))
            store.orders.delete(f"{999 - int(key):03}")
        assert seen == [f"{number:03}" for number in range(500)]

    at(store, 0, work)
    assert len(list(store.orders.by("customer", "bob"))) == 500


def test_a_heap_refuses_what_has_no_priority() -> None:
    class Jobs(Stores):
        jobs = Heap.of(str, Order, priority=Index(int, lambda order: order.cents or None))

    store = Jobs(HERE)
    with pytest.raises(StoreError, match="without priority"):
        at(store, 0, lambda: store.jobs.put("a", Order("")))
    assert store.jobs.min() is store.jobs.max() is None
    assert at(store, 0, lambda: store.jobs.pop_min()) == {}
