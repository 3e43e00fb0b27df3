"""Facts about librdkafka and the broker that the librdkafka members rest on, and what only they can do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from streams.errors import BrokerUnavailable, ConfigError, MembershipFatal
from streams.kafka.wire.group_bytes import Metadata, parse_metadata
from streams.model.group import Assigned, Lost, Revoked
from tests.broker.gate import gate
from tests.broker.membership_kit import PARTITIONS, STEADY_MS, Desk, Transactor, set_broker_session, settled, until
from tests.unit.waiting import stays

pytestmark = [pytest.mark.broker, pytest.mark.nightly, pytest.mark.timeout(240)]

EVICTION_MS = 5000
"""How long who is to be evicted may stay away: more than a busy machine stands still for."""
ALL = frozenset(range(PARTITIONS))


@pytest.fixture(params=["librdkafka", "broker"])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


classic = pytest.mark.parametrize("kind", ["librdkafka"])
broker_side = pytest.mark.parametrize("kind", ["broker"])


def soon() -> float:
    return time.monotonic() + 30.0


def transactor(desk: Desk, instance: str = "tester") -> Transactor:
    return Transactor(desk.servers, f"{desk.group}.{instance}.kes~0", desk.topic)


class Bare:
    """A Consumer that takes nothing of what it is assigned, polled by the test itself. ``seen`` is what was said."""

    def __init__(self, desk: Desk, **settings: Any) -> None:
        side: dict[str, Any] = {"group.protocol": "consumer"}
        if desk.kind != "broker":
            side = {"partition.assignment.strategy": "cooperative-sticky", "heartbeat.interval.ms": 200}
            side["session.timeout.ms"] = EVICTION_MS
        self.eager = settings.get("partition.assignment.strategy") == "range"
        self.seen: list[tuple[str, list[int], Metadata]] = []
        self.within: Callable[[], None] = lambda: None
        away = {"max.poll.interval.ms": EVICTION_MS, "auto.offset.reset": "earliest", "log_level": 0}
        place = {"bootstrap.servers": desk.servers, "group.id": desk.group}
        self.consumer = Consumer({**place, **away, **side, **settings})
        self.consumer.subscribe(
            [desk.topic],
            on_assign=lambda _, parts: self._called("assign", parts),
            on_revoke=lambda _, parts: self._called("revoke", parts),
            on_lost=lambda _, parts: self._called("lost", parts),
        )

    def __enter__(self) -> Bare:
        return self

    def __exit__(self, *_: object) -> None:
        self.consumer.close()

    @property
    def metadata(self) -> Metadata:
        return parse_metadata(self.consumer.consumer_group_metadata())

    def _called(self, what: str, parts: list[TopicPartition]) -> None:
        self.seen.append((what, sorted(part.partition for part in parts), self.metadata))
        if what != "assign":
            self.within()
        if self.eager:
            self.consumer.assign([]) if what == "assign" else self.consumer.unassign()
        else:
            (self.consumer.incremental_assign if what == "assign" else self.consumer.incremental_unassign)([])

    def until(self, condition: Callable[[], bool], what: str) -> None:
        def polled() -> bool:
            message = self.consumer.poll(0.02)
            assert message is None or message.error() is not None, "something was fetched"
            return condition()

        until(polled, what)

    def said(self, what: str) -> list[Metadata]:
        return [metadata for kind, _, metadata in self.seen if kind == what]


# ---------------------------------------------------------------------------------------------------- facts


def test_what_is_not_taken_is_not_fetched_and_is_ours_all_the_same(desk: Desk) -> None:
    producer = Producer({"bootstrap.servers": desk.servers, "log_level": 0})
    for number in range(PARTITIONS):
        producer.produce(desk.topic, b"bait", partition=number)
    assert producer.flush(30) == 0
    with Bare(desk, **{"max.poll.interval.ms": STEADY_MS}) as bare:
        bare.until(lambda: bool(bare.said("assign")) and bare.seen[-1][1] == sorted(ALL), "it is not assigned")
        end = time.monotonic() + 1.0  # a time in which something would be fetched
        bare.until(lambda: time.monotonic() > end, "")
        assert bare.consumer.assignment() == []
        other = desk.seat("b")
        bare.until(lambda: bool(bare.said("revoke")), "nothing is revoked")
        bare.until(lambda: any(len(event.owned) == PARTITIONS // 2 for event in other.assigned()), "it gets nothing")


@classic
def test_an_eviction_within_a_classic_callback_is_not_told_but_shows_in_the_member_id(desk: Desk) -> None:
    shown: list[Metadata] = []

    def evicted() -> bool:
        shown.append(bare.metadata)
        return not shown[-1].member_id

    with Bare(desk, **{"partition.assignment.strategy": "range"}) as bare:
        bare.until(lambda: bool(bare.said("assign")), "it is not assigned")
        before = bare.metadata
        bare.within = lambda: until(evicted, "it is not evicted")
        desk.seat("b", strategies=("range",), session_timeout_ms=EVICTION_MS, rebalance_timeout_ms=EVICTION_MS)
        bare.until(lambda: bool(bare.said("revoke")), "nothing is revoked")
        assert shown[-1].generation == before.generation, "only the member id tells"
        bare.within = lambda: None
        bare.until(lambda: len(bare.said("assign")) > 1, "it does not join again")
        assert not bare.said("lost")
        assert bare.metadata.member_id not in ("", before.member_id)


@broker_side
def test_an_eviction_within_a_callback_of_the_broker_side_protocol_is_told_after_it(desk: Desk) -> None:
    """The metadata show nothing meanwhile, so the broker's refusal has to save us, and our own time limit."""
    shown: list[Metadata] = []
    commits = transactor(desk)
    with Bare(desk) as bare:
        bare.until(lambda: bool(bare.said("assign")) and bare.seen[-1][1] == sorted(ALL), "it is not assigned")
        before = bare.metadata
        other = desk.seat("b", rebalance_timeout_ms=EVICTION_MS)

        def within() -> None:
            until(lambda: any(len(event.owned) == PARTITIONS for event in other.assigned()), "it is not evicted")
            shown.append(bare.metadata)
            assert commits.commit(bare.metadata.data) == "UNKNOWN_MEMBER_ID"

        bare.within = within
        bare.until(lambda: bool(bare.said("revoke")), "nothing is revoked")
        bare.within = lambda: None
        assert shown[0] == before
        bare.until(lambda: bool(bare.said("lost")), "the loss is not told")
        told = [kind for kind, numbers, _ in bare.seen if numbers or kind != "assign"]
        assert told[:3] == ["assign", "revoke", "lost"]
        assert bare.metadata.generation <= 0 or bare.metadata.generation > before.generation


@broker_side
def test_an_older_epoch_is_good_for_what_was_never_given_up_only(desk: Desk) -> None:
    """KIP-1251 (Kafka 4.3); older brokers refuse both."""
    first = desk.seat("a")
    first.owning(PARTITIONS)
    commits, old = transactor(desk), first.metadata
    second = desk.seat("b")
    gone = min(second.owning(PARTITIONS // 2).owned)
    settled(first, second)
    kept = min(first.assigned()[-1].owned)
    assert commits.commit(old, gone) == "ILLEGAL_GENERATION"
    assert commits.commit(old, kept) in ("ok", "ILLEGAL_GENERATION")
    since = len(first.events)
    second.membership.close(3.0)
    first.owning(PARTITIONS, since)
    assert commits.commit(old, gone) == "ILLEGAL_GENERATION", "it came back, but that is another ownership"


# ---------------------------------------------------------------------------------------------------- take-over


def test_open_transactions_of_the_departed_are_ended_and_nobody_elses(desk: Desk) -> None:
    survivor, other = desk.seat("a"), desk.seat("b")
    survivor.owning(PARTITIONS // 2)
    other.owning(PARTITIONS // 2)
    theirs = transactor(desk, "b")
    until(lambda: theirs.commit(other.metadata) == "ok", "its metadata are refused")
    theirs.open(other.metadata)
    assert survivor.take_over.fence_departed((), soon()) == [], "a live member was fenced"
    since = len(survivor.events)
    other.close()  # its transaction stays open
    survivor.owning(PARTITIONS, since)
    assert survivor.take_over.fence_departed(("b",), soon()) == [f"{desk.group}.b.kes~0"]
    offsets = survivor.take_over.stable_offsets(range(PARTITIONS), soon())
    assert len(offsets) == PARTITIONS


def test_nobody_is_fenced_by_a_list_that_does_not_have_ourselves(desk: Desk) -> None:
    seat = desk.seat("a")
    seat.owning(PARTITIONS)
    theirs = transactor(desk, "b")
    theirs.open(seat.metadata)
    seat.take_over.member_id = lambda: "somebody who was evicted"
    with pytest.raises(BrokerUnavailable, match="no member is fenced"):
        seat.take_over.fence_departed((), soon())
    theirs.producer.commit_transaction(30)


def test_evicted_within_a_barrier_and_back_with_nothing_of_before(desk: Desk) -> None:
    evicted = desk.seat("a", release=False)
    evicted.owning(PARTITIONS)
    other = desk.seat("b")
    revoked = evicted.first(Revoked)
    old, commits = evicted.membership.group_metadata, transactor(desk)
    evicted.release = True
    assert other.take_over.remove_member(old.member_id, None, soon())
    assert commits.commit(old.metadata) == "UNKNOWN_MEMBER_ID"
    if desk.kind == "broker":  # which tells only after the callback
        evicted.membership.released(revoked.partitions, revoked.incarnation, revoked.generation)
    lost = evicted.lost()
    since = evicted.events.index(lost) + 1
    evicted.wait(lambda event: isinstance(event, Assigned) and bool(event.owned), since)
    settled(evicted, other)
    again = evicted.assigned()[-1]
    assert again.incarnation == 1
    until(lambda: commits.commit(evicted.metadata, min(again.owned)) == "ok", "it cannot work")
    assert commits.commit(old.metadata, min(again.owned)) != "ok"


# ---------------------------------------------------------------------------------------------------- strategies


@classic
@pytest.mark.parametrize("strategies", [("range",), ("roundrobin",), ("roundrobin", "range")])
def test_librdkafkas_other_strategies(desk: Desk, strategies: tuple[str, ...]) -> None:
    first = desk.seat("a", strategies=strategies)
    first.owning(PARTITIONS)
    second = desk.seat("b", strategies=strategies)
    settled(first, second)
    assert first.heard_of(Revoked)[0].partitions == ALL, "these take everything at each rebalance"
    assert not first.heard_of(Lost)


@classic
def test_a_running_group_migrates_from_one_strategy_to_another(desk: Desk) -> None:
    """Members that know both, one by one; then members that know the new one only."""
    rounds = [("range",), ("roundrobin", "range"), ("roundrobin",)]
    members = [desk.seat(name, strategies=rounds[0]) for name in "ab"]
    settled(*members)
    for number, strategies in enumerate(rounds[1:]):
        for place in range(2):
            members.pop(0).membership.close(3.0)
            members.append(desk.seat(f"{'ab'[place]}{number}", strategies=strategies))
            settled(*members)
    assert members[0].take_over.roster(soon()).protocol == "roundrobin"


@broker_side
def test_the_brokers_range(desk: Desk) -> None:
    members = [desk.seat(name, strategies=("range",)) for name in "ab"]
    settled(*members)
    until(lambda: members[0].take_over.roster(soon()).protocol == "range", "another assignor is used")


@classic
@pytest.mark.parametrize(
    ("before", "after"), gate([("librdkafka", "broker"), ("broker", "librdkafka")], ("librdkafka", "broker"))
)
def test_a_running_group_migrates_between_librdkafka_and_the_broker(desk: Desk, before: str, after: str) -> None:
    """Kafka converts the group when the first member of the new kind joins (group.consumer.migration.policy)."""
    set_broker_session(desk.servers, desk.group, STEADY_MS)
    first = desk.seat("a", kind=before)
    first.owning(PARTITIONS)
    second = desk.seat("b", kind=after)
    settled(first, second)
    commits = transactor(desk)
    for seat in (first, second):
        until(lambda seat=seat: commits.commit(seat.metadata) == "ok", "refused")  # type: ignore[misc]
    assert not first.heard_of(Lost)
    since = len(second.events)
    first.membership.close(3.0)
    second.owning(PARTITIONS, since)
    assert second.take_over.roster(soon()).kind == ("consumer" if after == "broker" else "classic")


@classic
@pytest.mark.parametrize(("there", "comes"), [("streams", "librdkafka"), ("streams", "broker")])
def test_members_that_do_not_understand_each_other(desk: Desk, there: str, comes: str) -> None:
    first = desk.seat("a", kind=there)
    first.owning(PARTITIONS)
    error = desk.seat("b", kind=comes).fatal()
    assert isinstance(error, MembershipFatal)
    assert "stop all of them" in str(error)
    stays(lambda: first.assigned()[-1].owned == ALL, 0.5, "the ones that are there are disturbed")


# ---------------------------------------------------------------------------------------------------- refusals


@broker_side
def test_a_transaction_timeout_that_outlives_the_brokers_session(desk: Desk) -> None:
    error = desk.seat("a", transaction_timeout_ms=STEADY_MS).fatal()
    assert isinstance(error, ConfigError)
    assert f"transaction_timeout_seconds ({STEADY_MS // 1000})" in str(error)
