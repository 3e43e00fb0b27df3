"""What the engine relies on, whoever speaks the group protocol: the same scenarios for every kind of member."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from streams.errors import MembershipFatal
from streams.model.group import Assigned, Lost, Revoked
from tests.broker.client_kit import as_librdkafka
from tests.broker.gate import gate
from tests.broker.membership_kit import KINDS, PARTITIONS, SESSION_MS, Desk, Seat, Transactor, settled, until
from tests.unit.waiting import stays

pytestmark = [pytest.mark.broker, pytest.mark.timeout(180)]


@pytest.fixture(params=gate(KINDS, "streams"))
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def transactor(desk: Desk) -> Transactor:
    return Transactor(desk.servers, f"{desk.group}.tester.0", desk.topic)


def test_alone_with_everything_and_only_the_published_metadata_is_taken(desk: Desk, transactor: Transactor) -> None:
    seat = desk.seat("a")
    event = seat.owning(PARTITIONS)
    assert event.added == event.owned == event.assignment.own == frozenset(range(PARTITIONS))
    assert event.incarnation == seat.membership.group_metadata.incarnation == 0
    assert event.assignment.members == ("a",)
    assert seat.heard[-1][1].generation == event.generation  # the group metadata was there before the event

    def forged(by: int = 0, member_id: str = "") -> bytes:
        metadata = seat.membership.group_metadata
        return as_librdkafka(desk.group, metadata.generation + by, member_id or metadata.member_id)

    assert transactor.commit(forged(+1)) == transactor.commit(forged(-1)) == "ILLEGAL_GENERATION"
    assert transactor.commit(forged(member_id="somebody")) == "UNKNOWN_MEMBER_ID"
    assert transactor.commit(seat.metadata) == "ok"


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_member_gets_half_and_the_first_keeps_the_rest(desk: Desk, transactor: Transactor) -> None:
    first = desk.seat("a")
    first.owning(PARTITIONS)
    old = first.metadata
    second = desk.seat("b")
    gained = second.owning(PARTITIONS // 2)
    settled(first, second)
    assert [event.partitions for event in first.heard_of(Revoked)] == [gained.owned]
    assert not first.assigned()[-1].added
    assert not first.heard_of(Lost)
    assert first.membership.group_metadata.incarnation == 0
    until(
        lambda: first.membership.group_metadata.generation == second.membership.group_metadata.generation,
        "generations differ",
    )
    given_up = min(gained.owned)
    assert transactor.commit(old, given_up) == "ILLEGAL_GENERATION"
    if desk.kind != "broker":  # which takes an older epoch for what the member has had ever since (Kafka 4.3, KIP-1251)
        assert transactor.commit(old, min(first.assigned()[-1].owned)) == "ILLEGAL_GENERATION"
    assert transactor.commit(first.metadata) == "ok"
    assert transactor.commit(second.metadata, given_up) == "ok"


@pytest.mark.parametrize("session_ms", [5000])
def test_what_is_revoked_is_assigned_only_after_its_release(desk: Desk, transactor: Transactor) -> None:
    """And heartbeats and commits go on meanwhile, for longer than a session."""
    first = desk.seat("a", release=False)
    first.owning(PARTITIONS)
    second = desk.seat("b")
    revoked = first.first(Revoked)
    stays(
        lambda: (
            transactor.commit(first.metadata, partition=min(revoked.partitions)) == "ok"
            and not any(event.owned for event in second.assigned())
        ),
        6.0,
        "a wrong assignment, or the session expires",
    )
    some = frozenset(list(revoked.partitions)[:2])
    first.membership.released(some, revoked.incarnation, revoked.generation)
    stays(lambda: not any(event.owned for event in second.assigned()), 0.5, "assigned before all was released")
    first.membership.released(revoked.partitions - some, revoked.incarnation, revoked.generation)
    assert second.owning(PARTITIONS // 2).owned == revoked.partitions
    assert not first.heard_of(Lost)


@pytest.mark.parametrize("kind", KINDS)
def test_leaving_is_a_barrier_and_then_nothing(desk: Desk, transactor: Transactor) -> None:
    other = desk.seat("a")
    other.owning(PARTITIONS)
    leaves = desk.seat("b", release=False)
    settled(other, leaves)
    old, since, before = leaves.metadata, len(leaves.events), len(other.events)
    leaves.membership.leave()
    revoked = leaves.first(Revoked, since)
    stays(lambda: not any(event.added for event in other.events[before:] if isinstance(event, Assigned)), 1.0, "early")
    leaves.membership.released(revoked.partitions, revoked.incarnation, revoked.generation)
    leaves.owning(0, since)
    leaves.membership.close(5.0)
    other.owning(PARTITIONS, before)
    assert not leaves.heard_of(Lost)
    until(lambda: leaves.membership.group_metadata.generation == -1, "its metadata is still there")
    assert transactor.commit(old) == "UNKNOWN_MEMBER_ID"


def test_closing_without_leaving_is_known_to_the_others_at_once_and_nothing_is_left(
    desk: Desk, transactor: Transactor
) -> None:
    other = desk.seat("a")
    other.owning(PARTITIONS)
    threads = set(threading.enumerate())
    goes = desk.seat("b")
    settled(other, goes)
    old, began, since = goes.metadata, time.monotonic(), len(other.events)
    goes.membership.close(5.0)
    goes.membership.close(5.0)
    other.owning(PARTITIONS, since)
    assert time.monotonic() - began < desk.session_ms / 2000  # below the session timeout
    assert transactor.commit(old) == "UNKNOWN_MEMBER_ID"
    until(lambda: set(threading.enumerate()) <= threads, "a thread is left behind")
    metadata, heard = goes.membership.group_metadata, len(goes.events)
    assert metadata.generation == -1
    goes.membership.leave()
    goes.membership.released([1], metadata.incarnation, metadata.generation)
    assert len(goes.events) == heard


def test_a_second_process_under_the_same_name_has_to_go(desk: Desk) -> None:
    first = desk.seat("shop")
    first.owning(PARTITIONS)
    error = desk.seat("shop", session_timeout_ms=SESSION_MS, rebalance_timeout_ms=SESSION_MS).fatal()
    assert isinstance(error, MembershipFatal)
    assert "'shop'" in str(error)
    stays(lambda: not first.heard_of(Lost), 0.7, "the first one lost its membership")
    until(lambda: len(first.assigned()[-1].owned) == PARTITIONS, "the first one does not have everything")


def test_a_static_member_that_restarts_gets_its_partitions_back(desk: Desk) -> None:
    other, restarts = desk.seat("a", static=True), desk.seat("b", static=True)
    settled(other, restarts)
    mine, since = restarts.assigned()[-1].owned, len(other.events)
    restarts.membership.close(5.0)  # without `leave`: it stays a member for the session timeout
    successor = desk.seat("b", static=True)
    event = successor.owning(len(mine))
    assert event.owned == mine
    if desk.kind == "streams":
        told = successor.membership._state.holdings.reported
        assert event.assignment.sequence == told.sequence, "an assignment made for its predecessor"
    assert not any(isinstance(event, Revoked | Lost) for event in other.events[since:])
    assert not any(event.added for event in other.events[since:] if isinstance(event, Assigned))


def test_a_static_name_that_is_taken(desk: Desk) -> None:
    """The classic protocol believes the newcomer, the broker-side one whoever is there."""
    short = {"session_timeout_ms": 5000, "rebalance_timeout_ms": 5000}
    first = desk.seat("shop", static=True, **short)
    first.owning(PARTITIONS)
    second = desk.seat("shop", static=True, **short)
    loser, winner = (second, first) if desk.kind == "broker" else (first, second)
    # Who is refused tries on for longer than a session: the one before may have died.
    error = loser.fatal(patience=90.0)
    assert isinstance(error, MembershipFatal)
    assert ("another process" if desk.kind == "streams" else "'shop'") in str(error)
    assert loser.membership.group_metadata.generation == -1
    if loser is first:
        assert isinstance(first.events[-2], Lost)  # what it owned is void before it is told why
    winner.owning(PARTITIONS)
    assert not winner.heard_of(Lost)


def test_no_broker_is_waited_for_and_said_once(kind: str, topic_prefix: str, caplog: pytest.LogCaptureFixture) -> None:
    """A machine that stands still may have it said once more, and closing take longer: but not each time."""

    def said_once_and_closed_in_time(name: str) -> bool:
        caplog.clear()
        seat = Seat(kind, "127.0.0.1:1", f"{topic_prefix}group", "t", name)
        try:
            until(lambda: bool(caplog.records), "nothing is said")
            end = time.monotonic() + 1.0
            while (once := len(caplog.records) == 1) and time.monotonic() < end:
                time.sleep(0.01)
            assert "127.0.0.1:1" in caplog.text
            assert seat.events == []
        finally:
            before = time.monotonic()
            seat.membership.close(2.0)
        return once and time.monotonic() - before < 3.0

    with caplog.at_level("WARNING"):
        assert any(said_once_and_closed_in_time(name) for name in "abc")


@pytest.mark.parametrize("session_ms", [10_000])  # none is to expire: who is evicted hears of it after its successor
def test_members_come_and_go_and_no_partition_ever_has_two_owners(desk: Desk, seed: int) -> None:
    """Ownership as the members were told it, over a storm of joins and leaves. Of the first one's metadata, generation
    and member belong together at every moment, seen from another thread."""
    owners: dict[int, str] = {}
    wrong: list[Any] = []
    lock, stop = threading.Lock(), threading.Event()

    class Watched(Seat):
        def _hear(self, event: Any) -> None:
            with lock:
                gone = event.partitions if isinstance(event, Revoked) else ()
                for partition, name in list(owners.items()):
                    if partition in gone or (name == self.name and isinstance(event, Lost)):
                        del owners[partition]
                for partition in event.added if isinstance(event, Assigned) else ():
                    if partition in owners:
                        wrong.append((partition, owners[partition], self.name))
                    owners[partition] = self.name
            super()._hear(event)

    def read() -> None:
        while not stop.is_set():
            seen = first.membership.group_metadata
            if (seen.generation >= 1) != bool(seen.member_id):
                wrong.append(seen)

    def join(name: str) -> Watched:
        place = (desk.kind, desk.servers, desk.group, desk.topic, name)
        desk.made.append(seat := Watched(*place, session_timeout_ms=desk.session_ms))
        return seat

    first = join("a")
    seats, reader = [first], threading.Thread(target=read)
    reader.start()
    try:
        for number in range(4):
            seats.append(join(f"m{seed}-{number}"))
            until(lambda: any(event.owned for event in seats[-1].assigned()), "it gets nothing")
            if number % 2:
                leaver = seats.pop(0)
                leaver.membership.leave()
                leaver.owning(0, len(leaver.assigned()) - 1)
                leaver.membership.close(3.0)
        settled(*seats)
    finally:
        stop.set()
        reader.join()
    assert wrong == []
