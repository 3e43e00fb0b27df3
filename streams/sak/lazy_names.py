"""Names of a package that are imported when they are first used, so that a program pays for those that it uses.

They are also what lets threads import at once. A package that imported its own modules would wait for them, and they
wait for their package: with one thread at each end Python breaks the deadlock by an ``ImportError``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any


class LazyNames:
    """The ``__getattr__`` of a package. ``names_by_module``: modules below it, or others by their whole path, each with
    its names in one text, separated by blanks. A call raises ``AttributeError`` for a name that is not among them."""

    def __init__(self, package: str, names_by_module: Mapping[str, str]) -> None:
        self.package = package
        root = package.partition(".")[0] + "."
        self.homes = {
            name: module if module.startswith(root) else f"{package}.{module}"
            for module, names in names_by_module.items()
            for name in names.split()
        }

    def __call__(self, name: str) -> Any:
        home = self.homes.get(name)
        if home is None:
            raise AttributeError(f"module {self.package!r} has no attribute {name!r}")
        value = getattr(import_module(home), name)
        setattr(sys.modules[self.package], name, value)  # the next use finds it without a call
        return value
