"""The way of an event source to the executors: by its name where it has one, else by pickle.

By name is better: each worker imports the module, and has event types, versions, upcasters and codecs as they are
declared there. A copy by pickle carries functions along, but no class: classes are looked up by their names too, so
those that exist in one process only (``__main__``, a notebook, the inside of a function) are refused here, where it
can still be said why.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

import msgspec
from pyspark.serializers import CloudPickleSerializer

from streams.errors import ConfigError
from streams.event_source import EventSource
from streams.loading import described, load
from streams.runtime.replay import Program

_ADVICE = "put it into a module that the executors can import, and name it as 'module:attribute'"


class Travelling(msgspec.Struct, frozen=True):
    """An event source on its way: ``name``, or the program itself; ``fingerprint`` is what the driver saw there."""

    name: str
    program: Program | None
    fingerprint: tuple[tuple[str, ...], ...]

    def arrive(self) -> Program:
        """The program, on the executor. Raises ``ConfigError`` when it is not the one that the driver has."""
        if self.program is not None:
            return self.program
        program = loaded(self.name).program()
        found = program.fingerprint
        if found != self.fingerprint:
            differing = sorted({str(each[0]) for each in set(found) ^ set(self.fingerprint)})
            raise ConfigError(
                f"the event source {self.name!r} is another one on the executors (it differs in: "
                f"{', '.join(differing)}): do they have the same version of the module, and are all handlers "
                "registered when it is imported?"
            )
        return program


def travelling(source: EventSource[Any] | str) -> tuple[Travelling, Program]:
    """Return the parts that the executors get, and the program as it is here. Raises ``ConfigError`` for what cannot
    travel."""
    if isinstance(source, str):
        program = loaded(source).program()
        return Travelling(source, None, program.fingerprint), program
    if not isinstance(source, EventSource):
        raise ConfigError(f"source is {type(source).__name__}; give an EventSource, or its name as 'module:attribute'")
    program = source.program()
    name = _name_of(source, program)
    if name:
        return Travelling(name, None, program.fingerprint), program
    for route in program.routes:
        if route.event_type is not None:
            _check_class(route.event_type.cls)
    there = Travelling("", program, ())
    try:
        serializer: Any = CloudPickleSerializer  # untyped
        serializer().dumps(there)
    except Exception as error:
        raise ConfigError(f"the event source cannot be sent to executors: {described(error)}; {_ADVICE}") from error
    return there, program


def loaded(name: str) -> EventSource[Any]:
    """The event source of this name. Raises ``ConfigError``."""
    found = load(name)
    if not isinstance(found, EventSource):
        raise ConfigError(f"{name!r} is {type(found).__name__}, not an EventSource")
    return found


def _name_of(source: EventSource[Any], program: Program) -> str:
    """``module:attribute``, if it is a global of a module that others can import: first that of its handlers, because
    the others have only imported it, and may do more than that."""
    routes = [*program.routes, *([program.default] if program.default is not None else [])]
    own = [getattr(route.handler, "__module__", "") for route in routes]
    for module_name in dict.fromkeys([*own, *sys.modules]):
        module = sys.modules.get(module_name)
        if module_name == "__main__" or not isinstance(module, ModuleType):
            continue
        for attribute, value in list(vars(module).items()):
            if value is source and _is_importable(module_name):
                return f"{module_name}:{attribute}"
    return ""


def _is_importable(module_name: str) -> bool:
    try:
        return getattr(import_module(module_name), "__spec__", None) is not None
    except Exception:
        return False


def _check_class(cls: type) -> None:
    module = sys.modules.get(cls.__module__)
    if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__ or module is None:
        raise ConfigError(
            f"the event class {cls.__qualname__} exists in this process only ({cls.__module__}), so executors cannot "
            f"read its events: {_ADVICE}"
        )
