"""``MODULE:SOURCE`` as users type it, checked before anything is imported or started."""

from __future__ import annotations

import importlib.util
import os
import re
import symtable
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Final

import typer

from streams.errors import ConfigError
from streams.model.loading import not_there

_BINDS_MORE: Final = re.compile(
    rb"import\s*\(?\s*\*|__getattr__|modules\s*\[\s*__name__|\b(?:globals|locals|vars|exec|setattr)\s*\("
)
"""A module in which names may come from elsewhere."""


def checked_name(text: str) -> str:
    """``text``, if it can name an event source. Raises ``BadParameter``, with what was probably meant."""
    module, _, name = text.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *(name.split(".") if name else ()))):
        raise _bad(text, _without_path(module, name))
    parent, _, last = module.rpartition(".")
    if parent and _is_plain_module(parent):  # nothing can be below it: ``shop.py``, ``shop.source``
        raise _bad(text, f"{parent}:{name or ('source' if last == 'py' else last)}")
    return text


def check_defined(text: str) -> None:
    """Raise ``ConfigError`` if there is no such module, or it has no such name, as its text alone can tell: none of the
    user's code is run here, so what only running it shows is left to a worker."""
    module, _, path = text.partition(":")
    path = path or "source"
    name, spec = path.partition(".")[0], _spec_of(module)
    if spec is None and _spec_of(module.partition(".")[0]) is None:
        raise ConfigError(f"cannot import {module!r} of {text!r}: No module named {module.partition('.')[0]!r}")
    if spec is None or not spec.has_location or not (spec.origin or "").endswith(".py"):
        return
    try:
        code = Path(spec.origin or "").read_bytes()
        known = _names_bound(symtable.symtable(code, module, "exec"))  # type: ignore[arg-type]  # bytes, as compile
    except (OSError, SyntaxError, ValueError):
        return
    below = spec.submodule_search_locations
    if name in known or _BINDS_MORE.search(code) or (below and PathFinder.find_spec(name, list(below))):
        return
    raise not_there(module, path, name, known)


def _names_bound(table: symtable.SymbolTable, *, is_module: bool = True) -> set[str]:
    found = {
        symbol.get_name()
        for symbol in table.get_symbols()
        if (is_module and (symbol.is_assigned() or symbol.is_imported())) or symbol.is_declared_global()
    }
    return found.union(*(_names_bound(each, is_module=False) for each in table.get_children()))


def _bad(text: str, meant: str) -> typer.BadParameter:
    hint = f"did you mean {meant}?" if meant else "as in bank:source or shop.orders:make_source"
    return typer.BadParameter(f"{text!r} is not MODULE:SOURCE; {hint}", param_hint="MODULE:SOURCE")


def _without_path(module: str, name: str) -> str:
    """``./shop/orders.py`` -> ``shop.orders:source``; ``""``: it is no file of Python."""
    path = os.path.relpath(module) if os.path.isabs(module) else os.path.normpath(module)
    dotted = path.removesuffix(".py").replace(os.sep, ".")
    if not path.endswith(".py") or not all(part.isidentifier() for part in dotted.split(".")):
        return ""
    return f"{dotted}:{name or 'source'}"


def _is_plain_module(name: str) -> bool:
    """Check whether a module of this name is there that is no package."""
    spec = _spec_of(name)
    return spec is not None and spec.submodule_search_locations is None


def _spec_of(name: str) -> ModuleSpec | None:
    """Find a module as a worker would import it. Runs none of the user's code."""
    first, *rest = name.split(".")
    spec: ModuleSpec | None
    try:
        spec = PathFinder.find_spec(first, [os.getcwd(), *sys.path]) or importlib.util.find_spec(first)
    except (ImportError, ValueError):
        return None
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        # By its last name: for a folder without __init__.py the whole one would need its parents imported.
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations))
    return spec
