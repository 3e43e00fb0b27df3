"""``kes offsets start`` on a real broker: a source begins where it is told to, or where another program has stopped."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka import TopicPartition as ConsumerPartition

from streams.kafka.questions.group_checks import GroupChecks
from streams.runtime.changelog import BEGIN_KEY, decode_begin
from tests.broker.engine_kit import Lab, Running, start_failure
from tests.unit.waiting import stays, wait_until

pytestmark = [pytest.mark.broker, pytest.mark.asyncio, pytest.mark.timeout(180)]

PARTITIONS = 2
Kes = Callable[..., tuple[int, Any, str]]
NAMES = "abcdefghij"
PROGRAM = Path(__file__).with_name("start_program.py")


@contextlib.contextmanager
def plain(lab: Lab, group: str, **settings: Any) -> Iterator[Consumer]:
    """A consumer that somebody wrote by hand."""
    consumer = Consumer(
        {
            "bootstrap.servers": lab.bootstrap,
            "group.id": group,
            "client.id": "by-hand",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            **settings,
        }
    )
    try:
        yield consumer
    finally:
        consumer.close()


def handle(lab: Lab, consumer: Consumer, *numbers: int) -> None:
    """Handle so many records of each partition, and commit that."""
    consumer.subscribe([lab.topic])
    places = [ConsumerPartition(lab.topic, number, offset) for number, offset in enumerate(numbers)]
    wait_until(lambda: consumer.poll(0.1) is not None or bool(consumer.assignment()), "it has joined")
    consumer.commit(offsets=places, asynchronous=False)


async def test_a_source_goes_on_where_a_plain_consumer_of_its_group_has_stopped(lab: Lab, kes: Kes) -> None:
    """At 6 of 10, with one command; and what is refused on the way."""
    await lab.create()
    await lab.add(*NAMES)
    source = lab.telling()

    async def start(*words: str, behind: int = 2) -> tuple[int, Any, str]:
        code, answer, err = await asyncio.to_thread(kes, source, "offsets", "start", *words, behind=behind)
        return code, answer, " ".join(err.split())

    with plain(lab, lab.group) as consumer:
        await asyncio.to_thread(handle, lab, consumer, 6, 0)
        code, _, err = await start("--from-group", lab.group, "--yes")
        assert (code, "is alive (client id 'by-hand', host " in err) == (1, True), err
        assert f"topics {lab.topic})" in err
    assert f"kes offsets start MODULE:SOURCE --from-group {lab.group}" in str(await start_failure(source))
    code, _, err = await start("--at", "earliest", "--yes")
    assert (code, f"--from-group {lab.group}" in err) == (1, True), err
    code, answer, err = await start("--from-group", lab.group, "--yes")
    assert (code, answer and answer["written"]) == (0, True), err
    assert [(row["offset"], row["place"]) for row in answer["inputs"][lab.topic]] == [
        (6, f"group {lab.group}"),
        (0, f"group {lab.group}"),
    ]
    async with Running(source) as running:
        await running.until_handled(10, 0)
        code, answer, err = await start("--from-group", lab.group, "--yes")  # as a deployment repeats it
        assert (code, answer and answer["written"]) == (0, False), err
    assert sorted(name for name, _ in await lab.totals()) == list("ghij")
    assert await lab.counts() == dict.fromkeys("ghij", 1)
    code, _, err = await start("--at", "0@2", "--at", "earliest", "--yes")
    assert (code, "has begun elsewhere (adopt: " in err) == (1, True), err
    found = (await asyncio.to_thread(kes, source, "state", "ls"))[1]["partitions"]
    assert [row["begun"] for row in found] == [
        f"adopt: {lab.topic} at {offset} (group {lab.group})" for offset in (6, 0)
    ]
    await lab.check_settled(lab.topic, lab.output, lab.changelog)


@pytest.mark.nightly
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
async def test_another_group_is_taken_over_with_its_stable_offsets(lab: Lab, kes: Kes, protocol: str) -> None:
    """The offsets of both groups are in one transaction. What a transaction has not decided is waited for."""
    await lab.create()
    await lab.add(*NAMES)
    source, old = lab.telling(), f"{lab.group}-old"

    async def start(*words: str) -> tuple[int, Any, str]:
        words = ("offsets", "start", "--from-group", old, "--yes", *words)
        code, answer, err = await asyncio.to_thread(kes, source, *words)
        return code, answer, " ".join(err.split())

    with plain(lab, old, **{"group.protocol": protocol}) as consumer:
        await asyncio.to_thread(handle, lab, consumer, 3)
        code, _, err = await start()
        assert (code, f"group {old} is alive (client id 'by-hand'" in err) == (1, True), err
        # Its successor works in transactions, and has one open.
        producer = Producer({"bootstrap.servers": lab.bootstrap, "transactional.id": f"{old}-1"})
        await asyncio.to_thread(producer.init_transactions)
        producer.begin_transaction()
        place = [ConsumerPartition(lab.topic, 0, 6)]
        metadata = consumer.consumer_group_metadata()
        await asyncio.to_thread(producer.send_offsets_to_transaction, place, metadata)
    code, _, err = await start("--timeout", "3")
    assert (code, f"reading the offsets of group {old}" in err) == (1, True), err
    await asyncio.to_thread(producer.commit_transaction)
    code, _, err = await start()
    assert (code, f"{lab.topic}[1] has no place" in err) == (1, True), err
    hold = GroupChecks.hold_of

    def gone_on(checks: GroupChecks, *arguments: Any) -> None:
        hold(checks, *arguments)
        with plain(lab, old, **{"group.protocol": protocol}) as consumer:
            handle(lab, consumer, 7)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupChecks, "hold_of", gone_on)
        code, _, err = await start("--missing", "earliest")
        assert (code, f"group {old} has gone on in {lab.topic} meanwhile" in err) == (1, True), err
    code, answer, err = await start("--missing", "earliest")
    assert code == 0, err
    assert [row["offset"] for row in answer["inputs"][lab.topic]] == [7, 0]
    async with Running(source) as running:
        await running.until_handled(10, 0)
    assert sorted(name for name, _ in await lab.totals()) == list("hij")
    await lab.check_settled(lab.topic, lab.output, lab.changelog)
    with plain(lab, old, **{"group.protocol": protocol}) as consumer:
        await asyncio.to_thread(handle, lab, consumer, 7)
        _, answer, err = await asyncio.to_thread(kes, source, "doctor", behind=1)
    [said] = [row["text"] for row in answer["findings"] if "members again" in row["text"]]
    assert f"{old} has members again (client id 'by-hand'" in said, err


@pytest.mark.nightly
async def test_a_member_that_starts_meanwhile_waits_and_begins_there(lab: Lab, kes: Kes) -> None:
    """It joins after the last look at the group, and before the commit."""
    await lab.create()
    await lab.add(*NAMES)
    source, loop = lab.telling(), asyncio.get_running_loop()
    await source.create_source()
    first_record, started, looks = GroupChecks.first_record, [], []

    async def begin() -> Running:
        running = Running(lab.telling(instance_id="other"), active=0)
        await running.__aenter__()
        await running.until(lambda: running.source.member_id, "it has joined")
        return running

    def looked(checks: GroupChecks, topic: str) -> Any:
        looks.append(topic)
        if len(looks) == 2:
            started.append(asyncio.run_coroutine_threadsafe(begin(), loop).result(60))
            stays(lambda: not started[0].active, 1.0, "it waits")
        return first_record(checks, topic)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupChecks, "first_record", looked)
        words = ("offsets", "start", "--at", "0@8", "--at", "latest", "--yes")
        code, answer, err = await asyncio.to_thread(kes, source, *words)
    [running] = started
    assert (code, answer and answer["written"]) == (0, True), err
    await running.until_handled(10, 0)
    assert sorted(name for name, _ in await lab.totals()) == list("ij")
    await running.__aexit__(None, None, None)


async def killed(lab: Lab, group: str, step: str, *words: str, command: str = "offsets start") -> Any:
    """Run the command in a process that dies at a step; its answer, if it came to one."""
    program = [sys.executable, str(PROGRAM), lab.bootstrap, group, lab.topic, step, command, *words]
    ended = await asyncio.to_thread(subprocess.run, program, capture_output=True, text=True, timeout=60)
    assert ended.returncode in (0, -signal.SIGKILL), ended.stderr
    return json.loads(ended.stdout) if ended.returncode == 0 else None


@pytest.mark.nightly
@pytest.mark.timeout(400)
async def test_killed_at_any_step_it_has_begun_or_not_at_all(lab: Lab) -> None:
    """The next run ends what the killed one has left open, of both groups."""
    await lab.create()
    await lab.add(*NAMES)
    old = f"{lab.group}-old"
    with plain(lab, old) as consumer:
        await asyncio.to_thread(handle, lab, consumer, 6, 0)
    calls = [f"{when} {name}" for name in ("open", "create", "hold_of", "hold", "send") for when in ("before", "after")]
    for step in (*calls, "before commit"):
        assert await killed(lab, lab.group, step, "--from-group", old) is None, step
    assert (await killed(lab, lab.group, "", "--from-group", old))["written"]
    assert await killed(lab, lab.group, "after commit", "--from-group", old) is not None, "it has begun by now"
    for group, ms in [(f"{lab.group}-{ms}", ms) for ms in (0, 1, 2, 4, 8, 100)]:
        await killed(lab, group, f"within commit {ms}", "--from-group", old)
        await killed(lab, group, "", "--from-group", old)
        began = [record for record in await lab.records(f"{group}.{lab.topic}.changelog") if record.key == BEGIN_KEY]
        assert [decode_begin(record).at for record in began] == [{lab.topic: 6}, {lab.topic: 0}]
    source = lab.telling()
    async with Running(source) as running:
        await running.until_handled(10, 0)
    assert sorted(name for name, _ in await lab.totals()) == list("ghij")
    await lab.check_settled(lab.topic, lab.output, lab.changelog)
