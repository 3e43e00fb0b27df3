"""A changelog as the state that it holds: the stores, and how far of the input they contain."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from streams.codecs import RESERVED_KEY_PREFIX
from streams.errors import ConfigError
from streams.runtime.changelog import OFFSET_KEY
from streams.spark.replays import State

_NEEDED = ("partition", "offset", "key", "value")


def changelog_state(df: DataFrame) -> State:
    """The state in a changelog topic: ``stores`` with the last value of each key of each partition (deleted keys are
    not in it), ``positions`` with the input offset that each partition goes on at.

    ``df`` is what ``format("grt")`` reads of the changelog, committed records only, from its start. Read once, when it
    is first used, and kept until ``unpersist``, so that state and position are of one moment, also while the source is
    running: each of its transactions ends with an offset record. Raises ``ConfigError`` for missing columns.
    """
    if missing := [name for name in _NEEDED if name not in df.columns]:
        raise ConfigError(f"changelog_state needs the columns {', '.join(missing)} as format('grt') reads them")
    kind = f.col("type") if "type" in df.columns else f.lit(None).cast("string")
    last = (
        df.where(f.col("key").isNotNull())
        .groupBy("partition", "key")
        .agg(f.max_by(f.struct(f.col("value"), kind.alias("type")), "offset").alias("last"))
        .select("partition", "key", "last.*")
        .where(f.col("value").isNotNull())
        .persist()
    )
    ours = f.substring("key", 1, len(RESERVED_KEY_PREFIX)) == f.lit(RESERVED_KEY_PREFIX)
    offset = f.get_json_object(f.col("value").cast("string"), "$.offset").cast("long")
    positions = last.where(f.col("key") == f.lit(OFFSET_KEY)).select("partition", offset.alias("offset"))
    return State(last.where(~ours), positions, last)
