"""A journal: appends, reading, checkpoints and take-over."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import msgspec
from rich.table import Table

from benchmarks.bench import Bench
from benchmarks.journal.work import Figures, JournalJob, journal_of
from benchmarks.measures import Aim, Measure, at_least, at_most
from benchmarks.systems import Child, Failed, running
from benchmarks.tables import by_what, loads, names, of_rounds, of_system, ratios, right, spread, table, verdict
from streams.errors import StreamsError

OURS, BY_HAND, UNFENCED = "Journal", "by hand", "one by one, acks=1"
CALLERS = (1, 8, 64)
SIZES = {"100 B": 100, "10 KiB": 10_240}
PATIENCE_SECONDS = 300.0
TAKE_OVERS = ("planned stop", "supervised death", "kill -9")
SESSION_SECONDS = 6.0
MOST_SECONDS = {"planned stop": 0.3, "supervised death": 1.0, "kill -9": SESSION_SECONDS + 0.5}
CHECKPOINT_CALLERS = 8


class JournalResult(msgspec.Struct, frozen=True):
    """One run: ``per_second``, ``cpu_us`` of the process for each, ``p50`` and ``p99`` in milliseconds. Of a take-over
    ``seconds``, until the successor's first entry is appended."""

    what: str
    system: str
    round: int
    fault: str = ""
    per_second: float = 0.0
    cpu_us: float = 0.0
    p50: float = 0.0
    p99: float = 0.0
    seconds: float = 0.0
    load_average: float = 0.0


class Journals(Measure[JournalResult]):
    """A journal beside two loops over the client."""

    name, title, place = "journal", "A journal", 49
    presets = frozenset({"full"})
    result = JournalResult
    about = """\
One process for each row, one broker with one replica. *Append*: so many callers at once, each one entry after the
other. By hand means `confluent_kafka.Producer` with a transactional id, an entry of each caller in one transaction
after the other, offsets from the delivery reports: no term, no group, nothing settled. *One by one, acks=1* is how the
seed does it, without a fence. *Bulk*: entries of 100 bytes, 500 with each call, up to 20 calls at a time; by hand 5,000
in one transaction after the other. *Catch up*: the log of the bulk append, from its start, connections included; by
hand the values alone. *Follow*: from the return of `append` until a follower in the same process has the entry.
*Checkpoint*: empty ones, while 8 callers append, which wait meanwhile. *Take-over*: from the signal to the leader until
the first append of the one that waited has returned; a supervised death is seen by this process, which removes the
member. What was appended is counted in the log."""

    sizes: ClassVar = {
        "entries": (20_000, 200_000, 1_000_000),
        "samples": (50, 300, 1_000),
        "seconds": (1.0, 3.0, 10.0),
        "rounds": (1, 1, 3),
    }

    def run(self, bench: Bench) -> Iterator[JournalResult]:
        """All rows in turn, round by round; a new topic for each."""
        sizes, servers = bench.sizes(self), bench.cluster.bootstrap_servers
        for turn in range(1, sizes.rounds + 1):
            for number, (what, job) in enumerate(self._rows(sizes)):
                bench.now(f"{self.name} {turn}/{sizes.rounds}: {what}, {job.way}")
                topic = job.topic or f"journal-{turn}-{number}"
                job = msgspec.structs.replace(job, bootstrap_servers=servers, topic=topic.replace("TURN", str(turn)))
                try:
                    found = _run(job)
                    figures = found.per_second, found.cpu_us, found.p50, found.p99
                    yield JournalResult(what, job.way, turn, "", *figures, load_average=os.getloadavg()[0])
                except (Failed, StreamsError) as error:
                    yield JournalResult(what, job.way, turn, f"failed: {error}")
            for what in TAKE_OVERS:
                bench.now(f"{self.name} {turn}/{sizes.rounds}: {what}")
                try:
                    seconds = _taken_over(servers, f"journal-{turn}-{what.replace(' ', '')}", what)
                    yield JournalResult(what, OURS, turn, seconds=seconds, load_average=os.getloadavg()[0])
                except (Failed, StreamsError) as error:
                    yield JournalResult(what, OURS, turn, f"failed: {error}")

    def _rows(self, sizes: argparse.Namespace) -> Iterator[tuple[str, JournalJob]]:
        for text, size in SIZES.items():
            for callers in CALLERS:
                for way in (OURS, BY_HAND, *([UNFENCED] if callers == 1 else [])):
                    job = JournalJob("append", way, "", "", callers, size, seconds=sizes.seconds)
                    yield f"append, {callers} callers, {text}", job
        for what in ("bulk", "catch up"):
            for way in (OURS, BY_HAND):
                yield what, JournalJob(what, way, "", f"journal-bulk-{way.replace(' ', '')}-TURN", count=sizes.entries)
        yield "follow", JournalJob("follow", OURS, "", "", count=sizes.samples)
        for callers in (1, 64):
            job = JournalJob("barrier", OURS, "", "", callers, seconds=sizes.seconds)
            yield f"barrier, {callers} callers", job
        yield "checkpoint", JournalJob("checkpoint", OURS, "", "", CHECKPOINT_CALLERS, count=sizes.samples // 10)

    def in_short(self, found: JournalResult) -> str:
        figures = f"{found.per_second:,.0f}/s, {found.cpu_us:.1f} us, p50 {found.p50:.1f} p99 {found.p99:.1f} ms"
        if found.what in TAKE_OVERS:
            figures = f"{found.seconds:.2f} s"
        return f"{self.name} {found.round}, {found.what}, {found.system}: {found.fault or figures}"

    def tables(self, found: Sequence[JournalResult]) -> list[Table]:
        columns = ["per second", "of by hand", "processor time, us each", "p50, ms", "p99, ms", "right"]
        shown = table(f"A journal: {of_rounds(found)}; {loads(found)}", ["what", "system"], columns)
        moves = table("A leader is replaced", ["how", "system"], ["seconds", "right"])
        for what, of_it in by_what(found).items():
            for system in names(of_it):
                mine = of_system(of_it, system)
                kept = right(mine)
                if what in TAKE_OVERS:
                    moves.add_row(what, system, spread((one.seconds for one in kept), ".2f"), verdict(mine))
                    continue
                shares = ratios(of_it, system, BY_HAND, lambda one: one.per_second)
                shown.add_row(
                    what,
                    system,
                    spread((one.per_second for one in kept), ",.0f"),
                    spread(shares, ".2f"),
                    spread((one.cpu_us for one in kept), ",.1f"),
                    spread((one.p50 for one in kept), ".1f"),
                    spread((one.p99 for one in kept), ".1f"),
                    verdict(mine),
                )
        return [shown, moves]

    def aims(self, found: Sequence[JournalResult]) -> list[Aim]:
        """Those of the design."""
        ours = by_what(right(of_system(found, OURS)))
        aims: list[Aim] = []
        if alone := ours.get("append, 1 callers, 100 B"):
            aims.append(at_most("journal: one appender, p50", 15, [one.p50 for one in alone], "ms"))
            aims.append(at_most("journal: one appender, p99", 50, [one.p99 for one in alone], "ms"))
        if many := ours.get("append, 64 callers, 100 B"):
            aims.append(at_least("journal: 64 appenders, of 3,000/s", 1, [one.per_second / 3_000 for one in many]))
            aims.append(at_most("journal: 64 appenders, p99", 60, [one.p99 for one in many], "ms"))
        of_bulk = ratios([one for one in found if one.what == "bulk"], OURS, BY_HAND, lambda one: one.per_second)
        if of_bulk:
            aims.append(at_least("journal: bulk append, of the loop by hand", 0.8, of_bulk))
        if read := ours.get("catch up"):
            aims.append(at_least("journal: catching up, of 150,000/s", 1, [one.per_second / 150_000 for one in read]))
        for what in TAKE_OVERS:
            if taken := ours.get(what):
                most = MOST_SECONDS[what]
                aims.append(at_most(f"journal: {what}, until the successor", most, [one.seconds for one in taken], "s"))
        return aims


def _run(job: JournalJob) -> Figures:
    """Run one row in a process of its own, and count what is in the log then. Raises ``Failed``, ``StreamsError``."""
    journal = journal_of(job)
    asyncio.run(journal.create())
    with running("benchmarks.journal.work", job) as child:
        figures = msgspec.json.decode(child.result(PATIENCE_SECONDS), type=Figures)
    if figures.done < job.count:
        raise Failed(f"{figures.done:,} of {job.count:,} entries")
    end = asyncio.run(journal.check()).end
    if job.what in ("append", "bulk") and end < figures.done:
        raise Failed(f"the log ends at {end}, and {figures.done:,} entries were acknowledged")
    return figures


def _taken_over(servers: str, topic: str, how: str) -> float:
    """Have a leader replaced by a member that waits; return the seconds it took. Raises ``Failed``."""
    job = JournalJob("lead", OURS, servers, topic, session_seconds=SESSION_SECONDS)
    journal = journal_of(job)
    asyncio.run(journal.create())
    with tempfile.TemporaryDirectory(prefix="kes-journal-") as folder:
        jobs = [msgspec.structs.replace(job, notes=f"{folder}/{name}") for name in ("leader", "successor")]
        with running("benchmarks.journal.work", jobs[0]) as leader:
            member, _ = _noted(leader, jobs[0], "member"), _noted(leader, jobs[0], "leads")
            with running("benchmarks.journal.work", jobs[1]) as successor:
                _noted(successor, jobs[1], "member")
                time.sleep(1.0)  # until the group has no rebalance under way
                began = time.monotonic()
                leader.send(signal.SIGTERM if how == "planned stop" else signal.SIGKILL)
                if how == "supervised death":
                    while leader.is_alive:
                        time.sleep(0.001)
                    asyncio.run(journal.remove_member(member))
                return float(_noted(successor, jobs[1], "leads")) - began


def _noted(child: Child, job: JournalJob, word: str) -> str:
    """Wait for a note of a member, and return what follows the word."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        path = Path(job.notes)
        for line in path.read_text().splitlines() if path.exists() else ():
            if line.startswith(f"{word} "):
                return line.removeprefix(f"{word} ")
        child.check()
        time.sleep(0.002)
    raise Failed(f"no member says {word!r} within a minute")


MEASURES = (Journals(),)
