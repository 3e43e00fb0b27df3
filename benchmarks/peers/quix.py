"""quixstreams, exactly once, in an environment of its own under the cache folder; its only store is RocksDB.

Options: ``commit_ms`` (100), ``session_ms`` (45,000), ``transaction_ms`` (60,000), ``waits`` (1: the work of
``benchmarks.workload.wait_seconds`` before each event), and ``consumer.NAME`` and ``producer.NAME`` for any setting of
librdkafka.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.peers.programs import SOURCES, checked, output_of, python_with
from benchmarks.systems import Kind, Launch, System

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
    """Return the interpreter of an environment with quixstreams (about 20 s, 60 MB). Raises ``Unavailable``."""
    return python_with(f"quixstreams-{VERSION}", [f"quixstreams=={VERSION}"], say)


@functools.cache
def versions(python: Path) -> dict[str, str]:
    """Return the versions that are installed there. Raises ``Unavailable``."""
    return msgspec.json.decode(output_of([str(python), "-c", _VERSIONS], _SECONDS), type=dict[str, str])
