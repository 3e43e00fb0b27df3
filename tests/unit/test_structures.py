"""Several structures in one store: names that come and go, expiry, indexes and versions that come later, and the engine
around them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from streams import (
    DEAD_LETTER,
    BatchContext,
    EventContext,
    EventSource,
    EventSourceConfig,
    Record,
    event_type,
    to_record,
)
from streams.errors import ConfigError, DecodeError, EncodeError, StoreError
from streams.protocols import JournalledStore, ObservingStore
from streams.records import Change, IncomingRecord, TopicPartition
from streams.runtime.replay import PartitionReplay
from streams.stores import Heap, Index, LateItem, NamedTable, Stores, Table, Window, Windows
from streams.stores.framed import FRAME, LAST_VERSION
from streams.stores.several import MOST_AT_ONCE
from streams.testing import TestDriver

HERE = TopicPartition("t", 0)
Entries = dict[bytes, bytes]


class Order(msgspec.Struct):
    customer: str
    cents: int = 0


class One(Stores):
    orders = NamedTable.of(str, Order)


class Two(Stores):
    orders = NamedTable.of(str, Order, index={"customer": Index(str, lambda order: order.customer)})
    stock = NamedTable.of(str, int, ordered=True)


def entries(store: Any) -> Entries:
    return dict(store.dump())


def loaded(make: Callable[[TopicPartition], Any], state: Entries) -> Any:
    """A store with this state, as a restore makes it."""
    store = make(HERE)
    for key, value in state.items():
        store.receive_change(Change(key, value))
    return store


def at(store: Any, seconds: float, work: Callable[[], Any] = lambda: None) -> Entries:
    """One event at this time; returns what it leaves."""
    store.begin([])
    observe = getattr(store, "before_event", None)
    record = IncomingRecord("t", 0, 0, None, None, None, round(seconds * 1000))
    try:
        if observe is not None:
            observe(SimpleNamespace(input=record))
        work()
    finally:
        store.end()
    return entries(store)


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


def test_a_failed_event_leaves_nothing_in_any_table() -> None:
    store = Two(HERE)
    before = at(store, 0, lambda: store.orders.put("a", Order("ada")))
    store.begin(journal := [])
    store.orders.put("a", Order("bob"))
    store.orders.delete("a")
    store.stock.put("a", 1)
    store.end()
    store.undo(journal)
    assert entries(store) == before
    assert [key for key, _ in store.orders.by("customer", "ada")] == ["a"]


def test_what_a_release_has_no_name_for_is_carried(caplog: pytest.LogCaptureFixture) -> None:
    """A table is gone for one release, and there again with the next."""
    store = Two(HERE)

    def work() -> None:
        store.orders.put("a", Order("ada"))
        store.stock.put("x", 1)
        store.stock.put("y", 2)

    state = at(store, 0, work)
    with caplog.at_level(logging.WARNING):
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


# -- expiry ------------------------------------------------------------------------------------------------------------


class Lasting(Stores):
    carts = NamedTable.of(str, int)


class Expiring(Stores):
    carts = NamedTable.of(str, int, expires=10)


def test_an_entry_lives_its_time_since_it_was_put() -> None:
    store = Expiring(HERE)
    at(store, 100, lambda: store.carts.put("a", 1))
    at(store, 101, lambda: store.carts.put("b", 1))
    at(store, 105, lambda: store.carts.put("a", 2))
    at(store, 110.999)
    assert set(store.carts.keys()) == {"a", "b"}
    at(store, 111)
    assert set(store.carts.keys()) == {"a"}
    at(store, 50, lambda: store.carts.put("c", 1))  # an event that is late does not turn time back
    assert store.time_ms == 111_000
    at(store, 120.9)
    assert set(store.carts.keys()) == {"c"}
    restored = loaded(Expiring.factory(), at(store, 120.999))
    assert set(restored.carts.keys()) == {"c"}
    assert b"carts\x00c" not in b"".join(at(restored, 121))


def test_expiry_is_switched_on_off_and_on_again() -> None:
    """Entries that were put without it count from the moment at which it was switched on, the last time."""
    state = at(store := Lasting(HERE), 100, lambda: store.carts.put("old", 1))
    on = loaded(Expiring.factory(), state)
    state = at(on, 1000, lambda: on.carts.put("new", 1))
    assert set(on.carts.keys()) == {"old", "new"}
    off = loaded(Lasting.factory(), state)
    assert dict(off.carts.items()) == {"old": 1, "new": 1}
    assert off.before_event is not None, "the mark must go"
    state = at(off, 2000, lambda: off.carts.put("between", 1))
    assert set(off.carts.keys()) == {"old", "new", "between"}
    assert loaded(Lasting.factory(), state).before_event is None
    again = loaded(Expiring.factory(), state)
    at(again, 2005)
    assert set(again.carts.keys()) == {"old", "between"}, "the one with a time is over it"
    at(again, 2014.999)
    assert set(again.carts.keys()) == {"old", "between"}
    at(again, 2015)
    assert not len(again.carts)


def test_a_backlog_of_expiry_is_done_bit_by_bit() -> None:
    store = Expiring(HERE)
    at(store, 0, lambda: [store.carts.put(str(number), 1) for number in range(2 * MOST_AT_ONCE + 1)])
    sizes = []
    for _ in range(4):
        at(store, 20)
        sizes.append(len(store.carts))
    assert sizes == [MOST_AT_ONCE + 1, 1, 0, 0]


def test_records_without_a_time() -> None:
    store = Expiring(HERE)
    at(store, -0.001, lambda: store.carts.put("a", 1))
    assert store.time_ms is None
    at(store, 100)
    at(store, 109)
    assert "a" in store.carts
    at(store, 110)
    assert "a" not in store.carts


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
        later.begin([])
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


# -- versions of state -------------------------------------------------------------------------------------------------


class Account(msgspec.Struct):
    euros: float
    owner: str


class First(Stores):
    accounts = NamedTable.of(str, Order)


class Third(Stores):
    accounts = NamedTable.of(
        str,
        Account,
        version=3,
        upcast={
            1: lambda old: {"cents": old["cents"], "owner": old["customer"]},
            2: lambda old: {"euros": old["cents"] / 100, "owner": old["owner"]},
        },
        index={"owner": Index(str, lambda account: account.owner)},
    )


def test_state_of_an_older_version_is_read() -> None:
    state = at(store := First(HERE), 0, lambda: store.accounts.put("a", Order("ada", 150)))
    state[b"\xfeaccounts\x00b"] = FRAME + b"\x01\x00\x02" + b'{"cents":200,"owner":"bob"}'
    newer = loaded(Third.factory(), state)
    assert newer.accounts.get("a") == Account(1.5, "ada")
    assert newer.accounts.get("b") == Account(2.0, "bob")
    assert [key for key, _ in newer.accounts.by("owner", "bob")] == ["b"]
    after = at(newer, 0, lambda: newer.accounts.put("a", Account(3.0, "ada")))
    assert after[b"\xfeaccounts\x00a"] == FRAME + b"\x01\x00\x03" + b'{"euros":3.0,"owner":"ada"}'
    assert after[b"\xfeaccounts\x00b"] == state[b"\xfeaccounts\x00b"], "it is as it was until it is put"


def test_state_of_a_newer_version_is_refused_by_name() -> None:
    state = at(store := Third(HERE), 0, lambda: store.accounts.put("a", Account(1.0, "ada")))
    older = loaded(First.factory(), state)
    with pytest.raises(
        DecodeError, match=r"state of t\[0\], key 'a': the value has version 3, .* up to 1: .*roll this"
    ):
        older.accounts.get("a")
    assert entries(older) == state, "and stays as it is"

    class Indexed(Stores):
        accounts = NamedTable.of(str, Order, index={"who": Index(str, lambda order: order.customer)})

    copy = loaded(Indexed.factory(), state)  # a standby goes on
    with pytest.raises(StoreError, match=r"cannot be built: .*roll this member forward"):
        copy.begin([])


def test_upcasters_that_fail() -> None:
    class Failing(Stores):
        accounts = NamedTable.of(str, Account, version=2, upcast={1: lambda old: old["nothing"]})

    class Wrong(Stores):
        accounts = NamedTable.of(str, Account, version=2, upcast={1: lambda old: 1})  # type: ignore[dict-item, return-value]

    state = at(store := First(HERE), 0, lambda: store.accounts.put("a", Order("ada")))
    with pytest.raises(DecodeError, match="key 'a': the upcaster from version 1 failed: KeyError"):
        loaded(Failing.factory(), state).accounts.get("a")
    with pytest.raises(DecodeError, match="the upcaster from version 1 returned int"):
        loaded(Wrong.factory(), state).accounts.get("a")


@pytest.mark.parametrize(
    "data", [FRAME, FRAME + b"\x01\x00", FRAME + b"\x02\x00", FRAME + b"\x04", FRAME + b"\x01\x00\x01"]
)
def test_a_frame_that_is_spoiled(data: bytes) -> None:
    for make in (Third.factory(), First.factory(), Expiring.factory()):
        table = "carts" if make is Expiring.factory() else "accounts"
        store = loaded(make, {b"\xfe" + table.encode() + b"\x00a": data})
        with pytest.raises(DecodeError):
            getattr(store, table).get("a")


# -- in the engine -----------------------------------------------------------------------------------------------------

OUT = "minutes"


@event_type("Click")
class Click(msgspec.Struct, frozen=True):
    user: str
    fails: int = 0


@event_type("Minute")
class Minute(msgspec.Struct, frozen=True):
    user: str
    start_ms: int
    clicks: int


def count(old: int | None, _: Click) -> int:
    return (old or 0) + 1


def report(ctx: EventContext[Any], user: str, window: Window, clicks: int) -> None:
    ctx.forward(OUT, Minute(user, window.start_ms, clicks), key=user)


class Site(Stores):
    minutes = Windows.tumbling(str, int, size=60, grace=5, add=count, on_close=report, late="fail")
    users = NamedTable.of(str, int, expires=300, index={"clicks": Index(int, lambda clicks: clicks)})


def clicked(ctx: EventContext[Site], event: Click) -> None:
    ctx.store.users.put(event.user, ctx.store.users.get(event.user, 0) + 1)
    ctx.store.minutes.add(event.user, event)
    if ctx.attempt <= event.fails:
        raise ValueError("once more")


def site(kind: str = "plain", partitions: int = 2) -> EventSource[Site]:
    source = EventSource(
        EventSourceConfig(group_id="site", topic="clicks", num_partitions=partitions, error_policy=DEAD_LETTER),
        store=Site.factory(),
    )

    async def concurrent(ctx: EventContext[Site], event: Click) -> None:
        await ctx.turn()
        clicked(ctx, event)

    async def waiting(ctx: EventContext[Site], event: Click) -> None:
        await asyncio.sleep(0)
        clicked(ctx, event)

    def batch(ctx: BatchContext[Site], events: list[Click]) -> None:
        for event, record in zip(events, ctx.records, strict=True):
            if event.fails:
                raise ValueError("not this one")
            ctx.store.users.put(event.user, ctx.store.users.get(event.user, 0) + 1)
            ctx.store.minutes.add(event.user, event, at_ms=record.timestamp_ms)

    if kind == "batch":
        source.register_event_type(Click, batch, batch=True)
    elif kind == "concurrent":
        source.register_event_type(Click, concurrent, concurrency=4)
    elif kind == "blocking":
        source.register_event_type(Click, clicked, blocking=True)
    else:
        source.register_event_type(Click, waiting if kind == "async" else clicked)
    return source


def click(user: str, seconds: float, fails: int = 0) -> Record:
    record = to_record("clicks", Click(user, fails), key=user, partition=0)
    return msgspec.structs.replace(record, timestamp_ms=round(seconds * 1000))


@pytest.mark.parametrize("kind", ["plain", "async", "blocking", "concurrent", "batch"])
def test_in_the_engine(kind: str) -> None:
    """Windows close in front of the event that brings the time, in order, once, whatever dies in between."""
    with TestDriver(site(kind), topics={OUT: 1}) as driver:
        driver.send_record(click("ann", 60))
        driver.send_record(click("bob", 61))
        driver.send_record(click("bob", 119))
        driver.send_record(click("ann", 124.999))
        assert driver.outputs(OUT, Minute) == []
        driver.crash()
        driver.restart()
        driver.send_record(click("ann", 125))
        minutes = [Minute("ann", 60_000, 1), Minute("bob", 60_000, 2)]
        assert driver.outputs(OUT, Minute) == minutes
        driver.send_record(click("cid", 119))  # is late: its own failure
        assert len(driver.dead_letters()) == 1
        driver.send_record(click("ann", 185, fails=9))  # fails, and its time with it
        assert driver.outputs(OUT, Minute) == minutes
        assert len(driver.dead_letters()) == 2
        driver.send_record(click("bob", 185))
        assert driver.outputs(OUT, Minute) == [*minutes, Minute("ann", 120_000, 2)]
        store = driver.store(0)
        assert dict(store.users.items()) == {"ann": 3, "bob": 3}
        assert {key for key, _ in store.users.by("clicks", 3)} == {"ann", "bob"}
        driver.send_record(click("bob", 425))
        assert dict(driver.store(0).users.items()) == {"bob": 4}
        driver.abort()
        driver.rebalance()
        driver.compact()
        assert driver.restored_store(0).time_ms == 425_000
        assert dict(driver.restored_store(0).dump()) == dict(driver.store(0).dump())
        assert driver.changelog(0) == dict(driver.store(0).dump())
        driver.check()


def test_a_partition_at_rest_is_moved_on_by_an_interjection() -> None:
    with TestDriver(site(), topics={OUT: 1}) as driver:
        driver.send_record(click("ann", 60))
        driver.interject(0, lambda ctx: ctx.store.advance(124_000))
        assert driver.outputs(OUT, Minute) == []
        driver.interject(0, lambda ctx: ctx.store.advance(125_000))
        assert driver.outputs(OUT, Minute) == [Minute("ann", 60_000, 1)]
        with pytest.raises(StoreError, match="without a time"):
            driver.interject(0, lambda ctx: ctx.store.minutes.add("ann", Click("ann")))
        driver.check()


def test_a_replay_comes_to_the_same_state_and_outputs() -> None:
    """In any cut of the records: nothing depends on a clock."""
    times = [60, 61, 90, 126, 119, 130, 250, 185, 1000]
    made = [click("ann" if number % 2 else "bob", at) for number, at in enumerate(times)]
    with TestDriver(site(), topics={OUT: 1}) as driver:
        for record in made:
            driver.send_record(record)
        outputs = [record.value for record in driver.outputs(OUT)]
        state = dict(driver.store(0).dump())
    assert len(outputs) == 4

    def records() -> list[IncomingRecord]:
        return [
            IncomingRecord(
                "clicks", 0, number, record.key, record.value, tuple(record.headers or ()), record.timestamp_ms or 0
            )
            for number, record in enumerate(made)
        ]

    async def replay(size: int) -> None:
        replayed = PartitionReplay(site().program(), 0, wall_ms=0)
        sent: list[Any] = []
        for start in range(0, len(made), size):
            sent += (await replayed.handle(records()[start : start + size])).outputs
        assert [output.value for output in sent if output.topic == OUT] == outputs
        assert {change.key: change.value for change in replayed.contents()} == state
        replayed.close()

    for size in (1, 2, len(made)):
        asyncio.run(replay(size))


def test_a_late_item_goes_where_its_function_sends_it() -> None:
    def aside(ctx: EventContext[Any], user: str, item: Click, at_ms: int) -> None:
        ctx.forward(OUT, Minute(user, at_ms, -1), key=user)

    class Aside(Stores):
        minutes = Windows.tumbling(str, int, size=60, add=count, late=aside)

    source = EventSource(EventSourceConfig(group_id="site", topic="clicks", num_partitions=1), store=Aside.factory())

    @source.register_event_type(Click)
    def handle(ctx: EventContext[Aside], event: Click) -> None:
        ctx.store.minutes.add(event.user, event)

    with TestDriver(source, topics={OUT: 1}) as driver:
        for seconds in (60, 120, 119.999):
            driver.send_record(click("ann", seconds))
        assert driver.outputs(OUT, Minute) == [Minute("ann", 119_999, -1)]


def test_windows_that_are_kept_and_a_grace_that_gets_longer() -> None:
    closed: list[Window] = []

    def note(ctx: object, key: str, window: Window, value: int) -> None:
        closed.append(window)

    def make(grace: float) -> type[Stores]:
        class Kept(Stores):
            minutes = Windows.tumbling(str, int, size=60, grace=grace, keep=100, add=count, on_close=note)

        return Kept

    store: Any = make(0)(HERE)
    at(store, 0, lambda: store.minutes.add("a", Click("a")))
    state = at(store, 60)
    window = Window(0, 60_000)
    assert closed == [window]
    assert store.minutes.get("a", window) == 1
    assert store.minutes.is_closed("a", window)
    longer: Any = loaded(make(30), state)
    at(longer, 61, lambda: longer.minutes.add("a", Click("a"), at_ms=59_000))
    at(longer, 95)
    assert closed == [window], "reported once"
    assert dict(longer.minutes.of("a")) == {window: 1}, "and not changed afterwards"
    at(longer, 190)
    assert not len(longer.minutes)
    assert LateItem.__mro__[1] is StoreError
