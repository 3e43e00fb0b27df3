"""What a stranger found in moves and copies: each of these was wrong once."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from streams import Change, EventContext, EventSource
from streams.core.partition import PartitionState
from streams.kafka.questions.takeover import WireTakeOver
from streams.model.group import Assigned, Assignment, Copies
from streams.runtime.changelog import OFFSET_KEY
from streams.runtime.transactions.pool import TransactionPool
from tests.unit.handlers_kit import driven, send, totals
from tests.unit.runtime_kit import CHANGELOG, OUT, Bench
from tests.vocabulary import Added, Named, Words, tell_total, touch

pytestmark = pytest.mark.timeout(60)


def counted(ctx: EventContext[Any], event: Named) -> None:
    touch(ctx, event.name)
    ctx.forward(OUT, event)


def tell(ctx: EventContext[Any], event: Added) -> None:
    tell_total(ctx, event, OUT)


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


def test_an_offset_that_was_compacted_away_meanwhile_is_read_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who stands still in a take-over, while another works on and compaction goes over it, asks again."""
    log_range, asked = WireTakeOver.log_range, list[str]()

    def ask(client: WireTakeOver, topic: str, *question: Any) -> dict[int, tuple[int, int]]:
        found = log_range(client, topic, *question)
        if topic == CHANGELOG:
            asked.append(topic)
            if len(asked) == 2:  # the other one's, which the tail has not seen yet
                driver._world.broker.append(CHANGELOG, 0, written.key, written.value, written.headers)
                return {0: (found[0][0], found[0][1] + 1)}
        return found

    with driven(tell) as driver:
        send(driver, "a", "b")
        driver.crash()
        log = driver._world.broker.log(CHANGELOG, 0)
        offsets = [entry for entry in log.entries if entry.key == OFFSET_KEY]
        written = offsets[-1]
        for entry in offsets:
            entry.gone = True
        monkeypatch.setattr(WireTakeOver, "log_range", ask)
        driver.restart()
        send(driver, "c")
        assert (len(asked) >= 2, totals(driver)) == (True, [("a", 1), ("b", 1), ("c", 1)])


async def tell_slowly(ctx: EventContext[Any], event: Added) -> None:
    with anyio.move_on_after(0.005):
        await anyio.sleep_forever()
    tell(ctx, event)


@pytest.mark.parametrize("ends", [PartitionState.RELEASING, PartitionState.DRAINING], ids=["moved", "given up"])
def test_state_on_disk_that_is_damaged_at_the_last_transaction_of_a_partition(
    monkeypatch: pytest.MonkeyPatch, ends: PartitionState
) -> None:
    """The partition was restored, and worked on beside the receiver of its marker; or its transaction lost its way."""
    wait_settled, damaged = TransactionPool.wait_settled, list[int]()

    async def damage(pool: TransactionPool, partition: int) -> None:
        engines = [member.engine for member in driver._world.running() if member.engine is not None]
        (engine,) = [engine for engine in engines if engine.pool is pool]
        worker = engine.workers.get(partition)
        if worker is not None and worker.state is ends and not damaged and pool.last_with(partition):
            damaged.append(partition)
            kept: Any = Kept(partition)
            worker.kept = kept
            engine.partitions.begin_anew(kept)
        await wait_settled(pool, partition)

    monkeypatch.setattr(TransactionPool, "wait_settled", damage)
    leaving = 0.0 if ends is PartitionState.DRAINING else 30.0
    with driven(tell_slowly, partitions=2, leave_timeout_seconds=leaving) as driver:
        names = [f"{number}" for number in range(300)]  # so many that the receiver has work at once
        for partition in range(2):
            send(driver, *names, partition=partition, wait=False)
        driver.join()
        if leaving == 0:
            send(driver, *names, wait=False)
            driver.advance(0.1)
            driver.leave(driver.owner(0))
        driver.settle()
        driver.check()
        assert damaged


class Kept:
    """The way to a disk that has failed."""

    def __init__(self, partition: int) -> None:
        self.partition = partition
        self.is_ready = False

    def committed(self, *part: object) -> None: ...

    def close(self) -> None: ...
