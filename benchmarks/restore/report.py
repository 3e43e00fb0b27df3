"""The table of restores."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.table import Table

from benchmarks.restore.run import SYSTEMS, Restore
from benchmarks.tables import loads, of_rounds, of_system, ratios, right, spread, table, verdict


def restore_table(found: Sequence[Restore]) -> Table:
    """By shape and system; ratios are to the loop, round by round."""
    shown = table(
        f"Take-over of all partitions without any local state: {of_rounds(found)}; {loads(found)}",
        ["changes", "from", "system"],
        ["records/s", "ratio", "MB/s", "seconds", "right"],
    )
    for records, partitions, system in dict.fromkeys((one.records, one.partitions, one.system) for one in found):
        shape = [one for one in found if (one.records, one.partitions) == (records, partitions)]
        all_mine = of_system(shape, system)
        mine = right(all_mine)
        shown.add_row(
            f"{records:,}",
            f"{partitions}",
            system,
            spread(one.per_second for one in mine),
            spread(ratios(shape, system, SYSTEMS[0], lambda one: one.per_second), ".2f"),
            f"{statistics.median(one.megabytes_per_second for one in mine):.0f}" if mine else "-",
            spread((one.seconds for one in mine), ".2f"),
            verdict(all_mine),
        )
    return shown
