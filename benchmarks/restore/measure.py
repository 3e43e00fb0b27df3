"""How fast a member that starts without any state takes everything over."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from rich.table import Table

from benchmarks.bench import Bench
from benchmarks.measures import Aim, Measure, Options
from benchmarks.restore.report import restore_table
from benchmarks.restore.run import SHAPES, SYSTEMS, Log, Restore
from benchmarks.tables import of_system, right, spread

LEAST = 250_000
"""Records a second are to be restored."""


class Restores(Measure[Restore]):
    """Take-overs of all partitions without any local state."""

    name, title, place = "restore", "Restore from the changelog", 60
    result = Restore
    about = """\
A member starts without any state and takes everything over: changes of 150 bytes (key and value) to 200,000 keys,
one writer, not compacted. The time is from the plan to the last partition's start, fence and barrier included. The
reference is a consumer of confluent-kafka that fills dictionaries with the same bytes, with settings that suit it.
What came out is compared with what was written."""

    def arguments(self, options: Options) -> None:
        """How much."""
        options.add("--shapes", type=int, quick=2, default=2, full=4, help=f"the first so many of {SHAPES}")
        options.add("--restore-rounds", type=int, quick=1, default=2, full=3, help="rounds of each shape")

    def run(self, bench: Bench) -> Iterator[Restore]:
        """Shape by shape, both systems in turn."""
        rounds = bench.options.restore_rounds
        for records, partitions in SHAPES[: bench.options.shapes]:
            bench.now(f"writing {records:,} changes")
            log = Log(bench.cluster, records, partitions, bench.seed)
            for turn in range(1, rounds + 1):
                for system in SYSTEMS if turn % 2 else SYSTEMS[::-1]:
                    bench.now(f"restore of {records:,} from {partitions}, {turn}/{rounds}: {system}")
                    yield log.restored(system, turn)
            log.forget()

    def in_short(self, found: Restore) -> str:
        """The rate."""
        rate = f"{found.per_second:,.0f}/s, {found.megabytes_per_second:.0f} MB/s, right"
        return (
            f"restore of {found.records:,} from {found.partitions} {found.round} {found.system}: {found.fault or rate}"
        )

    def tables(self, found: Sequence[Restore]) -> list[Table]:
        """One."""
        return [restore_table(found)]

    def aims(self, found: Sequence[Restore]) -> list[Aim]:
        """Of each shape."""
        aims = []
        for records, partitions in dict.fromkeys((one.records, one.partitions) for one in found):
            shape = (one for one in found if (one.records, one.partitions) == (records, partitions))
            rates = [one.per_second for one in right(of_system(shape, "engine"))]
            is_met = bool(rates) and statistics.median(rates) >= LEAST
            what = f"restore of {records:,} from {partitions} partitions"
            aims.append(Aim(what, f"at least {LEAST:,}/s", f"{spread(rates)}/s", is_met))
        return aims


MEASURES = (Restores(),)
