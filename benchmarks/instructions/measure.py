"""What an event costs, counted instead of timed: the same at any load."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from rich.table import Table

from benchmarks.bench import Bench
from benchmarks.instructions.callgrind import Unavailable, instructions
from benchmarks.instructions.child import ROOT, ChildFailed, count
from benchmarks.instructions.stages import HARNESS, STAGES
from benchmarks.measures import Measure, Options
from benchmarks.plots import Bars, Plot
from benchmarks.systems import Failed
from benchmarks.tables import table

SYSTEMS = {
    "handwritten": "hand-written",
    "engine": "engine",
    "engine_batch": "batch",
    "scheduler": "scheduler",
    "concurrency": "concurrency",
}
"""What it is called here, and by the counter; the loop first, to which the others are compared."""
PLAIN = list(SYSTEMS)[:3]


class PerEvent(msgspec.Struct, frozen=True):
    """Counts per event, by stage. ``instructions`` of the processor, C and Python; 0: not counted."""

    system: str
    bytecodes: dict[str, float]
    calls: dict[str, float]
    c_calls: dict[str, float]
    instructions: float = 0.0
    fault: str = ""


class Instructions(Measure[PerEvent]):
    """Bytecodes, calls and instructions."""

    name, title, place = "instructions", "Cost per event by stage", 10
    presets = frozenset({"quick", "default", "full"})
    result = PerEvent
    about = """\
The account workload through the real hot path, without a broker: clients of confluent-kafka that do nothing, one
thread, a clock that jumps. `handwritten` is the loop with 5,000 events per transaction, `engine` a plain handler,
`engine_batch` a batch handler; `scheduler` and `concurrency` are work ahead of its turn that gives way once.
Counted are executed bytecodes, calls of Python functions and of C, by stage, and the processor instructions of
everything (C and Python) by callgrind. The figures are the same in every run and at any load. They are no times:
librdkafka's own threads, the caches and the waiting for other threads are not in them."""

    def arguments(self, options: Options) -> None:
        """How many."""
        options.add("--events", type=int, quick=2_000, default=4_000, full=10_000, help="that are counted")
        options.add(
            "--counted", nargs="+", choices=[*SYSTEMS], quick=PLAIN[:2], default=PLAIN, full=[*SYSTEMS], help="which"
        )
        options.add("--callgrind", choices=("yes", "no"), quick="no", default="yes", full="yes", help="a minute")

    def run(self, bench: Bench) -> Iterator[PerEvent]:
        """One after the other: turns would change nothing."""
        events, with_callgrind = bench.options.events, bench.options.callgrind == "yes"
        for name in bench.options.counted:
            system = SYSTEMS[name]
            bench.now(f"counting bytecodes: {name}")
            try:
                counted = count(ROOT, system, events, events)
                executed = _executed(bench, name, system, events) if with_callgrind else 0.0
            except ChildFailed as error:
                raise Failed(f"instructions of {name}: {error}") from error
            yield PerEvent(name, counted.bytecodes, counted.calls, counted.c_calls, executed)

    def in_short(self, found: PerEvent) -> str:
        """Sums."""
        executed = f", {found.instructions:,.0f} instructions" if found.instructions else ""
        return f"{found.system}: {total(found.bytecodes):,.0f} bytecodes, {total(found.calls):.1f} calls{executed}"

    def tables(self, found: Sequence[PerEvent]) -> list[Table]:
        """By stage; all together."""
        last = {one.system: one for one in found}
        stages = table("Executed bytecodes per event", ["stage", "what it is"], list(last))
        for stage, what in STAGES.items():
            stages.add_row(stage, what, *(f"{one.bytecodes.get(stage, 0.0):,.1f}" for one in last.values()))
        columns = ["bytecodes", "ratio", "Python calls", "C calls", "instructions", "ratio"]
        sums = table("Per event, all stages", ["system"], columns)
        first = next(iter(last.values()))
        for one in last.values():
            executed = f"{one.instructions:,.0f}" if one.instructions else "-"
            ratio = f"{one.instructions / first.instructions:.2f}" if one.instructions and first.instructions else "-"
            sums.add_row(
                one.system,
                f"{total(one.bytecodes):,.0f}",
                f"{total(one.bytecodes) / total(first.bytecodes):.2f}",
                f"{total(one.calls):,.1f}",
                f"{total(one.c_calls):,.1f}",
                executed,
                ratio,
            )
        return [sums, stages]

    def plots(self, found: Sequence[PerEvent]) -> list[Plot]:
        """A bar each, made of stages."""
        bars = {one.system: {stage: one.bytecodes.get(stage, 0.0) for stage in STAGES} for one in found}
        return [Bars(name="stages", title="Executed bytecodes per event, by stage", x="bytecodes", bars=bars)]


def _executed(bench: Bench, name: str, system: str, events: int) -> float:
    bench.now(f"counting instructions: {name}")
    try:
        return instructions(ROOT, system, events, events).instructions
    except Unavailable as error:
        bench.facts.setdefault("not measured", {})["instructions by callgrind"] = str(error)
        return 0.0


def total(counts: dict[str, float]) -> float:
    """Of all stages that are the system's own."""
    return sum(number for stage, number in counts.items() if stage != HARNESS)


MEASURES = (Instructions(),)
