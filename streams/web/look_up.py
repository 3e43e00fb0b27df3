"""Keys looked up: in a view, or in the state of the source, at the member that owns them.

A key comes as text or base64, and goes through the codec of its table.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec

from streams.answers import Answer
from streams.cli.records import one_line, plain, shortened
from streams.errors import ConfigError, StreamsError
from streams.event_source import EventSource
from streams.protocols import Codec
from streams.queries.reader import StateReader
from streams.views.view import View
from streams.web.group_look import GroupLook

LONGEST_VALUE: Final = 64 * 1024
"""Characters of a value that are shown."""
OWNER_SECONDS: Final = 3.5
"""The time for the owner of a key to be found, and to answer."""
MOST_AT_A_TIME: Final = 4
"""Questions to owners that are under way; others wait."""
_LONGEST_PROBLEM: Final = 500


def looked_up(view: View[Any, Any], text: str, *, is_base64: bool) -> dict[str, Any]:
    """Return what the view has for a key, or the problem with it."""
    try:
        key = key_of(view.codecs[0], text, is_base64=is_base64)
        value = view.get(key)
    except StreamsError as error:
        return _found(None, str(error))
    return _found(value)


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


class OwnerLook:
    """The committed state of the source, key by key, from the members that own it. On the loop of the monitor."""

    def __init__(self, source: EventSource[Any], look: GroupLook) -> None:
        self._source, self._look = source, look
        self._room = asyncio.Semaphore(MOST_AT_A_TIME)

    async def ask(self, text: str, parameters: Mapping[str, str], *, is_base64: bool) -> dict[str, Any]:
        """Return what the owner of a key has for it, and what that proves; or the problem. ``parameters``: those of
        the request, among them the fields of a ``AskedProof``; empty ones count as missing."""
        try:
            proof = _proof_of(parameters)
            # A reader of its own: none is left open while there are no viewers.
            async with self._room, StateReader.of(self._source, bootstrap_servers=self._look.servers) as reader:
                key = key_of(reader.codecs[0], text, is_base64=is_base64)
                if proof.partition is None and not isinstance(key, str | bytes):
                    raise ConfigError(f"keys are {type(key).__name__} here: name the partition of their records")
                answer: Answer[Any] = await reader.get(
                    key, timeout_seconds=OWNER_SECONDS, **msgspec.structs.asdict(proof)
                )
        except StreamsError as error:
            return _found(None, str(error))
        return {
            **_found(answer.value),
            "partition": answer.partition,
            "served_by": answer.served_by,
            "positions": {str(place): offset for place, offset in answer.positions.items()},
            "as_of_ms": int(answer.as_of * 1000),
            "proof": str(proof),
        }


def key_of(codec: Codec[Any], text: str, *, is_base64: bool) -> Any:
    """Return the key that a text names: the bytes of base64, the text itself, or, where the codec takes no text, its
    JSON value (``17``, ``["a", 1]``). Raises ``ConfigError``."""
    if is_base64:
        try:
            return codec.decode(base64.b64decode(text, validate=True))
        except Exception as error:  # a codec of the user's may raise anything
            raise ConfigError("the key is no base64 of a key of this table") from error
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
        raise ConfigError("the table has no key of that form") from error


def _found(value: Any, problem: str = "") -> dict[str, Any]:
    shown = "" if value is None else shortened(one_line(plain(value)), LONGEST_VALUE)
    return {"found": value is not None, "value": shown, "problem": shortened(problem, _LONGEST_PROBLEM)}


def _proof_of(parameters: Mapping[str, str]) -> AskedProof:
    given = {name: parameters[name] for name in AskedProof.__struct_fields__ if parameters.get(name)}
    try:
        return msgspec.convert(given, AskedProof, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the question cannot be read: {error}") from None
