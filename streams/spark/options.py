"""Options of ``format("grt")``: what reading and writing share. The Kafka connector's names work too, unknown names are
refused.

Spark hands options over in a map that ignores case. It keeps lower-case keys only, so ``dict(options)["subscribe"]``
works and ``dict(options)["startingOffsets"]`` silently does not: everything here compares lower-case names.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from typing import Any, Final

from streams.errors import ConfigError
from streams.kafka.settings import RESERVED

KafkaSettings = dict[str, Any]
"""Settings by librdkafka's names: text, and where there is one a ``TokenCallback``. They are sent to tasks."""

DEFAULT_BOOTSTRAP: Final = "KES_BOOTSTRAP_SERVERS"
LARGEST: Final = 2**63 - 1
"""What offsets and times may be in Kafka, and numbers in Spark's limits."""

_BOOTSTRAP: Final = ("kafka.bootstrap.servers", "bootstrap.servers")
_PREFIX: Final = "idPrefix"
_CALLBACK: Final = "tokenCallback"
_SHARED: Final = (*_BOOTSTRAP, _PREFIX, _CALLBACK)
"""Known to reading and to writing."""
_READ: Final = (
    "subscribe", "subscribePattern", "assign", "startingOffsets", "startingTimestamp", "startingOffsetsByTimestamp",
    "startingOffsetsByTimestampStrategy", "isolation", "types", "stallSeconds", "failOnDataLoss", "includeHeaders",
    "minPartitions", "maxRecordsPerPartition",
)  # fmt: skip
_WRITE: Final = ("topic", "markerTopic", "markerLog", "stagingDir", "stagingThreshold", "tasks")
_OF_SPARK: Final = (
    "path",
    "checkpointLocation",
    "queryName",
    "asyncProgressTrackingEnabled",
    "asyncProgressTrackingCheckpointIntervalMs",
    "_asyncProgressTrackingOverrideSinkSupportCheck",
)
"""Spark's own, which arrive in the same map as a streaming sink's."""
READ_BATCH: Final = (*_READ, "endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp")
READ_STREAM: Final = (*_READ, "maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay", "commitOffsetsTo")
WRITE_BATCH: Final = (*_WRITE, "writeId", "runId")
WRITE_STREAM: Final = (*_WRITE, "sink", "replaceQuery", "lastWrittenBatch", "sourceTopics", *_OF_SPARK)
OF_TABLE: Final = "option."
"""Before the names of options that a table in a catalog has, for all that is done with it."""

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
    "oauth_cb": f"name the function in the option {_CALLBACK}",
}
_USED: Final = ("bootstrap.servers", "client.id", "transaction.timeout.ms")
"""Settings that clients of the toolkit set by themselves, and that are of use here all the same."""
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
    """The options under lower-case names; raises ``ConfigError`` for one that is neither known nor ``kafka.*``.

    Those of a table (``OF_TABLE``) count where the statement does not give them itself, and where they are known: a
    table that is read and written has options that only one of the two knows."""
    plain: dict[str, str] = {}
    for name, value in options.items():
        if plain.setdefault(name.lower(), value) != value:
            raise ConfigError(f"option {name} is given twice, with different values")
    by_lower = {name.lower(): name for name in (*known, *_SHARED)}
    others = {name.lower() for name in (*READ_BATCH, *READ_STREAM, *WRITE_BATCH, *WRITE_STREAM)} - by_lower.keys()
    for name in [name for name in plain if name.startswith(OF_TABLE)]:
        value, bare = plain.pop(name), name.removeprefix(OF_TABLE)
        if bare not in others:
            plain.setdefault(bare, value)
    for name in plain:
        if name in by_lower or name.startswith("kafka."):
            continue
        near = [by_lower[found] for found in difflib.get_close_matches(name, by_lower, n=1)]
        if not near and "." in name:
            near = [f"kafka.{name}"]
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(by_lower.values()))}, kafka.*"
        raise ConfigError(f"unknown option {name} for {doing} format('grt'): {hint}")
    return plain


@dataclass(frozen=True, slots=True)
class TokenCallback:
    """An ``oauth_cb`` by its name, ``module:function``, which each process imports for itself."""

    name: str

    def __call__(self, config: str) -> Any:
        """Return what the function returns: a token, when it expires (seconds since 1970), and what may follow."""
        return self.function()(config)

    def function(self) -> Callable[[str], Any]:
        """Import it. Raises ``ConfigError``."""
        module, _, name = self.name.partition(":")
        try:
            found: Any = attrgetter(name)(import_module(module))
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"option {_CALLBACK} must be module:function, of a module that Spark's driver and its workers can "
                f"import, not {self.name!r} ({error})"
            ) from error
        if not callable(found):
            raise ConfigError(f"option {_CALLBACK}: {self.name!r} is {type(found).__name__}, which is no function")
        function: Callable[[str], Any] = found
        return function


def id_prefix(plain: Mapping[str, str]) -> str:
    """The beginning of the names of groups and of transactional ids. One for both: a marker's group and the
    transactional id that fences its writers are one name, else a run could share the marker of one that it does not
    fence.

    Raises ``ConfigError``.
    """
    prefix = plain.get(_PREFIX.lower(), "")
    if not re.fullmatch(r"[A-Za-z0-9._-]{0,50}", prefix) or "kes.spark" in prefix:
        raise ConfigError(
            f"option {_PREFIX} must be at most 50 letters, digits, '.', '_' or '-', and without kes.spark, which "
            f"follows it, not {prefix!r}"
        )
    return prefix


def kafka_settings(plain: Mapping[str, str]) -> KafkaSettings:
    """Settings for librdkafka: everything after ``kafka.``, where the brokers are, and the function for tokens. Raises
    ``ConfigError``."""
    found: KafkaSettings = {
        name.removeprefix("kafka."): value for name, value in plain.items() if name.startswith("kafka.")
    }
    for name in found:
        if name in _OURS:
            raise ConfigError(f"option kafka.{name} cannot be set: {_OURS[name]}")
        if name in _JAVA_ONLY:
            raise ConfigError(f"option kafka.{name} belongs to Java clients: use {_JAVA_ONLY[name]}")
        if name in RESERVED and name not in _USED:
            raise ConfigError(f"option kafka.{name} cannot be set: it has no effect here; leave it out")
    given = {plain[name] for name in _BOOTSTRAP if name in plain}
    if len(given) > 1:
        raise ConfigError("options kafka.bootstrap.servers and bootstrap.servers differ: give one of them")
    found["bootstrap.servers"] = bootstrap_servers(next(iter(given), None))
    if given_callback := plain.get(_CALLBACK.lower()):
        mechanism = found.get("sasl.mechanism") or found.get("sasl.mechanisms") or ""
        if mechanism.upper() != "OAUTHBEARER":
            raise ConfigError(f"option {_CALLBACK} is for kafka.sasl.mechanism=OAUTHBEARER")
        callback = TokenCallback(given_callback)
        callback.function()  # an error of the driver, before there is a task
        found["oauth_cb"] = callback
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


def whole(name: str, text: str, *, minimum: int, maximum: int = LARGEST) -> int:
    """Raises ``ConfigError`` that names the option."""
    try:
        found = int(text)  # a float would round what has more than 15 digits
    except ValueError:
        about = number(name, text, minimum=minimum)
        if about != int(about):
            raise ConfigError(f"option {name} must be a whole number, not {text}") from None
        found = int(about)
    if not minimum <= found <= maximum:
        raise ConfigError(f"option {name} must be at least {minimum} and at most {maximum}, not {text}")
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
