"""Records whose schemas are not known yet: their partition waits, the others go on, and nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from streams import PARK, SKIP, EventSource, EventSourceConfig, Record, event_type
from streams.errors import ConfigError, EncodeError, RegistryUnavailable
from streams.events import event_type_of
from streams.formats import AvroCodec, BySchema, Only, SchemaRegistry, needs
from streams.formats.registry_http import Schema
from streams.records import IncomingRecord
from streams.runtime.ports import Polled
from streams.runtime.reading import schema_wait
from streams.settings import ParkingConfig
from streams.source.event_producer import AsyncEventProducer, TransactionRecords
from streams.testing import TestDriver
from streams.testing.fake_registry import FakeRegistry

FAKE = FakeRegistry()
REGISTRY = SchemaRegistry(client=FAKE, unavailable_seconds=60)


@event_type("wait.Counted", codec=AvroCodec(REGISTRY))
class Counted(msgspec.Struct, frozen=True):
    number: int
    note: str = ""


WRITTEN = Schema("AVRO", event_type_of(Counted).codec.schema.text)
OLDER = Schema(
    "AVRO", '{"type":"record","name":"Counted","namespace":"wait","fields":[{"name":"number","type":"int"}]}'
)


@pytest.fixture(autouse=True)
def registry() -> FakeRegistry:
    FAKE.__init__()  # type: ignore[misc]
    FAKE.is_local = True
    REGISTRY._own.__init__()  # type: ignore[misc]
    FAKE.register("added", WRITTEN)
    FAKE.register("added", OLDER)
    return FAKE


def value(number: int, schema: int = 1) -> bytes:
    return bytes([0, 0, 0, 0, schema, 2 * number]) + (b"\0" if schema == 1 else b"")


def source(types: Any, **settings: Any) -> tuple[EventSource[Any], list[tuple[int, int]]]:
    made = EventSource(EventSourceConfig(group_id="g", topic="in", num_partitions=2, **settings), types=types)
    seen: list[tuple[int, int]] = []

    @made.on
    def added(ctx: Any, event: Counted) -> None:
        seen.append((ctx.input.partition, event.number))

    return made, seen


@pytest.mark.parametrize("rule", [BySchema(REGISTRY), Only(Counted)], ids=str)
def test_a_partition_waits_for_a_schema_and_the_others_go_on(rule: Any, registry: FakeRegistry) -> None:
    made, seen = source(rule)
    registry.hidden = {2}
    with TestDriver(made) as driver:
        for partition, number, schema in [(0, 1, 1), (0, 2, 2), (0, 3, 1), (1, 4, 1), (1, 5, 1)]:
            driver.send_record(Record("in", value(number, schema), partition=partition), wait=False)
        driver.advance(3)
        assert sorted(seen) == [(0, 1), (1, 4), (1, 5)]
        registry.hidden = set()
        driver.advance(3)
        assert [number for partition, number in seen if partition == 0] == [1, 2, 3]
        driver.send_record(Record("in", value(6, 2), partition=0))
        assert seen[-1] == (0, 6)
    assert registry.calls.count("schema 2") < 8, "it is asked once a second"


def test_an_id_that_nobody_knows_is_asked_for_a_while_and_then_meets_the_policy(registry: FakeRegistry) -> None:
    made, seen = source(BySchema(REGISTRY), decode_policy=SKIP)
    with TestDriver(made) as driver:
        driver.send_record(Record("in", value(1, 77), partition=0), wait=False)
        driver.send_record(Record("in", value(2, 1), partition=0), wait=False)
        driver.advance(8)
        assert not seen, "a replica of the registry may be behind"
        driver.advance(10)
        assert seen == [(0, 2)]
    assert 8 < registry.calls.count("schema 77") < 15


def test_noise_is_asked_ten_times_a_second_at_most(registry: FakeRegistry) -> None:
    made, seen = source(BySchema(REGISTRY), decode_policy=SKIP)
    with TestDriver(made) as driver:
        before = len(registry.calls)
        for number in range(500):
            driver.send_record(Record("in", b"\0\x80" + number.to_bytes(3, "big") + b"x", partition=0), wait=False)
        driver.send_record(Record("in", value(9), partition=1), wait=False)
        driver.advance(10)
        assert seen == [(1, 9)]
        assert len(registry.calls) - before <= 101


def test_away_for_too_long_stops_by_name_and_before_it_waits(registry: FakeRegistry) -> None:
    made, seen = source(BySchema(REGISTRY))
    with TestDriver(made) as driver:
        registry.error = RegistryUnavailable("nothing answers at http://r")
        driver.send_record(Record("in", value(1, 1), partition=0), wait=False)
        driver.advance(50)
        assert not seen
        with pytest.raises(RegistryUnavailable, match=r"partitions \[0\] have waited for the schema 1 .*=60"):
            driver.advance(30)


def test_refused_credentials_stop_the_source(registry: FakeRegistry) -> None:
    made, _ = source(BySchema(REGISTRY))
    with TestDriver(made) as driver:
        registry.error = ConfigError("http://r answered with 401: give SchemaRegistry(auth=...)")
        with pytest.raises(ConfigError, match="401"):
            driver.send_record(Record("in", value(1, 1), partition=0))


def test_a_partition_that_waits_moves_and_nothing_is_lost(registry: FakeRegistry) -> None:
    made, seen = source(BySchema(REGISTRY))
    registry.hidden = {2}
    with TestDriver(made) as driver:
        driver.send_record(Record("in", value(1, 1), partition=0), wait=False)
        driver.send_record(Record("in", value(2, 2), partition=0), wait=False)
        driver.advance(2)
        driver.crash()  # a member without the id begins where it was
        registry.hidden = set()
        driver.join()
        driver.settle()
        assert seen == [(0, 1), (0, 2)]


async def test_a_partition_that_comes_back_waits_its_own_time(
    registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(schema_wait, "ASK_SECONDS", 0)
    monkeypatch.setattr(schema_wait, "AGAIN_SECONDS", 0)
    registry.error = RegistryUnavailable("nothing answers at http://r")
    port = SimpleNamespace(pause=lambda _: None, handled=lambda *_: None)
    worker = SimpleNamespace(epoch=1)
    member: Any = SimpleNamespace(now=lambda: clock[0], workers={0: worker})
    found = schema_wait.UnknownSchema(REGISTRY, b"\0\0\0\1")
    wait = schema_wait.SchemaWait(member, 0, port, lambda _: found, lambda _: None)  # type: ignore[arg-type]
    record = IncomingRecord("in", 0, 0, None, b"", (), 0)
    running = asyncio.create_task(wait.run())
    for now, workers in [(0.0, {0: worker}), (50.0, {}), (80.0, {0: worker}), (100.0, {0: worker})]:
        clock[0], member.workers = now, workers
        if workers and not wait.waiting:
            wait.deliver(Polled({0: [record]}, {0: 1}, {0: 1}, frozenset()))
        await asyncio.wait([running], timeout=0.05)
        assert not running.done(), f"at {now}: {running}"
        assert wait.waiting == [*workers]
    clock[0] = 141.0
    with pytest.raises(RegistryUnavailable):
        await asyncio.wait_for(running, 5)


@pytest.fixture
def parked(registry: FakeRegistry) -> Iterator[tuple[TestDriver[Any], list[int]]]:
    """A source whose event of schema 2 is parked, in a process that does not know the schema any more; what it has
    handled since."""
    parking = ParkingConfig(first_retry_seconds=1)
    config = EventSourceConfig(group_id="g", topic="in", num_partitions=1, parking=parking)
    made = EventSource(config, types=BySchema(REGISTRY))
    handled, broken = list[int](), {2}

    @made.on(on_error=PARK)
    def added(ctx: Any, event: Counted) -> None:
        if event.number in broken:
            raise RuntimeError("not now")
        handled.append(event.number)

    with TestDriver(made) as driver:
        driver.send_record(Record("in", value(2, 2), key=b"a"))
        assert len(driver.parked()) == 1
        broken.clear()
        REGISTRY._own.__init__()  # type: ignore[misc]
        registry.calls.clear()
        registry.hidden = {2}
        yield driver, handled


def test_a_parked_event_waits_for_its_schema_and_its_partition_goes_on(
    parked: tuple[TestDriver[Any], list[int]], registry: FakeRegistry
) -> None:
    driver, handled = parked
    driver.advance(8)
    driver.send_record(Record("in", value(3, 1), key=b"b"), wait=False)
    driver.send_record(Record("in", value(4, 1), key=b"a"), wait=False)
    driver.advance(1)
    assert handled == [3]
    assert 1 < registry.calls.count("schema 2") < 9, "it is asked once a second"
    registry.hidden = set()
    driver.advance(3)
    assert handled == [3, 2, 4]
    assert not driver.parked()


def test_a_parked_event_waits_for_a_registry_that_is_away_as_long_as_a_record_does(
    parked: tuple[TestDriver[Any], list[int]], registry: FakeRegistry
) -> None:
    driver, _ = parked
    registry.error = RegistryUnavailable("nothing answers at http://r")
    driver.advance(50)
    with pytest.raises(RegistryUnavailable, match=r"partitions \[0\] have waited for the schema 2 .*=60"):
        driver.advance(30)


def test_a_start_refuses_a_schema_that_is_not_registered(registry: FakeRegistry) -> None:
    registry.calls.clear()
    codec = AvroCodec(REGISTRY, subject="elsewhere").for_event(Counted, "wait.Counted", 1)
    with pytest.raises(ConfigError, match=r"not registered under 'elsewhere'.*kes schema register"):
        codec.prepare()
    assert not any(call.startswith("register") for call in registry.calls)
    with pytest.raises(ConfigError, match="not registered"):
        codec.encode(Counted(1))  # on no event loop it asks itself
    FAKE.is_local = False

    async def on_a_loop() -> None:
        codec.encode(Counted(1))

    with pytest.raises(EncodeError, match="was not looked up at the start"):
        asyncio.run(on_a_loop())
    with pytest.raises(EncodeError, match=r"AvroCodec\(subject=\.\.\.\)"):
        event_type_of(Counted).codec.encode(Counted(1))


@pytest.fixture
def unregistered(monkeypatch: pytest.MonkeyPatch) -> SchemaRegistry:
    """A registry of another source in the process, without the schema of one of its events."""
    other = SchemaRegistry(client=FakeRegistry())
    codec = AvroCodec(other, subject="totals-value").for_event(Counted, "wait.Total", 1)
    handled = AvroCodec(other).for_event(Counted, "wait.Handled", 1)
    monkeypatch.setattr(needs, "needy_codecs", lambda: [codec, handled])
    return other


@pytest.mark.parametrize(
    ("rules", "handled", "outputs", "is_used"),
    [
        ([], [b"other"], ["totals-of-others", "total"], False),
        ([None, Only(Counted)], [], [], False),
        ([], [b"wait.Total"], [], True),
        ([], [b"wait.Handled"], [], True),
        ([], [], ["other", "totals"], True),
        (["by schema"], [], [], True),
    ],
)
def test_a_source_needs_what_the_registries_have_that_it_uses(
    unregistered: SchemaRegistry, rules: list[Any], handled: list[bytes], outputs: list[str], is_used: bool
) -> None:
    found = [BySchema(unregistered) if rule == "by schema" else rule for rule in rules]
    needy = needs.own_needs(found, handled, outputs)
    assert [each.title for each in needy if isinstance(each, AvroCodec)] == ["wait.Total", "wait.Handled"] * is_used
    assert [each for each in needy if isinstance(each, BySchema)] == found * bool(rules == ["by schema"])


SENT = FakeRegistry()


@event_type("wait.Sent", codec=AvroCodec(SchemaRegistry(client=SENT), subject="sent-value"))
class Sent(msgspec.Struct, frozen=True):
    number: int


class Taken:
    """A queue of a producer that takes all."""

    sends = unreported = 0

    def __init__(self) -> None:
        self.values = list[Any]()

    def take(self, record: Record, settle: Any = None) -> bool:
        self.values.append(record.value)
        return True


async def test_a_producer_looks_up_what_it_sends_when_it_sends_it() -> None:
    SENT.is_local = False
    SENT.error = RegistryUnavailable("nothing answers")
    transactions: Any = SimpleNamespace(transactional_id="t")
    queue: Any = Taken()
    producer = AsyncEventProducer(queue, transactions, 10, None)
    assert not SENT.calls
    with pytest.raises(RegistryUnavailable, match="nothing answers"):
        await producer.send_soon("sent", Sent(1))
    SENT.error = None
    with pytest.raises(ConfigError, match=r"wait\.Sent is not registered under 'sent-value'"):
        await producer.send_soon("sent", Sent(1))
    codec: Any = event_type_of(Sent).codec
    SENT.register("sent-value", codec.schema)
    with pytest.raises(EncodeError, match=r"in a transaction on an event loop, call prepare\(\)"):
        TransactionRecords("t", 10, None).send("sent", Sent(1))
    await producer.send_soon("sent", Sent(1))
    await producer.send_soon("sent", Sent(2))
    assert queue.values == [b"\0\0\0\0\1\2", b"\0\0\0\0\1\4"]
    assert SENT.calls.count("lookup sent-value") == 3
