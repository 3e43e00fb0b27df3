"""Where a source without a past begins: places as text, ``start_at``, and ``TestDriver.begin``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from streams import EventContext, EventSource, Table
from streams.errors import ConfigError, OffsetError
from streams.model.places import EARLIEST, LATEST, Places, places_of, shown_place
from streams.records import IncomingRecord
from streams.runtime.changelog import BEGIN_FORMAT, BEGIN_KEY, BeginRecord, decode_begin
from streams.runtime.ownership.beginnings import Beginnings
from streams.stores.foreign import ForeignRow
from streams.testing import TestDriver
from streams.testing.driver import START_TIME
from tests.unit.driver_kit import OUT, build, config, totals
from tests.vocabulary import Added, Total

NOON_MS = 1_763_640_000_000  # 2025-11-20T12:00Z


@pytest.mark.parametrize(
    ("texts", "offsets", "time_ms"),
    [
        (["earliest"], {}, EARLIEST),
        (["latest", "3@1200"], {("", 3): 1200}, LATEST),
        (["2025-11-20T12:00Z"], {}, NOON_MS),
        (["2025-11-20T13:00+01:00"], {}, NOON_MS),
        (["pay.ments:0@0", "0@7"], {("pay.ments", 0): 0, ("", 0): 7}, None),
        ([], {}, None),
    ],
)
def test_places_are_read(texts: list[str], offsets: dict[tuple[str, int], int], time_ms: int | None) -> None:
    assert places_of(texts) == Places(offsets, time_ms)
    if time_ms is not None:
        assert places_of([shown_place(time_ms)]).time_ms == time_ms


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["3@-1"], "is no place"),
        (["@7"], "is no place"),
        (["\u0663@7"], "is no place"),
        (["a b:3@1"], "is no place"),
        (["soon"], "is no place: use earliest, latest, a time such as"),
        (["2025-11-20T12:00"], "has no time zone"),
        (["0001-01-01T00:00Z"], "before 1971"),
        (["3@1", "3@2"], "a second time"),
        (["0@1", "added:0@2"], "a second time"),
        (["earliest", "latest"], "two places for all partitions"),
    ],
)
def test_what_is_no_place_is_refused(texts: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        places_of(texts, "added")
    with pytest.raises(ConfigError, match=f"start_at: .*{said}"):
        build(start_at=", ".join(texts))


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="start_at: added has the partitions 0 to 2"):
        build(start_at="3@0")
    with pytest.raises(ConfigError, match="start_at is of type int"):
        build(start_at=7)
    with pytest.raises(ConfigError, match=r"start_at: 'else' is no input .* those are added"):
        TestDriver(build(start_at="else:0@0")).close()


def send(driver: TestDriver[Any], *names: str) -> None:
    for name in names:
        driver.send(Added(name), key=name, partition=0, wait=False)


def said_to_begin(driver: TestDriver[Any], partition: int = 0) -> list[BeginRecord]:
    log = driver._world.broker.log(driver._world.config.changelog, partition)
    return [decode_begin(record) for record in log.committed(0, log.end) if record.key == BEGIN_KEY]


@pytest.mark.parametrize(
    ("start_at", "names", "place"),
    [
        ("0@1, latest", "bcde", "0@1"),
        ("0@3", "de", "0@3"),
        (shown_place(int(START_TIME + 10) * 1000), "cde", "2023-11-14T22:13:30.000Z"),
        (shown_place(int(START_TIME + 15) * 1000), "de", "2023-11-14T22:13:35.000Z"),
        ("latest", "de", "latest"),
        ("earliest", "abcde", "earliest"),
        ("1@0", "abcde", "earliest"),  # not named: by auto_offset_reset
    ],
)
def test_a_source_begins_at_its_place_and_a_restart_does_not_decide_anew(
    start_at: str, names: str, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with TestDriver(build(start_at=start_at), start=False) as driver:
        send(driver, "a", "b")
        driver._run(_pass(10.0))
        send(driver, "c")
        driver._run(_pass(10.0))
        driver.start()
        driver.settle()
        driver.crash()
        send(driver, "d", "e")
        driver.restart()
        driver.settle()
        assert sorted(total.name for total in driver.outputs(OUT, Total)) == list(names)
        [began] = said_to_begin(driver)
        assert (began.how, began.by, began.at, began.places) == (
            "start",
            "member-0",
            {"added": 5 - len(names)},
            {"added": place},
        )
        assert [record.getMessage() for record in caplog.records if "has no effect" in record.getMessage()] == [
            f"start_at={start_at!r} has no effect: the source has begun already (added[0] goes on at offset "
            f"{3 if len(names) > 1 else 5})"
        ]
        assert set(driver.changelog(0)) == {name.encode() for name in names}
        driver.check()


async def _pass(seconds: float) -> None:
    from streams.testing.simulation.virtual_time import elapse

    await elapse(seconds)


class Growing:
    """A log that gets a record right after it was asked for one."""

    end = 5

    def offset_of_time(self, *_: Any) -> None:
        self.end += 1

    def stable_end(self, *_: Any) -> int:
        return self.end


async def test_a_record_that_comes_while_its_place_is_looked_up_is_not_passed() -> None:
    async def call(function: Any, *arguments: Any) -> Any:
        return function(*arguments)

    member: Any = SimpleNamespace(
        config=config(start_at="2023-11-14T22:13:30Z"), further_inputs=(), source_log=Growing(), now=lambda: 0.0,
        wall_ms=lambda: int(START_TIME + 99) * 1000,
    )  # fmt: skip
    worker: Any = SimpleNamespace(started_at={}, partition=0)
    source: Any = SimpleNamespace(call=call)
    await Beginnings(member, source).find(worker, None, {"added": (0, 5)})
    assert worker.started_at == {"added": 5}


@pytest.mark.parametrize(
    ("start_at", "said"),
    [
        ("0@3", r"added\[0\]: start_at names offset 3, and the log has 0 to 2 only"),
        ("2999-01-01T00:00Z", "is in the future"),
    ],
)
def test_a_place_that_is_not_there_stops_the_start_by_name(start_at: str, said: str) -> None:
    with TestDriver(build(start_at=start_at), start=False) as driver:
        send(driver, "a", "b")
        with pytest.raises(OffsetError, match=said):
            driver.start()


def several(**settings: Any) -> EventSource[Any]:
    """A source with a further input and a joined table, whose handler names the row of its key."""
    source = EventSource(config(1, **settings), Table.factory(key=str, value=int))
    source.input("more", event=Added)
    names = source.join("names", key=str, value=str)

    def add(ctx: EventContext[Any], event: Added) -> None:
        ctx.forward("said", Total(f"{event.name} {ctx.joined(names).get(event.name)}", 1), key=event.name)

    source.register_event_type(Added, add)
    return source


@pytest.mark.parametrize("by", ["start_at", "begin"])
def test_each_input_has_its_place_and_joined_tables_begin_at_their_start(by: str) -> None:
    source = several(start_at="0@1, more:0@2" if by == "start_at" else "")
    with TestDriver(source, start=False) as driver:
        driver.table("names").put("b", "B")
        send(driver, "a", "b")
        for name in "xyb":
            driver.send(Added(name), key=name, topic="more", wait=False)
        if by == "begin":
            driver.begin({0: 1}, {"more": {0: 2}})
            assert driver.committed_offsets() == {0: 1}
        driver.start()
        driver.settle()
        assert [total.name for total in driver.outputs("said", Total)] == ["b B", "b B"]
        assert driver.committed_offsets("more") == {0: 3}
        assert said_to_begin(driver)[0].at == {"added": 1, "more": 2}
        driver.check()


def test_a_driver_begins_once_and_only_in_the_log() -> None:
    with TestDriver(build(), start=False) as driver:
        send(driver, "a", "b", "c")
        with pytest.raises(OffsetError, match=r"added\[0\]: 4 is not in the log, 0 to 3"):
            driver.begin({0: 4})
        with pytest.raises(ConfigError, match="partition 7"):
            driver.begin({7: 0})
        with pytest.raises(ConfigError, match="'else' is no further input"):
            driver.begin({}, {"else": {}})
        driver.begin({0: 2})
        with pytest.raises(ConfigError, match="has begun already"):
            driver.begin({0: 2})
        driver.start()
        driver.settle()
        assert totals(driver) == [1]


def test_rows_of_another_program_come_along() -> None:
    rows = [
        ForeignRow(topic="old-changelog", partition=0, offset=at, key=key, value=b"%d" % at, timestamp_ms=0)
        for at, key in enumerate((b"a", b"b", b"b"))
    ]
    with TestDriver(build(), start=False) as driver:
        send(driver, "a", "b")
        with pytest.raises(ConfigError, match="rows need take"):
            driver.begin({0: 1}, rows=rows)
        driver.begin({0: 1}, rows=rows, take=lambda store, row: store.put(row.key.decode(), int(row.value)))
        driver.start()
        driver.settle()
        assert (driver.store(0).get("a"), driver.store(0).get("b")) == (0, 3)


def test_a_begin_record_of_a_newer_version_is_refused_and_a_foreign_one_too() -> None:
    newer = BeginRecord(v=BEGIN_FORMAT + 1, how="start", at={}, places={}, by="x", at_ms=0)
    for value in (msgspec.json.encode(newer), b"{}", b"x" * (1 << 20), None):
        with pytest.raises(OffsetError, match=r"log\[3\]@7: the begin record cannot be read"):
            decode_begin(IncomingRecord("log", 3, 7, BEGIN_KEY, value, None))


@pytest.mark.parametrize("start_at", ["0@2", shown_place(int(START_TIME) * 1000 + 1)])
@pytest.mark.parametrize("point", ["activated", "flush.before", "commit.before", "commit.after"])
def test_who_dies_while_it_begins_has_begun_or_has_not(point: Any, start_at: str) -> None:
    """The next one decides anew, or finds it decided: at the same place, and each record counts once."""
    with TestDriver(build(start_at=start_at), start=False) as driver:
        send(driver, "a", "b")
        driver._run(_pass(1.0))
        send(driver, "c", "d")
        trap = driver.at(point, driver.crash)
        driver.start()
        assert trap.sprung
        send(driver, "e")
        driver.restart()
        driver.settle()
        assert sorted(total.name for total in driver.outputs(OUT, Total)) == ["c", "d", "e"]
        assert [began.at for began in said_to_begin(driver)] == [{"added": 2}]
        driver.check()
