"""How long a reader waits while members come, go, die and freeze."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.table import Table

from benchmarks.bench import Bench
from benchmarks.measures import Aim, Measure, Options
from benchmarks.stalls.group import Stall
from benchmarks.stalls.report import at_moves, in_short, outage_table, stall_table
from benchmarks.stalls.scenarios import SCENARIOS, SESSION_SECONDS, play
from benchmarks.tables import right

MOST = ["planned", "kill-standby", "supervised-standby", "broker-restart"]
SESSION_MS = 1000 * SESSION_SECONDS
MOST_MS = {
    "join, 1 to 2": 150,
    "join, 2 to 3": 150,
    "leave, 3 to 2 (SIGTERM)": 150,
    "kill -9 of a supervised worker, with standby": 1_000,
    "kill -9, 3 to 2, with standby": SESSION_MS + 500,
}
"""What a silence at a move should be at most."""


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
afterwards. A broker that is restarted or killed is one of its own, on the same data again; two members, and the
generator, wait for it. It is the only one, so nothing can go on without it: what counts is how much longer than its
absence a partition was silent."""

    def arguments(self, options: Options) -> None:
        """Which, how often."""
        scenarios = list(SCENARIOS)
        options.add(
            "--scenarios", nargs="+", choices=scenarios, quick=MOST[:1], default=MOST, full=scenarios, help="which"
        )
        options.add("--stall-rate", type=int, quick=1_000, default=1_000, full=1_000, help="events a second")
        options.add("--stall-rounds", type=int, quick=1, default=1, full=3, help="rounds of the scenarios in turn")
        options.add(
            "--traces", type=Path, quick=None, default=None, full=None, help="folder to keep members' traces in"
        )

    def run(self, bench: Bench) -> Iterator[Stall]:
        """All scenarios in turn, round by round; the first one on the common broker is played once before, when that
        broker is warm."""
        options = bench.options
        warm_up = [name for name in options.scenarios if not SCENARIOS[name].stops_broker][:1]
        for name in warm_up:
            bench.warm_up_live()
            bench.now(f"warming the broker up, not counted: {name}")
            play(bench.cluster, name, 0, options.stall_rate)
        for turn in range(1, options.stall_rounds + 1):
            for name in options.scenarios:
                bench.now(f"stalls {turn}/{options.stall_rounds}: {name}")
                cluster = None if SCENARIOS[name].stops_broker else bench.cluster
                yield from play(cluster, name, turn, options.stall_rate, options.traces)

    def in_short(self, found: Stall) -> str:
        """Silences."""
        return f"{found.round} {in_short(found)}"

    def fault(self, found: Stall) -> str:
        """By what happened."""
        return f"{found.what}, round {found.round}: {found.fault}" if found.fault else ""

    def tables(self, found: Sequence[Stall]) -> list[Table]:
        """One."""
        moves, outages = ([one for one in found if bool(one.away_ms) is away] for away in (False, True))
        return [stall_table(moves)] * bool(moves) + [outage_table(outages)] * bool(outages)

    def aims(self, found: Sequence[Stall]) -> list[Aim]:
        """By the worst of all partitions that moved, in all rounds."""
        aims = []
        for what, most in MOST_MS.items():
            times = at_moves([stall for stall in right(found) if stall.what == what])
            if times:
                told = f"{statistics.median(times):,.0f} ms, worst {times[-1]:,.0f} ms"
                aims.append(Aim(f"silence, {what}", f"at most {most:,} ms", told, times[-1] <= most))
        return aims


MEASURES = (Stalls(),)
