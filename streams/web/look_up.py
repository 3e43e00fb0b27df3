"""Keys looked up: in a view, or in the state of the source, at the member that owns them.

A key comes as text or base64, and goes through the codec of its table.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec

from streams.errors import ConfigError, EncodeError, StreamsError
from streams.looks.records import one_line, plain, shortened
from streams.protocols import Codec
from streams.queries.reader import StateReader
from streams.queries.searching import search
from streams.source.event_source import EventSource
from streams.views.view import View
from streams.web.group_client import GroupClient

LONGEST_VALUE: Final = 64 * 1024
"""Characters of a value that are shown."""
OWNER_SECONDS: Final = 3.5
"""The time for the owner of a key to be found, and to answer."""
MOST_AT_A_TIME: Final = 4
"""Questions to owners that are under way; others wait."""
_LONGEST_PROBLEM: Final = 500


class QuestionRefused(StreamsError):
    """A question that cannot be read, or that names no key or partition of this state."""


def looked_up(view: View[Any, Any], text: str, *, is_base64: bool) -> dict[str, Any]:
    """Return what the view has for a key. Raises ``QuestionRefused``, and as ``View.get``."""
    value = view.get(key_of(view.codecs[0], text, is_base64=is_base64))
    return _found(value)


def problem_with(error: StreamsError) -> dict[str, Any]:
    """Return a failed look-up, as a page shows it."""
    return _found(None, str(error))


class AskedProof(msgspec.Struct, frozen=True, kw_only=True):
    """The proof that a question to an owner asks for. ``partition``: where the key of the records is another one.
    ``confirm`` and ``max_staleness`` (seconds): as of ``StateReader.get``."""

    partition: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    confirm: bool = False
    max_staleness: Annotated[float, msgspec.Meta(gt=0, le=3600)] | None = None

    def __str__(self) -> str:
        if self.max_staleness is not None:
            return f"the owner, or a copy that lacks nothing older than {self.max_staleness:g} s"
        return f"the owner, {'confirmed by a commit after the read' if self.confirm else 'by a commit or its lease'}"


class OwnerReads:
    """The committed state of the source, key by key, from the members that own it. On the loop of the monitor."""

    def __init__(self, source: EventSource[Any], group_client: GroupClient) -> None:
        self._source, self._group_client = source, group_client
        self._room = asyncio.Semaphore(MOST_AT_A_TIME)

    async def ask(self, text: str, parameters: Mapping[str, str], *, is_base64: bool) -> dict[str, Any]:
        """Return what the owner of a key has for it, and what that proves. ``parameters``: those of the request, among
        them the fields of a ``AskedProof`` and ``table``, the structure of a ``Stores``; empty ones count as
        missing. Raises ``QuestionRefused``, and as ``StateReader``."""
        proof, table = _proof_of(parameters), parameters.get("table", "")
        number = self._source.config.num_partitions
        if proof.partition is not None and proof.partition >= number:
            raise QuestionRefused(f"partition {proof.partition}: there are 0 to {number - 1}")
        # A reader of its own: none is left open while there are no viewers.
        servers = self._group_client.servers
        async with self._room, StateReader.of(self._source, table=table, bootstrap_servers=servers) as reader:
            key = key_of(reader.codecs[0], text, is_base64=is_base64)
            asked = msgspec.structs.asdict(proof)
            try:
                answers, absence = await search(reader, key, **asked, timeout_seconds=OWNER_SECONDS)
            except (ConfigError, EncodeError) as error:  # of the key, or of routed_by
                raise QuestionRefused(str(error)) from error
        others = ", ".join(str(answer.partition) for answer in answers[1:])
        return {
            **_found(None if absence else answers[0].value),
            "note": absence or (f"partitions that have the key too, with values of their own: {others}" * bool(others)),
            "partition": None if absence and others else answers[0].partition,
            "parked": any(answer.parked for answer in answers),
            "due": any(answer.due for answer in answers),
            "served_by": ", ".join(sorted({answer.served_by for answer in answers})),
            "positions": {str(place): offset for answer in answers for place, offset in answer.positions.items()},
            "as_of_ms": int(min(answer.as_of for answer in answers) * 1000),
            "proof": str(proof),
        }


def key_of(codec: Codec[Any], text: str, *, is_base64: bool) -> Any:
    """Return the key that a text names: the bytes of base64, the text itself, or, where the codec takes no text, its
    JSON value (``17``, ``["a", 1]``). Raises ``QuestionRefused``."""
    if is_base64:
        try:
            return codec.decode(base64.b64decode(text, validate=True))
        except Exception as error:  # a codec of the user's may raise anything
            raise QuestionRefused("the key is no base64 of a key of this table") from error
    tries: list[Any] = [text]
    try:
        value = msgspec.json.decode(text)
        tries.append(tuple(value) if isinstance(value, list) else value)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        pass
    for key in tries:
        try:
            codec.encode(key)
        except Exception:  # as above
            continue
        return key
    try:
        return codec.decode(text.encode())
    except Exception as error:
        raise QuestionRefused("the table has no key of that form") from error


def _found(value: Any, problem: str = "") -> dict[str, Any]:
    shown = "" if value is None else shortened(one_line(plain(value)), LONGEST_VALUE)
    return {"found": value is not None, "value": shown, "problem": shortened(problem, _LONGEST_PROBLEM)}


def _proof_of(parameters: Mapping[str, str]) -> AskedProof:
    given = {name: parameters[name] for name in AskedProof.__struct_fields__ if parameters.get(name)}
    if "null" in map(str.lower, given.values()):  # which would be read as none
        raise QuestionRefused("the question cannot be read: null is no value")
    try:
        return msgspec.convert(given, AskedProof, strict=False)
    except msgspec.ValidationError as error:
        raise QuestionRefused(f"the question cannot be read: {error}") from None
