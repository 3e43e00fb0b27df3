"""Spark's own Kafka connector: four jars, by coordinates and SHA-256, fetched once into the cache.

There is no connector in the repository for every PySpark that the package index has. These four fit together for
*measuring*; they are no set that anybody supports, and every report says so.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path
from typing import Final

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

_NETWORK_SECONDS: Final = 30


class NoConnector(Exception):
    """The jars cannot be had. The message says which and why."""


def connector_jars() -> list[Path]:
    """The jars, out of the cache or fetched into it. Blocks for the download (10 MB). Raises ``NoConnector``."""
    folder = cache_folder() / "spark-connector"
    found = []
    for coordinates, digest in COORDINATES.items():
        _, artifact, version = coordinates.split(":")
        path = folder / f"{artifact}-{version}.jar"
        if not path.is_file() or _digest(path) != digest:
            folder.mkdir(parents=True, exist_ok=True)
            _fetch(coordinates, digest, path)
        found.append(path)
    return found


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fetch(coordinates: str, digest: str, path: Path) -> None:
    try:
        from jgo.config import GlobalSettings
        from jgo.constants import MAVEN_CENTRAL_URL
        from jgo.maven import MavenContext, PythonResolver
    except ImportError:
        raise NoConnector("the package jgo, which fetches jars, is not installed (extra: broker)") from None
    group, artifact, version = coordinates.split(":")
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="incoming-") as incoming:
        context = MavenContext(
            repo_cache=Path(incoming),
            remote_repos={"central": MAVEN_CENTRAL_URL, **GlobalSettings.load().repositories},
            resolver=PythonResolver(),
            timeout=_NETWORK_SECONDS,
        )
        try:
            fetched = context.project(group, artifact).at_version(version).artifact().resolve()
        except (RuntimeError, OSError) as error:  # in no repository; no network
            raise NoConnector(f"{coordinates} cannot be fetched: {type(error).__name__}") from error
        if _digest(fetched) != digest:
            raise NoConnector(f"{coordinates} arrived with another SHA-256 than the one listed")
        shutil.move(fetched, path)
