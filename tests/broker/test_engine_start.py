"""Starting and stopping: registration, topics, offsets and changelogs that are not as they should be, and no broker."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from streams import SKIP, EventContext, EventSource, SourceState
from streams.broker import KafkaBroker
from streams.errors import OffsetError, RegistrationError, TopicError
from streams.metrics import Measurement, OffsetMismatch
from streams.runtime.transaction_pool import OFFSET_KEY
from streams.testing.fixtures import BrokerAddress, OwnBroker
from tests.broker.engine_kit import Added, Lab, Running, Total, Totals, start_failure, until

pytestmark = [pytest.mark.broker, pytest.mark.asyncio, pytest.mark.timeout(90)]


@pytest.fixture
def lab(kafka_broker: BrokerAddress, topic_prefix: str) -> Lab:
    return Lab(kafka_broker.bootstrap_servers, topic_prefix)


def count(ctx: EventContext[Totals], event: Added) -> None:
    ctx.store.put(event.name, ctx.store.get(event.name, 0) + event.amount)


def source_of(lab: Lab, **settings: Any) -> EventSource[Totals]:
    source = lab.source(**settings)
    source.register_event_type(Added, count)
    return source


async def handle(lab: Lab, *names: str, until_offset: int, **settings: Any) -> list[Measurement]:
    """Produce, and let a source handle it. Returns what it measured."""
    measured: list[Measurement] = []
    if names:
        await lab.add(*names)
    source = source_of(lab, metrics_handler=measured.append, **settings)
    async with Running(source) as run:
        await run.until_handled(until_offset)
    return measured


# -- registration ------------------------------------------------------------------------------------------------------


async def test_registration(lab: Lab) -> None:
    source = lab.source()
    source.register_event_type(Added, count)
    with pytest.raises(RegistrationError, match="'Added' has a handler already"):
        source.register_event_type(Added, count)
    with pytest.raises(RegistrationError, match="event"):
        source.register_event_type(int, lambda ctx, event: None)
    source.register_default_handler(lambda ctx, value: None)
    with pytest.raises(RegistrationError, match="default handler"):
        source.register_default_handler(lambda ctx, value: None)

    async def patient(ctx: EventContext[Totals], event: Total) -> None: ...

    with pytest.raises(RegistrationError, match="async"):
        source.register_event_type(Total, patient, blocking=True)
    await lab.create()
    async with Running(source):
        with pytest.raises(RegistrationError, match="too late"):
            source.register_event_type(Total, lambda ctx, event: None)
        with pytest.raises(RegistrationError, match="running already"):
            await source.consume_events()
        with pytest.raises(RegistrationError, match="running"):
            await source.delete_source()
        assert source.state is SourceState.RUNNING
    assert source.state is SourceState.STOPPED
    async with Running(source):
        assert source.state is SourceState.RUNNING, "one object may run again"


async def test_create_and_delete_source(lab: Lab) -> None:
    source = lab.source()
    names = [lab.topic, lab.changelog, lab.dead_letter_topic]
    assert await source.create_source() == names
    assert await source.create_source() == []
    described = lab.admin.describe(names)
    assert described[lab.changelog].configs["cleanup.policy"] == "compact"  # type: ignore[union-attr]
    assert await source.delete_source() == names
    assert set(lab.admin.describe(names).values()) == {None}


# -- topics that are not as they should be -----------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["source", "changelog", "dead letters"])
async def test_another_partition_count(lab: Lab, wrong: str) -> None:
    name = {"source": lab.topic, "changelog": lab.changelog, "dead letters": lab.dead_letter_topic}[wrong]
    configs = {"cleanup_policy": "compact"} if wrong == "changelog" else {}
    await lab.create(name, partitions=3, **configs)
    error = await start_failure(source_of(lab))
    assert isinstance(error, TopicError), repr(error)
    assert name in str(error)
    assert "3" in str(error)


async def test_a_changelog_that_is_not_compacted(lab: Lab) -> None:
    await lab.create(lab.changelog, cleanup_policy="delete")
    error = await start_failure(source_of(lab))
    assert isinstance(error, TopicError), repr(error)
    assert lab.changelog in str(error)
    assert "compact" in str(error)


# -- changelogs with strange contents ----------------------------------------------------------------------------------


async def test_foreign_records_and_tombstones(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    """A record without key is ignored with a word; tombstones of keys that never were are no harm, a storm neither."""
    await lab.create()
    await handle(lab, "a", "b", until_offset=2)
    await lab.alter(lab.changelog, "cleanup.policy", "delete")  # while it is compacted, the broker wants keys
    await lab.send(b"who am I?", None, None, topic=lab.changelog)
    await lab.flush()
    await lab.alter(lab.changelog, "cleanup.policy", "compact")
    for number in range(2_000):
        await lab.send(None, f"never-{number % 50}".encode(), None, topic=lab.changelog)
    await lab.send(None, b"b", None, topic=lab.changelog)
    await lab.send(None, b"\xff\xffkes.something-newer", None, topic=lab.changelog)
    await lab.flush()
    await handle(lab, "a", "b", until_offset=4)
    assert await lab.counts() == {"a": 2, "b": 1}
    assert "without key" in caplog.text
    assert f"{lab.changelog}[0]@" in caplog.text


@pytest.mark.parametrize("value", [b"{}", b"rubbish", b'{"offset":"1"}', b"", b"[" * 10_000])
async def test_an_offset_record_that_cannot_be_read(lab: Lab, value: bytes) -> None:
    await lab.create()
    await lab.create(lab.changelog, cleanup_policy="compact")
    await lab.send(value, OFFSET_KEY, None, topic=lab.changelog)
    await lab.flush()
    error = await start_failure(source_of(lab))
    assert isinstance(error, OffsetError), repr(error)
    assert f"{lab.changelog}[0]@0" in str(error)


async def test_a_newer_offset_record_with_more_fields(lab: Lab) -> None:
    """A later version may say more; what is known is enough."""
    await lab.create()
    await lab.create(lab.changelog, cleanup_policy="compact")
    await lab.add("passed", "taken")
    newer = b'{"offset":1,"writer":"w","serial":1,"generation":1,"more":{"x":[1]}}'
    await lab.send(newer, OFFSET_KEY, None, topic=lab.changelog)
    await lab.flush()
    await handle(lab, until_offset=2)
    assert await lab.counts() == {"taken": 1}


async def test_a_value_in_the_changelog_that_cannot_be_decoded(lab: Lab) -> None:
    """It fails the events that read it (their policy decides), and no others."""
    await lab.create()
    await handle(lab, "a", until_offset=1)
    await lab.send(b"rubbish", b"a", None, topic=lab.changelog)
    await lab.add("a", "b")
    await handle(lab, until_offset=3, error_policy=SKIP)
    assert (await lab.state())[b"a"] == b"rubbish"
    assert (await lab.state())[b"b"] != b"rubbish"


async def test_gaps_of_aborted_transactions(lab: Lab) -> None:
    """A changelog whose tail is nothing but aborted records and markers: the position counts."""
    from confluent_kafka import Producer

    await lab.create()
    await handle(lab, "a", until_offset=1)

    def abort() -> None:
        producer = Producer({"bootstrap.servers": lab.bootstrap, "transactional.id": lab.group, "log_level": 0})
        producer.init_transactions(20)
        for _ in range(3):
            producer.begin_transaction()
            producer.produce(lab.changelog, b"nonsense", b"a", partition=0)
            producer.produce(lab.changelog, b"nonsense", OFFSET_KEY, partition=0)
            producer.flush(20)
            producer.abort_transaction(20)

    await asyncio.to_thread(abort)
    await handle(lab, "a", until_offset=2)
    assert await lab.counts() == {"a": 2}


# -- offsets that do not fit -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("reset", "wanted"), [("earliest", {"a": 1, "b": 1}), ("latest", {"b": 1}), ("error", None)])
async def test_where_a_new_partition_starts(lab: Lab, reset: str, wanted: dict[str, int] | None) -> None:
    await lab.create()
    await lab.add("a")
    source = source_of(lab, auto_offset_reset=reset)
    if wanted is None:
        error = await start_failure(source)
        assert isinstance(error, OffsetError), repr(error)
        assert f"{lab.topic}[0]" in str(error)
        assert "auto_offset_reset" in str(error)
        return
    async with Running(source) as run:
        await lab.add("b")
        await run.until_handled(2)
    assert await lab.counts() == wanted


async def test_latest_that_was_never_committed_starts_anew(lab: Lab) -> None:
    """And once something is committed the setting has no effect any more."""
    await lab.create()
    await handle(lab, "a", until_offset=1)
    await lab.add("b")
    await handle(lab, until_offset=2, auto_offset_reset="latest")
    await handle(lab, "c", until_offset=3, auto_offset_reset="error")
    assert await lab.counts() == {"a": 1, "b": 1, "c": 1}


async def test_source_topic_made_again(lab: Lab) -> None:
    await lab.create()
    await handle(lab, "a", "b", until_offset=2)
    await lab.delete(lab.topic)
    await lab.create(lab.topic)
    await lab.add("x", "y", "z")
    error = await start_failure(source_of(lab))
    assert isinstance(error, OffsetError), repr(error)
    [description] = lab.admin.describe([lab.topic]).values()
    assert description is not None
    assert f"{lab.topic}[0]" in str(error)
    assert description.topic_id.translate(str.maketrans("+/", "-_")) in str(error), "the ids are named"
    assert await lab.counts() == {"a": 1, "b": 1}, "nothing was touched"


async def test_log_cut_below_the_offset(lab: Lab) -> None:
    await lab.create()
    await handle(lab, "a", "b", until_offset=2)
    await lab.add("c", "d", "e")
    await lab.delete_records(lab.topic, {0: 4})
    error = await start_failure(source_of(lab))
    assert isinstance(error, OffsetError), repr(error)
    assert f"{lab.topic}[0]" in str(error)
    assert "2" in str(error)
    assert "4" in str(error)
    assert await lab.committed() == {0: 2}


async def test_log_cut_up_to_the_offset_is_fine(lab: Lab) -> None:
    await lab.create()
    await handle(lab, "a", "b", until_offset=2)
    await lab.delete_records(lab.topic, {0: 2})
    await handle(lab, "a", until_offset=3)
    assert await lab.counts() == {"a": 2, "b": 1}


async def test_offset_beyond_the_end(lab: Lab) -> None:
    await lab.create()
    await lab.create(lab.changelog, cleanup_policy="compact")
    await lab.add("a")
    record = b'{"offset":7,"writer":"w","serial":1,"generation":1,"source_id":""}'
    await lab.send(record, OFFSET_KEY, None, topic=lab.changelog)
    await lab.flush()
    error = await start_failure(source_of(lab))
    assert isinstance(error, OffsetError), repr(error)
    assert f"{lab.topic}[0]" in str(error)
    assert "7" in str(error)


async def test_changelog_gone(lab: Lab) -> None:
    """The group has an offset, the state is gone: starting from nothing would be silently wrong."""
    await lab.create()
    await handle(lab, "a", until_offset=1)
    await lab.delete(lab.changelog)
    error = await start_failure(source_of(lab))
    assert isinstance(error, OffsetError), repr(error)
    assert f"{lab.topic}[0]" in str(error)
    assert lab.changelog in str(error)


async def test_group_offset_gone_or_moved(lab: Lab) -> None:
    """The changelog wins, and the difference is reported."""
    await lab.create()
    await lab.create(lab.changelog, cleanup_policy="compact")
    await lab.add("passed", "taken")
    record = b'{"offset":1,"writer":"w","serial":1,"generation":1,"source_id":""}'
    await lab.send(record, OFFSET_KEY, None, topic=lab.changelog)
    await lab.flush()
    measured = await handle(lab, until_offset=2)
    assert OffsetMismatch(0, -1, 1) in measured
    assert await lab.counts() == {"taken": 1}


# -- no broker, and stopping -------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@pytest.mark.slow
async def test_no_broker_until_later(
    own_broker: OwnBroker, topic_prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Says what is missing, backs off, and starts when the broker comes."""
    broker: KafkaBroker = own_broker()
    address = broker.bootstrap_servers
    await asyncio.to_thread(broker.kill)  # it keeps its port
    lab = Lab(address, topic_prefix)
    source = source_of(lab)
    task = asyncio.create_task(source.consume_events())
    try:
        await until(lambda: "waiting for the broker" in caplog.text, "it says that it waits")
        assert address in caplog.text, "the address is named"
        assert not task.done()
        assert source.state is SourceState.STARTING
        await asyncio.to_thread(broker.restart)
        await until(lambda: [p.state for p in source.statistics().partitions] == ["active"], "it starts by itself")
        await source.stop()
        await task
    finally:
        task.cancel()
        await asyncio.wait([task])


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


async def test_two_sources_with_one_instance_id(lab: Lab) -> None:
    """They fence each other's producers; whatever comes of it, every event counts once."""
    await lab.create()
    await lab.add(*["a"] * 50)
    settings = {"instance_id": "same", "recovery_timeout_seconds": 5.0}
    first, second = source_of(lab, **settings), source_of(lab, **settings)
    tasks = [asyncio.create_task(source.consume_events()) for source in (first, second)]
    try:
        for _ in range(5):
            await lab.add(*["a"] * 20)
            await asyncio.sleep(0.2)
    finally:
        for source in (first, second):
            source.stop_now()
        await asyncio.wait(tasks, timeout=30)
        errors = [task.exception() for task in tasks if task.done()]
    print(errors)
    assert len(errors) == 2, "both stop when they are told to"
    await handle(lab, until_offset=150)
    assert await lab.counts() == {"a": 150}
    await lab.check_settled(lab.topic, lab.changelog)


PROGRAM = """
import asyncio, sys, time
from tests.broker.engine_kit import Added, Lab, TOTALS
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


@pytest.mark.parametrize("moment", ["restore", "commit"])
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
