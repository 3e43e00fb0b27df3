"""Needs of declared events before a start: a schema registry. Programs without such events load nothing more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final, ParamSpec, TypeVar

from streams.errors import EncodeError
from streams.events import needy_codecs

REPLICA_SECONDS: Final = 10.0
"""Seconds in which requests for an id that the registry does not have are repeated: a replica of it may be behind."""

P = ParamSpec("P")
T = TypeVar("T")


class NotLookedUp(EncodeError):
    """An event cannot be written on an event loop before the id of its schema is looked up."""

    def __init__(self, codec: Any) -> None:
        super().__init__(
            f"{codec.title} is not written: its schema was not looked up at the start. A source looks up those of its "
            "own events, and of the topics that it names by source.output; for others, and in a transaction on an "
            "event loop, call prepare() of the codec before"
        )
        self.codec = codec


async def looked_up(make: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Return what a call makes that writes an event; the id of its schema is looked up for it, on a thread. Raises
    ``RegistryUnavailable``, ``ConfigError``, and what the call raises."""
    try:
        return make(*args, **options)
    except NotLookedUp as missing:
        await asyncio.to_thread(missing.codec.prepare)
        return make(*args, **options)


def own_needs(rules: Iterable[Any], handled: Collection[bytes], outputs: Iterable[str]) -> list[Any]:
    """Return what must be looked up before a source starts: its ``rules`` of types, and the codecs of the registries
    that it uses. It uses those of its rules, of the types that it has handlers for, and of its outputs' subjects
    (``<topic>-...``). Other sources may be declared in the process, with registries of their own."""
    rules, codecs = [each for each in rules if hasattr(each, "prepare")], needy_codecs()
    topics = tuple(f"{topic}-" for topic in outputs)
    used = {id(rule.registry) for rule in rules}
    for codec in codecs:
        if codec.title.encode() in handled or any(subject.startswith(topics) for subject in codec.subjects):
            used.add(id(codec.registry))
    return [*(codec for codec in codecs if id(codec.registry) in used), *rules]
