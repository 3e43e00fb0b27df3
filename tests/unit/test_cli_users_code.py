"""Commands that load a user's module: whatever that does, a line says what is wrong and where, and no stack trace."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from streams.cli import verify
from streams.cli.source_name import check_defined, checked_name
from streams.errors import ConfigError
from streams.kafka.questions.admin import TopicAdmin, Watermarks
from streams.kafka.reading.reader import PartitionReader
from streams.model.loading import load
from streams.model.topics import TopicSpec
from streams.records import IncomingRecord
from streams.sak.murmur2 import partition_of
from streams.settings.config import EventSourceConfig
from tests.unit.cli_kit import Kes

EVENTS = """
import sys
import msgspec
from streams import EventSource, EventSourceConfig
from streams.records import Record

class Paid(msgspec.Struct):
    cents: int

source = EventSource(EventSourceConfig(group_id="g", topic="t", num_partitions=4, bootstrap_servers="localhost:1"))
source.join("prices", key=str, value=int)
source.lookup("taxes", key=str, value=int)
several = EventSource(EventSourceConfig(group_id="g", topic="t", num_partitions=4, bootstrap_servers="localhost:1"))
several.input("payments")
number = 3

def broken():
    raise KeyError("row 7")

def leaves():
    sys.exit("set SHOP_DB")

def begins():
    yield Paid(1)
    raise RuntimeError("the file ends here")

def nothing():
    return None

def numbered_keys():
    yield 7, Paid(1)

def far_away():
    yield Record("", b"x", partition=4)

def elsewhere():
    yield Record("payments", b"x", b"key")

def keyless_row():
    yield Record("prices", b"x")

def row_far_away():
    yield Record("prices", b"x", b"key", partition=4)

def with_rows():
    yield Record("taxes", b"x", b"key", partition=9)
    yield Record("prices", b"x", b"key")
    yield Paid(1)
    yield Paid(2)

def good():
    yield Paid(1)
    yield "key", Paid(2)
    yield b"key", Paid(3)
    yield Record("", b"x", b"key", partition=3)
"""


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """Write a module; its name."""
    made: list[str] = []
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(text: str) -> str:
        made.append(f"users_module_{len(made)}")
        (tmp_path / f"{made[-1]}.py").write_text(text)
        return made[-1]

    yield write
    for name in made:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("code", ["'set SHOP_DB'", "0", "3", ""])
def test_a_module_that_exits_is_no_success(module: Callable[[str], str], code: str) -> None:
    name = module(f"import sys\nsys.exit({code})\n")
    with pytest.raises(ConfigError, match=f"cannot import '{name}'.*SystemExit: {code.strip(chr(39))}.*{name}.py:2"):
        load(name)


def test_an_old_path_of_the_library_is_named_with_the_users_line(module: Callable[[str], str]) -> None:
    name = module("import sys\nfrom streams.event_source import EventSource\n")
    with pytest.raises(ConfigError, match=rf"write: from streams import EventSource \(\S*{name}\.py:2\)"):
        load(name)


def test_a_factory_that_exits_is_no_success(module: Callable[[str], str]) -> None:
    name = module("import sys\ndef make():\n    sys.exit(0)\n")
    with pytest.raises(ConfigError, match=f"'{name}:make' cannot make an event source: SystemExit: 0 .*{name}.py:3"):
        load(f"{name}:make")


def test_a_folder_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> str:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(os, "getcwd", gone)
    with pytest.raises(ConfigError, match="the current folder does not exist any more"):
        load("shop:source")


@pytest.mark.parametrize("failure", ["raise ValueError('no such shop')", "raise SystemExit('no such shop')"])
def test_a_factory_that_fails_is_told_with_its_place(kes: Kes, module: Callable[[str], str], failure: str) -> None:
    name = module(f"def make():\n    {failure}\n")
    said = "".join(kes("group", f"{name}:make", code=1).err.split())
    assert f"'{name}:make'cannotmakeaneventsource:" in said
    assert f"{name}.py:2)" in said
    assert "unexpected" not in said


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("broken", "KeyError: 'row 7' (PLACE:18)"),
        ("leaves", "SystemExit: set SHOP_DB (PLACE:21)"),
        ("begins", "RuntimeError: the file ends here (PLACE:25)"),
        ("nothing", "'NoneType' object is not iterable"),
        ("number", "'int' object is not callable"),
        ("numbered_keys", "yields a key that is int; use str or bytes"),
        ("far_away", "yields a record for partition 4 of 4"),
        ("elsewhere", "yields a record of 'payments', which this source does not read"),
        ("keyless_row", "yields a row of 'prices' without a key"),
        ("row_far_away", "yields a record for partition 4 of 4"),
        ("missing", "name a function as module:function"),
    ],
)
def test_a_function_of_events_that_fails_is_told_with_its_place(
    kes: Kes, module: Callable[[str], str], tmp_path: Path, function: str, message: str
) -> None:
    name = module(EVENTS)
    said = kes("verify", f"{name}:source", "--events", f"{name}:{function}", code=1).err
    place = message.replace("PLACE", str(tmp_path / f"{name}.py"))
    assert f"kes: config error: --events '{name}:{function}'" in said
    assert "".join(place.split()) in "".join(said.split())


@pytest.mark.parametrize("text", ["raise RuntimeError('no data')", "raise SystemExit", "this is no Python"])
def test_a_module_of_events_that_cannot_be_imported(module: Callable[[str], str], text: str) -> None:
    name = module(text)
    with pytest.raises(ConfigError, match=f"cannot import '{name}'"):
        verify._made(f"{name}:events", 10, EventSourceConfig(group_id="g", topic="t", num_partitions=4), {})


def test_events_of_any_form_are_records(module: Callable[[str], str]) -> None:
    source = load(name := module(EVENTS))
    tables = verify._tables(source)
    records, _ = verify._made(f"{name}:good", 10, source.config, tables)
    assert [record.key for record in records] == [None, b"key", b"key", b"key"]
    assert [record.partition for record in records] == [None, records[2].partition, records[2].partition, 3]
    assert len(verify._made(f"{name}:good", 2, source.config, tables)[0]) == 2
    records, rows = verify._made(f"{name}:with_rows", 1, source.config, tables)
    assert len(records) == 1
    assert [(row.topic, row.partition) for row in rows] == [("taxes", 9), ("prices", partition_of(b"key", 4))]
    assert [verify._wide_enough(table, rows).partitions for table in tables.values()] == [4, 10]


def test_copies_keep_the_order_of_partitions_and_tables_are_where_the_source_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def read(reader: PartitionReader, topic: str, spans: Any, **_: object) -> dict[int, list[IncomingRecord]]:
        asked.append((reader._settings.bootstrap_servers, topic, spans))
        times = {0: (30, 10), 1: (20, 40)}
        return {
            number: [IncomingRecord(topic, number, at, b"k", b"%d" % ms, (), ms) for at, ms in enumerate(times[number])]
            for number in spans
        }

    monkeypatch.setattr(TopicAdmin, "watermarks", lambda self, topic: dict.fromkeys((0, 1), Watermarks(0, 9, 10)))
    monkeypatch.setattr(PartitionReader, "read_all", read)
    config = EventSourceConfig(
        group_id="g", topic="t", num_partitions=4, bootstrap_servers="own:1", source_bootstrap_servers="away:1"
    )
    records, rows = verify._copied(
        config, "", 20, {"taxes": TopicSpec(name="taxes", partitions=2, replication_factor=1)}
    )
    whole = {0: (0, 9), 1: (0, 9)}
    assert asked == [("own:1", "taxes", whole), ("away:1", "t", {0: (0, 5), 1: (0, 5)})]
    assert [row.value for row in rows] == [record.value for record in records] == [b"20", b"30", b"10", b"40"]


def test_a_trial_takes_tables_and_no_further_inputs(kes: Kes, module: Callable[[str], str]) -> None:
    said = kes("verify", f"{module(EVENTS)}:several", code=1).err
    assert "kes verify takes the records of one topic, and this source has further inputs (payments)" in said


@pytest.mark.parametrize(
    "arguments",
    [
        ("group", "g", "--timeout", "inf"),
        ("group", "g", "--timeout", "nan"),
        ("group", "g", "--interval", "1e300"),
        ("lag", "--timeout", "inf"),
        ("run", "m:s", "--drain-seconds", "inf"),
        ("run", "m:s", "--window-seconds", "inf"),
        ("run", "m:s", "--gc-threshold", str(1 << 31)),
    ],
)
def test_what_no_clock_and_no_counter_holds_is_wrong_usage(kes: Kes, arguments: tuple[str, ...]) -> None:
    assert arguments[-2] in kes(*arguments, code=2).err


def test_a_module_in_folders_without_init_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outer" / "inner").mkdir(parents=True)
    (tmp_path / "outer" / "inner" / "shop.py").write_text("")
    monkeypatch.chdir(tmp_path)
    checked_name("outer.inner.shop:source")
    with pytest.raises(typer.BadParameter, match=r"did you mean outer\.inner\.shop:source"):
        checked_name("outer.inner.shop.source")


NAMES = """
import json as plain
from os import path
if plain:
    here: object = 1
for each in ():
    pass
def make(): inner = 1
class Made: field = 1
def later():
    global made
    made = 1
"""


def test_a_name_that_a_module_does_not_have_is_refused_without_running_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only where the text leaves no doubt."""
    monkeypatch.chdir(tmp_path)
    files = {
        "names.py": NAMES + "raise SystemExit('it was run')",
        "star.py": "from names import *",
        "lazy.py": "def __getattr__(name): ...",
        "puts.py": "globals()['source'] = 1",
        "broken.py": "def (",
        "house/__init__.py": "known = 1",
        "house/room.py": "",
    }
    (tmp_path / "house").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    for name in ("plain", "path", "here", "each", "make", "Made", "Made.wrong", "made"):
        check_defined(f"names:{name}")
    for text in ("star", "lazy:wrong", "puts", "broken", "house:room.source", "house:known", "house.wrong:source"):
        check_defined(text)  # a worker finds out
    for text, said in [
        ("names", "'names' has no 'source'"),
        ("names:inner", "'names' has no 'inner'"),
        ("names:mak", "'names' has no 'mak': name the event source as module:name; did you mean 'make'[?]"),
        ("house:knwn.source", "'house' has no 'knwn.source': .*did you mean 'known'"),
        ("nowhere.shop:source", "cannot import 'nowhere.shop' .* No module named 'nowhere'"),
    ]:
        with pytest.raises(ConfigError, match=said):
            check_defined(text)
