"""A cluster for ``kes offsets start``: a source of two partitions, the group of another program, and its changelog."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from streams.cli import foreign_state, logging_setup, offsets_start
from streams.kafka.questions.admin import Watermarks
from streams.kafka.questions.group_checks import _is_alive, _named
from streams.kafka.questions.group_view import GroupView, MemberView
from streams.model.topics import TopicSpec
from streams.records import IncomingRecord, Output
from tests.unit.cli_kit import FakeCluster, Kes, admin, preset, source_of, spec

__all__ = ["admin"]  # the fixture

CHANGELOG, OLD = "demo.flights.changelog", "old"
PLAIN = MemberView(member_id="1", instance="by-hand", client_id="by-hand", host="10.0.0.7", topics=("flights",))
Event = Callable[[], None]


class World:
    """A cluster with a source of two partitions, a further input, and the group of another program."""

    def __init__(self) -> None:
        self.logs = {"flights": (2, 10), "more": (0, 7)}
        self.offsets: dict[tuple[str, str], dict[int, int]] = {}  # by group and topic
        self.members: dict[str, tuple[MemberView, ...]] = {}
        self.groups = {"demo", OLD}
        self.written: list[Output] = []
        self.sent: list[Output] = []
        self.pending: dict[tuple[str, str], dict[int, int]] = {}
        self.steps: list[str] = []
        self.created: list[str] = []
        self.at: dict[str, Event] = {}
        self.foreign: dict[str, list[IncomingRecord]] = {}
        self.trimmed = 0  # the offset where the logs of the other program begin
        self.exactly_once = True  # its way to work

    def step(self, name: str) -> None:
        self.steps.append(name)
        self.at.get(name, lambda: None)()

    def records(self, partition: int, key: bytes = b"") -> list[IncomingRecord]:
        return [
            IncomingRecord(CHANGELOG, partition, number, each.key, each.value, None)
            for number, each in enumerate(self.written)
            if each.partition == partition and key in (b"", each.key)
        ]

    # -- GroupChecks ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None: ...

    def described(self, group: str) -> GroupView:
        found = {topic: offsets for (name, topic), offsets in self.offsets.items() if name == group and offsets}
        kind = "classic" if group in self.groups else "none"
        return GroupView(group=group, kind=kind, members=self.members.get(group, ()), committed=found)

    def resting(self, group: str) -> GroupView:
        self.step(f"look at {group}")
        found = self.described(group)
        if found.members:
            raise _is_alive(group, "; ".join(map(_named, found.members)))
        return found

    def refuse_if_alive(self) -> GroupView:
        return self.resting("demo")

    def remove_static(self, group: str, names: list[str]) -> None:
        self.step(f"remove {', '.join(names)} from {group}")
        self.members[group] = tuple(one for one in self.members[group] if one.instance not in names)

    def committed(self, partitions: list[int], topic: str = "flights") -> dict[int, int | None]:
        return self.committed_by("demo", topic)

    def committed_by(self, group: str, topic: str) -> dict[int, int | None]:
        return {number: self.offsets.get((group, topic), {}).get(number) for number in (0, 1)}

    def last_records(self, topic: str, partitions: list[int], key: bytes) -> dict[int, IncomingRecord]:
        return {number: found[-1] for number in partitions if (found := self.records(number, key))}

    def first_within(self, topic: str, ranges: dict[int, tuple[int, int]]) -> dict[int, IncomingRecord]:
        found = {number: self.records(number) for number in ranges}
        return {number: records[0] for number, records in found.items() if records}

    def first_record(self, topic: str) -> IncomingRecord | None:
        self.step("read the changelog")
        first = self.written[0] if self.written else None
        return None if first is None else IncomingRecord(CHANGELOG, 0, 0, first.key, first.value, None)

    def end_transactional(self, topic: str, ends: dict[int, int]) -> dict[int, bool]:
        self.step(f"look at the end of {topic}")
        return dict.fromkeys(ends, self.exactly_once)

    def hold(self, slot: object, offsets: dict[int, int], topic: str) -> None:
        self.step(f"hold {topic}")
        self.pending["demo", topic] = offsets
        self.refuse_if_alive()

    def hold_of(self, slot: object, group: str, offsets: dict[int, int], topic: str) -> None:
        self.step(f"hold {topic} of {group}")
        self.pending[group, topic] = offsets

    def create(self, specs: list[TopicSpec]) -> None:
        self.created += [each.name for each in specs]

    def source_id(self, topic: str) -> str:
        return f"id of {topic}"

    def changelog_id(self) -> str:
        return "id of the changelog"

    # -- PartitionReader -----------------------------------------------------------------------------------------------

    def read(self, topic: str, ranges: dict[int, tuple[int, int]], receive: Any, **_: Any) -> None:
        for number, (low, high) in ranges.items():
            self.step(f"read {topic}[{number}]")
            found = [each for each in self.foreign[topic] if each.partition == number and low <= each.offset < high]
            if found:
                receive(number, found)

    def close(self) -> None: ...

    # -- BlockingSlot --------------------------------------------------------------------------------------------------

    def send(self, outputs: list[Output]) -> None:
        self.step("send")
        self.sent += outputs

    def commit(self) -> None:
        self.step("commit")
        self.written += self.sent
        self.offsets |= self.pending
        self.abort()

    def abort(self) -> None:
        self.sent, self.pending = [], {}


@pytest.fixture
def world(admin: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> World:
    found = World()
    source = source_of(num_partitions=2, bootstrap_servers="there:1")
    source.input("more")
    monkeypatch.setattr(sys.modules["fleet"], "source", source)
    monkeypatch.setattr(offsets_start, "GroupChecks", lambda config, seconds: found)

    @contextlib.contextmanager
    def slot_of(config: object, command: str, timeout: float, seconds: float) -> Iterator[World]:
        found.step("take the id")
        yield found

    monkeypatch.setattr(offsets_start, "slot_of", slot_of)
    monkeypatch.setattr(logging_setup, "configure_logging", lambda options: None)
    admin.there[CHANGELOG] = spec(CHANGELOG, 2)
    logs = found.logs | {CHANGELOG: (0, 9)}
    marks = {topic: Watermarks(low, high - 1, high) for topic, (low, high) in logs.items()}

    def watermarks(topic: str, *_: object) -> dict[int, Watermarks]:
        if topic in found.foreign:
            ends = [sum(each.partition == number for each in found.foreign[topic]) for number in (0, 1)]
            return {number: Watermarks(found.trimmed, end, end) for number, end in enumerate(ends)}
        return dict.fromkeys((0, 1), marks[topic])

    monkeypatch.setattr(admin, "watermarks", watermarks)
    monkeypatch.setattr(foreign_state, "PartitionReader", lambda settings: found)
    monkeypatch.setattr(admin, "offsets_at", lambda *_: {0: 5, 1: -1}, raising=False)
    return found


@pytest.fixture
def start(kes: Kes) -> Kes:
    return preset(kes, "offsets", "start", "fleet:source")
