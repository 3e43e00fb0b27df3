"""Error policies against a real broker: what each leaves behind in topics, store and offsets. All kinds of handlers,
failures and policies: ``tests/unit/test_driver_handlers.py``."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from streams import (
    DEAD_LETTER,
    SKIP,
    ErrorPolicy,
    EventContext,
    EventSource,
)
from tests.broker.engine_kit import PATIENCE, Lab, Running, own_headers
from tests.broker.gate import gate
from tests.vocabulary import ADDED, Added, Total, Totals, added, register

pytestmark = [pytest.mark.broker, pytest.mark.asyncio, pytest.mark.timeout(180)]


def keep(lab: Lab, ctx: EventContext[Totals], event: Added) -> None:
    """Count, and tell the total; three keys and an output are touched before a deed may go wrong."""
    ctx.store.put("touched", ctx.store.get("touched", 0) + 1)
    total = ctx.store.get(event.name, 0) + event.amount
    ctx.store.put(event.name, total)
    ctx.forward(lab.output, Total(event.name, total), key=event.name)
    if event.deed == "raise":
        ctx.store.delete("first")
        raise ValueError(f"no {event.name}, please")


def keeping(lab: Lab, source: EventSource[Totals], policy: ErrorPolicy, kind: str = "plain") -> list[tuple[str, int]]:
    """Register ``keep``. Returns the list of (name, attempt) that it fills."""
    seen: list[tuple[str, int]] = []

    def work(ctx: EventContext[Totals], event: Added) -> None:
        seen.append((event.name, ctx.attempt))
        keep(lab, ctx, event)

    register(source, work, kind, policy)
    return seen


AFTER = {"touched": 3, "first": 1, "second": 1, "third": 1}
"""The state when "first", "second", "third" were handled, and "bad" left no trace."""


async def test_dead_letter_in_the_same_transaction(lab: Lab) -> None:
    await lab.create()
    await lab.add("first", "second")
    headers = [*ADDED, ("trace", b"\xff\x00"), ("trace", None), ("empty", b"")]
    await lab.send(added("bad", deed="raise"), b"\x00key", headers)
    await lab.add("third")
    source = lab.source()
    keeping(lab, source, DEAD_LETTER, "async")
    async with Running(source) as run:
        await run.until_committed(4)
    [(letter, facts)] = await lab.dead_letters()
    assert (letter.key, letter.value) == (b"\x00key", added("bad", deed="raise"))
    assert own_headers(letter) == headers
    assert facts["error"] == "ValueError"
    assert facts["message"] == "no bad, please"
    assert (facts["topic"], facts["partition"], facts["offset"]) == (lab.topic, "0", "2")
    assert facts["attempts"] == "1"
    assert abs(time.time() * 1000 - int(facts["failed_at_ms"])) < 60_000
    assert await lab.totals() == [("first", 1), ("second", 1), ("third", 1)]
    assert await lab.counts() == AFTER
    assert await lab.committed() == {0: 4}
    await lab.check_settled()


PROGRAM = """
import os, sys
from streams import *
from streams.testing.faults import FaultPlan, consume_with_faults
from tests.broker.engine_kit import Lab
from tests.vocabulary import Added, TOTALS, Total
import asyncio

lab = Lab(sys.argv[1], sys.argv[2])
source = EventSource(lab.config(instance_id="process", session_timeout_seconds=2, transaction_timeout_seconds=1.5,
                                heartbeat_interval_seconds=0.3), TOTALS)
policy = ErrorPolicy(then=ErrorResponse[sys.argv[3]])

@source.register_event_type(Added, on_error=policy)
def handler(ctx, event):
    ctx.store.put(event.name, ctx.store.get(event.name, 0) + 1)
    ctx.forward(lab.output, Total(event.name, 1), key=event.name)
    if event.deed:
        raise ValueError("no")

if os.environ.get("KES_FAULT"):
    asyncio.run(consume_with_faults(source, FaultPlan.from_environment()))
else:
    source.run()
"""


def start_program(lab: Lab, prefix: str, response: str, **environment: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, lab.bootstrap, prefix, response],
        cwd=Path(__file__).parents[2],
        env={**os.environ, **environment},
        stderr=subprocess.PIPE,
    )


async def finish(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    try:
        _, errors = await asyncio.to_thread(process.communicate, timeout=3 * PATIENCE)
    finally:
        process.kill()
        process.wait(PATIENCE)
    return process.returncode, errors.decode()


async def test_fatally_exit(lab: Lab, topic_prefix: str) -> None:
    """Exit code 70, on the spot; the record is not passed, and nothing half-done is seen."""
    await lab.create()
    await lab.add("first")
    await lab.add("bad", deed="raise")
    code, errors = await finish(start_program(lab, topic_prefix, "FATALLY_EXIT"))
    assert code == 70, errors
    assert f"{lab.topic}[0]@1" in errors
    source = lab.source()
    keeping(lab, source, SKIP)
    async with Running(source) as run:
        await run.until_handled(2)
    assert await lab.totals() == [("first", 1)]
    assert await lab.committed() == {0: 2}


@pytest.mark.parametrize("point", gate(["flush.after:1", "commit.before:1", "commit.after:1"], "commit.before:1"))
async def test_dead_letters_are_exactly_once_over_a_kill(lab: Lab, topic_prefix: str, point: str) -> None:
    await lab.create()
    await lab.add("first")
    await lab.add("bad", deed="raise")
    await lab.add("third")
    code, errors = await finish(start_program(lab, topic_prefix, "DEAD_LETTER", KES_FAULT=point))
    assert code == -9, errors
    source = lab.source(session_timeout_seconds=2, transaction_timeout_seconds=1.5)
    keeping(lab, source, DEAD_LETTER)
    async with Running(source) as run:
        await run.until_handled(3)
    assert [facts["offset"] for _, facts in await lab.dead_letters()] == ["1"]
    assert await lab.totals() == [("first", 1), ("third", 1)]
    assert await lab.committed() == {0: 3}
    await lab.check_settled(lab.output, lab.changelog, lab.dead_letter_topic)
