"""One trace on a real broker: from the program that produces, through an event source and a timer, to its outputs."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from streams import EventProducer, EventSource
from streams.model.tracing import carried
from streams.observability import OpenTelemetryTraces
from tests.broker.engine_kit import Lab, Running
from tests.vocabulary import Added

pytestmark = [pytest.mark.broker, pytest.mark.asyncio, pytest.mark.timeout(180)]


async def test_a_trace_goes_from_the_producer_through_the_source_and_its_timer_to_the_outputs(lab: Lab) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    await lab.create()
    source: EventSource[None] = EventSource(lab.config())

    @source.register_event_type(Added)
    def added(ctx: Any, event: Added) -> None:
        headers = () if ctx.input is None else [each for each in ctx.input.headers if each[0] != "__grt__"]
        ctx.forward(lab.output, event, headers=headers)  # those of the trace among them
        if ctx.timer is None:
            ctx.schedule_in(0.1, Added(event.name, 2))

    producer = EventProducer(lab.bootstrap, transactional_id=f"{lab.group}-producer")
    OpenTelemetryTraces(source, producer, tracer_provider=provider)
    async with Running(source), producer as running:
        with provider.get_tracer("test").start_as_current_span("request") as request:
            await running.send(lab.topic, Added("a"), key="a")
            async with running.transaction() as records:
                records.send(lab.topic, Added("b"), key="b")
        await running.send(lab.topic, Added("c"), key="c")
        await lab.until_outputs(6)
    provider.shutdown()
    context = request.get_span_context()
    spans = {f"{span.context.span_id:016x}": span for span in exporter.get_finished_spans() if span.context is not None}
    inputs, outputs = await lab.records(lab.topic), await lab.records(lab.output)
    for record in inputs:
        sent = [value for name, value in record.headers or () if name == "traceparent"]
        expected = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}".encode()
        assert sent == ([] if record.key == b"c" else [expected])
    parents = []
    for record in outputs:
        found = [value for name, value in record.headers or () if name == "traceparent"]
        if b'"c"' in (record.value or b""):
            assert not carried(record.headers)
            continue
        (value,) = found
        span = spans[(value or b"").decode().split("-")[2]]
        assert span.parent is not None
        assert span.parent.trace_id == context.trace_id
        parents.append(f"{span.parent.span_id:016x}")
    of_request = parents.count(f"{context.span_id:016x}")
    assert (len(parents), of_request) == (4, 2)
    assert all(parent in spans for parent in parents)  # those of the timers' are the spans of the events that set them
