"""Shared parts of commands about a cluster: the named event source, the addresses of the brokers, a client."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from streams.cli.console import complain
from streams.cli.source_name import checked_name
from streams.clients.admin import TopicAdmin
from streams.clients.settings import ClientSettings
from streams.clients.translate import nothing_listens
from streams.config import BOOTSTRAP_VARIABLE, EventSourceConfig
from streams.errors import BrokerUnavailable, ConfigError, StreamsError
from streams.event_source import EventSource
from streams.loading import described, load

_CONNECT_SECONDS: Final = 2.0
_PAUSE_SECONDS: Final = 0.2
_TELL_AFTER_SECONDS: Final = 1.0
"""A shorter wait reports it at its end only."""


def named_source(text: str) -> EventSource[object]:
    """The event source that ``MODULE:SOURCE`` names. Raises ``ConfigError``, and ``BadParameter`` for another shape."""
    name = checked_name(text)
    try:
        found = load(name)
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


def await_listener(servers: str, timeout_seconds: float) -> None:
    """Return when something takes connections at one of the addresses, or when that cannot be known. While all of them
    are refused, wait, after saying so. Raises ``BrokerUnavailable`` when the time is over."""
    deadline = time.monotonic() + timeout_seconds
    warned = False
    while _all_refuse(servers):
        if time.monotonic() >= deadline:
            raise BrokerUnavailable(nothing_listens(servers))
        if not warned and timeout_seconds > _TELL_AFTER_SECONDS:
            warned = True
            complain(f"{nothing_listens(servers)}; waiting {timeout_seconds:g} s for it")
        time.sleep(_PAUSE_SECONDS)


def _all_refuse(servers: str) -> bool:
    for address in servers.split(","):
        host, _, port = address.strip().rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
        except ConnectionRefusedError:
            continue
        except (
            OSError,
            ValueError,
            OverflowError,
        ):  # unknown name, firewall, no port: the client's message is better
            return False
        return False
    return True


@contextmanager
def admin_of(servers: str, config: EventSourceConfig | None, timeout_seconds: float) -> Iterator[TopicAdmin]:
    """A client for questions about topics and offsets, with the security settings of the source, if one is named, when
    something listens. Raises ``BrokerUnavailable``."""
    await_listener(servers, timeout_seconds)
    admin = TopicAdmin(ClientSettings(servers, config.client_settings if config else None, client_id="kes-cli"))
    try:
        yield admin
    finally:
        admin.close()


@contextmanager
def source_admin_of(
    config: EventSourceConfig | None, admin: TopicAdmin, timeout_seconds: float
) -> Iterator[TopicAdmin]:
    """A client for questions about the source topic: ``admin`` itself, unless the source is on another cluster."""
    if config is None or not config.source_is_elsewhere:
        yield admin
        return
    await_listener(config.source_bootstrap_servers, timeout_seconds)
    settings = ClientSettings(config.source_bootstrap_servers, config.source_client_settings, client_id="kes-cli")
    elsewhere = TopicAdmin(settings)
    try:
        yield elsewhere
    finally:
        elsewhere.close()
