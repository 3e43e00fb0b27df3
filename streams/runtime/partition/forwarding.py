# cython: annotation_typing=True
"""``EventContext.forward``. A leaf (``sak/leaves.py``).

Its types stand in its annotations: a function with arguments that have to be named can have no line in a ``.pxd``.
"""

from __future__ import annotations

from typing import Any, Final

from streams.errors import EncodeError
from streams.events import EventType, event_type_of, known_type
from streams.records import IncomingRecord, Output
from streams.runtime.partition.context_fields import ContextFields, outlived, too_large
from streams.sak import leaves

CLASSES: Final = (ContextFields, EventType, IncomingRecord, Output)
"""Whose fields are read by their places in memory when this is compiled."""


def forward(
    self: ContextFields,
    topic: Any,
    event: Any = None,
    /,
    *,
    key: Any = None,
    headers: Any = (),
    partition: Any = -1,
    timestamp_ms: Any = 0,
) -> None:
    """Send an event object (its type header is set by itself), or a ready ``Record``, in this event's
    transaction.

    ``partition`` -1: the key decides (murmur2, as Java does). ``timestamp_ms`` 0: the time of sending. Raises
    ``EncodeError``, ``RecordRefused`` (larger than a producer takes), ``RegistrationError`` (not an event class).
    """
    if self._closed:
        raise outlived("forward", self)
    if not isinstance(topic, str):
        self._collect(topic)
        return
    event_type: EventType[Any] = known_type(type(event)) or event_type_of(type(event))
    encode = event_type.bare_encode
    try:
        value = encode(event)
        fields: tuple[Any, ...] = event_type.kinds
        # As in ``Table.put`` and ``events._by_shortcut``: written out, since this runs once a value.
        for name, kind, others in fields:
            part = getattr(event, name)
            found = type(part)
            if found is not kind:
                if found in others:
                    continue
            elif kind is not float or part - part == 0.0:  # finite
                continue
            value = event_type.encode(event)  # it reads the value back, and raises if no reader takes it
            break
    except Exception:
        if encode is event_type.encode:
            raise
        value = event_type.encode(event)
    if type(key) is str:
        text: str = key
        try:
            key = text.encode()
        except UnicodeEncodeError as error:
            raise EncodeError(f"the key for {topic} has no form in UTF-8: {error}") from None
    elif key is not None and type(key) is not bytes:
        raise EncodeError(
            f"the key for {topic} is a {type(key).__name__}; use str, bytes or None, or encode it yourself"
        )
    if len(value) > self._limit:
        raise too_large(topic, len(value), self._limit)
    shared: Any = event_type.headers
    if headers:
        shared = shared + list(headers)  # another list: the type's own is in all of its records
    record: IncomingRecord | None = self.input
    tp = self.topic_partition
    origin = self._origin if record is None else record.offset
    self._outputs.append(Output(topic, value, key, shared, partition, timestamp_ms, tp.partition, origin))


leaves.use(globals())
