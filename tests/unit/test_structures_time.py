"""Whose time counts, and what does not fit it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from streams import DEAD_LETTER, SKIP, STOP, EventContext, EventSource, EventSourceConfig, Record, Retry, Update
from streams.errors import ConfigError, EventFailure
from streams.metrics import EventFailed, Measurement, OutOfTime
from streams.stores import NamedTable, Stores
from streams.testing import TestDriver
from tests.unit.windows_kit import OUT, Seen, Told, outputs, seen, source_of
from tests.vocabulary import Named

LOOP = "g.in.loop"
DAY = 86_400_000


class Row(msgspec.Struct, frozen=True):
    number: int


def out_of_time(driver: TestDriver[Any], partition: int = 0) -> dict[str, int]:
    return driver.statistics().partitions[partition].out_of_time


# -- whose time counts -------------------------------------------------------------------------------------------------


def test_events_of_the_loop_have_the_time_of_their_senders_and_move_none() -> None:
    """A backlog in two partitions: one is ten minutes behind the other, which sends it an event of the loop."""
    source = source_of(partitions=2, loop=True)

    @source.on
    def on(ctx: EventContext[Any], event: Seen) -> None:
        ctx.store.win.add(event.key, event)
        if event.number == 3:
            ctx.loop(Named("x"), key="a" if ctx.topic_partition.partition else "b")

    @source.on
    def back(ctx: EventContext[Any], event: Named) -> None:
        ctx.store.carts.put(event.name, 1)
        ctx.forward(OUT, Told("back", event.name, ctx.store.event_ms), key=event.name, partition=0)

    with TestDriver(source, topics={OUT: 1}) as driver:
        driver.settle()
        driver.crash(0)
        now = round(driver.time() * 1000)
        for number in range(60):
            for partition, behind in ((0, 1_200_000), (1, 600_000)):
                driver.send_record(seen("k", now - behind + 10_000 * number, number, partition), wait=False)
        driver.restart(0)
        driver.settle()
        assert outputs(driver, "late") == []
        sent = [now - 1_200_000 + 30_000, now - 600_000 + 30_000]
        assert sorted(record.timestamp_ms for record in driver.outputs(LOOP)) == sent
        assert sorted(one.number for one in outputs(driver, "back")) == sent, "that is the time of their items"
        times = [driver.store(partition).time_ms for partition in (0, 1)]
        assert times == [now - 1_200_000 + 590_000, now - 600_000 + 590_000]
        driver.check()


def test_what_the_loop_gets_is_never_from_the_future() -> None:
    """Brokers refuse that: the time of sending is as late as it gets. Timers have the time at which they are due."""
    source = source_of(loop=True)

    @source.on
    def on(ctx: EventContext[Any], event: Seen) -> None:
        ctx.loop(Named(event.key), key="x")
        if ctx.timer is None:
            ctx.schedule_at(driver.time() + 60, Seen("timer"), name="t")

    @source.on
    def back(ctx: EventContext[Any], event: Named) -> None: ...

    with TestDriver(source, topics={OUT: 1}) as driver:
        now = round(driver.time() * 1000)
        driver.send_record(seen("k", now + 3_600_000))
        driver.advance(65)
        first, timer = [record.timestamp_ms for record in driver.outputs(LOOP)]
        assert now <= first <= now + 5_000
        assert now + 60_000 <= timer <= now + 62_000
        driver.interject(0, lambda ctx: ctx.loop(Named("i"), key="x"))
        assert driver.outputs(LOOP)[-1].timestamp_ms == pytest.approx(driver.time() * 1000, abs=2_000)


def test_rows_of_a_table_move_no_time() -> None:
    """A first start: the table, whose row was changed just now, is read before the history of events."""
    source = source_of()
    rows = source.join("rows", key=str, value=Row)

    @source.on
    def on(ctx: EventContext[Any], event: Seen) -> None:
        ctx.store.win.add(event.key, event)

    @source.register_update(rows)
    def on_row(ctx: EventContext[Any], row: Update[str, Row]) -> None:
        ctx.store.win.add("row", row)  # in the window of its own time

    with TestDriver(source, topics={OUT: 1}) as driver:
        driver.crash(0)
        now = round(driver.time() * 1000)
        for number in range(40):
            driver.send_record(seen("k", now - 600_000 + 15_000 * number), wait=False)
        driver.send_record(Record("rows", b'{"number":1}', b"r", partition=0, timestamp_ms=now), wait=False)
        driver.restart(0)
        driver.settle()
        assert outputs(driver, "late") == []
        assert driver.store(0).time_ms == now - 15_000
        assert [window.start_ms for window, _ in driver.store(0).win.of("row")] == [now - now % 60_000]


def test_a_store_may_decide_otherwise() -> None:
    class Forward(Stores):
        carts = NamedTable.of(str, int, expires=60)

        def moves_time(self, ctx: Any) -> bool:
            return False

    source = EventSource(EventSourceConfig(group_id="g", topic="in", num_partitions=1), store=Forward.factory())

    @source.on
    def on(ctx: EventContext[Any], event: Seen) -> None:
        assert ctx.store.event_ms == 5_000

    with TestDriver(source) as driver:
        driver.send_record(seen("k", 5_000))
        assert driver.store(0).time_ms is None


# -- what does not fit the time ----------------------------------------------------------------------------------------


@pytest.fixture
def measured() -> list[Measurement]:
    return []


def watched(measured: list[Measurement], **settings: Any) -> EventSource[Any]:
    source = source_of(metrics_handler=measured.append, error_policy=DEAD_LETTER, **settings)

    @source.on
    def on(ctx: EventContext[Any], event: Seen) -> None:
        ctx.store.win.add(event.key, event)
        ctx.store.carts.put(event.key, 1)
        if ctx.attempt <= event.number:
            raise ValueError("once more")

    return source


def test_late_and_expired_items_are_counted_and_logged_once_a_minute(
    measured: list[Measurement], caplog: pytest.LogCaptureFixture
) -> None:
    with TestDriver(watched(measured), topics={OUT: 1}) as driver:
        now = round(driver.time() * 1000)
        for number in range(3):
            driver.send_record(seen(f"k{number}", now - 60_000))
        driver.send_record(seen("future", now + DAY // 2))  # the bound is a day: all of the other entries expire
        for _ in range(20):
            driver.send_record(seen("k", now))
        driver.send_record(seen("k", now, number=1))  # attempted once, and dead: its item was late all the same
        lines = [line for line in caplog.messages if "out of" in line or "were late" in line]
        assert lines[0].startswith("1 item(s) of Shop.win in in[0] were late: their windows are closed")
        assert len(lines) == 1
        driver.advance(61)
        lines = [line for line in caplog.messages if "were late" in line]
        assert [line.split()[0] for line in lines] == ["1", "20"], "also when nothing follows"
        assert "of 'k' at " in lines[-1]
        (early,) = [line for line in caplog.messages if "expired before their time" in line]
        assert early.startswith("3 entries of Shop.carts in in[0] expired before")
        assert out_of_time(driver) == {"late": 21, "expired_early": 3}
        found = [one for one in measured if isinstance(one, OutOfTime)]
        assert sum(one.items for one in found if one.kind == "late") == 21
        assert OutOfTime(0, "expired_early", "Shop", "carts", 3) in found
        driver.check()


def test_further_attempts_count_nothing_twice(measured: list[Measurement]) -> None:
    source = source_of(metrics_handler=measured.append, error_policy=Retry(attempts=4, backoff_seconds=0.01))

    @source.on
    def on(ctx: EventContext[Any], event: Seen) -> None:
        ctx.store.win.add(event.key, event)
        if ctx.attempt <= event.number:
            raise ValueError("once more")

    with TestDriver(source, topics={OUT: 1}) as driver:
        now = round(driver.time() * 1000)
        driver.send_record(seen("k", now))
        driver.send_record(seen("k", now - 600_000, number=3))
        driver.send_record(seen("k", now - 600_000))
        assert out_of_time(driver) == {"late": 2}


@pytest.mark.parametrize("policy", [DEAD_LETTER, SKIP, STOP], ids=["dead letter", "skip", "stop"])
def test_an_event_from_the_future_moves_no_time(policy: Retry, measured: list[Measurement]) -> None:
    """Microseconds for milliseconds: named, with its policy; state, windows and what follows are as without it."""
    source = source_of(metrics_handler=measured.append, error_policy=policy)

    @source.on
    def on(ctx: EventContext[Any], event: Seen) -> None:
        ctx.store.win.add(event.key, event)
        ctx.store.carts.put(event.key, 1)

    driver: TestDriver[Any]
    with TestDriver(source, topics={OUT: 1}) as driver:
        now = round(driver.time() * 1000)
        driver.send_record(seen("a", now - 10 * DAY))  # histories have large steps
        driver.send_record(seen("a", now))
        if policy is STOP:
            with pytest.raises(EventFailure, match=r"in\[0\]@2 .*days ahead of this machine's clock.*kes skip"):
                driver.send_record(seen("b", now * 1000))
            return
        driver.send_record(seen("b", now * 1000))
        driver.send_record(seen("c", now + 90_000))
        assert outputs(driver, "late") == []
        assert len(outputs(driver, "closed")) == 2
        assert sorted(driver.store(0).carts.keys()) == ["a", "c"]
        assert OutOfTime(0, "time_jump", "Shop", "", 1) in measured
        assert [one.offset for one in measured if isinstance(one, EventFailed)] == [2]
        assert len(driver.dead_letters()) == (policy is DEAD_LETTER)
        driver.check()


def test_the_bound_may_be_taken_away() -> None:
    for wrong in (-1, "1", float("nan")):
        with pytest.raises(ConfigError, match="max_time_jump_seconds"):
            source_of(max_time_jump_seconds=wrong)
    with TestDriver(watched([], max_time_jump_seconds=0), topics={OUT: 1}) as driver:
        driver.send_record(seen("b", driver.time() * 1_000_000))
        assert driver.store(0).time_ms > 1e15
