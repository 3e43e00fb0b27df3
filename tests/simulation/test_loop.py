"""A source with a further input and a loop under faults, judged by the witness of ``test_inputs``: the loop is one more
input, whose records nobody but the source sends, and which are deleted behind the committed position.

Each event of the loop says how many hops it still has to go, so those that are there tell whether one was lost, or
sent twice.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

import msgspec
import pytest

from streams import EventContext, EventSource
from streams.events import event_type
from streams.runtime.ownership import loop_purge
from streams.runtime.ownership.loop_purge import ASK_SECONDS, LoopPurge
from streams.runtime.ownership.takeover import TakeOvers
from streams.runtime.partition.batch_handlers import BatchContext
from streams.sak.murmur2 import partition_of
from streams.testing import TestDriver
from streams.testing.schedule_search import SearchReport, search
from streams.testing.simulation.virtual_time import elapse
from tests.simulation.seeds import Removal, assert_search_misses

from .test_inputs import ORDERS, PARTITIONS, PAYMENTS, build, judge, witness

pytestmark = pytest.mark.usefixtures("quiet")

SEEDS: Final = int(os.environ.get("SIM_SEEDS", "40"))
LOOP: Final = "shop.orders.loop"
KEYS: Final = [next(key for key in "abcdefgh" if partition_of(key.encode(), PARTITIONS) == one) for one in range(2)]


class Hop(msgspec.Struct, frozen=True):
    chain: int
    left: int


KINDS: Final[dict[str, Any]] = {
    name: event_type(name)(type(name, (Hop,), {"__module__": __name__}, frozen=True))
    for name in ("Loop.Plain", "Loop.Slow", "Loop.Flaky", "Loop.Bulk", "Loop.Ahead")
}


def looping() -> EventSource[Any]:
    source = build(PAYMENTS, loop=True)

    def send(ctx: EventContext[Any], event: Hop) -> None:
        if event.left:
            kinds = list(KINDS.values())
            follower = kinds[(event.chain + event.left) % len(kinds)](event.chain, event.left - 1)
            ctx.loop(follower, key=KEYS[(event.chain + event.left) % PARTITIONS])

    def plain(ctx: EventContext[Any], event: Hop) -> None:
        assert ctx.input is not None
        witness(ctx, ctx.input)
        send(ctx, event)

    async def slow(ctx: EventContext[Any], event: Hop) -> None:
        await elapse(0.05)
        plain(ctx, event)

    def flaky(ctx: EventContext[Any], event: Hop) -> None:
        plain(ctx, event)
        if ctx.attempt == 1:
            raise RuntimeError("not yet")

    def bulk(ctx: BatchContext[Any], events: list[Hop]) -> None:
        for record, event in zip(ctx.records, events, strict=True):
            witness(ctx, record)
            send(ctx, event)
        if len(events) > 2:
            raise RuntimeError("not so many")

    async def ahead(ctx: Any, event: Hop) -> None:
        await elapse(0.02 * (event.chain % 3))
        await ctx.turn()
        plain(ctx, event)

    for name, handler in {"Plain": plain, "Slow": slow, "Flaky": flaky}.items():
        source.register_event_type(KINDS[f"Loop.{name}"], handler)
    source.register_event_type(KINDS["Loop.Bulk"], bulk, batch=True)
    source.register_event_type(KINDS["Loop.Ahead"], ahead, concurrency=4)
    return source


CHAINS: Final = 16


def hops_of(chain: int) -> int:
    return chain % 4


def scenario(driver: TestDriver[Any]) -> None:
    rng, kinds = driver._world.rng, list(KINDS.values())
    for chain in range(CHAINS):
        event = kinds[rng.randrange(len(kinds))](chain, hops_of(chain))
        topic = rng.choice((ORDERS, PAYMENTS))
        driver.send(event, topic=topic, partition=rng.randrange(PARTITIONS), wait=rng.random() < 0.15)
        if rng.random() < 0.2:
            driver.advance(rng.random())
    driver.settle(200.0)


def judged(driver: TestDriver[Any]) -> None:
    judge(driver)
    sent = Counter(msgspec.json.decode(record.value or b"", type=Hop).chain for record in driver.outputs(LOOP))
    assert sent == Counter({chain: hops_of(chain) for chain in range(CHAINS) if hops_of(chain)})


def run(seeds: int | Iterable[int]) -> SearchReport:
    return search(looping, scenario, seeds=seeds, members=2, invariant=judged, compare=False, patience=120.0)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is handled is deleted many times within a scenario."""
    monkeypatch.setattr(loop_purge, "PURGE_SECONDS", 0.3)


@pytest.mark.timeout(0)
@pytest.mark.usefixtures("often")
def test_a_loop_under_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    deleted: Counter[str] = Counter()
    taken = LoopPurge._purge

    async def purge(self: LoopPurge) -> None:
        before = dict(self._purged)
        await taken(self)
        deleted["times"] += self._purged != before

    monkeypatch.setattr(LoopPurge, "_purge", purge)
    report = run(SEEDS)
    assert len(report.happened) > 8, report
    assert deleted["times"] > SEEDS, deleted


# -- each safeguard, taken out -----------------------------------------------------------------------------------------


def deleted_up_to_what_is_admitted(patch: pytest.MonkeyPatch) -> None:
    """The purge does not wait for the commit."""

    async def purge(self: LoopPurge) -> None:
        member = self._member
        before = {number: worker.position[1] for number, worker in member.workers.items() if worker.state.admits}  # type: ignore[index]
        deadline = member.now() + ASK_SECONDS
        await self._thread.call(member.takeover_client.delete_records, LOOP, before, deadline)

    patch.setattr(LoopPurge, "_purge", purge)
    patch.setattr(loop_purge, "PURGE_SECONDS", 0.02)


def started_at_the_end_of_the_loop(patch: pytest.MonkeyPatch) -> None:
    """A partition that has no position in the loop begins at its end: what is in it was sent by other members."""
    taken = TakeOvers._start_offset

    def start(self: TakeOvers, worker: Any, found: Any, known: int | None) -> int:
        is_new = found.topic == LOOP and known is None
        return int(found.range[1]) if is_new else taken(self, worker, found, known)

    patch.setattr(TakeOvers, "_start_offset", start)


@pytest.mark.filterwarnings("ignore")  # tasks of an engine that was broken on purpose
@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("removal", [deleted_up_to_what_is_admitted, started_at_the_end_of_the_loop])
def test_each_safeguard_is_missed(removal: Removal) -> None:
    assert_search_misses(run, removal, r"seed \d+ goes wrong|not done after|counts|are gone")
