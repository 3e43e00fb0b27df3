"""What the recipes share: their command line, and reading."""

from __future__ import annotations

import argparse
import os

from pyspark.sql import DataFrame, SparkSession


def command_line(doc: str | None) -> argparse.ArgumentParser:
    """A parser that shows the module's text, and knows ``--servers``."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    given = os.environ.get("KES_BOOTSTRAP_SERVERS")
    parser.add_argument(
        "--servers", default=given, required=given is None, help="host:port; default: KES_BOOTSTRAP_SERVERS"
    )
    return parser


def read(spark: SparkSession, servers: str, topics: str, **options: str) -> DataFrame:
    """What is in the topics now, as records."""
    reader = spark.read.format("grt").option("kafka.bootstrap.servers", servers).option("subscribe", topics)
    return reader.options(**options).load()
