"""What commands about a cluster need alike: the event source that is named, the broker that is meant, a client."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from streams.clients.admin import TopicAdmin
from streams.clients.settings import ClientSettings
from streams.config import BOOTSTRAP_VARIABLE, EventSourceConfig
from streams.errors import ConfigError, StreamsError
from streams.event_source import EventSource
from streams.loading import described, load


def named_source(text: str) -> EventSource[object]:
    """The event source that ``MODULE:SOURCE`` names. Raises ``ConfigError``, and ``BadParameter`` for another shape."""
    module, _, name = text.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *(name.split(".") if name else ()))):
        raise typer.BadParameter(
            f"{text!r} is not MODULE:SOURCE, as in bank:source or shop.orders:make_source", param_hint="MODULE:SOURCE"
        )
    try:
        found = load(text)
    except StreamsError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{text!r} cannot make an event source: {described(error)}") from error
    if not isinstance(found, EventSource):
        raise ConfigError(f"{text!r} is {type(found).__name__}, not an EventSource: its topics are not known")
    return found


def brokers(option: str, config: EventSourceConfig | None = None) -> str:
    """The addresses: the option's, else those of the source, else the environment's. ``ConfigError``: none."""
    servers = option or (config.bootstrap_servers if config else "") or os.environ.get(BOOTSTRAP_VARIABLE, "")
    if not servers:
        raise ConfigError(
            f"no broker is named: use --bootstrap-servers HOST:PORT, or the variable {BOOTSTRAP_VARIABLE}"
        )
    return servers


@contextmanager
def admin_of(servers: str, config: EventSourceConfig | None = None) -> Iterator[TopicAdmin]:
    """A client for questions about topics and offsets, with the security settings of the source, if one is named."""
    admin = TopicAdmin(ClientSettings(servers, config.client_settings if config else None, client_id="kes-cli"))
    try:
        yield admin
    finally:
        admin.close()


@contextmanager
def source_admin_of(config: EventSourceConfig | None, admin: TopicAdmin) -> Iterator[TopicAdmin]:
    """A client for questions about the source topic: ``admin`` itself, unless the source is on another cluster."""
    if config is None or not config.source_is_elsewhere:
        yield admin
        return
    settings = ClientSettings(config.source_bootstrap_servers, config.source_client_settings, client_id="kes-cli")
    elsewhere = TopicAdmin(settings)
    try:
        yield elsewhere
    finally:
        elsewhere.close()
