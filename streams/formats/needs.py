"""Needs of declared events before a start: a schema registry. Programs without such events load nothing more."""

from __future__ import annotations

from streams.events import needy_codecs


def look_up_schemas() -> None:
    """Look the schemas of all declared events up, until the registry answers. Blocks if there are any. Raises
    ``RegistryUnavailable``, ``ConfigError``."""
    if needy := needy_codecs():
        from streams.formats.schema_codecs import prepare

        prepare(needy)
