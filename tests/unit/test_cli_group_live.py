"""``kes group``: what members tell about themselves, and what is shown of it."""

from __future__ import annotations

import re
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from streams.errors import BrokerUnavailable
from streams.kafka.group.status_board import LONGEST, Note
from streams.kafka.questions.group_view import GroupView, classic_view
from streams.looks import group_picture
from streams.looks.group_live import decoded, live_status
from streams.looks.group_picture import Picture, partition_rows
from streams.model.group import Assigned, Assignment, GroupMetadata
from streams.runtime.status import REBALANCES, Status
from streams.settings.groups import QueryConfig
from streams.statistics import CopyStatistics, MoveStatistics, RebalanceStatistics
from tests.unit.cli_group_kit import BEGAN, Cluster, described, entry, id_of, moving, row_of, status, text_of, told

__all__ = ["moving"]  # the fixture


def copy(partition: int, state: str, left: int, **fields: Any) -> CopyStatistics:
    known: dict[str, Any] = {"position": 50, "end": 50 + left, "records": 6_000, "size_bytes": 1, "seconds": 2.0}
    known |= {"seconds_left": left / 3_000, "lag_seconds": 0.5}
    return CopyStatistics(partition=partition, state=state, records_left=left, **{**known, **fields})


def test_a_move_that_is_not_through_is_told(moving: GroupView) -> None:
    out = MoveStatistics(1, "out", id_of("b"), 5, None)
    awaited = MoveStatistics(1, "in", "", 5, 4.0)
    live = {**told("a", moves=(out,)), **told("b", moves=(awaited,))}
    assert partition_rows(Picture(view=moving, live=live))[1].owners == ["a"]
    text = text_of(Picture(view=moving, live=live))
    assert row_of(text, "a")[4] == "0-3"
    assert row_of(text, "b")[4:] == ["-", "-", "1 from a; prepares 2-3", "awaits 1 for 4 s"]
    through = {**told("a"), **told("b")}
    assert partition_rows(Picture(view=moving, live=through))[1].owners == ["b"]


def test_restores_and_copies_get_on(moving: GroupView) -> None:
    live = {
        **told("a", copy(0, "restoring", 9_000)),
        **told("b", copy(2, "preparing", 3_000), copy(3, "preparing", 600)),
        **told("c", copy(0, "ready", 0), copy(1, "ready", 12)),
    }
    text = text_of(
        Picture(view=moving, live=told("a", copy(0, "restoring", 0, folder_bytes=4_000, folder_loaded=1_000)))
    )
    assert row_of(text, "a")[-1].startswith("restores 0, 0 left, 25 % of the folders loaded")
    text = text_of(Picture(view=moving, live=live))
    assert row_of(text, "a")[-1] == "restores 0, 9,000 left, 3,000/s, 3 s"
    assert row_of(text, "b")[-1] == "prepares 2-3, 3,600 left, 6,000/s, 1 s"
    assert row_of(text, "c")[-1] == "2 ready, 12 records or 0.5 s behind"
    assert row_of(text, "0")[2:4] == ["c", "a restores (9,000 left, 3,000/s, 3 s)"]
    assert row_of(text, "1")[2] == "c (12 behind, 0.5 s)"
    assert row_of(text, "2")[3] == "b prepares (3,000 left, 3,000/s, 1 s)"
    assert row_of(text, "3")[3] == "b is late (600 left, 3,000/s)"


def notes_of(copies: int, moves: int, members: int) -> dict[tuple[str, int], Note]:
    """What a member writes that has so many copies and moves, in a group of so many."""
    names = [f"payments-worker-{number}-7d9f8b6c5-x2x4z" for number in range(members)]
    numbers = tuple(range(0, 2 * copies, 2))
    moving = tuple(MoveStatistics(number, "out", f"{names[-1]}-{id_of('b')}", 5, None) for number in range(moves))
    replicas: Any = SimpleNamespace(statistics=lambda: [copy(number, "ready", 0) for number in numbers])
    handover: Any = SimpleNamespace(statistics=lambda: moving)
    member: Any = SimpleNamespace(
        config=SimpleNamespace(changelog="log", offsets_topic="topic", queries=QueryConfig(), visits=False),
        thread=lambda _: None,
        membership=SimpleNamespace(group_metadata=GroupMetadata(0, 5, id_of("a"))),
        workers={},
        wall_ms=lambda: int(BEGAN * 1000),
    )
    told = Status(member, replicas, handover)
    for generation in range(REBALANCES):
        plan = Assigned(
            0, generation, frozenset(), frozenset(), Assignment(members=tuple(f"{name}+" for name in names))
        )
        told.rebalanced(plan, names)
    return {place: Note(offset, text[:LONGEST]) for place, (offset, text) in told._news().items()}


@pytest.mark.parametrize(
    ("copies", "moves", "members"), [(0, 0, 1), (3_000, 0, 1), (0, 64, 1), (0, 0, 60), (2_000, 900, 60)]
)
def test_a_member_tells_however_much_there_is_to_tell(copies: int, moves: int, members: int) -> None:
    live = decoded(notes_of(copies, moves, members), BEGAN)
    assert live is not None, "its note does not fit"
    assert sorted(live.copies) == list(live.status.copies) == list(range(0, 2 * copies, 2))
    assert len(live.status.rebalances) == REBALANCES
    assert live.status.rebalances[0].cause.startswith("joined: payments-worker-0")
    assert live.status.moves or not moves
    assert [move.partition for move in live.status.moves] == list(range(len(live.status.moves)))


def test_a_bitmap_of_somebody_else_is_left_out() -> None:
    for copies in ('"g"', '"-"', '""', "[-1.5]", "null", "7"):
        text = (
            f'{{"at_ms":1,"member_id":"a","generation":1,"partitions":0,"copies":{copies},"moves":[],"rebalances":[]}}'
        )
        assert decoded({("topic", 0): Note(1, text)}, BEGAN) is None


def test_silence_counts_only_while_there_is_something_to_tell(moving: GroupView) -> None:
    live = {**told("a", age=100.0), **told("b", copy(2, "preparing", 5), age=75.0)}
    text = text_of(Picture(view=moving, live=live))
    assert row_of(text, "a")[-1] == "-"
    assert row_of(text, "b")[-1].endswith("; silent for 1 min 15 s")
    assert row_of(text, "c")[-1] == "reports nothing"


def test_why_the_group_was_rebalanced(moving: GroupView) -> None:
    def was(generation: int, cause: str) -> RebalanceStatistics:
        return RebalanceStatistics(generation, int(BEGAN * 1000), cause)

    live = {
        **told("a", rebalances=(was(3, "a member requested it"), was(4, "joined: b"), was(5, "a member requested it"))),
        **told("b", rebalances=(was(4, "joined: a, c"), was(5, "partitions move"))),
    }
    text = text_of(Picture(view=moving, live=live))
    told_of = re.findall(r"generation (\d) at [\d:]+: (.*?)\s*$", text, re.MULTILINE)
    assert told_of == [("5", "partitions move"), ("4", "joined: b"), ("3", "joined: a")]
    found = group_picture.facts(Picture(view=moving, live=live))["rebalances"]
    assert [entry["generation"] for entry in found] == [5, 4, 3]
    alone = told("b", rebalances=live[id_of("b")].status.rebalances)
    assert [entry["cause"] for entry in group_picture.facts(Picture(view=moving, live=alone))["rebalances"]] == [
        "partitions move", "joined: b",
    ]  # fmt: skip


@pytest.mark.parametrize("at_ms", [-(2**63), -1, 2**63 - 1])
def test_a_time_that_is_none_is_no_problem(moving: GroupView, at_ms: int) -> None:
    live = told("a", rebalances=(RebalanceStatistics(9, at_ms, "joined: x"),))
    assert "joined: a" in text_of(Picture(view=moving, live=live))


def test_notes_are_read_as_far_as_they_can_be(moving: GroupView) -> None:
    def note(value: object) -> Note:
        return Note(7, msgspec.json.encode(value).decode())

    cluster: Any = Cluster(moving)
    cluster.notes = {
        "a": {
            ("orders", 0): note(status("a", copies=(1, 3))),
            ("log", 1): note(copy(1, "ready", 5)),
            ("log", 2): note(copy(2, "ready", 5)),  # of a copy that it does not have any more
            ("log", 3): Note(7, '{"partition": "three"}'),
            ("log", 4): Note(7, '{"x":' + "[" * 3_900),
        },
        "b": {("orders", 0): note(status("b", member_id="b-its-predecessor"))},
        "c": {("orders", 0): Note(7, '{"at_ms": 1}')},
    }
    live, notes = live_status(cluster, moving, 1.0, BEGAN + 3)
    assert notes == ()
    assert list(live) == [id_of("a")]
    assert list(live[id_of("a")].copies) == [1]
    assert live[id_of("a")].age_seconds == pytest.approx(3.0)

    class Away:
        def read(self, instances: Collection[str], timeout: float, topic: str) -> None:
            raise BrokerUnavailable("no broker answers")

    away: Any = Away()
    assert live_status(away, moving, 1.0, BEGAN) == ({}, ("the members' status is not known: no broker answers",))


def test_who_cannot_be_an_instance_of_ours_is_not_asked() -> None:
    view = classic_view("shop", described(entry("my.app"), entry("two\nlines")))
    nobody: Any = None
    assert live_status(nobody, view, 1.0, BEGAN) == ({}, ())
