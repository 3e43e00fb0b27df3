"""Groups as a coordinator would describe them, without one; and the tables of ``kes group`` taken apart."""

from __future__ import annotations

import io
import re
from collections.abc import Collection
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from streams.cli import group_tables
from streams.kafka.group.status_board import Note
from streams.kafka.questions.admin import Watermarks
from streams.kafka.questions.group_view import GroupView, classic_view
from streams.kafka.questions.lags import PartitionLag
from streams.kafka.wire import group_bytes
from streams.looks import group_reader
from streams.looks.group_live import LiveMember
from streams.looks.group_picture import Picture
from streams.model.group import Assignment, Copies, MemberReport
from streams.runtime.status import MemberStatus
from streams.statistics import CopyStatistics, MoveStatistics

BEGAN = 1_795_000_000.0
UUID = "5f4fb1a9-7c9e-4c8e-8d0b-1c44bf1fd2b7"


def entry(name: str, said: bytes = b"", answered: bytes = b"", **fields: Any) -> SimpleNamespace:
    """A member in the coordinator's answer."""
    known: dict[str, Any] = {"member_id": f"{name}-{UUID}", "group_instance_id": None, "client_id": name}
    return SimpleNamespace(
        **{**known, "client_host": "/10.0.0.7", "member_metadata": said, "member_assignment": answered, **fields}
    )


def ours(name: str, assignment: Assignment, **report: Any) -> SimpleNamespace:
    """A member of ours, on the topic ``orders``."""
    said = MemberReport(instance=name, sequence=int(BEGAN * 1e6) + 3, **report)
    return entry(name, group_bytes.encode_report("orders", said), group_bytes.encode_assignment("orders", assignment))


def described(*members: SimpleNamespace, state: str = "Stable", protocol: str = "kes-incremental-2") -> SimpleNamespace:
    return SimpleNamespace(group_state=state, protocol_type="consumer", protocol_data=protocol, members=list(members))


def id_of(name: str) -> str:
    return f"{name}-{UUID}"


def status(name: str, **fields: Any) -> MemberStatus:
    known: dict[str, Any] = {
        "at_ms": int(BEGAN * 1000), "member_id": id_of(name), "generation": 5, "partitions": 0, "copies": (),
        "moves": (), "rebalances": (),
    }  # fmt: skip
    return MemberStatus(**{**known, **fields})


def told(name: str, *copies: CopyStatistics, age: float = 0.5, **fields: Any) -> dict[str, LiveMember]:
    numbers = tuple(copy.partition for copy in copies)
    return {
        id_of(name): LiveMember(status(name, copies=numbers, **fields), {copy.partition: copy for copy in copies}, age)
    }


@pytest.fixture
def moving() -> GroupView:
    """``b`` takes 1 over from ``a`` and prepares 2, ``c`` leaves and keeps a copy of 0 that has caught up."""
    return classic_view(
        "shop",
        described(
            ours("b", Assignment(incoming={1: 0}, preparing=frozenset({2, 3})),
                 copies=Copies(preparing={2: 12_000}, late=frozenset({3}))),
            ours("a", Assignment(own=frozenset({0, 2, 3}), release={1: id_of("b")}), owned=frozenset({0, 1, 2, 3})),
            ours("c", Assignment(standby=frozenset({0, 1})), leaving=True, copies=Copies(ready=frozenset({0}))),
        ),
    )  # fmt: skip


def handing_over(donor: str, partition: int, receiver: str) -> dict[str, LiveMember]:
    """What the donor tells meanwhile."""
    return told(donor, moves=(MoveStatistics(partition, "out", receiver, 5, None),))


def lags(*figures: int | None) -> list[PartitionLag]:
    return [
        PartitionLag(number, figure, 0, 10_000, 10_000, 10_000 - (figure or 0)) for number, figure in enumerate(figures)
    ]


def text_of(picture: Picture) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(group_tables.shown(picture, BEGAN + 125))
    written = console.file
    assert isinstance(written, io.StringIO)
    return written.getvalue()


def row_of(text: str, first: str) -> list[str]:
    """The cells of the first table row that begins like this. Columns are told apart by the blanks between them."""
    lines = text.splitlines()
    rules = [number for number, line in enumerate(lines) if "───" in line]
    for rule, following in zip(rules, [*rules[1:], len(lines) + 1], strict=True):
        rows = lines[rule + 1 : following - 1]
        filled = [lines[rule - 1], *takewhile(str.strip, rows)]
        blank = "".join(" " if all(line[at : at + 1] in ("", " ") for line in filled) else "x" for at in range(400))
        columns = [match.span() for match in re.finditer(r"x+(?: {1,2}x+)*", blank)]
        for row in rows:
            if row[slice(*columns[0])].strip() == first:
                return [row[slice(*column)].strip() for column in columns]
    raise AssertionError(f"no row {first!r} in\n{text}")


class Cluster:
    """Stands for both clients: answers are given one after the other, the last one for ever."""

    def __init__(self, *views: GroupView | Exception) -> None:
        self.views = list(views)
        self.marks: dict[str, dict[int, Watermarks] | Exception] = {
            "orders": {number: Watermarks(0, 10_000, 10_000) for number in range(4)}
        }
        self.asked: list[str] = []
        self.live: dict[str, LiveMember] = {}
        self.notes: dict[str, dict[tuple[str, int], Note]] = {}

    def close(self) -> None: ...

    def read(
        self, instances: Collection[str], timeout: float, topic: str = ""
    ) -> dict[str, dict[tuple[str, int], Note]]:
        return self.notes

    def describe_group(self, name: str, timeout: float) -> GroupView:
        self.asked.append(name)
        view = self.views.pop(0) if len(self.views) > 1 else self.views[0]
        if isinstance(view, Exception):
            raise view
        return view

    @property
    def tails(self) -> Any:
        return SimpleNamespace(without_markers=lambda _, lags: [*lags], with_ages=lambda _, lags, now_ms: [*lags])

    def watermarks(self, topic: str, partitions: Collection[int] | None, timeout: float) -> dict[int, Watermarks]:
        answer = self.marks[topic]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def reader(self) -> group_reader.GroupReader:
        questions: Any = self
        admin: Any = self
        return group_reader.GroupReader(
            questions,
            lambda view, seconds: group_reader.lags_in(admin, view, {}, seconds),
            lambda view, seconds: (self.live, ()),
            "shop",
            5.0,
        )
