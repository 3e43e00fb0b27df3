"""Records of topics for a query: by Spark's own Kafka connector where its jar is, by ``format("grt")`` where not.

The connector keeps its rows in the JVM, which costs less a row. Our sink writes them exactly once all the same: what is
written, and when, does not depend on who reads. What the reader itself checks does (``docs/guides/spark.md``, "Which
reader").
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final, Literal

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from streams.errors import ConfigError
from streams.spark.columns import HEADERS_TYPE, described
from streams.spark.options import addressed, agreed
from streams.spark.reading.read_options import ReadOptions, read_options
from streams.spark.reading.record_batches import read_schema

Reader = Literal["auto", "connector", "grt"]

_SAME: Final = (
    "subscribe", "subscribePattern", "assign", "startingOffsets", "startingTimestamp", "startingOffsetsByTimestamp",
    "startingOffsetsByTimestampStrategy", "endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp",
    "failOnDataLoss", "minPartitions", "maxRecordsPerPartition", "maxOffsetsPerTrigger", "minOffsetsPerTrigger",
    "maxTriggerDelay",
)  # fmt: skip
"""Options that the connector has by the same names."""
_HERE: Final = ("types", "includeheaders", "isolation", "stallseconds", "bootstrap.servers", "kafka.bootstrap.servers")
_LOGIN: Final = ("sasl.mechanism", "sasl.mechanisms", "sasl.username", "sasl.password")

_log = logging.getLogger(__name__)


def records(
    spark: SparkSession,
    topic: str,
    *,
    stream: bool = False,
    servers: str | None = None,
    options: Mapping[str, str] | None = None,
    reader: Reader = "auto",
) -> DataFrame:
    """Read the committed records of a topic (or of several, with commas), with the columns of ``format("grt")``; with
    ``stream`` as a streaming DataFrame. ``events``, ``encode`` and the sink take it.

    ``reader="auto"``: Spark's Kafka connector where this session has its jar and the connector knows all of the
    options, else ``format("grt")``; the log says which. ``"connector"`` and ``"grt"`` say it. A query that goes on from
    a checkpoint of ``"grt"`` is to say so: the connector does not read it.

    ``servers``: ``host:port,...``, default ``KES_BOOTSTRAP_SERVERS``. ``options`` are those of ``format("grt")``, by
    its names. Raises ``ConfigError``: an option is wrong, or the connector has none such, or is not there, and
    ``reader`` demands it.
    """
    if reader not in ("auto", "connector", "grt"):
        raise ConfigError(f"reader must be auto, connector or grt, not {reader!r}")
    given = addressed(agreed(options or {}, {"subscribe": topic}), servers)
    parsed = read_options(given, stream=stream)
    source: Any = spark.readStream if stream else spark.read
    if reader != "grt":
        try:
            translated = connector_options(given, parsed)
            _check_connector(spark, translated)
        except ConfigError as problem:
            if reader == "connector":
                raise ConfigError(f"{topic} cannot be read by Spark's Kafka connector: {problem}") from None
            _log.info("%s is read by format('grt'): %s", topic, problem)
        else:
            _log.info("%s is read by Spark's Kafka connector", topic)
            return _as_ours(source.format("kafka").options(**translated).load(), parsed)
    return source.format("grt").options(**given).load()  # type: ignore[no-any-return]


def connector_options(given: Mapping[str, str], parsed: ReadOptions) -> dict[str, str]:
    """Translate options of a read for Spark's Kafka connector. Raises ``ConfigError`` for one that it does not have."""
    names = {name.lower(): name for name in _SAME}
    found = {
        "kafka.bootstrap.servers": parsed.kafka["bootstrap.servers"],
        "kafka.isolation.level": "read_committed" if parsed.committed_only else "read_uncommitted",
        "includeHeaders": "true",  # the type of an event is one
        "kafkaConsumer.pollTimeoutMs": str(int(parsed.stall_seconds * 1000)),
    }
    for name, value in given.items():
        lower = name.lower()
        if lower in names:
            found[names[lower]] = value
        elif lower not in _HERE and not lower.startswith("kafka."):
            raise ConfigError(f"it has no option {name}")
    return found | _security({name: str(value) for name, value in parsed.kafka.items()})


def _security(kafka: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    left = {name: value for name, value in kafka.items() if name != "bootstrap.servers"}
    if (protocol := left.pop("security.protocol", "")) != "":
        found["kafka.security.protocol"] = protocol.upper()
    if (authority := left.pop("ssl.ca.location", "")) != "":
        found |= {"kafka.ssl.truststore.type": "PEM", "kafka.ssl.truststore.location": authority}
    login = {name: left.pop(name) for name in _LOGIN if name in left}
    if login:
        mechanism = (login.get("sasl.mechanism") or login.get("sasl.mechanisms") or "").upper()
        module = {"PLAIN": "plain.PlainLoginModule"}.get(mechanism, "")
        if mechanism in ("SCRAM-SHA-256", "SCRAM-SHA-512"):
            module = "scram.ScramLoginModule"
        if not module:
            raise ConfigError(f"kafka.sasl.mechanism={mechanism} is not translated for it")
        user, password = (_quoted(login.get(name, "")) for name in ("sasl.username", "sasl.password"))
        found["kafka.sasl.mechanism"] = mechanism
        found["kafka.sasl.jaas.config"] = (
            f"org.apache.kafka.common.security.{module} required username={user} password={password};"
        )
    if left:
        raise ConfigError(f"the option kafka.{min(left)} is not translated for it")
    return found


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _check_connector(spark: SparkSession, options: Mapping[str, str]) -> None:
    """Raise ``ConfigError`` unless the session finds the connector. Making a DataFrame asks no broker anything."""
    mine = {name: options[name] for name in ("kafka.bootstrap.servers", "subscribe") if name in options}
    try:
        spark.read.format("kafka").options(**{"subscribe": "t", **mine}).load().schema  # noqa: B018 - with Connect, asks
    except AnalysisException:
        raise ConfigError("this session has no jar of Spark's Kafka connector (spark-sql-kafka-0-10)") from None


def _as_ours(rows: DataFrame, options: ReadOptions) -> DataFrame:
    """Give the connector's rows our columns, of the types wanted."""
    # The connector has null where a record has no headers.
    there = rows.withColumn("headers", f.coalesce("headers", f.array().cast(HEADERS_TYPE)))
    ours = described(there).select(*read_schema(include_headers=options.include_headers).names)
    return ours if options.types is None else ours.where(f.col("type").isin(*sorted(options.types)))
