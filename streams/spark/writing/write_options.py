"""Options of a write: ``df.write`` and ``df.writeStream`` of ``format("grt")``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Final

from streams.errors import ConfigError
from streams.spark.options import (
    OF_TABLE,
    WRITE_BATCH,
    WRITE_STREAM,
    KafkaSettings,
    checked,
    id_prefix,
    kafka_settings,
    whole,
    word,
)
from streams.spark.writing.batch_encoding import compression
from streams.spark.writing.folders import checked_folder

MICRO_BATCH: Final = "batchId"
"""Makes of ``df.write`` the write of a micro-batch. ``write_batch`` gives it."""
_LARGEST_SETTING: Final = 2**31 - 1
"""Of Kafka's 32-bit settings."""
_OF_A_PRODUCER: Final = {
    "batch.num.messages", "linger.ms", "max.in.flight", "max.in.flight.requests.per.connection", "message.timeout.ms",
    "queue.buffering.backpressure.threshold", "queue.buffering.max.kbytes", "queue.buffering.max.messages",
    "queue.buffering.max.ms", "request.timeout.ms", "retries", "retry.backoff.max.ms", "retry.backoff.ms",
    "sticky.partitioning.linger.ms",
}  # fmt: skip
"""Settings of librdkafka's producer, which does not write here."""


@dataclass(frozen=True, kw_only=True)
class SinkOptions:
    """The options of every write. ``topic=None``: every row names its own. ``kafka`` may hold secrets and stays out of
    ``repr``."""

    kafka: KafkaSettings = field(repr=False)
    topic: str | None
    marker_topic: str
    marker_log: str | None
    id_prefix: str
    staging_dir: str | None
    staging_threshold: int


@dataclass(frozen=True, kw_only=True)
class WriteOptions(SinkOptions):
    """A batch write: ``df.write``."""

    write_id: str
    run_id: str | None


@dataclass(frozen=True, kw_only=True)
class StreamWriteOptions(SinkOptions):
    """A streaming sink: ``df.writeStream``."""

    sink: str
    replace_query: str | None
    last_written_batch: tuple[str, int] | None
    """Query and batch."""
    source_topics: tuple[str, ...]
    """Topics that must stay the same ones from batch to batch."""


def write_options(options: Mapping[str, str]) -> WriteOptions:
    """Raises ``ConfigError`` that names the option at fault."""
    plain = checked(options, WRITE_BATCH, "writing")
    if any(name.lower() == f"{OF_TABLE}writeid" for name in options):
        raise ConfigError(
            "option writeId is among the OPTIONS of the table, and names one write: the next one would write nothing. "
            "Give it to each of them: INSERT INTO ... WITH ('writeId' = '...')"
        )
    write_id = _name(
        "writeId",
        plain,
        "name this write (for example 'flights-2013-01'). A second run with the same name writes nothing, which is "
        "what makes a repeated or half-failed run exactly once; without a name it would write everything again",
    )
    run_id = plain.get("runid")
    if run_id is not None and not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", run_id):  # it names a folder, which is removed
        raise ConfigError(f"option runId must be 1 to 64 letters, digits, '_' or '-', not {run_id!r}")
    return WriteOptions(**_common(plain, "writeId"), write_id=write_id, run_id=run_id)


def stream_write_options(options: Mapping[str, str]) -> StreamWriteOptions:
    """Raises ``ConfigError`` that names the option at fault."""
    plain = checked(options, WRITE_STREAM, "streaming into")
    if plain.get("asyncprogresstrackingenabled", "false").lower() == "true":
        raise ConfigError(
            "option asyncProgressTrackingEnabled cannot be true: Spark would then go on before it has noted what a "
            "batch reads, and after a restart a batch could have other rows than the ones written: not exactly once"
        )
    sink = _name(
        "sink",
        plain,
        "name this sink (for example 'flights-enricher'), the same name at every start: under it the topic's markers "
        "are kept, by which a restarted query knows what it has written already",
    )
    return StreamWriteOptions(
        **_common(plain, "sink"),
        sink=sink,
        replace_query=plain.get("replacequery") or None,
        last_written_batch=_last_written(plain.get("lastwrittenbatch")),
        source_topics=tuple(
            dict.fromkeys(name.strip() for name in plain.get("sourcetopics", "").split(",") if name.strip())
        ),
    )


def micro_batch_options(options: Mapping[str, str]) -> tuple[StreamWriteOptions, int]:
    """The options of a sink, and the number of the micro-batch that ``write_batch`` writes to it. Raises
    ``ConfigError`` that names the option at fault."""
    rest = {name: value for name, value in options.items() if name.lower() != MICRO_BATCH.lower()}
    (batch,) = (value for name, value in options.items() if name.lower() == MICRO_BATCH.lower())
    return stream_write_options(rest), whole(MICRO_BATCH, batch, minimum=0)


def _last_written(text: str | None) -> tuple[str, int] | None:
    if not text:
        return None
    query, _, batch = text.rpartition(":")
    if not query or not batch.removeprefix("-").isdecimal() or int(batch) < -1:
        raise ConfigError(
            f"option lastWrittenBatch must be a query's id, a colon and the number of a batch, as the error that asks "
            f"for it says, not {text!r}"
        )
    return query, int(batch)


def _name(option: str, plain: Mapping[str, str], why: str) -> str:
    name = plain.get(option.lower(), "").strip()
    if not name:
        raise ConfigError(f"option {option} is missing: {why}")
    if len(name) > 200 or not (name.isascii() and name.isprintable()):
        raise ConfigError(f"option {option} must be at most 200 printable ASCII characters: brokers take no others")
    return name


def _kafka(plain: Mapping[str, str]) -> KafkaSettings:
    """Raises ``ConfigError`` for settings that a write does not know, or could not honour."""
    found = kafka_settings(plain)
    for name in _OF_A_PRODUCER & found.keys():
        raise ConfigError(
            f"option kafka.{name} does nothing when writing: tasks make the batches (of at most kafka.batch.size "
            "bytes, before they are compressed), and the driver sends them as they are"
        )
    for name in ("batch.size", "message.max.bytes", "transaction.timeout.ms"):
        if name in found:
            found[name] = str(whole(f"kafka.{name}", found[name], minimum=1, maximum=_LARGEST_SETTING))
    compression(found)
    if any(name.startswith(("security.", "sasl.", "ssl.")) for name in found):
        try:
            import_module("streams.kafka.writing.forwarding").settings_of(found, "kes-spark")
        except ConfigError as error:
            raise ConfigError(f"an option kafka.* cannot be used for writing: {error}") from error
    return found


def _common(plain: Mapping[str, str], identity: str) -> dict[str, Any]:
    topic = plain.get("topic") or None
    marker_topic = plain.get("markertopic") or topic
    if marker_topic is None:
        raise ConfigError(
            "option topic is missing. When each row names its topic in a column, give the option markerTopic "
            f"instead: one of the topics, always the same one for the same {identity}"
        )
    word("tasks", plain.get("tasks", "java"), ("java", "python"))
    return {
        "kafka": _kafka(plain),
        "topic": topic,
        "marker_topic": marker_topic,
        "marker_log": plain.get("markerlog") or None,
        "id_prefix": id_prefix(plain),
        "staging_dir": checked_folder(plain.get("stagingdir")),
        "staging_threshold": whole("stagingThreshold", plain.get("stagingthreshold", str(1 << 20)), minimum=0),
    }
