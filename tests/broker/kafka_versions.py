"""Brokers of other Kafka versions than the embedded one, from their Maven coordinates."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from jgo.config import GlobalSettings
from jgo.constants import MAVEN_CENTRAL_URL
from jgo.maven import Dependency, MavenContext, PythonResolver

from streams.broker import KafkaBroker
from streams.sak.cache import cache_folder

LOGGING = "org.slf4j:slf4j-simple:1.7.36"
START_SECONDS = 120.0


def jars_of(version: str) -> Path:
    """Return the folder with all jars of this Kafka, fetched the first time."""
    root = cache_folder() / "kafka-versions"
    folder = root / version
    if not folder.exists():
        root.mkdir(parents=True, exist_ok=True)
        repositories = {"central": MAVEN_CENTRAL_URL, **GlobalSettings.load().repositories}
        context = MavenContext(
            repo_cache=root / "repository", remote_repos=repositories, resolver=PythonResolver(), timeout=30
        )
        wanted = []
        for coordinates in (f"org.apache.kafka:kafka_2.13:{version}", LOGGING):
            group, artifact, number = coordinates.split(":")
            wanted.append(Dependency(context.project(group, artifact).at_version(number).artifact()))
        draft = Path(tempfile.mkdtemp(prefix="draft-", dir=root))
        for found in context.resolver.resolve(wanted):
            for dependency in found:
                path = dependency.artifact.resolve()
                os.link(path, draft / path.name)
        draft.rename(folder)  # last: a folder that is there is whole
    return folder


@contextmanager
def kafka_of(version: str) -> Iterator[KafkaBroker]:
    """Run a broker of this version."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KES_KAFKA_JARS", str(jars_of(version)))
        broker = KafkaBroker(start_timeout=START_SECONDS).start()
    with broker:
        yield broker
