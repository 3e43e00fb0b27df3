"""Two inputs, a joined table with an update handler, a loop, visits and a lookup, in processes that die at each named
point, freeze, move, and die at random.

The witness: counts have no gap, records of each input neither gap nor repeat, every event and update has met the rows
as of its place, every hop is there once, no rate is older than one before it in its partition, each key is visited once
in each run; and the changelog says the same.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from streams.codecs import int_codec
from streams.errors import BrokerUnavailable
from streams.model.topics import changelog_name
from streams.records import IncomingRecord
from streams.runtime.changelog import OFFSET_KEY, decode_offset
from streams.runtime.partition.joined_rows import row_key
from streams.sak.murmur2 import partition_of
from streams.testing.faults import MOVE_POINTS, POINTS, FaultPlan
from streams.testing.fixtures import BrokerAddress
from tests.broker import merged_program as program
from tests.broker.battery_kit import Worker, let_pass, wait_until
from tests.broker.bench_kit import Bench
from tests.broker.gate import nightly
from tests.broker.kes_kit import Kes
from tests.unit.joins_kit import folded

pytestmark = [pytest.mark.broker, pytest.mark.timeout(300)]

QUICK = {"MERGED_SESSION": "3"}
RATE_EVERY = 50
"""Records until a rate changes."""
KILLS, PER_KILL = 20, 9_000
REVOCATIONS = ("revoke.before", "revoke.after")
AT_WORK = tuple(point for point in POINTS if point not in REVOCATIONS)


class MergedWorker(Worker):
    program = Path(__file__).with_name("merged_program.py")


class MergedBench(Bench):
    worker = MergedWorker

    def __init__(self, bootstrap: str, group: str, folder: Path) -> None:
        super().__init__(bootstrap, group, folder)
        self.topics = program.topics_of(group)
        self.inputs = [self.topics[name] for name in ("orders", "payments", "customers")]
        self.loop = self.topics["loop"]
        self.sent = 0
        self.runs: list[str] = []
        for name, configs in program.TOPICS.items():
            self.make(self.topics[name], partitions=program.PARTITIONS, **configs)

    def start(self, name: str, **environment: str) -> Worker:
        return super().start(name, **QUICK, **environment)

    def send(self, count: int, rng: random.Random, *, rows: float = 0.3) -> None:
        for _ in range(count):
            key, luck, event = rng.choice(program.CUSTOMERS), rng.random(), None
            value: bytes | None
            if luck < rows:
                topic, value = "customers", None if rng.random() < 0.1 else int_codec.encode(self.sent)
            elif luck < rows + (1 - rows) / 2:
                topic, value = "payments", msgspec.json.encode(program.Paid(key))
            else:
                topic, event = "orders", b"Ordered"
                value = msgspec.json.encode(program.Ordered(key, hops=rng.randrange(4)))
            self.produce(self.topics[topic], value, key, partition_of(key.encode(), program.PARTITIONS), event)
            self.sent += 1
            if self.sent % RATE_EVERY == 0:
                number = rng.randrange(len(program.CURRENCIES))
                self.produce(self.topics["rates"], int_codec.encode(self.sent), program.CURRENCIES[number], number)
        self.flush()

    def visit(self, run: str) -> None:
        """Start a run of the visit. It may be started before."""
        source = program.build(self.bootstrap, self.group, "starter", FaultPlan())
        asyncio.run(source.start_visit("look", run_id=run))
        self.runs += [] if run in self.runs else [run]

    def visits(self) -> dict[int, list[Any]]:
        """Return the rates that each visit has met, with (events before it, run, key, visits before, member), by
        partition."""
        found = self.read(self.topics["visited"], stable=True)
        return {number: [msgspec.json.decode(one.value or b"") for one in records] for number, records in found.items()}

    def is_done(self) -> bool:
        """Whether everything is handled, the loop, too, and what is handled of the loop is deleted."""
        if self.handled() != self.sent:
            return False
        try:
            committed = self.admin.committed(self.group, self.loop, 5.0)
        except BrokerUnavailable:
            return False
        deleted = {number: mark.start for number, mark in self.admin.watermarks(self.loop).items()}
        # Behind the last record there are markers only: the position goes over them with the next record.
        return deleted == {number: committed.get(number, 0) for number in deleted} and not any(
            self.read(self.loop, stable=True).values()
        )

    def judge(self) -> None:
        sent = {topic: self.read(topic, stable=True) for topic in self.inputs}
        visited, loop, table = self.visits(), self.loop, self.topics["customers"]
        said = self.read(self.topics["said"], stable=True)
        changelog = self.read(changelog_name(self.group, self.topics["orders"]), stable=True)
        hops: Counter[tuple[str, int]] = Counter()
        for partition, lines in said.items():
            told = [msgspec.json.decode(record.value or b"") for record in lines]
            decoded = [line for _, line in told]
            self._judge_visits(partition, visited[partition], changelog[partition])
            looks = [(line[0], 0, rates) for rates, line in told]
            looks += [(count, 1, rates) for rates, (count, *_) in visited[partition]]
            not_older(partition, [rates for *_, rates in sorted(looks, key=itemgetter(0, 1))])
            of_loop = [line for line in decoded if line[1] == loop]
            hops.update((chain, left) for *_, chain, left in of_loop)
            offsets = [line[2] for line in of_loop]
            assert offsets == sorted(set(offsets)), f"the loop, {partition}: once, in order"
            records: dict[str, Any] = {topic: found[partition] for topic, found in sent.items()}
            handled = [IncomingRecord(loop, partition, offset, b"", b"", None) for offset in offsets]
            rows = folded(partition, decoded, table, records | {loop: handled})  # its records are deleted: see hops
            last = {record.key or b"": record.value for record in changelog[partition]}
            prefix = row_key(table, b"")
            kept = {key[len(prefix) :].decode(): value for key, value in last.items() if key.startswith(prefix)}
            assert {key: int_codec.decode(value) for key, value in kept.items() if value is not None} == rows
            final = decode_offset([record for record in changelog[partition] if record.key == OFFSET_KEY][-1])
            further = [final.position_in(topic, partition) or (-1, "") for topic in (*self.inputs[1:], loop)]
            committed = [self.admin.committed(self.group, topic, 30.0)[partition] for topic in (*self.inputs, loop)]
            assert [final.offset, *(offset for offset, _ in further)] == committed, "changelog and group"
        assert hops == Counter(self._due(sent)), "every hop, once"

    def _judge_visits(self, partition: int, told: Sequence[Any], changelog: Sequence[IncomingRecord]) -> None:
        visits: Counter[str] = Counter()
        for _, (_, run, key, before, _) in told:
            assert before == visits[key], f"{partition}: {key} in {run} had {visits[key]} visits before, said {before}"
            visits[key] += 1
        last = {(record.key or b"").decode(errors="replace"): record.value for record in changelog}
        kept = {key: int_codec.decode(value or b"") for key, value in last.items() if key.startswith("key-")}
        assert kept == {key: visits[key] for key in kept | visits}, f"{partition}: visits in the changelog"
        for run in self.runs:
            found = Counter(key for _, (_, name, key, *_) in told if name == run)
            once = dict.fromkeys((f"key-{number}" for number in range(program.KEYS)), 1)
            assert found == once, f"{partition}: each key once in {run}"

    def _due(self, sent: dict[str, dict[int, list[IncomingRecord]]]) -> Iterator[tuple[str, int]]:
        orders, _, table = self.inputs
        for topic in (orders, table):
            for records in sent[topic].values():
                for record in records:
                    chain = f"{topic}-{record.partition}-{record.offset}"
                    if topic == table:
                        value = None if record.value is None else int_codec.decode(record.value)
                        count = int(value is not None and value % program.UPDATES_HOP == 0)
                    else:
                        count = msgspec.json.decode(record.value or b"", type=program.Ordered).hops
                    yield from ((chain, left) for left in range(count))


@pytest.fixture
def merged(kafka_broker: BrokerAddress, topic_prefix: str, tmp_path: Path) -> Iterator[MergedBench]:
    with MergedBench(kafka_broker.bootstrap_servers, f"{topic_prefix}merged", tmp_path) as made:
        yield made


def not_older(partition: int, looks: Sequence[Sequence[int]]) -> None:
    """Fail for a rate that is older than one before it: rates only grow."""
    for number, currency in enumerate(program.CURRENCIES):
        met = [rates[number] for rates in looks]
        back = next((at for at, (before, after) in enumerate(pairwise(met)) if after < before), None)
        assert back is None, f"{partition}: after look {back} {currency} went back: {met[back : back + 2]}"


def finished(bench: MergedBench, *members: Worker) -> None:
    wait_until(bench.is_done, "everything is handled", 150)
    wait_until(lambda: all(member.times("generation") for member in members), "all have joined")
    for member in members:
        assert member.stop() == 0, member.last_words()
    bench.judge()


def members_of(bench: MergedBench, *runs: str) -> dict[int, list[str]]:
    """Return the member of each visit of a key in these runs, by partition."""
    found = bench.visits().items()
    return {number: [member for _, (_, run, _, _, member) in told if run in runs] for number, told in found}


def all_visited(bench: MergedBench) -> None:
    due = len(bench.runs) * program.KEYS * program.PARTITIONS
    wait_until(lambda: sum(map(len, members_of(bench, *bench.runs).values())) >= due, "all runs are over", 150)


def until_dead(bench: MergedBench, member: Worker, rng: random.Random) -> None:
    """Send until it has killed itself."""

    def is_dead() -> bool:
        if member.running:
            bench.send(50, rng)
            let_pass(0.1)
        return not member.running

    wait_until(is_dead, "it dies")
    assert member.process.returncode == -signal.SIGKILL, member.last_words()


def strikes(point: str, rng: random.Random) -> int:
    per_event = point.startswith(("handler", "store"))
    return 1 if point == "restore.half" else rng.randrange(100, 300) if per_event else rng.randrange(1, 4)


@pytest.mark.parametrize(
    ("points", "on_disk"),
    [(("flush.after", "commit.after"), False), nightly(AT_WORK, False), nightly(AT_WORK[:-1], True)],
    ids=["two", "all", "all on disk"],
)
def test_killed_at_named_points(
    merged: MergedBench, tmp_path: Path, seed: int, points: tuple[str, ...], on_disk: bool
) -> None:
    """The only member dies at one point after another, the first time within the table's first load; where there are
    many, later within runs of the visit."""
    rng, disk = random.Random(seed), {"MERGED_FOLDER": str(tmp_path / "state")} if on_disk else {}
    merged.send(400, rng, rows=0.9)
    first, *later = rng.sample(points, len(points))
    if first == "restore.half":  # there is nothing to restore yet
        first, *later = *reversed(later), first
    until_dead(merged, merged.start("victim", KES_FAULT=f"{first}:{strikes(first, rng)}", **disk), rng)
    has_visits = len(points) > 2
    if has_visits:
        whole = merged.start("victim", **disk)
        merged.send(20_000, rng, rows=0.5)
        wait_until(lambda: merged.handled() == merged.sent, "all keys are there", 150)
        whole.kill()
    for point in later:
        victim = merged.start("victim", KES_FAULT=f"{point}:{strikes(point, rng)}", **disk)
        if has_visits:
            merged.visit(f"run-{point}")
        until_dead(merged, victim, rng)
    last = merged.start("victim", **disk)
    all_visited(merged)
    finished(merged, last)


@pytest.mark.nightly
@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_around_a_purge(merged: MergedBench, seed: int, when: str) -> None:
    """Of the loop: what was handled is deleted, and nothing else, whoever does it."""
    rng = random.Random(seed)
    merged.send(400, rng)
    until_dead(merged, merged.start("victim", MERGED_DIES=when), rng)
    finished(merged, merged.start("victim"))


@pytest.mark.nightly
@pytest.mark.parametrize("point", MOVE_POINTS)
def test_killed_while_partitions_move(merged: MergedBench, seed: int, point: str) -> None:
    rng = random.Random(seed)
    merged.send(400, rng)
    donor_dies = point.startswith("handed_over")
    first = merged.start("one", **({"KES_FAULT": f"{point}:1"} if donor_dies else {}))
    wait_until(lambda: merged.handled() > 0, "some are handled")
    second = merged.start("two", **({} if donor_dies else {"KES_FAULT": f"{point}:1"}))
    dying, other, name = (first, second, "one") if donor_dies else (second, first, "two")
    until_dead(merged, dying, rng)
    again = merged.start(name)
    merged.send(200, rng)
    finished(merged, other, again)


@pytest.mark.nightly
def test_a_run_of_a_visit_moves_and_another_one_is_cancelled(merged: MergedBench, tmp_path: Path, seed: int) -> None:
    """By the command. The run goes on at the member that takes a partition meanwhile."""
    kes = Kes(merged.bootstrap, tmp_path)
    kes.environment["MERGED_GROUP"] = merged.group

    def visit(*arguments: str) -> Any:
        code, out, err = kes("visit", "tests.broker.merged_program:named", "look", *arguments, "--json")
        assert code == 0, err
        return json.loads(out)

    def is_over(run: str, how: str) -> bool:
        return any(one["run"] == run and one[how] == program.PARTITIONS for one in visit("--status"))

    def begin(run: str) -> None:
        assert visit("--run", run) == {"visit": "look", "run": run}
        wait_until(lambda: any(members_of(merged, run).values()), f"{run} has begun")

    merged.send(20_000, random.Random(seed), rows=0.5)
    first = merged.start("one")
    wait_until(lambda: merged.handled() == merged.sent, "all keys are there", 150)
    begin("slow-moved")
    merged.runs.append("slow-moved")
    second = merged.start("two")
    all_visited(merged)
    wait_until(lambda: is_over("slow-moved", "ended"), "its members say so")
    begin("slow-cancelled")
    visit("--run", "slow-cancelled", "--cancel")
    wait_until(lambda: is_over("slow-cancelled", "cancelled"), "its members say so")
    visit("--run", "slow-cancelled")  # it does not begin again
    merged.visit("last")
    all_visited(merged)
    finished(merged, first, second)
    assert any({"one", "two"} <= set(members) for members in members_of(merged, "slow-moved").values()), "it has moved"
    assert sum(map(len, members_of(merged, "slow-cancelled").values())) < program.KEYS * program.PARTITIONS


@pytest.mark.nightly
@pytest.mark.parametrize("point", ["flush.after", "send_offsets.before", "commit.before", "settle.after"])
def test_frozen_past_its_session(merged: MergedBench, seed: int, point: str) -> None:
    """While the other member handles what the frozen one had begun, and deletes it from the loop."""
    rng = random.Random(seed)
    merged.send(400, rng)
    frozen = merged.start("frozen", KES_FAULT=f"{point}:6:freeze")
    process = psutil.Process(frozen.process.pid)

    def stands() -> bool:
        merged.send(20, rng)
        return process.status() == psutil.STATUS_STOPPED

    wait_until(stands, "the member freezes")
    other = merged.start("other")
    merged.send(200, rng)
    wait_until(merged.is_done, "the other one has handled everything", 150)
    frozen.signal(signal.SIGCONT)
    merged.send(200, rng)
    wait_until(lambda: not frozen.running or frozen.said("joining again"), "the frozen one finds out, or ends")
    finished(merged, other)


@pytest.mark.nightly
def test_a_lookup_whose_topic_is_deleted_stops_the_source_by_name(merged: MergedBench, seed: int) -> None:
    merged.send(200, random.Random(seed))
    member, rates = merged.start("one"), merged.topics["rates"]
    wait_until(lambda: merged.handled() == merged.sent, "all are handled")
    merged.admin.delete([rates])
    wait_until(lambda: not member.running, "the source has stopped")
    said = f"the lookup {rates} cannot be read on: topic {rates} does not exist any more"
    assert said in member.last_words()


@pytest.mark.nightly
def test_a_hundred_thousand_rows_and_no_event(merged: MergedBench, seed: int) -> None:
    rng = random.Random(seed)
    merged.send(100_000, rng, rows=1.0)
    member = merged.start("one", KES_FAULT="settle.after:20")
    wait_until(lambda: not member.running, "it dies within the first load")
    finished(merged, merged.start("one"))


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_killed_at_random_under_load(merged: MergedBench, seed: int) -> None:
    """Twenty kills of one of three members, over 200,000 records and ten runs of the visit. Before every second kill
    the lookups of the two others are held back."""
    rng = random.Random(seed)
    merged.send(20_000, rng, rows=0.5)
    members = {name: merged.start(name) for name in ("one", "two", "three")}
    wait_until(lambda: merged.handled() == merged.sent, "all keys are there", 150)
    for number in range(KILLS):
        before, name = merged.handled(), rng.choice(sorted(members))
        if number % 2:
            wait_until(lambda: all(member.times("generation") for member in members.values()), "all have joined")
            for other in members.keys() - {name}:
                members[other].signal(signal.SIGUSR1)
        merged.send(PER_KILL, rng)
        run = f"run-{number // 2}"
        merged.visit(run)  # every second time it is requested again, perhaps while it goes on
        wait_until(lambda before=before: merged.handled() > before, "some are handled")
        let_pass(rng.uniform(0.0, 0.5))
        members[name].kill()
        members[name] = merged.start(name)
    all_visited(merged)
    finished(merged, *members.values())
