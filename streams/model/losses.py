"""The losses of a type: what its codec would write and not read back, as msgspec and pydantic describe it.

Spark looks here, too (``spark/typed/shapes.py``): what an event source refuses has no columns.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import inspect

from streams.errors import ConfigError

_log = logging.getLogger(__name__)


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
        path = joined(path, node.name)
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
    *("str", "int", "bool", "none", "bytes", "uuid", "enum", "no-info"),
}
"""Parts of a core schema whose values pydantic checks when it writes them."""
_STRUCTURE: Final = {
    *("type", "schema", "fields", "cls", "config", "custom_init", "metadata", "ref", "root_model", "computed_fields"),
    *("model_name", "default", "default_factory", "default_factory_takes_data", "items_schema", "keys_schema"),
    *("values_schema", "definitions", "schema_ref", "validation_alias", "serialization_alias", "serialization_exclude"),
    *("name", "kw_only", "dataclass_name", "collect_init_only", "post_init", "frozen", "slots", "expected", "members"),
    *("variadic_item_index", "property_name", "return_schema", "alias", "kw_only", "sub_type", "missing", "init"),
    *("required", "init_only"),
}
"""What these parts may say. Anything else is a rule, which is checked at reading only."""
_SILENT: Final = {"title", "extra_fields_behavior", "validate_by_name", "validate_by_alias", "populate_by_name"}
"""Settings of a class that are no rules for values, or are looked at by ``losses``."""


class PydanticSchema:
    """The description of a pydantic type, from the core schema of its ``TypeAdapter``: ``losses``; ``has_rules``, which
    only a reader finds broken; ``has_anything``, a part of any class; ``classes``, those of its fields; and ``unions``,
    paths of what may be of several classes, each of which tells the reader something else."""

    def __init__(self, core: Any) -> None:
        self._refs: dict[str, Any] = {}
        self._above: list[str] = []
        self.losses: list[Loss] = []
        self.has_rules = self.has_anything = False
        self.classes: list[type] = []
        self.unions: list[str] = []
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
        self.has_anything |= kind == "any"
        if said.get("type") == "function-plain" and not is_own:
            is_own = not getattr(said["function"], "__name__", "").startswith("_serialize_secret")
            if not is_own:
                way = "Give it a field_serializer for JSON, which calls get_secret_value"
                self._lose(path, "a secret is written as asterisks", way)
                return
        if kind == "json" and not is_own:
            self._lose(path, "Json[...] is written as the value, and read from text", "Give it the type inside")
        if kind == "dict":
            keys = (node.get("keys_schema") or {}).get("type")
            if keys in ("tuple", "nullable", "none"):
                way = "Give it keys of text, or a list"
                self._lose(path, "tuples and None are written as text as keys of a dict", way)
            self.has_rules |= keys == "int"  # a bool is one, and is written as "True"
        if node.get("now_op") == "future":
            reason = "a time in the future is read as long as it is in the future"
            self._lose(path, reason, "Give it date or datetime, and check it where it comes from")
        if kind == "union" and not any(isinstance(one, dict) and one.get("type") == "any" for one in node["choices"]):
            self.unions.append(path)
        if kind in ("model", "dataclass"):
            self._class(node, path)
            config = node.get("config") or {}
        self._fields(node, path, config, is_own=is_own)
        for key in node.keys() - {"fields", "definitions", "config", "metadata", "computed_fields", "default"}:
            self._walk(node[key], path, config, is_own=is_own)

    def _class(self, node: dict[str, Any], path: str) -> None:
        cls, config = node["cls"], node.get("config") or {}
        self.has_anything |= config.get("extra_fields_behavior") == "allow"
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
        computed = {field["property_name"]: field for field in node.get("computed_fields") or ()}
        used: dict[str, str] = {}  # names that are written, and by what
        for name, field in (*fields.items(), *computed.items()):
            if not field.get("serialization_exclude"):
                written = field.get("serialization_alias") or field.get("alias") or name
                if (other := used.setdefault(written, name)) != name:
                    reason = f"it is written as {written!r}, as {other} is"
                    self._lose(joined(path, name), reason, "Give each field its own name")
        for name, field in fields.items():
            here = joined(path, name)
            self.has_rules |= any(field[key] not in (None, False) for key in field.keys() - _STRUCTURE)
            if field.get("serialization_exclude"):
                self._lose(here, "it is excluded when the model is written", "Write it, or keep it elsewhere")
            self.has_rules |= field.get("init") is False  # of a dataclass: it is written, and not read
            written = field.get("serialization_alias") or name
            read = _read_as(name, field.get("validation_alias"), config)
            if written not in read:
                reason = f"it is written as {written!r} and read as {' or '.join(map(repr, read)) or 'a path'}"
                self._lose(here, reason, "Give it one alias for both: Field(alias=...)")
            self._walk(field.get("schema"), here, config, is_own=is_own)
        for name in computed:
            extra = config.get("extra_fields_behavior")
            if extra in ("forbid", "allow"):
                reason = f"a computed field is written, and extra={extra!r} does not read it as one"
                self._lose(joined(path, name), reason, "Make it a plain property, or ignore extra fields")

    def _lose(self, path: str, reason: str, way_out: str) -> None:
        self.losses.append(Loss(path, reason, way_out))


def _read_as(name: str, alias: Any, config: dict[str, Any]) -> list[str]:
    """Return the names that pydantic reads a field by."""
    if alias is None:
        return [name]
    paths = [[alias]] if isinstance(alias, str) else alias if isinstance(alias[0], list) else [alias]
    found = [path[0] for path in paths if len(path) == 1] if config.get("validate_by_alias", True) else []
    return [*found, name] if config.get("validate_by_name") or config.get("populate_by_name") else found


def joined(path: str, name: str) -> str:
    """Return the path of a field below another one."""
    return f"{path}.{name}" if path else name


def names_of(cls: Any) -> Collection[str] | None:
    """Return the names of the fields of a class; ``None`` if it has none."""
    for attribute in ("__struct_fields__", "__pydantic_fields__"):
        if hasattr(cls, attribute):
            found: Collection[str] = getattr(cls, attribute)
            return found
    is_dataclass = isinstance(cls, type) and dataclasses.is_dataclass(cls)
    return [field.name for field in dataclasses.fields(cls)] if is_dataclass else None
