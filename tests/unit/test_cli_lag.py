"""``kes lag`` without a broker: what is asked for, what is said, how the pace is reckoned."""

from __future__ import annotations

import io
import json
import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from rich.console import Console
from rich.text import Text

from streams.cli import lag
from streams.cli.lag import Pace, Speed
from streams.errors import BrokerUnavailable, Stopped, TopicError
from streams.kafka.questions.admin import Watermarks, standing
from streams.kafka.questions.lags import PartitionLag, Tails
from streams.kafka.settings import ClientSettings
from streams.records import IncomingRecord
from streams.statistics import JobStatistics, ParkedStatistics
from tests.unit.cli_group_kit import BEGAN, told
from tests.unit.cli_kit import FakeCluster, Kes, admin, source_of

__all__ = ["admin"]  # the fixture

AT = ("lag", "fleet:source", "--bootstrap-servers", "x:1")


def partition(number: int, committed: int | None, end: int, stable: int | None = None) -> PartitionLag:
    return PartitionLag(number, committed, 0, end if stable is None else stable, end, end - (committed or 0))


class Members:
    """What the members of the source report, or why that is not known."""

    live: Any
    problems: tuple[str, ...] = ()

    def __init__(self, *given: Any) -> None: ...
    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None: ...
    def read(self, seconds: float) -> Any:
        return None, self.live, self.problems


@pytest.fixture(autouse=True)
def members(monkeypatch: pytest.MonkeyPatch) -> type[Members]:
    found = type("Reported", (Members,), {"live": {}})
    monkeypatch.setattr(lag, "LiveGroup", found)
    return found


def test_parked_keys_are_named_where_the_lag_is_0(
    kes: Kes, admin: FakeCluster, slept: list[float], members: type[Members]
) -> None:
    since = 100_000 - 180_000
    members.live = told("a", parked=(ParkedStatistics(1, 2, 17, since),)) | told(
        "b", at_ms=int(BEGAN * 1000) + 1, parked=(ParkedStatistics(1, 3, 18, since), ParkedStatistics(0, 1, 1, 90_000))
    )
    members.live |= told("c", jobs=(JobStatistics(3, 0, since), JobStatistics(2, 1, since + 1)))
    admin.lags = [[partition(0, 7, 7)]] * 20
    said = "4 parked keys with 19 events: partition 1 (3 keys, 18 events, for 3 min 00 s); partition 0 (1 key, 1 event"
    assert said in " ".join(kes(*AT).lines)
    assert kes(*AT, "--json").data["parked"] == [
        {"partition": 1, "keys": 3, "events": 18, "since_ms": since},
        {"partition": 0, "keys": 1, "events": 1, "since_ms": 90_000},
    ]
    text = "1 parked job: partition 3 (the oldest job for 3 min 00 s); partition 2 (1 parked, the oldest job for 3 min"
    assert text in " ".join(kes(*AT).lines)
    watched = kes(*WATCH).lines[-1]
    assert (said in watched, text in watched) == (True, True)
    assert kes(*AT, "--json").data["jobs"][1] == {"partition": 2, "parked": 1, "since_ms": since + 1}
    members.live = told("c", jobs=tuple(JobStatistics(number, 0, since) for number in range(7)), jobs_more=2)
    assert "old jobs: partition 0 (the oldest job for" in " ".join(kes(*AT).lines)
    assert "and 4 further partitions" in " ".join(kes(*AT).lines)
    members.live, members.problems = {}, ("the members' status is not known: not authorised",)
    assert "parked keys and jobs: the members' status is not known: not authorised" in kes(*AT).lines


def test_lag_of_a_source_once(kes: Kes, admin: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    long = f"demo{'-of-a-shop' * 8}"
    admin.lags = [
        [partition(0, 7_000, 8_500, 8_200), partition(1, None, 25)],
        [partition(0, None, 0), partition(1, None, 0)],
    ]
    head = "partition committed stable end lag"
    rows = ["0 7,000 8,200 8,500 1,500", "1 - 25 25 25", "all 7,000 8,225 8,525 1,525"]
    assert kes(*AT).lines == ["demo in flights", head, *rows]
    monkeypatch.setattr(sys.modules["fleet"], "source", source_of(long))
    monkeypatch.setenv("COLUMNS", "60")
    lines = kes(*AT).lines  # a source without events is no error
    assert lines == [f"{long} in flights", head, "0 - 0 0 0", "1 - 0 0 0", "all 0 0 0 0"], "the title is whole"
    assert admin.asked[-2:] == [("lag", long, "flights", 10.0), ("close",)]


def test_partitions_that_the_settings_do_not_know_are_named(kes: Kes, admin: FakeCluster) -> None:
    admin.lags = [[partition(number, None if number > 3 else 7, 7) for number in range(6)]] * 2
    captured = kes(*AT)
    assert [line.split()[0] for line in captured.lines if "(no member reads it)" in line] == ["4", "5"]
    assert "topic flights has 6 partitions, settings say 4: no member reads" in captured.err
    assert kes(*AT, "--json").data["unread_partitions"] == [4, 5]


def test_the_security_settings_of_the_source_are_used(
    kes: Kes, admin: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = source_of(bootstrap_servers="of-the-source:1", client_settings={"security.protocol": "SSL"})
    monkeypatch.setattr(sys.modules["fleet"], "source", source)
    monkeypatch.setenv("KES_BOOTSTRAP_SERVERS", "of-the-environment:1")
    admin.lags = [[partition(0, 1, 1)]] * 2
    kes("lag", "fleet:source")
    kes("lag", "fleet:source", "--bootstrap-servers", "of-the-option:1")
    assert [settings.bootstrap_servers for settings in admin.settings] == ["of-the-source:1", "of-the-option:1"]
    assert [settings.overrides for settings in admin.settings] == [{"security.protocol": "SSL"}] * 2


def test_lag_of_a_group_as_json(kes: Kes, admin: FakeCluster) -> None:
    admin.lags = [[partition(0, 7, 9), partition(1, None, 3)], [partition(0, None, 3)]]
    arguments = ("lag", "--group", "g", "--topic", "t", "--bootstrap-servers", "x:1", "--timeout", "3", "--json")
    answer = kes(*arguments).data
    assert (answer["group"], answer["topic"], answer["lag"]) == ("g", "t", 5)
    assert answer["partitions"][1] == {"partition": 1, "committed": None, "start": 0, "stable": 3, "end": 3, "lag": 3,
                                       "seconds": None}  # fmt: skip
    assert admin.asked[1:] == [("lag", "g", "t", 3.0), ("close",)]
    assert "the group 'g' has no committed offset in topic t" in kes(*arguments, code=1).err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 2, "both --group and --topic"),
        (["--group", "g"], 2, "both --group and --topic"),
        (["--topic", "t"], 2, "both --group and --topic"),
        (["fleet:source", "--group", "g"], 2, "both --group and --topic"),
        (["-g", "g", "-t", "t"], 1, "no broker is named"),
        (["fleet:source", "--interval", "0"], 2, "--interval"),
    ],
)
def test_what_to_look_at_must_be_said(kes: Kes, admin: FakeCluster, arguments: list[str], code: int, said: str) -> None:
    assert said in kes("lag", *arguments, code=code).words
    assert admin.asked == []


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses, which alone move the clock; the third one is interrupted."""
    made: list[float] = []

    def sleep(seconds: float) -> None:
        made.append(seconds)
        if len(made) == 3:
            raise KeyboardInterrupt

    clock = SimpleNamespace(
        monotonic=lambda: 100.0 + sum(made), time=lambda: 100.0, sleep=sleep, strftime=lambda _: "12:00:00"
    )
    monkeypatch.setattr(lag, "time", clock)
    return made


WATCH = (*AT, "--watch", "--interval", "5")
AWAY = BrokerUnavailable("nothing answers at x:1")


def test_watching_without_a_terminal_is_a_line_each_time(kes: Kes, admin: FakeCluster, slept: list[float]) -> None:
    admin.lags = [[partition(0, None, 2_000)], [partition(0, 1_000, 9_000)], [partition(0, 6_000, 10_000)]]
    assert kes(*WATCH).lines == [
        "12:00:00 demo in flights: 2,000 behind, nothing committed yet",
        "12:00:00 demo in flights: 8,000 behind, 0/s committed, 1,400/s arriving, not getting nearer",
        "12:00:00 demo in flights: 4,000 behind, 0/s committed, 800/s arriving, not getting nearer",
    ]
    assert slept == [5.0, 5.0, 5.0]


def test_watching_follows_each_input_at_its_own_pace(
    kes: Kes, admin: FakeCluster, slept: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = source_of()
    source.input("payments")
    monkeypatch.setattr(sys.modules["fleet"], "source", source)
    for behind in (9_000, 8_000, 7_000):
        admin.lags += [[partition(0, 10_000 - behind, 10_000)], [partition(0, 5, 20_000 - behind)]]
    lines = kes(*WATCH).lines
    assert lines[-2:] == [
        "12:00:00 demo in flights: 7,000 behind, 200/s committed, 0/s arriving, 35 s left",
        "12:00:00 demo in payments: 12,995 behind, 0/s committed, 200/s arriving, not getting nearer",
    ]
    assert {asked[2] for asked in admin.asked if asked[0] == "lag"} == {"flights", "payments"}


def test_watching_as_json_has_the_rates(kes: Kes, admin: FakeCluster, slept: list[float]) -> None:
    """A broker that goes away meanwhile is waited for."""
    admin.lags = [[partition(0, 1_000, 9_000)], AWAY, [partition(0, 5_000, 11_000)]]
    answer = kes(*WATCH, "--json")
    first, last = [json.loads(line) for line in answer.out.splitlines()]
    assert first["committed_per_second"] is None
    assert (last["committed_per_second"], last["arriving_per_second"], last["seconds_left"]) == (400.0, 200.0, 30.0)
    assert answer.err == "kes: nothing answers at x:1\n"


def test_watching_on_a_terminal_is_a_live_table(
    kes: Kes, admin: FakeCluster, slept: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=100, _environ={})
    monkeypatch.setattr(lag, "answers", lambda: screen)
    admin.lags = [[partition(0, 1_000, 9_000)], [partition(0, 3_000, 10_000)], AWAY]
    kes(*WATCH)
    assert isinstance(screen.file, io.StringIO)
    last = Text.from_ansi(screen.file.getvalue().rpartition("demo in flights")[2]).plain
    assert "10,000" in last  # the last answer stays in sight while the broker is away
    assert "7,000 behind, 400/s committed, 200/s arriving, 35 s left" in last
    assert "nothing answers at x:1" in last


def test_a_broker_that_was_never_there_ends_the_watch(kes: Kes, admin: FakeCluster, slept: list[float]) -> None:
    admin.lags = [AWAY]
    assert "broker unavailable: nothing answers at x:1" in kes(*WATCH, code=1).err


Sample = tuple[float, list[PartitionLag]]


@pytest.mark.parametrize(
    ("samples", "speed"),
    [
        ([(0.0, [partition(0, 5, 9)])], Speed(None, None, None)),
        ([(0.0, [partition(0, 0, 900)]), (10.0, [partition(0, 300, 1_000)])], Speed(30.0, 10.0, 35.0)),
        ([(0.0, [partition(0, 0, 900)]), (10.0, [partition(0, 100, 1_100)])], Speed(10.0, 20.0, None)),  # falls behind
        ([(0.0, [partition(0, 90, 90)]), (10.0, [partition(0, 90, 90)])], Speed(0.0, 0.0, 0.0)),
        ([(0.0, [partition(0, 0, 0)]), (10.0, [partition(0, 300, 310)])], Speed(30.0, 31.0, 0.0)),  # up to date
        ([(0.0, [partition(0, None, 50)]), (10.0, [partition(0, 50, 50)])], Speed(0.0, 0.0, 0.0)),  # no offset before
        ([(0.0, [partition(0, 0, 9)]), (10.0, [partition(0, 9, 9), partition(1, 7, 7)])], Speed(0.9, 0.0, 0.0)),  # new
    ],
)
def test_pace(samples: list[Sample], speed: Speed) -> None:
    pace = Pace()
    *_, last = [pace.add(now, partitions) for now, partitions in samples]
    assert last == speed


def test_the_pace_forgets_what_was_before_its_window() -> None:
    pace = Pace(window_seconds=10.0)
    slowing = [(0, 0), (5, 500), (10, 1_000), (15, 1_050), (20, 1_100)]
    rates = [pace.add(float(now), [partition(0, committed, 10_000)]).committed for now, committed in slowing]
    assert rates == [None, 100.0, 100.0, 55.0, 10.0]


def test_where_nothing_but_markers_is_left_the_lag_is_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind an outbox, Spark or another source it never was. What is open, far away or not to be read stays."""
    read: list[dict[int, tuple[int, int]]] = []
    answers: list[Any] = [{0: [], 1: ["a record"]}, BrokerUnavailable("no"), {1: []}]

    class Reader:
        def __init__(self, settings: Any) -> None: ...

        def read_all(self, topic: str, ranges: Any, *, stalled_after_seconds: float) -> Any:
            read.append(dict(ranges))
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        def close(self) -> None:
            read.clear()

    monkeypatch.setattr("streams.kafka.questions.lags.PartitionReader", Reader)
    tails = Tails(ClientSettings("nowhere:1"))
    marks = {number: Watermarks(0, 100, 100) for number in range(5)} | {5: Watermarks(0, 98, 100)}
    found = standing({0: 99, 1: 98, 2: 100, 3: 50, 5: 99}, marks)

    def lags() -> list[int]:
        return [entry.lag for entry in tails.without_markers("orders", found)]

    assert lags() == [0, 2, 0, 50, 100, 1]
    assert lags() == [0, 2, 0, 50, 100, 1]
    assert lags() == [0, 0, 0, 50, 100, 1]
    assert lags() == [0, 0, 0, 50, 100, 1]
    assert read == [{0: (99, 100), 1: (98, 100)}, {1: (98, 100)}, {1: (98, 100)}]
    answers.append(TopicError("no right to read it"))
    for _ in range(2):
        assert tails.without_markers("other", found[:1])[0].lag == 1
    assert len(read) == 4
    tails.close()


def test_the_age_of_a_lag_is_that_of_its_oldest_record(
    kes: Kes, admin: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read once while the offset stays; what cannot be known has none."""
    read: list[dict[int, tuple[int, int]]] = []
    times = {0: 40_000, 1: -1, 3: 200_000}
    fails: list[Exception] = []

    class Reader:
        def __init__(self, settings: Any) -> None: ...

        def read(self, topic: str, ranges: Any, receive: Any, *, stalled_after_seconds: float, cancelled: Any) -> None:
            read.append(dict(ranges))
            if fails:
                raise fails.pop()
            for number in ranges.keys() & times.keys():
                assert not cancelled()
                receive(number, [IncomingRecord("orders", number, 7, b"", b"", None, times[number])] * 2)
            if cancelled():
                raise Stopped("that is enough")

    monkeypatch.setattr("streams.kafka.questions.lags.PartitionReader", Reader)
    tails = Tails(ClientSettings("nowhere:1"))
    marks = {number: Watermarks(5, 90, 100) for number in range(5)} | {5: Watermarks(5, 9, 100)}
    found = standing({0: 20, 1: 20, 2: 100, 4: 20, 5: 9}, marks)

    def ages(topic: str = "orders") -> list[float | None]:
        return [entry.seconds for entry in tails.with_ages(topic, found, 100_000.0)]

    # Of 1 the record has no time; of 2 nothing is left; 3 is of the future, by its own clock; of 4 nothing came; an
    # open transaction holds 5 back.
    assert ages() == [60.0, None, 0.0, 0.0, None, None]
    assert read == [{0: (20, 90), 1: (20, 90), 3: (5, 90), 4: (20, 90)}]
    times[4] = 99_000
    assert ages() == [60.0, None, 0.0, 0.0, 1.0, None]
    assert read[1:] == [{4: (20, 90)}]
    found = standing({0: 21, 1: 20, 2: 100, 4: 20, 5: 9}, marks)
    times[0] = 70_000
    assert (ages()[0], read[2:]) == (30.0, [{0: (21, 90)}])
    for error, again in ((BrokerUnavailable("no"), 1), (TopicError("no right to read it"), 0)):
        fails.append(error)
        before = len(read)
        assert ages(type(error).__name__)[0] is None
        ages(type(error).__name__)
        assert len(read) == before + 1 + again
    admin.lags = [[msgspec.structs.replace(partition(0, 7, 9), seconds=200.0), partition(1, 7, 9)]] * 2
    assert kes(*AT).lines[1:] == [
        "partition committed stable end lag age", "0 7 9 9 2 3 min 20 s", "1 7 9 9 2 -", "all 14 18 18 4 3 min 20 s"
    ]  # fmt: skip
    answer = kes(*AT, "--json").data
    assert (answer["seconds"], [entry["seconds"] for entry in answer["partitions"]]) == (200.0, [200.0, None])
