"""What a soak run found, as a page of Markdown."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from benchmarks.report import machine_facts
from streams.broker.jars import pinned


@dataclass
class Fault:
    """One thing that was done to the group or its cluster. Times in seconds; ``at`` since the start of the run."""

    at: float
    kind: str
    gaps: dict[int, float] = field(default_factory=dict)
    """Partition -> the longest wait of a reader between the fault and its end."""
    recovered: float = 0.0
    """After how long every partition gave something again."""

    @property
    def gap(self) -> float:
        """The longest wait on any partition."""
        return max(self.gaps.values(), default=0.0)


@dataclass
class SoakReport:
    """Everything about one run. ``lost`` and ``duplicated`` count outputs; ``problems`` empty: it passed."""

    seed: int
    minutes: float
    group: str
    """Of whom it consists, in words."""
    seconds: float = 0.0
    faults: list[Fault] = field(default_factory=list)
    calm: dict[int, float] = field(default_factory=dict)
    """Partition -> the longest wait of a reader while nothing had been done to anybody."""
    load: list[float] = field(default_factory=list)
    """The machine's load average over the last minute, at each fault."""
    generations: int = 0
    inputs: int = 0
    outputs: int = 0
    lost: int | None = None
    duplicated: int | None = None
    oracle: str = "not reached"
    problems: list[str] = field(default_factory=list)

    def markdown(self) -> str:
        """A page of it."""
        kinds: dict[str, list[Fault]] = {}
        for fault in self.faults:
            kinds.setdefault(fault.kind, []).append(fault)
        lines = [
            "# Report of a soak run",
            "",
            f"{self.group}, for {self.seconds / 60:.1f} minutes: **{'FAILED' if self.problems else 'passed'}**. "
            f"Repeat it with `make soak SEED={self.seed} SOAK_MINUTES={self.minutes:g}` (the seed decides what is done "
            "to whom, not how the machine takes it).",
            "",
            "| | |",
            "|---|---|",
            f"| records in, out | {self.inputs:,}, {self.outputs:,} |",
            f"| **lost** | **{self.lost}** |",
            f"| **duplicated** | **{self.duplicated}** |",
            f"| replay oracle | {self.oracle} |",
            f"| generations of the group | {self.generations} |",
            "",
            "## How long readers waited",
            "",
            "The longest time in which a `read_committed` reader of the outputs got nothing from a partition, from the "
            "fault until its end (a broker's: back and in sync; a member's fault may lie within that time, and counts "
            "for both). Waits of the *input* count too: while a partition of the source has no leader, there is "
            "nothing to handle. Three brokers, four members, load and reader share the machine; where its load average "
            "is far above its number of cores, so are these times above what they would be elsewhere. While nothing "
            f"was done, the longest wait was {_seconds(max(self.calm.values(), default=0.0))}.",
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
        if self.problems:
            lines += ["", "## Problems", "", *(f"* {problem}" for problem in self.problems)]
        facts = {"kafka": pinned()[0], **machine_facts(self.seed, [])}
        if self.load:
            facts["load average"] = f"{statistics.median(self.load):.0f}, up to {max(self.load):.0f}"
        return "\n".join([*lines, "", "## With", "", *(f"* {name}: {fact}" for name, fact in facts.items()), ""])


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value else "under 0.25 s"
