"""The corpus of bad input through the whole engine, with good records between.

Each case ends handled, as a dead letter, skipped with a word, or with a stop that names topic, partition and offset;
the good records around are handled exactly once. Each case that stops the source, versions and default handlers:
``tests/unit/test_driver_records.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from streams import (
    DEAD_LETTER,
    SKIP,
    STOP,
    EventContext,
    EventSource,
    Table,
    event_type,
)
from streams.metrics import EventFailed, Measurement
from streams.records import Headers, IncomingRecord
from streams.testing.fixtures import BrokerAddress
from streams.testing.oracle import ReplayOracle, Sent, State
from tests.broker.engine_kit import Lab, Running, own_headers, start_failure
from tests.unit.bad_input import GOOD_HEADERS, GOOD_VALUE, BadRecord, Sample, records
from tests.vocabulary import INTS, register

pytestmark = [pytest.mark.broker, pytest.mark.asyncio, pytest.mark.timeout(120)]

LARGEST = 12 << 20
VERSIONS: Headers = [("__grv__", b"2"), ("__grv__", b"1")]
TWICE = [
    BadRecord("type header: empty, then known", b"k", GOOD_VALUE, [("__grt__", b""), *GOOD_HEADERS], "no route"),
    BadRecord("type header: null, then known", b"k", GOOD_VALUE, [("__grt__", None), *GOOD_HEADERS], "no route"),
    BadRecord("version header: bad, then good", b"k", GOOD_VALUE, [*GOOD_HEADERS, *VERSIONS], "refused"),
    BadRecord("version header: good, then bad", b"k", GOOD_VALUE, [*GOOD_HEADERS, *VERSIONS[::-1]], "decoded"),
]
SMALL = TWICE + [case for case in records() if len(case.value or b"") < 900_000]
LARGE = [case for case in records() if len(case.value or b"") >= 900_000]


@event_type("Seen")
class Seen(msgspec.Struct, frozen=True):
    size: int
    count: int


Counts = Table[bytes, int]
COUNTS = Table.factory(key=bytes, value=int)


def source_of(lab: Lab, *, is_async: bool = False, **settings: Any) -> EventSource[Counts]:
    """Counts how often an account (its length will do) was seen, and by which key: a null key is the store's affair."""
    source = EventSource(lab.config(max_queued_bytes=LARGEST, **settings), COUNTS)
    policy = settings.get("decode_policy", STOP)

    def work(ctx: EventContext[Counts], event: Sample) -> None:
        assert ctx.input is not None
        count = ctx.store.get(b"all", 0) + 1
        ctx.store.put(b"all", count)
        key: Any = ctx.input.key
        ctx.store.put(key, count)
        ctx.forward(lab.output, Seen(len(event.account), count), key=b"seen")

    register(source, work, "async" if is_async else "plain", policy, Sample)
    return source


FAILING_KEYS = ("key: null", "key: reserved")
"""Keys that a store refuses; the record itself can be read."""


def passes(case: BadRecord) -> bool:
    return case.ending == "decoded" and case.name not in FAILING_KEYS


async def produce(lab: Lab, cases: list[BadRecord]) -> None:
    """A good record before the first, between two, and after the last case: case ``n`` has offset ``2 n + 1``."""
    await lab.send(GOOD_VALUE, b"good", GOOD_HEADERS)
    for case in cases:
        await lab.send(case.value, case.key, case.headers)
        await lab.send(GOOD_VALUE, b"good", GOOD_HEADERS)
    await lab.flush()


async def check_handled(lab: Lab, cases: list[BadRecord]) -> None:
    """Exactly the good records and the cases that pass were counted, in order, once."""
    wanted = 1 + len(cases) + sum(map(passes, cases))
    seen = [msgspec.json.decode(record.value or b"", type=Seen).count for record in await lab.records()]
    assert seen == list(range(1, wanted + 1))
    await lab.check_settled()


@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
async def test_corpus_to_dead_letters(lab: Lab, is_async: bool) -> None:
    await lab.create()
    await produce(lab, SMALL)
    measured: list[Measurement] = []
    source = source_of(lab, is_async=is_async, decode_policy=DEAD_LETTER, metrics_handler=measured.append)
    async with Running(source) as run:
        await run.until_committed(2 * len(SMALL) + 1)
    await check_handled(lab, SMALL)
    bad = {2 * number + 1: case for number, case in enumerate(SMALL) if not passes(case)}
    letters = {int(facts["offset"]): (letter, facts) for letter, facts in await lab.dead_letters()}
    assert list(letters) == list(bad), "each bad record once, in order"
    for offset, case in bad.items():
        letter, facts = letters[offset]
        assert (letter.key, letter.value) == (case.key, case.value), case.name
        assert own_headers(letter) == (case.headers or []), case.name
        assert facts["error"] == ("StoreError" if case.name in FAILING_KEYS else "DecodeError"), case.name
        assert 0 < len(facts["message"]) < 2_001, case.name
    assert [m.offset for m in measured if isinstance(m, EventFailed)] == list(bad)


async def test_corpus_skipped(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    """Each is named in the log. The corpus folded again without the engine: state, outputs and offsets, to the byte."""
    await lab.create()
    await produce(lab, SMALL)
    source = source_of(lab, decode_policy=SKIP)
    async with Running(source) as run:
        await run.until_committed(2 * len(SMALL) + 1)
    await check_handled(lab, SMALL)
    assert await lab.dead_letters() == []
    named = {int(offset) for offset in re.findall(re.escape(f"{lab.topic}[0]") + r"@(\d+)", caplog.text)}
    assert named >= {2 * number + 1 for number, case in enumerate(SMALL) if not passes(case)}, "no silent skip"

    def fold(state: State, record: IncomingRecord) -> Iterator[Sent]:
        position, is_case = divmod(record.offset, 2)
        if is_case and not passes(SMALL[position]):
            return
        count = INTS.decode(state.get(b"all", INTS.encode(0))) + 1
        assert record.key is not None
        state[b"all"] = state[record.key] = INTS.encode(count)
        account = msgspec.json.decode(record.value or b"", type=Sample, strict=False).account
        yield lab.output, b"seen", msgspec.json.encode(Seen(len(account), count))

    oracle = ReplayOracle(lab.bootstrap, group_id=lab.group, topic=lab.topic, outputs=[lab.output], fold=fold)
    report = oracle.check()
    assert not report.differences, report


async def test_corpus_stops(kafka_broker: BrokerAddress, topic_prefix: str) -> None:
    """STOP: the source ends with an error that names the record, which is met again by the next one, and not passed."""
    wanted = (
        "type header: null name",
        "value: opened 1,000,000 times, never closed",
        "key: null",
    )
    cases = [case for case in (*SMALL, *LARGE) if case.name in wanted]
    assert len(cases) == len(wanted)
    for number, case in enumerate(cases):
        lab = Lab(kafka_broker.bootstrap_servers, f"{topic_prefix}{number}-")
        await lab.create()
        await produce(lab, [case])
        for _ in range(2 if number == 0 else 1):
            error = await start_failure(source_of(lab))
            assert f"{lab.topic}[0]@1" in str(error), case.name
            assert len(str(error)) < 3_000, case.name
            assert await lab.committed() == {0: 1}, case.name
        await lab.check_settled()


async def test_large_records(lab: Lab) -> None:
    """8 MiB where the topics take them: text is handled, rubbish is a dead letter byte for byte."""
    largest = str(LARGEST)
    await lab.create(max_message_bytes=largest)
    await lab.create(lab.dead_letter_topic, max_message_bytes=largest)
    await produce(lab, LARGE)
    client = {"message.max.bytes": LARGEST}
    source = source_of(lab, decode_policy=DEAD_LETTER, client_settings=client)
    async with Running(source) as run:
        await run.until_committed(2 * len(LARGE) + 1)
    await check_handled(lab, LARGE)
    letters = {int(facts["offset"]): letter.value for letter, facts in await lab.dead_letters()}
    assert letters == {2 * n + 1: case.value for n, case in enumerate(LARGE) if not passes(case)}


async def test_large_records_with_default_settings(lab: Lab) -> None:
    """They are read whatever the fetch size is; a dead letter that nobody takes whole goes by reference."""
    await lab.create(max_message_bytes=str(LARGEST))
    rubbish = next(case for case in LARGE if case.name == "value: 8 MiB of rubbish")
    await produce(lab, [rubbish])
    async with Running(source_of(lab, decode_policy=DEAD_LETTER)) as run:
        await run.until_committed(3)
    ((letter, facts),) = await lab.dead_letters()
    assert (letter.value, facts["offset"]) == (None, "1")
    assert facts["left_out_value"] == str(len(rubbish.value or b""))
    await check_handled(lab, [rubbish])
