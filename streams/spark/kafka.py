"""The requests of both ends of ``format("grt")`` to a Kafka cluster before they move rows, and its errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from streams.errors import BrokerUnavailable, ConfigError, StreamsError, TopicError, TransactionFailed
from streams.kafka.permissions import Right, denied, is_denial
from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.settings import RESERVED, ClientSettings
from streams.kafka.wire.codes import NO_SUCH_TOPIC, Code
from streams.kafka.wire.connection import LostConnection
from streams.spark.options import KafkaSettings, TokenCallback

TIMEOUT_SECONDS = 30.0
ASK_SECONDS = 10.0
"""What one request to the cluster may take, before it is made again."""
_UNKNOWN_SECONDS, _PAUSE_SECONDS = 5.0, 0.2
"""How long a topic may be unknown before it counts as missing, and the pause between two requests."""

_FoundT = TypeVar("_FoundT")
_ADMINS: dict[tuple[tuple[str, str], ...], TopicAdmin] = {}


def translated(
    error: TransactionFailed | LostConnection, doing: str, kafka: KafkaSettings, needed: Sequence[Right] = ()
) -> StreamsError:
    """Our error for that of a call or a connection, with what was being done and where. ``needed``: the rights that it
    takes."""
    name, servers = error.code, kafka["bootstrap.servers"]
    reason = error.reason if isinstance(error, TransactionFailed) else str(error)
    if name in ("_AUTHENTICATION", Code.SASL_AUTHENTICATION_FAILED.name):
        return ConfigError(f"{doing}: {servers} refuses the credentials ({name}): check the options kafka.sasl.*")
    if is_denial(name):
        return ConfigError(f"{doing}: {servers}: {denied(name, needed)}")
    if name == "_TRANSPORT":
        return BrokerUnavailable(f"{doing}: no answer from {servers} ({name}): is the broker up, the address right?")
    if name == "_TIMED_OUT":
        return BrokerUnavailable(
            f"{doing}: not finished in time at {servers} ({name}: {reason}): the broker is away or "
            "busy, the line too slow for the request, or this process stood still; try again"
        )
    if code_of(error) in NO_SUCH_TOPIC:
        return TopicError(f"{doing}: the topic or partition does not exist")
    return TransactionFailed(doing, name, "unknown", reason)


def code_of(error: TransactionFailed | LostConnection) -> int:
    """Return Kafka's code of an error; -1 where it is not a broker's."""
    return Code.__members__.get(error.code, Code.UNKNOWN_SERVER_ERROR)


def topic_admin(kafka: KafkaSettings) -> TopicAdmin:
    """Return a client for questions about topics, one for all of this process: connecting takes longer than a request,
    far longer on a secured cluster, and the next task of a Python worker asks the same brokers."""
    kept = tuple(sorted(kafka.items()))
    admin = _ADMINS.get(kept)
    if admin is None:
        admin = TopicAdmin(settings_of(kafka))
    return _ADMINS.setdefault(kept, admin)


def settings_of(kafka: KafkaSettings) -> ClientSettings:
    """Return the settings of the toolkit's own clients. Raises ``ConfigError`` for a callback that cannot be imported
    here."""
    if isinstance(callback := kafka.get("oauth_cb"), TokenCallback):
        callback.function()  # within a login, an error of the import would look like one of the login
    overrides = {name: value for name, value in kafka.items() if name not in RESERVED}
    return ClientSettings(kafka["bootstrap.servers"], overrides, client_id=kafka.get("client.id", "kes-spark"))


def existing(topic: str, kafka: KafkaSettings, ask: Callable[[], _FoundT | None]) -> _FoundT:
    """Return what ``ask`` finds of a topic. Raises ``TopicError`` when it finds nothing for 5 s."""
    begun = time.monotonic()
    # A topic is made when the controller has it. Each broker learns of it later, and a busy one much later.
    while (found := ask()) is None:
        if time.monotonic() - begun > _UNKNOWN_SECONDS:
            raise no_such_topic(topic, kafka)
        time.sleep(_PAUSE_SECONDS)
    return found


def identity_of(topic: str, kafka: KafkaSettings) -> tuple[str, int]:
    """Return the id of a topic and its number of partitions. Raises ``TopicError``, see ``existing``."""
    return existing(topic, kafka, lambda: topic_admin(kafka).identity(topic, TIMEOUT_SECONDS))


def no_such_topic(topic: str, kafka: KafkaSettings) -> TopicError:
    """The error for a topic that was named and does not exist."""
    return TopicError(
        f"topic {topic!r} does not exist at {kafka['bootstrap.servers']}: create it first (kes topics apply), or "
        "correct the option"
    )
