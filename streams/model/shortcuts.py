"""The fast ways beneath codecs, for hot paths, and the careful one for codecs of users'."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

from streams.errors import EncodeError
from streams.model.reasons import cause, reason
from streams.model.round_trips import EVERYTHING, Kinds, difference, is_equal
from streams.protocols import Codec

_log = logging.getLogger(__name__)

_said: Final[set[type]] = set()
"""Codecs that were warned of: an encoder is made for each partition, and for each row of a lookup."""

_CHECKED: Final = "streams.codecs"
"""The module whose codecs check by themselves what they write. It imports this one, so it stands here by its name."""

T = TypeVar("T")


class Shortcut(NamedTuple):
    """Fast way to encode, for hot paths: ``encode`` is the function beneath ``codec.encode``, which wraps no errors,
    for values of exactly the class ``of`` (``None``: for none, there is no shortcut). When it raises, whatever that is,
    ask ``codec.encode``: it finds the right words, or knows better. The same when a field's value is of none of its
    ``kinds`` (``round_trips.Risk``), or a float that is not finite."""

    encode: Callable[[Any], bytes]
    of: type | None = None
    kinds: Kinds = ()


def bare_decoder(codec: Codec[T]) -> Callable[[bytes], T]:
    """Return the function beneath ``codec.decode``, for hot paths: it does not wrap errors. When it raises, whatever
    that is, ask ``codec.decode``: it finds the right words, or knows better."""
    bare: Callable[[bytes], T] = _bare(codec, "bare_decode", "decode")
    return bare


def encoder_of(codec: Codec[T], *, always: bool = False) -> Callable[[T], bytes]:
    """Return ``codec.encode``; a user's raises ``EncodeError`` when it returns a buffer, which may change, or text, and
    when the 1st, 2nd, 4th, 8th ... value cannot be read again. After one that cannot, the next one is read, too: what
    is refused once is refused at each attempt. ``always``: every value is read, and refused if it is another one."""
    if type(codec).__module__ == _CHECKED:
        return codec.encode
    name, count = type(codec).__name__, 0
    is_lossy = bool(getattr(codec, "lossy", False))

    def checked(value: T) -> bytes:
        data = codec.encode(value)
        if not isinstance(data, bytes):
            raise EncodeError(f"{name}.encode returned {type(data).__name__}, not bytes")
        nonlocal count
        if not count & (count + 1) or always or EVERYTHING[0]:
            wrong = _loss(codec, value, data)
            if wrong and not is_lossy:
                text = f"{name} does not come back as it is written: {wrong}"
                if always or EVERYTHING[0]:
                    raise EncodeError(f"{text}. If this is meant, say so: lossy = True in the class of the codec")
                if type(codec) not in _said:
                    _said.add(type(codec))
                    _log.warning("%s (said once; if this is meant, set lossy = True in the class of the codec)", text)
        count += 1
        return data

    return checked


def _loss(codec: Codec[T], value: T, data: bytes) -> str:
    """Say what a codec that rounds does not give back of a value. Raises ``EncodeError`` if it cannot read what it
    wrote, or writes what it read otherwise. A codec without ``decode`` (``NotImplementedError``) only writes."""
    try:
        again = codec.decode(data)
    except (MemoryError, EncodeError):
        raise
    except NotImplementedError:
        return ""
    except Exception as error:
        text = f"{type(codec).__name__} is written so that it cannot be read back: {reason(error)}"
        raise EncodeError(text) from cause(error)
    wrong = "" if is_equal(value, again) else difference(value, again)
    if wrong and codec.encode(again) != data == codec.encode(value):  # not by a nonce
        raise EncodeError(f"{type(codec).__name__} does not come back as it is written, each time anew: {wrong}")
    return wrong


def bare_encoder(codec: Codec[T]) -> Callable[[T], bytes]:
    """Return the function beneath ``codec.encode``, as ``bare_decoder`` does."""
    bare: Callable[[T], bytes] = _bare(codec, "bare_encode", "encode")
    return encoder_of(codec) if bare == codec.encode else bare


def shortcut_of(codec: Codec[Any]) -> Shortcut:
    """The ``Shortcut`` of a codec, if it has one; not that of a base class whose ``encode`` it does not share."""
    found = _bare(codec, "shortcut", "encode")
    return found if isinstance(found, Shortcut) else Shortcut(encoder_of(codec))


def _bare(codec: object, bare: str, careful: str) -> Any:
    for cls in () if careful in getattr(codec, "__dict__", ()) else type(codec).__mro__:
        if bare in vars(cls):
            return getattr(codec, bare)
        if careful in vars(cls):
            break  # of the user's, and does more than what it inherits
    return getattr(codec, careful)
