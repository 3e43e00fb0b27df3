"""``once=`` that cannot be: wrong settings, fields that are not there, kinds of handlers without ids; the command."""

from __future__ import annotations

import json
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from streams import EventContext, EventSource, EventSourceConfig, Table, event_type, upcaster
from streams.cli import once as cli_once
from streams.disk import RocksDB, SQLite
from streams.errors import ConfigError, EncodeError, RegistrationError
from streams.runtime.changelog import SEEN_PREFIX
from streams.settings import Once, header
from streams.settings.once import with_id
from streams.testing import TestDriver
from tests.unit.cli_kit import Kes
from tests.unit.parking_kit import Add, Bank, add

pytestmark = pytest.mark.usefixtures("quiet")

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"id": ""}, "Once.id is ''"),
    ({"id": "a b"}, "Once.id is 'a b'"),
    ({"id": "a..b"}, "Once.id is"),
    ({"id": None}, "Once.id is None"),
    ({"id": 5}, "Once.id is 5"),
    ({"within": 0}, "Once.within is 0"),
    ({"within": -1.0}, "Once.within is -1.0"),
    ({"within": True}, "Once.within is True"),
    ({"within": "1d"}, "Once.within is '1d'"),
    ({"within": float("nan")}, "Once.within is nan"),
    ({"within": timedelta(days=365 * 101)}, "Once.within is"),
    ({"scope": ""}, "Once.scope is ''"),
    ({"scope": "a\0b"}, "Once.scope is"),
    ({"scope": "\ud800"}, "Once.scope is"),
    ({"scope": 5}, "Once.scope is 5"),
    ({"max_ids": 0}, "Once.max_ids is 0"),
    ({"max_ids": 1.5}, "Once.max_ids is 1.5"),
    ({"when_full": "wait"}, "Once.when_full is 'wait'"),
    ({"engine": "rocksdb"}, "Once.engine is 'rocksdb'"),
    ({"engine": SQLite(), "when_full": "forget"}, "an engine and when_full='forget'"),
]


@pytest.mark.parametrize(("given", "error"), WRONG, ids=[error for _, error in WRONG])
def test_wrong_settings_are_refused_by_name(given: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError) as found:
        Once(**{"id": "number", "within": 9} | given)
    assert error in str(found.value)


def test_headers_and_ids_of_records() -> None:
    for name in ("", None, 5):
        with pytest.raises(ConfigError, match="the header of an id is"):
            header(name)  # type: ignore[arg-type]
    assert list(with_id([("a", b"1")], "ü")) == [("a", b"1"), ("kes-id", "ü".encode())]
    assert list(with_id((), 17)) == [("kes-id", b"17")]
    assert list(with_id([("a", None)], None)) == [("a", None)]
    for wrong in ("", b"", True, 1.5):
        with pytest.raises(EncodeError, match="the id of a record"):
            with_id((), wrong)  # type: ignore[arg-type]


def source(**settings: Any) -> EventSource[Any]:
    config = EventSourceConfig(group_id="g", topic="adds", num_partitions=1, **settings)
    return EventSource(config, store=Table.factory(key=str, value=int))


def handle(ctx: EventContext[Any], event: Any) -> None: ...


def test_a_field_that_is_not_there_and_what_is_no_once() -> None:
    with pytest.raises(RegistrationError, match=r"the field 'nummer', and Add has none of this name .*number"):
        source().register_event_type(Add, handle, once=Once("nummer", within=9))
    with pytest.raises(ConfigError, match="once of Add is 'number'"):
        source().register_event_type(Add, handle, once="number")  # type: ignore[call-overload]


@event_type("Other")
class Other(msgspec.Struct):
    number: int


@pytest.mark.parametrize(
    ("one", "other", "what"),
    [
        ({"max_ids": 5}, {"max_ids": 6}, "max_ids is said to be 5 and 6"),
        ({"when_full": "stop"}, {"when_full": "forget"}, "when_full is said to be 'forget' and 'stop'"),
        ({"engine": SQLite()}, {"engine": RocksDB()}, "engine is said to be"),
        ({"engine": SQLite()}, {"when_full": "forget"}, "an engine and when_full='forget'"),
    ],
)
def test_what_differs_within_a_source_is_refused(one: dict[str, Any], other: dict[str, Any], what: str) -> None:
    made = source()
    made.register_event_type(Add, handle, once=Once("number", within=9, **one))
    made.register_event_type(Other, handle, once=Once("number", within=9, **other))
    with pytest.raises(RegistrationError) as found:
        made._declared.freeze()
    assert what in str(found.value)


def test_ids_on_disk_need_a_store_there() -> None:
    bank = Bank()
    bank.once = Once("number", within=9, engine=SQLite())
    with pytest.raises(ConfigError, match=r"Once\(engine=SQLite\(\)\): ids on disk are in the database"), bank.driver():
        pass


def test_types_that_are_split_and_updates_have_no_once() -> None:
    @event_type("Whole", version=2)
    class Whole(msgspec.Struct):
        number: int

    @upcaster(Whole, from_version=1, many=True)
    def split(old: dict[str, Any]) -> list[Any]:
        return [old]

    made = source()
    made.register_event_type(Whole, handle, once=Once("number", within=9))
    with pytest.raises(RegistrationError, match="or once="):
        made._declared.freeze()
    made = source()
    table = made.join("rows", key=str, value=int)
    with pytest.raises(TypeError, match="once"):
        made.register_update(table, handle, once=Once("number", within=9))  # type: ignore[call-overload]


def test_a_source_without_once_keeps_no_ids() -> None:
    bank = Bank()
    with TestDriver(bank.source) as driver:
        add(driver, 1, 1)
        assert driver.store(0).get("a") == (1, 1)
        assert 1 not in driver.seen("Add")
        assert driver.statistics().partitions[0].once_ids == 0


def test_the_command_shows_what_is_committed(kes: Kes, monkeypatch: pytest.MonkeyPatch) -> None:
    bank = Bank()
    bank.once = Once("number", within=1000)
    with TestDriver(bank.source) as driver:
        add(driver, 1, 2, 2, 3)
        driver.advance(2000)
        for number in (4, 5):  # the first three go
            add(driver, number)
        log = driver._world.broker.log("bank.adds.changelog", 0)
        records = [*log.committed(0, log.end)]
    program = bank.source()
    monkeypatch.setattr(cli_once, "named_source", lambda name: program)
    opened = nullcontext(([0], lambda receive: receive(0, records)))
    monkeypatch.setattr(cli_once, "opened", lambda *_: opened)
    (row,) = json.loads(kes("once", "stats", "bank:source", "--json").out)["once"]
    assert (row["partition"], row["ids"], row["kept_bytes"]) == (0, 2, 0)
    assert row["last_goes_s"] >= row["first_goes_s"] > 1000
    assert "first goes" in kes("once", "stats", "bank:source").out
    records.append(msgspec.structs.replace(records[-1], key=SEEN_PREFIX + b"x" * 16, value=b"cut"))
    assert "the record of an id cannot be read" in kes("once", "stats", "bank:source", code=1).err
