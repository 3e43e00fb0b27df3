"""Events for topics that are written to in another form than with our headers (``form=CloudEvents(...)``).

An output gets its form where it is collected: there its cause is known, and what cannot be written is an error of the
handler. Sources without such topics never come here (``Partition.before_event``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from streams.formats.cloudevents import CloudEvents
from streams.records import TYPE_HEADER, Output, OwnSample
from streams.runtime.partition.context_fields import ContextFields, too_large

Forms = Mapping[str, CloudEvents]
NO_FORMS: Forms = {}


def forming(forms: Forms, inner: Callable[[Any], None] | None) -> Callable[[Any], None]:
    """Return a ``before_event`` that has the outputs of an event formed; ``inner``: that of its store."""

    def before_event(ctx: Any) -> None:
        ctx._outputs = FormedOutputs(ctx, forms)  # first: the store may close windows, which send, too
        if inner is not None:
            inner(ctx)

    return before_event


class FormedOutputs:
    """The outputs of one event, in the list of its unit, which may hold those of earlier ones."""

    def __init__(self, ctx: ContextFields, forms: Forms) -> None:
        self._ctx = ctx
        self._forms = forms
        self._outputs = ctx._outputs
        # Not by the length of the list: those of earlier events are taken out while a handler awaits (``Unit.split``).
        self._sent = 0
        if getattr(ctx, "_has_turn", False):  # a handler that has run ahead of its turn: all of the list is its own
            sent = [*ctx._outputs]
            ctx._outputs.clear()
            for output in sent:
                self.append(output)

    def append(self, output: Output) -> None:
        if isinstance(output, OwnSample):  # nothing that is sent: a metric that is added later must not shift the ids
            self._outputs.append(output)
            return
        form, headers = self._forms.get(output.topic), output.headers
        # A ready ``Record`` is sent as it is: only events have our header.
        if form is not None and headers and headers[0][0] == TYPE_HEADER:
            cause, time_ms = self._cause()
            event_id = f"{cause}/{self._sent}"
            output.value, output.headers = form.written(output.value, headers, event_id, time_ms)
            if len(output.value or b"") > self._ctx._limit:
                raise too_large(output.topic, len(output.value or b""), self._ctx._limit)
        self._outputs.append(output)
        self._sent += 1

    def _cause(self) -> tuple[str, int]:
        """Return the name of what has sent the event, and its time in milliseconds (-1: it has none)."""
        ctx = self._ctx
        timer, (topic, partition) = ctx.timer, ctx.topic_partition
        if timer is not None:  # with the origin: all visited keys of a run have one name
            return f"{topic}/{partition}/{timer.name}/{timer.due_ms}/{timer.origin & 0xFFFFFFFF:x}", timer.due_ms
        records = ctx._records
        if not records:
            return f"{topic}/{partition}/{ctx._host.rng.getrandbits(64):x}", -1
        last = records[-1]
        return f"{last.topic}/{last.partition}/{last.offset}", last.timestamp_ms

    # What the engine does with the list of an event's outputs.

    def __len__(self) -> int:
        return len(self._outputs)

    def __iter__(self) -> Iterator[Output]:
        return iter(self._outputs)

    def __getitem__(self, place: int) -> Output:
        return self._outputs[place]

    def __setitem__(self, place: int, output: Output) -> None:
        self._outputs[place] = output

    def __delitem__(self, places: slice) -> None:
        # What a window has sent that could not be reported.
        self._sent -= sum(not isinstance(output, OwnSample) for output in self._outputs[places])
        del self._outputs[places]
