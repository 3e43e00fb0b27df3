"""The check that what a codec writes comes back.

By the type, where it shows (``losses``): such a type is refused when it is declared. By the value, where it does not:
``Risk`` says which values look as if their bytes could not be read back as they are, and ``read_back`` reads those,
before they are kept. By sample, where a value tells nothing: the 1st, 2nd, 4th, 8th ... one is read. Values that cannot
be wrong cost no reading.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any, Final, Literal, NamedTuple
from uuid import UUID

import msgspec
from msgspec import inspect

from streams.errors import EncodeError
from streams.model.losses import joined, names_of
from streams.model.reasons import cause, reason
from streams.sak.type_nodes import type_nodes

_log = logging.getLogger(__name__)

Kinds = tuple[tuple[str, type, tuple[type, ...]], ...]
"""Fields, each with the classes of values that are written so that they come back: one, and further ones."""

EVERYTHING: Final = [False]
"""Set where every value that is encoded carefully is read back, of users' codecs as well."""


@contextmanager
def everything_read_back() -> Iterator[None]:
    """Read every value back within the block, as ``TestDriver`` does."""
    before, EVERYTHING[0] = EVERYTHING[0], True
    try:
        yield
    finally:
        EVERYTHING[0] = before


class Risk(NamedTuple):
    """The ways in which a value of a type may be written so that it does not come back.

    ``kinds``: a value whose fields are not of exactly these classes is suspect. ``needles``: suspect bytes.
    ``classes``: of records within, whose subclasses write what is not read. ``always``: every value is suspect.
    ``times``: fields whose times may move. ``booleans``: as they are written, and ``expected``, how many. ``sampled``:
    what is written of a value does not tell, so some are read. ``anything``: a part may be of any class, so it comes
    back as plain data. ``unions``: paths of parts that may be of several classes, and must come back as of the same.
    """

    kinds: Kinds = ()
    needles: tuple[bytes, ...] = ()
    classes: tuple[type, ...] = ()
    always: bool = False
    times: tuple[str, ...] = ()
    booleans: tuple[bytes, ...] = ()
    expected: int = 0
    sampled: bool = False
    anything: bool = False
    unions: tuple[str, ...] = ()

    def is_seen(self, value: Any, data: bytes) -> bool:
        """Check whether a value, or what was written of it, is suspect."""
        if self.always or EVERYTHING[0] or any(data.partition(needle)[1] for needle in self.needles):
            return True
        if sum(map(data.count, self.booleans)) != self.expected or any(
            moves(getattr(value, name)) for name in self.times
        ):
            return True
        if any(type(getattr(value, name)) not in (kind, *others) for name, kind, others in self.kinds):
            return True
        return any(cls.__subclasses__() for cls in self.classes)


class Sample:
    """The values that are read back where nothing can be seen of them: the 1st, 2nd, 4th, 8th ... After one that did
    not come back the next one is read, too: what is refused once is refused at each attempt."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    @property
    def is_due(self) -> bool:
        """Check whether the next value is read."""
        return not self.count & (self.count + 1)


def quick_encoder(
    risk: Risk,
    sample: Sample,
    encode: Callable[[Any], bytes],
    decode: Callable[[bytes], Any],
    careful: Callable[[Any], bytes],
) -> Callable[[Any], bytes]:
    """Return an encoder that looks at a risk without its ``kinds``; ``careful`` has what does not come back, and the
    values of the sample."""
    _, needles, classes, always, times, booleans, expected, sampled, *_ = risk
    within: list[Callable[[], Any]] = [cls.__subclasses__ for cls in classes]
    if booleans and not expected:
        needles, booleans = (*needles, *booleans), ()  # a search is cheaper than a count
    yes, no = booleans or (b"", b"")

    def all_read_back(value: Any) -> bytes:
        data = encode(value)
        return data if decode(data) == value else careful(value)

    def timed(value: Any) -> bytes:
        data = encode(value)
        for name in times:
            when = getattr(value, name)
            if when is not None and (zone := when.tzinfo) is not UTC and zone is not None and moves(when):
                return careful(value)
        return data

    first = timed if times else encode

    def read_back_if_lossy(value: Any) -> bytes:
        data = first(value)
        for subclasses in within:
            if subclasses():
                return careful(value)
        if expected and data.count(yes) + data.count(no) != expected:
            return data if decode(data) == value else careful(value)
        for needle in needles:
            if data.partition(needle)[1]:
                return data if decode(data) == value else careful(value)
        return data

    found = all_read_back if always else read_back_if_lossy if needles or classes or booleans else first
    if always or not sampled:
        return found

    def now_and_then(value: Any) -> bytes:
        count = sample.count
        if count & (count + 1) and not EVERYTHING[0]:
            sample.count = count + 1
            return found(value)
        return careful(value)

    return now_and_then


_RECORDS: Final = (inspect.StructType, inspect.DataclassType)
_KINDS: Final[dict[type, type]] = {
    inspect.IntType: int,
    inspect.FloatType: float,
    inspect.DateType: date,
    inspect.NoneType: type(None),
    inspect.StrType: str,
    inspect.BoolType: bool,
    inspect.BytesType: bytes,
    inspect.DateTimeType: datetime,
    inspect.TimeDeltaType: timedelta,
    inspect.DecimalType: Decimal,
    inspect.UUIDType: UUID,
}
"""Values of exactly these classes come back. A type checker lets others pass, and code without types everything."""
_READ_ALWAYS: Final = (inspect.FloatType, inspect.TimeType, inspect.RawType, inspect.LiteralType)
"""A float may be a long integer, a zone's offset may have seconds, ``Raw`` may be anything, and a literal another."""
_RULES: Final = ("gt", "ge", "lt", "le", "multiple_of", "min_length", "max_length", "pattern", "tz")


class Notation(NamedTuple):
    """A format's way to write ``none`` and ``booleans``. ``in_minutes``: offsets of times. ``keys_as_text``: all.
    ``time``: bytes of every time that is not text."""

    none: bytes
    booleans: tuple[bytes, bytes]
    in_minutes: bool = False
    keys_as_text: bool = False
    time: tuple[bytes, ...] = ()


def risk_of(root: Any, written: Notation) -> Risk:
    """Describe the risk of a type, as ``msgspec.inspect`` has it."""
    members = {field.name: field for field in root.fields} if isinstance(root, _RECORDS) else {}
    fields = {name: field.type for name, field in members.items()} or {"": root}
    kinds = {name: found for name, field in members.items() if (found := _kinds(field))}
    times = tuple(name for name, type_ in fields.items() if name in kinds and _is_time(type_))
    booleans: tuple[bytes, ...] = written.booleans
    rest = list(type_nodes([type_ for name, type_ in fields.items() if name not in kinds]))
    records = [_class_of(node) for node in rest if isinstance(node, _RECORDS)]
    own = _class_of(root)
    always = any(isinstance(node, _READ_ALWAYS) or _has_rule(node) for node in rest)
    always |= written.in_minutes and any(isinstance(node, inspect.DateTimeType) for node in rest)
    always |= written.keys_as_text and any(map(_has_keys_of_kinds, rest))
    always |= any(hasattr(cls, "__post_init__") for cls in (*records, own))
    flags = [type_ for type_ in fields.values() if isinstance(type_, inspect.BoolType)]
    if any(isinstance(node, inspect.IntType) for node in rest):  # a bool may be one of them
        is_counted = not getattr(getattr(own, "__struct_config__", None), "omit_defaults", False)
        others = [type_ for type_ in fields.values() if type_ not in flags or not is_counted]
        always |= any(isinstance(node, inspect.BoolType | inspect.AnyType) for node in type_nodes(others))
    else:
        booleans = ()
    # A datetime may be one of them: in text, or as an extension (-1) of msgpack.
    needles = [b"T", *written.time] if any(isinstance(node, inspect.DateType) for node in rest) else []
    anything = any(isinstance(node, inspect.AnyType) for node in rest)
    if rest and not anything and not any(isinstance(node, inspect.NoneType) for node in type_nodes([*fields.values()])):
        needles.append(written.none)
    return Risk(
        tuple((name, found[0], found[1:]) for name, found in kinds.items()),
        tuple(needles),
        tuple(records),
        always,
        times if written.in_minutes else (),
        () if always else booleans,
        len(flags) if booleans and not always else 0,
        sampled=bool(rest),
        anything=anything,
    )


def _has_keys_of_kinds(node: Any) -> bool:
    """Check for keys of a dict that are text and something else, of which two may be the same text."""
    return isinstance(node, inspect.DictType) and isinstance(node.key_type, inspect.UnionType)


def _is_time(type_: Any) -> bool:
    """Check whether a field is a time, or ``None``."""
    parts = type_.types if isinstance(type_, inspect.UnionType) else (type_,)
    is_simple = all(isinstance(part, inspect.DateTimeType | inspect.NoneType) and not _has_rule(part) for part in parts)
    return is_simple and any(isinstance(part, inspect.DateTimeType) for part in parts)


def moves(when: Any) -> bool:
    """Check whether a time would move when the offset of its zone is written in minutes."""
    if when is None:
        return False
    offset = when.utcoffset() if isinstance(when, datetime) else timedelta(seconds=1)  # of another class: look at it
    return offset is not None and bool(offset.seconds % 60 or offset.microseconds)


def _class_of(node: Any) -> Any:
    """Return the class of a record; of a generic one without its arguments, which have none of its names."""
    cls = getattr(node, "cls", None)
    return getattr(cls, "__origin__", cls)


def _kinds(field: Any) -> tuple[type, ...]:
    """Return the classes of a field that is no more than numbers, times, text and the like; if it is more, none."""
    parts = field.type.types if isinstance(field.type, inspect.UnionType) else (field.type,)
    if any(_has_rule(part) for part in parts):
        return ()
    found = [part.cls if isinstance(part, inspect.EnumType) else _KINDS.get(type(part)) for part in parts]
    if not field.required and field.default is field.default_factory is msgspec.NODEFAULT:
        found.append(msgspec.UnsetType)
    # Only the first one is looked at for what is not finite.
    return () if None in found else tuple(sorted(filter(None, found), key=lambda kind: kind is not float))


def _has_rule(node: Any) -> bool:
    return any(getattr(node, rule, None) is not None for rule in _RULES)


def read_back(
    name: str,
    value: Any,
    data: bytes,
    decode: Callable[[bytes], Any],
    allowed: Collection[str],
    risk: Risk,
) -> None:
    """Read what was written of a value. Raises ``EncodeError``, which names the field, if it is not readable, or
    another value. Where a part may be of any class, its coming back as plain data is logged once for each class of
    values, and refused in tests."""
    try:
        again = decode(data)
    except MemoryError:
        raise
    except Exception as error:
        text = f"{name} is written so that it cannot be read back: {reason(error)}"
        raise EncodeError(text) from cause(error)
    if is_equal(value, again):
        return
    if wrong := difference(value, again, allowed, classes="some" if risk.anything else "most", unions=risk.unions):
        raise EncodeError(_told(name, wrong))
    if risk.anything and (wrong := difference(value, again, allowed, classes="all")):
        if EVERYTHING[0]:
            raise EncodeError(_told(name, wrong))
        if name not in _said:
            _said.add(name)
            _log.warning("%s (said once; TestDriver refuses it)", _told(name, wrong))


_said: Final[set[str]] = set()


def _told(name: str, wrong: str) -> str:
    path = wrong.partition(" ")[0]
    way = "" if path == "it" else f"; or codec_for(..., allow_lossy=({path!r},)), if it may be lost"
    return f"{name} does not come back as it is written: {wrong}{way}"


def is_equal(a: Any, b: Any) -> bool:
    """Compare values of any class."""
    try:
        return bool(a == b)
    except Exception:  # of the user's class, or an array
        return False


Classes = Literal["some", "most", "all"]
"""Changes of class that count: of records and ``None`` only; those that the field's own type does not explain (text of
anything else); or each, of a list for a tuple, too."""


def difference(
    value: Any,
    again: Any,
    allowed: Collection[str] = (),
    path: str = "",
    classes: Classes = "some",
    unions: Collection[str] = (),
) -> str:
    """Name the first field that came back as another value; empty if none can be named."""
    classes = "all" if path in unions else classes
    where = path or "it"
    names = names_of(type(value))
    if path in allowed:
        return ""
    kinds = f"is a {type(value).__name__}, and comes back as a {type(again).__name__}"
    if names is not None:
        if type(again) is type(value):
            if getattr(value, _EXTRA, None):
                names = [*names, _EXTRA]
            parts = (
                (path if name == _EXTRA else joined(path, name), getattr(value, name, None), getattr(again, name, None))
                for name in names
            )
            return next(filter(None, (difference(a, b, allowed, below, classes, unions) for below, a, b in parts)), "")
        is_other = names_of(type(again)) is not None or classes == "all"
        return f"{where} {kinds}, without what that lacks" if is_other else ""
    if isinstance(value, dict | list | tuple) and isinstance(again, dict | list | tuple):
        if len(value) != len(again):
            return f"{where} has {len(value)} items, and comes back with {len(again)}"
        if classes == "all" and isinstance(value, tuple) != isinstance(again, tuple):
            return f"{where} {kinds}"
        pairs: Iterable[tuple[Any, Any]] = zip(value, again, strict=True)
        if isinstance(value, dict) and isinstance(again, dict):
            pairs = ((value[key], again[key]) for key in value if key in again)
            if classes != "some" and (lost := next((key for key in value if key not in again), None)) is not None:
                return f"{where} has the key {lost!r:.40}, and comes back without it"
        return next(filter(None, (difference(a, b, allowed, path, classes, unions) for a, b in pairs)), "")
    if (value is None) != (again is None):
        return f"{where} {kinds}"
    is_number = isinstance(value, int | float) and isinstance(again, int | float)
    has_no_equals = getattr(type(value), "__eq__", None) is object.__eq__
    if has_no_equals or not (is_number or type(value) is type(again)):
        return f"{where} {kinds}" if _is_other(value, again, classes) else ""
    hint = _hint(value)
    if isinstance(value, datetime) and isinstance(
        again, datetime
    ):  # in the hour that a zone has twice, none equals one of another zone
        value, again = _instant(value), _instant(again)
    if is_equal(value, again) or not is_equal(value, value):  # NaN
        return ""
    return f"{where} comes back as another {type(value).__name__}{hint}"


_TEXT: Final = (str, bytes)
_EXTRA: Final = "__pydantic_extra__"
"""The fields that a model has beyond those of its class."""


def _is_other(value: Any, again: Any, classes: Classes) -> bool:
    """Check whether a value comes back as one of a class that is not what its field makes of it: a list is a tuple
    there, a name a member, a number a decimal."""
    if is_equal(value, again) or (isinstance(again, Enum | Decimal) and classes != "all"):
        return False
    if isinstance(value, Enum) and classes != "all":  # pydantic's use_enum_values
        return not is_equal(value.value, again)
    return classes == "all" or (classes == "most" and (isinstance(value, _TEXT) or isinstance(again, _TEXT)))


def _instant(when: datetime) -> datetime:
    offset = when.utcoffset()
    return when if offset is None else when.replace(tzinfo=None) - offset


def _hint(value: Any) -> str:
    if isinstance(value, int) and abs(value) > 1 << 53:
        return " (a float holds no integer beyond 2**53)"
    offset = value.utcoffset() if isinstance(value, datetime | time) else None
    has_seconds = offset is not None and offset % timedelta(minutes=1)
    return ": the offset of its time zone has seconds; give it in UTC" if has_seconds else ""
