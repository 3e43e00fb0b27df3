"""The cost of an event, counted instead of timed: the same at any load."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import msgspec
from rich.table import Table

from benchmarks.bench import Bench
from benchmarks.drawing import Plot
from benchmarks.instructions.callgrind import instructions
from benchmarks.instructions.child import COMPILED, ROOT, count
from benchmarks.instructions.stages import STAGES, total
from benchmarks.instructions.turns import TURNS
from benchmarks.measures import Aim, Measure, at_most
from benchmarks.systems import Unavailable
from benchmarks.tables import table
from streams.sak import leaves

SYSTEMS = {
    "handwritten": "hand-written",
    "engine": "engine",
    "engine_compiled": "compiled-engine",
    "engine_batch": "batch",
    "engine_live": "live",
    "scheduler": "scheduler",
    "concurrency": "concurrency",
}
"""Names here, and names of the counter; the loop first, to which the others are compared."""
OF_LOOP = 1.5
"""Of the instructions of the loop by hand, compiled."""
PLAIN = list(SYSTEMS)[:5]


class PerEvent(msgspec.Struct, frozen=True):
    """Counts per event, by stage. ``instructions`` of the processor, C and Python; 0: not counted. ``turns``: of live
    traffic, per transaction."""

    system: str
    bytecodes: dict[str, float]
    calls: dict[str, float]
    c_calls: dict[str, float]
    instructions: float = 0.0
    turns: dict[str, float] = {}
    fault: str = ""


class Instructions(Measure[PerEvent]):
    """Bytecodes, calls and instructions."""

    name, title, place = "instructions", "Cost per event by stage", 10
    presets = frozenset({"quick", "default", "full"})
    result = PerEvent
    about = """\
The account workload through the real hot path, without a broker: clients of confluent-kafka that do nothing, one
thread, a clock that jumps. `handwritten` is the loop with 5,000 events per transaction, `engine` a plain handler in
plain Python, `engine_compiled` the same with compiled leaves, `engine_batch` a batch handler; `engine_live` gets 2,000
events/s in 10 partitions, some 20 in a transaction; `scheduler` and `concurrency` are work ahead of its turn that gives
way once.
Counted are executed bytecodes, calls of Python functions and of C, by stage, and the processor instructions of
everything (C and Python) by callgrind. The figures are the same in every run and at any load. They are no times:
librdkafka's own threads, the caches and the waiting for other threads are not in them."""

    sizes: ClassVar = {
        "events": (2_000, 4_000, 10_000),
        "systems": (PLAIN[:2], PLAIN, list(SYSTEMS)),
        "callgrind": ("no", "yes", "yes"),
    }

    def run(self, bench: Bench) -> Iterator[PerEvent]:
        """One after the other: turns would change nothing."""
        sizes = bench.sizes(self)
        for name in sizes.systems:
            system, executed = SYSTEMS[name], 0.0
            if system.startswith(COMPILED) and leaves.summary() != leaves.COMPILED:
                bench.facts.setdefault("not measured", {})[name] = f"the leaves are not compiled: {leaves.summary()}"
                continue
            bench.now(f"counting: {name}")
            try:
                counted = count(ROOT, system, sizes.events, sizes.events)
                if sizes.callgrind == "yes":
                    executed = instructions(ROOT, system, sizes.events, sizes.events)
            except Unavailable as error:
                bench.facts.setdefault("not measured", {})["instructions by callgrind"] = str(error)
            yield PerEvent(name, counted.bytecodes, counted.calls, counted.c_calls, executed, counted.turns)

    def in_short(self, found: PerEvent) -> str:
        executed = f", {found.instructions:,.0f} instructions" if found.instructions else ""
        return f"{found.system}: {total(found.bytecodes):,.0f} bytecodes, {total(found.calls):.1f} calls{executed}"

    def tables(self, found: Sequence[PerEvent]) -> list[Table]:
        last = {one.system: one for one in found}
        shown = by_stage("Executed bytecodes per event", {name: one.bytecodes for name, one in last.items()})
        shown.add_row("Python calls", "of functions", *(f"{total(one.calls):,.1f}" for one in last.values()))
        shown.add_row("C calls", "of functions and methods", *(f"{total(one.c_calls):,.1f}" for one in last.values()))
        executed = [one.instructions for one in last.values()]
        shown.add_row("instructions", "of the processor", *(f"{number:,.0f}" if number else "-" for number in executed))
        if executed[0]:
            shown.add_row("ratio", "of the instructions", *(f"{number / executed[0]:.2f}" for number in executed))
        turns = {name: one.turns for name, one in last.items() if one.turns}
        return [shown, of_transactions(turns)] if turns else [shown]

    def plots(self, found: Sequence[PerEvent]) -> list[Plot]:
        """A bar each, made of stages."""
        bars = {one.system: {stage: one.bytecodes.get(stage, 0.0) for stage in STAGES} for one in found}
        return [Plot(name="stages", title="Executed bytecodes per event, by stage", x="bytecodes", bars=bars)]

    def aims(self, found: Sequence[PerEvent]) -> list[Aim]:
        executed = {one.system: one.instructions for one in found}
        by_hand, mine = executed.get("handwritten", 0.0), executed.get("engine_compiled", 0.0)
        return [at_most("instructions per event, to the loop's", OF_LOOP, [mine / by_hand])] if by_hand and mine else []


def by_stage(title: str, columns: dict[str, dict[str, float]]) -> Table:
    """Show counts stage by stage, with their sums."""
    shown = table(title, ["stage", "what it is"], list(columns))
    for stage, what in STAGES.items():
        shown.add_row(stage, what, *(f"{counts.get(stage, 0.0):,.2f}" for counts in columns.values()))
    sums = [total(counts) for counts in columns.values()]
    shown.add_row("all", "", *(f"{found:,.2f}" for found in sums))
    shown.add_row("ratio", "", *(f"{found / sums[0]:.3f}" for found in sums))
    return shown


def of_transactions(columns: dict[str, dict[str, float]]) -> Table:
    """Show what live traffic makes the loop do."""
    shown = table("The loop's turns per transaction, at 2,000 events/s", ["count", "what it is"], list(columns))
    for kind, what in TURNS.items():
        shown.add_row(kind, what, *(f"{turns.get(kind, 0.0):,.2f}" for turns in columns.values()))
    return shown


MEASURES = (Instructions(),)
