"""Durable jobs that come back, byte by byte, from wherever they were kept; and those on threads and in processes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streams import AsyncJobScheduler, EventContext, EventSource, EventSourceConfig, JobRun, Retry, Table
from streams.core.jobs import is_job
from streams.records import IncomingRecord
from streams.runtime.changelog import encode_timer, timer_key
from streams.runtime.ownership.replica import Replica
from streams.runtime.partition.state import Partition
from streams.settings import SchedulerConfig
from streams.testing import TestDriver
from tests.unit.jobs_kit import LONG, Order, Shop, order
from tests.unit.test_parking_restored import KEPT

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.mark.parametrize("kind", [kind for kind in KEPT if kind != "database"])
def test_jobs_are_restored_byte_by_byte(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting, tried, cancelled before, in an order; with the number of the next one."""
    state = KEPT[kind]
    shop = Shop(retry=LONG, **({} if state is None else {"state": state}))
    shop.broken = {1, 2}
    adopted: list[dict[bytes, bytes]] = []
    adopt = Partition.adopt

    def seen(self: Partition, restored: Any) -> None:
        adopted.append(
            {timer_key(name): encode_timer(timer) for name, timer in restored.timers.items() if is_job(name)}
        )
        adopt(self, restored)

    monkeypatch.setattr(Partition, "adopt", seen)
    with shop.driver(state_folder=str(tmp_path)) as driver:
        order(driver, 1)
        order(driver, 3)  # behind the first one, in its order
        order(driver, 2, key="new\nline \x1b", name="n")
        order(driver, 4, key="b", delay=3600)
        order(driver, 5, key="b", name="gone", delay=3600)
        order(driver, 5, key="b", name="gone", act="cancel")
        driver.advance(20)
        before = driver.jobs()
        driver.leave()
        if kind == "snapshot":
            shutil.rmtree(tmp_path / "state")
        log = driver._world.broker.log(driver._world.config.changelog, 0)
        kept: dict[bytes, bytes] = {}
        for record in filter(_is_of_jobs, log.committed(0, log.end)):
            kept.pop(record.key or b"", None)
            if record.value is not None:
                kept[record.key or b""] = record.value
        assert len(kept) == 5, sorted(kept)
        if kind != "changelog":  # what it held before the mark is read from there, or nowhere
            receive = Replica.receive

            def without(self: Replica, records: list[IncomingRecord], *more: Any) -> Any:
                assert not any(map(_is_of_jobs, records)), kind
                return receive(self, records, *more)

            monkeypatch.setattr(Replica, "receive", without)
        driver.restart()
        assert adopted[-1] == kept
        assert [(one.id, one.item, one.attempts) for one in driver.jobs()] == [
            (one.id, one.item, one.attempts) for one in before
        ]
        shop.broken.clear()
        driver.advance(4000)
        assert sorted(shop.answered) == [1, 2, 3, 4]
        order(driver, 6)
        assert driver.jobs() == []
        assert len({job_id for _, job_id, _ in shop.calls}) == 5
        driver.check()


def _is_of_jobs(record: IncomingRecord) -> bool:
    return (record.key or b"").startswith((timer_key("@job/"), timer_key("@jobs")))


class Work(msgspec.Struct, frozen=True):
    """The item of a job that is picklable."""

    number: int


def blocks(work: Work, run: JobRun) -> str:
    if run.attempt == 1:
        raise ConnectionError("not yet")
    return run.id


def counts(work: Work) -> int:
    return work.number


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_jobs_of_other_kinds(kind: str) -> None:
    ends: list[Any] = []
    source = EventSource(
        EventSourceConfig(group_id="kinds", topic="orders", num_partitions=1), store=Table.factory(key=str, value=int)
    )

    def end(ctx: EventContext[Table[str, int]], work: Work, result: Any) -> None:
        ctx.store.put(str(work.number), work.number)
        ends.append(result)

    config = SchedulerConfig(concurrency=2, timeout_seconds=60, retry=Retry(attempts=3, backoff_seconds=0.1))
    jobs: Any = AsyncJobScheduler(source, blocks if kind == "thread" else counts, end, config=config, kind=kind)

    @source.on
    def on_order(ctx: EventContext[Table[str, int]], event: Order) -> None:
        ctx.start_job(jobs, Work(event.number))

    with TestDriver(source) as driver:
        driver.send(Order(1), key="a")
        driver.send(Order(2), key="b")
        driver.advance(5)
        assert sorted(dict(driver.store(0).items())) == ["1", "2"]
        driver.check()
    if kind == "thread":
        assert len(set(ends)) == 2, "each has an id of its own"
