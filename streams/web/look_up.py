"""Keys looked up in a view. A key comes as text or base64, and goes through the codec of the view."""

from __future__ import annotations

import base64
from typing import Any, Final

import msgspec

from streams.cli.records import one_line, plain, shortened
from streams.errors import ConfigError, StreamsError
from streams.protocols import Codec
from streams.views.view import View

LONGEST_VALUE: Final = 64 * 1024
"""Characters of a value that are shown."""


def looked_up(view: View[Any, Any], text: str, *, is_base64: bool) -> dict[str, Any]:
    """Return what the view has for a key, or the problem with it."""
    try:
        key = key_of(view.codecs[0], text, is_base64=is_base64)
        value = view.get(key)
    except StreamsError as error:
        return {"found": False, "value": "", "problem": str(error)[:500]}
    shown = "" if value is None else shortened(one_line(plain(value)), LONGEST_VALUE)
    return {"found": value is not None, "value": shown, "problem": ""}


def key_of(codec: Codec[Any], text: str, *, is_base64: bool) -> Any:
    """Return the key that a text names: the bytes of base64, the text itself, or, where the codec takes no text, its
    JSON value (``17``, ``["a", 1]``). Raises ``ConfigError``."""
    if is_base64:
        try:
            return codec.decode(base64.b64decode(text, validate=True))
        except Exception as error:  # a codec of the user's may raise anything
            raise ConfigError("the key is no base64 of a key of this view") from error
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
        raise ConfigError("the view has no key of that form") from error
