"""The peers, as systems of every measure that runs the account workload; and what all of them do when one dies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from benchmarks.bench import Bench
from benchmarks.measures import Measure, Options
from benchmarks.peers.gkes import Gkes
from benchmarks.peers.kafka_streams import KafkaStreams
from benchmarks.peers.quix import Quixstreams
from benchmarks.peers.takeover import Takeover, takeover
from benchmarks.plots import Bars, Plot
from benchmarks.systems import System
from benchmarks.tables import loads, names, of_system, right, spread, table, verdict

QUICK_SESSIONS = (
    "engine",
    "kafka-streams:threads=1,session_ms=6000",
    "quixstreams:session_ms=6000,transaction_ms=10000",
    "gkes",
)
"""Each with a session of 6 s, which is the default of the first and of the last."""
AS_THEY_COME = ("kafka-streams:threads=1", "quixstreams")


class Takeovers(Measure[Takeover]):
    """kill -9 of one of two."""

    name, title, place = "takeover", "A member is killed: engines side by side", 55
    presets = frozenset({"full"})
    result = Takeover
    about = """\
Two members share the account workload at a fixed rate; one is killed with kill -9, nothing starts in its place. The
longest time without an output of any partition after the kill, by a `read_committed` reader, and whether every event
was counted exactly once. The same is done to every system, so it says nothing of standbys or of a supervisor, which
only some have (see above). The part of a session timeout that had passed since the last heartbeat is chance: up to
2 to 3 s."""

    def arguments(self, options: Options) -> None:
        """Who, how often."""
        options.add(
            "--takeover-systems",
            nargs="+",
            quick=QUICK_SESSIONS[:1],
            default=QUICK_SESSIONS,
            full=(*QUICK_SESSIONS, *AS_THEY_COME),
            help="systems",
        )
        options.add("--takeover-rate", type=int, quick=1_000, default=1_000, full=1_000, help="events a second")
        options.add("--takeover-rounds", type=int, quick=1, default=1, full=3, help="rounds of the systems in turn")

    def run(self, bench: Bench) -> Iterator[Takeover]:
        """All systems in turn."""
        rate, rounds = bench.options.takeover_rate, bench.options.takeover_rounds
        systems = bench.able([System.parse(text) for text in bench.options.takeover_systems])
        bench.warm_up()

        def one(system: System, turn: int) -> Takeover:
            return takeover(bench.cluster, system, bench.seed + turn, rate, turn)

        def failed(system: System, turn: int, why: str) -> Takeover:
            return Takeover(system.label, turn, rate, why)

        yield from bench.in_turn("takeover", rounds, one, failed, systems)

    def in_short(self, found: Takeover) -> str:
        """Silences."""
        told = f"silent for up to {found.longest:.1f} s ({found.moved} partitions), before {found.before:.2f} s"
        return f"takeover {found.round} {found.system}: {told}, {found.fault or 'exactly once'}"

    def tables(self, found: Sequence[Takeover]) -> list[Table]:
        """One."""
        if not found:
            return []
        title = f"kill -9 of one of two members at {found[0].rate:,} events/s, seconds; {loads(found)}"
        shown = table(title, ["system"], ["longest silence", "partitions silent > 1 s", "before", "exactly once"])
        for system in names(found):
            mine = of_system(found, system)
            shown.add_row(
                system,
                spread([one.longest for one in right(mine)], ".1f"),
                spread([one.moved for one in right(mine)], ".0f"),
                spread([one.before for one in right(mine)], ".2f"),
                verdict(mine),
            )
        return [shown]

    def plots(self, found: Sequence[Takeover]) -> list[Plot]:
        """Silences side by side."""
        longest = {name: sorted(one.longest for one in right(of_system(found, name))) for name in names(found)}
        bars = {name: {"silence": values[len(values) // 2]} for name, values in longest.items() if values}
        ranges = {name: (values[0], values[-1]) for name, values in longest.items() if values}
        return [Bars(name="takeover", title=self.title, x="seconds", bars=bars, ranges=ranges)] if bars else []


MEASURES = (Takeovers(),)
KINDS = (KafkaStreams(), Quixstreams(), Gkes())
