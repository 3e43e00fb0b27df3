"""Interjections against a real broker: committed when they return, and never answered from old state. How they end
otherwise: ``tests/unit/test_interjections.py``, ``tests/unit/test_driver_engine.py``."""

from __future__ import annotations

import asyncio

import pytest

from streams import EventContext
from streams.errors import MembershipLost, NotOwned
from streams.testing.faults import KafkaProxy
from tests.broker.engine_kit import PATIENCE, Lab, Running, source_of
from tests.vocabulary import Total, Totals

pytestmark = [pytest.mark.broker, pytest.mark.asyncio, pytest.mark.timeout(90)]

PARTITIONS = 2


def tell(lab: Lab, name: str = "told", amount: int = 1) -> object:
    """An interjection with one output and one change."""

    def interjection(ctx: EventContext[Totals]) -> None:
        assert ctx.is_interjection
        assert (ctx.input, ctx.offset) == (None, -1)
        ctx.store.put(name, amount)
        ctx.forward(lab.output, Total(name, amount), key=name)

    return interjection


async def test_awaiting_means_committed(lab: Lab) -> None:
    """On a partition that was never read: visible to ``read_committed`` at once, and fenced by an offset (rule R1)."""
    await lab.create()
    source = source_of(lab)
    async with Running(source):
        await source.interject(1, tell(lab))
        assert await lab.totals() == [("told", 1)]
        assert await lab.counts(1) == {"told": 1}
        assert await lab.committed() == {1: 0}, "a transaction of interjections alone sends an offset too"
        assert await lab.changelog_offset(1) == 0
        await source.interject(1, tell(lab, "again", 2))
        assert await lab.totals() == [("again", 2), ("told", 1)] or len(await lab.records()) == 2
    await lab.check_settled()
    again = source_of(lab)
    async with Running(again) as run:
        seen: list[dict[str, int]] = []
        await again.interject(1, lambda ctx: seen.append(dict(ctx.store.items())))
        assert seen == [{"told": 1, "again": 2}]
        await lab.add("a", partition=1)
        await run.until_handled(0, 1)


@pytest.mark.parametrize("membership", ["streams", "librdkafka"])
async def test_a_look_at_an_evicted_member_is_never_answered_from_old_state(lab: Lab, membership: str) -> None:
    """Cut off for longer than its session while another one takes over: it knows of nothing, and its loop goes on."""
    await lab.create()
    quick = {"session_timeout_seconds": 2.0, "transaction_timeout_seconds": 1.6}
    quick |= {"membership": membership, "strategy": "incremental" if membership == "streams" else "range"}
    with KafkaProxy(lab.bootstrap) as proxy:
        first, second = source_of(lab, bootstrap_servers=proxy.bootstrap_servers, **quick), source_of(lab, **quick)
        async with Running(first):
            await first.interject(0, lambda ctx: ctx.store.put("balance", 1))
            assert await first.interject(0, lambda ctx: ctx.store.get("balance")) == 1
            proxy.cut_off()
            async with Running(second):
                await second.interject(0, lambda ctx: ctx.store.put("balance", 100))
                asked = asyncio.create_task(first.interject(0, lambda ctx: ctx.store.get("balance")))
                await asyncio.wait([asked], timeout=0.5)
                proxy.clear()
                (answer,) = await asyncio.wait_for(asyncio.gather(asked, return_exceptions=True), PATIENCE)
                assert isinstance(answer, NotOwned | MembershipLost) or answer == 100, answer
