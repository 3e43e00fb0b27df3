"""``BatchProducer`` over real brokers: acknowledged before the event completes, on the same cluster and on another."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from streams import DEAD_LETTER, BatchProducer, Delivery, EventContext, IncomingRecord, Record, to_record
from streams.broker import KafkaBroker
from streams.errors import BrokerUnavailable, RecordRefused
from streams.testing.fixtures import BrokerAddress
from tests.broker.engine_kit import Lab, Running
from tests.broker.gate import gate
from tests.vocabulary import Added, Total, Totals

pytestmark = [pytest.mark.broker, pytest.mark.timeout(180)]

PARTITIONS = 2


@pytest_asyncio.fixture
async def near(kafka_broker: BrokerAddress, topic_prefix: str) -> AsyncIterator[Lab]:
    lab = Lab(kafka_broker.bootstrap_servers, topic_prefix, PARTITIONS)
    await lab.create(lab.output)
    yield lab


@pytest_asyncio.fixture
async def far(far_broker: KafkaBroker, topic_prefix: str) -> AsyncIterator[Lab]:
    lab = Lab(far_broker.bootstrap_servers, topic_prefix, 1)
    await lab.create(lab.output)
    yield lab


def producing(lab: Lab, target: str, **settings: Any) -> Any:
    """A source that sends two records for each event, and tells in its output at which offsets they are."""
    source = lab.source(error_policy=DEAD_LETTER)

    def finalize(ctx: EventContext[Totals], deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            ctx.forward(lab.output, Total((delivery.record.key or b"").decode(), delivery.offset), partition=0)

    producer: BatchProducer[Totals] = BatchProducer(source, finalize, **settings)

    @producer.register_event_type(Added)
    def plan(record: IncomingRecord, event: Added) -> list[Record]:
        sent = Total(event.name, event.amount)
        return [to_record(target, sent, key=f"{event.name}-{number}") for number in range(2)]

    return source


@pytest.mark.asyncio
async def test_records_are_there_when_the_event_is_committed(near: Lab, far: Lab) -> None:
    """Every offset that the finalizer was told is where the record is, on the other cluster."""
    source = producing(near, far.output, bootstrap_servers=far.bootstrap)
    async with Running(source, active=PARTITIONS) as run:
        for number in range(20):
            await near.send(msgspec.json.encode(Added(f"n{number}")), b"k", partition=number % PARTITIONS)
        await near.flush()
        await run.until_committed(20)
    told = dict(await near.totals())
    there = {(record.key or b"").decode(): record.offset for record in await far.records()}
    assert len(told) == 40
    assert told == there
    assert [record.record_type for record in await far.records()] == ["Total"] * 40


@pytest.mark.asyncio
@pytest.mark.parametrize("number", gate(range(4), 0))
async def test_order_within_a_partition_is_kept(near: Lab, number: int) -> None:
    """To a topic that was made a moment ago, and that its producer has not met."""
    target = f"{near.output}-ordered"
    await near.create(target, partitions=1)
    source = producing(near, target)
    names = [f"n{number:03}" for number in range(300)]
    await near.create(near.topic)
    await near.add(*names, partition=1)
    assert [(record.key or b"").decode() for record in await near.records(near.topic)] == names
    async with Running(source, active=PARTITIONS) as run:
        await run.until_committed(300)
    found = [(record.key or b"").decode() for record in await near.records(target)]
    assert found == [f"{name}-{number}" for name in names for number in range(2)]


@pytest.mark.asyncio
async def test_what_the_topic_does_not_take_is_dead_lettered_and_nothing_else(near: Lab) -> None:
    """The broker refuses whole batches: the records that are not at fault get there all the same, in their order."""
    target = f"{near.output}-small"
    await near.create(target, partitions=1, max_message_bytes="2000")
    source = near.source(error_policy=DEAD_LETTER)
    producer: BatchProducer[Totals] = BatchProducer(source)

    @producer.register_event_type(Added)
    def plan(record: IncomingRecord, event: Added) -> Record:
        return Record(target, b"x" * event.amount, event.name.encode())

    await near.create(near.topic)
    for number in range(20):
        await near.add(f"n{number}", amount=5000 if number == 10 else 300, partition=0)
    async with Running(source, active=PARTITIONS) as run:
        await run.until_committed(20)
    found = [(record.key or b"").decode() for record in await near.records(target)]
    assert found == [f"n{number}" for number in range(20) if number != 10]
    letters = await near.dead_letters()
    assert len(letters) == 1
    assert "MSG_SIZE_TOO_LARGE" in str(letters[0][1])


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("topic", "settings", "error", "said"),
    [
        ("nobody-made-this", {}, RecordRefused, "nobody-made-this"),
        (
            "",
            {"bootstrap_servers": "127.0.0.1:1", "delivery_timeout_seconds": 1.0},
            BrokerUnavailable,
            "127.0.0.1:1",
        ),
    ],
    ids=["a topic is missing", "no answer comes in time"],
)
async def test_what_cannot_be_delivered_is_the_records_error(
    near: Lab, topic: str, settings: dict[str, Any], error: type[Exception], said: str
) -> None:
    source = near.source()
    errors: list[Exception | None] = []
    producer: BatchProducer[Totals] = BatchProducer(
        source, on_failure=lambda ctx, deliveries: errors.extend(one.error for one in deliveries), **settings
    )
    producer.register_event_type(Added, lambda record, event: Record(f"{near.output}{topic}", b"1"))
    async with Running(source, active=PARTITIONS) as run:
        await near.add("a")
        await run.until_committed(1)
    assert isinstance(errors[0], error)
    assert said in str(errors[0])


@pytest.mark.asyncio
async def test_an_event_that_is_done_again_is_sent_again(near: Lab, far: Lab) -> None:
    """At least once: what was sent stays when the event's finalizer fails."""
    source = near.source(error_policy=DEAD_LETTER)

    def finalize(ctx: EventContext[Totals], deliveries: list[Delivery]) -> None:
        raise RuntimeError("not this time")

    producer: BatchProducer[Totals] = BatchProducer(source, finalize, bootstrap_servers=far.bootstrap)
    producer.register_event_type(Added, lambda record, event: Record(far.output, event.name.encode()))
    async with Running(source, active=PARTITIONS) as run:
        await near.add("a")
        await run.until_committed(1)
    assert [record.value for record in await far.records()] == [b"a"]
    assert len(await near.dead_letters()) == 1


@pytest.mark.asyncio
async def test_a_stop_in_the_middle_loses_nothing(near: Lab, far: Lab) -> None:
    await near.create(near.topic)
    for partition in range(PARTITIONS):
        await near.add(*(f"p{partition}-{number}" for number in range(500)), partition=partition)
    done = 0
    while done < 1000:
        source = producing(near, far.output, bootstrap_servers=far.bootstrap)
        async with Running(source, active=PARTITIONS) as run:
            await run.until_committed(min(300, 1000 - done))
        done = len(await near.totals()) // 2
    told = await near.totals()
    assert len(told) == len(set(told)) == 2000, "each event is finalized once"
    there = {(record.key or b"").decode() for record in await far.records()}
    assert there == {name for name, _ in told}
