"""The membership without a broker: what it says of itself, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from streams.clients import group_wire
from streams.clients.membership import KafkaPythonMembership, connect_group
from streams.core.assignor import sticky_plan
from streams.errors import ConfigError
from streams.group import Assigned, Assignment, GroupEvent, Lost, Membership, Revoked, TakeOver


@pytest.fixture
def membership() -> Iterator[KafkaPythonMembership]:
    membership, _ = connect_group("127.0.0.1:1", "g", "t", 4, "a", {"cooperative-sticky": sticky_plan})
    yield membership
    membership.close(1.0)


def test_it_is_what_the_runtime_expects() -> None:
    parts: tuple[Membership, TakeOver] = connect_group(
        "127.0.0.1:1", "g", "t", 4, "a", {"cooperative-sticky": sticky_plan}
    )
    parts[0].close(1.0)


def test_each_report_differs_from_the_one_before(membership: KafkaPythonMembership) -> None:
    """A follower that sends the same bytes again starts no rebalance."""
    first, second = report(membership), report(membership)
    assert first != second
    reports = [group_wire.decode_report("t", "id", data)[0] for data in (first, second)]
    assert reports[1].sequence == reports[0].sequence + 1


def report(membership: KafkaPythonMembership) -> bytes:
    """The bytes of the next JoinGroup."""
    ((protocol, data),) = membership.subscriptions()
    assert protocol == "kes-cooperative-sticky-2"
    return data


def test_before_it_joined_there_is_no_metadata(membership: KafkaPythonMembership) -> None:
    snapshot = membership.snapshot
    assert (snapshot.incarnation, snapshot.generation, snapshot.metadata) == (0, -1, None)


def test_another_member_id_is_another_incarnation(membership: KafkaPythonMembership) -> None:
    heard: list[GroupEvent] = []
    membership._deliver = heard.append
    membership.published(3, "m-1")
    before = membership.snapshot
    membership.published(4, "m-1")
    assert (membership.snapshot.incarnation, membership.snapshot.generation) == (before.incarnation, 4)
    membership.published(5, "m-2")
    assert membership.snapshot.incarnation == before.incarnation + 1
    assert membership.snapshot.metadata == group_wire.group_metadata("g", 5, "m-2", None)
    assert [type(event) for event in heard] == [Lost]


def run(steps: Any) -> None:
    """A coroutine that does not have to wait."""
    with pytest.raises(StopIteration):
        steps.send(None)


def test_an_assignment_that_comes_after_the_loss_is_not_applied(membership: KafkaPythonMembership) -> None:
    """Lost between the answers to JoinGroup and SyncGroup."""
    heard: list[GroupEvent] = []
    membership._deliver = heard.append
    report(membership)
    membership.published(3, "m-1")
    membership.voided("session expired")
    data = group_wire.encode_assignment(
        "t", Assignment(own=frozenset({1}), sequence=membership._holdings.told.sequence)
    )
    run(membership.joined(3, data))
    run(membership.joined(-1, data))
    assert [type(event) for event in heard] == [Lost]
    report(membership)
    assert membership._holdings.told.owned == frozenset()


def test_only_what_was_revoked_can_be_released(membership: KafkaPythonMembership) -> None:
    heard: list[GroupEvent] = []
    membership._deliver = heard.append
    report(membership)
    membership.published(3, "m-1")
    own = Assignment(own=frozenset({1, 2}), sequence=membership._holdings.told.sequence)
    run(membership.joined(3, group_wire.encode_assignment("t", own)))
    (event,) = heard
    assert event == Assigned(0, 3, frozenset({1, 2}), frozenset({1, 2}), own)
    membership.released([1])
    membership._client.net.drain()
    assert membership._holdings.owned == frozenset({1, 2})
    assert not any(isinstance(event, Revoked) for event in heard)


def test_started_once(membership: KafkaPythonMembership) -> None:
    membership.start(lambda event: None)
    with pytest.raises(RuntimeError, match="once"):
        membership.start(lambda event: None)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"group_id": "gruppe-ä"}, r"group\.id"),
        ({"instance": "host.example"}, "dot"),
        ({"instance": ""}, "instance"),
        ({"partitions": 0}, "0 partitions"),
        ({"heartbeat_interval_ms": 6000}, "heartbeat"),
        ({"heartbeat_interval_ms": 0}, "heartbeat"),
        ({"rebalance_timeout_ms": 0}, "rebalance timeout"),
        ({"bootstrap_servers": "nowhere"}, "bootstrap"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    settings: dict[str, Any] = {
        "bootstrap_servers": "127.0.0.1:1",
        "group_id": "g",
        "topic": "t",
        "partitions": 4,
        "instance": "a",
        "assignors": {"cooperative-sticky": sticky_plan},
    }
    with pytest.raises(ConfigError, match=named):
        connect_group(**{**settings, **changes})
