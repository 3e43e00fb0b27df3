"""Queries: the committed state of a running event source, read in its process and from anywhere (extra ``web``)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streams.model.commands import CommandDone
    from streams.queries.commands import CommandClient
    from streams.queries.reader import StateReader
    from streams.queries.server import QueryServer
    from streams.queries.service import query_app

__all__ = ["CommandClient", "CommandDone", "QueryServer", "StateReader", "query_app"]

_HOMES = {
    "CommandClient": "streams.queries.commands",
    "CommandDone": "streams.model.commands",
    "QueryServer": "streams.queries.server",
    "StateReader": "streams.queries.reader",
    "query_app": "streams.queries.service",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("starlette", "uvicorn", "httptools", "aiohttp"):
            raise
        advice = f"{name} needs {missing}: pip install 'kafka-event-source[web]'"
        raise ModuleNotFoundError(advice, name=missing) from error
