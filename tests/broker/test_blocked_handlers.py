"""A handler that stops the event loop of one owner after the other comes to an end: committed, or its own failure."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from streams import DEAD_LETTER, EventContext, EventSource
from streams.kafka.questions.group_view import GroupQuestions
from streams.kafka.wire.security import PLAINTEXT
from streams.runtime.ownership import blocked
from tests.broker.engine_kit import Lab
from tests.broker.gate import nightly
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


@pytest.mark.parametrize(
    ("membership", "strategy"),
    [("streams", "incremental"), nightly("broker", "range")],
)
async def test_an_event_that_blocks_every_owner_is_its_own_failure(
    lab: Lab, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, membership: str, strategy: str
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

    settings: dict[str, Any] = {**QUICK, "strategy": strategy, "error_policy": DEAD_LETTER, "membership": membership}
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
    lines = [line.getMessage() for line in caplog.records]
    lost = sum("this owner is not counted: it has lost its membership" in line for line in lines)  # on a busy machine
    assert met == [bad] * (2 + lost)
    assert await lab.totals() == [("a", 1), ("b", 1), ("c", 1), ("d", 1)]
    ((_, letter),) = await lab.dead_letters()
    assert (letter["error"], letter["offset"]) == ("HandlerBlocked", "2")
    assert "register it with blocking=True" in letter["message"]
    said = [line.getMessage() for line in caplog.records if line.levelname == "ERROR" and bad in line.getMessage()]
    assert len(said) == 2 + lost
    assert "owner number 1" in said[0]
    assert "owner number 2" in said[-1]
    with contextlib.closing(GroupQuestions(lab.bootstrap, PLAINTEXT)) as questions:
        view = await asyncio.to_thread(questions.describe_group, lab.group, 10.0)
    assert list(view.committed) == [lab.topic], "a note is no position"
    await lab.check_settled()
