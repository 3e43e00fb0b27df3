"""Kafka Streams, exactly_once_v2, with a store in memory and its changelog.

Options: ``commit_ms`` (100, its default under exactly once), ``threads`` (2), ``cache_mb`` (64; the store's cache
writes one changelog record per key and commit; 0: no cache), ``session_ms`` (45,000; a heartbeat every third of it),
``heap_mb`` (1024), ``gc`` (Parallel, G1, Serial), and ``streams.NAME`` for any of its settings.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

from benchmarks.jars import NoJar, jars
from benchmarks.peers.programs import SOURCES, built, checked, output_of
from benchmarks.systems import Kind, Launch, System, Unavailable
from streams.broker.jars import kafka_jars, pinned
from streams.errors import EmbeddedBrokerError
from streams.sak.cache import cache_folder
from streams.sak.java import MINIMUM, Java, JavaError, find_java

COORDINATES: Final = {
    "org.apache.kafka:kafka-streams:4.3.1": "bd73f3805e116f711e8456ee89a8a5b43ff5dcf5a5bb865afae29deae89e7c4b",
}
"""Beside what the embedded broker consists of; the same version, or its clients would not fit."""
OPTIONS: Final = ("commit_ms", "threads", "cache_mb", "session_ms", "heap_mb", "gc", "streams.")
_SOURCE: Final = SOURCES / "kafka_streams" / "Accounts.java"
_COMPILER_SECONDS: Final = 120


class KafkaStreams(Kind):
    """Its jars are fetched, and our program is compiled, when it is first asked for."""

    name = "kafka-streams"
    defaults = ("kafka-streams:commit_ms=100", "kafka-streams:commit_ms=20")
    is_peer = True

    def launch(self, system: System, say: Callable[[str], None]) -> Launch:
        """By the Java that runs the broker."""
        checked(system.options, OPTIONS)
        try:
            java = find_java()
            say("fetching Kafka Streams")
            path = os.pathsep.join(map(str, [*jars(COORDINATES, cache_folder() / "peers" / "jars"), *_broker_jars()]))
        except (JavaError, NoJar, EmbeddedBrokerError) as error:
            raise Unavailable(str(error)) from error
        compiler = javac(java)

        def compiled(folder: Path) -> None:
            say("compiling the program for Kafka Streams")
            options = ["--release", str(MINIMUM), "-cp", path, "-d", str(folder)]
            output_of([str(compiler), *options, str(_SOURCE)], _COMPILER_SECONDS)

        version = pinned()[0]
        classes = built(self.name, [_SOURCE], version, compiled)
        heap, gc = system.options.get("heap_mb", "1024"), system.options.get("gc", "Parallel")
        flags = [f"-Xms{heap}m", f"-Xmx{heap}m", f"-XX:+Use{gc}GC", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"]
        return Launch(
            command=(str(java.binary), *flags, "-cp", os.pathsep.join([str(classes), path]), "Accounts"),
            versions={"kafka-streams": version, "java": java.version},
        )


def _broker_jars() -> tuple[Path, ...]:
    version = pinned()[0]
    found = kafka_jars().paths
    if not any(path.name == f"kafka-clients-{version}.jar" for path in found):
        raise Unavailable(f"KES_KAFKA_JARS names another Kafka than {version}, for which Kafka Streams is listed")
    return found


def javac(java: Java) -> Path:
    """Find the compiler: that of this Java, else that on ``PATH``. Raises ``Unavailable``: a Java that only runs
    programs has none."""
    found = shutil.which("javac", path=java.home / "bin") or shutil.which("javac")
    if found is None:
        raise Unavailable(
            f"there is no javac, neither beside {java.binary} nor on PATH: install a JDK {MINIMUM} or newer, and name "
            "its java in KES_JAVA or put it on PATH"
        )
    return Path(found)
