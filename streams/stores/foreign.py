"""Rows in the changelogs of other programs, for ``kes offsets start --state``.

Each format only takes away what the other toolkit has put around key and value. What the bytes mean is known to the
program that wrote them, so a function of the user's decodes them. Sources: Kafka's
``ChangeLoggingTimestampedKeyValueBytesStore``, ``WindowKeySchema`` and ``SessionKeySchema``; quixstreams'
``state/base/transaction.py``; Faust's ``tables/base.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from streams.errors import DecodeError
from streams.records import IncomingRecord, ReceivedHeaders

_FAMILY, _PROCESSED, _STAMPED = "__column_family__", "__processed_tp_offsets__", "__ttl_stamped__"
_SYSTEM: Final = b"__ttl_system__"  # a note about the store, and no row
_NEVER: Final = (1 << 64) - 1
_BUFFERS: Final = re.compile("SUPPRESS-STATE-STORE|KSTREAM-(JOIN|OUTER)|FK-JOIN-SUBSCRIPTION")
_PICKLE: Final = b"\x80"  # of all protocols from 2 on; no text begins with it


class ForeignRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A row in the changelog of another program. ``key`` and ``value`` are its serializers' bytes, and so
    ``timestamp_ms`` its record's. ``start_ms`` and ``end_ms``: of a window or session, as far as its key has them;
    ``end_ms`` of a row that expires: when."""

    topic: str
    partition: int
    offset: int
    key: bytes
    value: bytes
    timestamp_ms: int
    headers: ReceivedHeaders = ()
    start_ms: int | None = None
    end_ms: int | None = None


class ForeignFormat(msgspec.Struct, frozen=True):
    """A format of ``--state``. ``row`` reads a row, and raises ``DecodeError``; ``None``: the record is none.
    ``names``: the beginning of a changelog's name, if the group ``{group}`` wrote it. ``record_key`` returns the key
    that the record of an event had, by that of its row; ``None``: it does not tell. ``is_cut``: old rows are deleted
    from the log on purpose."""

    row: Callable[[IncomingRecord], ForeignRow | None]
    names: str = ""
    record_key: Callable[[bytes], bytes | None] = lambda key: key
    is_cut: bool = False


def row_of(record: IncomingRecord, **changes: object) -> ForeignRow:
    """Return a record of a changelog, which has key and value, as a row."""
    facts = {name: getattr(record, name) for name in ("topic", "partition", "offset", "key", "value", "timestamp_ms")}
    return ForeignRow(**{**facts, "headers": record.headers or (), **changes})


def _of_kafka_streams(record: IncomingRecord) -> ForeignRow:
    if _BUFFERS.search(record.topic):
        raise DecodeError("it is the buffer of a join or of suppress(), and no state that a source could go on with")
    return row_of(record)


def _window(record: IncomingRecord) -> ForeignRow:
    key = record.key or b""
    if len(key) < 12 or any(key[-4:]):  # the number is for stores that keep several values of one key and time
        raise DecodeError("its key does not end with a window: 8 bytes of time, and 4 that are zero")
    return row_of(record, key=key[:-12], start_ms=_number(key[-12:-4]))


def _session(record: IncomingRecord) -> ForeignRow:
    key = record.key or b""
    if len(key) < 16 or (start := _number(key[-8:])) > (end := _number(key[-16:-8])):
        raise DecodeError("its key does not end with a session: 8 bytes for its end, and 8 for its start")
    return row_of(record, key=key[:-16], start_ms=start, end_ms=end)


def _of_faust(record: IncomingRecord) -> ForeignRow:
    if (record.value or b"").startswith(_PICKLE) or (record.key or b"").startswith(_PICKLE):
        raise DecodeError("it is a pickle, which could run any code. Let the old program write the table as JSON first")
    return row_of(record)


def _of_quixstreams(record: IncomingRecord) -> ForeignRow | None:
    family, value = record.header(_FAMILY), record.value or b""
    if family == _SYSTEM:
        return None
    if family != b"default":
        raise DecodeError(f"it is of the family {family!r}: of a windowed store, or no row of quixstreams")
    if record.header(_STAMPED) is None:
        return row_of(record)
    if len(value) < 8:
        raise DecodeError("its header says that 8 bytes stand in front of the value, and there are less")
    expires = _number(value[:8])
    return row_of(record, value=value[8:], end_ms=None if expires == _NEVER else expires)


def _number(data: bytes) -> int:
    return int.from_bytes(data, "big")


def _json_key(key: bytes) -> bytes | None:
    try:
        found = msgspec.json.decode(key)
    except msgspec.DecodeError:
        return key
    text = found[0] if isinstance(found, list) and found else found  # of a windowed table: the key, and its window
    return text.encode(errors="replace") if isinstance(text, str) else None


FORMATS: Final[Mapping[str, ForeignFormat]] = {
    "kafka-streams": ForeignFormat(_of_kafka_streams, "{group}-"),
    "kafka-streams-window": ForeignFormat(_window, "{group}-", is_cut=True),
    "kafka-streams-session": ForeignFormat(_session, "{group}-", is_cut=True),
    "faust": ForeignFormat(_of_faust, "{group}-", _json_key),
    # It puts the record's key in front of its own.
    "quixstreams": ForeignFormat(
        _of_quixstreams, "changelog__{group}--", lambda key: _json_key(key.rpartition(b"|")[0])
    ),
    "raw": ForeignFormat(row_of),
}


def processed(record: IncomingRecord) -> dict[str, int]:
    """Return by topic the offset of the record that was handled last before quixstreams wrote this one; nothing for
    records of others. Raises ``DecodeError``."""
    found = record.header(_PROCESSED)
    try:
        return msgspec.json.decode(found, type=dict[str, int] | None) or {} if found else {}
    except msgspec.DecodeError as error:
        raise DecodeError(f"its header {_PROCESSED} cannot be read: {error}") from error
