"""Releases that follow each other over one state: expiry, versions of values, and windows that change."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from streams.codecs import JsonCodec, TupleCodec
from streams.disk import SQLite
from streams.errors import ConfigError, DecodeError, StateUnreadable, StoreError
from streams.records import Change
from streams.stores import Heap, Index, LateItem, NamedTable, SimpleStore, Stores, Table, Window, Windows
from streams.stores.framed import FRAME
from streams.stores.structured import MOST_AT_ONCE, TIME_KEY, mark_of
from tests.unit.structures_kit import HERE, Order, at, entries, loaded
from tests.unit.windows_kit import count

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


def test_time_that_is_set_back() -> None:
    """An event from the future has closed windows, and entries put since would never expire: all of that is undone, as
    far as the state has it; a later close reports what has come since."""
    closed: list[tuple[Window, int]] = []

    class Shop(Stores):
        carts = NamedTable.of(str, Order, expires=100)
        tagged = NamedTable.of(str, Order, expires=100, version=2, upcast={1: dict})
        kept = Windows.tumbling(str, int, size=60, grace=10, keep=1_000_000, add=count)
        minutes = Windows.tumbling(
            str, int, size=60, add=count, on_close=lambda ctx, key, window, value: closed.append((window, value))
        )
        bare = NamedTable.of(bytes, bytes, bare=True)

    def add(store: Any, seconds: float) -> None:
        at(store, seconds, lambda: [window.add("k", "") for window in (store.kept, store.minutes)])

    store: Any = Shop(HERE)
    add(store, 50)
    at(store, 55, lambda: (store.carts.put("before", Order("b")), store.bare.put(b"\xff\xffno", b"\xff\xffkes")))
    add(store, 500_000)
    at(store, 500_100, lambda: (store.carts.put("since", Order("s")), store.tagged.put("since", Order("s"))))
    add(store, 56)
    assert closed == [(Window(0, 60_000), 1), (Window(499_980_000, 500_040_000), 1)], "and that was late"
    state = at(store, 500_100)
    assert store.set_back(state, 500_100_000) == store.set_back(state, 600_000_000) == {}
    changes = store.set_back(state, 57_000)
    assert list(changes)[-1] == TIME_KEY, "last: a run that is killed before is found to be not done"
    assert set(changes) == {
        TIME_KEY, mark_of("kept"), mark_of("minutes"), b"\xfecarts\x00since", b"\xfetagged\x00since",
    }, "expiry was there before: its marks stay"  # fmt: skip
    back: Any = loaded(Shop.factory(), state | changes)
    assert store.set_back(state | changes, 57_000) == {}
    assert (back.time_ms, back.carts.get("since"), back.tagged.get("since")) == (57_000, Order("s"), Order("s"))
    add(back, 58)
    at(back, 75)
    assert closed[2:] == [(Window(0, 60_000), 1)], "what has come since: the rest was reported and is gone"
    assert dict(back.kept.of("k"))[Window(0, 60_000)] == 2, "and what was kept goes on"
    at(back, 156.9)
    assert {"since"} == set(back.carts.keys()) == set(back.tagged.keys())
    at(back, 157)
    assert (len(back.carts), len(back.tagged)) == (0, 0)


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
    name = r"""key '\["accounts","a"\]'"""  # as `kes state get` takes it
    with pytest.raises(
        StateUnreadable, match=rf"state of t\[0\], {name}: the value has version 3, .* up to 1: .*roll this"
    ) as refused:
        older.accounts.get("a")
    assert (refused.value.partition, refused.value.key) == (0, '["accounts","a"]')
    assert entries(older) == state, "and stays as it is"

    class Indexed(Stores):
        accounts = NamedTable.of(str, Order, index={"who": Index(str, lambda order: order.customer)})

    copy = loaded(Indexed.factory(), state)  # a standby goes on
    with pytest.raises(StoreError, match=r"cannot be built: .*roll this member forward"):
        copy.accounts.by("who", "ada")


def test_a_unique_index_takes_nothing_while_it_cannot_read_a_value_but_what_mends_it() -> None:
    class Unique(Stores):
        users = NamedTable.of(str, Order, index={"mail": Index(str, lambda user: user.customer, unique=True)})

    store = loaded(Unique.factory(), {b"\xfeusers\x00a": b"spoilt"})
    with pytest.raises(StoreError, match=r"'mail' .* cannot be built: 1 value\(s\), that of 'a' first: .*repair"):
        at(store, 0, lambda: store.users.put("b", Order("x")))
    at(store, 0, lambda: store.users.put("a", Order("y")))
    at(store, 0, lambda: store.users.put("b", Order("x")))
    assert [key for key, _ in store.users.by_range("mail")] == ["b", "a"]


def test_a_value_that_cannot_be_read_is_what_a_function_makes_of_it(caplog: pytest.LogCaptureFixture) -> None:
    """At each read, by an index, too; until it is put."""

    def mended(key: str, data: bytes) -> Order | None:
        return Order(key, int(data)) if data.isdigit() else None

    class Mending(Stores):
        orders = NamedTable.of(
            str, Order, ordered=True, index={"who": Index(str, lambda order: order.customer)}, on_unreadable=mended
        )

    state = {b"\xfeorders\x00a": b"7", b"\xfeorders\x00b": b"spoilt", b"\xfeorders\x00c": b'{"customer":"ada"}'}
    store = loaded(Mending.factory(), state)
    assert store.orders.get("a") == Order("a", 7)
    assert store.orders.get("b") is None
    assert store.orders.get("b", 5) == 5
    assert [key for key, _ in store.orders.items()] == ["a", "c"]
    assert [key for key, _ in store.orders.by_range("who")] == ["a", "c"]
    assert "b" in store.orders, "its bytes are there"
    at(store, 0, lambda: store.orders.put("b", Order("bob")))
    assert store.orders.get("b") == Order("bob")
    assert [key for key, _ in store.orders.by("who", "bob")] == ["b"]
    assert "4 values could not be read, on_unreadable has got them; the last: key ('orders', 'a')" in caplog.text

    def fails(key: str, data: bytes) -> None:
        raise ZeroDivisionError(key)

    for engine in (None, SQLite()):
        table = Table.factory(key=str, value=Order, on_unreadable=fails, engine=engine)(HERE)
        table.receive_change(Change(b"a", b"spoilt"))
        with pytest.raises(ZeroDivisionError):
            table.get("a")
    with pytest.raises(ConfigError, match=r"on_unreadable is 'fail'; give a function of a key"):
        Table.factory(key=str, value=Order, on_unreadable="fail")  # type: ignore[arg-type]


def test_so_it_is_in_heaps_windows_and_simple_stores() -> None:
    asked: list[Any] = []

    def mended(key: Any, data: bytes) -> int | None:
        asked.append(key)
        return 7 if data == b"seven" else None

    def told(ctx: Any, key: str, window: Window, value: int) -> None:
        asked.append((key, value))

    class Mending(Stores):
        heap = Heap.of(
            str, int, priority=Index(int, lambda value: value), value_codec=JsonCodec(int), on_unreadable=mended
        )
        win = Windows.tumbling(
            str, int, size=10, add=lambda old, item: (old or 0) + 1, on_close=told, on_unreadable=mended
        )

    class Strict(Stores):
        win = Windows.tumbling(str, int, size=10, add=lambda old, item: (old or 0) + 1, on_close=told)

    state = {b"\xfeheap\x00a": b"seven", b"\xfeheap\x00b": b"spoilt", b"\xfeheap\x00c": b"9"}
    row = TupleCodec(bytes, int, int)
    state |= {b"\xfewin\x00" + row.encode((key, 0, 10_000)): b"seven" for key in (b"x", b"y")}
    state[b"\xfewin\x00" + row.encode((b"y", 0, 10_000))] = b"spoilt"
    store = loaded(Mending.factory(), state)
    assert [*store.heap.ascending()] == [("a", 7), ("c", 9)]
    window = Window(0, 10_000)
    assert (store.win.get("x", window), store.win.get("y", window)) == (7, None)
    asked.clear()
    at(store, 30)
    assert asked == [("x", window), ("x", 7), ("y", window)], "it closes, and what is left out is not reported"
    strict = loaded(Strict.factory(), {key: value for key, value in state.items() if b"win" in key})
    with pytest.raises(StateUnreadable, match=r"kes state"):
        at(strict, 30)
    for engine in (None, SQLite()):
        simple = SimpleStore.factory(int, key=str, codec=JsonCodec(int), engine=engine, on_unreadable=mended)(HERE)
        for key in (b"a", b"b"):
            simple.receive_change(Change(key, b"seven" if key == b"a" else b"spoilt"))
        assert (simple.get("a"), simple.get("b"), [*simple], [*simple.prefix("b")]) == (7, None, [7], [])


def test_a_new_field_is_refused_by_a_class_that_forbids_what_it_does_not_know() -> None:
    """So that an old release does not drop it, in a store without versions."""

    class Old(msgspec.Struct, forbid_unknown_fields=True):
        cents: int = 0

    class New(Old):
        limit: int = 100

    tables = [Table.factory(key=str, value=value)(HERE) for value in (New, Old)]
    journal: list[Change] = []
    tables[0].begin(journal)
    tables[0].put("a", New(5, limit=999))
    tables[1].receive_change(journal[0])
    with pytest.raises(StateUnreadable, match=r"key 'a': not a Old: .*unknown field `limit`.*kes state repair"):
        tables[1].get("a")


def test_upcasters_are_taken_out_when_no_value_needs_them() -> None:
    state = at(store := First(HERE), 0, lambda: store.accounts.put("a", Order("ada", 150)))
    state[b"\xfeaccounts\x00b"] = FRAME + b"\x01\x00\x02" + b'{"cents":200,"owner":"bob"}'
    former = Third(HERE)
    migrated = {key: new for key, value in state.items() if (new := former.upgraded(key, value)) is not None}
    assert {key: former.upgraded(key, value) for key, value in migrated.items()} == dict.fromkeys(migrated)

    class Without(Stores):
        accounts = NamedTable.of(str, Account, version=3)

    newer = loaded(Without.factory(), state | migrated)
    assert dict(newer.accounts.items()) == {"a": Account(1.5, "ada"), "b": Account(2.0, "bob")}
    with pytest.raises(DecodeError, match=r"the value has version 1, .*no upcaster for it.*kes state migrate"):
        loaded(Without.factory(), state).accounts.get("a")


@pytest.mark.parametrize("raised", [KeyError, asyncio.CancelledError])
def test_upcasters_that_fail(raised: type[BaseException]) -> None:
    def failing(old: dict[str, Any]) -> dict[str, Any]:
        raise raised

    class Failing(Stores):
        accounts = NamedTable.of(str, Account, version=2, upcast={1: failing})

    class Wrong(Stores):
        accounts = NamedTable.of(str, Account, version=2, upcast={1: lambda old: 1})  # type: ignore[dict-item, return-value]

    state = at(store := First(HERE), 0, lambda: store.accounts.put("a", Order("ada")))
    with pytest.raises(DecodeError, match=f"the upcaster from version 1 failed: {raised.__name__}"):
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


# -- windows -----------------------------------------------------------------------------------------------------------


def test_windows_that_are_kept_and_a_grace_that_gets_longer() -> None:
    closed: list[Window] = []

    def note(ctx: object, key: str, window: Window, value: int) -> None:
        closed.append(window)

    def make(grace: float) -> type[Stores]:
        class Kept(Stores):
            minutes = Windows.tumbling(str, int, size=60, grace=grace, keep=100, add=count, on_close=note)

        return Kept

    store: Any = make(0)(HERE)
    at(store, 0, lambda: store.minutes.add("a", ""))
    state = at(store, 60)
    window = Window(0, 60_000)
    assert closed == [window]
    assert store.minutes.get("a", window) == 1
    assert store.minutes.is_closed("a", window)
    longer: Any = loaded(make(30), state)
    at(longer, 61, lambda: longer.minutes.add("a", "", at_ms=59_000))
    at(longer, 95)
    assert closed == [window], "reported once"
    assert dict(longer.minutes.of("a")) == {window: 1}, "and not changed afterwards"
    at(longer, 190)
    assert not len(longer.minutes)
    assert LateItem.__mro__[1] is StoreError


def test_sessions_are_joined_by_what_falls_in_between() -> None:
    class Visits(Stores):
        visits = Windows.session(
            str, str, gap=10, add=lambda old, item: (old or "") + item, merge=lambda early, late: early + late, grace=60
        )

    store = Visits(HERE)

    def work() -> None:
        for item, at_ms in (("a", 0), ("b", 15_000), ("c", 40_000), ("d", 9_999)):
            store.visits.add("k", item, at_ms=at_ms)

    at(store, 40, work)
    assert dict(store.visits.of("k")) == {Window(0, 25_000): "abd", Window(40_000, 50_000): "c"}
    at(store, 40, lambda: store.visits.add("k", "e", at_ms=25_000))  # the gap is over: one of its own
    assert dict(store.visits.of("k"))[Window(25_000, 35_000)] == "e"
    assert len(store.visits) == 3


def test_an_open_session_takes_what_would_be_late_alone() -> None:
    """It is merged first, and then judged, as in Flink and Kafka Streams."""
    late: list[int] = []

    class Visits(Stores):
        visits = Windows.session(
            str, str, gap=10, add=lambda old, item: (old or "") + item, merge=lambda early, then: early + then,
            late=lambda ctx, key, item, at_ms: late.append(at_ms),
        )  # fmt: skip

    store = Visits(HERE)

    def add(item: str, seconds: int, *, now: int) -> None:
        at(store, now, lambda: store.visits.add("k", item, at_ms=1000 * seconds))

    for number, seconds in enumerate(range(1000, 1091, 5)):
        add("abcdefghijklmnopqrstuvwxyz"[number], seconds, now=seconds)
    add("X", 1050, now=1090)
    add("Y", 991, now=1090)  # it touches the session, which begins there now
    add("Z", 980, now=1090)  # the gap is over: late
    assert list(store.visits.of("k")) == [(Window(991_000, 1_100_000), "abcdefghijklmnopqrsXY")]
    assert late == [980_000]
    add("X", 1050, now=1100)
    assert late == [980_000, 1_050_000], "the session is closed"
