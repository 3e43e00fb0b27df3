"""The fast ways beneath codecs, for hot paths, and the careful one for codecs of users'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from streams.codecs import Shortcut, reason
from streams.errors import EncodeError
from streams.protocols import Codec
from streams.round_trips import EVERYTHING, is_equal, read_back

T = TypeVar("T")


def bare_decoder(codec: Codec[T]) -> Callable[[bytes], T]:
    """Return the function beneath ``codec.decode``, for hot paths: it does not wrap errors. When it raises, whatever
    that is, ask ``codec.decode``: it finds the right words, or knows better."""
    bare: Callable[[bytes], T] = _bare(codec, "bare_decode", "decode")
    return bare


def encoder_of(codec: Codec[T]) -> Callable[[T], bytes]:
    """Return ``codec.encode``; a user's raises ``EncodeError`` when it returns a buffer, which may change, or text, and
    when the 1st, 2nd, 4th, 8th ... value does not come back."""
    if type(codec).__module__ == Shortcut.__module__:
        return codec.encode
    name, count = type(codec).__name__, 0

    def checked(value: T) -> bytes:
        data = codec.encode(value)
        if not isinstance(data, bytes):
            raise EncodeError(f"{name}.encode returned {type(data).__name__}, not bytes")
        nonlocal count
        count += 1
        if not count & (count - 1) or EVERYTHING[0]:
            _check(codec, value, data)
        return data

    return checked


def _check(codec: Codec[T], value: T, data: bytes) -> None:
    """Raise ``EncodeError`` if a codec cannot read what it wrote, or writes what it read otherwise. A codec without
    ``decode`` (``NotImplementedError``) only writes."""
    name = type(codec).__name__
    try:
        again = read_back(name, value, data, codec.decode, reason)
    except EncodeError as error:
        if isinstance(error.__cause__, NotImplementedError):
            return
        raise
    if type(again) is type(value) and not is_equal(value, again) and (other := codec.encode(again)) != data:
        raise EncodeError(f"{name} wrote {data[:80]!r}, and what it has read from that as {other[:80]!r}")


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
