"""Parked keys at their bounds, beside failures and operators, and under other policies."""

from __future__ import annotations

from typing import Any

import anyio.lowlevel
import pytest

from streams import (
    DEAD_LETTER,
    PARK,
    EventContext,
    EventSource,
    EventSourceConfig,
    Retry,
    Table,
)
from streams.errors import ConfigError, EventFailure
from streams.records import Change, Record
from streams.settings import ParkingConfig, SchedulerConfig
from streams.testing import TestDriver
from tests.unit.parking_kit import AHEAD, Add, Bank, add, redeploy

pytestmark = pytest.mark.usefixtures("quiet")
ways = pytest.mark.parametrize("way", ["plain", "batch", *AHEAD])


@pytest.mark.parametrize(
    ("bounds", "setting"),
    [
        (ParkingConfig(max_keys=2), "max_keys"),
        (ParkingConfig(max_key_events=2), "max_key_events"),
        (ParkingConfig(max_bytes=100), "max_bytes"),
    ],
)
def test_at_a_bound_the_partition_waits(bounds: ParkingConfig, setting: str) -> None:
    bank = Bank(parking=bounds)
    bank.broken = {1}
    keys = "abc" if setting == "max_keys" else "aaa"
    with bank.driver() as driver:
        for key in keys:
            driver.send(Add(1, key), key=key, wait=False)
        driver.send(Add(5, "z"), key="z", wait=False)
        driver.advance(1)
        assert driver.statistics().partitions[0].parking_full == setting
        assert driver.store(0).get("z") is None
        bank.broken = set()
        driver.advance(200)
        driver.settle()
        assert not driver.parked()
        assert driver.store(0).get("z") == (5,)
        assert driver.statistics().partitions[0].parking_full == ""
        driver.check()


def test_at_a_bound_the_source_may_stop() -> None:
    bank = Bank(parking=ParkingConfig(max_keys=1, when_full="stop"))
    bank.broken = {1}
    with bank.driver() as driver:
        add(driver, 1)
        with pytest.raises(EventFailure, match=r"max_keys is reached"):
            add(driver, 1, key="b")


def test_handlers_can_ask_for_parked_keys() -> None:
    bank = Bank()
    bank.broken = {1}
    with bank.driver() as driver:
        add(driver, 1)
        asked = driver.interject(0, lambda ctx: [ctx.is_parked("a"), ctx.is_parked(b"b")])
        assert asked == [True, False]


def test_a_large_event_is_kept_whole() -> None:
    bank = Bank(decode_policy=PARK)
    value = bytes(range(256)) * 3000  # 768,000 bytes
    with bank.driver() as driver:
        driver.send_record(Record("adds", value, b"k" * 1000, [("other", None), ("other", b"\xff")], 0))
        redeploy(driver)
        (parked,) = driver.parked()
        (record,) = parked.events
        assert (record.value, record.key) == (value, b"k" * 1000)
        assert record.headers == (("other", None), ("other", b"\xff"))
        assert driver.skip_head(b"k" * 1000, dead_letter=True)
        assert driver.dead_letters()[0].value == value
        driver.check()


def test_an_operators_request_that_comes_twice_does_nothing_the_second_time() -> None:
    from streams.runtime.partition.parking_acts import act

    bank = Bank()
    bank.broken = {1, 2}
    with bank.driver() as driver:
        add(driver, 1, 2, 3)
        (parked,) = driver.parked()
        answers = [
            driver.interject(0, lambda ctx: [act(ctx, "skip-head", parked.seen, as_letters=False)]) for _ in range(2)
        ]
        assert answers == [[True], [False]]
        assert len(driver.parked()[0].events) == 2
        assert driver.drop_parked("a")
        assert not driver.drop_parked("a")
        assert driver.store(0).get("a") is None
        driver.check()


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Retry\.waits"):
        Retry(waits="event")  # type: ignore[arg-type]
    for wrong in ({"max_keys": 0}, {"max_bytes": 1.5}, {"when_full": "x"}, {"first_retry_seconds": 9000}):
        with pytest.raises(ConfigError, match="ParkingConfig"):
            ParkingConfig(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="waits='key'"):
        SchedulerConfig(concurrency=1, retry=Retry(waits="key"))


def test_the_release_without_park_meets_its_own_policy_with_the_head() -> None:
    bank = Bank()
    bank.broken = {1}
    with bank.driver() as driver:
        add(driver, 1, 2)
        bank.policy = DEAD_LETTER
        redeploy(driver)
        assert not driver.parked()
        assert len(driver.dead_letters()) == 1
        assert driver.store(0).get("a") == (2,)
        driver.check()


@pytest.mark.parametrize("way", ["plain", "batch", "concurrent"])
def test_an_event_that_ends_its_process_is_not_tried_at_once_by_the_next(way: str) -> None:
    bank = Bank(way=way)
    bank.broken = {1}
    with bank.driver() as driver:
        add(driver, 1, 2)
        trap = driver.at("handler.before", driver.crash, times=9)  # each attempt ends the process
        driver.advance(40)
        assert (trap.sprung, driver.members) == (1, [])
        for deaths in (2, 3):
            driver.restart()
            driver.advance(10)
            assert trap.sprung == deaths - 1  # the note of the one before: it waits its pause
            driver.advance(200)
            assert (trap.sprung, driver.members) == (deaths, [])


def test_it_is_noted_first_also_where_further_events_of_its_key_come_at_once() -> None:
    bank = Bank()
    bank.broken = {1}
    with bank.driver() as driver:
        add(driver, 1, 2)
        driver.leave()
        trap = driver.at("handler.before", driver.crash, times=9)
        for number in (3, 4):
            driver.send(Add(number), key="a", wait=False)
            driver.restart()
            driver.advance(10)
        assert (trap.sprung, len(driver.members)) == (1, 1)


@ways
def test_what_a_broker_refuses_of_a_head_is_the_heads_failure(way: str) -> None:
    bank = Bank(way=way)
    bank.broken = {1}
    with bank.driver() as driver:
        broker: Any = driver._world.broker
        broker.refuses = lambda topic, entry: topic == "out" and entry.value == b'{"number":1,"key":"a"}'
        add(driver, 1, 2)
        bank.broken = set()
        driver.retry_parked("a")
        driver.advance(1)  # the partition starts again
        (parked,) = driver.parked()
        assert (parked.attempts, len(parked.events)) == (2, 2)
        assert "out[0]" in parked.error
        assert parked.next_retry_ms > 10**14  # the bytes do not change
        assert driver.store(0).get("a") is None
        add(driver, 5, key="b")
        assert driver.store(0).get("b") == (5,)
        broker.refuses = lambda topic, entry: False
        redeploy(driver)
        assert driver.store(0).get("a") == (1, 2)
        driver.check()


@ways
def test_an_event_whose_output_is_refused_is_parked(way: str) -> None:
    bank = Bank(way=way)
    with bank.driver() as driver:
        broker: Any = driver._world.broker
        broker.refuses = lambda topic, entry: topic == "out" and entry.value == b'{"number":2,"key":"a"}'
        add(driver, 1, 2, 3)
        (parked,) = driver.parked()
        assert [record.offset for record in parked.events] == [1, 2]
        assert driver.store(0).get("a") == (1,)
        driver.check()


def test_a_changelog_that_refuses_a_queue_stops_the_source_by_name() -> None:
    bank = Bank()
    bank.broken = {1}
    with bank.driver() as driver:
        broker: Any = driver._world.broker
        broker.refuses = lambda topic, entry: "changelog" in topic and b"@park" in (entry.key or b"")
        with pytest.raises(EventFailure, match=r"adds\[0\]@0: the changelog does not take the event"):
            add(driver, 1)


class Plain:
    """A store that cannot undo."""

    def __init__(self, topic_partition: Any) -> None:
        self.entries: dict[bytes, bytes] = {}

    def receive_change(self, change: Change) -> None:
        self.entries[change.key] = change.value or b""

    def revoked(self) -> None: ...


def test_a_store_that_cannot_undo_is_restored_before_the_key_is_parked_and_after_each_attempt() -> None:
    broken = {1}
    attempts: list[tuple[int, int]] = []

    def made() -> EventSource[Plain]:
        config = EventSourceConfig(group_id="bank", topic="adds", num_partitions=1, error_policy=PARK)
        source = EventSource(config, store=Plain)

        @source.on
        def on_add(ctx: EventContext[Plain], event: Add) -> None:
            attempts.append((event.number, ctx.attempt))
            key, value = event.key.encode(), b"%d" % event.number
            ctx.store.entries[key] = value
            ctx.record_change(Change(key, value))
            if event.number in broken:
                raise RuntimeError("no")

        return source

    with TestDriver(made) as driver:
        add(driver, 5)
        add(driver, 1, 2)
        add(driver, 7, key="b")
        assert driver.store(0).entries == {b"a": b"5", b"b": b"7"}
        driver.advance(40)
        driver.settle()
        assert driver.parked()[0].attempts == 2
        assert driver.store(0).entries == {b"a": b"5", b"b": b"7"}
        broken.clear()
        driver.advance(80)
        assert not driver.parked()
        assert driver.store(0).entries == {b"a": b"2", b"b": b"7"}
        assert [attempt for number, attempt in attempts if number == 1] == [1, 2, 3]
        broken.add(3)
        add(driver, 3)  # its key's next queue: no failure of the one before is its own
        assert driver.parked()[0].attempts == 1
        broken.clear()
        driver.advance(40)
        assert [attempt for number, attempt in attempts if number == 3] == [1, 2]
        assert driver.store(0).entries == {b"a": b"3", b"b": b"7"}
        driver.check()


@pytest.mark.parametrize("blocking", [False, True])
def test_async_and_blocking_handlers_are_parked_too(blocking: bool) -> None:
    broken = {1}

    def made() -> EventSource[Table[str, tuple[int, ...]]]:
        config = EventSourceConfig(group_id="bank", topic="adds", num_partitions=1, error_policy=PARK)
        source = EventSource(config, store=Table.factory(key=str, value=tuple[int, ...]))

        def handle(ctx: EventContext[Table[str, tuple[int, ...]]], event: Add) -> None:
            ctx.store.put(event.key, (*(ctx.store.get(event.key) or ()), event.number))
            if event.number in broken:
                raise RuntimeError("no")

        async def on_add(ctx: EventContext[Table[str, tuple[int, ...]]], event: Add) -> None:
            await anyio.lowlevel.checkpoint()
            handle(ctx, event)

        source.register_event_type(Add, handle if blocking else on_add, blocking=blocking)
        return source

    with TestDriver(made) as driver:
        add(driver, 1, 2)
        add(driver, 3, key="b")
        assert dict(driver.store(0).items()) == {"b": (3,)}
        broken.clear()
        driver.advance(60)
        assert dict(driver.store(0).items()) == {"a": (1, 2), "b": (3,)}
        driver.check()
