"""Rules of types, other formats, partitioners, checks of values, pages of an index: each beside its anchor."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import msgspec
from rich.table import Table

from benchmarks.bench import Bench
from benchmarks.formats import ways
from benchmarks.measures import Aim, Measure, at_least, at_most
from benchmarks.systems import Failed
from benchmarks.tables import by_what, loads, names, of_rounds, of_system, right, spread, table, verdict
from streams.sak import leaves

COMPILED, PLAIN = "compiled", "plain Python"
_ROOT = Path(__file__).parents[2]


class FormatsResult(msgspec.Struct, frozen=True):
    """One way, in a process of its own. ``what``: how its hot path ran. ``us``: processor time of an event or a row."""

    system: str
    what: str
    round: int
    us: float = 0.0
    fault: str = ""
    load_average: float = 0.0


class Formats(Measure[FormatsResult]):
    """No broker."""

    name, title, place = "formats", "Other formats and rules", 47
    presets = frozenset({"full"})
    result = FormatsResult
    about = """\
The account workload with values of 200 bytes, driven by the stand-ins of `instructions`: processor time of an event,
clients and broker left out, so a share here is larger than that of a drain. *Rules* give the types of records that have
no header of ours. *Avro* comes in and goes out; by hand it is the loop of `handwritten` with Confluent's serializers.
*No value is suspicious*: codecs that look for nothing that would not come back. *Rows*: what a member does to answer
with all of a table, in pages, by key or by an index. Ages, bytes and counts of types cannot be switched off: the limits
of the speed guard have them."""

    sizes: ClassVar = {"events": (10_000, 50_000, 200_000), "rounds": (1, 5, 9)}

    def run(self, bench: Bench) -> Iterator[FormatsResult]:
        """All ways in turn, compiled and as plain Python, round by round."""
        sizes = bench.sizes(self)
        kinds = [COMPILED, PLAIN] if leaves.summary() == leaves.COMPILED else [PLAIN]
        for turn in range(1, sizes.rounds + 1):
            for kind in kinds:
                for way in ways.WAYS:
                    bench.now(f"{self.name}, {turn}/{sizes.rounds}, {kind}: {way}")
                    yield FormatsResult(way, kind, turn, measured(way, sizes.events, kind), "", os.getloadavg()[0])

    def in_short(self, found: FormatsResult) -> str:
        return f"{self.name} {found.round} {found.system}, {found.what}: {found.fault or f'{found.us:.2f} us'}"

    def tables(self, found: Sequence[FormatsResult]) -> list[Table]:
        title = f"{self.title}: us of an event, or of a row; {of_rounds(found)}; {loads(found)}"
        kinds = by_what(found)
        shown = table(title, ["way"], [*kinds, "right"])
        for way in names(found):
            mine = [right(of_system(some, way)) for some in kinds.values()]
            figures = (spread((one.us for one in each), ".2f") for each in mine)
            shown.add_row(way, *figures, verdict(of_system(found, way)))
        return [shown]

    def aims(self, found: Sequence[FormatsResult]) -> list[Aim]:
        """Of the rates, and of the price of a row; by the rounds."""
        by = {(one.what, one.system, one.round): one.us for one in right(found)}
        aims = []
        for kind in by_what(found):
            turns = sorted({turn for what, _, turn in by if what == kind})

            def shares(way: str, anchor: str, kind: str = kind, turns: Sequence[int] = turns) -> list[float]:
                return [by[kind, anchor, turn] / by[kind, way, turn] for turn in turns]

            for way, anchor, least in (
                (ways.ONLY, ways.HEADER, 0.98),
                (ways.FIELD, ways.HEADER, 0.85),
                (ways.AVRO, ways.HEADER, 0.7),
                (ways.AVRO, ways.AVRO_BY_HAND, 3.0),
                (ways.HEADER, ways.BARE, 0.98),
                (ways.FUNCTION, ways.HEADER, 0.9),
                (ways.CRC32, ways.HEADER, 1.0),
            ):
                aims.append(at_least(f"{way}, to {anchor}, {kind}", least, shares(way, anchor)))
            rows = [1 / share for share in shares(ways.INDEX, ways.RANGE)]
            aims.append(at_most(f"{ways.INDEX}, to {ways.RANGE}, {kind}", 1.5, rows))
        return aims


def measured(way: str, events: int, kind: str) -> float:
    """Measure one way in a process of its own. Raises ``Failed``."""
    environment = {**os.environ, "KES_PLAIN": "1" if kind == PLAIN else "0"}
    command = [sys.executable, "-m", "benchmarks.formats.ways", way, str(events)]
    done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(f"{way}: {done.stderr.strip()[-2000:]}")
    return float(done.stdout)


MEASURES = (Formats(),)
