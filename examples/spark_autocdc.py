"""The bank's accounts and their history as tables that follow its changelog: a file of a declarative pipeline.

``spark.sql.catalog.lake`` in the pipeline's configuration is a catalog whose tables know Spark's row-level operations.
"""

from __future__ import annotations

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

import streams.spark as kes_spark
from examples.bank import Account

RECORDS_A_BATCH = 500

spark = SparkSession.active()
changelog = (
    spark.readStream.format("grt")
    .option("subscribe", "bank.bank-events.changelog")
    .option("startingOffsets", "earliest")
    .option("maxOffsetsPerTrigger", RECORDS_A_BATCH)
    .load()
)
changes = kes_spark.changes(changelog, key=str, value=Account, on_error="fail")


@dp.temporary_view
def account_changes() -> DataFrame:
    """Every change, with columns of its own for what AutoCDC looks at."""
    return changes.select("key", "value.*", "deleted", "_meta.offset")


dp.create_streaming_table("lake.bank.accounts")
dp.create_auto_cdc_flow(
    target="lake.bank.accounts",
    source="account_changes",
    keys=["key"],
    sequence_by="offset",
    apply_as_deletes="deleted",
    except_column_list=["deleted", "offset"],
)

dp.create_streaming_table("lake.bank.history")
dp.create_auto_cdc_flow(
    target="lake.bank.history",
    source="account_changes",
    keys=["key"],
    sequence_by="offset",
    apply_as_deletes="deleted",
    except_column_list=["deleted", "offset"],
    stored_as_scd_type=2,
)
