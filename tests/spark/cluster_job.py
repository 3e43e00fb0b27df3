"""What needs Python on the workers of a cluster, as a driver's program: an upcaster, the handlers of an event source.

``python -m tests.spark.cluster_job SETTINGS SERVERS TOPIC``, settings as JSON. Its last line is JSON: what was read.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pyspark.sql import functions as f

import streams.spark as kes_spark
from examples.bank import Account, source
from examples.bank import Deposited as BankDeposited
from tests.spark.typed_events import Deposited

ROWS = 3000


def main(settings: dict[str, str], servers: str, topic: str) -> None:
    spark = kes_spark.local_session("typed", settings=settings, memory="768m")
    numbers = spark.range(0, ROWS, numPartitions=3).selectExpr("concat('a', id % 50) account", "id cents")
    banked = kes_spark.encode(numbers, BankDeposited, key="account")
    kes_spark.write(banked, topic=topic, write_id="bank", servers=servers)
    read = spark.read.format("grt").option("kafka.bootstrap.servers", servers).option("subscribe", topic).load()

    old = read.withColumn("type", f.lit("Deposited")).withColumn("version", f.lit(2))
    typed = kes_spark.events(old, Deposited)  # version 2: through the class's upcasters, in Python
    history = read.withColumn("topic", f.lit(source.config.topic))
    with kes_spark.replay("examples.bank:source", history, interjections="ignore") as replayed:
        found: dict[str, Any] = {
            "typed": typed.where("_error is null").count(),
            "errors": [row["_error"] for row in typed.where("_error is not null").select("_error").limit(3).collect()],
            "replayed": replayed.records,
            "outputs": replayed.outputs.count(),
            "cents": replayed.table(key=str, value=Account).agg(f.sum("value.cents")).collect()[0][0],
        }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), *sys.argv[2:])
