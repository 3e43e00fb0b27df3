"""Options of ``format("grt")``: what reading and writing share. The Kafka connector's names work too, unknown names are
refused.

Spark hands options over in a map that ignores case. It keeps lower-case keys only, so ``dict(options)["subscribe"]``
works and ``dict(options)["startingOffsets"]`` silently does not: everything here compares lower-case names.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterable, Mapping
from typing import Final

from streams.errors import ConfigError

DEFAULT_BOOTSTRAP: Final = "KES_BOOTSTRAP_SERVERS"
LARGEST: Final = 2**63 - 1
"""What offsets and times may be in Kafka, and numbers in Spark's limits."""

_BOOTSTRAP: Final = ("kafka.bootstrap.servers", "bootstrap.servers")

_OURS: Final = {  # set by the protocol; another value would break it
    "transactional.id": "it comes from writeId",
    "enable.idempotence": "it is always on",
    "acks": "it is always all",
    "partitioner": "it is always murmur2_random, as Java clients do",
    "isolation.level": "use the option isolation",
    "group.id": "offsets are Spark's, not a group's",
    "enable.auto.commit": "offsets are Spark's, not a group's",
    "auto.offset.reset": "use the option startingOffsets",
    "enable.partition.eof": "the reader needs it",
}
_JAVA_ONLY: Final = {
    "sasl.jaas.config": "kafka.sasl.username and kafka.sasl.password",
    "ssl.truststore.location": "kafka.ssl.ca.location (a PEM file)",
    "ssl.truststore.password": "kafka.ssl.ca.location (a PEM file)",
    "ssl.truststore.type": "kafka.ssl.ca.location (a PEM file)",
    "key.serializer": "columns of type binary or string",
    "value.serializer": "columns of type binary or string",
    "key.deserializer": "columns of type binary",
    "value.deserializer": "columns of type binary",
}


def bootstrap_servers(given: str | None = None) -> str:
    """``given``, else the environment's; raises ``ConfigError`` when neither names a broker."""
    servers = given or os.environ.get(DEFAULT_BOOTSTRAP)
    if not servers:
        raise ConfigError(
            f"option kafka.bootstrap.servers is missing, and {DEFAULT_BOOTSTRAP} was not set when Spark was started"
        )
    return servers


def names_brokers(options: Mapping[str, str]) -> bool:
    """Check whether the options have the brokers' address."""
    return any(name.lower() in _BOOTSTRAP for name in options)


def addressed(options: Mapping[str, str], servers: str | None) -> dict[str, str]:
    """The options with the brokers' address: ``servers``, else the options' own, else the environment's.

    Raises ``ConfigError`` when both are given and differ, or none is.
    """
    given = {value for name, value in options.items() if name.lower() in _BOOTSTRAP}
    if servers and given - {servers}:
        raise ConfigError(f"servers={servers!r} and the option kafka.bootstrap.servers differ: give one of them")
    if given:
        return dict(options)
    return {**options, "kafka.bootstrap.servers": bootstrap_servers(servers)}


def agreed(options: Mapping[str, str], arguments: Mapping[str, str | None]) -> dict[str, str]:
    """The options and those that are arguments of a function (name to value, ``None`` when it was not given).

    Raises ``ConfigError`` when an option says something else than its argument.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    by_lower = {name.lower(): name for name in given}
    for name, value in options.items():
        argument = by_lower.get(name.lower())
        if argument is not None and value != given[argument]:
            raise ConfigError(
                f"option {argument} is {value!r}, but the call says {given[argument]!r}: give one of them"
            )
    return {name: value for name, value in options.items() if name.lower() not in by_lower} | given


def checked(options: Mapping[str, str], known: Iterable[str], doing: str) -> dict[str, str]:
    """The options under lower-case names; raises ``ConfigError`` for one that is neither known nor ``kafka.*``."""
    plain: dict[str, str] = {}
    for name, value in options.items():
        if plain.setdefault(name.lower(), value) != value:
            raise ConfigError(f"option {name} is given twice, with different values")
    by_lower = {name.lower(): name for name in (*known, *_BOOTSTRAP)}
    for name in plain:
        if name in by_lower or name.startswith("kafka."):
            continue
        near = [by_lower[found] for found in difflib.get_close_matches(name, by_lower, n=1)]
        if not near and "." in name:
            near = [f"kafka.{name}"]
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(by_lower.values()))}, kafka.*"
        raise ConfigError(f"unknown option {name} for {doing} format('grt'): {hint}")
    return plain


def kafka_settings(plain: Mapping[str, str]) -> dict[str, str]:
    """Settings for librdkafka: everything after ``kafka.``, and where the brokers are."""
    found = {name.removeprefix("kafka."): value for name, value in plain.items() if name.startswith("kafka.")}
    for name in found:
        if name in _OURS:
            raise ConfigError(f"option kafka.{name} cannot be set: {_OURS[name]}")
        if name in _JAVA_ONLY:
            raise ConfigError(f"option kafka.{name} belongs to Java clients: use {_JAVA_ONLY[name]}")
    given = {plain[name] for name in _BOOTSTRAP if name in plain}
    if len(given) > 1:
        raise ConfigError("options kafka.bootstrap.servers and bootstrap.servers differ: give one of them")
    found["bootstrap.servers"] = bootstrap_servers(next(iter(given), None))
    return found


def number(name: str, text: str, *, minimum: float) -> float:
    """Raises ``ConfigError`` that names the option."""
    try:
        number = float(text)
    except ValueError:
        raise ConfigError(f"option {name} must be a number, not {text!r}") from None
    if not minimum <= number < math.inf:
        raise ConfigError(f"option {name} must be at least {minimum:g}, not {text}")
    return number


def whole(name: str, text: str, *, minimum: int) -> int:
    """Raises ``ConfigError`` that names the option."""
    try:
        found = int(text)  # a float would round what has more than 15 digits
    except ValueError:
        about = number(name, text, minimum=minimum)
        if about != int(about):
            raise ConfigError(f"option {name} must be a whole number, not {text}") from None
        found = int(about)
    if not minimum <= found <= LARGEST:
        raise ConfigError(f"option {name} must be at least {minimum} and at most {LARGEST}, not {text}")
    return found


def flag(name: str, text: str) -> bool:
    """Raises ``ConfigError`` that names the option."""
    return word(name, text, ("true", "false")) == "true"


def word(name: str, text: str, known: tuple[str, ...]) -> str:
    """One of the ``known`` words, in any case. Raises ``ConfigError`` that names the option."""
    found = text.strip().lower()
    if found not in known:
        raise ConfigError(f"option {name} must be {' or '.join(known)}, not {text!r}")
    return found
