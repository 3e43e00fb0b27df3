"""Records beside the transactions, in virtual time: order, failures, room, the end. Traces: see ``async_kit``."""

from __future__ import annotations

import asyncio
import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from streams import BatchProducer, EventContext, Record, to_record
from streams.errors import ConfigError, EncodeError, RecordRefused, StreamsError
from streams.outcomes import DEAD_LETTER, SKIP
from streams.records import Acknowledgement
from streams.runtime import bridge
from streams.runtime.async_work.producer_stage import Outlet
from streams.testing.simulation.clients import SimConnections
from streams.testing.simulation.plain_producer import SimPlainProducer
from tests.unit.async_kit import World, driven, names, new_source, reasons, records_of, row, send, watch
from tests.unit.runtime_kit import OUT
from tests.unit.waiting import PATIENCE
from tests.vocabulary import Named

pytestmark = pytest.mark.usefixtures("quiet")


class Scripted(SimPlainProducer):
    """Reports a record ``c:3`` after so many seconds, and refuses ``b!``."""

    def __init__(self, process: Any, factory: Factory) -> None:
        super().__init__(process)
        self.names: list[str] = []
        self.is_closed = False
        self._factory = factory
        self._under_way = 0

    def produce(self, record: Record, token: object) -> bool:
        if record.topic == "missing":
            raise RecordRefused("missing: no such topic")
        if self._under_way >= self._factory.room:
            return False
        self._under_way += 1
        self.names.append((record.key or b"").decode().partition(":")[0])
        return super().produce(record, token)

    def close(self) -> None:
        self.is_closed = True
        super().close()

    def _reported(self, report: Acknowledgement) -> None:
        delivery: Any = report.token
        name, _, seconds = (delivery.record.key or b"").decode().partition(":")
        if "!" in name:
            report = Acknowledgement(delivery, 0, -1, RecordRefused(f"{name} is too large"))
        if seconds:
            self._process.loop.call_later(float(seconds), self._report, report)
        else:
            self._report(report)

    def _report(self, report: Acknowledgement) -> None:
        self._under_way -= 1
        super()._reported(report)


class Factory:
    """Makes the producers of a test, all of which have room for so many records."""

    def __init__(self) -> None:
        self.room = 1000
        self.error: Exception | None = None
        self.made: list[Scripted] = []

    def __call__(self, connections: SimConnections, *_: Any) -> Scripted:
        if self.error is not None:
            raise self.error
        self.made.append(Scripted(connections.process, self))
        return self.made[-1]

    @property
    def names(self) -> list[list[str]]:
        return [producer.names for producer in self.made]


@pytest.fixture
def factory(monkeypatch: pytest.MonkeyPatch) -> Factory:
    made = Factory()
    monkeypatch.setattr(SimConnections, "plain_producer", lambda *args: made(*args))
    return made


@pytest.mark.parametrize("late", [True, False], ids=["on_failure", "dead letter"])
@pytest.mark.parametrize(
    ("line", "sent"),
    [
        ("producer | a:2 b:3, c:1 | 3 a@0+b@1 c@2 @2", ["a b c"]),
        ("producer | None, , None | 0 () @3", []),  # no producer is made
        ("producer | a b!, c | 0 (b! is too large) c@2 @2", ["a b! c"]),
    ],
)
def test_an_event_completes_when_its_records_are_reported(
    factory: Factory, line: str, sent: list[str], late: bool
) -> None:
    """All of them; one that failed fails its event."""
    kind, _, events, trace = row(line)
    world = World(kind, late=late)
    said = trace[trace.index("(") + 1 : trace.index(")")] if "(" in trace else ""
    with driven(world) as driver:
        send(driver, *events)
        assert watch(driver, world, 5) == (trace if late or not said else trace.replace(f"({said}) ", ""))
        assert factory.names == [keys.split() for keys in sent]
        assert reasons(driver) == ([] if late or not said else [said])


def test_a_full_queue_holds_nobody_up_and_keeps_the_order(factory: Factory) -> None:
    factory.room = 2
    world = World("producer")
    keys = [f"n{number}" for number in range(20)]
    with driven(world) as driver:
        send(driver, " ".join(f"{key}:2" for key in keys), "last")
        driver.advance(1)
        assert factory.names == [keys[:2]]
        commits: list[float] = []
        driver.at("commit.after", lambda _: commits.append(driver.now - world.start))
        assert driver.interject(0, lambda ctx: ctx.forward(OUT, Named("tick"))) is None
        assert commits[0] < 2
        assert names(driver)[0] == "tick"
        assert factory.names == [[*keys, "last"]]


def test_a_bound_holds_up_its_own_partition_only(factory: Factory) -> None:
    world = World("producer", {"max_queued_records": 2}, num_partitions=2)
    with driven(world) as driver:
        send(driver, "a:9 b:9 c:9", "d")
        driver.advance(2)
        assert factory.names == [["a", "b", "c"]], "more than the bound goes in alone"
        [stage] = driver.statistics().stages
        assert (stage.running, stage.waiting) == (3, 0)
        send(driver, "x", partition=1)
        assert watch(driver, world, 12) == "2 x@3; 9 a@0+b@1+c@2 d@4 @2"


def test_what_the_client_refuses_is_the_records_error(factory: Factory) -> None:
    source, errors = new_source(), list[Exception | None]()
    producer: BatchProducer[Any] = BatchProducer(
        source, on_failure=lambda ctx, deliveries: errors.extend(delivery.error for delivery in deliveries)
    )
    producer.register_event_type(
        Named, lambda record, event: [Record("missing", b"1", b"k"), Record("far", b"2", b"k")]
    )
    world = World("producer", ahead=False)
    world.source = source
    with driven(world) as driver:
        driver.send(Named("a"))
        assert isinstance(errors[0], RecordRefused)
        assert "missing: no such topic" in str(errors[0])
        assert errors[1] is None


def test_a_producer_that_breaks_is_replaced(factory: Factory) -> None:
    world = World("producer")
    with driven(world) as driver:
        send(driver, "a", "b:50")
        driver.advance(2)
        factory.made[0].is_broken = True
        driver.advance(2)
        assert reasons(driver) == ["far: the producer broke before it acknowledged the record"]
        send(driver, "c")
        driver.settle()
        assert (names(driver), factory.names) == (["a@0", "c@2"], [["a", "b"], ["c"]])
        assert factory.made[0].is_closed


@pytest.mark.parametrize("policy", [SKIP, DEAD_LETTER])
def test_settings_that_no_client_takes_stop_the_source_whatever_the_policy(factory: Factory, policy: Any) -> None:
    factory.error = ConfigError("kafka settings: no such property")
    world = World("producer", error_policy=policy)
    with driven(world) as driver:
        send(driver, "a")
        with pytest.raises(StreamsError, match="no such property"):
            driver.settle()
        assert driver.committed_offsets().get(0, 0) == 0


@pytest.mark.parametrize("blocking", [True, False])
def test_produce_in_a_handler_that_has_its_turn(factory: Factory, blocking: bool) -> None:
    world = World("producer", ahead=False)

    def told(ctx: EventContext[Any], deliveries: Any) -> None:
        world.done(ctx, ",".join(str(delivery.offset) for delivery in deliveries))

    async def waits(ctx: EventContext[Any], event: Named) -> None:
        told(ctx, await world.stage.produce(ctx, records_of(event)))

    def blocks(ctx: EventContext[Any], event: Named) -> None:
        told(ctx, world.stage.produce_and_wait(ctx, records_of(event), timeout_seconds=5.0))

    world.source.register_event_type(Named, blocks if blocking else waits, blocking=blocking)
    with driven(world) as driver:
        send(driver, "a b:2", "", "bad!", "c", *(["slow:30"] if blocking else []))
        driver.settle()
        assert names(driver) == ["0,1", "", "3"]
        assert [reason.partition(" ")[0] for reason in reasons(driver)] == ["bad!", *([""] if blocking else [])]


async def test_produce_and_wait_on_the_loop_is_refused() -> None:
    with pytest.raises(RuntimeError, match="await it instead"):
        bridge.wait_for(asyncio.get_running_loop(), lambda: pytest.fail("it would wait for itself"), None)


def test_a_stop_waits_for_what_is_sent(factory: Factory) -> None:
    world = World("producer")
    with driven(world) as driver:
        send(driver, "a:3", "b:3")
        driver.advance(1)
        driver.leave()
        assert (world.trace, driver.committed_offsets()) == ("3 a@0 b@1", {0: 2})
        assert factory.made[0].is_closed


async def test_an_outlet_that_is_closed_at_once_lets_its_thread_go() -> None:
    abandoned = asyncio.Event()
    worker: Any = SimpleNamespace(abandon=abandoned.set)
    outlet = Outlet(worker, lambda: pytest.fail("not wanted"), lambda _: True, lambda _: None, lambda *_: None)
    await asyncio.wait([outlet.close()], timeout=PATIENCE)
    await asyncio.wait_for(abandoned.wait(), PATIENCE)


def test_what_a_lost_partition_waits_to_send_is_not_sent(factory: Factory) -> None:
    factory.room = 1
    world = World("producer")
    with driven(world) as driver:
        send(driver, "a:50", "b")
        driver.advance(1)
        driver.evict()
        driver.settle()
        assert factory.names == [["a", "a", "b"]]
        assert names(driver) == ["a@1", "b@2"]


def test_secrets_are_not_shown_and_do_not_travel() -> None:
    producer: BatchProducer[Any] = BatchProducer(
        new_source(), bootstrap_servers="host:1", client_settings={"sasl.password": "s3cret"}
    )
    assert "s3cret" not in repr(producer) + repr(producer._definition)
    assert b"s3cret" not in pickle.dumps(producer._definition)


def test_to_record_is_what_forward_sends() -> None:
    record = to_record("t", Named("a"), key="k", headers=[("h", b"1")], partition=2)
    assert record == Record("t", b'{"name":"a"}', b"k", [("__grt__", b"Named"), ("h", b"1")], 2)
    with pytest.raises(EncodeError, match="key"):
        to_record("t", Named("a"), key=5)  # type: ignore[arg-type]
