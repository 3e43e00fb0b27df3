"""Outputs and changes that client or broker will not take: their event gets its policy, its neighbours lose nothing."""

from __future__ import annotations

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
    EventContext,
    EventSource,
)
from streams.testing.fixtures import OwnBroker
from tests.broker.engine_kit import Lab, Running
from tests.vocabulary import MISDEEDS, Added, Totals, added, register, tell_total

pytestmark = [pytest.mark.broker, pytest.mark.asyncio, pytest.mark.timeout(90)]


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


def source_of(lab: Lab) -> EventSource[Totals]:
    """A source whose dead letters are the events with misdeeds."""
    source = lab.source()

    def work(ctx: EventContext[Totals], event: Added) -> None:
        tell_total(ctx, event, lab.output)
        MISDEEDS[event.deed](ctx, lab.output)

    register(source, work, on_error=DEAD_LETTER)
    return source


async def produce(lab: Lab, count: int, deeds: dict[int, str]) -> None:
    for number in range(count):
        name = f"n{number % 5}"
        await lab.send(added(name, 1, deeds.get(number, "")), name.encode())
    await lab.flush()


def expected(count: int, guilty: set[int]) -> tuple[list[tuple[str, int]], dict[str, int]]:
    """The outputs in order, and the state."""
    counts: dict[str, int] = {}
    outputs = []
    for number in range(count):
        if number not in guilty:
            name = f"n{number % 5}"
            counts[name] = counts.get(name, 0) + 1
            outputs.append((name, counts[name]))
    return outputs, counts


async def test_what_the_client_refuses(lab: Lab) -> None:
    """One of each kind among good events: all of them become dead letters, the others are there once and in order."""
    await lab.create()
    guilty = {7 * number + 3: deed for number, deed in enumerate(SEEN_BY_THE_CLIENT)}
    await produce(lab, 100, guilty)
    source = source_of(lab)
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
    source = source_of(lab)
    async with Running(source) as run:
        await run.until_handled(60)
    outputs, counts = expected(60, {31})
    assert [facts["offset"] for _, facts in await lab.dead_letters()] == ["31"]
    assert await lab.totals() == outputs
    assert await lab.counts() == counts
    assert await lab.committed() == {0: 60}
    await lab.check_settled()


async def test_a_topic_that_is_missing_is_waited_for(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    """It is not the event's fault: no policy, and the source goes on when the topic is there."""
    missing = f"{lab.output}-nobody-made-this"
    await lab.create()
    await produce(lab, 10, {5: "unknown topic"})
    source = source_of(lab)
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


@pytest.mark.nightly
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
    async with Running(source_of(lab)) as run:
        await run.until(lambda: "TOPIC_AUTHORIZATION_FAILED" in caplog.text, "it is told")
        assert lab.output in caplog.text
        (deleted,) = admin.delete_acls([AclBindingFilter(*no_writing)]).values()
        deleted.result(30)
        await run.until_handled(3)
    outputs, _ = expected(3, set())
    assert (await lab.dead_letters(), await lab.totals()) == ([], outputs)


async def test_a_nearly_maximal_record_is_dead_lettered(lab: Lab) -> None:
    """The largest that a producer with default settings sends: with the facts of its failure it is too large."""
    await lab.create()
    deed = "value of the wrong type"
    await lab.send(added("x" * (999_800 - len(added("", 1, deed))), 1, deed))
    await lab.add("after")
    async with Running(source_of(lab)) as run:
        await run.until_handled(2)
    ((letter, facts),) = await lab.dead_letters()
    assert (letter.value, facts["offset"], facts["left_out_value"]) == (None, "0", "999800")
    assert await lab.totals() == [("after", 1)]
