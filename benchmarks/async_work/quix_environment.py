"""quixstreams in an environment of its own, under the cache folder: never beside what this project is built from."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from streams.sak.cache import cache_folder

VERSION: Final = "3.28.1"
_SECONDS: Final = 300
_VERSIONS = """
import confluent_kafka, importlib.metadata, json
found = {name: importlib.metadata.version(name) for name in ("quixstreams", "confluent-kafka")}
print(json.dumps(found | {"librdkafka": confluent_kafka.libversion()[0]}))
"""


class NoQuixstreams(Exception):
    """It cannot be had. The message says why."""


def quixstreams_python(say: Callable[[str], None]) -> Path:
    """The interpreter of an environment with quixstreams; made when it is first asked for (about 20 s, 60 MB). Raises
    ``NoQuixstreams``."""
    folder = cache_folder() / f"quixstreams-{VERSION}-py{sys.version_info[0]}.{sys.version_info[1]}"
    python, complete = folder / "bin" / "python", folder / "complete"
    if complete.is_file() and python.is_file():
        return python
    say("making an environment for quixstreams")
    _run([sys.executable, "-m", "venv", "--clear", str(folder)])
    say(f"installing quixstreams {VERSION}")
    options = ["--quiet", "--disable-pip-version-check", "--only-binary", ":all:"]
    _run([str(python), "-m", "pip", "install", *options, f"quixstreams=={VERSION}"])
    complete.touch()
    return python


def versions(python: Path) -> dict[str, str]:
    """What is installed there."""
    return msgspec.json.decode(_run([str(python), "-c", _VERSIONS]), type=dict[str, str])


def _run(command: list[str]) -> bytes:
    try:
        done = subprocess.run(command, capture_output=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoQuixstreams(f"{command[-1]}: {error}") from error
    if done.returncode:
        said = (done.stderr.decode(errors="replace").strip().splitlines() or ["nothing"])[-1]
        raise NoQuixstreams(f"{' '.join(command[1:4])} ended with code {done.returncode}; it said: {said}")
    return done.stdout
