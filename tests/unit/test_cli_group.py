"""``kes group`` without a broker: what is read from a coordinator's answer, and what is shown of it."""

from __future__ import annotations

import io
import json
import os
import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest
from rich.console import Console

from streams.cli import cluster, group
from streams.errors import BrokerUnavailable, TopicError
from streams.kafka.questions.group_view import GroupQuestions, GroupView, MemberView, broker_view, classic_view
from streams.kafka.wire import group_bytes
from streams.looks import group_picture, group_reader
from streams.looks.group_picture import Picture, facts, partition_rows
from streams.model.group import Assignment, Copies, MemberReport, Shelf
from streams.statistics import JobStatistics, ParkedStatistics
from tests.unit.cli_group_kit import (
    BEGAN,
    Cluster,
    described,
    entry,
    handing_over,
    id_of,
    lags,
    moving,
    ours,
    row_of,
    text_of,
    told,
)
from tests.unit.cli_kit import Kes

__all__ = ["moving"]  # the fixture


# ------------------------------------------------------------------------------------------- what the answer says


def test_a_foreign_consumer_is_shown_as_far_as_kafka_tells() -> None:
    said = group_bytes.encode_report("orders", MemberReport(instance="x"))  # Kafka's part is all that is read of it
    answered = group_bytes.encode_assignment("orders", Assignment(own=frozenset({4, 5})))
    view = classic_view("shop", described(entry("consumer-1", said, answered), protocol="range"))
    assert view.members[0].owned == {"orders": {4, 5}}
    assert view.members[0].assignment is None
    assert row_of(text_of(Picture(view=view)), "consumer-1")[4] == "4-5"


async def test_a_note_about_an_event_is_no_position() -> None:
    """A member leaves it as an offset of 0 in the changelog (``ownership.blocked``)."""

    def at(partition: int, offset: int) -> Any:
        return SimpleNamespace(partition_index=partition, committed_offset=offset, error_code=0)

    offsets = {"in": [5, 0], "shop.in.changelog": [0, -1], "shop.eu.in.changelog": [7, 0]}
    topics = [SimpleNamespace(name=name, partitions=list(map(at, range(2), found))) for name, found in offsets.items()]

    async def coordinator(*_: object) -> int:
        return 1

    async def send(*_: object, **versions: int) -> Any:
        return SimpleNamespace(groups=[SimpleNamespace(error_code=0, topics=topics)])

    questions: Any = GroupQuestions.__new__(GroupQuestions)
    questions._client = SimpleNamespace(send=send, coordinator=coordinator)
    assert await questions._committed("shop", 1.0) == {"in": {0: 5, 1: 0}, "shop.eu.in.changelog": {0: 7}}


def test_words_that_are_not_understood_are_a_problem_of_that_member_only() -> None:
    seed = int(os.environ.get("SEED") or time.time_ns() % 1_000_000)
    print(f"SEED={seed}")
    rng = random.Random(seed)
    whole = group_bytes.encode_report("orders", MemberReport(instance="x", owned=frozenset({1, 2})))
    garbage = [b"\xff", b"\x00\x03", b"\x00" * 40, bytes(range(200))]
    told = [(each, each, True) for each in garbage]
    for _ in range(150):
        said = bytearray(whole)
        for _ in range(rng.randrange(1, 6)):
            said[rng.randrange(len(said))] = rng.randrange(256)
        told.append((bytes(said), rng.randbytes(rng.randrange(60)), False))  # it may be understood by chance
    for said_bytes, answered, is_problem in told:
        members = entry("odd", said_bytes, answered), ours("fine", Assignment(own=frozenset({0})))
        picture = Picture(view=classic_view("shop", described(*members)))
        text = text_of(picture)
        if is_problem:
            fine, odd = picture.view.members
            assert not fine.problem
            assert odd.problem
            assert odd.problem in text
            assert row_of(text, "fine")[4] == "0"
        json.dumps(group_picture.facts(picture), default=str)


def test_a_group_that_is_no_group_of_consumers() -> None:
    found = described(entry("worker", b"abc", b"def"), protocol="compatible")
    found.protocol_type = "connect"
    assert "connect" in classic_view("c", found).members[0].problem


def test_a_group_of_the_brokers_own_protocol() -> None:
    def places(**topics: list[int]) -> SimpleNamespace:
        return SimpleNamespace(
            topic_partitions=[SimpleNamespace(topic_name=name, partitions=numbers) for name, numbers in topics.items()]
        )

    members = [
        SimpleNamespace(
            member_id="u-1", instance_id="s", client_id="one", client_host="/h", subscribed_topic_names=["orders"],
            assignment=places(orders=[0, 1, 2]), target_assignment=places(orders=[0, 1]),
        ),
        SimpleNamespace(
            member_id="u-2", instance_id=None, client_id="two", client_host="/h", subscribed_topic_names=["orders"],
            assignment=places(), target_assignment=places(orders=[2]),
        ),
    ]  # fmt: skip
    found = SimpleNamespace(group_state="Reconciling", assignor_name="uniform", group_epoch=7, members=members)
    picture = Picture(view=broker_view("shop", found))
    text = text_of(picture)
    assert "reconciling, uniform (assigned by the broker), epoch 7, 2 members" in text
    assert row_of(text, "s (static)")[4] == "0-2"
    assert row_of(text, "two")[4:7] == ["-", "-", "expects 2"]
    assert row_of(text, "2")[1:4] == ["s", "", "s → two"]


# ---------------------------------------------------------------------------------------------------- what is shown


def test_who_has_what_and_what_is_on_its_way(moving: GroupView) -> None:
    live = handing_over("a", 1, id_of("b"))
    picture = Picture(view=moving, lags={"orders": lags(9_000, 10_000, 8_500, None)}, live=live)
    text = text_of(picture)
    assert text.startswith("shop: stable, kes-incremental-2, 3 members, 12,500 behind")
    assert row_of(text, "a") == ["a", "5f4fb1a9", "10.0.0.7", "2 min 05 s", "0-3", "-", "1 to b", "-"]
    assert row_of(text, "b")[4:] == ["1", "-", "1 from a; prepares 2-3", "reports nothing"]
    assert row_of(text, "c")[4:] == ["-", "0-1", "leaving", "reports nothing"]
    assert row_of(text, "0") == ["0", "a", "c", "", "9,000", "10,000", "1,000"]
    assert row_of(text, "1")[1:4] == ["a, b", "c (behind)", "a → b"]
    assert row_of(text, "2")[3] == "b prepares (12,000 left)"
    assert row_of(text, "3")[3:5] == ["b is late", "-"]
    assert row_of(text, "all")[-1] == "12,500"


def test_a_move_is_shown_only_while_it_is_under_way(moving: GroupView) -> None:
    """The last plan stands in the broker until the next one."""
    picture = Picture(view=moving, live={**told("a"), **told("b")})
    text = text_of(picture)
    assert row_of(text, "a")[4:7] == ["0, 2-3", "-", ""]
    assert row_of(text, "b")[4:7] == ["1", "-", "prepares 2-3"]
    assert row_of(text, "1")[1:4] == ["b", "c (behind)", ""]
    found = group_picture.facts(picture)
    assert (found["members"][0]["releasing"], found["members"][1]["incoming"]) == ({}, [])
    assert found["partitions"][1]["move"] is None


def test_the_same_as_data(moving: GroupView) -> None:
    live = handing_over("a", 1, id_of("b")) | told(
        "b", parked=(ParkedStatistics(2, 1, 9, int(BEGAN * 1000)),), jobs=(JobStatistics(1, 3, int(BEGAN * 1000)),)
    )
    picture = Picture(view=moving, lags={"orders": lags(1, 2, 3, 4)}, live=live)
    assert "1 parked key with 9 events: partition 2 (1 key, 9 events, for 2 min 05 s)" in text_of(picture)
    assert "3 parked jobs: partition 1 (3 parked, the oldest job for 2 min 05 s)" in text_of(picture)
    assert group_picture.headline(picture).endswith(", 1 parked key, 3 parked jobs")
    found = json.loads(json.dumps(group_picture.facts(picture)))
    assert found["parked"] == [{"partition": 2, "keys": 1, "events": 9, "since_ms": int(BEGAN * 1000)}]
    assert found["jobs"] == [{"partition": 1, "parked": 3, "since_ms": int(BEGAN * 1000)}]
    assert found["state"] == "Stable"
    assert found["members"][1]["owned"] == {"orders": [1]}
    assert found["members"][0]["releasing"] == {"1": "b"}
    assert found["members"][2]["leaving"] is True
    assert found["partitions"][1]["move"] == ["a", "b"]
    assert found["partitions"][2]["preparing"] == [
        {"member": "b", "state": "behind", "records_left": 12_000, "per_second": None, "seconds_left": None,
         "lag_seconds": None}
    ]  # fmt: skip
    assert found["partitions"][0]["lag"] == 9_999


def test_state_on_disk_is_shown_as_far_as_it_is_reported(moving: GroupView) -> None:
    assert "on disk" not in text_of(Picture(view=moving))
    near = Copies(shelf=Shelf("x", {0: 2_000_000, 1: 1_990_000}))
    far = Copies(shelf=Shelf("y", {1: 2_000_000, 0: 500_000, 2: 7}))
    members = described(
        ours("a", Assignment(), copies=near),
        ours("b", Assignment(), copies=far),
        ours("c", Assignment()),
        ours("d", Assignment(), copies=Copies(shelf=Shelf("z"))),
    )
    picture = Picture(view=classic_view("shop", members))
    text = text_of(picture)
    rows = {name: row_of(text, name)[-1] for name in "abcd"}
    assert rows == {"a": "0-1", "b": "0-2; 0 lacks 1,500,000", "c": "-", "d": "-"}
    found = {member["instance"]: member["folders"] for member in facts(picture)["members"]}
    assert found["b"] == {"shelf": "y", "offsets": {"0": 500_000, "1": 2_000_000, "2": 7}}
    assert found["c"] is None


def test_two_of_one_name_are_told_apart() -> None:
    members = [ours("a", Assignment(own=frozenset({0}))), ours("a", Assignment())]
    members[1].member_id = "a-0c0ffee0-0000"
    text = text_of(Picture(view=classic_view("shop", described(*members))))
    assert row_of(text, "a (5f4fb1a9)")[4] == "0"
    assert row_of(text, "a (0c0ffee0)")[4] == "-"


def test_a_receiver_that_is_gone_is_named() -> None:
    view = classic_view("shop", described(ours("a", Assignment(release={0: "b-77"}))))
    picture = Picture(view=view, live=handing_over("a", 0, "b-77"))
    assert row_of(text_of(picture), "0")[1:4] == ["a", "", "a → b-77 (gone)"]


def test_names_cannot_command_the_terminal() -> None:
    view = classic_view("shop", described(entry("evil\x1b[2J\n", client_host="/h\x07"), state="PreparingRebalance"))
    text = text_of(Picture(view=view))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "evil?[2J?" in text


# ------------------------------------------------------------------------------------------------ look after look


def rebalancing(view: GroupView, *names: str) -> GroupView:
    return classic_view("shop", described(*map(entry, names), state="PreparingRebalance", protocol=""))


def test_what_a_rebalance_hides_is_remembered(moving: GroupView) -> None:
    reader = Cluster(moving, rebalancing(moving, "a", "b", "new")).reader()
    reader()
    picture = reader()
    assert picture.stale
    assert [member.instance for member in picture.view.members] == ["a", "b", "new"]
    assert partition_rows(picture)[0].owners == ["a"]
    text = text_of(picture)
    assert "rebalancing: members join" in text
    assert "this is the state before the rebalance" in text
    assert row_of(text, "new")[4] == "-"


def test_a_rebalance_is_waited_for_but_not_for_long(moving: GroupView) -> None:
    clock = iter(range(100))
    there = Cluster(rebalancing(moving, "a"), rebalancing(moving, "a"), moving)
    assert there.reader().settled(lambda: 0.0, lambda _: None).view == moving
    assert len(there.asked) == 3
    there = Cluster(rebalancing(moving, "a"))
    assert not there.reader().settled(lambda: float(next(clock)), lambda _: None).view.settled


@pytest.mark.parametrize("error", [BrokerUnavailable("no answer in time"), TopicError("no such topic")])
def test_members_are_shown_without_their_lag(moving: GroupView, error: Exception) -> None:
    there = Cluster(moving)
    reader = there.reader()
    there.marks["orders"] = error
    picture = reader()
    assert picture.notes == (f"lag in orders: {error}",)
    assert str(error) in text_of(picture)
    assert row_of(text_of(picture), "0")[1:] == ["a", "c", "", "-", "-", "-"]


def test_a_source_on_another_cluster_has_its_ends_there(moving: GroupView) -> None:
    there: Any = Cluster()
    view = GroupView(group="shop", kind="classic", committed={"stand-in": {0: 70}, "status": {0: 1}})
    found, notes = group_reader.lags_in(there, view, {"stand-in": "orders"}, 1.0)
    assert [(entry.committed, entry.lag) for entry in found["stand-in"]] == [(70, 9_930), *[(None, 10_000)] * 3]
    assert (list(found), notes) == (["stand-in"], ())


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    written = io.StringIO()
    monkeypatch.setattr(group, "answers", lambda: Console(file=written, width=160))
    return written


def test_without_a_terminal_a_block_for_each_change(moving: GroupView, blocks: io.StringIO) -> None:
    show = group.Blocks()
    show(Picture(view=moving), "")
    show(Picture(view=moving, lags={"orders": lags(1, 1, 1, 1)}), "")  # numbers only
    assert blocks.getvalue().count("shop: stable") == 1
    show(Picture(view=rebalancing(moving, "a")), "")
    assert blocks.getvalue().count("rebalancing: members join") == 1
    show(Picture(view=moving), "")
    assert blocks.getvalue().count("shop: stable") == 2


def test_a_watch_survives_its_broker_but_not_a_broker_that_never_was(moving: GroupView) -> None:
    shown: list[tuple[int, str]] = []

    def sleep(_: float) -> None:
        if len(shown) == 3:
            raise KeyboardInterrupt

    def show(picture: Picture, problem: str) -> None:
        shown.append((len(picture.view.members), problem))

    away = BrokerUnavailable("no broker answers")
    cluster.watch(Cluster(moving, away, moving).reader(), show, 1.0, time.monotonic, sleep)
    assert shown == [(3, ""), (3, "no broker answers"), (3, "")]
    with pytest.raises(BrokerUnavailable):
        cluster.watch(Cluster(away).reader(), show, 1.0, time.monotonic, sleep)


# ------------------------------------------------------------------------------------------------------ the command


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[Cluster], Cluster]:
    """Let the command meet this cluster."""

    def meet(there: Cluster) -> Cluster:
        monkeypatch.setattr(group, "GroupQuestions", lambda servers, security: there)
        monkeypatch.setattr(group, "StatusBoard", lambda servers, client_id, security, name: there)
        monkeypatch.setattr(cluster, "TopicAdmin", lambda settings: there)
        monkeypatch.setattr(cluster, "await_listener", lambda servers, seconds: None)
        monkeypatch.setenv("KES_BOOTSTRAP_SERVERS", "127.0.0.1:1")
        monkeypatch.setenv("COLUMNS", "160")
        return there

    return meet


def test_the_command_shows_a_group(
    kes: Kes, moving: GroupView, on: Callable[[Cluster], Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = on(Cluster(moving))
    monkeypatch.setenv("COLUMNS", "40")  # names are whole all the same
    assert row_of(kes("group", "shop").out, "a")[:6] == ["a", "5f4fb1a9", "10.0.0.7", ANY, "0, 2-3", "-"]
    assert kes("group", "--group", "shop", "--json").data["members"][0]["instance"] == "a"
    assert there.asked == ["shop", "shop"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["group", "nobody"], 1, "there is no group 'nobody'"),
        (["group", "nowhere:source"], 1, "No module named 'nowhere'"),
        (["group"], 2, "either MODULE:SOURCE or --group"),
        (["group", "fleet:source", "--group", "shop"], 2, "either MODULE:SOURCE or --group"),
        (["group", "./fleet.py:"], 2, "MODULE:SOURCE"),
    ],
)
def test_a_users_error_is_a_message(
    kes: Kes, on: Callable[[Cluster], Cluster], arguments: list[str], code: int, message: str
) -> None:
    on(Cluster(GroupView(group=arguments[-1], kind="none")))
    complaint = kes(*arguments, code=code).words
    assert message in complaint
    assert "Traceback" not in complaint


def test_an_empty_group_that_has_committed_is_shown(kes: Kes, on: Callable[[Cluster], Cluster]) -> None:
    on(Cluster(GroupView(group="shop", kind="classic", state="Empty", committed={"orders": {0: 5}})))
    out = kes("group", "shop").out
    assert "shop: empty, 0 members" in out
    assert row_of(out, "0")[1] == "no member"


def test_a_member_without_a_name_in_its_id() -> None:
    assert group_picture.short_id(MemberView(member_id="abcdefghijklmnop", instance="x")) == "abcdefghijkl"
