"""``kes topics`` and ``kes lag`` without a broker: what is asked for, what is said, and with which exit code."""

from __future__ import annotations

import io
import json
import sys
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from streams import EventSource, EventSourceConfig
from streams.cli import cluster, lag, topics
from streams.cli.lag import Pace, Speed
from streams.clients.admin import PartitionLag, TopicDescription
from streams.errors import BrokerUnavailable
from streams.topics import TopicSpec
from tests.unit.cli_kit import Kes

OURS = ["flights", "demo.flights.changelog", "demo.flights.dead-letters"]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module ``fleet`` with an event source."""
    module = ModuleType("fleet")
    config = EventSourceConfig(
        group_id="demo", topic="flights", num_partitions=4, replication_factor=3, min_insync_replicas=2
    )
    vars(module).update(source=EventSource(config), make=lambda: EventSource(config), other=SourceOfAnotherKind())
    monkeypatch.setitem(sys.modules, "fleet", module)
    monkeypatch.setenv("COLUMNS", "120")


class SourceOfAnotherKind:
    def run(self) -> None: ...


class FakeAdmin:
    """A cluster in a dictionary; ``lags`` are the answers to ``lag``, one after the other."""

    def __init__(self) -> None:
        self.there: dict[str, TopicSpec] = {}
        self.lags: list[list[PartitionLag] | Exception] = []
        self.asked: list[tuple[object, ...]] = []
        self.closed = 0
        self.settings: list[Any] = []

    def create(self, specs: list[TopicSpec], timeout_seconds: float) -> list[str]:
        self.asked.append(("create", timeout_seconds))
        new = [spec for spec in specs if spec.name not in self.there]
        self.there |= {spec.name: spec for spec in new}
        return [spec.name for spec in new]

    def describe(self, names: list[str], timeout_seconds: float) -> dict[str, TopicDescription | None]:
        self.asked.append(("describe", timeout_seconds))
        return {name: self._described(name) for name in names}

    def lag(self, group: str, topic: str, timeout_seconds: float) -> list[PartitionLag]:
        self.asked.append(("lag", group, topic, timeout_seconds))
        answer = self.lags.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self.closed += 1

    def _described(self, name: str) -> TopicDescription | None:
        spec = self.there.get(name)
        if spec is None:
            return None
        return TopicDescription(
            name=name,
            topic_id="id",
            partitions=spec.partitions,
            replication_factor=spec.replication_factor,
            configs=dict(spec.configs),
        )


@pytest.fixture
def admin(monkeypatch: pytest.MonkeyPatch) -> FakeAdmin:
    fake = FakeAdmin()

    def connect(settings: Any) -> FakeAdmin:
        fake.asked.append(("connect", settings.bootstrap_servers))
        fake.settings.append(settings)
        return fake

    monkeypatch.setattr(cluster, "TopicAdmin", connect)
    monkeypatch.setattr(cluster, "await_listener", lambda servers, seconds: None)
    return fake


def spec(name: str, partitions: int = 4, **changes: Any) -> TopicSpec:
    configs = {"min.insync.replicas": "2"} | ({"cleanup.policy": "compact"} if name.endswith("changelog") else {})
    return TopicSpec(**{"name": name, "partitions": partitions, "replication_factor": 3, "configs": configs, **changes})


# ------------------------------------------------------------------------------------------------- topics


def test_a_plan_shows_what_is_missing_and_creates_nothing(kes: Kes, admin: FakeAdmin) -> None:
    out = kes("topics", "plan", "fleet:source", "--bootstrap-servers", "there:9092", "--output", "boards:2").out
    assert all(name in out for name in (*OURS, "boards", "cleanup.policy=compact", "min.insync.replicas=2"))
    assert out.count("would be created") == 4
    assert admin.there == {}
    assert admin.asked == [("connect", "there:9092"), ("describe", 10.0)]
    assert admin.closed == 1


def test_names_are_whole_on_a_narrow_terminal(kes: Kes, admin: FakeAdmin, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or they could not be copied."""
    monkeypatch.setenv("COLUMNS", "30")
    assert [
        line.split()[0]
        for line in kes("topics", "plan", "fleet:source", "--bootstrap-servers", "there:9092").out.splitlines()
        if "would be created" in line
    ] == OURS


def test_apply_creates_what_is_missing_and_says_so(kes: Kes, admin: FakeAdmin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KES_BOOTSTRAP_SERVERS", "named:1")
    admin.there["flights"] = spec("flights")
    answer = kes("topics", "apply", "fleet:make", "--json", "--output", "boards:2").data
    assert answer["bootstrap_servers"] == "named:1"
    assert [(topic["name"], topic["purpose"], topic["state"]) for topic in answer["topics"]] == [
        ("flights", "source", "as wanted"),
        ("demo.flights.changelog", "changelog", "created"),
        ("demo.flights.dead-letters", "dead letters", "created"),
        ("boards", "output", "created"),
    ]
    assert admin.there["boards"] == spec("boards", 2)
    assert admin.there["demo.flights.changelog"] == spec("demo.flights.changelog")


@pytest.mark.parametrize("command", ["plan", "apply"])
def test_each_difference_is_named_and_nothing_that_exists_is_changed(kes: Kes, admin: FakeAdmin, command: str) -> None:
    there = {
        "flights": spec("flights", 5),
        "demo.flights.changelog": spec("demo.flights.changelog", configs={"cleanup.policy": "delete"}),
    }
    admin.there = dict(there)
    captured = kes("topics", command, "fleet:source", "--bootstrap-servers", "x:1", "--json", code=1)
    for sentence in (
        "topic flights has 5 partitions, settings say 4",
        "topic demo.flights.changelog has cleanup.policy=delete, settings say compact",
        "topic demo.flights.changelog has min.insync.replicas=None, settings say 2",
    ):
        assert f"kes: {sentence}" in captured.err
        assert sentence in captured.out
    assert "never changed" in captured.err
    assert {name: admin.there[name] for name in there} == there
    assert ("demo.flights.dead-letters" in admin.there) == (command == "apply")  # what is missing is made all the same


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["fleet:source"], 1, "no broker is named: use --bootstrap-servers"),
        (["fleet:source", "--bootstrap-servers", " , "], 1, "bootstrap_servers is empty"),
        (["fleet:source", "--bootstrap-servers", "x:1", "--output", "boards"], 1, "NAME:PARTITIONS"),
        (["fleet:source", "--bootstrap-servers", "x:1", "--output", "boards:0"], 1, "NAME:PARTITIONS"),
        (["fleet:source", "--bootstrap-servers", "x:1", "--output", "flights:4"], 1, "named twice"),
        (["fleet:source", "--bootstrap-servers", "x:1", "--output", "b:1", "--output", "b:2"], 1, "named twice"),
        (["fleet:other"], 1, "SourceOfAnotherKind, not an EventSource"),
        (["fleet:nothing"], 1, "'fleet' has no 'nothing'"),
        (["no_such_module:source"], 1, "cannot import 'no_such_module'"),
        (["not a module"], 2, "is not MODULE:SOURCE"),
        ([], 2, "Missing argument"),
    ],
)
def test_mistakes_are_told_plainly(kes: Kes, arguments: list[str], code: int, said: str) -> None:
    captured = kes("topics", "plan", *arguments, code=code)
    assert said in captured.words
    assert captured.out == ""


# ---------------------------------------------------------------------------------------------------- lag


def partition(number: int, committed: int | None, end: int, stable: int | None = None) -> PartitionLag:
    return PartitionLag(number, committed, 0, end if stable is None else stable, end, end - (committed or 0))


def test_lag_of_a_source_once(kes: Kes, admin: FakeAdmin) -> None:
    admin.lags = [[partition(0, 7_000, 8_500, 8_200), partition(1, None, 25)]]
    rows = [
        line.replace("│", " ").split()
        for line in kes("lag", "fleet:source", "--bootstrap-servers", "x:1").out.splitlines()
    ]
    assert ["0", "7,000", "8,200", "8,500", "1,500"] in rows
    assert ["1", "-", "25", "25", "25"] in rows
    assert ["all", "7,000", "8,225", "8,525", "1,525"] in rows
    assert admin.asked[-1] == ("lag", "demo", "flights", 10.0)


def test_the_security_settings_of_the_source_are_used(
    kes: Kes, admin: FakeAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EventSourceConfig(
        group_id="g",
        topic="t",
        num_partitions=1,
        bootstrap_servers="of-the-source:1",
        client_settings={"security.protocol": "SSL"},
    )
    monkeypatch.setattr(sys.modules["fleet"], "source", EventSource(config))
    monkeypatch.setenv("KES_BOOTSTRAP_SERVERS", "of-the-environment:1")
    admin.lags = [[partition(0, 1, 1)]] * 2
    kes("lag", "fleet:source")
    kes("lag", "fleet:source", "--bootstrap-servers", "of-the-option:1")
    assert [settings.bootstrap_servers for settings in admin.settings] == ["of-the-source:1", "of-the-option:1"]
    assert [settings.overrides for settings in admin.settings] == [{"security.protocol": "SSL"}] * 2


def test_lag_of_a_group_as_json(kes: Kes, admin: FakeAdmin) -> None:
    admin.lags = [[partition(0, 7, 9), partition(1, None, 3)]]
    arguments = ("--group", "g", "--topic", "t", "--bootstrap-servers", "x:1", "--timeout", "3")
    answer = kes("lag", *arguments, "--json").data
    assert (answer["group"], answer["topic"], answer["lag"]) == ("g", "t", 5)
    assert answer["partitions"][1] == {"partition": 1, "committed": None, "start": 0, "stable": 3, "end": 3, "lag": 3}
    assert admin.asked[-1] == ("lag", "g", "t", 3.0)


def test_a_source_without_events_is_no_error(kes: Kes, admin: FakeAdmin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    config = EventSourceConfig(group_id=f"demo{'-of-a-shop' * 8}", topic="flights", num_partitions=2)
    monkeypatch.setattr(sys.modules["fleet"], "source", EventSource(config))
    admin.lags = [[partition(0, None, 0), partition(1, None, 0)]]
    lines = kes("lag", "fleet:source", "--bootstrap-servers", "x:1").out.splitlines()
    rows = [line.replace("│", " ").split() for line in lines]
    assert lines[0].strip() == f"demo{'-of-a-shop' * 8} in flights"  # whole
    assert ["0", "-", "0", "0", "0"] in rows
    assert ["all", "0", "0", "0", "0"] in rows


def test_partitions_that_the_settings_do_not_know_are_named(kes: Kes, admin: FakeAdmin) -> None:
    admin.lags = [[partition(number, None if number > 3 else 7, 7) for number in range(6)]] * 2
    captured = kes("lag", "fleet:source", "--bootstrap-servers", "x:1")
    assert [line.split()[1] for line in captured.out.splitlines() if "(no member reads it)" in line] == ["4", "5"]
    assert "topic flights has 6 partitions, settings say 4: no member reads" in captured.err
    assert kes("lag", "fleet:source", "--bootstrap-servers", "x:1", "--json").data["unread_partitions"] == [4, 5]


def test_a_group_without_offsets_is_an_error(kes: Kes, admin: FakeAdmin) -> None:
    admin.lags = [[partition(0, None, 3)]]
    assert (
        "the group 'typo' has no committed offset in topic t"
        in kes("lag", "-g", "typo", "-t", "t", "--bootstrap-servers", "x:1", code=1).err
    )


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
def test_what_to_look_at_must_be_said(kes: Kes, admin: FakeAdmin, arguments: list[str], code: int, said: str) -> None:
    assert said in kes("lag", *arguments, code=code).words
    assert admin.asked == []


class Clock:
    """A clock that only sleeping moves; the third sleep is interrupted."""

    def __init__(self) -> None:
        self.time = 100.0
        self.slept: list[float] = []

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time += seconds
        if len(self.slept) == 3:
            raise KeyboardInterrupt


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """In the place of the module's ``time``; what the time of the day is does not matter here."""
    made = Clock()
    fake = ModuleType("time")
    vars(fake).update(monotonic=made.now, sleep=made.sleep, strftime=lambda _: "12:00:00")
    monkeypatch.setattr(lag, "time", fake)
    return made


WATCH = ("lag", "fleet:source", "--bootstrap-servers", "x:1", "--watch", "--interval", "5")


def test_watching_without_a_terminal_is_a_line_each_time(kes: Kes, admin: FakeAdmin, clock: Clock) -> None:
    admin.lags = [
        [partition(0, None, 2_000)],
        [partition(0, 1_000, 9_000)],
        [partition(0, 6_000, 10_000)],
    ]
    assert kes(*WATCH).out.splitlines() == [
        "12:00:00 demo in flights: 2,000 behind, nothing committed yet",
        "12:00:00 demo in flights: 8,000 behind, 0/s committed, 1,400/s arriving, not getting nearer",
        "12:00:00 demo in flights: 4,000 behind, 0/s committed, 800/s arriving, not getting nearer",
    ]
    assert clock.slept == [5.0, 5.0, 5.0]


def test_watching_as_json_has_the_rates(kes: Kes, admin: FakeAdmin, clock: Clock) -> None:
    admin.lags = [[partition(0, 1_000, 9_000)], [partition(0, 3_000, 10_000)], [partition(0, 5_000, 11_000)]]
    first, *_, last = [json.loads(line) for line in kes(*WATCH, "--json").out.splitlines()]
    assert first["committed_per_second"] is None
    assert (last["committed_per_second"], last["arriving_per_second"], last["seconds_left"]) == (400.0, 200.0, 30.0)


def test_a_broker_that_goes_away_while_it_is_watched_is_waited_for(kes: Kes, admin: FakeAdmin, clock: Clock) -> None:
    admin.lags = [[partition(0, 1, 2)], BrokerUnavailable("nothing answers at x:1"), [partition(0, 2, 2)]]
    captured = kes(*WATCH)
    assert captured.err == "kes: nothing answers at x:1\n"
    assert [line.split(": ")[1].split(",")[0] for line in captured.out.splitlines()] == ["1 behind", "0 behind"]


def test_watching_on_a_terminal_is_a_live_table(
    kes: Kes, admin: FakeAdmin, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=100, _environ={})
    monkeypatch.setattr(lag, "answers", lambda: screen)
    admin.lags = [[partition(0, 1_000, 9_000)], [partition(0, 3_000, 10_000)], BrokerUnavailable("nothing at x:1")]
    kes(*WATCH)
    assert isinstance(screen.file, io.StringIO)
    last = Text.from_ansi(screen.file.getvalue().rpartition("demo in flights")[2]).plain
    assert "10,000" in last  # the last answer stays in sight while the broker is away
    assert "7,000 behind, 400/s committed, 200/s arriving, 35 s left" in last
    assert "nothing at x:1" in last


def test_a_broker_that_was_never_there_ends_the_watch(kes: Kes, admin: FakeAdmin, clock: Clock) -> None:
    admin.lags = [BrokerUnavailable("nothing answers at x:1")]
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
    rates = [pace.add(float(now), [partition(0, committed, 10_000)]).committed for now, committed in SLOWING]
    assert rates == [None, 100.0, 100.0, 55.0, 10.0]


SLOWING = [(0, 0), (5, 500), (10, 1_000), (15, 1_050), (20, 1_100)]


def test_topics_of_a_source_that_names_its_own() -> None:
    config = EventSourceConfig(
        group_id="g", topic="t", num_partitions=2, changelog_topic="log", dead_letter_topic="letters"
    )
    wanted = topics.wanted_topics(EventSource(config), [])
    assert [(entry.purpose, entry.spec.name) for entry in wanted] == [
        ("source", "t"),
        ("changelog", "log"),
        ("dead letters", "letters"),
    ]
