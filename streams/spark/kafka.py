"""The requests of both ends of ``format("grt")`` to a Kafka cluster before they move rows, and its errors."""

from __future__ import annotations

from collections.abc import Sequence

from confluent_kafka import KafkaError, KafkaException

from streams.errors import BrokerUnavailable, ConfigError, StreamsError, TopicError, TransactionFailed
from streams.kafka.permissions import Right, denied
from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.settings import RESERVED, ClientSettings
from streams.kafka.translate import DENIED, NO_SUCH_TOPIC, NOT_AUTHORIZED, UNREACHABLE
from streams.kafka.wire.codes import Code
from streams.spark.options import KafkaSettings, TokenCallback

TIMEOUT_SECONDS = 30.0
ASK_SECONDS = 10.0
"""What one request to the cluster may take, before it is made again."""

_ADMINS: dict[tuple[tuple[str, str], ...], TopicAdmin] = {}


def translated(
    error: KafkaException | TransactionFailed, doing: str, kafka: KafkaSettings, needed: Sequence[Right] = ()
) -> StreamsError:
    """Our error for a client's, with what was being done and where. ``needed``: the rights that it takes."""
    reason = reason_of(error)
    servers = kafka["bootstrap.servers"]
    if reason.code() in DENIED:
        return ConfigError(
            f"{doing}: {servers} refuses the credentials ({reason.name()}): check the options kafka.sasl.*"
        )
    if reason.code() in NOT_AUTHORIZED:
        return ConfigError(f"{doing}: {servers}: {denied(reason.name(), needed)}")
    if reason.code() in UNREACHABLE:
        return BrokerUnavailable(
            f"{doing}: no answer from {servers} ({reason.name()}): is the broker up, the address right?"
        )
    if reason.code() == KafkaError._TIMED_OUT:
        return BrokerUnavailable(
            f"{doing}: not finished in time at {servers} ({reason.name()}: {reason.str()}): the broker is away or "
            "busy, the line too slow for the request, or this process stood still; try again"
        )
    if reason.code() in NO_SUCH_TOPIC:
        return TopicError(f"{doing}: the topic or partition does not exist")
    name = error.code if isinstance(error, TransactionFailed) else reason.name()
    return TransactionFailed(doing, name, "unknown", reason.str())


def reason_of(error: KafkaException | TransactionFailed) -> KafkaError:
    """Return the error inside that of a client, librdkafka's or our own: its code, and its words."""
    if not isinstance(error, TransactionFailed):
        reason: KafkaError = error.args[0]
        return reason
    code = Code.__members__.get(error.code, getattr(KafkaError, error.code, KafkaError._FAIL))
    return KafkaError(int(code), error.reason)


def topic_admin(kafka: KafkaSettings) -> TopicAdmin:
    """Return a client for questions about topics, one for all of this process: connecting takes longer than a request,
    far longer on a secured cluster, and the next task of a Python worker asks the same brokers."""
    kept = tuple(sorted(kafka.items()))
    admin = _ADMINS.get(kept)
    if admin is None:
        admin = TopicAdmin(settings_of(kafka))
    return _ADMINS.setdefault(kept, admin)


def settings_of(kafka: KafkaSettings, group: str = "") -> ClientSettings:
    """Return the settings of the toolkit's own clients. Raises ``ConfigError`` for a callback that cannot be imported
    here."""
    if isinstance(callback := kafka.get("oauth_cb"), TokenCallback):
        callback.function()  # within a login, an error of the import would look like one of the login
    overrides = {name: value for name, value in kafka.items() if name not in RESERVED}
    return ClientSettings(
        kafka["bootstrap.servers"], overrides, client_id=kafka.get("client.id", "kes-spark"), group_id=group
    )


def no_such_topic(topic: str, kafka: KafkaSettings) -> TopicError:
    """The error for a topic that was named and does not exist."""
    return TopicError(
        f"topic {topic!r} does not exist at {kafka['bootstrap.servers']}: create it first (kes topics apply), or "
        "correct the option"
    )
