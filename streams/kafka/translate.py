"""The tables of librdkafka's error codes, and their meaning to the toolkit.

What a broker's code means stands in ``wire/answers.py`` and ``wire/codes.py``; librdkafka's own codes are added here.
Spark, the embedded broker and the test tools have no list of codes of their own. Messages carry the broker's or the
client's *name* of an error, never a number.
"""

from __future__ import annotations

from typing import Final

from confluent_kafka import KafkaError

from streams.errors import BrokerUnavailable, ConfigError
from streams.kafka.permissions import is_denial
from streams.kafka.wire import codes
from streams.kafka.wire.answers import PRODUCE, Meaning
from streams.kafka.wire.explaining import plain

REFUSED: Final = frozenset(code for code, meaning in PRODUCE.items() if meaning in (Meaning.REFUSED, Meaning.BLOCKED))
"""The record itself, its topic, a right or a clock is at fault, by the table of our own wire. All other failed
deliveries are consequences of something else (purged by an abort, timed out in an outage, fenced) and say nothing about
the record."""

NO_SUCH_TOPIC: Final = codes.NO_SUCH_TOPIC | {KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION}

BAD_OFFSET: Final = frozenset(
    {
        KafkaError._AUTO_OFFSET_RESET,  # what OFFSET_OUT_OF_RANGE becomes under ``auto.offset.reset=error``
        KafkaError.OFFSET_OUT_OF_RANGE,
        KafkaError._LOG_TRUNCATION,
    }
)

NOT_AUTHORIZED: Final = frozenset(code for code in codes.Code if is_denial(code.name))


def error_of(exception: BaseException) -> KafkaError:
    """The ``KafkaError`` inside an exception of confluent-kafka; ``_FAIL`` with its text for anything else."""
    first = exception.args[0] if exception.args else None
    return first if isinstance(first, KafkaError) else KafkaError(KafkaError._FAIL, str(exception))


def broker_unavailable(step: str, addresses: str, reason: str = "") -> BrokerUnavailable:
    """``step`` could not be done because nothing answered; ``reason`` is the last news of the connections."""
    if (words := plain(reason, addresses)) != reason:
        return BrokerUnavailable(f"{step}: {words}")
    cause = f" ({reason})" if reason else ""
    return BrokerUnavailable(
        f"{step}: no answer from Kafka at {addresses}{cause}; check the address, security.protocol (with TLS or not?), "
        "and that it runs"
    )


def refused(reason: str, addresses: str) -> ConfigError | None:
    """Return the error for the last news of connections that trying again does not cure: wrong credentials, or a
    certificate that one of the two sides does not take. ``None``: it may be cured."""
    if reason.startswith("_AUTHENTICATION"):
        return ConfigError(
            f"Kafka at {addresses} refuses the credentials ({reason}); check sasl.mechanism, sasl.username and "
            "sasl.password, or the token of oauth_cb"
        )
    if reason.startswith("_SSL") or "tls alert" in reason or "sslv3 alert" in reason:
        return ConfigError(
            f"TLS with Kafka at {addresses} failed ({reason}). The broker's certificate must be signed by an authority "
            "in ssl.ca.location, be for the host in bootstrap_servers, and not have expired; a broker that asks for a "
            "certificate needs ssl.certificate.location and ssl.key.location"
        )
    return None
