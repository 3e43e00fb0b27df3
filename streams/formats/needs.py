"""Needs of declared events before a start: a schema registry. Programs without such events load nothing more."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from typing import Any

from streams.errors import ConfigError, RegistryUnavailable
from streams.events import needy_codecs

_log = logging.getLogger(__name__)


def look_up_schemas() -> None:
    """Look the schemas of all declared events up, once. Blocks if there are any. One that is not found is logged: an
    event of it is refused when it is sent, and others are not held up."""
    for codec in needy_codecs():
        try:
            codec.prepare()
        except (ConfigError, RegistryUnavailable) as error:
            _log.warning("%s cannot be sent: %s", codec.title, error)


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
