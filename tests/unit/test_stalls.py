"""Restores that stand still, and when the broker is asked what holds them up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from streams.runtime.ownership.takeover import Stalls


async def test_take_overs_that_stand_still_at_the_same_time_are_both_asked_about() -> None:
    now, asked = 0.0, list[list[int]]()

    async def call(question: Any, topic: str, partitions: list[int], deadline: float) -> list[Any]:
        asked.append(partitions)
        return []

    engine: Any = SimpleNamespace(
        config=SimpleNamespace(transaction_timeout_seconds=10.0, changelog="log"),
        thread=lambda name: SimpleNamespace(call=call),
        takeover_client=SimpleNamespace(open_transactions=None),
        now=lambda: now,
    )
    stalls = Stalls(engine)
    for _ in range(4):
        since, now = now, now + 5.0
        await stalls.look({0: 7}, since)
        await stalls.look({1: 9}, since)
    assert asked == [[0], [1]] * 2, "once the time of a transaction is over"
