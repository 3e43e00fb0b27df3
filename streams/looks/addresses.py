"""The addresses of a cluster's brokers, the settings of its clients, and whether anything listens there."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from streams.errors import BrokerUnavailable, ConfigError
from streams.kafka.wire.explaining import nothing_listens
from streams.settings import sources
from streams.settings.config import EventSourceConfig

_log = logging.getLogger(__name__)

_CONNECT_SECONDS: Final = 2.0
_PAUSE_SECONDS: Final = 0.2
_TELL_AFTER_SECONDS: Final = 1.0
"""A shorter wait reports it at its end only."""


def brokers(option: str, config: EventSourceConfig | None = None) -> str:
    """The addresses: the option's, else those of the source, else the environment's. ``ConfigError``: none."""
    try:
        found = sources.bootstrap_servers(option or (config.bootstrap_servers if config else ""))
    except ConfigError as error:
        raise ConfigError(str(error).replace("set bootstrap_servers", "use --bootstrap-servers HOST:PORT")) from None
    return sources.checked_addresses(found)


def client_settings_of(config: EventSourceConfig | None) -> Mapping[str, Any]:
    """librdkafka's settings: those of the source, which have the ones from outside in them, else the ones from
    outside."""
    return sources.joined_client_settings(None) if config is None else config.client_settings


def await_listener(servers: str, timeout_seconds: float, report: Callable[[str], object] = _log.warning) -> None:
    """Return when something takes connections at one of the addresses, or when that cannot be known. While all of them
    are refused, wait, after reporting it. Raises ``BrokerUnavailable`` when the time is over."""
    deadline = time.monotonic() + timeout_seconds
    warned = False
    while _all_refuse(servers):
        if time.monotonic() >= deadline:
            raise BrokerUnavailable(nothing_listens(servers))
        if not warned and timeout_seconds > _TELL_AFTER_SECONDS:
            warned = True
            report(f"{nothing_listens(servers)}; waiting {timeout_seconds:g} s for it")
        time.sleep(_PAUSE_SECONDS)


def _all_refuse(servers: str) -> bool:
    for address in servers.split(","):
        host, _, port = address.strip().rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
        except ConnectionRefusedError:
            continue
        except (OSError, ValueError, OverflowError):  # unknown name, firewall, no port: the client's message is better
            return False
        return False
    return True
