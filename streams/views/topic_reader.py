"""The reader of a whole topic, made of a user's settings: for ``GlobalChangeLog`` and ``View``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from streams.errors import ConfigError
from streams.outcomes import ErrorResponse, Retry
from streams.runtime.reading.view_follower import OnError
from streams.settings import sources

if TYPE_CHECKING:
    from streams.runtime.reading.log_reader import LogReader


def reader_of(
    topic: str,
    *,
    bootstrap_servers: str,
    client_settings: Mapping[str, Any] | None,
    on_error: OnError,
    client_id: str,
    topic_timeout_seconds: float,
    only_compacted: bool,
) -> LogReader:
    """Make the reader of a topic, without receivers yet; the settings are those of ``GlobalChangeLog``. Raises
    ``ConfigError``."""
    if not topic:
        raise ConfigError(f"topic is {topic!r}; a global change log needs the name of one")
    if not topic_timeout_seconds >= 0:
        raise ConfigError(f"topic_timeout_seconds is {topic_timeout_seconds}; it must be 0 or more")
    # With the first log, not with this module: a program that declares a view or a lookup needs no client yet.
    from streams.kafka.settings import ClientSettings
    from streams.runtime.reading.followed_topic import LogConnections
    from streams.runtime.reading.log_reader import LogReader

    settings = ClientSettings(
        sources.bootstrap_servers(bootstrap_servers),
        sources.joined_client_settings(client_settings),
        client_id=client_id,
    )
    return LogReader(
        topic, LogConnections(settings, topic), checked_on_error(on_error), topic_timeout_seconds, only_compacted
    )


def checked_on_error(on_error: OnError) -> OnError:
    """Return the error policy of a whole topic's reader. Raises ``ConfigError`` for one that it cannot carry out."""
    if isinstance(on_error, Retry):
        if on_error.then not in (ErrorResponse.FAIL_CONSUMER, ErrorResponse.CONTINUE):
            raise ConfigError(
                f"on_error is {on_error.then.value}; a global change log can stop (fail_consumer) or skip (continue)"
            )
    elif not callable(on_error):
        raise ConfigError(f"on_error is {on_error!r}; it must be a Retry or a function of record and error")
    return on_error
