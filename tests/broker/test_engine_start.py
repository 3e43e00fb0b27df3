"""Starting and stopping: offsets that do not fit, one name for two sources, no broker, Ctrl-C. Where a partition
starts: ``tests/unit/test_start_offset.py``; what topics must be like: ``tests/unit/test_client_admin.py``."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from streams import SourceState
from streams.errors import OffsetError, RegistrationError
from streams.metrics import Measurement, TransactionSettled
from tests.broker.engine_kit import PATIENCE, Lab, Running, handle, source_of, start_failure, until
from tests.broker.gate import gate
from tests.vocabulary import Total

pytestmark = [pytest.mark.broker, pytest.mark.asyncio, pytest.mark.timeout(90)]


async def test_what_is_too_late_for_a_source_that_runs(lab: Lab) -> None:
    source = source_of(lab)
    created = await source.create_source()
    assert created == [lab.topic, lab.changelog, lab.dead_letter_topic]
    assert await source.create_source() == []
    async with Running(source):
        with pytest.raises(RegistrationError, match="too late"):
            source.register_event_type(Total, lambda ctx, event: None)
        with pytest.raises(RegistrationError, match="too late"):
            source.schedule_interjection(lambda ctx: None, every=1)
        with pytest.raises(RegistrationError, match="running already"):
            await source.consume_events()
        with pytest.raises(RegistrationError, match="running"):
            await source.delete_source()
        assert source.state is SourceState.RUNNING
    assert source.state is SourceState.STOPPED
    async with Running(source):
        assert source.state is SourceState.RUNNING, "one object may run again"
    assert await source.delete_source() == created
    assert set(lab.admin.describe(created).values()) == {None}


# -- offsets that do not fit -------------------------------------------------------------------------------------------


async def make_again(lab: Lab) -> tuple[str, ...]:
    await lab.delete(lab.topic)
    await lab.create(lab.topic)
    await lab.add("x", "y", "z")
    [description] = lab.admin.describe([lab.topic]).values()
    assert description is not None
    return (description.topic_id.translate(str.maketrans("+/", "-_")),)  # the ids are named


async def cut_the_log(lab: Lab) -> tuple[str, ...]:
    """First up to the offset, which is fine, then beyond it."""
    await lab.delete_records(lab.topic, {0: 2})
    await handle(lab, "a", until_offset=3)
    assert await lab.counts() == {"a": 2, "b": 1}
    await lab.add("c", "d", "e")
    await lab.delete_records(lab.topic, {0: 5})
    return "3", "5"


async def lose_the_changelog(lab: Lab) -> tuple[str, ...]:
    """The group has an offset, the state is gone: starting from nothing would be silently wrong."""
    await lab.delete(lab.changelog)
    return (lab.changelog,)


@pytest.mark.parametrize("happens", [make_again, cut_the_log, lose_the_changelog])
async def test_an_offset_that_does_not_fit_is_refused_by_name(
    lab: Lab, happens: Callable[[Lab], Awaitable[tuple[str, ...]]]
) -> None:
    await lab.create()
    await handle(lab, "a", "b", until_offset=2)
    named = await happens(lab)
    before = None if happens is lose_the_changelog else await lab.records(lab.changelog)
    error = await start_failure(source_of(lab))
    assert isinstance(error, OffsetError), repr(error)
    for text in (f"{lab.topic}[0]", *named):
        assert text in str(error)
    assert before is None or await lab.records(lab.changelog) == before, "nothing was touched"


@pytest.mark.parametrize("membership", ["streams", "librdkafka"])
async def test_a_second_process_of_one_name_does_not_disturb_the_first(
    lab: Lab, membership: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It opens no producer before the group has let it in: the first one's would be fenced."""
    await lab.create()
    measured: list[Measurement] = []
    settings = {
        "instance_id": "shop",
        "membership": membership,
        "strategy": "incremental" if membership == "streams" else "range",
    }
    first = source_of(lab, metrics_handler=measured.append, **settings)
    async with Running(first) as run:
        await lab.add("a")
        await run.until_handled(1)
        second = source_of(lab, **settings)
        task = asyncio.create_task(second.consume_events())
        await run.until(lambda: "waiting for it to go" in caplog.text, "the second one finds the first")
        for number in range(2, 8):  # each of its producers has its turn
            await lab.add("a")
            await run.until_handled(number)
        second.stop_now()
        await asyncio.wait_for(task, PATIENCE)
    settled = [measurement for measurement in measured if isinstance(measurement, TransactionSettled)]
    assert len(settled) >= 7
    assert all(it.committed and it.attempts == 1 for it in settled), settled


# -- no broker, and stopping -------------------------------------------------------------------------------------------


async def test_stop_while_waiting_for_the_broker(topic_prefix: str, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{listener.getsockname()[1]}"
    source = source_of(Lab(nobody, topic_prefix))
    task = asyncio.create_task(source.consume_events())
    await until(lambda: nobody in caplog.text, "it says what it waits for")
    assert source.state is SourceState.STARTING
    began = time.monotonic()
    await source.stop()
    await task
    assert time.monotonic() - began < 5
    assert source.state is SourceState.STOPPED


async def test_stop_at_every_moment_of_the_start(lab: Lab) -> None:
    """Also when it was told to before it had begun, and in the middle of a take-over: quick, and without an error."""
    await lab.create()
    await handle(lab, "a", until_offset=1)
    for delay in (0.0, 0.02, 0.1, 0.3):
        source = source_of(lab)
        task = asyncio.create_task(source.consume_events())
        await asyncio.wait([task], timeout=delay)
        if delay == 0.1:
            source.stop_now()
            await source.wait_stopped()
        else:
            await source.stop()
        await asyncio.wait_for(task, 10)
    await handle(lab, "b", until_offset=2)
    assert await lab.counts() == {"a": 1, "b": 1}
    await lab.check_settled(lab.topic, lab.changelog)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(480)
async def test_fifty_starts_and_stops_leave_nothing_behind(lab: Lab) -> None:
    """Clients that were closed end their threads a moment later; some threads are the loop's own."""
    await lab.create()
    process = psutil.Process()
    threads, files = process.num_threads(), process.num_fds()
    for _ in range(50):
        async with Running(source_of(lab)):
            pass
        gc.collect()
    await until(lambda: process.num_threads() <= threads + 10, "no threads are left")
    await until(lambda: process.num_fds() <= files + 10, "no files are left")


PROGRAM = """
import sys, time
from streams import EventSource
from tests.broker.engine_kit import Lab
from tests.vocabulary import Added, TOTALS

lab = Lab(sys.argv[1], sys.argv[2])

def slow(partition):
    table = TOTALS(partition)
    receive = table.receive_change
    def receive_slowly(change):
        print("restoring", flush=True)
        time.sleep(0.01)
        receive(change)
    table.receive_change = receive_slowly
    return table

source = EventSource(lab.config(instance_id="process"), slow if sys.argv[3] == "restore" else TOTALS)

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
            await lab.add(*names)
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
    assert await lab.counts() == {f"n{number}": 2 for number in range(300)}
    await lab.check_settled(lab.topic, lab.changelog)
