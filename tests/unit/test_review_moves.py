"""What a stranger found in moves and copies: each of these was wrong once."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from streams import Change, EventContext, EventSource, TopicPartition
from streams.clients.group_coordinator import GroupCoordinator
from streams.clients.membership import connect_group
from streams.core.assignor import sticky_plan
from streams.errors import EventFailure, RecordRefused
from streams.group import Assigned, Assignment, Copies, Order, Snapshot
from streams.outcomes import DEAD_LETTER
from streams.runtime.changelog import OFFSET_KEY
from tests.unit.runtime_kit import CHANGELOG, MISSING, OUT, Bench, Named, count

pytestmark = pytest.mark.timeout(60)


def counted(ctx: EventContext[Any], event: Named) -> None:
    count(ctx, event.name)
    ctx.forward(OUT, event)
    if event.name == "bad":
        raise ValueError("bad")


async def feed(bench: Bench, task: asyncio.Task[None]) -> None:
    """Input for as long as the source runs."""
    number = 0
    while not task.done():
        bench.broker.send(*(f"event {number + more}" for more in range(20)))
        number += 20
        await asyncio.sleep(0)


def events_below_the_offset(bench: Bench) -> list[str]:
    """The names of all input records below the offset that the changelog tells, without the one that fails."""
    log = bench.broker.logs["in", 0][: bench.broker.reached() or 0]
    return [record.key.decode() for record in log if record.key and record.key != b"bad"]


async def test_an_interjection_that_is_refused_takes_no_event_with_it(bench: Bench) -> None:
    source = bench.make(counted)
    task = await bench.start()
    feeding = asyncio.create_task(feed(bench, task))
    await bench.until(lambda: len(bench.broker.outputs()) > 100, "it works")
    with pytest.raises(RecordRefused):
        await source.interject(0, lambda ctx: ctx.forward(MISSING, Named("x")))
    with pytest.raises(EventFailure):  # the default policy
        await task
    await feeding
    assert bench.broker.outputs() == events_below_the_offset(bench)


async def test_a_dead_letter_that_is_refused_takes_no_event_with_it(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.make(counted, error_policy=DEAD_LETTER, dead_letter_topic=MISSING)
    task = bench.begin(*(f"first {number}" for number in range(200)), "bad")
    feeding = asyncio.create_task(feed(bench, task))
    await bench.until(lambda: f"{MISSING}: invalid" in caplog.text, "it is told")
    await bench.cancel()
    await feeding
    assert bench.broker.outputs() == events_below_the_offset(bench)


class Lines:
    """A plain store that only appends: it relies on ``receive_change`` being called once per record."""

    def __init__(self, _: TopicPartition) -> None:
        self.lines: list[bytes | None] = []

    def receive_change(self, change: Change, /) -> None:
        self.lines.append(change.value)

    def revoked(self) -> None: ...


def append(ctx: EventContext[Lines], event: Named) -> None:
    change = Change(b"%d" % len(ctx.store.lines), event.name.encode())
    ctx.store.lines.append(change.value)
    ctx.record_change(change)
    ctx.forward(OUT, Named(b" ".join(line or b"" for line in ctx.store.lines).decode()))


async def test_a_store_that_cannot_repeat_is_not_fed_twice(bench: Bench) -> None:
    """Handed over, kept as a spare copy, and back again."""
    bench.make(append, store=Lines)
    await bench.start()
    group = bench.connections.membership
    bench.broker.send("a")
    await bench.until(lambda: bench.broker.reached() == 1, "the first event")
    asked, given = threading.Event(), threading.Event()
    log_range, go_on = group.log_range, threading.Event()

    def slowly(*question: Any) -> dict[int, tuple[int, int]]:  # more comes before the last transaction
        answer = log_range(*question)
        asked.set()
        assert go_on.wait(10)
        return answer

    group.log_range = slowly  # type: ignore[method-assign, assignment]
    group.handed_over = lambda *_: given.set()  # type: ignore[method-assign]
    group.snapshot = Snapshot(0, 2, "m", b"metadata")
    plan = Assignment(release={0: "other"}, standby=frozenset({0}), members=("me", "other"))
    group._deliver(Assigned(0, 2, frozenset({0}), frozenset(), plan, {0: Order("other", 2)}))
    await bench.until(asked.is_set, "it is asked where the copy begins")
    bench.broker.send("b")
    await bench.until(lambda: bench.broker.reached() == 2, "the second event")
    go_on.set()
    await bench.until(given.is_set, "handed over")
    group.snapshot = Snapshot(0, 3, "m", b"metadata")
    plan = Assignment(own=frozenset({0}), members=("me",))
    group._deliver(Assigned(0, 3, frozenset({0}), frozenset({0}), plan))
    await bench.until_active()
    bench.broker.send("c")
    await bench.until(lambda: bench.broker.reached() == 3, "the third event")
    assert bench.broker.outputs() == ["a", "a b", "a b c"]


class Picky(Lines):
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
