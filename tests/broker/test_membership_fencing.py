"""Which group metadata the broker takes from a transaction, and how a membership is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from streams.clients import group_wire
from streams.group import Assigned, Lost, Revoked, Snapshot
from tests.broker.membership_kit import PARTITIONS, Seat, Table, Transactor, laid_table, settled, until

pytestmark = pytest.mark.broker


@pytest.fixture
def table(kafka_broker: Any, topic_prefix: str) -> Iterator[Table]:
    with laid_table(kafka_broker.bootstrap_servers, topic_prefix) as table:
        yield table


@pytest.fixture
def transactor(table: Table) -> Transactor:
    return Transactor(table.servers, f"{table.group}.tester.0", table.topic)


def metadata(seat: Seat) -> bytes:
    published = seat.membership.snapshot.metadata
    assert published is not None
    return published


def forged(table: Table, snapshot: Snapshot, generation: int = 0, member_id: str = "") -> bytes:
    """As published, with another generation (by so many) or another member."""
    return group_wire.group_metadata(
        table.group, snapshot.generation + generation, member_id or snapshot.member_id, None
    )


def test_only_the_published_metadata_is_taken(table: Table, transactor: Transactor) -> None:
    seat = table.seat("a")
    seat.owning(PARTITIONS)
    snapshot = seat.membership.snapshot
    assert transactor.commit(metadata(seat)) == "ok"
    assert transactor.commit(forged(table, snapshot, generation=+1)) == "ILLEGAL_GENERATION"
    assert transactor.commit(forged(table, snapshot, generation=-1)) == "ILLEGAL_GENERATION"
    assert transactor.commit(forged(table, snapshot, member_id="somebody")) == "UNKNOWN_MEMBER_ID"
    assert transactor.commit(metadata(seat)) == "ok"


def test_the_old_generation_is_refused_after_a_rebalance_and_the_new_one_is_taken(
    table: Table, transactor: Transactor
) -> None:
    first = table.seat("a")
    first.owning(PARTITIONS)
    old = metadata(first)
    second = table.seat("b")
    settled(first, second)
    assert transactor.commit(old) == "ILLEGAL_GENERATION"
    assert transactor.commit(metadata(first)) == "ok"
    assert transactor.commit(metadata(second)) == "ok"


def test_commits_go_on_during_the_barrier(table: Table, transactor: Transactor) -> None:
    """The generation of the JoinGroup answer is valid before the assignment is applied."""
    first = table.seat("a", release=False)
    first.owning(PARTITIONS)
    generation = first.membership.snapshot.generation
    table.seat("b")
    revoked = first.wait(lambda event: isinstance(event, Revoked))
    assert isinstance(revoked, Revoked)
    assert first.membership.snapshot.generation == generation + 1
    for _ in range(5):
        assert transactor.commit(metadata(first), partition=min(revoked.partitions)) == "ok"
    first.membership.released(
        revoked.partitions, first.membership.snapshot.incarnation, first.membership.snapshot.generation
    )


def test_heartbeats_go_on_during_a_barrier_longer_than_the_session(table: Table, transactor: Transactor) -> None:
    first = table.seat("a", release=False, session_timeout_ms=5000, heartbeat_interval_ms=200)
    first.owning(PARTITIONS)
    second = table.seat("b")
    revoked = first.wait(lambda event: isinstance(event, Revoked))
    assert isinstance(revoked, Revoked)
    time.sleep(6.0)
    assert transactor.commit(metadata(first)) == "ok"
    first.membership.released(
        revoked.partitions, first.membership.snapshot.incarnation, first.membership.snapshot.generation
    )
    second.owning(PARTITIONS // 2)
    assert not first.heard_of(Lost)


def test_a_member_that_left_is_refused(table: Table, transactor: Transactor) -> None:
    stays, goes = table.seat("a"), table.seat("b")
    settled(stays, goes)
    old = metadata(goes)
    goes.membership.close(5.0)
    assert goes.membership.snapshot.incarnation == 1
    assert transactor.commit(old) == "UNKNOWN_MEMBER_ID"


def test_a_frozen_member_finds_everything_void_before_it_can_commit(
    table: Table, transactor: Transactor, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen, other = table.seat("a", session_timeout_ms=6000, heartbeat_interval_ms=200), table.seat("b")
    settled(frozen, other)
    old, before, since = metadata(frozen), frozen.membership.snapshot, len(frozen.heard)
    reported: list[tuple[int, frozenset[int]]] = []
    say = frozen.membership.subscriptions

    def subscriptions() -> list[tuple[str, bytes]]:
        data = say()
        reported.append((frozen.membership.snapshot.generation, frozen.membership._holdings.told.owned))
        return data

    monkeypatch.setattr(frozen.membership, "subscriptions", subscriptions)
    heard = len(other.events)
    thaw = frozen.freeze()
    try:
        other.owning(PARTITIONS, heard)
        assert frozen.membership.snapshot is before  # it cannot know yet: the broker's refusal has to save us
        assert transactor.commit(old) == "UNKNOWN_MEMBER_ID"
    finally:
        thaw()
    frozen.wait(lambda event: isinstance(event, Assigned) and event.incarnation == 1)
    settled(frozen, other)
    lost = next(n for n, (event, _) in enumerate(frozen.heard) if isinstance(event, Lost))
    assert all(isinstance(event, Assigned) for event, _ in frozen.heard[since:lost]), "of before, told late"
    event, seen = frozen.heard[lost]
    assert event == Lost(incarnation=1, reason=event.reason)  # type: ignore[union-attr]
    assert (seen.incarnation, seen.generation, seen.metadata) == (1, -1, None)
    assert reported[0] == (-1, frozenset()), "it claims what is void"
    again = frozen.heard[lost + 1][0]
    assert isinstance(again, Assigned)
    assert again.incarnation == 1
    assert again.added == again.owned
    assert transactor.commit(old) == "UNKNOWN_MEMBER_ID"
    assert transactor.commit(metadata(frozen)) == "ok"


def test_a_killed_member_is_replaced_after_its_session(table: Table) -> None:
    other = table.seat("a")
    other.owning(PARTITIONS)
    script = (
        "import sys, time\n"
        "from tests.broker.membership_kit import Seat\n"
        "Seat(*sys.argv[1:5], session_timeout_ms=2000, heartbeat_interval_ms=200).owning(5)\n"
        "print('joined', flush=True); time.sleep(600)\n"
    )
    command = [sys.executable, "-c", script, table.servers, table.group, table.topic, "b"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": "."}) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "joined\n"
            other.owning(PARTITIONS // 2)
            since = len(other.events)
        finally:
            process.send_signal(signal.SIGKILL)
        assert other.owning(PARTITIONS, since).assignment.members == ("a",)
    assert not other.heard_of(Lost)


def test_reading_the_snapshot_never_shows_a_torn_one(table: Table) -> None:
    """Generation, member and metadata belong together at every moment, seen from another thread."""
    seat = table.seat("a")
    seat.owning(PARTITIONS)
    stop, torn = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            seen = seat.membership.snapshot
            expected = None if seen.generation < 0 else forged(table, seen)
            if seen.metadata != expected:
                torn.append(seen)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for name in "bcd":
            other = table.seat(name)
            until(lambda other=other: bool(other.assigned()), "it does not join")  # type: ignore[misc]
            other.membership.close(3.0)
    finally:
        stop.set()
        reader.join()
    assert torn == []


@pytest.mark.slow
def test_an_orderly_restart_of_the_broker_costs_no_generation(own_broker: Any, topic_prefix: str) -> None:
    broker = own_broker()
    with laid_table(broker.bootstrap_servers, topic_prefix) as table:
        members = [table.seat("a"), table.seat("b")]
        settled(*members)
        before = [(seat.membership.snapshot, len(seat.events)) for seat in members]
        broker.restart()
        transactor = Transactor(table.servers, f"{table.group}.tester.0", table.topic)
        assert transactor.commit(metadata(members[0])) == "ok"
        third = table.seat("c")  # heartbeats arrive: the members hear of it
        settled(*members, third, patience=60)
        for seat, (snapshot, since) in zip(members, before, strict=True):
            assert seat.membership.snapshot.incarnation == snapshot.incarnation == 0
            assert not any(isinstance(event, Lost) for event in seat.events[since:])


@pytest.mark.slow
def test_a_broker_that_comes_late_is_joined(own_broker: Any, topic_prefix: str) -> None:
    broker = own_broker()
    with laid_table(broker.bootstrap_servers, topic_prefix) as table:
        broker.kill()
        seat = table.seat("a")
        time.sleep(3.0)
        assert seat.events == []
        broker.restart()
        seat.owning(PARTITIONS, patience=60)
