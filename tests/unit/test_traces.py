"""Traces through every way of an event: one span each, and its context on all that it sends, once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anyio.lowlevel
import msgspec
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from streams import (
    AsyncBatcher,
    AsyncJobScheduler,
    BatchItem,
    BatchProducer,
    ErrorResponse,
    EventSource,
    EventSourceConfig,
    Record,
    Retry,
)
from streams.errors import RegistrationError
from streams.model.tracing import carried, stamped
from streams.observability import OpenTelemetryTraces
from streams.records import Headers, IncomingRecord
from streams.testing import TestDriver
from tests.vocabulary import Ordered, Reminded

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
SAMPLED: Headers = [("traceparent", PARENT.encode()), ("tracestate", b"shop=1")]
OUT = "out"


class Traced:
    """A source with one handler, its driver, and the spans that have ended."""

    def __init__(self) -> None:
        self.source: EventSource[None] = EventSource(
            EventSourceConfig(group_id="g", topic="in", num_partitions=1, bootstrap_servers="b:1")
        )
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.drivers: list[TestDriver[None]] = []

    def start(self) -> TestDriver[None]:
        OpenTelemetryTraces(self.source, tracer_provider=self.provider)
        driver = TestDriver(self.source, topics={OUT: 1})
        self.drivers.append(driver)
        return driver

    def spans(self, name: str) -> list[ReadableSpan]:
        found: list[ReadableSpan] = [span for span in self.exporter.get_finished_spans() if span.name == name]
        return found

    def close(self) -> None:
        for driver in self.drivers:
            driver.close()
        self.provider.shutdown()


@pytest.fixture
def traced() -> Iterator[Traced]:
    made = Traced()
    yield made
    made.close()


def span_id(span: ReadableSpan) -> str:
    context = span.get_span_context()
    assert context is not None
    return f"{context.span_id:016x}"


def check_carried(record: IncomingRecord, span: ReadableSpan) -> None:
    """The record carries this span's context: once, and with the state that came in."""
    headers = list(record.headers or ())
    assert [value for name, value in headers if name == "traceparent"] == [f"00-{TRACE}-{span_id(span)}-01".encode()]
    assert [value for name, value in headers if name == "tracestate"] == [b"shop=1"]


def current() -> str:
    return f"{trace.get_current_span().get_span_context().span_id:016x}"


def forward(ctx: Any, event: Ordered) -> None:
    ctx.forward(OUT, event, key=event.customer, headers=[h for h in ctx.input.headers or () if h[0] != "__grt__"])


def register_plain(source: EventSource[None], seen: list[str]) -> None:
    @source.register_event_type(Ordered)
    def plain(ctx: Any, event: Ordered) -> None:
        seen.append(current())
        forward(ctx, event)


def register_async(source: EventSource[None], seen: list[str]) -> None:
    @source.register_event_type(Ordered)
    async def handle(ctx: Any, event: Ordered) -> None:
        await anyio.lowlevel.checkpoint()
        seen.append(current())
        forward(ctx, event)


def register_blocking(source: EventSource[None], seen: list[str]) -> None:
    @source.register_event_type(Ordered, blocking=True)
    def handle(ctx: Any, event: Ordered) -> None:
        seen.append(current())
        forward(ctx, event)


def register_concurrent(source: EventSource[None], seen: list[str]) -> None:
    @source.register_event_type(Ordered, concurrency=4)
    async def handle(ctx: Any, event: Ordered) -> None:
        seen.append(current())
        await ctx.turn()
        forward(ctx, event)


def register_batch(source: EventSource[None], seen: list[str]) -> None:
    @source.register_event_type(Ordered, batch=True)
    def handle(ctx: Any, events: list[Ordered]) -> None:
        seen.append(current())
        for record, event in zip(ctx.records, events, strict=True):
            ctx.forward(OUT, event, headers=[h for h in record.headers if h[0] != "__grt__"])


WAYS = [register_plain, register_async, register_blocking, register_concurrent, register_batch]


@pytest.mark.parametrize("register", WAYS)
def test_a_traced_event_has_a_span_that_its_outputs_carry_once(traced: Traced, register: Any) -> None:
    seen: list[str] = []
    register(traced.source, seen)
    driver = traced.start()
    driver.send(Ordered("plain"))
    driver.send(Ordered("o1"), headers=SAMPLED)
    driver.send(Ordered("plain"))
    (span,) = traced.spans("process in")
    assert span.parent is not None
    assert f"{span.parent.trace_id:032x}-{span.parent.span_id:016x}" == PARENT[3:-3]
    assert seen == ["0" * 16, span_id(span), "0" * 16]
    assert span.attributes is not None
    expected = {
        "messaging.system": "kafka",
        "messaging.operation.type": "process",
        "messaging.operation.name": "process",
        "messaging.destination.name": "in",
        "messaging.destination.partition.id": "0",
        "messaging.consumer.group.name": "g",
        "messaging.kafka.offset": 1,
        "kes.event.type": "Ordered",
    }
    assert dict(span.attributes) == expected
    before, record, behind = driver.outputs(OUT)
    check_carried(record, span)
    assert {name for each in (before, behind) for name, _ in each.headers or ()} == {"__grt__"}


def test_a_batch_has_one_span_with_links_to_the_other_traces(traced: Traced) -> None:
    register_batch(traced.source, [])
    driver = traced.start()
    other = SAMPLED[0][1].replace(b"0af7", b"1bf7")  # type: ignore[union-attr]
    driver.send(Ordered("a"), headers=SAMPLED, wait=False)
    driver.send(Ordered("b"), wait=False)
    driver.send(Ordered("c"), headers=[("traceparent", other)])
    (span,) = traced.spans("process in")
    assert span.attributes is not None
    assert span.attributes["messaging.batch.message_count"] == 3
    assert [f"{link.context.trace_id:032x}" for link in span.links] == [TRACE.replace("0af7", "1bf7")]
    for record in driver.outputs(OUT):
        check_carried(record, span)


@pytest.mark.parametrize("kind", ["async", "thread"])
def test_a_job_has_a_span_of_its_own_and_its_finalizer_that_of_the_event(traced: Traced, kind: str) -> None:
    seen: list[str] = []

    async def job(item: str) -> str:
        seen.append(current())
        return item

    def blocking(item: str) -> str:
        seen.append(current())
        return item

    def finalizer(ctx: Any, item: str, result: str) -> None:
        seen.append(current())
        forward(ctx, Ordered(result))

    scheduler = AsyncJobScheduler(traced.source, job if kind == "async" else blocking, finalizer, name="charge")
    scheduler.register_event_type(Ordered, lambda record, event: (event.customer, event.customer))
    driver = traced.start()
    driver.send(Ordered("o1"), headers=SAMPLED)
    driver.send(Ordered("o2"))
    (span,), (job_span,) = traced.spans("process in"), traced.spans("job charge")
    assert seen == [span_id(job_span), span_id(span), "0" * 16, "0" * 16]
    assert job_span.parent is not None
    assert f"{job_span.parent.span_id:016x}" == span_id(span)
    check_carried(driver.outputs(OUT)[0], span)
    assert carried(driver.outputs(OUT)[1].headers) == ()


def test_a_call_of_a_batcher_has_a_span_with_links_to_the_other_events(traced: Traced) -> None:
    seen: list[str] = []

    async def execute(items: list[BatchItem[str]]) -> None:
        seen.append(current())

    def finalizer(ctx: Any, items: list[BatchItem[str]]) -> None:
        forward(ctx, Ordered(items[0].value))

    batcher = AsyncBatcher(traced.source, execute, finalizer, name="insert")
    batcher.register_event_type(Ordered, lambda record, event: (event.customer, event.customer))
    driver = traced.start()
    driver.send(Ordered("o1"), headers=SAMPLED, wait=False)
    driver.send(Ordered("o2"), wait=False)
    driver.send(Ordered("o3"), headers=SAMPLED)
    (call,), spans = traced.spans("batch insert"), traced.spans("process in")
    assert seen == [span_id(call)]
    assert call.parent is not None
    assert f"{call.parent.span_id:016x}" == span_id(spans[0])
    assert [f"{link.context.span_id:016x}" for link in call.links] == [span_id(spans[1])]
    first, between, last = driver.outputs(OUT)
    check_carried(first, spans[0])
    check_carried(last, spans[1])
    assert carried(between.headers) == ()


def test_records_of_a_batch_producer_carry_the_trace(traced: Traced) -> None:
    producer = BatchProducer(traced.source)
    producer.register_event_type(Ordered, lambda record, event: Record(OUT, b"{}", headers=record.headers))
    driver = traced.start()
    driver.send(Ordered("o1"), headers=SAMPLED)
    check_carried(driver.outputs(OUT)[0], traced.spans("process in")[0])


def test_a_failed_job_and_its_letter_are_in_the_trace(traced: Traced) -> None:
    async def job(item: str) -> str:
        raise ConnectionError("no line")

    scheduler = AsyncJobScheduler(traced.source, job, None, name="charge")
    policy = Retry(attempts=1, then=ErrorResponse.DEAD_LETTER)
    scheduler.register_event_type(Ordered, lambda record, event: (event.customer, event.customer), on_error=policy)
    driver = traced.start()
    driver.send(Ordered("o1"), headers=SAMPLED)
    (span,), (job_span,) = traced.spans("process in"), traced.spans("job charge")
    assert span.status.status_code is job_span.status.status_code is StatusCode.ERROR
    check_carried(driver.dead_letters()[0], span)


def test_an_interjection_is_in_the_trace_of_its_caller(traced: Traced) -> None:
    register_plain(traced.source, [])
    driver = traced.start()

    def work(ctx: Any) -> None:
        ctx.forward(OUT, Ordered(current()))

    with traced.provider.get_tracer("test").start_as_current_span("request") as request:
        driver.interject(0, work)
    driver.interject(0, work)
    (span,) = traced.spans(next(each.name for each in traced.exporter.get_finished_spans() if "interject" in each.name))
    assert span.parent is not None
    assert span.parent.span_id == request.get_span_context().span_id
    inside, outside = driver.outputs(OUT)
    assert msgspec.json.decode(inside.value or b"", type=Ordered).customer == span_id(span)
    (header,) = [value for name, value in inside.headers or () if name == "traceparent"]
    assert span_id(span).encode() in (header or b"")
    assert carried(outside.headers) == ()


def test_retries_and_the_dead_letter_are_in_the_events_span(traced: Traced) -> None:
    policy = Retry(attempts=2, then=ErrorResponse.DEAD_LETTER)

    @traced.source.register_event_type(Ordered, on_error=policy)
    def fails(ctx: Any, event: Ordered) -> None:
        raise ValueError("no such article")

    driver = traced.start()
    driver.send(Ordered("o1"), headers=SAMPLED)
    (span,) = traced.spans("process in")
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes is not None
    assert (span.attributes["error.type"], span.attributes["kes.response"]) == ("ValueError", "dead_letter")
    assert {event.attributes["exception.message"] for event in span.events if event.attributes} == {"no such article"}
    (letter,) = driver.dead_letters()
    check_carried(letter, span)
    assert letter.record_type == "Ordered"
    assert letter.header("__kes_dlq_attempts") == str(len(span.events)).encode()


def test_a_timer_goes_on_with_the_trace_of_the_event_that_set_it(traced: Traced) -> None:
    @traced.source.register_event_type(Ordered)
    def ordered(ctx: Any, event: Ordered) -> None:
        ctx.schedule_in(60, Reminded(event.customer))

    @traced.source.register_event_type(Reminded)
    def reminded(ctx: Any, event: Reminded) -> None:
        ctx.forward(OUT, event)

    driver = traced.start()
    driver.send(Ordered("o1"), headers=SAMPLED)
    driver.send(Ordered("o2"))
    driver.crash(0)
    driver.restart()  # the timers are restored from the changelog
    driver.advance(120)
    setting, firing = traced.spans("process in")
    assert firing.parent is not None
    assert f"{firing.parent.span_id:016x}" == span_id(setting)
    assert firing.attributes is not None
    assert firing.attributes["kes.timer"] is True
    assert "messaging.kafka.offset" not in firing.attributes
    traced_output, other = driver.outputs(OUT)
    check_carried(traced_output, firing)
    assert carried(other.headers) == ()


GARBAGE = [
    b"",
    b"garbage",
    None,
    b"\xff\xfe",
    PARENT.encode() + b"-more",
    PARENT.replace("00-", "ff-", 1).encode(),
    PARENT.upper().encode(),
    f"00-{'0' * 32}-b7ad6b7169203331-01".encode(),
    f"00-{TRACE}-{'0' * 16}-01".encode(),
    PARENT.encode() * 1000,
    PARENT.replace("-01", "-00").encode(),  # well formed, and not sampled
]


@pytest.mark.parametrize("value", GARBAGE, ids=range(len(GARBAGE)))
@pytest.mark.parametrize("register", WAYS[:2])
def test_garbage_and_what_is_not_sampled_begin_no_span_and_fail_nothing(
    traced: Traced, register: Any, value: bytes | None
) -> None:
    register(traced.source, [])
    driver = traced.start()
    driver.send(Ordered("o1"), headers=[("traceparent", value), ("tracestate", b"\xff=,,,")])
    assert len(driver.outputs(OUT)) == 1
    assert not traced.spans("process in")


def test_a_state_of_garbage_does_not_end_the_trace(traced: Traced) -> None:
    register_plain(traced.source, [])
    driver = traced.start()
    for state in (b"\xff", b"=,=", b"a=" + b"x" * 600, None):
        driver.send(Ordered("o1"), headers=[SAMPLED[0], ("tracestate", state)])
    assert len(traced.spans("process in")) == len(driver.outputs(OUT)) == 4
    assert all(carried(record.headers) for record in driver.outputs(OUT))


def test_two_parents_are_no_trace_and_later_versions_are_one() -> None:
    assert carried([*SAMPLED, *SAMPLED]) == ()
    assert carried([("traceparent", PARENT.replace("00-", "01-", 1).encode() + b"-more")])
    assert carried(None) == ()
    assert stamped([5], ()) == [5]  # type: ignore[list-item]  # is refused by the client, which names it


def test_a_second_tracer_and_one_after_the_start_are_refused(traced: Traced) -> None:
    OpenTelemetryTraces(traced.source)
    with pytest.raises(RegistrationError, match="has a tracer already"):
        OpenTelemetryTraces(traced.source)
    late: EventSource[None] = EventSource(traced.source.config)
    late._declared.router.freeze()
    with pytest.raises(RegistrationError, match="comes too late"):
        OpenTelemetryTraces(late)
