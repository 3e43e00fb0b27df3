"""Options of ``format("grt")``: parsed once, with the Kafka connector's names as aliases, unknown names refused.

Spark hands options over in a map that ignores case. It keeps lower-case keys only, so ``dict(options)["subscribe"]``
works and ``dict(options)["startingOffsets"]`` silently does not: everything here compares lower-case names.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, cast

from streams.errors import ConfigError

Position = Literal["earliest", "latest"]
Offsets = Position | dict[str, dict[int, int]]
"""Where a range begins or ends: a word, or offsets by topic and partition (-2 earliest, -1 latest)."""

EARLIEST, LATEST = -2, -1
DEFAULT_BOOTSTRAP = "KES_BOOTSTRAP_SERVERS"

_READ = ("subscribe", "startingOffsets", "endingOffsets", "isolation", "types", "stallSeconds")
_WRITE = ("topic", "writeId", "stagingDir", "stagingThreshold", "markerTopic", "runId")
_BOOTSTRAP = ("kafka.bootstrap.servers", "bootstrap.servers")

_OURS = {  # set by the protocol; another value would break it
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
_JAVA_ONLY = {
    "sasl.jaas.config": "kafka.sasl.username and kafka.sasl.password",
    "ssl.truststore.location": "kafka.ssl.ca.location (a PEM file)",
    "ssl.truststore.password": "kafka.ssl.ca.location (a PEM file)",
    "ssl.truststore.type": "kafka.ssl.ca.location (a PEM file)",
    "key.serializer": "columns of type binary or string",
    "value.serializer": "columns of type binary or string",
    "key.deserializer": "columns of type binary",
    "value.deserializer": "columns of type binary",
}


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """What to read. ``kafka`` may hold secrets and stays out of ``repr``."""

    kafka: dict[str, str] = field(repr=False)
    topics: tuple[str, ...]
    starting: Offsets
    ending: Offsets
    committed_only: bool
    types: frozenset[str] | None
    stall_seconds: float


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """What to write. ``topic=None``: every row names its own. ``kafka`` may hold secrets and stays out of ``repr``."""

    kafka: dict[str, str] = field(repr=False)
    topic: str | None
    marker_topic: str
    write_id: str
    run_id: str | None
    staging_dir: str | None
    staging_threshold: int


def read_options(options: Mapping[str, str]) -> ReadOptions:
    """Raises ``ConfigError`` that names the option at fault."""
    plain = _checked(options, _READ, "reading")
    topics = tuple(name.strip() for name in plain.get("subscribe", "").split(",") if name.strip())
    if not topics:
        raise ConfigError("option subscribe is missing: name the topic, or several with commas between them")
    isolation = plain.get("isolation", "read_committed")
    if isolation not in ("read_committed", "read_uncommitted"):
        raise ConfigError(f"option isolation must be read_committed or read_uncommitted, not {isolation!r}")
    types = frozenset(name.strip() for name in plain.get("types", "").split(",") if name.strip())
    return ReadOptions(
        kafka=_kafka(plain),
        topics=topics,
        starting=_offsets("startingOffsets", plain.get("startingoffsets", "earliest"), topics),
        ending=_offsets("endingOffsets", plain.get("endingoffsets", "latest"), topics),
        committed_only=isolation == "read_committed",
        types=types or None,
        stall_seconds=_number("stallSeconds", plain.get("stallseconds", "60"), minimum=1.0),
    )


def write_options(options: Mapping[str, str]) -> WriteOptions:
    """Raises ``ConfigError`` that names the option at fault."""
    plain = _checked(options, _WRITE, "writing")
    write_id = plain.get("writeid", "")
    if not write_id:
        raise ConfigError(
            "option writeId is missing: name this write (for example 'flights-2013-01'). A second run with the "
            "same name "
            "writes nothing, which is what makes a repeated or half-failed run exactly once; without a name it would "
            "write everything again"
        )
    if len(write_id) > 200 or not write_id.isprintable():
        raise ConfigError("option writeId must be at most 200 printable characters")
    topic = plain.get("topic") or None
    marker_topic = plain.get("markertopic") or topic
    if marker_topic is None:
        raise ConfigError(
            "option topic is missing. When each row names its topic in a column, give the option markerTopic "
            "instead: one of the topics, always the same one for the same writeId"
        )
    return WriteOptions(
        kafka=_kafka(plain),
        topic=topic,
        marker_topic=marker_topic,
        write_id=write_id,
        run_id=plain.get("runid"),
        staging_dir=plain.get("stagingdir"),
        staging_threshold=int(_number("stagingThreshold", plain.get("stagingthreshold", str(1 << 20)), minimum=0)),
    )


def bootstrap_servers(given: str | None = None) -> str:
    """``given``, else the environment's; raises ``ConfigError`` when neither names a broker."""
    servers = given or os.environ.get(DEFAULT_BOOTSTRAP)
    if not servers:
        raise ConfigError(
            f"option kafka.bootstrap.servers is missing, and {DEFAULT_BOOTSTRAP} was not set when Spark was started"
        )
    return servers


def _checked(options: Mapping[str, str], known: Iterable[str], doing: str) -> dict[str, str]:
    plain = {name.lower(): value for name, value in options.items()}
    by_lower = {name.lower(): name for name in (*known, *_BOOTSTRAP)}
    for name in plain:
        if name in by_lower or name.startswith("kafka."):
            continue
        near = difflib.get_close_matches(name, by_lower, n=1)
        hint = (
            f"did you mean {by_lower[near[0]]}?" if near else f"known: {', '.join(sorted(by_lower.values()))}, kafka.*"
        )
        raise ConfigError(f"unknown option {name} for {doing} format('grt'): {hint}")
    return plain


def _kafka(plain: Mapping[str, str]) -> dict[str, str]:
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


def _offsets(name: str, text: str, topics: Iterable[str]) -> Offsets:
    text = text.strip()
    if text.lower() in ("earliest", "latest"):
        return cast(Position, text.lower())
    try:
        raw = json.loads(text)
        offsets = {str(t): {int(p): int(o) for p, o in partitions.items()} for t, partitions in raw.items()}
    except (ValueError, AttributeError, TypeError):
        raise ConfigError(
            f'option {name} must be earliest, latest or JSON like {{"topic": {{"0": 42}}}} '
            f"(-2 earliest, -1 latest), not {text!r}"
        ) from None
    if set(offsets) != set(topics):
        raise ConfigError(f"option {name} names the topics {sorted(offsets)}, but subscribe names {sorted(topics)}")
    for topic, partitions in offsets.items():
        for partition, offset in partitions.items():
            if offset < EARLIEST:
                raise ConfigError(f"option {name}: {topic}[{partition}] has the impossible offset {offset}")
    return offsets


def _number(name: str, text: str, *, minimum: float) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ConfigError(f"option {name} must be a number, not {text!r}") from None
    if not number >= minimum:
        raise ConfigError(f"option {name} must be at least {minimum:g}, not {text}")
    return number
