"""Outputs and changes that client or broker will not take: their event gets its policy, its neighbours lose nothing."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from streams import (
    DEAD_LETTER,
    SKIP,
    STOP,
    Change,
    ErrorPolicy,
    ErrorResponse,
    EventContext,
    EventSource,
    Record,
    Table,
)
from streams.errors import RecordRefused
from streams.records import TopicPartition
from streams.testing.fixtures import BrokerAddress, OwnBroker
from tests.broker.engine_kit import Added, Lab, Running, Total, Totals, added, raised_by, start_failure

pytestmark = [pytest.mark.broker, pytest.mark.asyncio, pytest.mark.timeout(90)]


@pytest.fixture
def lab(kafka_broker: BrokerAddress, topic_prefix: str) -> Lab:
    return Lab(kafka_broker.bootstrap_servers, topic_prefix)


def misbehave(lab: Lab, ctx: EventContext[Any], deed: str) -> None:
    match deed:
        case "over the client's limit":
            ctx.forward(lab.output, Total("x" * 1_000_001, 1))
        case "just under the client's limit":  # with its overhead it is over
            ctx.forward(Record(lab.output, b"x" * 999_990))
        case "over the topic's limit":
            ctx.forward(Record(lab.output, b"x" * 50_000, b"big"))
        case "unknown topic":
            ctx.forward(f"{lab.output}-nobody-made-this", Total("a", 1))
        case "invalid topic name":
            ctx.forward("no topic/with such: a name", Total("a", 1))
        case "empty topic name":
            ctx.forward("", Total("a", 1))
        case "topic name too long":
            ctx.forward("t" * 250, Total("a", 1))
        case "unknown partition":
            ctx.forward(lab.output, Total("a", 1), partition=99)
        case "negative partition":
            ctx.forward(lab.output, Total("a", 1), partition=-7)
        case "partition beyond 32 bits":
            ctx.forward(lab.output, Total("a", 1), partition=1 << 40)
        case "year 3000":
            ctx.forward(lab.output, Total("a", 1), timestamp_ms=32_503_680_000_000)
        case "value of the wrong type":
            ctx.forward(Record(lab.output, {"a": 1}))  # type: ignore[arg-type]
        case "key of the wrong type":
            ctx.forward(Record(lab.output, b"x", 5))  # type: ignore[arg-type]
        case "header of the wrong type":
            ctx.forward(lab.output, Total("a", 1), headers=[("h", 5)])  # type: ignore[list-item]
        case "headers of the wrong type":
            ctx.forward(Record(lab.output, b"x", headers=5))  # type: ignore[arg-type]
        case "timestamp of the wrong type":
            ctx.forward(Record(lab.output, b"x", timestamp_ms="now"))  # type: ignore[arg-type]
        case "":
            pass
        case _:
            raise AssertionError(deed)


SEEN_BY_THE_CLIENT = [
    "over the client's limit",
    "just under the client's limit",
    "invalid topic name",
    "empty topic name",
    "topic name too long",
    "unknown partition",
    "negative partition",
    "partition beyond 32 bits",
    "value of the wrong type",
    "key of the wrong type",
    "header of the wrong type",
    "headers of the wrong type",
    "timestamp of the wrong type",
]
SEEN_BY_THE_BROKER = ["over the topic's limit", "year 3000"]


def source_of(lab: Lab, policy: ErrorPolicy, *, is_async: bool = False, **settings: Any) -> EventSource[Totals]:
    source = lab.source(**settings)

    def work(ctx: EventContext[Totals], event: Added) -> None:
        total = ctx.store.get(event.name, 0) + event.amount
        ctx.store.put(event.name, total)
        ctx.forward(lab.output, Total(event.name, total), key=event.name)
        misbehave(lab, ctx, event.deed)

    async def patient(ctx: EventContext[Totals], event: Added) -> None:
        work(ctx, event)

    source.register_event_type(Added, patient if is_async else work, on_error=policy)
    return source


async def produce(lab: Lab, count: int, deeds: dict[int, str], partition: int = 0) -> None:
    for number in range(count):
        name = f"n{number % 5}-{partition}"
        await lab.send(added(name, 1, deeds.get(number, "")), name.encode(), partition=partition)
    await lab.flush()


def expected(count: int, guilty: set[int], partition: int = 0) -> tuple[list[tuple[str, int]], dict[str, int]]:
    """The outputs in order, and the state."""
    counts: dict[str, int] = {}
    outputs = []
    for number in range(count):
        if number not in guilty:
            name = f"n{number % 5}-{partition}"
            counts[name] = counts.get(name, 0) + 1
            outputs.append((name, counts[name]))
    return outputs, counts


async def test_what_the_client_refuses(lab: Lab) -> None:
    """One of each kind among good events: all of them become dead letters, the others are there once and in order."""
    await lab.create()
    guilty = {7 * number + 3: deed for number, deed in enumerate(SEEN_BY_THE_CLIENT)}
    await produce(lab, 100, guilty)
    source = source_of(lab, DEAD_LETTER)
    async with Running(source) as run:
        await run.until_handled(100)
    outputs, counts = expected(100, set(guilty))
    letters = [facts for _, facts in await lab.dead_letters()]
    assert [int(facts["offset"]) for facts in letters] == list(guilty)
    assert {facts["error"] for facts in letters} == {"RecordRefused", "TypeError"}
    assert await lab.totals() == outputs
    assert await lab.counts() == counts
    await lab.check_settled()


@pytest.mark.parametrize("deed", SEEN_BY_THE_BROKER)
async def test_the_guilty_event_alone(lab: Lab, deed: str) -> None:
    """One of sixty in one batch: it becomes a dead letter, the others are there exactly once and in order."""
    await lab.create(max_message_bytes="20000")
    await produce(lab, 60, {31: deed})
    source = source_of(lab, DEAD_LETTER)
    async with Running(source) as run:
        await run.until_handled(60)
    outputs, counts = expected(60, {31})
    assert [facts["offset"] for _, facts in await lab.dead_letters()] == ["31"]
    assert await lab.totals() == outputs
    assert await lab.counts() == counts
    assert await lab.committed() == {0: 60}
    await lab.check_settled()


async def test_several_guilty_ones_in_several_partitions(kafka_broker: BrokerAddress, topic_prefix: str) -> None:
    lab = Lab(kafka_broker.bootstrap_servers, topic_prefix, partitions=2)
    await lab.create(partitions=1, max_message_bytes="20000")
    await lab.delete(lab.topic)
    await lab.create(lab.topic, partitions=2)
    guilty = {0: {17, 99}, 1: {40}}
    for number, offsets in guilty.items():
        await produce(lab, 100, dict.fromkeys(offsets, "over the topic's limit"), number)
    source = source_of(lab, SKIP, is_async=True)
    async with Running(source) as run:
        await run.until_handled(100, 100)
    totals = await lab.totals()
    for number, offsets in guilty.items():
        outputs, counts = expected(100, offsets, number)
        assert [total for total in totals if total[0].endswith(f"-{number}")] == outputs
        assert await lab.counts(number) == counts
    await lab.check_settled()


async def test_stop_at_a_refused_output(lab: Lab) -> None:
    """What came before is committed or met again, the record is named, and nothing is half done."""
    await lab.create(max_message_bytes="20000")
    await produce(lab, 10, {5: "over the topic's limit"})
    error = await start_failure(source_of(lab, STOP))
    assert f"{lab.topic}[0]@5" in str(error)
    assert lab.output in str(error), "the topic that refuses is named"
    assert await lab.committed() in ({}, {0: 5})
    source = source_of(lab, SKIP)
    async with Running(source) as run:
        await run.until_handled(10)
    outputs, counts = expected(10, {5})
    assert await lab.totals() == outputs
    assert await lab.counts() == counts
    await lab.check_settled()


async def test_a_refused_record_is_not_tried_again(lab: Lab) -> None:
    """The same bytes would be refused again: retries are for handlers."""
    await lab.create(max_message_bytes="20000")
    await produce(lab, 3, {0: "over the client's limit", 1: "over the topic's limit"})
    source = source_of(lab, ErrorPolicy(retries=1_000, backoff_seconds=5, then=ErrorResponse.CONTINUE))
    async with Running(source) as run:
        await run.until_handled(3)
    assert await lab.totals() == [("n2-0", 1)]


@pytest.mark.parametrize("limit", ["client", "broker"])
async def test_a_change_over_the_limit(lab: Lab, limit: str) -> None:
    """The store's value is too large: for the client, or for the changelog topic. The event is undone."""
    await lab.create()
    await lab.create(lab.changelog, cleanup_policy="compact", max_message_bytes="20000")
    source = EventSource(lab.config(), Table.factory(key=str, value=str))
    size = 1_000_001 if limit == "client" else 50_000

    def handler(ctx: EventContext[Table[str, str]], event: Added) -> None:
        ctx.store.put("last", event.name)
        ctx.store.put(event.name, "x" * (size if event.deed else 5))
        ctx.forward(lab.output, Total(event.name, 1), key=event.name)

    source.register_event_type(Added, handler, on_error=DEAD_LETTER)
    await lab.add("a", "b")
    await lab.add("guilty", deed="large")
    await lab.add("c")
    async with Running(source) as run:
        await run.until_handled(4)
    assert [facts["offset"] for _, facts in await lab.dead_letters()] == ["2"]
    assert await lab.totals() == [("a", 1), ("b", 1), ("c", 1)]
    assert set(await lab.state()) == {b"a", b"b", b"c", b"last"}
    await lab.check_settled()


async def test_a_topic_that_is_missing_is_waited_for(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    """It is not the event's fault: no policy, and the source goes on when the topic is there."""
    missing = f"{lab.output}-nobody-made-this"
    await lab.create()
    await produce(lab, 10, {5: "unknown topic"})
    source = source_of(lab, DEAD_LETTER)
    async with Running(source) as run:
        await run.until(lambda: f"{missing}: " in caplog.text, "the topic is named")
        await lab.create(missing)
        await run.until_handled(10)
    outputs, counts = expected(10, set())
    assert await lab.dead_letters() == []
    assert await lab.totals() == outputs
    assert len(await lab.records(missing)) == 1
    assert await lab.counts() == counts
    await lab.check_settled()


async def test_a_missing_right_is_waited_for(
    own_broker: OwnBroker, topic_prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """No event is to blame for it, whatever its policy is; the right is given, and the source goes on."""
    authorizer = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
    broker = own_broker(properties={"authorizer.class.name": authorizer, "allow.everyone.if.no.acl.found": "true"})
    lab = Lab(broker.bootstrap_servers, topic_prefix)
    await lab.create()
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    names = ResourceType.TOPIC, lab.output, ResourcePatternType.LITERAL, "User:ANONYMOUS", "*"
    no_writing = *names, AclOperation.WRITE, AclPermissionType.DENY
    admin.create_acls([AclBinding(*no_writing)])[AclBinding(*no_writing)].result(30)
    await produce(lab, 3, {})
    async with Running(source_of(lab, DEAD_LETTER)) as run:
        await run.until(lambda: "TOPIC_AUTHORIZATION_FAILED" in caplog.text, "it is told")
        assert lab.output in caplog.text
        (deleted,) = admin.delete_acls([AclBindingFilter(*no_writing)]).values()
        deleted.result(30)
        await run.until_handled(3)
    outputs, _ = expected(3, set())
    assert (await lab.dead_letters(), await lab.totals()) == ([], outputs)


async def test_a_dead_letter_that_is_refused(lab: Lab) -> None:
    """It goes by reference, and the source goes on."""
    await lab.create()
    await lab.create(lab.dead_letter_topic, max_message_bytes="20000")
    await lab.add("good")
    await lab.send(added("x" * 50_000, 1, "over the client's limit"))
    await lab.add("after")
    async with Running(source_of(lab, DEAD_LETTER)) as run:
        await run.until_handled(3)
    ((letter, facts),) = await lab.dead_letters()
    assert (letter.value, facts["offset"]) == (None, "1")
    assert int(facts["left_out_value"]) > 50_000
    assert await lab.totals() == [("good", 1), ("after", 1)]
    assert await lab.counts() == {"good": 1, "after": 1}


async def test_a_nearly_maximal_record_is_dead_lettered(lab: Lab) -> None:
    """The largest that a producer with default settings sends: with the facts of its failure it is too large."""
    await lab.create()
    deed = "value of the wrong type"
    await lab.send(added("x" * (999_800 - len(added("", 1, deed))), 1, deed))
    await lab.add("after")
    async with Running(source_of(lab, DEAD_LETTER)) as run:
        await run.until_handled(2)
    ((letter, facts),) = await lab.dead_letters()
    assert (letter.value, facts["offset"], facts["left_out_value"]) == (None, "0", "999800")
    assert await lab.totals() == [("after", 1)]


class Words:
    """An own store."""

    def __init__(self, partition: TopicPartition) -> None:
        self.words: dict[bytes, bytes | None] = {}

    def receive_change(self, change: Change, /) -> None:
        self.words[change.key] = change.value

    def revoked(self) -> None:
        self.words.clear()


async def test_an_own_store_after_a_refusal(lab: Lab) -> None:
    await lab.create(max_message_bytes="20000")
    source = EventSource(lab.config(), Words)

    def handler(ctx: EventContext[Words], event: Added) -> None:
        key = event.name.encode()
        value = (ctx.store.words.get(key) or b"") + b"."
        ctx.store.words[key] = value
        ctx.record_change(Change(key, value))
        misbehave(lab, ctx, event.deed)

    source.register_event_type(Added, handler, on_error=SKIP)
    await produce(lab, 20, {10: "over the topic's limit", 15: "over the client's limit"})
    async with Running(source) as run:
        await run.until_handled(20)
    assert await lab.state() == {f"n{n}-0".encode(): b"." * (2 if n == 0 else 4) for n in range(5)} | {}
    await lab.check_settled()


@pytest.mark.parametrize("deed", ["over the topic's limit", "value of the wrong type"])
async def test_an_interjection_that_is_refused(lab: Lab, deed: str) -> None:
    """Whoever waits for it hears of it; the events around it stay."""
    await lab.create(max_message_bytes="20000")
    source = source_of(lab, SKIP, error_policy=SKIP)

    def interjection(ctx: EventContext[Totals]) -> None:
        ctx.store.put("interjected", 1)
        misbehave(lab, ctx, deed)

    await lab.add("a", "b")
    async with Running(source) as run:
        error = await raised_by(source.interject(0, interjection))
        assert isinstance(error, RecordRefused), repr(error)
        await lab.add("c")
        await run.until_handled(3)
    assert await lab.totals() == [("a", 1), ("b", 1), ("c", 1)]
    assert await lab.counts() == {"a": 1, "b": 1, "c": 1}
    await lab.check_settled()
