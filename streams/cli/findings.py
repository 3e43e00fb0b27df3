"""The findings of ``kes doctor``, and the source or the cluster that it looks at."""

from __future__ import annotations

import time
from typing import Any, Final, NamedTuple

import msgspec

from streams.kafka.settings import ClientSettings
from streams.kafka.wire.security import Security
from streams.looks.addresses import client_settings_of
from streams.settings.config import EventSourceConfig
from streams.source.event_source import EventSource

OK: Final = "ok"
WARNING: Final = "warning"
PROBLEM: Final = "problem"
UNKNOWN: Final = "unknown"


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at: ``state`` is one of ``ok``, ``warning``, ``problem`` and ``unknown`` (it could not
    be looked at). ``remedy``: what to do or to type."""

    check: str
    state: str
    text: str
    remedy: str = ""


class Target(NamedTuple):
    """The object of the checks: a source that was named as ``name``, or nothing but the cluster at ``servers``."""

    name: str
    source: EventSource[Any] | None
    servers: str
    seconds: float

    @property
    def config(self) -> EventSourceConfig | None:
        """Return the settings of the source, with the address that is used."""
        if self.source is None:
            return None
        return msgspec.structs.replace(self.source.config, bootstrap_servers=self.servers)

    @property
    def security(self) -> Security:
        """Return the security of connections to the cluster."""
        return Security.of(client_settings_of(self.config))

    @property
    def settings(self) -> ClientSettings:
        """Return librdkafka's settings."""
        return ClientSettings(self.servers, client_settings_of(self.config), client_id="kes-doctor")

    @property
    def source_settings(self) -> ClientSettings:
        """Return librdkafka's settings for the source's topic."""
        config = self.config
        if config is None or not config.source_is_elsewhere:
            return self.settings
        return ClientSettings(config.source_bootstrap_servers, config.source_client_settings, client_id="kes-doctor")

    @property
    def deadline(self) -> float:
        """Return the time when a question that begins now is given up."""
        return time.monotonic() + self.seconds
