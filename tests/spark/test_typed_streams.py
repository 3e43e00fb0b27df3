"""``read_events`` as a stream, and the choice of where events are decoded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import streams.spark as kes_spark
from streams.errors import ConfigError
from streams.events import event_type
from tests.spark.test_typed_events import MIXED, PACKED, connector, good, headers
from tests.spark.typed_events import Deposited, Packed, Withdrawn

pytestmark = [pytest.mark.spark, pytest.mark.broker, pytest.mark.timeout(240)]


@pytest.mark.slow  # the workers of the session start within it
def test_a_typed_stream_decodes_by_the_codec_where_workers_can_import_the_class(
    spark: SparkSession, make_topic: Callable[..., str], servers: str, tmp_path: Path
) -> None:
    """And for those of the main program, and several, in the JVM; a stream and a batch give the same."""
    topic = make_topic("in", 2)
    rows = connector(spark, [*MIXED, good(PACKED), (b"\xc1", headers(b"Packed", b"2"))])
    kes_spark.write(rows.select("key", "value", "headers"), topic=topic, write_id="w", servers=servers)
    found: list[Any] = []
    for number, classes in enumerate((Deposited, Packed, [Deposited, Withdrawn])):
        streamed, batch = (
            kes_spark.read_events(
                spark,
                classes,
                topic=topic,
                servers=servers,
                decode="auto",
                stream=stream,
                options={"startingOffsets": "earliest"},
            )
            for stream in (True, False)
        )
        assert streamed.isStreaming
        assert streamed.schema == batch.schema
        found.clear()
        writer = streamed.writeStream.foreachBatch(lambda df, _: found.extend(df.collect()))
        query = writer.option("checkpointLocation", str(tmp_path / str(number))).trigger(availableNow=True).start()
        assert query.awaitTermination(120)
        assert sorted(map(str, found)) == sorted(map(str, batch.collect()))
        assert len(found) > 1
    only = kes_spark.read_events(spark, Deposited, topic=topic, servers=servers, decode="auto")
    assert "grt-events" in str(only._jdf.queryExecution().toString())  # type: ignore[operator]
    some = only.where("_meta.partition = 1")
    assert some.count() == sum(row._meta.partition == 1 for row in only.collect())

    local = dataclasses.make_dataclass("Deposited", [("account", str)])
    local.__module__ = "__main__"
    event_type(local)
    in_jvm = kes_spark.read_events(spark, local, topic=topic, servers=servers, decode="auto")
    assert "grt-events" not in str(in_jvm._jdf.queryExecution().toString())  # type: ignore[operator]
    with pytest.raises(ConfigError, match="decode must be jvm, python or auto, not 'java'"):
        kes_spark.read_events(spark, Deposited, topic=topic, decode="java")  # type: ignore[arg-type]
