"""Keeps types and defaults on the page of all settings as the classes have them: ``python docs/settings.py``.

All else on the page is written by hand: a new setting needs a row with its meaning (``| `name` | | | meaning |``). A
setting without a row, or a row without its setting, is an error. A test compares the page with the classes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from streams import BatchProducer, EventProducer, EventSourceConfig, Retry
from streams.outbox import RelayConfig
from streams.outcomes import DEAD_LETTER, PARK, SKIP, STOP
from streams.settings import (
    BatcherConfig,
    GroupConfig,
    ParkingConfig,
    PoolConfig,
    QueryConfig,
    QueueConfig,
    SchedulerConfig,
    StateConfig,
    TimeoutConfig,
)
from streams.views import GlobalChangeLog

PAGE: Final = Path(__file__).resolve().parent / "reference" / "settings.md"

POLICIES: Final = {STOP: "`STOP`", SKIP: "`SKIP`", DEAD_LETTER: "`DEAD_LETTER`", PARK: "`PARK`"}
IN_PARTS: Final = {
    8 * 1024 * 1024: "8 MiB",
    16 * 1024 * 1024: "16 MiB",
    32 * 1024 * 1024: "32 MiB",
    64 * 1024 * 1024: "64 MiB",
    256 * 1024 * 1024: "256 MiB",
    1024 * 1024 * 1024: "1 GiB",
}
DOCUMENTED_ELSEWHERE: Final = {"self", "source", "finalizer", "on_failure"}
"""Arguments that are no settings: the parts that a constructor joins."""
_ROW: Final = re.compile(r"^\| `(\w+)` \|(?:[^|\\]|\\.)*\|(?:[^|\\]|\\.)*\| (.*) \|$")
CLASSES: Final[tuple[type, ...]] = (
    EventSourceConfig,
    GroupConfig,
    TimeoutConfig,
    QueueConfig,
    PoolConfig,
    QueryConfig,
    ParkingConfig,
    StateConfig,
    Retry,
    SchedulerConfig,
    BatcherConfig,
    EventProducer,
    BatchProducer,
    RelayConfig,
    GlobalChangeLog,
)
"""In the order of the page. Each has a section with its name."""


def settings_of(kind: type) -> dict[str, tuple[str, Any]]:
    """Return name, type and default of each setting of a class (``inspect.Parameter.empty`` without a default)."""
    if issubclass(kind, msgspec.Struct):
        fields = msgspec.structs.fields(kind)
        types = inspect.get_annotations(kind)
        return {
            each.name: (
                types[each.name],
                each.default
                if each.default is not msgspec.NODEFAULT
                else each.default_factory()
                if each.default_factory is not msgspec.NODEFAULT
                else inspect.Parameter.empty,
            )
            for each in fields
        }
    parameters = inspect.signature(kind.__init__).parameters.values()
    return {
        each.name: (str(each.annotation), each.default) for each in parameters if each.name not in DOCUMENTED_ELSEWHERE
    }


def shown(name: str, default: Any) -> str:
    """Return a default as a reader writes it."""
    if default is inspect.Parameter.empty:
        return "**required**"
    if isinstance(default, Retry):
        return POLICIES[default]
    if isinstance(default, msgspec.Struct):
        return f"`{type(default).__name__}()`"
    if isinstance(default, int) and default in IN_PARTS and "bytes" in name:
        return IN_PARTS[default]
    if isinstance(default, int | float) and not isinstance(default, bool):
        return f"{default:,g}" if default < 1_000_000 else f"{default:,}"
    if isinstance(default, tuple):
        return f"`({', '.join(each.__name__ for each in default)},)`"
    if isinstance(default, str | dict | None):
        return f"`{default!r}`" if default else "" if default is not None else "none"
    return f"`{getattr(default, 'name', default)}`"


def kind_of(annotation: object) -> str:
    """Return a type as it is shown: the classes without their modules."""
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    text = re.sub(r"\[StoreT(, \w+)*\]", "", text)
    return "`" + text.replace("|", "\\|") + "`"


def rows(kind: type, section: list[str]) -> Iterator[str]:
    """Iterate over the rows of a class: types and defaults are its own, meanings those of the section. Raises
    ``ValueError`` if a setting has no meaning, or a meaning no setting."""
    meanings = {name: meaning for line in section for name, meaning in _ROW.findall(line)}
    settings = settings_of(kind)
    if missing := settings.keys() ^ meanings.keys():
        raise ValueError(
            f"{PAGE.name}: {kind.__name__}: {', '.join(sorted(missing))}: a setting, or its row, is missing"
        )
    for name, (annotation, default) in settings.items():
        yield f"| `{name}` | {kind_of(annotation)} | {shown(name, default)} | {meanings[name]} |"


def outputs() -> dict[Path, str]:
    """Return the page, by its path."""
    before, *sections = re.split(r"^(?=## )", PAGE.read_text(), flags=re.MULTILINE)
    by_name = {section.splitlines()[0].removeprefix("## "): section for section in sections}
    for kind in CLASSES:
        lines = by_name[kind.__name__].splitlines()
        first = lines.index("|---|---|---|---|") + 1
        behind = next((at for at in range(first, len(lines)) if not lines[at].startswith("|")), len(lines))
        by_name[kind.__name__] = "\n".join([*lines[:first], *rows(kind, lines[first:behind]), *lines[behind:], ""])
    return {PAGE: "".join([before, *by_name.values()])}


def main() -> None:
    """Write what differs."""
    for path, text in outputs().items():
        if path.read_text() != text:
            path.write_text(text)


if __name__ == "__main__":
    main()
