"""Schedules by cron: texts and zones, one run per due time over restarts, moves, crashes and deployments."""

from __future__ import annotations

import random
import sys
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from streams import EventContext, EventSource, MissedRuns
from streams.core.cron import TIMER_PREFIX, CronSchedule, CronTimer, adopted, restored
from streams.core.timers import Timer
from streams.core.visits import NEVER_MS
from streams.errors import ConfigError, EventFailure, RegistrationError
from streams.looks.asyncapi import asyncapi
from streams.outcomes import DEAD_LETTER, PARK, SKIP, STOP, ErrorPolicy, Failed, Retry
from streams.records import IncomingRecord
from streams.runtime.changelog import decode_timer, encode_timer, timer_key
from streams.testing import TestDriver
from tests.unit.handlers_kit import OUT, config
from tests.unit.test_timers import timers
from tests.vocabulary import TOTALS, Added, Ring, Words, count, register, touch

START = datetime(2026, 3, 2, 12, tzinfo=UTC)  # a Monday
NIGHTLY, EACH = "30 2 * * *", "* * * * *"
AMS, NYC, LORD, UTC_ = "Europe/Amsterdam", "America/New_York", "Australia/Lord_Howe", "UTC"


def times(text: str, zone: str, begin: str, number: int) -> list[str]:
    """The next due times, by the clock of the zone, with the distance to UTC where two of them look alike."""
    schedule, at = CronSchedule(text, zone), ZoneInfo(zone)
    now = int(datetime.fromisoformat(begin).replace(tzinfo=at).timestamp() * 1000)
    found: list[str] = []
    for _ in range(number):
        following = schedule.after(now)
        assert following > now
        now = following
        found.append(datetime.fromtimestamp(now / 1000, at).strftime("%m-%dT%H:%M"))
    return found


@pytest.mark.parametrize(
    ("text", "zone", "begin", "expected"),
    [
        ("* * * * *", UTC_, "2026-01-01T00:00", "01-01T00:01 01-01T00:02"),
        ("*/20 * * * *", UTC_, "2026-01-01T00:00", "01-01T00:20 01-01T00:40 01-01T01:00"),
        ("5/20 * * * *", UTC_, "2026-01-01T00:00", "01-01T00:05 01-01T00:25 01-01T00:45"),
        ("1,3-5 0 * * *", UTC_, "2026-01-01T00:00", "01-01T00:01 01-01T00:03 01-01T00:04 01-01T00:05 01-02T00:01"),
        ("0-10/5 8 * * *", UTC_, "2026-01-01T00:00", "01-01T08:00 01-01T08:05 01-01T08:10 01-02T08:00"),
        ("30 2 * * 1-5", AMS, "2026-01-01T12:00", "01-02T02:30 01-05T02:30 01-06T02:30"),
        ("30 2 * * MON-FRI", AMS, "2026-01-01T12:00", "01-02T02:30 01-05T02:30"),
        ("0 0 * * 0", UTC_, "2026-01-01T12:00", "01-04T00:00 01-11T00:00"),
        ("0 0 * * 7", UTC_, "2026-01-01T12:00", "01-04T00:00 01-11T00:00"),
        ("0 0 * * sun", UTC_, "2026-01-01T12:00", "01-04T00:00 01-11T00:00"),
        ("0 0 1 jan,JUL *", UTC_, "2026-01-01T12:00", "07-01T00:00 01-01T00:00"),
        ("0 0 L * *", UTC_, "2026-01-01T12:00", "01-31T00:00 02-28T00:00 03-31T00:00"),
        ("0 0 LW * *", UTC_, "2026-01-01T12:00", "01-30T00:00 02-27T00:00 03-31T00:00"),
        ("0 0 * * MON#1", UTC_, "2026-01-01T12:00", "01-05T00:00 02-02T00:00"),
        ("0 0 * * 5L", UTC_, "2026-01-01T12:00", "01-30T00:00 02-27T00:00"),
        ("0 0 13 * 5", UTC_, "2026-02-01T12:00", "02-06T00:00 02-13T00:00 02-20T00:00"),  # either day
        ("0 0 */13 * 5", UTC_, "2026-02-01T12:00", "02-27T00:00 03-27T00:00"),  # both, with a star
        ("0 0 29 2 *", UTC_, "2026-01-01T12:00", "02-29T00:00 02-29T00:00"),
        ("0 0 31 * *", UTC_, "2026-01-01T12:00", "01-31T00:00 03-31T00:00 05-31T00:00"),
        ("0 0 * 2 MON#5", UTC_, "2026-01-01T12:00", "02-29T00:00"),  # of 2044
        ("  0\t0   * * * ", UTC_, "2026-01-01T12:00", "01-02T00:00"),
        # The night without 02:30: at the end of the gap.
        (NIGHTLY, AMS, "2026-03-28T12:00", "03-29T03:00 03-30T02:30"),
        (NIGHTLY, NYC, "2026-03-07T12:00", "03-08T03:00 03-09T02:30"),
        ("15 2 * * *", LORD, "2026-10-03T12:00", "10-04T02:30 10-05T02:15"),
        ("30 2,3 * * *", AMS, "2026-03-28T12:00", "03-29T03:00 03-29T03:30 03-30T02:30"),
        ("0,30 2-3 * * *", AMS, "2026-03-28T12:00", "03-29T03:00 03-29T03:30 03-30T02:00"),
        ("*/30 2 * * *", AMS, "2026-03-28T12:00", "03-30T02:00 03-30T02:30"),  # each half hour of one that is not there
        ("30 * * * *", AMS, "2026-03-29T01:00", "03-29T01:30 03-29T03:30"),
        # The night with two: once, if it names the hour; each half hour in both.
        (NIGHTLY, AMS, "2026-10-24T12:00", "10-25T02:30 10-26T02:30"),
        ("30 1 * * *", NYC, "2026-10-31T12:00", "11-01T01:30 11-02T01:30"),
        ("45 1 * * *", LORD, "2026-04-04T12:00", "04-05T01:45 04-06T01:45"),
        ("*/30 * * * *", AMS, "2026-10-25T01:45", "10-25T02:00 10-25T02:30 10-25T02:00 10-25T02:30 10-25T03:00"),
        ("30 * * * *", NYC, "2026-11-01T00:45", "11-01T01:30 11-01T01:30 11-01T02:30"),
        ("0 0 * * *", "America/Santiago", "2026-09-05T12:00", "09-06T01:00 09-07T00:00"),  # midnight is in the gap
        ("0 0 * * *", "Asia/Kathmandu", "2026-09-05T12:00", "09-06T00:00 09-07T00:00"),
    ],
)
def test_due_times(text: str, zone: str, begin: str, expected: str) -> None:
    assert times(text, zone, begin, len(expected.split())) == expected.split()


def test_one_that_begins_in_the_second_of_two_hours_does_not_go_back() -> None:
    second = int(datetime(2026, 10, 25, 2, 10, fold=1, tzinfo=ZoneInfo(AMS)).timestamp() * 1000)
    found = CronSchedule(NIGHTLY, AMS).after(second)
    assert datetime.fromtimestamp(found / 1000, ZoneInfo(AMS)).day == 26
    assert CronSchedule("0 0 1 1 *", UTC_).after(NEVER_MS - 1000) == NEVER_MS


def test_a_run_that_is_due_just_now_was_not_missed() -> None:
    schedule, minute = CronSchedule(EACH, UTC_), 60_000
    timer = schedule.timer("report", 0)
    for late_ms, following in ((0, 2), (minute - 1, 2), (minute, 2), (minute + 1, 3), (10 * minute, 11)):
        run = schedule.run(timer, timer.due_ms + late_ms)
        assert run.following is not None
        assert (run.due_ms, run.following.due_ms) == (minute, following * minute)


NOWHERE = "Mars/Base", "Europe", "../etc/passwd", "/etc/localtime", "a\0b", "a" * 4_096
FIVE, NEVER, BAD = "a text of five fields", "never comes|cannot be read: Bad", "cannot be read: Bad"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0 30 2 * * *", "five fields.*a field of seconds is not taken"),
        *[(text, FIVE) for text in ("", "* * * *", "@daily", "9 " * 2_000, None, 5, b"0 0 * * *", ["0"] * 5)],
        *[(text, NEVER) for text in ("0 0 30 2 *", "0 0 31 2,4 *", "0 0 */29 2 MON#2", "0 0 31 4,6,9,11 *")],
        *[(text, BAD) for text in ("60 * * * *", "* 24 * * *", "* * 0 * *", "* * 32 * *", "* * * 13 *", "* * * * 8")],
        *[
            (text, BAD)
            for text in ("5-1 * * * *", "*/0 * * * *", "x * * * *", "-1 * * * *", "1, * * * *", "²L * * * *")
        ],
        *[
            (text, BAD)
            for text in ("* * * * MON#6", "* * * * L", "* * L-3 * *", "* * * FOO *", "? * * * *", "1.5 * * * *")
        ],
    ],
)
def test_texts_that_are_refused(text: Any, said: str) -> None:
    source: EventSource[Any] = EventSource(config())
    with pytest.raises(ConfigError, match=said) as refused:
        source.schedule_interjection(cron=text if text is not None else 0, zone=UTC_)  # type: ignore[arg-type]
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    ("options", "said"),
    [
        *[({"zone": zone}, r"no time zone file of.*\[cron\]") for zone in NOWHERE],
        *[({"zone": zone}, "needs the name of a time zone") for zone in (None, "", 5)],
        ({"zone": UTC_, "every": 5.0}, "either every=, or cron="),
        ({"cron": None}, "either every=, or cron="),
        ({"cron": None, "every": 5.0, "zone": UTC_}, "it belongs to cron="),
        ({"zone": UTC_, "jitter": 1.0}, "it belongs to every="),
        ({"zone": UTC_, "missed": MissedRuns.DELAY}, "with cron it must be"),
        ({"zone": UTC_, "missed": "skip"}, "with cron it must be"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        EventSource[Any](config()).schedule_interjection(**({"cron": NIGHTLY} | options))
    assert len(str(refused.value)) < 400


def test_the_parser_is_needed_by_those_who_declare_a_cron_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cronsim", None)
    source: EventSource[Any] = EventSource(config())
    source.schedule_interjection(report, every=5.0)
    with pytest.raises(ConfigError, match=r"needs cronsim: pip install 'kafka-event-source\[cron\]'"):
        source.schedule_interjection(cron=NIGHTLY, zone=AMS)


def test_names_that_do_not_tell_timers_apart() -> None:
    source: EventSource[Any] = EventSource(config())
    declare = source.schedule_interjection(cron=NIGHTLY, zone=AMS)
    declare(report)
    source.schedule_interjection(report, every=5.0)
    with pytest.raises(RegistrationError, match="is the second one with a cron and this name"):
        declare(report)

    class Nameless:
        def __call__(self, ctx: EventContext[Any]) -> None: ...

    with pytest.raises(RegistrationError, match="has no name"):
        declare(Nameless())


# -- runs --------------------------------------------------------------------------------------------------------------


def report(ctx: EventContext[Any]) -> Any:
    assert ctx.timer is not None
    assert (ctx.is_interjection, ctx.input, ctx.cancel_timer(ctx.timer.name)) == (True, None, False)
    touch(ctx, "r")
    ctx.forward(OUT, Ring(f"{ctx.timer.due:%m-%dT%H:%M}"), key="r")
    return 5  # as one that is also asked for by ``interject``


def source_of(
    cron: str = EACH,
    function: Any = report,
    *,
    zone: str = UTC_,
    partitions: int = 1,
    store: Any = TOTALS,
    missed: MissedRuns = MissedRuns.SKIP,
    on_error: ErrorPolicy | None = None,
    blocking: bool = False,
) -> EventSource[Any]:
    source: EventSource[Any] = EventSource(config(partitions), store)
    register(source, count)
    if cron:
        source.schedule_interjection(
            function, cron=cron, zone=zone, missed=missed, on_error=on_error, blocking=blocking
        )
    return source


def driven(source: Any, members: int = 1, start: datetime = START, seed: int = 0) -> TestDriver[Any]:
    return TestDriver(source, members, seed, topics={OUT: 1}, start_time=start.timestamp(), patience=600)


def ran(driver: TestDriver[Any]) -> list[str]:
    return [event.name.partition("T")[2] for event in driver.outputs(OUT, Ring)]


def minutes(driver: TestDriver[Any]) -> list[str]:
    """All that have begun since the start."""
    begun = int(driver.time() - START.timestamp()) // 60
    return [f"{(START + timedelta(minutes=number + 1)):%H:%M}" for number in range(begun)]


@pytest.mark.parametrize(
    ("kind", "store"), [("plain", TOTALS), ("async", Words), ("blocking", TOTALS)], ids=["plain", "async", "blocking"]
)
def test_each_due_time_has_one_run(kind: str, store: Any) -> None:
    async def waits(ctx: EventContext[Any]) -> Any:
        return report(ctx)

    function = waits if kind == "async" else report
    source = source_of(EACH, function, store=store, blocking=kind == "blocking", missed=MissedRuns.CATCH_UP)
    with driven(source) as driver:
        driver.advance(62)
        driver.crash()
        driver.restart()
        driver.compact()
        driver.advance(30)
        driver.leave()
        driver.advance(70)
        driver.restart()
        driver.advance(30)
        assert ran(driver) == minutes(driver)
        assert timers(driver) == [TIMER_PREFIX + function.__qualname__]
        following = driver.statistics().partitions[0].next_timer_ms
        assert following == START.timestamp() * 1000 + 60_000 * (len(minutes(driver)) + 1)
        driver.check()


@pytest.mark.parametrize(
    ("missed", "expected"),
    [
        (MissedRuns.SKIP, ["12:01", "12:04"]),  # one run stands for three
        (MissedRuns.CATCH_UP, ["12:01", "12:02", "12:03", "12:04"]),
    ],
)
def test_runs_that_no_member_was_there_for(missed: MissedRuns, expected: list[str]) -> None:
    with driven(source_of(EACH, missed=missed)) as driver:
        driver.advance(30)
        driver.leave()
        driver.advance(170)
        driver.restart()
        driver.advance(60)
        assert ran(driver) == expected


@pytest.mark.parametrize(
    ("start", "due", "following"),
    [
        ("2026-03-29T00:59:30", "01:00", "2026-03-30T00:30"),  # 02:30 is not there
        ("2026-10-25T00:29:30", "00:30", "2026-10-26T01:30"),  # it comes twice
    ],
)
def test_both_nights_in_the_time_of_the_driver(start: str, due: str, following: str) -> None:
    with driven(source_of(NIGHTLY, zone=AMS), start=datetime.fromisoformat(start + "+00:00")) as driver:
        driver.advance(40)
        assert ran(driver) == [due]
        next_ms = driver.statistics().partitions[0].next_timer_ms
        assert next_ms == datetime.fromisoformat(following + "+00:00").timestamp() * 1000


def back(driver: TestDriver[Any]) -> None:
    driver.restart(min({0, 1}.difference(driver.members)))


@pytest.mark.parametrize("seed", range(4))
def test_once_per_due_time_over_crashes_and_moves(seed: int) -> None:
    """Members that crash before and behind commits, are evicted and come back, at random. The seed is the test's."""
    rng = random.Random(seed)

    def killed(number: int) -> None:
        if number in driver.members:  # two traps may spring at one point
            driver.crash(number)

    with driven(source_of(EACH, partitions=3, missed=MissedRuns.CATCH_UP), members=2, seed=seed) as driver:
        for _ in range(25):
            act = rng.choice(["pass", "crash", "trap", "evict", "leave", "refuse", "lose"])
            if len(driver.members) < 2 or act == "pass":
                back(driver) if len(driver.members) < 2 else driver.send(Added("a", 1), key="a")
            elif act == "crash":
                driver.crash(rng.choice(driver.members))
            elif act == "trap":
                driver.at(rng.choice(["commit.before", "commit.after"]), killed)
            elif act == "evict":
                driver.evict(rng.choice(driver.members))
            elif act == "leave":
                driver.leave(rng.choice(driver.members))
            elif act == "refuse":
                driver.refuse("commit", rng.choice(driver.members))
            else:
                driver.lose_reply("commit", rng.choice(driver.members))
            driver.advance(rng.uniform(5, 90))
        while len(driver.members) < 2:
            back(driver)
        driver.advance(120)
        driver.settle()
        found = Counter(event.name for event in driver.outputs(OUT, Ring))
        assert set(found.values()) == {3}, (seed, found)  # one of each partition
        assert len(found) == int(driver.time() // 60 - START.timestamp() // 60), seed
        driver.check()


@pytest.mark.parametrize(
    ("policy", "expected", "calls"),
    [
        (SKIP, ["12:01"], 2),
        (DEAD_LETTER, ["12:01"], 2),  # no record, no key: as SKIP
        (PARK, ["12:01"], 2),
        (Retry(attempts=2, backoff_seconds=1.0), ["12:00", "12:01"], 3),
        (Retry(attempts=2, backoff_seconds=1.0, waits="key"), ["12:00", "12:01"], 3),
        (lambda failed: SKIP, ["12:01"], 2),
    ],
)
@pytest.mark.parametrize("store", [TOTALS, Words], ids=["journalled", "plain store"])
def test_a_run_that_fails(policy: ErrorPolicy, expected: list[str], calls: int, store: Any) -> None:
    called: list[int] = []

    def fails_first(ctx: EventContext[Any]) -> None:
        called.append(ctx.attempt)
        report(ctx)
        if len(called) == 1:
            raise ValueError("not this one")

    start = datetime(2026, 3, 2, 11, 59, 30, tzinfo=UTC)
    with driven(source_of(EACH, fails_first, store=store, on_error=policy), start=start) as driver:
        driver.advance(100)
        assert (ran(driver), len(called)) == (expected, calls)
        assert driver.dead_letters() == []
        driver.check()


def test_a_policy_function_gets_no_record_and_one_that_stops_loses_no_run() -> None:
    got: list[Failed] = []
    broken = [True]

    def decide(failed: Failed) -> Retry:
        got.append(failed)
        return STOP

    def fails(ctx: EventContext[Any]) -> None:
        if broken:
            raise ValueError("not now")
        report(ctx)

    with driven(source_of(EACH, fails, on_error=decide)) as driver:
        with pytest.raises(EventFailure, match=r"the run of .*fails by '\* \* \* \* \*' \(UTC\), due 2026-03-02 12:01"):
            driver.advance(65)
        assert [(failed.record, failed.origin, failed.attempts) for failed in got] == [(None, "interjection", 1)]
        broken.clear()
        driver.restart()
        driver.advance(10)
        assert ran(driver) == ["12:01"]


# -- deployments -------------------------------------------------------------------------------------------------------


def test_a_new_deployment_with_another_cron_or_none() -> None:
    current = [EACH]
    with driven(lambda: source_of(current[0])) as driver:
        driver.advance(65)
        for cron in ("*/2 * * * *", ""):
            driver.leave()
            current[0] = cron
            driver.restart()
            driver.advance(65)
            assert ran(driver) == ["12:01", "12:02"]
        assert timers(driver) == [], "a schedule that is not declared any more leaves nothing that fires"
        driver.send(Added("a", 1), key="a")
        current[0] = EACH
        driver.leave()
        driver.restart()
        driver.advance(65)
        assert ran(driver) == ["12:01", "12:02", "12:04"]
        driver.check()


def test_a_member_without_the_zone_does_not_start_and_the_others_go_on() -> None:
    there = [True]

    def make() -> EventSource[Any]:
        return source_of(EACH, zone=AMS if there else "Mars/Base")

    with driven(make) as driver:
        there.clear()
        with pytest.raises(ConfigError, match=r"zone is 'Mars/Base'.*no time zone file"):
            driver.join()
        driver.advance(65)
        assert ran(driver) == ["12:01"]


def test_no_handler_removes_or_replaces_it() -> None:
    answers: list[bool] = []

    def cancels(ctx: EventContext[Any], event: Added) -> None:
        answers.append(ctx.cancel_timer(TIMER_PREFIX + "report"))

    source: EventSource[Any] = EventSource(config(), TOTALS)
    register(source, cancels)
    source.schedule_interjection(report, cron=EACH, zone=UTC_)
    with driven(source) as driver:
        driver.send(Added("a", 1), key="a")
        driver.advance(65)
        assert (answers, ran(driver)) == ([False], ["12:01"])


def test_members_that_know_no_schedules_carry_it_and_fire_nothing() -> None:
    """In the changelog it is due at the end of all time; a value of a newer release stays as it is, and is replaced by
    a member that has the schedule."""
    timer = CronSchedule(NIGHTLY, AMS).timer("report", 1_000)
    record = IncomingRecord("c", 0, 0, timer_key(timer.name), encode_timer(timer), None, 0)
    assert b'"due_ms":253402300799999,' in (record.value or b"")
    assert decode_timer(record) == (timer.name, timer)
    for value in (b"{}", timer.value.replace(b'"v":1', b'"v":2')):
        newer = Timer(timer.name, NEVER_MS, "kes.cron", value)
        assert restored(newer) is newer
        schedule = CronSchedule(NIGHTLY, AMS)
        assert adopted({"report": schedule}, [newer], 1_000) == {timer.name: timer}
        assert adopted({}, [newer, Timer("a", 5, "x", b"")], 1_000) == {timer.name: None}
    assert adopted({"report": CronSchedule(NIGHTLY, AMS)}, [timer], 5_000_000_000) == {}
    assert isinstance(timer, CronTimer)
    assert timer.following is None


def test_it_is_in_the_topology() -> None:
    source = source_of(NIGHTLY, zone=AMS)
    source.schedule_interjection(lambda ctx: None, every=5.0)
    assert source.topology.crons == {"report": f"{NIGHTLY} {AMS}"}
    assert source.topology.interjections[0] == "report"
    assert asyncapi(source)["info"]["x-kes-schedules"] == source.topology.crons
    assert "x-kes-schedules" not in asyncapi(source_of(""))["info"]
