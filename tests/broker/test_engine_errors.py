"""Error policies over a kill. All kinds of handlers, failures and policies: ``tests/unit/test_driver_handlers.py``;
that its answers are a broker's: ``test_two_back_ends.py``."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from streams import DEAD_LETTER, EventContext, EventSource
from tests.broker.engine_kit import PATIENCE, Lab, Running
from tests.broker.gate import nightly
from tests.vocabulary import Added, Totals, tell_total

pytestmark = [pytest.mark.broker, pytest.mark.asyncio, pytest.mark.timeout(180)]


def keeping(lab: Lab) -> EventSource[Totals]:
    """A source that tells totals, and fails after that."""
    source = lab.source()

    def work(ctx: EventContext[Totals], event: Added) -> None:
        tell_total(ctx, event, lab.output)
        if event.deed:
            raise ValueError("no")

    source.register_event_type(Added, work, on_error=DEAD_LETTER)
    return source


PROGRAM = """
import asyncio, os, sys
from streams import *
from streams.testing.faults import FaultPlan, consume_with_faults
from tests.broker.engine_kit import Lab
from tests.vocabulary import Added, TOTALS, Total

lab = Lab(sys.argv[1], sys.argv[2])
source = EventSource(lab.config(instance_id="process", session_timeout_seconds=2, transaction_timeout_seconds=1.5,
                                heartbeat_interval_seconds=0.3), TOTALS)
policy = Retry(attempts=1, then=ErrorResponse[sys.argv[3]])

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


async def ended(lab: Lab, response: str, fault: str = "") -> tuple[int, str]:
    """A process with this policy: its exit code, and what it says."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, lab.bootstrap, lab.group.removesuffix("group"), response],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "KES_FAULT": fault},
        stderr=subprocess.PIPE,
    )
    try:
        _, errors = await asyncio.to_thread(process.communicate, timeout=3 * PATIENCE)
    finally:
        process.kill()
        process.wait(PATIENCE)
    return process.returncode, errors.decode()


@pytest.mark.parametrize(
    ("response", "fault"),
    [
        ("FATALLY_EXIT", ""),
        nightly("DEAD_LETTER", "flush.after:1"),
        ("DEAD_LETTER", "commit.before:1"),
        nightly("DEAD_LETTER", "commit.after:1"),
    ],
)
async def test_dead_letters_are_exactly_once_over_a_kill(lab: Lab, response: str, fault: str) -> None:
    """Of the process itself (exit code 70, on the spot), and of any other: nothing half-done is seen."""
    await lab.create()
    await lab.add("first")
    await lab.add("bad", deed="raise")
    await lab.add("third")
    code, errors = await ended(lab, response, fault)
    assert code == (-9 if fault else 70), errors
    assert fault or f"{lab.topic}[0]@1" in errors
    async with Running(keeping(lab)) as run:
        await run.until_handled(3)
    assert [facts["offset"] for _, facts in await lab.dead_letters()] == ["1"]
    assert await lab.totals() == [("first", 1), ("third", 1)]
    assert await lab.committed() == {0: 3}
    await lab.check_settled(lab.output, lab.changelog, lab.dead_letter_topic)
