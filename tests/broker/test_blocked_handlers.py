"""A handler that stops the event loop of one owner after the other comes to an end: committed, or its own failure."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from streams import DEAD_LETTER, EventContext, EventSource
from streams.runtime.ownership import blocked
from tests.broker.engine_kit import Lab
from tests.vocabulary import Added, Totals, register, tell_total

pytestmark = [pytest.mark.broker, pytest.mark.asyncio, pytest.mark.timeout(120)]

QUICK = {"session_timeout_seconds": 2.0, "transaction_timeout_seconds": 1.6, "rebalance_timeout_seconds": 2.0}
QUICK |= {"drain_timeout_seconds": 1.0}
BLOCKS = 5.5
"""Longer than a member that does not go on stays in the group: twice the rebalance timeout."""


@contextlib.asynccontextmanager
async def running(*sources: EventSource[Any]) -> AsyncIterator[None]:
    """Each on a loop of its own: one that stands still does not stop the others."""
    runs = [asyncio.create_task(asyncio.to_thread(source.run)) for source in sources]
    try:
        yield
    finally:
        await asyncio.gather(*(source.stop() for source in sources))
        await asyncio.gather(*runs)


@pytest.mark.parametrize("strategy", ["incremental", pytest.param("range", marks=pytest.mark.nightly)])
async def test_an_event_that_blocks_every_owner_is_its_own_failure(
    lab: Lab, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    monkeypatch.setattr(blocked, "MOST_OWNERS", 2)
    await lab.create()
    await lab.create(lab.dead_letter_topic)
    met: list[str] = []

    def work(ctx: EventContext[Totals], event: Added) -> None:
        if event.deed:
            met.append(ctx.where)
            threading.Event().wait(BLOCKS)  # it blocks the loop
        tell_total(ctx, event, lab.output)

    settings: dict[str, Any] = {**QUICK, "strategy": strategy, "error_policy": DEAD_LETTER}
    settings["membership"] = "streams" if strategy == "incremental" else "librdkafka"
    sources = [lab.source(**settings) for _ in range(2)]
    for source in sources:
        register(source, work)
    await lab.add("a", "b")
    async with running(*sources):
        await lab.until_outputs(2)
        await lab.add("bad", deed="block")
        await lab.add("c", "d")
        await lab.until_outputs(4, 60)
    bad = f"{lab.topic}[0]@2"
    assert met == [bad, bad]
    assert await lab.totals() == [("a", 1), ("b", 1), ("c", 1), ("d", 1)]
    ((_, letter),) = await lab.dead_letters()
    assert (letter["error"], letter["offset"]) == ("HandlerBlocked", "2")
    assert "register it with blocking=True" in letter["message"]
    said = [line.getMessage() for line in caplog.records if line.levelname == "ERROR" and bad in line.getMessage()]
    assert [f"owner number {number}" in line for number, line in enumerate(said, 1)] == [True, True]
    await lab.check_settled()
