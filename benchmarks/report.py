"""The results of one call of the command, as JSON and on the console."""

from __future__ import annotations

import os
import platform
import re
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
    """Everything measured by one call: by measure, in the order of measuring. ``facts``: its circumstances."""

    facts: dict[str, Any]
    measured: dict[str, list[Entry]] = {}

    @classmethod
    def read(cls, path: Path) -> Run:
        """Read a file. Raises ``msgspec.DecodeError`` for a file of another kind or version."""
        run = msgspec.json.decode(path.read_bytes(), type=cls)
        run.decode()
        return run

    def decode(self) -> None:
        """Convert the results of JSON to their types. Raises ``msgspec.ValidationError``."""
        for measure in measures():
            for entry in self.measured.get(measure.name, ()):
                entry.found = msgspec.convert(entry.found, measure.result)

    def write(self, path: Path) -> None:
        """Write the file in one step, so that it is always whole."""
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".tmp")
        unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")
        unfinished.replace(path)

    def results(self, measure: Measure[Any]) -> list[Any]:
        """Return the results of one measure."""
        return [entry.found for entry in self.measured.get(measure.name, ())]

    def faults(self, *, of_peers: bool) -> list[str]:
        """Collect the faults of this project's systems (and the loops), or of peers."""
        peers = {name for name, kind in KINDS.items() if kind.is_peer}
        return [
            fault
            for measure in measures()
            for found in self.results(measure)
            if (fault := measure.fault(found))
            and (str(getattr(found, "system", "")).partition(":")[0] in peers) is of_peers
        ]


def show(console: Console, run: Run) -> None:
    """Print the tables and the faults."""
    for measure in measures():
        if found := run.results(measure):
            console.print(*measure.tables(found), sep="\n")
    for of_peers, told in ((True, "a peer's fault"), (False, "not right")):
        for fault in run.faults(of_peers=of_peers):
            console.print(f"{told}: {fault}", style=None if of_peers else "red", markup=False)


def machine_facts(seed: int, arguments: Sequence[str]) -> dict[str, Any]:
    """Collect the circumstances of the figures; the broker and the peers add their versions when they start."""
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
    found = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.processor()


def _state(what: str, *folders: str) -> str:
    """Return git's name for it, and whether these folders differ from it."""
    return _git("rev-parse", "--short", what) + (" and changes" if _git("status", "-s", *folders) else "")


def _git(*words: str) -> str:
    folder = Path(__file__).parents[1]
    try:
        return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
