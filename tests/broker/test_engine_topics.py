"""Topics that are deleted and created again under a running member, and a group's offset that is ahead."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from streams import DEAD_LETTER, EventSource
from streams.errors import OffsetError, TopicError, TopicReplaced
from streams.records import TYPE_HEADER
from streams.runtime.changelog import OFFSET_KEY, decode_offset
from streams.runtime.connections import KafkaConnections
from streams.runtime.system import Environment
from tests.broker.engine_kit import Lab, Running, source_of, start_failure
from tests.vocabulary import Ring, Totals

pytestmark = [pytest.mark.broker, pytest.mark.asyncio, pytest.mark.timeout(90)]

PARTITIONS = 2

Kes = Callable[..., tuple[int, Any, str]]


def watchful(lab: Lab) -> EventSource[Totals]:
    """A source that counts, and looks at its topics three times a second."""
    source = source_of(lab)
    environment = Environment(topic_check_seconds=0.3)
    source.consume_events = lambda: source._run.consume(lambda c: KafkaConnections(c), environment)  # type: ignore[method-assign]
    return source


async def topic_id(lab: Lab, name: str) -> str:
    found = await asyncio.to_thread(lab.admin.identity, name)
    assert found is not None
    return found[0].translate(str.maketrans("+/", "-_"))  # as Kafka's tools print it


@pytest.mark.parametrize("kind", ["source", "changelog"])
async def test_a_topic_created_again_stops_a_running_member_by_name(lab: Lab, kind: str) -> None:
    """It is there again, and filled beyond the old offset, within three seconds."""
    await lab.create()
    await lab.add("a", "b")
    await lab.add("c", partition=1)
    async with Running(watchful(lab)) as run:
        await run.until_handled(2, 1)
        topic = lab.topic if kind == "source" else lab.changelog
        before = await topic_id(lab, topic)
        await lab.delete(topic)
        await lab.create(topic, **({} if kind == "source" else {"cleanup_policy": "compact"}))
        now = await topic_id(lab, topic)
        if kind == "source":
            await lab.add("x", "y", "z", "x", "y")
        error = await run.failure()
    assert isinstance(error, TopicReplaced), repr(error)
    for said in (f"{topic}[0]", f"id {before}", f"id {now} now"):
        assert said in str(error)
    if kind == "changelog":
        assert await lab.records(lab.changelog) == [], "nothing is drained into the new one"
    else:
        records = [record for record in await lab.records(lab.changelog) if record.key == OFFSET_KEY]
        assert {decode_offset(record).source_id for record in records} == {before}
    refused = await start_failure(source_of(lab))
    assert isinstance(refused, OffsetError), repr(refused)
    assert f"{lab.topic}[" in str(refused)


async def test_a_declared_output_is_made_by_the_command_and_nothing_is_sent_elsewhere(lab: Lab, kes: Kes) -> None:
    """The stray event comes in the middle of others, and of a transaction."""
    await lab.create(lab.topic)
    source = lab.telling(error_policy=DEAD_LETTER)
    source.output(lab.output, num_partitions=3, configs={"retention.ms": "-1"})
    source.register_event_type(Ring, lambda ctx, ring: ctx.forward(f"{lab.output}s", ring, key=ring.name))
    refused = await start_failure(source)
    assert isinstance(refused, TopicError), repr(refused)
    for said in (f"topic {lab.output} does not exist", "kes topics apply MODULE:SOURCE makes it"):
        assert said in str(refused)
    assert await asyncio.to_thread(lab.admin.identity, lab.changelog) is None, "nothing is made before all is right"
    code, answer, err = await asyncio.to_thread(kes, source, "topics", "apply")
    assert code == 0, err
    assert answer["topics"][-1]["configs"] == {"retention.ms": "-1"}
    await lab.add("a", "a")
    await lab.send(b'{"name":"bell"}', headers=[(TYPE_HEADER, b"Ring")])
    await lab.add("a")
    async with Running(source) as run:
        await run.until_handled(4, 0)
    assert await lab.totals() == [("a", 1), ("a", 2), ("a", 3)]
    [(letter, facts)] = await lab.dead_letters()
    assert (letter.value, facts["offset"]) == (b'{"name":"bell"}', "2")
    assert f"the topic '{lab.output}s' is not declared" in facts["message"]
    await lab.check_settled()
    source = lab.telling()
    source.output(lab.output, num_partitions=2, configs={"retention.ms": "5"})
    refused = await start_failure(source)
    assert isinstance(refused, TopicError), repr(refused)
    for said in ("has 3 partitions, settings say 2", "has retention.ms=-1, settings say 5", "correct source.output"):
        assert said in str(refused)


async def test_a_changelog_that_was_restored_is_accepted_on_purpose(lab: Lab, kes: Kes) -> None:
    await lab.create()
    await lab.add("a", "a", "a")
    async with Running(source_of(lab)) as run:
        await run.until_handled(3, 0)
    backup = await lab.records(lab.changelog)
    await lab.delete(lab.changelog)
    await lab.create(lab.changelog, cleanup_policy="compact")
    producer = Producer({"bootstrap.servers": lab.bootstrap, "enable.idempotence": True})
    for record in backup:
        headers = [(name, content) for name, content in record.headers or ()]
        producer.produce(lab.changelog, record.value, record.key, record.partition, headers=headers)
    assert await asyncio.to_thread(producer.flush, 20) == 0
    refused = await start_failure(source_of(lab))
    assert isinstance(refused, TopicReplaced), repr(refused)
    assert "kes offsets accept MODULE:SOURCE --restored" in str(refused)
    code, answer, err = await asyncio.to_thread(kes, source_of(lab), "offsets", "accept", "--restored", "--yes")
    assert (code, answer["restored"]) == (0, [0]), err
    await lab.add("a")
    async with Running(source_of(lab)) as run:
        await run.until_handled(4, 0)
    assert await lab.counts() == {"a": 4}


async def test_a_group_offset_that_is_ahead_is_accepted_on_purpose(lab: Lab, kes: Kes) -> None:
    def commit() -> None:
        consumer = Consumer({"bootstrap.servers": lab.bootstrap, "group.id": lab.group})
        consumer.commit(offsets=[TopicPartition(lab.topic, 0, 5)], asynchronous=False)
        consumer.close()

    await lab.create()
    await lab.add("a", "a", "a")
    async with Running(source_of(lab)) as run:
        await run.until_handled(3, 0)
        code, _, err = await asyncio.to_thread(kes, source_of(lab), "offsets", "accept", "--yes")
        assert (code, "is alive (member-" in err) == (1, True), err
    await lab.add("a", "a")
    await asyncio.to_thread(commit)
    refused = await start_failure(source_of(lab))
    assert isinstance(refused, OffsetError), repr(refused)
    for said in (f"{lab.topic}[0]", "committed offset 5", "at offset 3", "records 3 to 4", "kes offsets accept"):
        assert said in str(refused)
    code, answer, err = await asyncio.to_thread(kes, source_of(lab), "offsets", "accept", "--yes", "--partition", "0")
    assert code == 0, err
    [row] = answer["partitions"]
    assert row == {"partition": 0, "group_offset": 5, "changelog_offset": 3, "state": "set back"}
    async with Running(source_of(lab)) as run:
        await run.until_handled(5, 0)
    assert await lab.counts() == {"a": 5}
