"""Locations and annotations in the code of users, for messages that say where to look."""

from __future__ import annotations

import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable
from typing import Any, Final

_PACKAGE: Final = __name__.partition(".")[0]


def location_of(written: object) -> str:
    """Return `` at file:line`` of a function or class; empty for what was not written in Python."""
    if isinstance(written, type):
        try:
            return f" at {inspect.getsourcefile(written)}:{inspect.getsourcelines(written)[1]}"
        except (OSError, TypeError):
            return ""
    code = getattr(_bare(written), "__code__", None)
    return "" if code is None else f" at {code.co_filename}:{code.co_firstlineno}"


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function for messages."""
    return getattr(function, "__qualname__", None) or repr(function)


def calling_location() -> str:
    """Return `` at file:line`` of the nearest caller outside of this package; empty without one."""
    frame = _calling_frame()
    return "" if frame is None else f" at {frame.f_code.co_filename}:{frame.f_lineno}"


def parameter_types(function: Callable[..., Any]) -> list[Any]:
    """Return the annotated types of a function's parameters, in their order; ``None`` for those without one.

    Text is looked up where the function was written, and in the function that calls this package (classes that a test
    defines in its body). An annotation that cannot be looked up counts as none.
    """
    return _annotated(function, lambda bare: list(inspect.signature(bare).parameters))


def result_type(function: Callable[..., Any]) -> Any:
    """Return the annotated type of a function's result (of an ``async def``: of what it is awaited for), as
    ``parameter_types`` does; ``None`` without one, ``NoneType`` for ``-> None``."""
    return next(iter(_annotated(function, lambda _: ["return"])), None)


def _annotated(function: Callable[..., Any], names_of: Callable[[Any], list[str]]) -> list[Any]:
    bare = _bare(function)
    try:
        names = names_of(bare)
        written: dict[str, Any] = bare.__annotations__
    except Exception:  # written in C, or an annotation that raises
        return []
    frame = _calling_frame()
    local = {} if frame is None else dict(frame.f_locals)
    found: list[Any] = []
    for name in names:
        alone = types.SimpleNamespace(__annotations__={name: written.get(name)})  # or one bad annotation spoils all
        try:
            found.append(None if name not in written else typing.get_type_hints(alone, bare.__globals__, local)[name])
        except Exception:  # a name that exists for type checkers only, or no type at all
            found.append(None)
    return found


def unknown_name(function: Callable[..., Any], number: int) -> str:
    """Say of a parameter without a type in ``parameter_types`` that its annotation is a name which is not found, as of
    a class in an outer function under ``from __future__ import annotations``; empty if that is not why."""
    found = parameter_types(function)
    if len(found) <= number or found[number] is not None:
        return ""
    bare = _bare(function)
    written = bare.__annotations__.get(list(inspect.signature(bare).parameters)[number])
    return f" ({written!r} is no name at this place)" if isinstance(written, str) else ""


def _bare(function: Any) -> Any:
    """Return what a user wrote: the function under decorators, ``partial`` and objects that can be called."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    return function if hasattr(function, "__code__") else getattr(function, "__call__", None)  # noqa: B004 - its method


def _calling_frame() -> types.FrameType | None:
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == _PACKAGE:
        frame = frame.f_back
    return frame
