"""Interjections are never answered from old state, on a real broker. What they leave behind: ``test_two_back_ends.py``;
how they end: ``tests/unit/test_interjections.py``."""

from __future__ import annotations

import asyncio

import pytest

from streams.errors import MembershipLost, NotOwned
from streams.testing.faults import KafkaProxy
from tests.broker.engine_kit import PATIENCE, Lab, Running, source_of

pytestmark = [pytest.mark.broker, pytest.mark.asyncio, pytest.mark.timeout(90)]

PARTITIONS = 2


async def test_a_look_at_an_evicted_member_is_never_answered_from_old_state(lab: Lab) -> None:
    """Cut off for longer than its session while another one takes over: it knows of nothing, and its loop goes on."""
    await lab.create()
    quick = {"session_timeout_seconds": 2.0, "transaction_timeout_seconds": 1.6}
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
