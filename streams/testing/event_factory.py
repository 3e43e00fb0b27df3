"""Events for tests, with what a test does not care about filled in: the same ones for the same seed."""

from __future__ import annotations

import datetime
import decimal
import enum
import random
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import msgspec
from msgspec import inspect

from streams.errors import ConfigError

E = TypeVar("E")

_EPOCH: Final = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)


class EventFactory:
    """``make(Order, amount=5)`` builds an event of a ``msgspec.Struct`` or a dataclass.

    Fields that are not given get their default; without one, a value of their type that ``seed`` decides (texts are
    ``<field>-<number>``), within the bounds of ``msgspec.Meta``. Raises ``ConfigError`` for classes and fields that it
    cannot fill, and for values that do not fit their field.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._counts: dict[type, int] = {}

    def __call__(self, event_class: type[E], /, **fields: Any) -> E:
        """Make one event."""
        number = self._counts[event_class] = self._counts.get(event_class, -1) + 1
        rng = random.Random(f"{self._seed} {event_class.__qualname__} {number}")
        event = _Filling(rng, number).build(event_class, fields)
        try:
            msgspec.convert(msgspec.to_builtins(event), event_class)
        except (msgspec.ValidationError, TypeError) as error:
            raise ConfigError(f"{event_class.__name__}: {error}") from None
        return event

    def many(self, event_class: type[E], count: int, /, **fields: Any) -> list[E]:
        """Make so many events, each with other values in the fields that are not given."""
        return [self(event_class, **fields) for _ in range(count)]


class _Filling:
    def __init__(self, rng: random.Random, number: int) -> None:
        self._rng, self._number = rng, number

    def build(self, cls: type[E], given: Mapping[str, Any]) -> E:
        info = inspect.type_info(cls)
        if not isinstance(info, inspect.StructType | inspect.DataclassType):
            raise ConfigError(
                f"{cls.__name__} is neither a msgspec.Struct nor a dataclass: events of it have to be built by hand"
            )
        unknown = sorted(given.keys() - {field.name for field in info.fields})
        if unknown:
            known = ", ".join(field.name for field in info.fields)
            raise ConfigError(f"{cls.__name__} has no field {', '.join(unknown)}; its fields are {known}")
        values = {
            field.name: self._value(f"{cls.__name__}.{field.name}", field.name, field.type)
            for field in info.fields
            if field.required and field.name not in given
        }
        return cls(**values, **given)

    def _value(self, where: str, name: str, kind: inspect.Type) -> Any:
        rng = self._rng
        match kind:
            case inspect.StructType() | inspect.DataclassType():
                return self.build(kind.cls, {})
            case inspect.StrType():
                return _sized(where, f"{name}-{self._number}", kind)
            case inspect.BytesType():
                return f"{name}-{self._number}".encode()
            case inspect.IntType():
                return _bounded(where, rng, kind)
            case inspect.FloatType():
                return float(_bounded(where, rng, kind))
            case inspect.UnionType():
                none = any(isinstance(one, inspect.NoneType) for one in kind.types)
                return None if none else self._value(where, name, kind.types[0])
            case inspect.EnumType():
                return rng.choice(list(_members(kind.cls)))
            case inspect.LiteralType():
                return rng.choice(kind.values)
            case inspect.TupleType():
                return tuple(self._value(where, name, one) for one in kind.item_types)
        for simple, make in _SIMPLE.items():
            if isinstance(kind, simple):
                return make(rng)
        raise ConfigError(f"{where} is of a type that cannot be made up ({type(kind).__name__}): give it a value")


def _members(cls: type[enum.Enum]) -> list[enum.Enum]:
    return list(cls)


def _sized(where: str, text: str, kind: inspect.StrType) -> str:
    if kind.pattern is not None:
        raise ConfigError(f"{where} has to match {kind.pattern!r}: give it a value")
    text = text.ljust(kind.min_length or 0, "x")
    return text if kind.max_length is None else text[-kind.max_length :] if kind.max_length else ""


def _bounded(where: str, rng: random.Random, kind: inspect.IntType | inspect.FloatType) -> int:
    """A whole number within the bounds, near 0 where they allow it."""
    least = [kind.ge, None if kind.gt is None else kind.gt + 1]
    most = [kind.le, None if kind.lt is None else kind.lt - 1]
    low = max((bound for bound in least if bound is not None), default=None)
    high = min((bound for bound in most if bound is not None), default=None)
    if low is None:
        low = 1 if high is None or high >= 1 else high - 1_000
    if high is None:
        high = low + 999
    step = kind.multiple_of or 1
    first, last = -int(-low // step), int(high // step)
    if first > last:
        raise ConfigError(f"{where} has bounds that no whole number fits: give it a value")
    return int(rng.randint(first, last) * step)


def _moment(rng: random.Random) -> datetime.datetime:
    return _EPOCH + datetime.timedelta(seconds=rng.randrange(365 * 86_400))


_SIMPLE: Final[Mapping[type[inspect.Type], Callable[[random.Random], Any]]] = {
    inspect.BoolType: lambda rng: rng.random() < 0.5,
    inspect.NoneType: lambda rng: None,
    inspect.AnyType: lambda rng: None,
    inspect.ListType: lambda rng: [],
    inspect.SetType: lambda rng: set(),
    inspect.FrozenSetType: lambda rng: frozenset(),
    inspect.VarTupleType: lambda rng: (),
    inspect.DictType: lambda rng: {},
    inspect.DateTimeType: _moment,
    inspect.DateType: lambda rng: _moment(rng).date(),
    inspect.TimeType: lambda rng: _moment(rng).time(),
    inspect.TimeDeltaType: lambda rng: datetime.timedelta(seconds=rng.randint(1, 3_600)),
    inspect.UUIDType: lambda rng: uuid.UUID(int=rng.getrandbits(128), version=4),
    inspect.DecimalType: lambda rng: decimal.Decimal(rng.randint(1, 100_000)).scaleb(-2),
}
