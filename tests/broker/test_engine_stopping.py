"""Starts without a broker, stops at any moment, one name for two sources, Ctrl-C: against a real broker."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from streams import SourceState
from tests.broker.engine_kit import Lab, handle, source_of, until
from tests.broker.gate import gate

pytestmark = [pytest.mark.broker, pytest.mark.asyncio, pytest.mark.timeout(90)]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


async def test_stop_while_waiting_for_the_broker(topic_prefix: str) -> None:
    lab = Lab(f"127.0.0.1:{free_port()}", topic_prefix)
    source = source_of(lab)
    task = asyncio.create_task(source.consume_events())
    await until(lambda: source.state is SourceState.STARTING, "it is starting")
    await asyncio.sleep(0.5)
    began = time.monotonic()
    await source.stop()
    await task
    assert time.monotonic() - began < 2
    assert source.state is SourceState.STOPPED


async def test_stop_at_every_moment_of_the_start(lab: Lab) -> None:
    """Also when it was told to before it had begun, and in the middle of a take-over: quick, and without an error."""
    await lab.create()
    await handle(lab, "a", until_offset=1)
    for delay in (0.0, 0.02, 0.1, 0.3):
        source = source_of(lab)
        task = asyncio.create_task(source.consume_events())
        await asyncio.sleep(delay)
        began = time.monotonic()
        if delay == 0.1:
            source.stop_now()
            await source.wait_stopped()
        else:
            await source.stop()
        await asyncio.wait_for(task, 10)
        assert time.monotonic() - began < 6
    await handle(lab, "b", until_offset=2)
    assert await lab.counts() == {"a": 1, "b": 1}
    await lab.check_settled(lab.topic, lab.changelog)


PROGRAM = """
import asyncio, sys, time
from tests.broker.engine_kit import Lab
from tests.vocabulary import Added, TOTALS
from streams import EventSource
from streams.testing.faults import FaultPlan

lab = Lab(sys.argv[1], sys.argv[2])

class Slow:
    def __init__(self, partition):
        self.table = TOTALS(partition)
    def receive_change(self, change):
        print("restoring", flush=True)
        time.sleep(0.01)
        self.table.receive_change(change)
    def __getattr__(self, name):
        return getattr(self.table, name)
    def begin(self, journal): self.table.begin(journal)
    def end(self): self.table.end()
    def undo(self, journal): self.table.undo(journal)
    def revoked(self): self.table.revoked()

source = EventSource(lab.config(instance_id="process"), Slow if sys.argv[3] == "restore" else TOTALS)

@source.register_event_type(Added)
def handler(ctx, event):
    if ctx.offset % 50 == 0:
        print("handling", flush=True)
    ctx.store.put(event.name, ctx.store.get(event.name, 0) + event.amount)

source.run()
"""


@pytest.mark.parametrize("moment", gate(["restore", "commit"], "commit"))
async def test_ctrl_c(lab: Lab, topic_prefix: str, moment: str) -> None:
    """SIGINT while it restores, and while it commits: exit code 0 within seconds, nothing lost, nothing twice."""
    await lab.create()
    names = [f"n{number % 300}" for number in range(600)]
    if moment == "restore":
        await handle(lab, *names, until_offset=600)
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", PROGRAM, lab.bootstrap, topic_prefix, moment],
        cwd=Path(__file__).parents[2],
        env=os.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        if moment == "commit":
            load = asyncio.create_task(lab.add(*names))
            await load
        await asyncio.to_thread(process.stdout.readline)
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        _, errors = await asyncio.to_thread(process.communicate, timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0, errors.decode()
    assert b"Traceback" not in errors
    assert time.monotonic() - began < 10
    await handle(lab, until_offset=600)
    counts = await lab.counts()
    assert set(counts.values()) == {2}
    assert len(counts) == 300
    await lab.check_settled(lab.topic, lab.changelog)
