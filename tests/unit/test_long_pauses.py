"""Readers of whole topics that were away for longer than tombstones live: a key that was deleted must not stay."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from streams import GlobalChangeLog, View
from streams.disk.sqlite import SQLite
from streams.errors import OffsetError, TopicError
from streams.runtime.reading import log_reader, view_follower
from streams.runtime.reading.log_follower import FROM_START
from streams.runtime.system import elapsed_seconds
from streams.testing import TestDriver
from streams.views import view as view_module
from tests.unit.global_log_kit import Heard, MemoryTopic, caught_up, log_over
from tests.unit.lookups_kit import RATES, Shop, pay, rate, seen
from tests.unit.view_kit import number, view_of, viewed_topic
from tests.unit.waiting import PATIENCE, until

HOUR = 3600.0
MISSED = r"rates\[0\] was complete 25 h ago for the last time, and the topic keeps tombstones for 24 h"
MISSED_SOON = r"rates\[0\] was complete \d+.\d* s ago for the last time, and the topic keeps tombstones for 60 s"


@pytest.fixture
def topic(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryTopic]:
    yield from viewed_topic(monkeypatch)


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Set the clocks forward, as a process finds them that was frozen."""
    away = [0.0]
    now_ms = view_module._now_ms
    for module in (log_reader, view_follower, view_module):
        monkeypatch.setattr(module, "elapsed_seconds", lambda: elapsed_seconds() + away[0])
    monkeypatch.setattr(view_module, "_now_ms", lambda: now_ms() + int(away[0] * 1000))

    def set_forward(seconds: float) -> None:
        away[0] += seconds

    return set_forward


def following(log: GlobalChangeLog) -> view_follower.Following:
    return log._reader.running()


def compact(topic: MemoryTopic, key: bytes) -> None:
    """The key was deleted, and its tombstone is gone."""
    log = topic.logs[0]
    with topic.lock:
        log.records = [record for record in log.records if record.key != key]
        log.end += 1
        log.stable = log.end


@pytest.mark.parametrize("paused", [False, True])
async def test_a_log_that_was_not_read_on_for_longer_than_tombstones_live_fails(
    topic: MemoryTopic, later: Callable[[float], None], paused: bool
) -> None:
    topic.put(b"old", b"1")
    heard = Heard()
    with pytest.raises(OffsetError, match=MISSED):  # noqa: PT012
        async with log_over(topic, heard) as log:
            await caught_up(log)
            if paused:
                log.pause([0])
            later(25 * HOUR)
            compact(topic, b"old")
            topic.put(b"new", b"2")
            if paused:
                log.resume(0)
            await asyncio.wait_for(log.wait_stopped(), PATIENCE)
    assert heard.keys == [b"old"], "nothing behind the gap is handed over"


async def test_the_topics_own_setting_counts_from_the_first_record_on(
    topic: MemoryTopic, later: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is an hour or less, too. Its settings are not asked for again here."""
    monkeypatch.setattr(log_reader, "PROVE_SECONDS", math.inf)
    topic.settings["delete.retention.ms"] = "60000"
    topic.put(b"old", b"1")
    heard = Heard()
    with pytest.raises(OffsetError, match=MISSED_SOON):  # noqa: PT012
        async with log_over(topic, heard) as log:
            await until(lambda: heard.keys == [b"old"])
            later(61.0)
            compact(topic, b"old")
            topic.put(b"new", b"2")
            await asyncio.wait_for(log.wait_stopped(), PATIENCE)
    assert heard.keys == [b"old"]


async def test_where_tombstones_live_shortly_completeness_is_proven_often(topic: MemoryTopic) -> None:
    topic.settings["delete.retention.ms"] = "1000"
    async with log_over(topic, Heard()) as log:
        await caught_up(log)
        followed = following(log)._followed[0]
        for _ in range(3):
            now = view_follower.elapsed_seconds()
            await until(lambda: followed.as_of >= now)  # noqa: B023


@pytest.mark.parametrize("is_changed", [False, True])
async def test_a_topic_whose_tombstones_no_reader_is_sure_to_see_is_refused(
    topic: MemoryTopic, monkeypatch: pytest.MonkeyPatch, is_changed: bool
) -> None:
    monkeypatch.setattr(log_reader, "PROVE_SECONDS", 0.001)
    if not is_changed:
        topic.settings["delete.retention.ms"] = "999"
    refused = r"rates keeps tombstones for 999 ms \(delete.retention.ms\).* Set it to"
    with pytest.raises(TopicError, match=refused):  # noqa: PT012
        async with log_over(topic, Heard()) as log:
            topic.settings["delete.retention.ms"] = "999"
            await asyncio.wait_for(log.wait_stopped(), PATIENCE)


@pytest.mark.parametrize(("hours", "policy"), [(23, "compact"), (25, "delete")])
async def test_one_that_was_away_for_less_or_where_no_tombstone_is_removed_goes_on(
    topic: MemoryTopic, later: Callable[[float], None], hours: int, policy: str
) -> None:
    topic.settings["cleanup.policy"] = policy
    topic.put(b"old", b"1")
    async with log_over(topic, heard := Heard()) as log:
        await caught_up(log)
        later(hours * HOUR)
        topic.put(b"new", b"2")
        await caught_up(log)
        assert heard.keys == [b"old", b"new"]


async def test_an_idle_topic_is_followed_for_as_long_as_it_takes(
    topic: MemoryTopic, later: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ends are requested now and then; a partition that lags behind them is not proven to be complete."""
    monkeypatch.setattr(log_reader, "PROVE_SECONDS", 0.001)
    topic.put(b"old", b"1")
    async with log_over(topic, heard := Heard()) as log:
        await caught_up(log)
        partitions = following(log)._followed
        for _ in range(3):
            later(25 * HOUR)
            now = view_follower.elapsed_seconds()
            await until(lambda: partitions[0].as_of >= now)  # noqa: B023
            topic.put(b"new", b"2")
            await caught_up(log)
        assert len(heard.keys) == 4
        log.pause([0])
        topic.put(b"unread", b"3")
        now = view_follower.elapsed_seconds()
        await until(lambda: partitions[1].as_of >= now)
        assert partitions[0].as_of < now


async def test_a_partition_without_a_leader_hides_no_other(
    topic: MemoryTopic, later: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_reader, "PROVE_SECONDS", 0.001)
    async with log_over(topic, heard := Heard()) as log:
        await caught_up(log)
        topic.leaderless.add(0)
        later(25 * HOUR)
        now = view_follower.elapsed_seconds()
        await until(lambda: following(log)._followed[1].as_of >= now)
        topic.put(b"new", b"1", 1)
        await until(lambda: heard.keys == [b"new"])


@pytest.mark.parametrize(("pause", "ahead", "times"), [(HOUR, 0, 28), (6 * HOUR, 2, 10)], ids=["a little", "half"])
async def test_a_reader_that_is_always_late_goes_on(
    topic: MemoryTopic, later: Callable[[float], None], monkeypatch: pytest.MonkeyPatch, pause: float, ahead: int,
    times: int,
) -> None:  # fmt: skip
    """At each look the log has grown since the reader was last seen; what it has had is the end of an hour ago. And one
    that is late by half the life of tombstones: it is asked for the ends four times in a life, so it reaches one of
    them each quarter."""
    monkeypatch.setattr(log_reader, "PROVE_SECONDS", math.inf)
    topic.put(b"old", b"1")
    async with log_over(topic, heard := Heard()) as log:
        await caught_up(log)
        for count in range(2, 2 + times):
            later(pause)
            following(log).prove({0: count + ahead, 1: 0}, view_follower.elapsed_seconds())
            topic.put(b"new", b"2")
            await until(lambda: len(heard.keys) == count)  # noqa: B023


async def test_a_partition_of_which_nothing_was_received_is_not_out_of_date(
    topic: MemoryTopic, later: Callable[[float], None]
) -> None:
    """It was paused before its first record."""
    async with log_over(topic, heard := Heard()) as log:
        await caught_up(log)
        log.pause([0])
        followed = following(log)._followed[0] = view_follower._Followed(0)
        followed.paused = True
        later(25 * HOUR)
        topic.put(b"old", b"1")
        log.resume(0)
        await until(lambda: heard.keys == [b"old"])


async def test_settings_that_cannot_be_seen_at_first_count_from_when_they_are_seen(
    topic: MemoryTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_reader, "PROVE_SECONDS", 0.001)
    topic.settings_hidden = 1
    topic.settings["delete.retention.ms"] = str(7 * 24 * 3_600_000)
    async with log_over(topic, Heard()) as log:
        await until(lambda: following(log).life_seconds == 7 * 24 * HOUR)
        topic.settings["delete.retention.ms"] = str(48 * 3_600_000)
        await until(lambda: following(log).life_seconds == 48 * HOUR)
        topic.settings["delete.retention.ms"] = str(7 * 24 * 3_600_000)
        questions = topic.questions
        await until(lambda: topic.questions > questions + 20)
        assert following(log).life_seconds == 48 * HOUR, "what was deleted meanwhile keeps its time"


@pytest.mark.parametrize("on_disk", [False, True])
async def test_a_view_fails_and_is_read_anew(
    topic: MemoryTopic, later: Callable[[float], None], tmp_path: Path, on_disk: bool
) -> None:
    """Also from its folder: that says of when it is, and nothing newer."""
    topic.put(b"old", number(1))
    disk = {"engine": SQLite(), "folder": str(tmp_path)} if on_disk else {}
    view: View[str, int] = view_of(topic, **disk)
    with pytest.raises(OffsetError, match=MISSED):  # noqa: PT012
        async with view:
            await view.ready(PATIENCE)
            assert view._reader is not None
            await view._reader.wait_caught_up(PATIENCE, 1.0)
            later(25 * HOUR)
            compact(topic, b"old")
            topic.put(b"new", number(2))
            await asyncio.wait_for(view._reader.wait_stopped(), PATIENCE)
    topic.followed.clear()
    async with view:
        await view.ready(PATIENCE)
        assert dict(view.items()) == {"new": 2}
        assert (0, FROM_START) in topic.followed
    assert view.state.name == "STOPPED"


async def test_the_time_of_a_view_begins_with_the_mark_of_its_folder(
    topic: MemoryTopic, later: Callable[[float], None], tmp_path: Path
) -> None:
    """It was young enough when it was opened. It may not be when it is read on."""
    for partition in range(2):
        topic.put(b"old", number(1), partition)
    view: View[str, int] = view_of(topic, engine=SQLite(), folder=str(tmp_path))
    async with view:
        await view.ready(PATIENCE)
    later(22 * HOUR)
    async with view:
        assert view._reader is not None
        ages = [view_follower.elapsed_seconds() - each.as_of for each in view._reader.running()._followed.values()]
        assert ages == [pytest.approx(22 * HOUR, abs=PATIENCE)] * 2


def test_a_lookup_stops_the_source(later: Callable[[float], None]) -> None:
    with TestDriver(Shop().source, topics={RATES: 1}) as driver:
        rate(driver, 1)
        pay(driver)
        later(25 * HOUR)
        rate(driver, 2, wait=False)
        with pytest.raises(OffsetError, match=f"the lookup rates cannot be read on: {MISSED}"):
            driver.advance(20.0)
        assert set(seen(driver)) == {"EUR at 1"}
        driver.restart()
        pay(driver)
        assert seen(driver) == ["EUR at 2"]
