"""``kes topics grow`` without a broker: what grows, in which order, and what is refused."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from streams.cli import cluster, growing
from streams.clients.group_view import GroupView, MemberView
from tests.unit.cli_kit import Kes

TOPICS = ["bank-events", "bank.bank-events.changelog", "bank.bank-events.dead-letters"]
GROW = ("topics", "grow", "examples.bank:source", "--bootstrap-servers", "127.0.0.1:1")


class Cluster:
    """Topics and their partitions, and who is in the group."""

    def __init__(self) -> None:
        self.there = dict.fromkeys(TOPICS, 10)
        self.grown: list[str] = []
        self.members: tuple[MemberView, ...] = ()

    def identity(self, name: str, timeout_seconds: float) -> tuple[str, int] | None:
        return ("id", self.there[name]) if name in self.there else None

    def grow(self, name: str, partitions: int, timeout_seconds: float) -> None:
        self.there[name] = partitions
        self.grown.append(name)

    def look(self, group: str, timeout_seconds: float) -> GroupView:
        return GroupView(group=group, kind="classic", members=self.members)

    def close(self) -> None: ...


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    made = Cluster()
    monkeypatch.setattr(cluster, "await_listener", lambda servers, seconds: None)
    monkeypatch.setattr(cluster, "TopicAdmin", lambda settings: made)
    monkeypatch.setattr(growing, "GroupQuestions", lambda servers, security: made)
    yield made
    logging.getLogger("streams").handlers.clear()


def test_all_topics_grow_to_the_sources_count(kes: Kes, there: Cluster) -> None:
    there.there[TOPICS[0]] = 12
    answer = kes(*GROW, "--yes", "--json").data
    assert (answer["partitions"], answer["steps"]) == (12, dict.fromkeys(TOPICS[1:], 10))
    assert "set num_partitions=12" in answer["next"]
    assert there.grown == TOPICS[1:]
    kes(*GROW, "--yes")  # again: nothing is left to do
    assert there.grown == TOPICS[1:]


def test_the_source_grows_last(kes: Kes, there: Cluster) -> None:
    """A stop half-way is refused at the start: the changelog differs from the settings."""
    kes(*GROW, "--partitions", "11", "--yes")
    assert there.grown == [*TOPICS[1:], TOPICS[0]]


@pytest.mark.parametrize(("answer", "code", "grown"), [("y", 0, 3), ("n", 1, 0)])
def test_it_asks_and_says_that_keys_move(
    kes: Kes, there: Cluster, monkeypatch: pytest.MonkeyPatch, answer: str, code: int, grown: int
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{answer}\n"))
    assert "Keys move" in kes(*GROW, "--partitions", "11", code=code).err
    assert len(there.grown) == grown


def test_nothing_grows_under_members(kes: Kes, there: Cluster) -> None:
    there.members = (MemberView(member_id="b-1-2399", instance="b-1"),)
    assert "has members (b-1): stop all of them first" in kes(*GROW, "--partitions", "11", "--yes", code=1).err
    assert there.grown == []


@pytest.mark.parametrize(
    ("partitions", "gone", "code", "said"),
    [
        ("9", "", 1, "topic bank-events has 10 partitions, more than 9; none can be taken away"),
        ("11", TOPICS[1], 1, f"topic {TOPICS[1]} does not exist: kes topics apply creates it"),
        ("0", "", 2, "--partitions"),
    ],
)
def test_what_cannot_grow_is_refused(
    kes: Kes, there: Cluster, partitions: str, gone: str, code: int, said: str
) -> None:
    there.there.pop(gone, None)
    assert said in kes(*GROW, "--partitions", partitions, "--yes", code=code).err
    assert there.grown == []


def test_without_a_terminal_yes_is_needed(kes: Kes, there: Cluster) -> None:
    kes(*GROW, "--json", code=2)
