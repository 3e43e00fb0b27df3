"""Spark's own Kafka connector: four jars.

There is no connector in the repository for every PySpark that the package index has. These four fit together for
*measuring*; they are no set that anybody supports, and every report says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from benchmarks.jars import jars
from streams.sak.cache import cache_folder

COORDINATES: Final = {
    "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0": (
        "64539c45e5d39f7ddb747312c239f38f5208d08c1a0ddf7d70beb2fbd9373705"
    ),
    "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.1.0-preview1": (
        "ab6e27a8a47ce63348dd0ecbd5543dc6212b4783180305cde5749e79684ea97b"
    ),
    "org.apache.kafka:kafka-clients:3.9.2": "014b4ef36884478a932641818b080c36a8f8e2e92dc771e800c9d2694f4f83d8",
    "org.apache.commons:commons-pool2:2.13.1": "f77a5060d6936a9144023584232f9de3f2248f1abfe156e9d31795f18770674f",
}


def connector_jars() -> list[Path]:
    """The jars, out of the cache or fetched into it. Blocks for the download (10 MB). Raises ``NoJar``."""
    return jars(COORDINATES, cache_folder() / "spark-connector")
