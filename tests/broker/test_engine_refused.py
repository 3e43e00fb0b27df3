"""Topics and rights that are missing, which no event is to blame for, and records that are large. What client or broker
will not take otherwise, and what cannot be read: ``test_two_back_ends.py`` compares the driver's answers,
``tests/unit/test_driver_engine.py`` and ``test_driver_records.py`` judge them."""

from __future__ import annotations

import msgspec
import pytest

from streams import DEAD_LETTER, EventContext, EventSource
from tests.broker.conftest import GuardedBroker
from tests.broker.engine_kit import Lab, Running
from tests.unit.bad_input import GOOD_HEADERS, GOOD_VALUE, Seen, counting, records
from tests.vocabulary import MISDEEDS, Added, Totals, added, register, tell_total

pytestmark = [pytest.mark.broker, pytest.mark.asyncio, pytest.mark.timeout(90)]

LARGEST = 12 << 20
LARGE = [case for case in records() if len(case.value or b"") >= 900_000]


def source_of(lab: Lab) -> EventSource[Totals]:
    """A source whose dead letters are the events with misdeeds."""
    source = lab.source()

    def work(ctx: EventContext[Totals], event: Added) -> None:
        tell_total(ctx, event, lab.output)
        MISDEEDS[event.deed](ctx, lab.output)

    register(source, work, on_error=DEAD_LETTER)
    return source


async def produce(lab: Lab, *deeds: str) -> None:
    for deed in deeds:
        await lab.send(added("n", 1, deed), b"n")
    await lab.flush()


async def all_are_handled(lab: Lab, count: int) -> None:
    """Once each, in order, and nobody was to blame."""
    assert await lab.dead_letters() == []
    assert await lab.totals() == [("n", number) for number in range(1, count + 1)]
    assert await lab.counts() == {"n": count}
    await lab.check_settled()


async def test_a_topic_that_is_missing_is_waited_for(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    """It is not the event's fault: no policy, and the source goes on when the topic is there."""
    missing = f"{lab.output}-nobody-made-this"
    await lab.create()
    await produce(lab, *[""] * 5, "unknown topic", *[""] * 4)
    async with Running(source_of(lab)) as run:
        await run.until(lambda: f"{missing}: " in caplog.text, "the topic is named")
        await lab.create(missing)
        await run.until_handled(10)
    assert len(await lab.records(missing)) == 1
    await all_are_handled(lab, 10)


@pytest.mark.nightly
async def test_a_missing_right_is_waited_for(
    guarded_broker: GuardedBroker, topic_prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """No event is to blame for it, whatever its policy is; the right is given, and the source goes on."""
    lab = Lab(guarded_broker.bootstrap_servers, topic_prefix)
    await lab.create()
    no_writing = guarded_broker.rights("TOPIC", lab.output)("WRITE", "DENY")
    guarded_broker.set(no_writing)
    await produce(lab, "", "", "")
    async with Running(source_of(lab)) as run:
        await run.until(lambda: "TOPIC_AUTHORIZATION_FAILED" in caplog.text, "it is told")
        assert lab.output in caplog.text
        guarded_broker.delete(no_writing)
        await run.until_handled(3)
    await all_are_handled(lab, 3)


async def test_what_the_driver_does_not_refuse_in_the_same_words(lab: Lab) -> None:
    await lab.create()
    await produce(lab, "", "partition beyond 32 bits", "", "timestamp of the wrong type", "")
    async with Running(source_of(lab)) as run:
        await run.until_handled(5)
    assert [facts["offset"] for _, facts in await lab.dead_letters()] == ["1", "3"]
    assert await lab.totals() == [("n", 1), ("n", 2), ("n", 3)]
    await lab.check_settled()


@pytest.mark.parametrize("whole", [True, False])
async def test_large_records(lab: Lab, whole: bool) -> None:
    """8 MiB are read whatever the fetch size is: text is handled, rubbish is a dead letter byte for byte, or goes by
    reference where nobody takes it whole."""
    largest = str(LARGEST)
    await lab.create(max_message_bytes=largest)
    if whole:
        await lab.create(lab.dead_letter_topic, max_message_bytes=largest)
    for case in LARGE:
        await lab.send(GOOD_VALUE, b"good", GOOD_HEADERS)
        await lab.send(case.value, case.key, case.headers)
    await lab.flush()
    client = {"message.max.bytes": LARGEST} if whole else {}
    config = lab.config(max_queued_bytes=LARGEST, decode_policy=DEAD_LETTER, client_settings=client)
    async with Running(counting(config, lab.output, DEAD_LETTER)) as run:
        await run.until_handled(2 * len(LARGE))
    bad = {2 * number + 1: case.value for number, case in enumerate(LARGE) if case.ending != "decoded"}
    letters = {int(facts["offset"]): letter.value for letter, facts in await lab.dead_letters()}
    assert letters == (bad if whole else dict.fromkeys(bad))
    left_out = [facts.get("left_out_value") for _, facts in await lab.dead_letters()]
    assert left_out == [None if whole else str(len(value or b"")) for value in bad.values()]
    seen = [msgspec.json.decode(record.value or b"", type=Seen).count for record in await lab.records()]
    assert seen == list(range(1, 2 * len(LARGE) - len(bad) + 1))
    await lab.check_settled()
