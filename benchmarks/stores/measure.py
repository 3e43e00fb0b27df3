"""The price of state on disk, beside memory, rocksdict by hand and copying files."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import msgspec
from rich.table import Table

from benchmarks.bench import Bench
from benchmarks.measures import Aim, Measure, at_least, at_most
from benchmarks.stores.work import ROWS
from benchmarks.tables import by_what, names, of_rounds, of_system, ratios, right, spread, table

HOT, COLD = "get and put, 10,000 keys", "get and put, many keys, a tenth cached"
LOAD, RESTORE = "load of a kept table", "restore from a changelog"
SNAPSHOT, SHARE = "restore from a snapshot", "written by a snapshot after 1 % of changes"


class StoreFigure(msgspec.Struct, frozen=True):
    """One figure of one run."""

    what: str
    system: str
    value: float
    unit: str
    round: int
    fault: str = ""


class StoreRows(Measure[StoreFigure]):
    """Tables, folders and snapshots by themselves."""

    name, title, place = "stores", "Stores: in memory, on engines, kept and restored", 80
    presets = frozenset({"full"})
    result = StoreFigure
    about = """\
One process, no broker: keys of 16 bytes in no order, values of 100 bytes of which a half compresses. *get and put*: an
event reads and writes one key; each 20,000 changed keys are written to the database, by the same thread. The figure is
processor time of the whole process, threads of RocksDB included. *Restore from a changelog*: records that come in no
order, put into an empty table and written. *Load*: a folder's file, checked and put into a table. *Restore from a
snapshot*: blocks in a folder, read, checked and written as a folder, beside copying the same files. Caches of the
system are warm: disks are not measured. A snapshot writes its last block of 4 MiB again, which counts for small
states."""

    sizes: ClassVar = {"keys": (50_000, 200_000, 1_000_000), "events": (20_000, 100_000, 300_000), "rounds": (1, 1, 3)}

    def run(self, bench: Bench) -> Iterator[StoreFigure]:
        """All rows in turn, round by round."""
        sizes = bench.sizes(self)
        for turn in range(1, sizes.rounds + 1):
            for name, row in ROWS.items():
                bench.now(f"stores {turn}/{sizes.rounds}: {name}")
                with tempfile.TemporaryDirectory(prefix="kes-stores-") as folder:
                    for what, system, value, unit in row(Path(folder), bench.seed + turn, sizes.keys, sizes.events):
                        yield StoreFigure(what, system, value, unit, turn)

    def in_short(self, found: StoreFigure) -> str:
        return f"{found.round} {found.what}, {found.system}: {found.value:,.1f} {found.unit}"

    def tables(self, found: Sequence[StoreFigure]) -> list[Table]:
        shown = table(f"Stores, {of_rounds(found)}", ("what", "of"), ("figure", "unit"))
        for what, of_it in by_what(right(found)).items():
            for system in names(of_it):
                values = [one.value for one in of_system(of_it, system)]
                shown.add_row(what, system, spread(values, ",.1f"), of_it[0].unit)
        return [shown]

    def aims(self, found: Sequence[StoreFigure]) -> list[Aim]:
        """Each against its anchor in the same round."""
        rows = by_what(found)
        aims: list[Aim] = []
        for what, least in ((HOT, 0.8), (COLD, 0.45)):
            shares = ratios(rows.get(what, ()), "memory", "RocksDB", lambda one: one.value)
            if shares:
                aims.append(at_least(f"RocksDB beside memory, {what}", least, shares))
        shares = ratios(rows.get(RESTORE, ()), "RocksDB", "rocksdict by hand", lambda one: one.value)
        if shares:
            aims.append(at_least("RocksDB restored from a changelog, beside rocksdict by hand", 0.7, shares))
        loads = [one.value for one in right(rows.get(LOAD, ()))]
        if loads:
            aims.append(at_least("entries loaded in a second", 1_000_000, loads))
        shares = ratios(rows.get(SNAPSHOT, ()), "memory", "copying the files", lambda one: one.value)
        if shares:
            aims.append(at_least("a snapshot restored, beside copying the files", 0.8, shares))
        written = [one.value for one in right(rows.get(SHARE, ()))]
        if written:
            aims.append(at_most(SHARE, 5, written, "%"))
        return aims


MEASURES = (StoreRows(),)
