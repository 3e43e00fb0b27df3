"""What a soak run found, as JSON and as a section of Markdown."""

from __future__ import annotations

import contextlib
import platform
import statistics
import subprocess
from importlib.metadata import version
from pathlib import Path

import msgspec
import psutil

from streams.broker.jars import pinned

ROOT = Path(__file__).parents[2]


class Fault(msgspec.Struct, kw_only=True):
    """One thing that was done to the group or its cluster. Times in seconds; ``at`` since the start of the run."""

    at: float
    kind: str
    target: str
    gaps: dict[int, float] = {}
    """Partition -> the longest wait of a reader between the fault and its end."""

    recovered: float = 0.0
    """After how long every partition gave something again."""

    @property
    def gap(self) -> float:
        """The longest wait on any partition."""
        return max(self.gaps.values(), default=0.0)


class SoakReport(msgspec.Struct, kw_only=True):
    """Everything about one run. ``lost`` and ``duplicated`` count outputs; ``problems`` empty: it passed."""

    seed: int
    minutes: float
    seconds: float = 0.0
    members: int = 0
    partitions: int = 0
    session_seconds: float = 0.0
    rate: float = 0.0
    faults: list[Fault] = []
    calm: dict[int, float] = {}
    """Partition -> the longest wait of a reader while nothing had been done to anybody."""

    load: list[float] = []
    """The machine's load average over the last minute, at each fault."""

    generations: int = 0
    inputs: int = 0
    outputs: int = 0
    lost: int = -1
    duplicated: int = -1
    oracle: str = ""
    problems: list[str] = []
    versions: dict[str, str] = msgspec.field(default_factory=lambda: versions())
    machine: str = msgspec.field(default_factory=lambda: machine())

    def write(self, path: Path) -> None:
        """Markdown to ``path``, JSON beside it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.markdown())
        path.with_suffix(".json").write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")

    def count(self, word: str) -> int:
        """Faults whose kind has this word."""
        return sum(word in fault.kind for fault in self.faults)

    def markdown(self) -> str:
        """A page of it."""
        verdict = "passed" if not self.problems else "FAILED"
        kinds: dict[str, list[Fault]] = {}
        for fault in self.faults:
            kinds.setdefault(fault.kind, []).append(fault)
        lines = [
            "# Report of a soak run",
            "",
            f"{self.members} members with one standby per partition on a cluster of three brokers, {self.partitions} "
            f"partitions, {self.rate:g} deposits/s, session timeout {self.session_seconds:g} s, for "
            f"{self.seconds / 60:.1f} minutes: **{verdict}**. Repeat it with `make soak SEED={self.seed} "
            f"SOAK_MINUTES={self.minutes:g}` (the seed decides what is done to whom, not how the machine takes it).",
            "",
            "| | |",
            "|---|---|",
            f"| records in, out | {self.inputs:,}, {self.outputs:,} |",
            f"| **lost** | **{_known(self.lost)}** |",
            f"| **duplicated** | **{_known(self.duplicated)}** |",
            f"| replay oracle | {self.oracle or 'not reached'} |",
            f"| members killed, frozen, restarted | {self.count('member killed')}, {self.count('member frozen')}, "
            f"{self.count('member restarted')} |",
            f"| brokers killed, frozen, restarted | {self.count('broker killed')}, {self.count('broker frozen')}, "
            f"{self.count('broker restarted')} |",
            f"| generations of the group | {self.generations} |",
            "",
            "## How long readers waited",
            "",
            "The longest time in which a `read_committed` reader of the outputs got nothing from a partition, from the "
            "fault until its end (a broker's: back and in sync; a member's fault may lie within that time, and counts "
            "for both). Waits of the *input* count too: while a partition of the source has no leader, there is "
            "nothing to handle. Three brokers, four members, load and reader share the machine; where its load average "
            "is far above its number of cores, so are these times above what they would be elsewhere.",
            "",
            "| what was done | times | median | longest | all partitions again after (median, longest) |",
            "|---|---|---|---|---|",
        ]
        for kind, faults in sorted(kinds.items()):
            gaps, recoveries = [fault.gap for fault in faults], [fault.recovered for fault in faults]
            lines.append(
                f"| {kind} | {len(faults)} | {_seconds(statistics.median(gaps))} | {_seconds(max(gaps))} | "
                f"{_seconds(statistics.median(recoveries))}, {_seconds(max(recoveries))} |"
            )
        lines += ["", "| partition | longest wait | after | while nothing was done |", "|---|---|---|---|"]
        for number in range(self.partitions):
            worst = max(self.faults, key=lambda fault: fault.gaps.get(number, 0.0), default=None)
            longest = worst.gaps.get(number, 0.0) if worst is not None else 0.0
            lines.append(
                f"| {number} | {_seconds(longest)} | {worst.kind if worst is not None else ''} | "
                f"{_seconds(self.calm.get(number, 0.0))} |"
            )
        if self.problems:
            lines += ["", "## Problems", "", *(f"* {problem}" for problem in self.problems)]
        lines += ["", "## With", "", *(f"* {name} {number}" for name, number in self.versions.items())]
        load = f"; load average {statistics.median(self.load):.0f}, up to {max(self.load):.0f}" if self.load else ""
        return "\n".join([*lines, f"* {self.machine}{load}", ""])


def versions() -> dict[str, str]:
    """Of everything that takes part."""
    found = {"Kafka": pinned()[0], "Python": platform.python_version()}
    found |= {name: version(name) for name in ("kafka-event-source", "confluent-kafka", "kafka-python", "msgspec")}
    with contextlib.suppress(OSError):
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        if done.returncode == 0:
            found["commit"] = done.stdout.strip()
    return found


def machine() -> str:
    """System, cores, memory; no names."""
    memory = psutil.virtual_memory().total / 2**30
    return f"{platform.system()} {platform.machine()}, {psutil.cpu_count()} cores, {memory:.0f} GiB"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value else "under 0.25 s"


def _known(count: int) -> str:
    return "not counted" if count < 0 else str(count)
