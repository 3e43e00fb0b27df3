"""Options of a read: ``spark.read`` and ``spark.readStream`` of ``format("grt")``. The Kafka connector's, and some
more."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from streams.errors import ConfigError
from streams.spark.options import (
    READ_BATCH,
    READ_STREAM,
    KafkaSettings,
    checked,
    flag,
    id_prefix,
    kafka_settings,
    number,
    whole,
    word,
)

EARLIEST, LATEST = -2, -1

ByPartition = dict[str, dict[int, int]]
"""A number for each partition, by topic."""


@dataclass(frozen=True)
class TopicChoice:
    """The topics of a read: exactly one of names, a pattern for whole names, and partitions by topic."""

    names: tuple[str, ...] = ()
    pattern: str | None = None
    assigned: Mapping[str, tuple[int, ...]] | None = None


@dataclass(frozen=True)
class Edge:
    """The beginning or the end of a read: offsets, or the first record at or after a time in milliseconds.

    ``option`` is the one it was given by. ``at`` is a word, one time for all, or a number for each partition; as
    offsets, -2 means earliest and -1 latest.
    """

    option: str
    at: Literal["earliest", "latest"] | int | ByPartition
    is_time: bool = False


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """The options of a read. ``kafka`` may hold secrets and stays out of ``repr``. Sizes are in offsets."""

    kafka: KafkaSettings = field(repr=False)
    group: str
    """For consumers, which need one; nothing is committed under it, and it has no members."""
    topics: TopicChoice
    starting: Edge
    ending: Edge
    latest_if_no_such_time: bool
    committed_only: bool
    types: frozenset[str] | None
    stall_seconds: float
    fail_on_data_loss: bool
    include_headers: bool
    min_partitions: int | None
    max_records_per_partition: int | None
    max_offsets_per_trigger: int | None
    min_offsets_per_trigger: int | None
    max_trigger_delay_seconds: float
    commit_offsets_to: str | None

    @property
    def starts_at_the_end(self) -> bool:
        """Check whether the start, requested again later, is another one because records came meanwhile."""
        at = self.starting.at
        if self.starting.is_time:
            return self.latest_if_no_such_time
        return at == "latest" or (isinstance(at, dict) and any(LATEST in found.values() for found in at.values()))


_STRATEGY: Final = "startingOffsetsByTimestampStrategy"
_REFUSED: Final = {
    "groupIdPrefix": "reading joins no group; commitOffsetsTo names one for lag tools, idPrefix helps with ACLs",
    "kafkaConsumer.pollTimeoutMs": "use stallSeconds",
    "fetchOffset.numRetries": "it asks again until stallSeconds are over",
    "fetchOffset.retryIntervalMs": "it asks again until stallSeconds are over",
}


def read_options(options: Mapping[str, str], *, stream: bool = False) -> ReadOptions:
    """Raises ``ConfigError`` that names the option at fault."""
    _refuse(options, stream)
    plain = checked(options, READ_STREAM if stream else READ_BATCH, "reading")
    topics = _topics(plain)
    isolation = word("isolation", plain.get("isolation", "read_committed"), ("read_committed", "read_uncommitted"))
    strategy = word(_STRATEGY, plain.get(_STRATEGY.lower(), "error"), ("error", "latest"))
    most = _count("maxOffsetsPerTrigger", plain)
    least = _count("minOffsetsPerTrigger", plain)
    if most is not None and least is not None and least > most:
        raise ConfigError(f"option minOffsetsPerTrigger ({least}) is larger than maxOffsetsPerTrigger ({most})")
    starting = _edge("starting", plain, topics, "latest" if stream else "earliest")
    ending = _edge("ending", plain, topics, "latest")
    _check_order(starting, ending)
    return ReadOptions(
        kafka=kafka_settings(plain),
        group=f"{id_prefix(plain)}kes-spark",
        topics=topics,
        starting=starting,
        ending=ending,
        latest_if_no_such_time=strategy == "latest",
        committed_only=isolation == "read_committed",
        types=_types(plain.get("types")),
        stall_seconds=number("stallSeconds", plain.get("stallseconds", "60"), minimum=1.0),
        fail_on_data_loss=flag("failOnDataLoss", plain.get("failondataloss", "true")),
        include_headers=flag("includeHeaders", plain.get("includeheaders", "true")),
        min_partitions=_count("minPartitions", plain),
        max_records_per_partition=_count("maxRecordsPerPartition", plain),
        max_offsets_per_trigger=most,
        min_offsets_per_trigger=least,
        max_trigger_delay_seconds=_seconds("maxTriggerDelay", plain.get("maxtriggerdelay", "15m")),
        commit_offsets_to=plain.get("commitoffsetsto") or None,
    )


def _refuse(options: Mapping[str, str], stream: bool) -> None:
    given = {name.lower() for name in options}
    for name, instead in _REFUSED.items():
        if name.lower() in given:
            raise ConfigError(f"option {name} is the Kafka connector's and means nothing here: {instead}")
    mine, others = (READ_STREAM, READ_BATCH) if stream else (READ_BATCH, READ_STREAM)
    for name in others:
        if name not in mine and name.lower() in given:
            why = "is for batch reads: a stream has no end" if stream else "is for streams: a batch is planned once"
            raise ConfigError(f"option {name} {why}")


def _topics(plain: Mapping[str, str]) -> TopicChoice:
    given = [name for name in ("subscribe", "subscribePattern", "assign") if plain.get(name.lower(), "").strip()]
    if not given:
        raise ConfigError(
            "option subscribe is missing: name the topic, or several with commas between them (or give "
            "subscribePattern or assign)"
        )
    if len(given) > 1:
        raise ConfigError(f"options {' and '.join(given)} cannot go together: give one of them")
    (option,) = given
    text = plain[option.lower()].strip()
    if option == "subscribe":
        names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
        if not names:
            raise ConfigError("option subscribe is missing: name the topic, or several with commas between them")
        return TopicChoice(names=names)
    if option == "subscribePattern":
        try:
            re.compile(text)
        except re.error as error:
            raise ConfigError(f"option subscribePattern is no regular expression: {text!r} ({error})") from None
        return TopicChoice(pattern=text)
    return TopicChoice(assigned=_assigned(text))


def _assigned(text: str) -> dict[str, tuple[int, ...]]:
    try:
        raw = json.loads(text)
        found = {str(topic): tuple(sorted({_whole(p) for p in partitions})) for topic, partitions in raw.items()}
        if not found or not all(found.values()) or min(min(partitions) for partitions in found.values()) < 0:
            raise ValueError
    except (ValueError, AttributeError, TypeError):
        raise ConfigError(f'option assign must be JSON like {{"topic": [0, 1]}}, not {text!r}') from None
    return found


def _edge(which: str, plain: Mapping[str, str], topics: TopicChoice, default: str) -> Edge:
    """The connector's precedence: one time for all, then times by partition, then offsets."""
    option = f"{which}Timestamp"
    if option.lower() in plain:
        return Edge(option, whole(option, plain[option.lower()], minimum=0), is_time=True)
    option = f"{which}OffsetsByTimestamp"
    if option.lower() in plain:
        text = plain[option.lower()]
        times = _by_partition(option, text, topics, f'JSON like {{"topic": {{"0": 1735689600000}}}}, not {text!r}')
        _no_less(option, times, 0, "time")
        return Edge(option, times, is_time=True)
    option = f"{which}Offsets"
    text = plain.get(option.lower(), default).strip()
    if text.lower() == "earliest" and which == "starting":
        return Edge(option, "earliest")
    if text.lower() == "latest":
        return Edge(option, "latest")
    words = "earliest, latest" if which == "starting" else "latest"
    expected = f'{words} or JSON like {{"topic": {{"0": 42}}}} (-2 earliest, -1 latest), not {text!r}'
    offsets = _by_partition(option, text, topics, expected)
    _no_less(option, offsets, EARLIEST, "offset")
    return Edge(option, offsets)


def _by_partition(option: str, text: str, topics: TopicChoice, expected: str) -> ByPartition:
    try:
        raw = json.loads(text)
        found = {str(t): {int(p): _whole(o) for p, o in partitions.items()} for t, partitions in raw.items()}
    except (ValueError, AttributeError, TypeError):
        raise ConfigError(f"option {option} must be {expected}") from None
    if topics.pattern is not None:
        return found  # the topics are known after a request to the cluster
    chosen = set(topics.names or topics.assigned or ())
    if set(found) != chosen:
        raise ConfigError(
            f"option {option} names the topics {sorted(found)}, but "
            f"{'subscribe' if topics.names else 'assign'} names {sorted(chosen)}"
        )
    for topic, partitions in (topics.assigned or {}).items():
        if set(found[topic]) != set(partitions):
            raise ConfigError(
                f"option {option} names the partitions {sorted(found[topic])} of {topic}, but assign names "
                f"{sorted(partitions)}"
            )
    return found


def _no_less(option: str, numbers: ByPartition, least: int, what: str) -> None:
    for topic, partitions in numbers.items():
        for partition, value in partitions.items():
            if value < least:
                raise ConfigError(f"option {option}: {topic}[{partition}] has the impossible {what} {value}")


def _check_order(starting: Edge, ending: Edge) -> None:
    """Refuse a range that ends before it begins: it would be read as an empty one, silently."""
    if starting.is_time != ending.is_time:
        return
    if isinstance(starting.at, int) and isinstance(ending.at, int) and ending.at < starting.at:
        raise ConfigError(f"option {ending.option} ({ending.at}) is before {starting.option} ({starting.at})")
    if isinstance(starting.at, dict) and isinstance(ending.at, dict):
        for topic, partitions in ending.at.items():
            for partition, end in partitions.items():
                begin = starting.at.get(topic, {}).get(partition, 0)
                if 0 <= end < begin:
                    raise ConfigError(
                        f"option {ending.option}: {topic}[{partition}] ends at {end}, before it begins "
                        f"({starting.option}: {begin})"
                    )


def _types(text: str | None) -> frozenset[str] | None:
    if text is None:
        return None
    names = frozenset(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise ConfigError("option types is empty: name the event types, with commas; leave it out to read all of them")
    return names


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError
    return value


def _count(name: str, plain: Mapping[str, str]) -> int | None:
    text = plain.get(name.lower())
    if text is None:
        return None
    return whole(name, text, minimum=1)


_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "": 0.001}


def _seconds(name: str, text: str) -> float:
    """The connector's form of a length of time: ``15m``, ``30s``, ``500ms``; a bare number is milliseconds."""
    match = re.fullmatch(r"\s*(\d+)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _UNITS:
        raise ConfigError(f"option {name} must be a length of time like 15m, 30s or 500ms, not {text!r}")
    return int(match[1]) * _UNITS[match[2]]
