"""Leaves: hot modules that run compiled where a file was built for exactly their source, and as they stand elsewhere.

A leaf is an ordinary module of functions, without classes and coroutines, that ends with ``use(globals())``. Beside it
lies a ``.pxd`` with the C types of its arguments and locals; ``sak/compiling.py`` builds both by Cython. Compiled code
reads the fields of the leaf's ``CLASSES`` by their places in memory, so a file is used only if it fits:

* Its name holds a digest of the source, of the ``.pxd`` and of the builder: a file from before a change is not found.
* Its name holds the interpreter's ABI.
* When it is imported it compares each place with the classes of this process, and raises ``ImportError`` if one differs
  (with another version of ``msgspec``, say).

Nothing is built here. ``KES_PLAIN=1`` in the environment leaves all as it stands: for debuggers, coverage and traces,
which do not see compiled code.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections import Counter
from functools import cache
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import FunctionType
from typing import Any, Final

logger = logging.getLogger(__name__)

PLAIN_VARIABLE: Final = "KES_PLAIN"
COMPILED: Final = "compiled"
NOT_BUILT: Final = "not built"
PACKAGE: Final = Path(__file__).parents[1]
NOTE: Final = Path(__file__).with_name("built.txt")
"""In a wheel: ``compiled: VERSIONS``, or ``plain: REASON`` (``hatch_build.py``)."""
BUILDER: Final = Path(__file__).with_name("compiling.py")
SUFFIX: Final = EXTENSION_SUFFIXES[0]
"""With the interpreter's ABI; the one that builders of extensions use (``EXT_SUFFIX`` of ``sysconfig``)."""

_states: dict[str, str] = {}


def use(namespace: dict[str, Any]) -> None:
    """Put the compiled functions of a module in place of its own, if there is a file that fits. A leaf's last line: who
    imports it has them from the start, and tests replace them like any others."""
    name, source = namespace["__name__"], Path(namespace["__file__"])
    if source.suffix == ".py":  # else this is the compiled one, whose body is the same
        _states[name] = _replace(namespace, name, source)


def _replace(namespace: dict[str, Any], name: str, source: Path) -> str:
    if os.environ.get(PLAIN_VARIABLE) == "1":
        return f"{PLAIN_VARIABLE}=1"
    try:
        built = built_file(source)
        if not built.exists():
            return NOT_BUILT
    except OSError:  # in an archive
        return NOT_BUILT
    try:
        loader = ExtensionFileLoader(name, str(built))
        spec = spec_from_file_location(name, built, loader=loader)
        assert spec is not None
        compiled = module_from_spec(spec)
        loader.exec_module(compiled)
    except (ImportError, OSError, ValueError) as error:  # ValueError: a class has become smaller
        logger.warning("%s runs as plain Python, which is slower; build it again: %s", name, error)
        return str(error)
    for key, value in list(namespace.items()):
        if isinstance(value, FunctionType) and value.__module__ == name and not key.startswith("_"):
            namespace[key] = getattr(compiled, key)
    return COMPILED


def built_file(source: Path) -> Path:
    """Return the path of a leaf's compiled file, for its source as it is now. Raises ``OSError``: it cannot be read."""
    digest = hashlib.blake2b(digest_size=8)
    for path in (source, source.with_suffix(".pxd"), BUILDER):
        digest.update(path.read_bytes() + b"\0")
    return source.with_name(f"{source.stem}.{digest.hexdigest()}{SUFFIX}")


def source_of(name: str) -> Path:
    """Return the path of a leaf's source."""
    return PACKAGE.joinpath(*name.split(".")[1:]).with_suffix(".py")


@cache
def names() -> tuple[str, ...]:
    """Find all leaves: the modules that have a ``.pxd`` beside them."""
    found = (path.relative_to(PACKAGE.parent).with_suffix("") for path in PACKAGE.rglob("*.pxd"))
    return tuple(sorted(".".join(path.parts) for path in found))


def states() -> dict[str, str]:
    """Import all leaves, and return how each of them runs: ``COMPILED``, or why it does not."""
    for name in names():
        import_module(name)
    return {name: _states[name] for name in names()}


@cache
def summary() -> str:
    """Describe in a few words how the leaves run, and why not compiled."""
    found = Counter(states().values())
    compiled = found.pop(COMPILED, 0)
    if not found:
        return COMPILED
    why, note = "; ".join(found), _note()
    if NOT_BUILT in found:
        why = why.replace(NOT_BUILT, f"{NOT_BUILT}: {note[7:]}" if note.startswith("plain: ") else NOT_BUILT)
    elif PLAIN_VARIABLE not in why and note:
        from importlib.metadata import version  # 47 modules, for this text only

        why += f"; {note}, and here is msgspec {version('msgspec')}"
    return f"{f'{compiled} leaves compiled, others' if compiled else ''} plain Python ({why})".strip()


def advised() -> str:
    """Return ``summary()``, and how to get the other one where that is faster."""
    said = summary()
    if said == COMPILED:
        return said
    return f"{said}; {advice()}"


def advice() -> str:
    """Return what makes the leaves run compiled."""
    if os.environ.get(PLAIN_VARIABLE) == "1":
        return f"without {PLAIN_VARIABLE}=1 it may run compiled, which is faster"
    return "kes compile makes it the compiled one, which is faster"


def _note() -> str:
    try:
        return NOTE.read_text().partition("\n")[0]  # its second line is about the jar for Spark
    except OSError:  # a checkout; or an archive
        return ""
