"""``TestDriver``: events in, time, what comes out, members, and bad use."""

from __future__ import annotations

import asyncio
import logging
import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from streams import STOP, ErrorResponse, EventContext, EventSource, Record, Retry, SourceState, StateConfig, Table
from streams.disk import SQLite
from streams.errors import ConfigError, DecodeError, EncodeError, EventFailure, NotOwned, RegistrationError, Stopped
from streams.sak.murmur2 import partition_of
from streams.testing import TestDriver, Unsettled
from streams.testing.world import Exited
from tests.vocabulary import Totals

from .driver_kit import OUT, Added, Fatal, Flaky, Named, Slow, Total, Unknown, build

Driver = TestDriver[Totals]
Wrong = tuple[type[Exception], str, Callable[[], Any]]


@pytest.fixture
def driver() -> Iterator[Driver]:
    with TestDriver(build()) as made:
        yield made


# -- events in, and what comes out -------------------------------------------------------------------------------------


def test_what_is_sent_is_handled_and_committed(driver: Driver) -> None:
    sent = [driver.send(Added("ann", 2), key="ann") for _ in range(2)]
    where = partition_of(b"ann", 3)
    other = (where + 1) % 3
    driver.send(Added("bob"), partition=other, headers=[("trace", b"1")])
    assert [(record.partition, record.offset) for record in sent] == [(where, 0), (where, 1)]
    assert driver.outputs(OUT, Total) == [Total("ann", 2), Total("ann", 4), Total("bob", 1)]
    record = driver.outputs(OUT)[-1]
    assert (record.key, record.partition) == (b"bob", partition_of(b"bob", 3))
    assert record.headers == (("__grt__", b"Total"), ("from", b"%d" % other))
    assert record.timestamp_ms == pytest.approx(driver.time() * 1000, abs=1000)
    assert dict(driver.store(where).items()) == dict(driver.restored_store(where).items()) == {"ann": 4}
    assert [len(driver.changelog(number)) for number in range(3)] == [int(n in (where, other)) for n in range(3)]
    assert sorted(driver.stores()) == [0, 1, 2]
    assert driver.committed_offsets() == {where: 2, other: 1}
    assert driver.owner(where) == 0
    statistics = driver.statistics()
    assert (statistics.state, statistics.committed_events) == (SourceState.RUNNING, 3)
    driver.check()


def test_new_outputs_are_those_since_the_last_look(driver: Driver) -> None:
    driver.send(Added("ann"))
    assert driver.new_outputs(OUT, Total) == [Total("ann", 1)]
    assert driver.new_outputs(OUT) == []
    driver.send(Added("bob"), partition=0, wait=False)
    driver.send(Added("cid"), partition=1, wait=False)
    assert len(driver.outputs(OUT)) == 1
    driver.settle()
    assert driver.new_outputs(OUT, Total) == [Total("bob", 1), Total("cid", 1)]
    assert len(driver.outputs(OUT)) == 3


def test_outputs_of_another_type_are_an_error(driver: Driver) -> None:
    driver.send(Added("ann"), key="ann")
    with pytest.raises(DecodeError, match=r"totals\[\d\]@0 is a 'Total'; expected were Added"):
        driver.outputs(OUT, Added)
    assert driver.outputs(OUT, Added, Total) == [Total("ann", 1)]
    with pytest.raises(RegistrationError, match="int"):
        driver.outputs(OUT, int)


def test_a_handlers_own_topic_is_read_on(driver: Driver) -> None:
    source = build()

    @source.register_default_handler
    def fan_out(ctx: EventContext[Totals], value: bytes | None) -> None:
        for key in ("x", "y"):
            ctx.forward("added", Added(key), key=key)

    with TestDriver(source) as made:
        made.send(Unknown())
        assert sorted(total.name for total in made.outputs(OUT, Total)) == ["x", "y"]
        assert sum(made.committed_offsets().values()) >= 3


# -- time --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "seconds", "outputs"),
    [(Slow("ann", 30.0), 30.0, 1), (Named("ann"), 0.0, 1), (Flaky("ann", 2), 10.0, 1), (Flaky("ann", 9), 10.0, 0)],
)
def test_handlers_that_wait_and_retries_take_simulated_time(
    driver: Driver, event: Any, seconds: float, outputs: int
) -> None:
    driver.send(event)
    assert seconds <= driver.now < seconds + 50
    assert driver.outputs(OUT, Total) == [Total("ann", 1)] * outputs
    assert len(driver.dead_letters()) == 1 - outputs


def test_scheduled_interjections_run_when_time_passes() -> None:
    source = build(partitions=1)

    @source.schedule_interjection(every=10.0)
    def tick(ctx: EventContext[Totals]) -> None:
        ctx.store.put("ticks", (ctx.store.get("ticks") or 0) + 1)

    with TestDriver(source) as made:
        made.advance(5.0)
        assert made.store(0).get("ticks") is None
        made.advance(30.0)
        assert made.restored_store(0).get("ticks") == 3
        before = made.now
        made.advance(0.0)
        assert made.now == before


def test_an_interjection_returns_its_answer_once_it_is_committed(driver: Driver) -> None:
    driver.send(Added("ann"), partition=1)

    def double(ctx: EventContext[Totals]) -> int:
        ctx.store.put("ann", 2 * (ctx.store.get("ann") or 0))
        return 7

    assert driver.interject(1, double) == 7
    assert driver.restored_store(1).get("ann") == 2


# -- members -----------------------------------------------------------------------------------------------------------


def test_partitions_are_spread_over_the_members() -> None:
    with TestDriver(build(partitions=4), members=2) as made:
        assert made.members == [0, 1]
        assert sorted(made.owner(number) or 0 for number in range(4)) == [0, 0, 1, 1]
        assert made.join() == 2
        assert {made.owner(number) for number in range(4)} == {0, 1, 2}
        made.send(Added("ann"), key="ann")
        made.leave(0)
        assert made.members == [1, 2]
        made.send(Added("ann"), key="ann")
        made.restart(0)
        assert {made.owner(number) for number in range(4)} == {0, 1, 2}
        made.send(Added("ann"), key="ann")
        assert [total.amount for total in made.outputs(OUT, Total)] == [1, 2, 3]
        made.check()


def test_a_rebalance_moves_partitions_and_loses_nothing() -> None:
    with TestDriver(build(partitions=4)) as made:
        activated = made.at("activated", lambda member: None, times=100)
        for number in range(12):
            made.send(Added(f"k{number % 3}"), key=f"k{number % 3}", wait=False)
        made.rebalance()
        assert made.members == [0]
        assert activated.sprung >= 3  # to the guest and back
        assert len(made.outputs(OUT)) == 12
        made.check()


def test_the_source_itself_is_not_started_and_may_be_used_again() -> None:
    source = build()
    for _ in range(2):
        with TestDriver(source) as made:
            made.send(Added("ann"))
            assert made.outputs(OUT, Total) == [Total("ann", 1)]
    assert source.state is SourceState.CREATED
    source.register_event_type(Unknown, lambda ctx, event: None)  # not frozen


def test_two_drivers_do_not_disturb_each_other() -> None:
    def run() -> list[str]:
        with TestDriver(build(), members=2, seed=5) as made:
            made.send(Added("ann"))
            made.crash(0)
            made.send(Added("bob"))
            return made.trace

    alone = run()
    with TestDriver(build()) as other:
        other.send(Added("ann"))
        assert run() == alone
        other.send(Added("ann"))


def test_a_function_that_makes_sources_is_called_for_each_start() -> None:
    made: list[EventSource[Any]] = []

    def make() -> EventSource[Totals]:
        made.append(build())
        return made[-1]

    with TestDriver(make, members=2) as driver:
        assert len(made) == 3  # one to look at, one for each member
        driver.crash(1)
        driver.restart(1)
        assert len(made) == 4
        driver.send(Added("ann"))
        assert driver.outputs(OUT, Total) == [Total("ann", 1)]


# -- errors ------------------------------------------------------------------------------------------------------------


def test_what_stops_the_source_is_raised_by_the_call(driver: Driver) -> None:
    with pytest.raises(EventFailure, match=r"added\[1\]@0 \(driven.Fatal\) failed .* it hurts"):
        driver.send(Fatal("it hurts"), partition=1)
    assert driver.members == []
    with pytest.raises(EventFailure, match="it hurts"):
        driver.restart()  # meets it again


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (b"driven.Fatal", r"not a Fatal: .*"),
        (b"driven.Nobody", r"no handler for the event type 'driven\.Nobody'; .*"),
    ],
)
def test_a_record_that_cannot_be_read_is_named_once_with_the_ways_on(
    header: bytes, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    ways_on = r"repair the event class and deploy it; .* decode_policy=SKIP; or .*: kes skip MODULE:SOURCE 1@0"
    with TestDriver(build(decode_policy=STOP)) as made:
        with pytest.raises(EventFailure, match=rf"^added\[1\]@0: {problem}cannot be read.* {ways_on}$") as caught:
            made.send_record(Record("added", b'{"text":7}', headers=[("__grt__", header)], partition=1))
        assert str(caught.value).count("added[1]@0") == 1
        assert isinstance(caught.value.__cause__, DecodeError)
        assert caplog.text.count("added[1]@0") == 1


def test_fatally_exit_ends_the_member_and_not_the_tests() -> None:
    source = build(error_policy=Retry(attempts=1, then=ErrorResponse.FATALLY_EXIT))
    with TestDriver(source) as made, pytest.raises(Exited, match="member 0 ended its process with code 70"):
        made.send(Fatal("it hurts"))


@pytest.mark.parametrize(("key", "value", "wrong"), [(5, b"x", "key"), (b"x", 5, "value")])
def test_a_ready_record_of_other_than_bytes_is_named(key: Any, value: Any, wrong: str) -> None:
    source = build()
    source.register_event_type(Unknown, lambda ctx, event: ctx.forward(Record(OUT, value, key)))
    with TestDriver(source) as made, pytest.raises(EventFailure, match=f"the {wrong} of the record for {OUT} is int"):
        made.send(Unknown())


def test_what_never_ends_is_told(driver: Driver) -> None:
    with pytest.raises(Unsettled) as raised:
        driver.send(Slow("ann", 1e6), partition=2)
    text = str(raised.value)
    assert "not done after 60 simulated seconds" in text
    assert "added[2]: 1 record(s) from offset 0 on are not committed; it is active on member 0" in text


def test_bad_use_is_told() -> None:
    source = build()
    made = TestDriver(source)
    of_no_driver: list[Wrong] = [
        (ConfigError, "takes an event source, or a function that makes one; it got 5", lambda: TestDriver(5)),  # type: ignore[arg-type]
        (ConfigError, "makes one; it got <function", lambda: TestDriver(lambda: None)),  # type: ignore[arg-type, return-value]
        (ConfigError, "members is 0", lambda: TestDriver(source, members=0)),
        (ConfigError, "patience is -1", lambda: TestDriver(source, patience=-1)),
        (ConfigError, "totals 0 partitions", lambda: TestDriver(source, topics={OUT: 0})),
    ]
    no_partition = "added has no partition 3; num_partitions is 3, so it is one of 0 to 2"
    other_topic = "the record is for other; this driver's source reads added"
    at_work: list[Wrong] = [
        (ConfigError, no_partition, lambda: made.send(Added("ann"), partition=3)),
        (ConfigError, "has no partition -1", lambda: made.store(-1)),
        (ConfigError, r"there is no member 7; there are \[0\]", lambda: made.crash(7)),
        (ConfigError, "member 0 is running", lambda: made.restart(0)),
        (ConfigError, "no point 'comit'; the points are init", lambda: made.at("comit", made.crash)),  # type: ignore[arg-type]
        (ConfigError, "no call 'poll' to be struck", lambda: made.lose_reply("poll")),  # type: ignore[arg-type]
        (ConfigError, "init cannot be struck by ABORTABLE", lambda: made.refuse("init")),
        (ConfigError, other_topic, lambda: made.send_record(Record("other", b""))),
        (ConfigError, "time cannot go back", lambda: made.advance(-1.0)),
        (RegistrationError, "str", lambda: made.send("text")),
        (EncodeError, "the key for added has no form in UTF-8", lambda: made.send(Added("ann"), key="a\udcff")),
        (EncodeError, "the key for added is a int; use str", lambda: made.send(Added("ann"), key=5)),  # type: ignore[arg-type]
    ]
    crashed: list[Wrong] = [
        (ConfigError, "member 0 is down", lambda: made.freeze(0)),
        (NotOwned, r"added\[0\] is not active on any member", lambda: made.store(0)),
        (NotOwned, ".", lambda: made.interject(0, lambda ctx: None)),
    ]
    closed: list[Wrong] = [
        (Stopped, "closed", lambda: made.send(Added("ann"))),
        (Stopped, "closed", lambda: made.crash()),
    ]
    for state, rows in [(None, of_no_driver), (made.__enter__, at_work), (made.crash, crashed), (made.close, closed)]:
        if state:
            state()
        for error, said, act in rows:
            with pytest.raises(error, match=said):
                act()
    made.close()


def test_handlers_cannot_let_time_pass() -> None:
    drivers: list[Driver] = []
    source = build(partitions=1)

    @source.register_event_type(Unknown)
    def impatient(ctx: EventContext[Totals], event: Unknown) -> None:
        drivers[0].advance(1.0)

    with TestDriver(source) as made:
        drivers.append(made)
        with pytest.raises(EventFailure, match="this call lets time pass"):
            made.send(Unknown())


async def test_in_a_running_loop_it_goes_as_outside_and_leaves_the_loop_as_it_was() -> None:
    loop, task, passed = asyncio.get_running_loop(), asyncio.current_task(), list[str]()
    asyncio.get_running_loop().call_soon(passed.append, "soon")
    with TestDriver(build(), members=2) as made, anyio.CancelScope():
        made.send(Slow("ann", 30.0))
        made.crash(0)
        with pytest.raises(EventFailure, match="it hurts"):
            made.send(Fatal("it hurts"), partition=1)
        assert made.outputs(OUT, Total) == [Total("ann", 1)]
        assert passed == []  # it stood still
        assert asyncio.get_running_loop() is loop
        assert asyncio.current_task() is task
        await anyio.lowlevel.checkpoint()
        assert passed == ["soon"]
    await _scopes_are_anyios_own()
    assert asyncio.current_task() is task


async def test_in_a_callback_of_a_loop_there_is_no_task() -> None:
    done: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()

    def cell() -> None:
        with TestDriver(build()) as made:
            made.send(Added("ann"))
            done.set_result(made.outputs(OUT, Total))

    asyncio.get_running_loop().call_soon(cell)
    assert await done == [Total("ann", 1)]


async def test_a_driver_of_a_plain_fixture_serves_an_async_test(driver: Driver) -> None:
    driver.send(Added("ann"))
    assert driver.outputs(OUT, Total) == [Total("ann", 1)]


@pytest.mark.parametrize("engine", [None, SQLite()])
def test_state_goes_to_a_folder_of_the_driver_and_never_to_that_of_the_source(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A simulated cluster would set the real state aside; and a second run would find what the first one left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "temporary").mkdir()
    caplog.set_level(logging.INFO)
    state = StateConfig(folder="state", snapshots="snapshots", snapshot_seconds=10.0)
    source = build(store=Table.factory(key=str, value=int, engine=engine), state=state)

    def run(**options: Any) -> tuple[list[str], list[str]]:
        with TestDriver(source, **options) as made:
            for name in ("ann", "bob", "eve"):
                made.send(Added(name), key=name)
            made.advance(60.0)
            made.leave(0)
            made.restart()
            made.advance(60.0)
            return made.trace, [re.sub(r"\S*/(?=group-)|[\d.]+ s$|manifest-\S+", "", text) for text in texts()]

    def texts() -> list[str]:
        found = caplog.messages
        caplog.clear()
        return found

    first = run()
    assert any("changes from group-driven" in text for text in first[1]), "the restart read the folder"
    assert run() == first
    assert [*tmp_path.rglob("*")] == [tmp_path / "temporary"]
    run(state_folder="mine")
    assert {path.name for path in tmp_path.iterdir()} == {"temporary", "mine"}
    assert {path.name for path in (tmp_path / "mine").iterdir()} == {"state", "snapshots"}
    assert [*(tmp_path / "temporary").iterdir()] == []


def test_no_thread_and_no_task_is_left_behind() -> None:
    before = set(threading.enumerate())
    for _ in range(3):
        with TestDriver(build(), members=2) as made:
            made.send(Named("ann"))
            made.send(Slow("ann", 5.0), wait=False)
            made.advance(1.0)
            made.crash(0)
    assert set(threading.enumerate()) <= before  # those of other tests may end at any time
    anyio.run(_scopes_are_anyios_own)  # the loops of others are as they were


async def _scopes_are_anyios_own() -> None:
    assert type(anyio.CancelScope()).__module__ == "anyio._backends._asyncio"
