"""``format("grt")`` for Spark, which imports top-level packages called ``pyspark_*`` and takes their ``DefaultSource``.

So the data source is known in every session, view and pipeline whose Python has this package: nothing is registered.
"""

from __future__ import annotations

from streams.spark.source import GrtDataSource as DefaultSource

__all__ = ["DefaultSource"]
