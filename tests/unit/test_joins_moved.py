"""Joined tables over faults, moves, releases, and on disk."""

from __future__ import annotations

import itertools
import sqlite3
import sys
from contextlib import closing, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from streams import SKIP, EventContext, PoolConfig, Retry, StateConfig, Table
from streams.cli import skip, state_writing
from streams.cli.state_sources import StateAt
from streams.disk.sqlite import SQLite
from streams.errors import ConfigError, TopicReplaced
from streams.records import Change, IncomingRecord, Output, Record
from streams.runtime.changelog import JOIN_PREFIX
from streams.runtime.partition.joined_rows import JoinedRows
from streams.stores.joined import PARTITIONERS
from streams.stores.layered import LayeredEngine
from streams.testing import TestDriver
from streams.testing.driver_base import Unsettled
from streams.testing.simulation.broker import LogEntry
from tests.unit.cli_kit import Kes
from tests.unit.joins_kit import CUSTOMERS, Customer, Shop, place, rows, seen, update


def loading(driver: TestDriver[Any], count: int = 400) -> None:
    place(driver, "c1", wait=False)
    for number in range(count):
        driver.table(CUSTOMERS).put("c1", Customer(f"n{number}"), wait=False)


SMALL: dict[str, Any] = {"pool": PoolConfig(target_batch_size=16, max_batch_size=32)}


@pytest.mark.parametrize("how", ["crash", "join"])
def test_a_first_load_that_is_interrupted_goes_on_before_any_event(how: str) -> None:
    """The end of the load is in the changelog: a position alone would let events in on half a table."""
    with TestDriver(Shop(**SMALL).source, start=False) as driver:
        loading(driver)
        driver.at("commit.after", driver.crash if how == "crash" else lambda _: driver.join())
        driver.start()
        if how == "crash":
            assert rows(driver, PARTITIONERS["murmur2"](b"c1", 2)) != {b"c1": b'{"name":"n399"}'}
            driver.restart()
        driver.settle()
        assert seen(driver) == ["c1 is n399"]
        driver.check()


def test_without_the_end_of_the_load_in_the_changelog_an_event_would_meet_half_a_table(monkeypatch: Any) -> None:
    monkeypatch.setattr(JoinedRows, "begun", lambda self: [])
    with TestDriver(Shop(**SMALL).source, start=False) as driver:
        loading(driver)
        driver.at("commit.after", driver.crash)
        driver.start()
        driver.restart()
        driver.settle()
        assert seen(driver) != ["c1 is n399"]


def test_an_open_transaction_in_the_table_holds_up_no_event() -> None:
    with TestDriver(Shop().source, start=False) as driver:
        driver.table(CUSTOMERS).put("ann", Customer("Ann"), wait=False)
        broker, partition = driver._world.broker, PARTITIONERS["murmur2"](b"ann", 2)
        epoch = broker.init("feeder", 600.0)
        assert epoch is not None
        broker.produce("feeder", epoch, CUSTOMERS, partition, LogEntry(b"ann", b'{"name":"Anna"}', None, None))
        place(driver, "ann", wait=False)
        with pytest.raises(Unsettled, match="readers wait at offset 1 for feeder"):
            driver.start()
        assert seen(driver) == ["ann is Ann"]
        broker.end("feeder", epoch, True)
        driver.advance(5)
        place(driver, "ann")
        assert seen(driver) == ["ann is Ann", "ann is Anna"]


def test_a_join_that_is_taken_out_and_put_back_has_its_rows(caplog: pytest.LogCaptureFixture) -> None:
    release = {"joins": True}
    with TestDriver(lambda: Shop(update, joins=release["joins"]).source, members=2) as driver:
        driver.table(CUSTOMERS).put("ann", Customer("Ann"))
        for joins in (False, True):
            release["joins"] = joins
            for member in list(driver.members):  # a rolling restart
                driver.leave(member)
                driver.restart(member)
                place(driver, "ann")
            if not joins:
                assert "rows of the table customers, which this source does not join" in caplog.text
                assert rows(driver) | rows(driver, 1) == {b"ann": b'{"name":"Ann"}'}
        driver.table(CUSTOMERS).put("ann", Customer("Anna"))
        place(driver, "ann")
        assert seen(driver)[-2:] == ["ann: Ann to Anna", "ann is Anna"]
        assert seen(driver).count("ann: - to Ann") == 1
        driver.check()


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_join_that_was_forgotten_is_read_anew(kes: Kes, monkeypatch: pytest.MonkeyPatch, interrupted: bool) -> None:
    """Its rows go, its position, and the group's offsets: what was deleted meanwhile is not there when it is back."""
    release, changelog = {"joins": True}, "shop.orders.changelog"

    def build() -> Any:
        return Shop(update, joins=release["joins"]).source

    with TestDriver(build) as driver:
        broker = driver._world.broker
        for name in ("ann", "bob", "eve"):
            driver.table(CUSTOMERS).put(name, Customer(name))
        place(driver, "ann", "bob")
        release["joins"] = False
        driver.leave()

        def last_records(topic: str, numbers: list[int], key: bytes) -> dict[int, IncomingRecord]:
            logs = {number: [*broker.log(topic, number).committed(0, 1 << 30)] for number in numbers}
            found = {number: [one for one in log if one.key == key] for number, log in logs.items()}
            return {number: records[-1] for number, records in found.items() if records}

        def forget_offsets(topic: str) -> None:
            for number in range(2):
                broker.offsets.pop((topic, number), None)

        def send(outputs: list[Output]) -> None:
            if interrupted:
                raise KeyboardInterrupt
            for one in outputs:
                broker.append(one.topic, one.partition, one.key, one.value, None)

        checks = SimpleNamespace(
            refuse_if_alive=lambda: None,
            committed=lambda numbers, topic="": {number: broker.offsets.get(number) for number in numbers},
            last_records=last_records,
            forget_offsets=forget_offsets,
            source=lambda topic="": ({n: broker.range(topic, n) for n in range(2)}, broker.identity(topic).topic_id),
            source_id=lambda topic="orders": broker.identity(topic).topic_id,
            changelog_id=lambda: broker.identity(changelog).topic_id,
            hold=lambda *_: None,
        )
        states = {n: StateAt(-1, {}).after([*broker.log(changelog, n).committed(0, 1 << 30)]) for n in range(2)}
        monkeypatch.setitem(sys.modules, "shop", module := ModuleType("shop"))
        monkeypatch.setattr(state_writing, "GroupChecks", lambda *_, **__: nullcontext(checks))
        monkeypatch.setattr(state_writing, "state_of", lambda *_: states)
        slot = SimpleNamespace(send=send, commit=lambda: None, abort=lambda: None)
        monkeypatch.setattr(state_writing, "slot_of", lambda *_: nullcontext(slot))
        arguments = ["state", "forget", "shop:source", "--bootstrap-servers", "nowhere:1", "--yes", "--join"]
        vars(module).update(source=Shop().source)
        assert "shop:source reads customers: only rows of a join that" in kes(*arguments, CUSTOMERS, code=1).words
        vars(module).update(source=build())
        assert "it has those of customers" in kes(*arguments, "costumers", code=1).words
        dry = kes(*arguments, CUSTOMERS, "--dry-run", "--json").data
        assert sum(row["deleted"] for row in dry["partitions"]) == len(rows(driver)) + len(rows(driver, 1)) == 3
        if interrupted:
            kes(*arguments, CUSTOMERS, code=130)
        else:
            kes(*arguments, CUSTOMERS)
            assert rows(driver) | rows(driver, 1) == {}
            for number in range(2):  # and its topic has forgotten that there was a Bob
                for entry in broker.log(CUSTOMERS, number).entries:
                    entry.gone = entry.gone or entry.key == b"bob"
        release["joins"] = True
        driver.restart()
        place(driver, "ann", "bob")
        assert seen(driver)[-2:] == ["ann is ann", "bob is bob" if interrupted else "bob is -"]
        assert seen(driver).count("ann: - to ann") == (1 if interrupted else 2)


def test_of_rows_that_were_forgotten_no_member_warns(caplog: pytest.LogCaptureFixture) -> None:
    """Their tombstones are in the changelog until it is compacted."""
    joined = JoinedRows()
    joined.receive(Change(JOIN_PREFIX + b"customers\0ann", None))
    for begun in (False, True):
        joined.warn(set(), lambda _, begun=begun: begun)  # type: ignore[misc]
        assert ("rows of the table customers" in caplog.text) == begun


def test_a_join_that_is_added_to_a_source_with_state_is_read_first() -> None:
    release = {"joins": False}
    with TestDriver(lambda: Shop(update, joins=release["joins"]).source, members=2) as driver:
        place(driver, "ann", "bob")
        release["joins"] = True
        broker = driver._world.broker
        partition = PARTITIONERS["murmur2"](b"ann", 2)
        for number in range(50):
            broker.append(CUSTOMERS, partition, b"ann", b'{"name":"n%d"}' % number, None, 1)
        for member in list(driver.members):
            driver.leave(member)
            driver.restart(member)
        driver.advance(5)
        place(driver, "ann")
        assert seen(driver)[-1] == "ann is n49"
        assert [text for text in seen(driver) if "to n0" in text] == ["ann: - to n0"]
        driver.check()


def test_a_table_whose_topic_is_another_one_now_is_refused() -> None:
    with TestDriver(Shop().source) as driver:
        driver.table(CUSTOMERS).put("ann", Customer("Ann"))
        driver.crash()
        driver._world.broker.recreate(CUSTOMERS)
        with pytest.raises(TopicReplaced, match=CUSTOMERS):
            driver.restart()


def test_standbys_have_the_rows() -> None:
    with TestDriver(Shop(update, num_standbys=1).source, members=2) as driver:
        for number in range(40):
            driver.table(CUSTOMERS).put(f"c{number}", Customer("Ann"), wait=False)
        driver.settle()
        driver.compact()
        driver.crash(0)
        driver.advance(60)
        place(driver, "c1")
        assert seen(driver)[-1] == "c1 is Ann"
        driver.check()


@pytest.mark.parametrize(("engine", "of_rows"), [(None, None), (SQLite(), None), (SQLite(), SQLite())])
def test_a_folder_on_disk_has_the_rows(
    tmp_path: Path, engine: Any, of_rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = StateConfig(folder=str(tmp_path / "state"), checkpoint_seconds=0.5)
    store = Table.factory(key=str, value=int, engine=engine)
    read: list[bytes] = []
    taken = JoinedRows.receive
    monkeypatch.setattr(JoinedRows, "receive", lambda self, change: (read.append(change.key), taken(self, change))[1])
    options = {"engine": of_rows}
    with TestDriver(lambda: Shop(update, store=store, state=state, options=options).source) as driver:
        for name in ("Ann", "Anna"):
            driver.table(CUSTOMERS).put("ann", Customer(name))
        driver.table(CUSTOMERS).put("bob", Customer("Bob"))
        driver.table(CUSTOMERS).delete("bob")
        driver.advance(5)
        driver.leave()
        read.clear()
        driver.restart()
        place(driver, "ann", "bob")
        assert seen(driver)[-2:] == ["ann is Anna", "bob is -"]
        times = read.count(b"\xff\xffkes.join.customers\0ann")
        assert times == (1 if of_rows is None else 0), "from the disk: the changelog has two records of it"
        driver.check()


# -- rows on disk ------------------------------------------------------------------------------------------------------


class OnDisk:
    """Shops whose store and rows are on disk, in a folder."""

    def __init__(self, folder: Path, updates: Any = update, **more: Any) -> None:
        self.state = StateConfig(folder=str(folder / "state"), checkpoint_seconds=0.5)
        self.updates, self.more = updates, {"options": {"engine": SQLite()}} | more
        self.shops: list[Shop] = []

    def __call__(self) -> Any:
        store = Table.factory(key=str, value=int, engine=SQLite())
        self.shops.append(shop := Shop(self.updates, store=store, state=self.state, **self.more))
        return shop.source

    def rows(self, driver: TestDriver[Any], partition: int = 0) -> dict[str, str]:
        return {key: row.name for key, row in driver.joined(self.shops[-1].customers, partition).items()}


@pytest.mark.parametrize("updates", [update, None])
def test_rows_on_disk_leave_the_memory_when_they_are_written(tmp_path: Path, updates: Any) -> None:
    """They are the very changes that are committed; of others nothing would ever tell that they are written."""
    build = OnDisk(tmp_path, updates)
    with TestDriver(build) as driver:
        for number in range(300):
            driver.table(CUSTOMERS).put(f"c{number}", Customer("Ann"), wait=False)
        driver.settle()
        for moved in (False, True):
            if moved:
                driver.crash()
                driver.restart()
            driver.advance(30)
            for number in range(2):
                assert not any(key.startswith(JOIN_PREFIX) for key in driver.store(number)._layers._overlay)
                assert list(driver.store(number).items()) == [], "nor are they entries of the store"
            assert len(build.rows(driver)) + len(build.rows(driver, 1)) == 300
        driver.check()


def test_scans_of_rows_on_disk(tmp_path: Path) -> None:
    """In the order of their keys, on disk and not yet, and without those of a table whose name begins the same."""
    build = OnDisk(tmp_path, options={"engine": SQLite(), "partitioner": None})

    def two_tables() -> Any:
        source = build()
        source.join(f"{CUSTOMERS}2", key=str, value=Customer, engine=SQLite(), partitioner=None)
        return source

    with TestDriver(two_tables) as driver:
        for topic in (CUSTOMERS, f"{CUSTOMERS}2"):
            for key in ("b", "d", "c"):
                driver.send_record(Record(topic, b'{"name":"%s"}' % topic.encode(), key.encode(), None, 0))
        driver.advance(5)
        for key, value in ((b"a", b'{"name":"new"}'), (b"d", None)):
            driver.send_record(Record(CUSTOMERS, value, key, None, 0))
        table = driver.joined(build.shops[-1].customers, 0)
        assert [(key, row.name) for key, row in table.items()] == [("a", "new"), ("b", CUSTOMERS), ("c", CUSTOMERS)]
        assert [key for key, _ in table.range("b", reverse=True)] == ["c", "b"]
        assert [key for key, _ in table.range("a", "c")] == ["a", "b"]
        assert [key for key, _ in table.range("a", "b", include_high=True)] == ["a", "b"]
        assert [key for key, _ in table.prefix("b")] == ["b"]
        assert (table.first(), len(table), "d" in table) == (("a", Customer("new")), 3, False)


def test_scans_of_a_store_pass_over_rows_in_its_database() -> None:
    """Without reading them: a table of some millions is no matter of a scan over ten entries of the store."""
    kept = [JOIN_PREFIX + b"t\0a", JOIN_PREFIX + b"t\0b"]
    own = [b"", b"a", b"z", b"\xff\xffkes", b"\xff\xffkes/", b"\xff\xff\xff"]
    layers = LayeredEngine()
    for key in own + kept:
        layers.receive(Change(key, b"1"))
    ends = [None, *own, *kept]
    for low, high, reverse in itertools.product(ends, ends, (False, True)):
        for inclusive in itertools.product((False, True), repeat=2):
            with_low, with_high = inclusive
            due = [
                key
                for key in sorted(own, reverse=reverse)
                if (low is None or low < key or (with_low and low == key))
                and (high is None or key < high or (with_high and high == key))
            ]
            found = layers.range(low, high, reverse=reverse, inclusive=inclusive)
            assert [key for key, _ in found] == due, (low, high, reverse, inclusive)
    read = layers._page

    def page(low: Any, high: Any, *more: Any) -> Any:
        rows = read(low, high, *more)
        assert not any(key in kept for key in rows[1])
        return rows

    layers._page = page  # type: ignore[method-assign]
    assert len(layers) == len(own)


def test_an_attempt_that_fails_takes_a_row_on_disk_back(tmp_path: Path) -> None:
    attempts: list[str] = []

    def failing(ctx: EventContext[Any], row: Any) -> None:
        attempts.append(f"{row.old and row.old.name} {ctx.joined(build.shops[-1].customers).get(row.key).name}")
        if len(attempts) % 3:
            raise RuntimeError("not yet")

    policy = Retry(attempts=3, backoff_seconds=0.01, then=SKIP.then)
    build = OnDisk(tmp_path, failing, on_update=policy)
    with TestDriver(build) as driver:
        for name in ("Ann", "Anna"):
            driver.table(CUSTOMERS).put("ann", Customer(name))
            driver.advance(5)
        assert attempts == [*["None Ann"] * 3, *["Ann Anna"] * 3]
        assert build.rows(driver) | build.rows(driver, 1) == {"ann": "Anna"}
        driver.check()


@pytest.mark.parametrize("met_by", ["event", "update"])
def test_a_row_that_is_damaged_on_disk_restores_the_partition(tmp_path: Path, caplog: Any, met_by: str) -> None:
    build = OnDisk(tmp_path)
    with TestDriver(build, state_folder=str(tmp_path)) as driver:
        driver.table(CUSTOMERS).put("ann", Customer("Ann"))
        driver.advance(5)
        driver.leave()
        driver.restart()
        number = PARTITIONERS["murmur2"](b"ann", 2)
        (path,) = (tmp_path / "state").glob(f"*/*/{number}/data-sqlite1/state.db")
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("UPDATE state SET value = zeroblob(12) WHERE hex(key) LIKE '%616E6E'")
        if met_by == "event":
            place(driver, "ann")
        else:
            driver.table(CUSTOMERS).put("ann", Customer("Anna"))
        assert seen(driver)[-1] == ("ann is Ann" if met_by == "event" else "ann: Ann to Anna")
        assert "a row has a wrong checksum; it is set aside" in caplog.text
        driver.check()


def test_rows_on_disk_without_a_store_there_are_refused(tmp_path: Path) -> None:
    shop = Shop(update, state=StateConfig(folder=str(tmp_path)), options={"engine": SQLite()})
    with pytest.raises(ConfigError, match=r"engine=SQLite\(\)\): rows on disk .* give the store the same engine"):
        TestDriver(shop.source)
    with pytest.raises(ConfigError, match=r"set StateConfig\.folder"):
        TestDriver(Shop(store=Table.factory(key=str, value=int, engine=SQLite()), options={"engine": SQLite()}).source)
    with pytest.raises(ConfigError, match=r"engine of source\.join\('more'\) is 'sqlite'"):
        shop.source.join("more", key=str, value=Customer, engine="sqlite")  # type: ignore[arg-type]


def test_a_row_of_a_table_that_was_never_begun_is_passed(kes: Kes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end up to which the table is read first comes with the position: else events would meet half of it."""
    monkeypatch.setitem(sys.modules, "shop", module := ModuleType("shop"))
    vars(module).update(source=Shop().source)
    sent: list[Output] = []
    checks = SimpleNamespace(
        refuse_if_alive=lambda: None,
        committed=lambda numbers, topic: dict.fromkeys(numbers),
        last_records=lambda *_: {},
        source=lambda topic="": ({0: (3, 9)}, "id"),
        source_id=lambda topic="": "id",
        changelog_id=lambda: "log",
        hold=lambda *_: None,
    )
    record = IncomingRecord(CUSTOMERS, 0, 3, b"ann", b"{", None)
    admin = SimpleNamespace(identity=lambda *_: ("log", 2))
    monkeypatch.setattr(skip, "GroupChecks", lambda *_, **__: nullcontext(checks))
    monkeypatch.setattr(skip, "admin_of", lambda *_: nullcontext(admin))
    monkeypatch.setattr(skip, "slot_of", lambda *_: nullcontext(SimpleNamespace(send=sent.extend)))
    monkeypatch.setattr(skip, "transaction", lambda *_: nullcontext())
    monkeypatch.setattr(skip, "_next", lambda *_: record)
    kes("skip", "shop:source", f"{CUSTOMERS}:0@3", "--yes", "--json", "--bootstrap-servers", "nowhere:1")
    assert [(one.key, one.value) for one in sent[:-1]] == [(JOIN_PREFIX + CUSTOMERS.encode(), b"9")]
    assert b'"inputs":{"customers":{"0":[4,"id"]}}' in (sent[-1].value or b"")
