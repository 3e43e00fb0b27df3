"""quixstreams, exactly once, in an environment of its own under the cache folder; its only store is RocksDB.

Options: ``commit_ms`` (100), ``session_ms`` (45,000), ``transaction_ms`` (60,000), ``waits`` (1: the work of
``benchmarks.workload.wait_seconds`` before each event), and ``consumer.NAME`` and ``producer.NAME`` for any setting of
librdkafka.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.peers.programs import SOURCES, checked, output_of
from benchmarks.systems import Kind, Launch, System
from streams.sak.cache import cache_folder

OPTIONS: Final = ("commit_ms", "session_ms", "transaction_ms", "waits", "consumer.", "producer.")
VERSION: Final = "3.28.1"
_PROGRAM: Final = SOURCES / "quix" / "accounts.py"
_SECONDS: Final = 300
_VERSIONS = """
import confluent_kafka, importlib.metadata, json
found = {name: importlib.metadata.version(name) for name in ("quixstreams", "confluent-kafka")}
print(json.dumps(found | {"librdkafka": confluent_kafka.libversion()[0]}))
"""


class Quixstreams(Kind):
    """Installed into an environment of its own when it is needed for the first time."""

    name = "quixstreams"
    defaults = ("quixstreams:commit_ms=100", "quixstreams:commit_ms=20")
    is_peer = True

    def launch(self, system: System, say: Callable[[str], None]) -> Launch:
        """Start it by the interpreter of that environment."""
        checked(system.options, OPTIONS)
        python = environment(say)
        return Launch(command=(str(python), str(_PROGRAM)), versions=versions(python))


def environment(say: Callable[[str], None]) -> Path:
    """Return the interpreter of an environment with quixstreams; made the first time (about 20 s, 60 MB). Raises
    ``Unavailable``."""
    folder = cache_folder() / f"quixstreams-{VERSION}-py{sys.version_info[0]}.{sys.version_info[1]}"
    python, complete = folder / "bin" / "python", folder / "complete"
    if not (complete.is_file() and python.is_file()):
        say(f"installing quixstreams {VERSION}")
        output_of([sys.executable, "-m", "venv", "--clear", str(folder)], _SECONDS)
        options = ["--quiet", "--disable-pip-version-check", "--only-binary", ":all:"]
        output_of([str(python), "-m", "pip", "install", *options, f"quixstreams=={VERSION}"], _SECONDS)
        complete.touch()
    return python


@functools.cache
def versions(python: Path) -> dict[str, str]:
    """Return the versions that are installed there. Raises ``Unavailable``."""
    return msgspec.json.decode(output_of([str(python), "-c", _VERSIONS], _SECONDS), type=dict[str, str])
