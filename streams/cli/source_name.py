"""``MODULE:SOURCE`` as users type it, checked before anything is imported or started."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder

import typer


def checked_name(text: str) -> str:
    """``text``, if it can name an event source. Raises ``BadParameter``, with what was probably meant."""
    module, _, name = text.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *(name.split(".") if name else ()))):
        raise _bad(text, _without_path(module, name))
    parent, _, last = module.rpartition(".")
    if parent and _is_plain_module(parent):  # nothing can be below it: ``shop.py``, ``shop.source``
        raise _bad(text, f"{parent}:{name or ('source' if last == 'py' else last)}")
    return text


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
    """Check whether a module of this name is there that is no package. Runs none of the user's code."""
    first, *rest = name.split(".")
    spec: ModuleSpec | None
    try:
        spec = PathFinder.find_spec(first, [os.getcwd(), *sys.path]) or importlib.util.find_spec(first)
    except (ImportError, ValueError):
        return False
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return False
        # By its last name: for a folder without __init__.py the whole one would need its parents imported.
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations))
    return spec is not None and spec.submodule_search_locations is None
