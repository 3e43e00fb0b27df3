"""``module:name`` to the event source of that name, for processes that load it by name (workers, executors)."""

from __future__ import annotations

import difflib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from streams.errors import ConfigError, StreamsError

_LIBRARY: Final = str(Path(__file__).parents[1]) + os.sep
"""The folder of this package: an old path of it is refused by its own finder of modules, below the user's line."""


def load(source: str) -> Any:
    """``module:name`` (``name`` may be dotted; ``source`` if left out) -> an object with a method ``run``.

    A callable without a ``run`` is a factory and is called. Raises ``ConfigError``, with the place in the user's file.
    """
    module_name, _, path = source.partition(":")
    try:
        here = os.getcwd()
    except FileNotFoundError:
        raise ConfigError("the current folder does not exist any more: change to one that does") from None
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = import_module(module_name)
    except StreamsError:
        raise
    except (Exception, SystemExit) as error:  # a script of the user's that says sys.exit("set SHOP_DB")
        raise ConfigError(f"cannot import {module_name!r} of {source!r}: {described(error)}") from error
    for name in (path or "source").split("."):
        if not hasattr(found, name):
            raise not_there(module_name, path or "source", name, vars(found))
        found = getattr(found, name)
    if not hasattr(found, "run") and callable(found):
        found = _made_by(found, source)
    if not callable(getattr(found, "run", None)):
        raise ConfigError(f"{source!r} is {type(found).__name__}, which is neither an event source nor makes one")
    return found


def not_there(module: str, path: str, name: str, known: Iterable[str]) -> ConfigError:
    """The error for a module that does not have ``name`` of ``path``, but these."""
    near = difflib.get_close_matches(name, [one for one in known if not one.startswith("_")], 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return ConfigError(f"{module!r} has no {path!r}: name the event source as module:name{hint}")


def described(error: BaseException) -> str:
    """The error in one line, with the last line of the user's code that it came through."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_machinery(frame.filename)]
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


def _made_by(factory: Callable[..., Any], source: str) -> Any:
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise ConfigError(f"the factory {source!r} cannot be called without arguments: {error}") from None
    except ValueError:
        pass  # no signature to be had: it will be seen when it is called
    try:
        return factory()
    except SystemExit as error:  # it would look like an orderly end
        raise ConfigError(f"{source!r} cannot make an event source: {described(error)}") from error


def _is_machinery(filename: str) -> bool:
    return filename.startswith(("<frozen", _LIBRARY)) or Path(filename).parent.name == "importlib"
