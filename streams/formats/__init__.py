"""Formats of other programs: rules that give records their types, and CloudEvents (``docs/guides/foreign-topics.md``,
``docs/guides/cloudevents.md``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streams.sak.lazy_names import LazyNames

if TYPE_CHECKING:
    from streams.formats.cloudevents import CloudEvent, CloudEvents
    from streams.formats.rules import ByField, ByFunction, ByHeader, Deleted, Only, TypeRule

__all__ = ["ByField", "ByFunction", "ByHeader", "CloudEvent", "CloudEvents", "Deleted", "Only", "TypeRule"]

if not TYPE_CHECKING:
    __getattr__ = LazyNames(
        __name__,
        {"cloudevents": "CloudEvent CloudEvents", "rules": "ByField ByFunction ByHeader Deleted Only TypeRule"},
    )


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
