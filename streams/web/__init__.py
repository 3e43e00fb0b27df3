"""The monitor: an event source, its group, its views and its dead letters in a browser, and as JSON (extra ``web``).
A name is imported when it is first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streams.web.actions import ActionRun
    from streams.web.monitor import Monitor

__all__ = ["ActionRun", "Monitor"]

_HOMES = {"ActionRun": "actions", "Monitor": "monitor"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "streams":
            raise
        advice = f"{name} needs {error.name}: pip install 'kafka-event-source[web]'"
        raise ModuleNotFoundError(advice, name=error.name) from error
