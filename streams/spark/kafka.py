"""What both ends of ``format("grt")`` ask of a Kafka cluster before they move rows: topics, partitions, ends, and its
errors."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin import OffsetSpec as _OffsetSpec  # type: ignore[attr-defined]

from streams.errors import BrokerUnavailable, ConfigError, StreamsError, TopicError, TransactionFailed

TIMEOUT_SECONDS = 30.0

_UNREACHABLE = (KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN, KafkaError._TIMED_OUT, KafkaError._RESOLVE)
_DENIED = (KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED)

_log = logging.getLogger(__name__)


def client(kind: Any, kafka: dict[str, str], settings: dict[str, Any] | None = None) -> Any:
    """A librdkafka client of a kind; raises ``ConfigError`` for settings that it does not know."""
    # AdminClient, Consumer and Producer take the same dict; Any, because their stubs disagree about it.
    merged = {"client.id": "kes-spark", "log_level": 3, **kafka, **(settings or {})}
    try:
        return kind(merged, logger=_log)
    except KafkaException as error:
        raise ConfigError(f"an option kafka.* is wrong: {error.args[0].str()}") from error


def translated(error: KafkaException, doing: str, kafka: dict[str, str]) -> StreamsError:
    """Our error for the client's, with what was being done and where."""
    reason: KafkaError = error.args[0]
    servers = kafka["bootstrap.servers"]
    if reason.code() in _DENIED:
        return ConfigError(
            f"{doing}: {servers} refuses the credentials ({reason.name()}): check the options kafka.sasl.*"
        )
    if reason.code() in _UNREACHABLE:
        return BrokerUnavailable(
            f"{doing}: no answer from {servers} ({reason.name()}): is the broker up, the address right?"
        )
    if reason.code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION):
        return TopicError(f"{doing}: the topic or partition does not exist")
    return TransactionFailed(doing, reason.name(), "unknown", reason.str())


def partitions_of(admin: AdminClient, topics: Iterable[str], kafka: dict[str, str]) -> dict[str, int]:
    """The number of partitions of each topic. Never creates one. Raises ``TopicError`` when a topic is missing."""
    found = {}
    names = sorted(topics)
    futures = admin.describe_topics(TopicCollection(names), request_timeout=TIMEOUT_SECONDS)
    for name, future in futures.items():
        try:
            found[name] = len(future.result().partitions)
        except KafkaException as error:
            if error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise TopicError(
                    f"topic {name!r} does not exist at {kafka['bootstrap.servers']}: create it first (kes topics "
                    "apply), or "
                    "correct the option"
                ) from None
            raise translated(error, f"asking for topic {name!r}", kafka) from error
    return found


def bounds(
    admin: AdminClient, topics: dict[str, int], *, committed_only: bool, kafka: dict[str, str]
) -> dict[tuple[str, int], tuple[int, int]]:
    """First offset and end of every partition. The end is the last stable one with ``committed_only``."""
    level = IsolationLevel.READ_COMMITTED if committed_only else IsolationLevel.READ_UNCOMMITTED
    places = [TopicPartition(topic, partition) for topic, count in topics.items() for partition in range(count)]
    answers = []
    spec_of: Any = _OffsetSpec
    for spec in (spec_of.earliest(), spec_of.latest()):
        wanted: Any = dict.fromkeys(places, spec)
        futures = admin.list_offsets(wanted, isolation_level=level, request_timeout=TIMEOUT_SECONDS)
        try:
            answers.append({(p.topic, p.partition): future.result().offset for p, future in futures.items()})
        except KafkaException as error:
            raise translated(error, "asking for offsets", kafka) from error
    first, end = answers
    return {place: (first[place], end[place]) for place in first}
