"""A user with a token, and rights on names with one prefix: reading and writing, in the driver and in tasks."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import streams.spark as kes_spark
from streams.broker import KafkaBroker
from tests.broker.permissions_kit import USER, Office
from tests.spark.log_kit import Log

pytestmark = [pytest.mark.spark, pytest.mark.broker, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(300)]

RIGHTS = [
    "Read topic SOURCE", "Read topic OUTPUT", "Write topic OUTPUT", "DescribeConfigs topic OUTPUT",
    "Read group team-a.*", "Write transactional-id team-a.*",
]  # fmt: skip
VALUES = sorted(str(number) for number in range(200))


def test_tokens_and_rights_by_prefix(spark: SparkSession, tmp_path: Path) -> None:
    with KafkaBroker(sasl="OAUTHBEARER", acl=True, users=[USER]) as broker:
        office, log = Office(broker, "rights-"), Log(broker.plain_bootstrap_servers)
        source, target = office.names["SOURCE"], office.names["OUTPUT"]
        for topic in (source, target):
            log.create(topic, 2)
        log.send(source, range(200), 2)
        office.grant(RIGHTS)
        login = {
            "kafka.bootstrap.servers": broker.bootstrap_servers,
            "kafka.security.protocol": "sasl_plaintext",
            "kafka.sasl.mechanism": "OAUTHBEARER",
            "tokenCallback": "tests.spark.tokens:alice",
        }
        mine = {**login, "idPrefix": "team-a."}

        rows = spark.read.format("grt").options(**mine, subscribe=source).load().select("key", "value")
        written = kes_spark.write(rows, topic=target, write_id="w", options=mine)
        assert (written.written, written.rows) == (True, 200)
        assert not kes_spark.write(rows, topic=target, write_id="w", options=mine).written

        stream = spark.readStream.format("grt").options(**mine, subscribe=source, startingOffsets="earliest").load()
        writer = stream.select("key", "value").writeStream.format("grt").options(**mine, topic=target, sink="s")
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True)
        writer.start().awaitTermination()
        assert sorted((message.value() or b"").decode() for message in log.records(target)) == sorted(2 * VALUES)

        with pytest.raises(Exception, match=r"reading the marker: .*not authorised"):
            kes_spark.write(rows, topic=target, write_id="w", options=login)
