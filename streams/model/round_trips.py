"""The check that what a codec writes comes back.

By the type, where it shows (``losses_of`` of msgspec's types and of pydantic's): such a type is refused when it is
declared. By the value, where it does not: ``Risk`` says which values look as if their bytes could not be read back as
they are, and ``read_back`` reads those, before they are kept. Values that cannot be wrong cost no reading.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, time, timedelta
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import inspect

from streams.errors import ConfigError, EncodeError
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


# -- by the type -------------------------------------------------------------------------------------------------------


class Loss(NamedTuple):
    """A field that is written and does not come back. ``path``: names of fields, joined by dots."""

    path: str
    reason: str
    way_out: str


def refuse(type_: Any, name: str, losses: Iterable[Loss], allowed: Collection[str]) -> None:
    """Raise ``ConfigError`` for the first loss that is not allowed, and for what is allowed and is no field."""
    found = {loss.path: loss for loss in losses}
    fields = names_of(type_) or ()
    unknown = [path for path in allowed if path not in found and path.partition(".")[0] not in fields]
    if unknown:
        raise ConfigError(f"{name}: allow_lossy names {unknown[0]!r}, which is none of its fields")
    for path, loss in found.items():
        if path not in allowed:
            raise ConfigError(
                f"{name}{path and '.' + path}: {loss.reason}, so it would not come back as it was written. "
                f"{loss.way_out}; or codec_for(..., allow_lossy=({path!r},)), if it may be lost"
            )


def losses_of(node: Any, path: str = "", above: tuple[int, ...] = ()) -> Iterator[Loss]:
    """Find what msgspec would write and not read back, in a type as ``msgspec.inspect`` describes it."""
    if isinstance(node, tuple | list):
        for each in node:
            yield from losses_of(each, path, above)
    elif isinstance(node, inspect.Field):
        path = _join(path, node.name)
        if isinstance(node.default, msgspec.Raw) and not bytes(node.default):
            yield Loss(path, "its default Raw() is written as nothing at all", "Make the default Raw(b'null')")
        yield from losses_of(node.type, path, above)
    elif isinstance(node, inspect.Type) and id(node) not in above:
        if isinstance(node, inspect.UnionType) and any(isinstance(each, inspect.RawType) for each in node.types):
            yield Loss(path, "a union with msgspec.Raw is written, and never read", "Make it Raw: Raw(b'null') is none")
        for name in node.__struct_fields__:
            yield from losses_of(getattr(node, name), path, (*above, id(node)))


_HARMLESS: Final = {
    *("definitions", "definition-ref", "model", "model-fields", "model-field", "dataclass", "dataclass-args"),
    *("dataclass-field", "computed-field", "default", "nullable", "list", "dict", "set", "frozenset", "tuple"),
    *("str", "int", "bool", "none", "bytes", "uuid", "literal", "enum", "no-info"),
}
"""Parts of a core schema whose values pydantic checks when it writes them."""
_STRUCTURE: Final = {
    *("type", "schema", "fields", "cls", "config", "custom_init", "metadata", "ref", "root_model", "computed_fields"),
    *("model_name", "default", "default_factory", "default_factory_takes_data", "items_schema", "keys_schema"),
    *("values_schema", "definitions", "schema_ref", "validation_alias", "serialization_alias", "serialization_exclude"),
    *("name", "kw_only", "dataclass_name", "collect_init_only", "post_init", "frozen", "slots", "expected", "members"),
    *("variadic_item_index", "property_name", "return_schema", "alias", "kw_only", "sub_type", "missing", "init"),
}
"""What these parts may say. Anything else is a rule, which is checked at reading only."""
_SILENT: Final = {"title", "extra_fields_behavior", "validate_by_name", "validate_by_alias", "populate_by_name"}
"""Settings of a class that are no rules for values, or are looked at by ``losses``."""


class PydanticSchema:
    """The description of a pydantic type, from the core schema of its ``TypeAdapter``: ``losses``; ``has_rules``, which
    only a reader finds broken; and ``classes``, those of its fields."""

    def __init__(self, core: Any) -> None:
        self._refs: dict[str, Any] = {}
        self._above: list[str] = []
        self.losses: list[Loss] = []
        self.has_rules = False
        self.classes: list[type] = []
        self._walk(core, "", {}, is_own=False)

    def _walk(self, node: Any, path: str, config: dict[str, Any], *, is_own: bool) -> None:
        """``is_own``: the user's own function writes what is here, so nothing is known about it."""
        if isinstance(node, list | tuple):
            for each in node:
                self._walk(each, path, config, is_own=is_own)
            return
        if not isinstance(node, dict):
            return
        if not isinstance(node.get("type"), str):  # the choices of a union by their tags
            self._walk(list(node.values()), path, config, is_own=is_own)
            return
        kind, said = node["type"], node.get("serialization") or {}
        self._refs.update({each["ref"]: each for each in node.get("definitions", ())})
        if (ref := node.get("schema_ref")) is not None:
            if ref not in self._above:
                self._above.append(ref)
                self._walk(self._refs.get(ref), path, config, is_own=is_own)
                self._above.pop()
            self.has_rules |= bool(said)  # SerializeAsAny
            return
        self.has_rules |= kind not in _HARMLESS or any(
            node[key] is not None and node[key] is not False for key in node.keys() - _STRUCTURE
        )
        if said.get("type") == "function-plain" and not is_own:
            is_own = not getattr(said["function"], "__name__", "").startswith("_serialize_secret")
            if not is_own:
                way = "Give it a field_serializer for JSON, which calls get_secret_value"
                self._lose(path, "a secret is written as asterisks", way)
                return
        if kind == "json" and not is_own:
            self._lose(path, "Json[...] is written as the value, and read from text", "Give it the type inside")
        if kind == "dict" and (node.get("keys_schema") or {}).get("type") in ("tuple", "nullable", "none"):
            self._lose(path, "tuples and None are written as text as keys of a dict", "Give it keys of text, or a list")
        if kind in ("model", "dataclass"):
            self._class(node, path)
            config = node.get("config") or {}
        self._fields(node, path, config, is_own=is_own)
        for key in node.keys() - {"fields", "definitions", "config", "metadata", "computed_fields", "default"}:
            self._walk(node[key], path, config, is_own=is_own)

    def _class(self, node: dict[str, Any], path: str) -> None:
        cls, config = node["cls"], node.get("config") or {}
        self.has_rules |= bool(config.keys() - _SILENT or node.get("custom_init") or node.get("post_init"))
        if path:
            self.classes.append(cls)
        if private := ", ".join(getattr(cls, "__private_attributes__", ())):
            text = "%s: the private attribute %s is not written: what is read has its default there"
            _log.warning(text, cls.__qualname__, private)

    def _fields(self, node: dict[str, Any], path: str, config: dict[str, Any], *, is_own: bool) -> None:
        fields = node.get("fields") or {}
        if isinstance(fields, list):  # of a dataclass: its names, and further in its fields
            fields = {field["name"]: field for field in fields if isinstance(field, dict)}
        for name, field in fields.items():
            here = _join(path, name)
            if field.get("serialization_exclude"):
                self._lose(here, "it is excluded when the model is written", "Write it, or keep it elsewhere")
            written = field.get("serialization_alias") or name
            read = _read_as(name, field.get("validation_alias"), config)
            if written not in read:
                reason = f"it is written as {written!r} and read as {' or '.join(map(repr, read))}"
                self._lose(here, reason, "Give it one alias for both: Field(alias=...)")
            self._walk(field.get("schema"), here, config, is_own=is_own)
        for field in node.get("computed_fields") or ():
            extra = config.get("extra_fields_behavior")
            if extra in ("forbid", "allow"):
                reason = f"a computed field is written, and extra={extra!r} does not read it as one"
                self._lose(
                    _join(path, field["property_name"]), reason, "Make it a plain property, or ignore extra fields"
                )

    def _lose(self, path: str, reason: str, way_out: str) -> None:
        self.losses.append(Loss(path, reason, way_out))


def _read_as(name: str, alias: Any, config: dict[str, Any]) -> list[str]:
    """Return the names that pydantic reads a field by."""
    if alias is None:
        return [name]
    paths = [[alias]] if isinstance(alias, str) else alias if isinstance(alias[0], list) else [alias]
    found = [path[0] for path in paths if len(path) == 1] if config.get("validate_by_alias", True) else []
    return [*found, name] if config.get("validate_by_name") or config.get("populate_by_name") else found


# -- by the value ------------------------------------------------------------------------------------------------------


class Risk(NamedTuple):
    """The ways in which a value of a type may be written so that it does not come back.

    ``kinds``: a value whose fields are not of exactly these classes is suspect. ``needles``: suspect bytes.
    ``classes``: of records within, whose subclasses write what is not read. ``always``: every value is suspect.
    ``times``: fields whose times may move. ``booleans``: as they are written, and ``expected``, how many.
    """

    kinds: Kinds = ()
    needles: tuple[bytes, ...] = ()
    classes: tuple[type, ...] = ()
    always: bool = False
    times: tuple[str, ...] = ()
    booleans: tuple[bytes, ...] = ()
    expected: int = 0

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


def quick_encoder(
    risk: Risk, encode: Callable[[Any], bytes], decode: Callable[[bytes], Any], careful: Callable[[Any], bytes]
) -> Callable[[Any], bytes]:
    """Return an encoder that looks at a risk without its ``kinds``; ``careful`` has what does not come back."""
    _, needles, classes, always, times, booleans, expected = risk
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

    return all_read_back if always else read_back_if_lossy if needles or classes or booleans else first


_RECORDS: Final = (inspect.StructType, inspect.DataclassType)
_KINDS: Final[dict[type, type]] = {
    inspect.IntType: int,
    inspect.FloatType: float,
    inspect.DateType: date,
    inspect.NoneType: type(None),
    inspect.StrType: str,
    inspect.BoolType: bool,
}
_CONFUSED: Final = (inspect.IntType, inspect.FloatType, inspect.DateType)
"""A type checker lets a ``bool``, an ``int`` and a ``datetime`` pass for these."""
_READ_ALWAYS: Final = (inspect.FloatType, inspect.TimeType, inspect.RawType)
"""A float may be a long integer, a zone's offset may have seconds, and ``Raw`` may be anything."""
_RULES: Final = ("gt", "ge", "lt", "le", "multiple_of", "min_length", "max_length", "pattern", "tz")


def risk_of(root: Any, booleans: tuple[bytes, ...], *, times_move: bool) -> Risk:
    """Describe the risk of a type, as ``msgspec.inspect`` has it. ``booleans``: as they are written. ``times_move``:
    an offset is written in minutes."""
    fields = {field.name: field.type for field in root.fields} if isinstance(root, _RECORDS) else {"": root}
    kinds = {name: found for name, type_ in fields.items() if name and (found := _kinds(type_))}
    times = tuple(name for name, type_ in fields.items() if name and _is_time(type_))
    rest = list(type_nodes([type_ for name, type_ in fields.items() if name not in kinds and name not in times]))
    records = [_class_of(node) for node in rest if isinstance(node, _RECORDS)]
    own = _class_of(root)
    always = any(isinstance(node, _READ_ALWAYS) or _has_rule(node) for node in rest)
    always |= times_move and any(isinstance(node, inspect.DateTimeType) for node in rest)
    always |= any(hasattr(cls, "__post_init__") for cls in (*records, own))
    flags = [type_ for type_ in fields.values() if isinstance(type_, inspect.BoolType)]
    if any(isinstance(node, inspect.IntType) for node in rest):  # a bool may be one of them
        is_counted = not getattr(getattr(own, "__struct_config__", None), "omit_defaults", False)
        others = [type_ for type_ in fields.values() if type_ not in flags or not is_counted]
        always |= any(isinstance(node, inspect.BoolType | inspect.AnyType) for node in type_nodes(others))
    else:
        booleans = ()
    return Risk(
        tuple((name, found[0], found[1:]) for name, found in kinds.items()),
        (b"T",) if any(isinstance(node, inspect.DateType) for node in rest) else (),  # a datetime may be one of them
        tuple(records),
        always,
        times if times_move else (),
        () if always else booleans,
        len(flags) if booleans and not always else 0,
    )


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


def _kinds(type_: Any) -> tuple[type, ...]:
    """Return the classes of a field that is no more than numbers, dates, text and ``None``, if some may be confused."""
    parts = type_.types if isinstance(type_, inspect.UnionType) else (type_,)
    is_simple = all(type(part) in _KINDS and not _has_rule(part) for part in parts)
    is_confused = any(isinstance(part, _CONFUSED) for part in parts)
    return tuple(_KINDS[type(part)] for part in parts) if is_simple and is_confused else ()


def _has_rule(node: Any) -> bool:
    return any(getattr(node, rule, None) is not None for rule in _RULES)


def read_back(
    name: str,
    value: Any,
    data: bytes,
    decode: Callable[[bytes], Any],
    allowed: Collection[str],
) -> None:
    """Read what was written of a value. Raises ``EncodeError``, which names the field, if it is not readable, or
    another value."""
    try:
        again = decode(data)
    except MemoryError:
        raise
    except Exception as error:
        text = f"{name} is written so that it cannot be read back: {reason(error)}"
        raise EncodeError(text) from cause(error)
    if not is_equal(value, again) and (wrong := difference(value, again, allowed)):
        path = wrong.partition(" ")[0]
        way = "" if path == "it" else f"; or codec_for(..., allow_lossy=({path!r},)), if it may be lost"
        raise EncodeError(f"{name} does not come back as it is written: {wrong}{way}")


def is_equal(a: Any, b: Any) -> bool:
    """Compare values of any class."""
    try:
        return bool(a == b)
    except Exception:  # of the user's class, or an array
        return False


def difference(value: Any, again: Any, allowed: Collection[str] = (), path: str = "") -> str:
    """Name the first field that came back as another value; empty if none can be named: in a field that
    may hold anything, a tuple comes back as a list."""
    where = path or "it"
    names = names_of(type(value))
    if path in allowed:
        return ""
    if names is not None:
        if type(again) is type(value):
            parts = ((name, getattr(value, name, None), getattr(again, name, None)) for name in names)
            return next(filter(None, (difference(a, b, allowed, _join(path, name)) for name, a, b in parts)), "")
        kinds = f"{type(value).__name__}, and comes back as a {type(again).__name__}, without what that lacks"
        return "" if names_of(type(again)) is None else f"{where} is a {kinds}"
    if isinstance(value, dict | list | tuple) and isinstance(again, dict | list | tuple):
        if len(value) != len(again):
            return f"{where} has {len(value)} items, and comes back with {len(again)}"
        pairs: Iterable[tuple[Any, Any]] = zip(value, again, strict=True)
        if isinstance(value, dict) and isinstance(again, dict):
            pairs = ((value[key], again[key]) for key in value if key in again)
        return next(filter(None, (difference(a, b, allowed, path) for a, b in pairs)), "")
    if (value is None) != (again is None):
        return f"{where} is a {type(value).__name__}, and comes back as a {type(again).__name__}"
    is_number = isinstance(value, int | float) and isinstance(again, int | float)
    has_no_equals = getattr(type(value), "__eq__", None) is object.__eq__
    if has_no_equals or not (is_number or type(value) is type(again)):
        return ""
    hint = _hint(value)
    if isinstance(value, datetime) and isinstance(
        again, datetime
    ):  # in the hour that a zone has twice, none equals one of another zone
        value, again = _instant(value), _instant(again)
    if is_equal(value, again) or not is_equal(value, value):  # NaN
        return ""
    return f"{where} comes back as another {type(value).__name__}{hint}"


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def names_of(cls: Any) -> Collection[str] | None:
    """Return the names of the fields of a class; ``None`` if it has none."""
    for attribute in ("__struct_fields__", "__pydantic_fields__"):
        if hasattr(cls, attribute):
            found: Collection[str] = getattr(cls, attribute)
            return found
    is_dataclass = isinstance(cls, type) and dataclasses.is_dataclass(cls)
    return [field.name for field in dataclasses.fields(cls)] if is_dataclass else None


def _instant(when: datetime) -> datetime:
    offset = when.utcoffset()
    return when if offset is None else when.replace(tzinfo=None) - offset


def _hint(value: Any) -> str:
    if isinstance(value, int) and abs(value) > 1 << 53:
        return " (a float holds no integer beyond 2**53)"
    offset = value.utcoffset() if isinstance(value, datetime | time) else None
    has_seconds = offset is not None and offset % timedelta(minutes=1)
    return ": the offset of its time zone has seconds; give it in UTC" if has_seconds else ""
