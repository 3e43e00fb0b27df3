"""Throughput and latency of an outbox, its cost for writers, moves and an idle relay, compared with other relays."""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import ClassVar

import msgspec
import psycopg
from rich.table import Table

from benchmarks.bench import Bench
from benchmarks.cluster import Cluster
from benchmarks.measures import Aim, Measure, at_least, at_most
from benchmarks.outbox.peers import PEERS, Peer
from benchmarks.outbox.place import (
    BARE,
    BY_HAND,
    DRAIN,
    HOT_KEY,
    IDLE,
    OURS,
    QUERIES,
    SESSION_SECONDS,
    SNAPSHOT,
    OutboxResult,
    Place,
)
from benchmarks.outbox.postgres import Postgres
from benchmarks.outbox.work import PARTITIONS
from benchmarks.systems import Failed, Unavailable
from benchmarks.tables import by_what, loads, names, of_rounds, of_system, ratios, right, spread, table, verdict
from streams.errors import StreamsError

MOVES = ("planned stop", "supervised death", "kill -9", "PostgreSQL restarted")
MOST_SECONDS = {"planned stop": 0.3, "supervised death": 1.0, "kill -9": SESSION_SECONDS + 0.5}


class Outboxes(Measure[OutboxResult]):
    """Rows of PostgreSQL on their way to Kafka."""

    name, title, place = "outbox", "An outbox", 49
    presets = frozenset({"full"})
    peers = frozenset(peer.name for peer in PEERS)
    result = OutboxResult
    about = """\
PostgreSQL from a wheel and one broker, on this machine, with ordinary settings. *Drain*: rows of 300 bytes and 10,000
keys wait in one shard when the relay starts; rows per second between the first record and the last one, by the times
at which the broker appended them. By hand means a loop that polls the table, sends with an idempotent producer, waits
for all acknowledgements and deletes: at least once. *goharvest* has its own defaults, and a tenth of the rows.
*Debezium* is one distributed worker of Kafka Connect with exactly-once support and the event router, a transaction per
poll, on a PostgreSQL with `wal_level=logical`; its poll interval is 10 ms (its default, 500 ms, would be its latency),
and it was stopped while the rows were written. Both have tables of their own, as their documentation shows them.
*Right* means: all rows are there, once, those of a key in order; goharvest, which promises less, may double rows.
*Held snapshot*: another session keeps one open. *Latency*: from the begin of a row's transaction until a
`read_committed` consumer of this process has it; the writers are as many connections as the rate takes. *After a
pause*: single rows, each 1.5 s after the one before. *Writers*: `pgbench` with an INSERT into another table,
alone (*no row*), and with a row of one of 10,000 keys for the outbox: by `kes_stash`, by the function that
`Outbox.stash` calls (also without the lock of its key), and by a bare INSERT of the same row, which takes no lock and
wakes no relay. A relay runs meanwhile, on the same cores, and sends the rows; each has an outbox of its own. *Moves*:
two relays of one shard, 100 rows in a second; the longest time in which the consumer got nothing. *Idle*: a relay of
four shards that sleeps."""

    sizes: ClassVar = {
        "rows": (5_000, 100_000, 500_000),
        "rates": ([100], [100, 1_000], [100, 1_000, 5_000]),
        "seconds": (3.0, 10.0, 30.0),
        "samples": (3, 20, 100),
        "clients": ([4], [1, 16], [1, 16, 64]),
        "rounds": (1, 1, 3),
    }

    def run(self, bench: Bench) -> Iterator[OutboxResult]:
        """All rows in turn, round by round; each in a database of its own."""
        sizes, cluster = bench.sizes(self), Cluster(bench.cluster.bootstrap_servers, PARTITIONS, self.name)
        peers = _able(bench)
        bench.now("starting PostgreSQL")
        with Postgres() as postgres, Postgres(reads_log=True) as with_log:
            for turn in range(1, sizes.rounds + 1):
                place = Place(postgres, cluster)
                beside = [(peer, Place(with_log if peer.reads_log else postgres, cluster)) for peer in peers]
                steps = itertools.chain(self._steps(place, sizes), *(self._of_peer(*one, sizes) for one in beside))
                while True:
                    bench.now(f"{self.name} {turn}/{sizes.rounds}")
                    try:
                        found = next(steps)
                    except StopIteration:
                        break
                    except (Failed, StreamsError, psycopg.Error) as error:
                        yield OutboxResult("all that follows", OURS, turn, f"failed: {error}")
                        break
                    yield msgspec.structs.replace(found, round=turn, load_average=os.getloadavg()[0])

    def _steps(self, place: Place, sizes: argparse.Namespace) -> Iterator[OutboxResult]:
        yield from (place.drained(DRAIN, way, sizes.rows) for way in (OURS, BY_HAND))
        yield place.drained(HOT_KEY, OURS, sizes.rows // 2, keys=1)
        yield place.drained(SNAPSHOT, OURS, sizes.rows // 2, is_held=True)
        for rate in sizes.rates:
            yield place.latency(rate, sizes.seconds)
        yield place.after_pauses(sizes.samples)
        for clients in sizes.clients:
            yield from place.writers(clients, sizes.seconds)
        for how in MOVES:
            yield place.moved(how)
        yield from place.idle(sizes.seconds)

    def _of_peer(self, peer: Peer, place: Place, sizes: argparse.Namespace) -> Iterator[OutboxResult]:
        """Drain and latency. Its failure is its own."""
        try:
            yield place.drained_by(peer, int(sizes.rows * peer.share))
            for rate in sizes.rates[:2]:
                yield place.latency(rate, sizes.seconds, peer)
        except (Failed, psycopg.Error) as error:
            yield OutboxResult("all that follows", peer.name, 0, f"failed: {error}")

    def in_short(self, found: OutboxResult) -> str:
        p99 = f", p99 {found.p99:,.1f}" if found.p99 else ""
        figure = f"{found.value:,.2f} {found.unit}{p99}"
        return f"{self.name} {found.round}, {found.what}, {found.system}: {found.fault or figure}"

    def tables(self, found: Sequence[OutboxResult]) -> list[Table]:
        columns = ["figure", "p99", "unit", "processor time, us each", "doubled", "right"]
        shown = table(f"An outbox: {of_rounds(found)}; {loads(found)}", ["what", "of"], columns)
        for what, of_it in by_what(found).items():
            for system in names(of_it):
                mine = of_system(of_it, system)
                kept = right(mine)
                form = ",.0f" if max((one.value for one in kept), default=0) > 100 else ".2f"
                shown.add_row(
                    what,
                    system,
                    spread((one.value for one in kept), form),
                    spread((one.p99 for one in kept if one.p99), ".1f"),
                    next((one.unit for one in kept), ""),
                    spread((one.cpu_us for one in kept if one.cpu_us), ".1f"),
                    f"{sum(one.doubled for one in kept):,}",
                    verdict(mine),
                )
        return [shown]

    def aims(self, found: Sequence[OutboxResult]) -> list[Aim]:
        """Those of the design."""
        ours = by_what(right(of_system(found, OURS)))
        aims: list[Aim] = []
        drains = {one.round: one.value for one in ours.get(DRAIN, ())}
        if drains:
            aims.append(at_least("outbox: drain, of 20,000 rows/s", 1, [rate / 20_000 for rate in drains.values()]))
        for peer, least in (("goharvest", 5), ("debezium", 1)):
            if shares := ratios([one for one in found if one.what == DRAIN], OURS, peer, lambda one: one.value):
                aims.append(at_least(f"outbox: drain, of that of {peer}", least, shares))
        for what, least in ((HOT_KEY, 0.5), (SNAPSHOT, 0.7)):
            shares = [one.value / drains[one.round] for one in ours.get(what, ()) if one.round in drains]
            if shares:
                aims.append(at_least(f"outbox: {what}, of the drain", least, shares))
        if steady := ours.get("latency at 1,000/s"):
            aims.append(at_most("outbox: 1,000 tx/s, p50", 25, [one.value for one in steady], "ms"))
            aims.append(at_most("outbox: 1,000 tx/s, p99", 80, [one.p99 for one in steady], "ms"))
        if first := ours.get("after a pause"):
            aims.append(at_most("outbox: first row after a pause, p99", 60, [one.p99 for one in first], "ms"))
        shares = ratios([one for one in found if one.what == "writers, 16 clients"], OURS, BARE, lambda one: one.value)
        if shares:
            aims.append(at_least("outbox: tx/s with stash, of those with a bare INSERT, 16 clients", 0.8, shares))
        for how, most in MOST_SECONDS.items():
            if moved := ours.get(how):
                aims.append(at_most(f"outbox: silence, {how}", most, [one.value for one in moved], "s"))
        for what, most, unit in ((IDLE, 1, "% of a core"), (QUERIES, 2, "a second and shard")):
            if idle := ours.get(what):
                aims.append(at_most(f"outbox: {what}", most, [one.value for one in idle], unit))
        return aims


def _able(bench: Bench) -> list[Peer]:
    """Return the peers that can be had here; the report has the reasons for the others."""
    found = []
    for peer in PEERS:
        try:
            bench.facts.setdefault("peers", {})[peer.name] = peer.prepare(bench.now)
        except Unavailable as error:
            bench.facts.setdefault("not measured", {})[peer.name] = str(error)
            bench.say(f"[red]not measured:[/] {peer.name}: {error}")
        else:
            found.append(peer)
    return found


MEASURES = (Outboxes(),)
