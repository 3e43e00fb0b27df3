"""The silences that a reader sees while members come, go and die."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

from rich.table import Table

from benchmarks.bench import Bench
from benchmarks.cluster import Cluster
from benchmarks.measures import Aim, Measure
from benchmarks.stalls.group import Group, Stall
from benchmarks.tables import right, table

SESSION_SECONDS = 6
RATE = 1_000
"""Events a second."""
MOST_MS = {
    "join, 1 to 2": 150,
    "join, 2 to 3": 150,
    "leave, 3 to 2 (SIGTERM)": 150,
    "kill -9 of a supervised worker, with standby": 1_000,
    "kill -9, 3 to 2, with standby": 1_000 * SESSION_SECONDS + 500,
}
"""A silence at a move should last so long at most."""


def planned(group: Group) -> Iterator[None]:
    """Let members join and leave."""
    group.start("m1")
    group.settle(1)
    yield
    group.step("join, 1 to 2", lambda: group.start("m2"), 2)
    group.step("join, 2 to 3", lambda: group.start("m3"), 3)
    group.step("leave, 3 to 2 (SIGTERM)", lambda: group.end("m2"), 2)


def kill_standby(group: Group) -> Iterator[None]:
    """Kill one of three members."""
    group.start("m1", "m2", "m3")
    group.settle(3)
    yield
    group.step("kill -9, 3 to 2, with standby", lambda: group.kill("m2"), 2)


def supervised_standby(group: Group) -> Iterator[None]:
    """Kill one of three workers of a supervisor."""
    group.supervise(3)
    group.settle(3)
    yield
    group.step("kill -9 of a supervised worker, with standby", group.kill_worker, 3)


SCENARIOS: dict[str, tuple[Callable[[Group], Iterator[None]], int]] = {
    "planned": (planned, 0),
    "kill-standby": (kill_standby, 1),
    "supervised-standby": (supervised_standby, 1),
}
"""With the number of standbys. The first members of a scenario start before the load, up to its ``yield``."""


def play(cluster: Cluster, name: str, turn: int, seed: int) -> list[Stall]:
    """Run one scenario once. Raises ``Failed``."""
    scenario, standbys = SCENARIOS[name]
    with Group(cluster, seed, RATE, standbys) as group:
        return group.run(turn, scenario(group))


class Stalls(Measure[Stall]):
    """Silences of output partitions."""

    name, title, place = "stalls", "Moves and crashes: how long a reader waits", 50
    result = Stall
    about = """\
Ten partitions, one account in each, 1,000 deposits a second in turn, so one per partition every 10 ms; members are
processes with default settings (session 6 s), the table has a changelog. A `read_committed` reader notes when each
output arrived; an output names the process that wrote it, so it is seen which partitions moved, and when. *At the
move*: the time between the last output of the old writer and the first of the new one. *Any time*: a moved
partition's longest silence from the action until everybody had settled and 1.5 s more. *Kept*: the same of
partitions that stayed. "steady" is four seconds before anything happens: the noise. All outputs are judged
afterwards."""

    sizes: ClassVar = {"scenarios": (["planned"], list(SCENARIOS), list(SCENARIOS)), "rounds": (1, 1, 3)}

    def run(self, bench: Bench) -> Iterator[Stall]:
        """All scenarios in turn, round by round; the first one is played once before."""
        sizes = bench.sizes(self)
        bench.warm_up(live=True)
        bench.now(f"warming the broker up, not counted: {sizes.scenarios[0]}")
        play(bench.cluster, sizes.scenarios[0], 0, bench.seed)
        for turn in range(1, sizes.rounds + 1):
            for name in sizes.scenarios:
                bench.now(f"stalls {turn}/{sizes.rounds}: {name}")
                yield from play(bench.cluster, name, turn, bench.seed + turn)

    def in_short(self, found: Stall) -> str:
        moved, kept = at_moves([found]), milliseconds([found], moved=False)
        told = [f"{len(times)} {name} up to {max(times):,.0f} ms"
                for name, times in (("moved", moved), ("kept", kept)) if times]  # fmt: skip
        return f"{found.round} {found.what}: {', '.join(told)}, {found.fault or 'exactly once'}"

    def fault(self, found: Stall) -> str:
        return f"{found.what}, round {found.round}: {found.fault}" if found.fault else ""

    def tables(self, found: Sequence[Stall]) -> list[Table]:
        return [stall_table(found)]

    def aims(self, found: Sequence[Stall]) -> list[Aim]:
        """By the worst of all partitions that moved, in all rounds."""
        aims = []
        for what, most in MOST_MS.items():
            times = at_moves([stall for stall in right(found) if stall.what == what])
            if times:
                told = f"{statistics.median(times):,.0f} ms, worst {times[-1]:,.0f} ms"
                aims.append(Aim(f"silence, {what}", f"at most {most:,} ms", told, times[-1] <= most))
        return aims


def milliseconds(stalls: Sequence[Stall], *, moved: bool) -> list[float]:
    """The longest silence of each partition that moved (or that stayed), in order of size."""
    found = [silence for stall in stalls for silence in stall.silences]
    return sorted(silence.milliseconds for silence in found if bool(silence.moves) is moved)


def at_moves(stalls: Sequence[Stall]) -> list[float]:
    """The longest silence at a change of the writer, of each partition that moved, in order of size."""
    return sorted(silence.at_move for stall in stalls for silence in stall.silences if silence.moves)


def stall_table(stalls: Sequence[Stall]) -> Table:
    """Show, over all rounds, the silences at the moves themselves, then the longest ones in the whole time that was
    watched, of partitions that moved and of those that stayed."""
    columns = ("moved", "at the move", "worst", "any time", "worst", "kept", "worst", "generations", "load", "rounds")
    shown = table("Longest silence of an output partition for a reader, ms", ["what happened"], columns)
    for what in dict.fromkeys(stall.what for stall in stalls):
        mine = [stall for stall in right(stalls) if stall.what == what]
        if not mine:
            shown.add_row(what, *["-"] * len(columns))
            continue
        shown.add_row(
            what,
            _range([len(at_moves([stall])) for stall in mine]),
            *_median_and_worst(at_moves(mine)),
            *_median_and_worst(milliseconds(mine, moved=True)),
            *_median_and_worst(milliseconds(mine, moved=False)),
            _range([stall.generations for stall in mine]),
            f"{statistics.median(stall.load_average for stall in mine):.0f}",
            str(len(mine)),
        )
    return shown


def _median_and_worst(times: Sequence[float]) -> tuple[str, str]:
    return (f"{statistics.median(times):,.0f}", f"{max(times):,.0f}") if times else ("-", "-")


def _range(numbers: Sequence[int]) -> str:
    return "-".join(map(str, sorted({min(numbers), max(numbers)})))


MEASURES = (Stalls(),)
