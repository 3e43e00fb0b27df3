"""Secondary indexes of a table: its keys by something in their values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, Generic, TypeVar

from streams.codecs import codec_for
from streams.errors import ConfigError, DecodeError, EncodeError, StoreError
from streams.model.reasons import reason
from streams.protocols import Codec
from streams.stores.derived import Ranking, start_of
from streams.stores.engines import after_prefix
from streams.stores.parts import PlaceSpan

V = TypeVar("V")

_NOTHING: Final = object()


class Index(Generic[V]):
    """A declaration: the entries of a table by what ``of`` takes from their values, which is of ``type_``: ``str``,
    ``bytes``, ``int``, or a tuple of them.

    ``of`` is a pure function; values for which it returns ``None`` are not in the index. ``unique``: a put that would
    give a second key the same raises ``StoreError``. Raises ``ConfigError`` for other types.
    """

    def __init__(self, type_: Any, of: Callable[[V], Any], *, unique: bool = False) -> None:
        self.codec: Codec[Any] = codec_for(type_)
        if not getattr(self.codec, "order_preserving", False):
            raise ConfigError(f"an index is made of str, bytes, int or tuples of them, not of {type_!r}")
        if not callable(of):
            raise ConfigError(f"an index needs a function of the value, not {of!r}")
        self.type_ = type_
        self.of = of
        self.unique = unique


class TableIndex(Generic[V]):
    """One index of one table. Entries that could not be placed are kept for ``check``."""

    def __init__(
        self, index: Index[V], name: str, decode: Callable[[bytes, bytes], V | None], shown: Callable[[bytes], object]
    ) -> None:
        """``name``: as errors call it. ``decode`` gets key and value. ``shown`` is a key for errors' texts."""
        self._codec = index.codec
        self._of = index.of
        self._is_unique = index.unique
        self._name = name
        self._decode = decode
        self._shown = shown
        self._known: Any = _NOTHING  # the rank of the value that is about to be put
        self._unreadable: dict[bytes, Exception] = {}
        self.order = Ranking(self._rank)

    def entered(self, key: bytes, value: bytes, /) -> None:
        self._unreadable.pop(key, None)
        if self._known is not _NOTHING:  # as ``prepare`` has it, which saw the value before it was encoded
            self.order.enter(key, self._known)
            return
        try:
            rank = self._rank(key, value)
        except Exception as error:  # of the value, or of the user's function: no reason to lose the copy
            self._unreadable[key] = error
            rank = None
        self.order.enter(key, rank)

    def left(self, key: bytes, /) -> None:
        self._unreadable.pop(key, None)
        self.order.left(key)

    def clear(self) -> None:
        self._unreadable.clear()
        self.order.clear()

    def prepare(self, value: V, key: bytes) -> None:
        """Compute the rank of a value that is about to be put; until ``done``. Raises ``StoreError`` if the index
        refuses it, and what the user's function raises: before anything is changed."""
        rank = self._rank_of(value)
        if rank is not None and self._is_unique:
            if key not in self._unreadable:  # which is mended by this
                self.check()
            other = next(self.order.others(rank, key), None)
            if other is not None:
                raise StoreError(
                    f"{self._name} is unique: {self._shown(key)!r} was put with what {self._shown(other)!r} has already"
                )
        self._known = rank  # the last step: whatever is refused above has changed nothing

    def done(self) -> None:
        """Forget the value that was put."""
        self._known = _NOTHING

    def check(self) -> None:
        """Raise ``StoreError`` if an entry that was loaded could not be placed."""
        if self._unreadable:
            key, error = next(iter(self._unreadable.items()))
            raise StoreError(
                f"{self._name} cannot be built: {len(self._unreadable)} value(s), that of {self._shown(key)!r} first: "
                f"{reason(error)} (`kes state get` shows what is stored, `kes state repair` mends it)"
            ) from error

    def keys(self, value: Any, *, reverse: bool = False) -> Iterator[tuple[bytes, bytes]]:
        """Scan (place, key) of one value, in the order of the keys."""
        low = self._begin(value)
        return self.order.scan(low, after_prefix(low), reverse=reverse)

    def range(self, low: Any, high: Any, *, reverse: bool, include_high: bool) -> Iterator[tuple[bytes, bytes]]:
        """Scan (place, key) of the values from ``low`` up to and without ``high`` (``None``: no end there)."""
        places = self.places(low, high, include_high=include_high)
        return self.order.scan(places.low, places.high, reverse=reverse)

    def places(self, low: Any, high: Any, *, include_high: bool) -> PlaceSpan:
        """Return the places of these values."""
        end = None if high is None else self._begin(high)
        if end is not None and include_high:
            end = after_prefix(end)
        return PlaceSpan(self.order, None if low is None else self._begin(low), end)

    def _begin(self, value: Any) -> bytes:
        try:
            return start_of(self._codec.encode(value))
        except EncodeError as error:
            raise EncodeError(f"{self._name}: {error}") from error

    def _rank(self, key: bytes, data: bytes) -> bytes | None:
        value = self._decode(key, data)
        return None if value is None else self._rank_of(value)

    def _rank_of(self, value: V) -> bytes | None:
        found = self._of(value)
        if found is None:
            return None
        try:
            return self._codec.encode(found)
        except EncodeError as error:
            raise EncodeError(f"{self._name}: {error}") from error


def shown(decode_key: Callable[[bytes], object]) -> Callable[[bytes], object]:
    """Return a function that shows a key in an error: decoded, if it can be, and cut."""

    def show(key: bytes) -> object:
        try:
            return str(decode_key(key))[:80]
        except DecodeError:
            return key[:64]

    return show
