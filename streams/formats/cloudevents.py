"""CloudEvents in Kafka, in the two modes of its protocol binding: attributes in headers, or one JSON object.

https://github.com/cloudevents/spec/blob/v1.0.2/cloudevents/bindings/kafka-protocol-binding.md
"""

from __future__ import annotations

import base64
import binascii
import functools
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from streams.errors import ConfigError, DecodeError, EncodeError
from streams.formats.rules import Deleted, Found, TypeRule, without_type
from streams.outcomes import ErrorPolicy
from streams.records import TYPE_HEADER, VERSION_HEADER, Headers, IncomingRecord, ReceivedHeaders

PREFIX: Final = "ce_"
CONTENT_TYPE: Final = "content-type"
STRUCTURED: Final = "application/cloudevents"
"""The beginning of the content types of structured events and of batches."""
REQUIRED: Final = ("id", "source", "specversion", "type")
VERSION_ATTRIBUTE: Final = "kesversion"
"""The extension with the version of an event type; left out for version 1."""
_KNOWN: Final = (*REQUIRED, "datacontenttype", "dataschema", "subject", "time")
_SPEC: Final = re.compile(r"1\.[0-9]{1,4}")
_JSON: Final = re.compile(r"(application|text)/([a-z0-9.+-]*\+)?json")
_ASCII_NAME: Final = re.compile(r"[a-z0-9]+")


class CloudEvent(msgspec.Struct, frozen=True):
    """The attributes of a CloudEvent, as texts (``""``: it does not have it). ``extensions``: all others, by name."""

    id: str
    source: str
    specversion: str
    type: str
    datacontenttype: str = ""
    dataschema: str = ""
    subject: str = ""
    time: str = ""
    extensions: dict[str, str] = {}


class CloudEvents(TypeRule):
    """Records are CloudEvents, and their attribute ``type`` is the name of the event type: ``types=CloudEvents()``.

    Both modes are read. A value is what the codec of the type decodes: the payload. ``ctx.cloudevent`` has the
    attributes. ``missing``: the policy of records that are no CloudEvents; one that lacks a required attribute, batches
    and other structured formats than JSON cannot be read.

    ``source.output(topic, form=CloudEvents(source="/bank"))`` writes them, as ``structured`` says. The ``id`` is that
    of the cause, ``<topic>/<partition>/<offset>/<number>``: the same when the event is handled again, so that receivers
    can drop what they have seen. Of a timer it has the name, the due time and a hash of what set it instead, of the end
    of a durable job its name and the time of its start; of an interjection it is a random one. ``time`` is that of the
    cause.
    ``content_type`` is that of the values, which are JSON unless the classes have
    another codec. With ``source`` the rule of the source's own topic writes, too.
    """

    def __init__(
        self,
        *,
        source: str = "",
        structured: bool = False,
        content_type: str = "application/json",
        missing: ErrorPolicy | None = None,
        nulls: ErrorPolicy | type[Deleted] | None = None,
    ) -> None:
        super().__init__("CloudEvents()", nulls, missing)
        given: tuple[tuple[str, object], ...] = ("source", source), ("content_type", content_type)
        for name, text in given:
            if not isinstance(text, str) or not text.isprintable() or not (text or name == "source"):
                raise ConfigError(f"{name} of CloudEvents is {text!r}; it must be a text without control characters")
        self.source, self._structured = source, structured
        self._content_type, self._is_json = content_type, is_json(content_type)

    def _find(self, record: IncomingRecord) -> Found:
        found = _read(record)
        if found is None:
            return None, record.value
        attributes, value = found
        version = attributes.get(VERSION_ATTRIBUTE)
        of_version = () if version is None else ((VERSION_HEADER, version.encode()),)
        return ((TYPE_HEADER, attributes["type"].encode()), *of_version), value

    def written(
        self, value: bytes | None, headers: ReceivedHeaders, event_id: str, time_ms: int
    ) -> tuple[bytes | None, Headers]:
        """Return the value and headers of an event that is sent, made of those that it has with our headers. Raises
        ``EncodeError``."""
        kind, version = b"", None
        for name, content in headers:
            if name == TYPE_HEADER:
                kind = content or b""
            elif name == VERSION_HEADER:
                version = content
        others = without_type(headers)
        if clash := next((name for name, _ in others if name == CONTENT_TYPE or name.startswith(PREFIX)), None):
            raise EncodeError(f"the header {clash!r} of a CloudEvent is given by its form, CloudEvents(...)")
        attributes = {"specversion": "1.0", "id": event_id, "source": self.source, "type": kind.decode()}
        if time_ms >= 0:
            attributes["time"] = _time(time_ms)
        if version is not None:
            attributes[VERSION_ATTRIBUTE] = version.decode()
        if self._is_json and value is not None:
            try:  # a look at the whole text that makes no objects: what is not JSON must not be called so
                msgspec.json.decode(value, type=msgspec.Raw)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise EncodeError(
                    f"{attributes['type']} is written by a codec whose bytes are no JSON ({error}): give "
                    "CloudEvents(content_type=...)"
                ) from None
        if not self._structured:
            own = [(PREFIX + name, text.encode()) for name, text in attributes.items()]
            return value, [*own, (CONTENT_TYPE, self._content_type.encode()), *others]
        whole: dict[str, Any] = {**attributes, "datacontenttype": self._content_type}
        if value is not None:
            whole |= (
                {"data": msgspec.Raw(value)} if self._is_json else {"data_base64": base64.b64encode(value).decode()}
            )
        return msgspec.json.encode(whole), [(CONTENT_TYPE, b"application/cloudevents+json; charset=UTF-8"), *others]


def attributes_of(record: IncomingRecord | None) -> CloudEvent | None:
    """Return the attributes of a record as it was received; ``None``: it is no CloudEvent."""
    try:
        found = None if record is None else _read(record.as_received)
    except DecodeError:
        return None
    if found is None:
        return None
    known = {name: found[0].pop(name) for name in _KNOWN if name in found[0]}
    return CloudEvent(**known, extensions=found[0])


def is_json(content_type: str) -> bool:
    """Check for a content type whose data are JSON."""
    return _JSON.fullmatch(content_type.split(";")[0].strip().lower()) is not None


def _read(record: IncomingRecord) -> tuple[dict[str, str], bytes | None] | None:
    """Return the attributes of a record, and its payload; ``None``: it is no CloudEvent."""
    given, content_types = list[tuple[str, bytes | None]](), set[bytes]()
    for name, content in record.headers or ():
        if name.startswith(PREFIX):
            given.append((name[3:], content))
        elif len(name) == 12 and name.lower() == CONTENT_TYPE:
            content_types.add(content or b"")
    if len(content_types) > 1:
        raise DecodeError(f"a CloudEvent has one content type, and the record has {len(content_types)}")
    content_type, media = _media(content_types.pop()) if content_types else ("", "")
    if not media.startswith(STRUCTURED):
        return (_binary(given, content_type), record.value) if given else None
    if given:
        raise DecodeError(
            f"the record is a CloudEvent in two modes: its content type is {media}, and it has the header "
            f"{PREFIX + given[0][0]!r}"
        )
    if media != f"{STRUCTURED}+json":
        raise DecodeError(f"the content type {media!r} is not read: single CloudEvents in JSON are ({STRUCTURED}+json)")
    return _structured(record.value)


@functools.lru_cache(256)
def _media(content_type: bytes) -> tuple[str, str]:
    text = _text(CONTENT_TYPE, content_type)
    return text, text.split(";")[0].strip().lower()


def _binary(given: Iterable[tuple[str, bytes | None]], content_type: str) -> dict[str, str]:
    attributes = dict[str, str]()
    for name, content in given:
        if name in attributes:
            raise DecodeError(f"the attribute {name!r} of the CloudEvent is there twice")
        if content:
            attributes[name] = _text(name, content)
    if content_type:
        attributes["datacontenttype"] = content_type
    _check(attributes)
    return attributes


def _structured(value: bytes | None) -> tuple[dict[str, str], bytes | None]:
    try:
        whole = msgspec.json.decode(value or b"", type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"the structured CloudEvent is no JSON object: {error}") from None
    data, encoded = whole.pop("data", None), whole.pop("data_base64", None)
    attributes = {name: text for name, raw in whole.items() if (text := _plain(name, raw))}
    _check(attributes)
    if encoded is not None and bytes(encoded) != b"null":
        if data is not None:
            raise DecodeError("the CloudEvent has both 'data' and 'data_base64'")
        try:
            return attributes, base64.b64decode(_plain("data_base64", encoded), validate=True)
        except (ValueError, binascii.Error) as error:
            raise DecodeError(f"'data_base64' of the CloudEvent is no base64: {error}") from None
    if data is None or (content := bytes(data)) == b"null":
        return attributes, None
    content_type = attributes.get("datacontenttype")
    if content_type and content.startswith(b'"') and not is_json(content_type):
        return attributes, _plain("data", data).encode()  # data of another kind stand in a text, as they are
    return attributes, content


def _plain(name: str, raw: msgspec.Raw) -> str:
    try:
        value = msgspec.json.decode(raw, type=str | int | bool | None)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise DecodeError(f"the attribute {name!r} of the CloudEvent is no text, whole number or boolean") from None
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


@functools.lru_cache(1024)
def _is_name(name: str) -> bool:
    return _ASCII_NAME.fullmatch(name) is not None


def _check(attributes: dict[str, str]) -> None:
    for name in REQUIRED:
        if not attributes.get(name):
            raise DecodeError(f"the CloudEvent lacks the attribute {name!r}")
    for name in attributes:
        if not _is_name(name):
            raise DecodeError(f"{name[:40]!r} is no name of an attribute of a CloudEvent: a to z and 0 to 9")
    spec = attributes["specversion"]
    if spec != "1.0" and not _SPEC.fullmatch(spec):
        raise DecodeError(f"the CloudEvent has the specversion {spec[:20]!r}; 1.0 is read")


def _text(name: str, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise DecodeError(f"{name!r} of the CloudEvent is no UTF-8: {content[:20]!r}") from None


def _time(time_ms: int) -> str:
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (ValueError, OverflowError, OSError) as error:
        raise EncodeError(f"a CloudEvent's time is in the years to 9999, and {time_ms} ms is not") from error
