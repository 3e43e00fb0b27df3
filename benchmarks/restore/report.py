"""The table of restores."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.table import Table

from benchmarks.restore.run import Restore


def restore_table(found: Sequence[Restore]) -> Table:
    """Medians, lowest and highest, by shape and system; the ratio is to the first system, round by round."""
    table = Table(title="Restore: take-over of all partitions without any local state", title_justify="left")
    for name in ("changes", "from", "system"):
        table.add_column(name)
    for name in ("records/s", "lowest", "highest", "ratio", "MB/s", "seconds", "right"):
        table.add_column(name, justify="right")
    reference = found[0].system
    for records, partitions, system in dict.fromkeys((one.records, one.partitions, one.system) for one in found):
        shape = [one for one in found if (one.records, one.partitions) == (records, partitions)]
        mine = [one for one in shape if one.system == system]
        rates = [one.per_second for one in mine]
        theirs = [one.per_second for one in shape if one.system == reference]
        table.add_row(
            f"{records:,}",
            f"{partitions}",
            system,
            f"{statistics.median(rates):,.0f}",
            f"{min(rates):,.0f}",
            f"{max(rates):,.0f}",
            f"{statistics.median(a / b for a, b in zip(rates, theirs, strict=False)):.2f}",
            f"{statistics.median(one.megabytes_per_second for one in mine):.0f}",
            f"{statistics.median(one.seconds for one in mine):.2f}",
            "no" if any(one.fault for one in mine) else "yes",
        )
    return table
