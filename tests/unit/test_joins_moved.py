"""Joined tables over faults, moves, releases, and on disk."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from streams import PoolConfig, StateConfig, Table
from streams.cli import skip, state_writing
from streams.cli.state_sources import StateAt
from streams.disk.sqlite import SQLite
from streams.errors import TopicReplaced
from streams.records import IncomingRecord, Output
from streams.runtime.changelog import JOIN_PREFIX
from streams.runtime.partition.joined_rows import JoinedRows
from streams.stores.joined import PARTITIONERS
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
        assert "shop:source reads customers: only a join that" in kes(*arguments, CUSTOMERS, code=1).words
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
    joined.receive(JOIN_PREFIX + b"customers\0ann", None)
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


@pytest.mark.parametrize("engine", [None, SQLite()])
def test_a_folder_on_disk_has_the_rows(tmp_path: Path, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    state = StateConfig(folder=str(tmp_path / "state"), checkpoint_seconds=0.5)
    store = Table.factory(key=str, value=int, engine=engine)
    read: list[bytes] = []
    taken = JoinedRows.receive
    monkeypatch.setattr(JoinedRows, "receive", lambda self, key, value: (read.append(key), taken(self, key, value))[1])
    with TestDriver(lambda: Shop(update, store=store, state=state).source) as driver:
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
        assert read.count(b"\xff\xffkes.join.customers\0ann") == 1, "from the disk: the changelog has two records of it"
        driver.check()


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
