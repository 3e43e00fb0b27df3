"""``OpenTelemetryTraces``: the way of events through handlers, jobs and timers, as spans of OpenTelemetry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from streams.core.policy import text_of
from streams.model.tracing import Carrier, EventSpan
from streams.records import IncomingRecord
from streams.source.event_producer import EventProducer
from streams.source.event_source import EventSource

_PROPAGATOR: Final = TraceContextTextMapPropagator()
_LONGEST_TEXT: Final = 2_000
"""Characters of an error's text in a span."""


class OpenTelemetryTraces:
    """The traces of event sources and producers of this process.

    Records of a producer carry the trace that is current where they are sent. In an event source each event whose
    ``traceparent`` is sampled has a span, which is current in its handler and its jobs; what it sends carries it on.
    Spans go to ``tracer_provider`` (default: the global one, which the application sets; without one they go nowhere).
    Make it before the sources start, and before the producers' blocks. Raises ``RegistrationError`` for a source that
    has started, or has a tracer.
    """

    def __init__(
        self, *traced: EventSource[Any] | EventProducer, tracer_provider: TracerProvider | None = None
    ) -> None:
        tracer = trace.get_tracer("streams", tracer_provider=tracer_provider)
        for each in traced:
            attributes: dict[str, AttributeValue] = {"messaging.system": "kafka"}
            if isinstance(each, EventSource):
                attributes["messaging.consumer.group.name"] = each.config.group_id
            each.set_tracer(_Tracer(tracer, attributes))


class _Tracer:
    """Spans of one event source; the current trace of one producer. See ``streams.model.tracing.Tracer``."""

    def __init__(self, tracer: trace.Tracer, attributes: Mapping[str, AttributeValue]) -> None:
        self._tracer = tracer
        self._attributes = attributes

    def process(
        self, record: IncomingRecord, parent: Carrier, links: Sequence[Carrier] = (), count: int = 1
    ) -> EventSpan:
        attributes = {
            **self._attributes,
            "messaging.operation.type": "process",
            "messaging.operation.name": "process",
            "messaging.destination.name": record.topic,
            "messaging.destination.partition.id": str(record.partition),
        }
        if record.offset >= 0:
            attributes["messaging.kafka.offset"] = record.offset
        else:
            attributes["kes.timer"] = True
        if record.record_type:
            attributes["kes.event.type"] = record.record_type
        if count > 1:
            attributes["messaging.batch.message_count"] = count
        name = f"process {record.topic}"
        linked = [Link(_span_context(carrier)) for carrier in links]
        context = _PROPAGATOR.extract(dict(parent), otel_context.Context())
        return _EventSpan(self._tracer, self._tracer.start_span(name, context, SpanKind.CONSUMER, attributes, linked))

    def interject(self, name: str, topic: str, partition: int, parent: Carrier) -> EventSpan:
        attributes = {
            **self._attributes,
            "messaging.destination.name": topic,
            "messaging.destination.partition.id": str(partition),
        }
        context = _PROPAGATOR.extract(dict(parent), otel_context.Context())
        span = self._tracer.start_span(f"interject {name}", context, SpanKind.INTERNAL, attributes)
        return _EventSpan(self._tracer, span)

    def current(self) -> Carrier:
        return _carrier(None)


class _EventSpan:
    """One span. See ``streams.model.tracing.EventSpan``."""

    __slots__ = ("_context", "_is_over", "_tracer", "carrier", "span")

    def __init__(self, tracer: trace.Tracer, span: Span) -> None:
        self._tracer = tracer
        self.span = span
        self._context = trace.set_span_in_context(span, otel_context.Context())
        self.carrier: Carrier = _carrier(self._context)
        self._is_over = False

    def enter(self) -> None:
        otel_context.attach(trace.set_span_in_context(self.span))

    def active(self) -> AbstractContextManager[Any]:
        return trace.use_span(self.span, record_exception=False, set_status_on_exception=False)

    def child(self, name: str, links: Sequence[EventSpan] = ()) -> EventSpan:
        linked = [Link(_span_context(link.carrier)) for link in links]
        span = self._tracer.start_span(name, self._context, SpanKind.INTERNAL, links=linked)
        return _EventSpan(self._tracer, span)

    def failed(self, error: BaseException, attempts: int, response: str = "") -> None:
        kind, text = type(error).__name__, text_of(error)[:_LONGEST_TEXT]
        attributes: dict[str, AttributeValue] = {
            "exception.type": kind,
            "exception.message": text,
            "kes.attempts": attempts,
        }
        self.span.add_event("exception", attributes)
        if response:
            self.span.set_attributes({"error.type": kind, "kes.response": response})
            self.span.set_status(Status(StatusCode.ERROR, text))

    def end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self.span.end()


def _carrier(context: otel_context.Context | None) -> Carrier:
    found: dict[str, str] = {}
    _PROPAGATOR.inject(found, context)
    return tuple(found.items())


def _span_context(carrier: Carrier) -> SpanContext:
    context = _PROPAGATOR.extract(dict(carrier), otel_context.Context())
    return trace.get_current_span(context).get_span_context()
