"""``kes offsets start`` without a broker: the order of its steps, what is refused, and what an end leaves."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any

import pytest

from streams.cli import checks
from streams.errors import TransactionFailed
from streams.kafka.questions.admin import TopicDescription
from streams.kafka.questions.group_view import MemberView
from streams.records import Output
from streams.runtime.changelog import BEGIN_KEY, OFFSET_KEY, decode_begin, decode_offset
from tests.unit.cli_kit import FakeCluster, Kes, source_of
from tests.unit.start_kit import CHANGELOG, OLD, PLAIN, Event, World, admin, start, world

__all__ = ["admin", "start", "world"]  # the fixtures


def places(answer: Any) -> dict[str, list[tuple[int, str]]]:
    return {topic: [(row["offset"], row["place"]) for row in rows] for topic, rows in answer["inputs"].items()}


def test_all_inputs_begin_in_one_transaction_and_repeating_it_is_harmless(world: World, start: Kes) -> None:
    words = ("--at", "earliest", "--at", "1@7", "--at", "more:0@7", "--yes", "--json")
    answer = start(*words).data
    assert places(answer) == {"flights": [(2, "earliest"), (7, "1@7")], "more": [(7, "0@7"), (0, "earliest")]}
    assert answer["written"]
    assert world.steps == [
        "take the id",
        "look at demo",
        "read the changelog",
        "hold flights",
        "look at demo",
        "hold more",
        "look at demo",
        "look at demo",
        "read the changelog",
        "send",
        "commit",
    ]
    assert world.offsets == {("demo", "flights"): {0: 2, 1: 7}, ("demo", "more"): {0: 7, 1: 0}}
    record = decode_offset(world.records(1, OFFSET_KEY)[0])
    assert (record.offset, record.ids) == (7, ("id of flights", "id of the changelog"))
    assert record.position_in("more", 1) == (0, "id of more")
    began = decode_begin(world.records(1, BEGIN_KEY)[0])
    assert (began.how, began.at, began.by) == ("start", {"flights": 7, "more": 0}, "kes offsets start")
    world.members["demo"] = (PLAIN,)  # it runs by now
    again = start(*words).data
    assert (places(again), again["written"]) == (places(answer), False)
    assert (
        "the source has begun elsewhere (start: flights at 2 (earliest)" in start("--at", "latest", "--yes", code=1).err
    )
    assert len(world.written) == 4


def test_a_time_becomes_the_first_record_of_it_or_the_stable_end(
    world: World, start: Kes, admin: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = TopicDescription(
        name="flights",
        topic_id="id",
        partitions=2,
        replication_factor=1,
        configs={"message.timestamp.type": "LogAppendTime"},
    )
    monkeypatch.setattr(admin, "describe", lambda names, seconds: {"flights": topic})
    answer = start("--at", "2026-11-20T01:00+01:00", "--dry-run", "--json").data
    assert places(answer)["flights"] == [(5, "2026-11-20T00:00:00.000Z"), (9, "2026-11-20T00:00:00.000Z")]
    assert (answer["timestamps"], answer["written"], world.written) == ("LogAppendTime", False, [])
    assert "times are those of LogAppendTime" in start("--at", "2026-11-20T00:00Z", "--dry-run").err


def test_another_groups_offsets_are_taken_over(world: World, start: Kes) -> None:
    world.offsets = {(OLD, "flights"): {0: 6, 1: 3}, (OLD, "more"): {0: 1}, (OLD, "elsewhere"): {0: 9}}
    assert "more[1] has no place" in start("--from-group", OLD, "--yes", code=1).words
    answer = start("--from-group", OLD, "--missing", "latest", "--at", "1@4", "--yes", "--json").data
    assert places(answer) == {
        "flights": [(6, "group old"), (4, "1@4")],
        "more": [(1, "group old"), (6, "latest")],
    }
    assert (answer["how"], answer["not_read"]) == ("adopt", ["elsewhere"])
    assert decode_begin(world.records(0, BEGIN_KEY)[0]).group == OLD
    assert world.offsets[OLD, "flights"] == {0: 6, 1: 4}, "held, and committed with the rest"
    holds = [step for step in world.steps if step.startswith(("hold", "send", "commit"))]
    assert holds == ["hold flights of old", "hold more of old", "hold flights", "hold more", "send", "commit"]


def test_the_own_groups_offsets_are_taken_over(world: World, start: Kes) -> None:
    world.offsets = {("demo", "flights"): {0: 6, 1: 3}, ("demo", "more"): {0: 1, 1: 1}}
    said = start("--at", "earliest", "--yes", code=1).words
    assert "has committed offset 6, so it is not new" in said
    assert "--from-group demo" in said
    answer = start("--from-group", "demo", "--yes", "--json").data
    assert places(answer)["flights"] == [(6, "group demo"), (3, "group demo")]


def test_a_group_that_goes_on_may_be_begun_like(world: World, start: Kes) -> None:
    world.offsets = {(OLD, topic): {0: 6, 1: 3} for topic in ("flights", "more")}
    world.members[OLD] = (PLAIN,)
    answer = start("--like-group", OLD, "--yes", "--json").data
    assert (answer["how"], answer["from_group_is_alive"]) == ("start", True)
    said = start("--from-group", OLD, "--yes", code=1).words
    assert "has begun elsewhere" in said


STATIC = MemberView(member_id="2", instance="s-1", static=True, client_id="c", host="10.0.0.8")


def test_members_that_live_are_named(world: World, start: Kes) -> None:
    world.offsets = {(OLD, "flights"): {0: 6, 1: 3}}
    world.members[OLD] = (PLAIN, STATIC)
    said = start("--from-group", OLD, "--yes", code=1).words
    assert "group old is alive (client id 'by-hand', host 10.0.0.7, topics flights; static member 's-1'" in said
    assert "it goes when its session ends" in said
    world.offsets[OLD, "more"] = {0: 1, 1: 1}
    said = start("--from-group", OLD, "--remove-member", "s-1", "--yes", code=1).words
    assert "(client id 'by-hand', host 10.0.0.7, topics flights): stop" in said, "it is no static one"
    world.members[OLD] = (STATIC,)
    assert start("--from-group", OLD, "--remove-member", "s-1", "--dry-run", code=1).err, "a dry run removes none"
    assert "there is no group nobody" in start("--from-group", "nobody", "--yes", code=1).words
    assert world.written == []
    assert start("--from-group", OLD, "--remove-member", "s-1", "--yes", "--json").data["written"]
    assert "--remove-member needs --from-group" in start("--at", "latest", "--remove-member", "s-1", code=2).words


def test_a_group_that_comes_back_is_named_by_the_doctor(
    world: World, start: Kes, admin: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.offsets = {(OLD, topic): {0: 6, 1: 3} for topic in ("flights", "more")}
    assert start("--from-group", OLD, "--yes", "--json").data["written"]
    monkeypatch.setattr(checks, "GroupChecks", lambda config, seconds: world)
    monkeypatch.setattr(checks, "TopicAdmin", lambda settings: admin)
    target = checks.Target("fleet:source", sys.modules["fleet"].source, "there:1", 1.0)
    assert {finding.state for finding in checks.group(target)} == {checks.OK}
    world.members[OLD] = (PLAIN,)
    *_, said = checks.group(target)
    assert (said.state, said.remedy) == (checks.WARNING, "stop them for good")
    assert "old has members again (client id 'by-hand', host 10.0.0.7, topics flights)" in said.text


def committed(world: World, group: str, offset: int) -> Event:
    return lambda: world.offsets.update({(group, "flights"): {0: offset}})


def joined(world: World, group: str) -> Event:
    return lambda: world.members.update({group: (PLAIN,)})


def wrote(world: World) -> Event:
    return lambda: world.written.append(Output(CHANGELOG, b"1", b"row", None, 0, 0, 0, -1))


@pytest.mark.parametrize(
    ("when", "what", "said"),
    [
        ("hold flights", lambda world: joined(world, "demo"), "group demo is alive"),
        ("hold more", lambda world: joined(world, "demo"), "group demo is alive"),
        ("hold more", lambda world: joined(world, OLD), "group old is alive"),
        ("hold flights", lambda world: committed(world, "demo", 4), "has committed offset 4"),
        ("hold flights", lambda world: committed(world, OLD, 9), "group old has gone on in flights meanwhile"),
        ("hold more", wrote, "there is a row, key b'row'"),
        ("look at old", lambda world: joined(world, OLD), "group old is alive"),
    ],
)
def test_who_comes_between_is_seen_before_the_commit(
    world: World, start: Kes, when: str, what: Callable[[World], Event], said: str
) -> None:
    world.offsets = {(OLD, topic): {0: 6, 1: 3} for topic in ("flights", "more")}
    world.at[when] = what(world)
    assert said in start("--from-group", OLD, "--yes", code=1).words
    assert "commit" not in world.steps
    assert not [each for each in world.written if each.key in (BEGIN_KEY, OFFSET_KEY)]


@pytest.mark.parametrize("when", ["look at demo", "hold flights", "hold more", "read the changelog", "send", "commit"])
def test_an_end_at_any_step_leaves_nothing_and_the_next_run_begins(world: World, start: Kes, when: str) -> None:
    def end() -> None:
        raise KeyboardInterrupt

    world.at[when] = end
    start("--at", "earliest", "--yes", code=130)
    assert (world.written, world.offsets, world.sent) == ([], {}, [])
    world.at.clear()
    assert start("--at", "earliest", "--yes", "--json").data["written"]


def test_what_a_killed_run_has_left_open_may_be_committed_when_its_id_is_taken(world: World, start: Kes) -> None:
    words = ("--at", "earliest", "--yes", "--json")
    assert start(*words).data["written"]
    begun, world.written, world.steps = world.written, [], []
    world.at["take the id"] = lambda: world.written.extend(begun)
    answer = start(*words).data
    assert (answer["written"], places(answer)["flights"]) == (False, [(2, "earliest"), (2, "earliest")])
    assert world.steps == ["take the id"]


def test_an_answer_that_is_lost_says_to_run_it_again(world: World, start: Kes) -> None:
    def lost() -> None:
        world.written += world.sent
        raise TransactionFailed("commit_transaction", "_TIMED_OUT", "unknown", "no answer")

    world.at["commit"] = lost
    assert "Whether the source has begun is not known: run it again" in start("--at", "earliest", "--yes", code=1).words
    assert not start("--at", "earliest", "--yes", "--json").data["written"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--at", "0@11", "--at", "latest"], "flights[0]: 0@11 is offset 11, and the log has 2 to 10 only"),
        (["--at", "0@1", "--at", "latest"], "flights[0]: 0@1 is offset 1, and the log has 2 to 10 only"),
        (["--at", "0@3"], "flights[1] has no place; more[0] has no place; more[1] has no place"),
        (["--like-group", OLD], "flights[0] has no place"),
    ],
)
def test_places_that_are_not_there_are_refused_at_once(world: World, start: Kes, words: list[str], said: str) -> None:
    assert said in start(*words, "--yes", code=1).words
    assert world.written == []


def test_records_of_a_newer_version_and_what_is_none_are_refused(world: World, start: Kes) -> None:
    for value in (b'{"v":2,"how":"grow","at":{},"places":{},"by":"x","at_ms":0}', b"{}", b"\xff"):
        world.written = [Output(CHANGELOG, value, BEGIN_KEY, None, 1, 0, 1, -1)]
        assert f"{CHANGELOG}[1]@0: the begin record cannot be read" in start("--at", "earliest", "--yes", code=1).words


def test_in_one_partition_only_it_is_no_beginning(world: World, start: Kes) -> None:
    start("--at", "earliest", "--yes")
    world.written = world.written[:2]
    world.offsets.clear()
    assert "the source has begun already: there is a beginning" in start("--at", "earliest", "--yes", code=1).words


def test_with_the_topic_on_another_cluster_offsets_are_named(
    world: World, start: Kes, admin: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = source_of(num_partitions=2, bootstrap_servers="there:1", source_bootstrap_servers="far:1")
    monkeypatch.setattr(sys.modules["fleet"], "source", source)
    assert "are on another cluster" in start("--from-group", OLD, "--yes", code=1).words
    del admin.there[CHANGELOG]
    assert start("--at", "earliest", "--yes", "--json").data["written"]
    stand_in = source.config.offsets_topic
    assert (world.created, world.offsets) == ([CHANGELOG, stand_in], {("demo", stand_in): {0: 2, 1: 2}})


def test_it_says_what_will_happen_and_asks(world: World, start: Kes, monkeypatch: pytest.MonkeyPatch) -> None:
    world.offsets = {(OLD, topic): {0: 6, 1: 3} for topic in ("flights", "more")}
    monkeypatch.setattr(sys, "stdin", io.StringIO("n\n"))
    said = start("--from-group", OLD, code=1).err
    assert "nothing of what old has counted or stored is in it" in said
    assert "Do not start a member of old again" in said
    assert "[y/N]" in said
    assert world.written == []
