"""``kes topics`` without a broker: what is asked for, what is said, and with which exit code."""

from __future__ import annotations

import io
import sys

import pytest

from streams import EventSource, EventSourceConfig
from streams.cli import logging_setup, topics
from streams.kafka.questions.group_view import MemberView
from tests.unit.cli_kit import FakeCluster, Kes, admin, source_of, spec

__all__ = ["admin"]  # the fixture

OURS = ["flights", "demo.flights.changelog", "demo.flights.dead-letters"]
AT = ("fleet:source", "--bootstrap-servers", "there:9092")


@pytest.mark.parametrize("columns", ["120", "30"])  # names are whole on a narrow terminal, or they could not be copied
def test_a_plan_shows_what_is_missing_and_creates_nothing(
    kes: Kes, admin: FakeCluster, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert kes("topics", "plan", *AT, "--output", "boards:2").lines == [
        "topic purpose partitions replicas state",
        "flights source 4 3 would be created",
        "min.insync.replicas=2",
        "demo.flights.changelog changelog 4 3 would be created",
        "min.insync.replicas=2",
        "cleanup.policy=compact",
        "demo.flights.dead-letters dead letters 4 3 would be created",
        "min.insync.replicas=2",
        "boards output 2 3 would be created",
        "min.insync.replicas=2",
    ]
    assert admin.there == {}
    assert admin.asked == [("connect", "there:9092"), ("describe", 10.0), ("close",)]


def test_apply_creates_what_is_missing_and_says_so(
    kes: Kes, admin: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert [admin.there[name] for name in (*OURS, "boards")] == [*map(spec, OURS), spec("boards", 2)]


@pytest.mark.parametrize("command", ["plan", "apply"])
def test_each_difference_is_named_and_nothing_that_exists_is_changed(
    kes: Kes, admin: FakeCluster, command: str
) -> None:
    there = {
        "flights": spec("flights", 5),
        "demo.flights.changelog": spec("demo.flights.changelog", configs={"cleanup.policy": "delete"}),
    }
    admin.there = dict(there)
    captured = kes("topics", command, *AT, "--json", code=1)
    differences = [
        "topic flights has 5 partitions, settings say 4",
        "topic demo.flights.changelog has min.insync.replicas=None, settings say 2",
        "topic demo.flights.changelog has cleanup.policy=delete, settings say compact",
    ]
    assert captured.err.splitlines() == [
        *(f"kes: {difference}" for difference in differences),
        "kes: existing topics are never changed",
        "Change the settings of the source, or the topic, by hand.",
    ]
    assert all(difference in captured.out for difference in differences)
    assert {name: admin.there[name] for name in there} == there
    assert ("demo.flights.dead-letters" in admin.there) == (command == "apply")  # what is missing is made all the same


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["fleet:source"], 1, "no broker is named: use --bootstrap-servers"),
        (["fleet:source", "--bootstrap-servers", " , "], 1, "bootstrap_servers is empty"),
        ([*AT, "--output", "boards"], 1, "NAME:PARTITIONS"),
        ([*AT, "--output", "boards:0"], 1, "NAME:PARTITIONS"),
        ([*AT, "--output", "flights:4"], 1, "named twice"),
        ([*AT, "--output", "b:1", "--output", "b:2"], 1, "named twice"),
        (["fleet:other"], 1, "SourceOfAnotherKind, not an EventSource"),
        (["fleet:nothing"], 1, "'fleet' has no 'nothing'"),
        (["no_such_module:source"], 1, "cannot import 'no_such_module'"),
        (["not a module"], 2, "is not MODULE:SOURCE"),
        ([], 2, "Missing argument"),
    ],
)
@pytest.mark.usefixtures("admin")
def test_mistakes_are_told_plainly(kes: Kes, arguments: list[str], code: int, said: str) -> None:
    captured = kes("topics", "plan", *arguments, code=code)
    assert said in captured.words
    assert captured.out == ""


def test_topics_of_a_source_that_names_its_own() -> None:
    config = EventSourceConfig(
        group_id="g", topic="t", num_partitions=2, changelog_topic="log", dead_letter_topic="letters"
    )
    wanted = [(entry.purpose, entry.spec.name) for entry in topics.wanted_topics(EventSource(config), [])]
    assert wanted == [("source", "t"), ("changelog", "log"), ("dead letters", "letters")]


# -- grow --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def there(admin: FakeCluster) -> FakeCluster:
    """All topics of the source, with 10 partitions."""
    admin.there = {name: spec(name, 10) for name in OURS}
    return admin


def test_all_topics_grow_to_the_sources_count(kes: Kes, there: FakeCluster) -> None:
    there.there["flights"] = spec("flights", 12)
    answer = kes("topics", "grow", *AT, "--yes", "--json").data
    assert (answer["partitions"], answer["steps"]) == (12, dict.fromkeys(OURS[1:], 10))
    assert "set num_partitions=12" in answer["next"]
    assert there.grown == OURS[1:]
    kes("topics", "grow", *AT, "--yes")  # again: nothing is left to do
    assert there.grown == OURS[1:]


def test_inputs_and_loop_grow_too(kes: Kes, there: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The source last, and the inputs before it: whatever a stop half-way leaves is refused at the start."""
    source = source_of(loop=True)
    source.input("payments")
    monkeypatch.setattr(sys.modules["fleet"], "source", source)
    loop = "demo.flights.loop"
    there.there |= {name: spec(name, 10) for name in (loop, "payments")}
    kes("topics", "grow", *AT, "--partitions", "11", "--yes")
    assert there.grown == [*OURS[1:], loop, "payments", "flights"]


@pytest.mark.parametrize(
    ("arguments", "answer", "code"),
    [(["--yes"], "", 0), ([], "y", 0), ([], "n", 1), (["--json"], "", 2)],  # --yes is needed without a terminal
)
def test_it_asks_and_says_that_keys_move_and_the_source_grows_last(
    kes: Kes, there: FakeCluster, monkeypatch: pytest.MonkeyPatch, arguments: list[str], answer: str, code: int
) -> None:
    """A stop half-way is refused at the start: the changelog differs from the settings."""
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{answer}\n"))
    said = kes("topics", "grow", *AT, "--partitions", "11", *arguments, code=code).err
    assert ("Keys move" in " ".join(said.split())) == bool(answer)
    assert not answer or {*OURS} <= {*said.split()}, "names are whole on a narrow terminal"
    assert there.grown == ([] if code else [*OURS[1:], "flights"])


@pytest.mark.parametrize(
    ("partitions", "gone", "members", "code", "said"),
    [
        ("9", "", (), 1, "topic flights has 10 partitions, more than 9; partitions cannot be removed"),
        ("11", OURS[1], (), 1, f"topic {OURS[1]} does not exist: kes topics apply creates it"),
        ("11", "", ("b-1",), 1, "has members (b-1): stop all of them first"),
        ("0", "", (), 2, "--partitions"),
    ],
)
def test_what_cannot_grow_is_refused(
    kes: Kes, there: FakeCluster, partitions: str, gone: str, members: tuple[str, ...], code: int, said: str
) -> None:
    there.there.pop(gone, None)
    there.members = tuple(MemberView(member_id=f"{name}-2399", instance=name) for name in members)
    assert said in kes("topics", "grow", *AT, "--partitions", partitions, "--yes", code=code).err
    assert there.grown == []


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--shared", "x", "--yes"], 2, "'x' is not copy or stay"),
        (["--partitioner", "x", "--yes"], 2, "'x' is not one of murmur2, crc32, fnv1a"),
        (["--routed-by", "no_such_module:key", "--yes"], 1, "cannot load --routed-by 'no_such_module:key'"),
        (["--routed-by", "json:codecs", "--yes"], 1, "--routed-by 'json:codecs' is no plain function of a key"),
        (["--json"], 2, "--json needs --yes"),
        (["--yes"], 1, "joins names: the rows of a joined table lie in the partitions of its topic"),
    ],
)
def test_a_growth_with_state_refuses_what_it_is_told_wrong(
    kes: Kes, there: FakeCluster, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, said: str
) -> None:
    monkeypatch.setattr(logging_setup, "configure_logging", lambda options: None)
    source = source_of()
    if arguments == ["--yes"]:
        source.join("names", key=str, value=str)
    monkeypatch.setattr(sys.modules["fleet"], "source", source)
    assert said in kes("topics", "regrow", *AT, "--partitions", "11", *arguments, code=code).words
    assert there.grown == []
