"""What one call of the command found, as JSON and on the console."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import confluent_kafka
import msgspec
import psutil
from rich.console import Console

from benchmarks.bench import MIB
from benchmarks.measures import Measure, measures
from benchmarks.systems import KINDS


class Entry(msgspec.Struct):
    """One result of a measure, with the load averages before and after it and the seconds that it took."""

    found: Any
    load_before: float
    load_after: float
    seconds: float


class Run(msgspec.Struct):
    """Everything measured by one call: by measure, in the order of measuring. ``facts``: what the figures depend on."""

    facts: dict[str, Any]
    measured: dict[str, list[Entry]] = {}

    @classmethod
    def read(cls, path: Path) -> Run:
        """What was written. Raises ``msgspec.DecodeError`` for a file that is none, or from another version."""
        run = msgspec.json.decode(path.read_bytes(), type=cls)
        run.decode()
        return run

    def decode(self) -> None:
        """Give what came from JSON its types. Raises ``msgspec.ValidationError``."""
        for measure in measures():
            for entry in self.measured.get(measure.name, ()):
                entry.found = msgspec.convert(entry.found, measure.result)

    def write(self, path: Path) -> None:
        """In one step, so that a file is always whole."""
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".tmp")
        unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")
        unfinished.replace(path)

    def results(self, measure: Measure[Any]) -> list[Any]:
        """Of one measure."""
        return [entry.found for entry in self.measured.get(measure.name, ())]

    def faults(self, *, of_peers: bool) -> list[str]:
        """What was not exactly once, or not what it should be: of this project's (and the reference's), or of peers."""
        return [
            fault
            for measure in measures()
            for found in self.results(measure)
            if (fault := measure.fault(found)) and _is_of_peer(found) == of_peers
        ]


def _is_of_peer(found: Any) -> bool:
    kind = KINDS.get(str(getattr(found, "system", "")).partition(":")[0])
    return kind is not None and kind.is_peer


def show(console: Console, run: Run) -> None:
    """Print the tables."""
    for measure in measures():
        if found := run.results(measure):
            for table in measure.tables(found):
                console.print(table)
    for fault in run.faults(of_peers=True):
        console.print(f"a peer's fault: {fault}", markup=False)
    for fault in run.faults(of_peers=False):
        console.print(f"not right: {fault}", style="red", markup=False)


def machine_facts(seed: int, arguments: Sequence[str]) -> dict[str, Any]:
    """What the figures depend on; the broker's and the peers' versions are added when they start."""
    return {
        "arguments": list(arguments),
        "seed": seed,
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_mib": psutil.virtual_memory().total // MIB,
        "load_average_before": os.getloadavg()[0],
        "system": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}, {platform.machine()}",
        "python": sys.version.split()[0],
        "kafka-event-source": version("kafka-event-source"),
        "commit": _state("HEAD", "streams", "benchmarks"),
        "code": _state("HEAD:streams", "streams"),
        "confluent_kafka": version("confluent-kafka"),
        "librdkafka": confluent_kafka.libversion()[0],
        "msgspec": version("msgspec"),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _state(what: str, *folders: str) -> str:
    """Git's name for it, and whether these folders differ from it."""
    return _git("rev-parse", "--short", what) + (" and changes" if _git("status", "-s", *folders) else "")


def _git(*words: str) -> str:
    command = ["git", *words]
    try:
        return subprocess.run(
            command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
