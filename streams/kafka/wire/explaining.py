"""Errors of brokers and connections as errors of this package. They never hold credentials."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from typing import Final

from streams.errors import BrokerUnavailable, ConfigError, StreamsError, TopicError
from streams.kafka.permissions import Right, denied, is_denial
from streams.kafka.wire.codes import NO_SUCH_TOPIC, BrokerRefusal, Code

_REFUSED_LOGINS: Final = (
    "_AUTHENTICATION",
    Code.SASL_AUTHENTICATION_FAILED.name,
    Code.UNSUPPORTED_SASL_MECHANISM.name,
)
_NO_TOPIC: Final = NO_SUCH_TOPIC | {Code.INVALID_TOPIC_EXCEPTION}


def explained(error: BaseException, where: str, needed: Sequence[Right] = ()) -> StreamsError:
    """Make the error for ``BrokerRefusal`` or ``LostConnection``. ``where``: the step, and the addresses. ``needed``:
    the rights that the step takes."""
    name = error.name if isinstance(error, BrokerRefusal) else getattr(error, "code", "")
    if name in _REFUSED_LOGINS:
        return ConfigError(
            f"{where}: the broker refuses the credentials; check sasl.mechanism, sasl.username, sasl.password ({error})"
        )
    if isinstance(error.__cause__, ssl.SSLCertVerificationError):
        return ConfigError(
            f"{where}: the broker's certificate is refused: {error.__cause__.verify_message}; "
            "check ssl.ca.location and the host name in bootstrap.servers"
        )
    if isinstance(error.__cause__, ssl.SSLError) and "ALERT" in (error.__cause__.reason or ""):
        return ConfigError(
            f"{where}: the broker ends the connection ({error}); if it asks for a certificate, check "
            "ssl.certificate.location and ssl.key.location"
        )
    if is_denial(name):
        return ConfigError(f"{where}: {denied(name, needed)}")
    if name == Code.UNSUPPORTED_VERSION.name:
        return ConfigError(f"{where}: the broker is too old, Kafka 3.0 or newer is needed ({error})")
    if isinstance(error, BrokerRefusal):
        if error.code in _NO_TOPIC:
            return TopicError(f"{where}: topic or partition does not exist")
        if not error.retriable:
            return BrokerUnavailable(f"{where}: the broker refuses it: {error}")
    return BrokerUnavailable(f"{where}: no answer in time, the last was: {error}")


def nothing_listens(addresses: str) -> str:
    """Return the message for brokers that refuse every connection."""
    hosts = [address.strip().rpartition(":")[0] for address in addresses.split(",")]
    here = any(host in ("localhost", "[::1]") or host.startswith("127.") for host in hosts)
    advice = "(kes broker start)" if here else "(check the address, too)"
    return f"nothing listens at {addresses}: is it running? {advice}"


def plain(reason: str, addresses: str) -> str:
    """Return the last news of the connections, in plain words where no broker is there at all."""
    # Of several brokers another one may be there, and a broker may advertise an address that refuses.
    only, wherever = addresses.strip(), ("/", ": Connection")  # as librdkafka has it, and our own connections
    refused = "Connection refused" in reason and "," not in only and any(only + end in reason for end in wherever)
    return nothing_listens(addresses) if refused else reason
