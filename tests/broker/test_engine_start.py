"""Starting and stopping: one name for two sources, no broker. Where a partition starts: ``test_engine_topics.py`` and
``tests/unit/test_start_offset.py``; what topics must be like: ``tests/unit/test_client_admin.py``; signals:
``test_battery_members.py``."""

from __future__ import annotations

import asyncio
import gc
import socket
import time

import psutil
import pytest

from streams import SourceState
from streams.errors import RegistrationError
from streams.metrics import Measurement, TransactionSettled
from tests.broker.engine_kit import PATIENCE, Lab, Running, handle, source_of, until
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


@pytest.mark.parametrize("membership", ["streams", "broker"])
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
    assert time.monotonic() - began < PATIENCE / 3
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
        await asyncio.wait_for(task, PATIENCE)
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
