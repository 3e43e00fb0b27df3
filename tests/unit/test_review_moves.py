"""What a stranger found in moves and copies: each of these was wrong once."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from streams import Change, EventContext, EventSource
from streams.clients.group_coordinator import GroupCoordinator
from streams.clients.membership import connect_group
from streams.core.assignor import sticky_plan
from streams.group import Assigned, Assignment, Copies
from streams.runtime.changelog import OFFSET_KEY
from tests.unit.runtime_kit import CHANGELOG, OUT, Bench, Named
from tests.vocabulary import Words, touch

pytestmark = pytest.mark.timeout(60)


def counted(ctx: EventContext[Any], event: Named) -> None:
    touch(ctx, event.name)
    ctx.forward(OUT, event)


class Picky(Words):
    """Cannot be restored, until it can."""

    fails = True
    failures = 0

    def receive_change(self, change: Change, /) -> None:
        if Picky.fails:
            Picky.failures += 1
            raise ValueError("no room on the disk")


async def test_a_copy_that_fails_is_passed_over_at_once(bench: Bench) -> None:
    """Until the time for its preparation was over, nobody else was asked."""
    source = bench.make(counted, partitions=2, store=Picky, leave_timeout_seconds=0.0)
    bench.broker.append(CHANGELOG, 1, b"key", b"value", ())
    bench.run()
    group = bench.connections.membership
    group._all = frozenset({0})
    told: list[tuple[Copies, bool]] = []
    group.report = lambda copies, announce: told.append((copies, announce))  # type: ignore[method-assign]
    await bench.until(lambda: [p.state for p in source.statistics().partitions] == ["active"], "it works")
    plan = Assignment(own=frozenset({0}), preparing=frozenset({1}), members=("me", "other"))
    group._deliver(Assigned(0, 2, frozenset({0}), frozenset(), plan))
    await bench.until(lambda: any(announce for _, announce in told), "the group is told")
    copies = next(copies for copies, announce in told if announce)
    assert (copies.late, copies.ready) == (frozenset({1}), frozenset())
    told.clear()
    group._deliver(Assigned(0, 3, frozenset({0}), frozenset(), plan, copies=copies))
    await bench.until(lambda: Picky.failures == 2 and copy_state(source) == "failed", "it is tried once more")
    assert not any(announce or not copies.late for copies, announce in told), "it is told again and again"
    Picky.fails = False
    group._deliver(Assigned(0, 4, frozenset({0}), frozenset(), plan, copies=copies))
    await bench.until(lambda: any(announce for _, announce in told), "the group is told")
    assert told[-1][0].ready == {1}
    assert told[-1][0].late == frozenset()


def copy_state(source: EventSource[Any]) -> str:
    return ", ".join(copy.state for copy in source.statistics().copies)


async def test_an_offset_that_was_compacted_away_meanwhile_is_read_behind(bench: Bench) -> None:
    """Who stands still in a take-over, while another works on and compaction goes over it, asks again."""
    bench.make(counted)
    bench.begin("a", "b")
    await bench.until(lambda: bench.broker.reached() == 2, "handled")
    await bench.stop()
    written = bench.broker.logs[CHANGELOG, 0][:]
    old = [record for record in written if record.key != OFFSET_KEY]
    bench.broker.logs[CHANGELOG, 0][:] = old
    bench.run()
    group = bench.connections.membership
    log_range, asked = group.log_range, threading.Event()

    def slowly(topic: str, *question: Any) -> dict[int, tuple[int, int]]:
        if topic == CHANGELOG and asked.is_set():
            bench.broker.logs[CHANGELOG, 0][len(old) :] = written[-1:]  # the other one's
        elif topic == CHANGELOG:
            asked.set()
        return log_range(topic, *question)

    group.log_range = slowly  # type: ignore[method-assign, assignment]
    bench.broker.offsets[0] = 2
    await bench.until(asked.is_set, "it is asked how far the changelog goes")

    def read_on_and_active() -> bool:
        bench.broker.tails[-1].push(0)
        return [partition.state for partition in bench.source.statistics().partitions] == ["active"]

    await bench.until(read_on_and_active, "the other one's record is read, and the partition at work")


async def test_who_was_lost_joins_under_another_id() -> None:
    """Orders and markers name member ids: a coordinator that went back in time must not meet one of them again."""
    membership, _ = connect_group("127.0.0.1:1", "g", "t", 4, "a", {"cooperative-sticky": sticky_plan})
    try:
        coordinator = GroupCoordinator(
            membership, membership._client, api_version=(2, 8), **membership._settings.for_coordinator()
        )
        coordinator._generation = type(coordinator._generation)(20, "a-1", "p")
        membership.published(20, "a-1")
        coordinator.reset_generation("a-1")  # what kafka-python makes of ILLEGAL_GENERATION
        assert (membership.snapshot.incarnation, membership.snapshot.generation) == (1, -1)
        assert coordinator.member_id == ""
        coordinator.reset_generation("a-2")  # and of MEMBER_ID_REQUIRED
        assert coordinator.member_id == "a-2"
    finally:
        membership.close(1.0)
