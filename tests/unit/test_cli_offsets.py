"""``kes offsets`` without a broker: what is shown, what is set, what is wrong usage, and with which exit code."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping

import pytest

from streams import EventSourceConfig
from streams.cli import logging_setup, offsets
from streams.errors import OffsetError
from streams.records import IncomingRecord
from streams.runtime.changelog import OFFSET_KEY, decode_offset
from tests.unit.cli_kit import FakeCluster, Kes, admin, preset, source_of

__all__ = ["admin"]  # the fixture

ROWS = {0: (5, 3), 1: (4, 4), 2: (None, 7), 3: (9, None), 4: (None, None)}
"""Partition -> the group's offset, the changelog's."""


class FakeChecks:
    """``GroupChecks`` of one group; ``done`` is what was committed for it."""

    done: dict[int, int] | None = None
    written: dict[int, bytes] | None = None
    further: tuple[str, dict[int, int]] | None = None
    inputs = b""
    alive = False

    def __init__(self, config: EventSourceConfig, *, seconds: float) -> None: ...
    def __enter__(self) -> FakeChecks:
        return self

    def __exit__(self, *_: object) -> None: ...

    def refuse_if_alive(self) -> None:
        if self.alive:
            raise OffsetError("group demo is alive (a)")

    def committed(self, partitions: list[int], topic: str = "") -> dict[int, int | None]:
        if topic:
            return dict.fromkeys(partitions, 8)
        return {number: ROWS[number][0] for number in partitions}

    def last_records(self, topic: str, partitions: list[int], key: bytes) -> dict[int, IncomingRecord]:
        rows = {number: ROWS[number][1] for number in partitions}
        value = b'{"offset":%d,"writer":"w","serial":1,"generation":1,"source_id":"s","changelog_id":"c"'
        return {
            number: IncomingRecord(topic, number, 0, key, value % offset + self.inputs + b"}", None)
            for number, offset in rows.items()
            if offset is not None and key == OFFSET_KEY
        }

    def source_id(self, topic: str = "") -> str:
        return f"new of {topic}" if topic else "s"

    def changelog_id(self) -> str:
        return "new"

    def set_offsets(self, offsets: Mapping[int, int], topic: str = "") -> None:
        if topic:
            FakeChecks.further = (topic, dict(offsets))
        else:
            FakeChecks.done = dict(offsets)

    def write(self, topic: str, key: bytes, values: Mapping[int, bytes]) -> None:
        FakeChecks.written = dict(values)


@pytest.fixture(autouse=True)
def there(admin: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event source's group is the fake one."""
    monkeypatch.setattr(sys.modules["fleet"], "source", source_of(num_partitions=5, bootstrap_servers="there:1"))
    monkeypatch.setattr(offsets, "GroupChecks", FakeChecks)
    monkeypatch.setattr(offsets, "await_listener", lambda servers, timeout: None)
    monkeypatch.setattr(FakeChecks, "done", None)
    monkeypatch.setattr(logging_setup, "configure_logging", lambda options: None)


@pytest.fixture
def accept(kes: Kes) -> Kes:
    return preset(kes, "offsets", "accept", "fleet:source")


def test_only_what_is_ahead_is_set_back(accept: Kes) -> None:
    out, err = accept("--yes", "--json", code=1)
    assert FakeChecks.done == {0: 3}
    states = {row["partition"]: row["state"] for row in json.loads(out)["partitions"]}
    assert states == {0: "set back", 1: "equal", 2: "behind", 3: "no offset in the changelog", 4: "equal"}
    assert "partitions [3]" in err
    assert "demo.flights.changelog" in err
    accept("--yes", "-p", "0", "-p", "4")
    assert FakeChecks.written == {}, "no topic is accepted that nobody asked for"


def test_topics_that_were_restored_are_taken_for_those_of_the_state(accept: Kes) -> None:
    assert accept("--restored", "--yes", "--json", "-p", "1", "-p", "4").data["restored"] == [1]
    assert FakeChecks.written == {
        1: b'{"offset":4,"writer":"w","serial":1,"generation":1,"source_id":"s","changelog_id":"new"}'
    }


def test_further_inputs_are_set_back_and_adopted_too(accept: Kes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by its own position; what is of inputs that this release does not know is left as it is."""
    source = source_of(num_partitions=5, bootstrap_servers="there:1")
    source.input("payments")
    monkeypatch.setattr(sys.modules["fleet"], "source", source)
    positions = b',"inputs":{"payments":{"1":[6,"old"]},"more":{"1":[2, "id"]}}'
    monkeypatch.setattr(FakeChecks, "inputs", positions)
    answer = accept("--restored", "--yes", "--json", "-p", "1").data
    assert FakeChecks.done == {}
    assert FakeChecks.further == ("payments", {1: 6})
    assert [(row["group_offset"], row["state"]) for row in answer["inputs"]["payments"]] == [(8, "set back")]
    assert FakeChecks.written is not None
    written = decode_offset(IncomingRecord("log", 1, 0, OFFSET_KEY, FakeChecks.written[1], None))
    assert written.position_in("payments", 1) == (6, "new of payments")
    assert written.position_in("more", 1) == (2, "id")
    assert (written.offset, written.changelog_id) == (4, "new")
    monkeypatch.setattr(FakeChecks, "inputs", b"")
    assert "offsets for the partitions [1] of payments" in accept("--yes", "-p", "1", code=1).err


@pytest.mark.parametrize(("answer", "code", "done"), [("y\n", 0, {0: 3}), ("n\n", 1, None), ("", 1, None)])
def test_it_says_what_will_happen_and_asks(
    accept: Kes, answer: str, code: int, done: dict[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
    said = accept("--partition", "0", "--partition", "1", code=code).err
    assert "records 3 to 4 are handled again\n" in said.replace(" \n", "\n"), "the table is whole"
    assert FakeChecks.done == done
    assert "flights[0]: records 3 to 4 are handled again" in said
    assert "appear a second time" in said


def test_what_changed_while_the_question_stood_is_not_set(accept: Kes, monkeypatch: pytest.MonkeyPatch) -> None:
    def confirm(*_: object, **__: object) -> None:
        monkeypatch.setitem(ROWS, 0, (9, 8))

    monkeypatch.setattr(offsets.typer, "confirm", confirm)
    assert "have changed in the meantime" in accept("--partition", "0", code=1).err
    assert FakeChecks.done is None


@pytest.mark.parametrize(
    ("arguments", "alive", "code", "said"),
    [(["--partition", "5"], False, 2, "partitions 0 to 4"), (["--yes"], True, 1, "group demo is alive (a)")],
)
def test_what_is_refused(
    accept: Kes, arguments: list[str], alive: bool, code: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeChecks, "alive", alive)
    assert said in accept(*arguments, code=code).words
    assert FakeChecks.done is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name a place: --at, --like-group, or --from-group"),
        (["--at", "2026-11-20T00:00"], "has no time zone"),
        (["--at", "2999-01-01T00:00Z"], "is in the future"),
        (["--at", "5@0"], "has the partitions 0 to 4, not 5"),
        (["--at", "else:0@0"], "'else' is no input that can begin anywhere: those are flights"),
        (["--at", "3@1", "--at", "3@2"], "names a partition a second time"),
        (["--at", "earliest", "--like-group", "x"], "for those without offset: --missing"),
        (["--like-group", "x", "--from-group", "y"], "exclude each other"),
        (["--like-group", "demo"], "use --from-group"),
        (["--from-group", "x", "--missing", "3@1"], "--missing takes earliest, latest or a time"),
        (["--at", "earliest", "--missing", "latest"], "beside a group"),
        (["--at", "earliest", "--json"], "--json needs --yes"),
    ],
)
def test_places_that_cannot_be_are_wrong_usage(kes: Kes, arguments: list[str], said: str) -> None:
    assert said in kes("offsets", "start", "fleet:source", *arguments, code=2).words
