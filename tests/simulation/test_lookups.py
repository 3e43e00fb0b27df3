"""A source with a lookup under faults, while the tables of members are held back by chance. The rate only ever grows: a
partition that looked into an older table than before has met a smaller one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final

import msgspec
import pytest

from streams import EventContext, EventSource, EventSourceConfig, GroupConfig, Table
from streams.errors import StreamsError
from streams.records import Record
from streams.runtime.changelog import LookupPosition
from streams.runtime.reading.lookups import Lookups, _Reading
from streams.testing import TestDriver
from streams.testing.schedule_search import SearchReport, search
from tests.simulation.seeds import Removal, assert_search_misses
from tests.vocabulary import Paid

pytestmark = pytest.mark.usefixtures("quiet")

SEEDS: Final = int(os.environ.get("SIM_SEEDS", "15"))
RATES, SEEN, RATE = "rates", "seen", "EUR"
PARTITIONS: Final = 2

Looks = list[tuple[int, float, int]]
"""Partition, time and answer of the looks that were answered."""


def build() -> EventSource[Any]:
    config = EventSourceConfig(
        group_id="shop", topic="orders", num_partitions=PARTITIONS, group=GroupConfig(num_standbys=1)
    )
    source = EventSource(config, Table.factory(key=str, value=int))
    rates = source.lookup(RATES, key=str, value=int)

    @source.on
    def paid(ctx: EventContext[Any], event: Paid) -> None:
        count = ctx.store.get("count", 0) + 1
        ctx.store.put("count", count)
        seen = [count, asyncio.get_running_loop().time(), ctx.lookup(rates).get(RATE, 0)]
        partition = ctx.topic_partition.partition
        ctx.forward(Record(SEEN, msgspec.json.encode(seen), b"%d" % partition, partition=partition))

    return source


def hold(driver: TestDriver[Any], member: int, *, is_held: bool) -> None:
    engine = driver._world.members[member].engine
    for reading in () if engine is None else engine.lookups._readings.values():
        with suppress(StreamsError):  # it does not read (any more)
            following = reading.reader.running()
            if is_held:
                following.pause(None)
            else:
                following.resume(None, None)


def look(driver: TestDriver[Any], partition: int, looks: Looks) -> None:
    owner = driver.owner(partition)
    if owner is None:
        return
    source, loop = driver._world.members[owner].source, driver._world.loop
    rates = source._declared.lookups.by_topic[RATES]

    async def ask() -> None:
        with suppress(StreamsError):
            answer = await source.interject(partition, lambda ctx: ctx.lookup(rates).get(RATE, 0))
            looks.append((partition, loop.time(), answer))

    loop.create_task(ask())


def scenario(driver: TestDriver[Any]) -> None:
    rng, table = driver._world.rng, driver.table(RATES)
    looks: Looks = []
    for number in range(1, 60):
        drawn, partition = rng.random(), rng.randrange(PARTITIONS)
        if drawn < 0.4:
            table.put(RATE, number, wait=False)
        elif drawn < 0.7:
            driver.send(Paid(RATE), partition=partition, wait=False)
        elif drawn < 0.85:
            look(driver, partition, looks)
        else:
            hold(driver, rng.choice(sorted(driver._world.members)), is_held=rng.random() < 0.7)
        driver.advance(rng.choice((0.0, 0.01, 0.3, 1.0)))
    for member in driver._world.members:
        hold(driver, member, is_held=False)
    driver.settle(200.0)
    judge(driver, looks)


def judge(driver: TestDriver[Any], looks: Looks) -> None:
    found: dict[int, list[list[Any]]] = {number: [] for number in range(PARTITIONS)}
    for record in driver.outputs(SEEN):
        found[record.partition].append(msgspec.json.decode(record.value or b""))
    for partition, lines in found.items():
        assert [count for count, _, _ in lines] == list(range(1, len(lines) + 1))
        rates = [rate for _, _, rate in lines]
        assert rates == sorted(rates), f"[{partition}] looked into an older table than before: {rates}"
        for _, at, rate in lines:
            newest = max((answer for where, when, answer in looks if where == partition and when < at), default=0)
            assert rate >= newest, f"[{partition}] looked into an older table than a look had: {rate}, {newest}"


def run(seeds: int | Iterable[int]) -> SearchReport:
    return search(build, scenario, seeds=seeds, members=2, topics={RATES: 1}, compare=False, patience=120.0)


@pytest.mark.timeout(0)
def test_lookups_under_faults() -> None:
    report = run(SEEDS)
    assert len(report.happened) > 8, report


# -- each safeguard, taken out; that of a take-over is in unit/test_lookups.py -----------------------------------------


def positions_that_stay_at_the_start(patch: pytest.MonkeyPatch) -> None:
    seen = _Reading.seen

    def first_seen(self: _Reading, writer: str) -> LookupPosition:
        position = self.__dict__.setdefault("first", seen(self, writer))
        assert isinstance(position, LookupPosition)
        return position

    patch.setattr(_Reading, "seen", first_seen)


def a_receiver_that_does_not_compare(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lookups, "reach", lambda self, record: True)
    patch.setattr(Lookups, "reach_donor", lambda self, record: True)


@pytest.mark.filterwarnings("ignore")  # tasks of an engine that was broken on purpose
@pytest.mark.timeout(0)
@pytest.mark.parametrize("removal", [positions_that_stay_at_the_start, a_receiver_that_does_not_compare])
def test_each_safeguard_is_missed(removal: Removal) -> None:
    assert_search_misses(run, removal, "looked into an older table", seeds=200)
