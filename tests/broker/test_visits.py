"""Visits on a real broker, in processes that are killed, and while partitions move to another member by plan: each key
is visited once per run."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streams.sak.murmur2 import partition_of
from streams.testing.fixtures import BrokerAddress
from tests.broker import visit_program as program
from tests.broker.battery_kit import Worker, let_pass, wait_until
from tests.broker.bench_kit import Bench
from tests.broker.kes_kit import Kes

pytestmark = [pytest.mark.broker, pytest.mark.nightly, pytest.mark.timeout(600)]

SOURCE = "tests.broker.visit_program:named"


class VisitWorker(Worker):
    program = Path(__file__).with_name("visit_program.py")


class VisitBench(Bench):
    """With the command."""

    worker = VisitWorker

    def __init__(self, bootstrap: str, group: str, folder: Path) -> None:
        super().__init__(bootstrap, group, folder)
        self.keys, self.said = program.topics_of(group)
        self.inputs = [self.keys]
        self.make(self.keys, self.said, partitions=program.PARTITIONS)
        self._kes = Kes(bootstrap, folder)
        self._kes.environment["VISIT_GROUP"] = group

    def put(self, count: int) -> None:
        for number in range(count):
            key = f"k{number}"
            partition = partition_of(key.encode(), program.PARTITIONS)
            self.produce(self.keys, msgspec.json.encode(program.Put(key)), key, partition, b"visited.Put")
        self.flush()

    def said_of(self) -> list[tuple[int, str, str, str]]:
        """Partition, key, run and member of each visit."""
        found = self.read(self.said, stable=True)
        lines = [(record, (record.value or b"").decode().split()) for records in found.values() for record in records]
        return [(record.partition, (record.key or b"").decode(), run, member) for record, (run, _, member) in lines]

    def visited(self) -> dict[str, Counter[str]]:
        """Run -> how often each key was visited in it."""
        runs: dict[str, Counter[str]] = defaultdict(Counter)
        for _, key, run, _ in self.said_of():
            runs[run][key] += 1
        return runs

    def moved_in(self, run: str) -> dict[int, set[str]]:
        """Partitions whose keys were visited by more than one member in this run."""
        members: dict[int, set[str]] = defaultdict(set)
        for partition, _, found, member in self.said_of():
            if found == run:
                members[partition].add(member)
        return {partition: names for partition, names in members.items() if len(names) > 1}

    def kes(self, *arguments: str) -> Any:
        code, out, err = self._kes("visit", SOURCE, "look", *arguments, "--json")
        assert code == 0, err
        return json.loads(out)

    def is_over(self, run: str, how: str) -> bool:
        return any(one["run"] == run and one[how] == program.PARTITIONS for one in self.kes("--status"))


@pytest.fixture
def bench(kafka_broker: BrokerAddress, topic_prefix: str, tmp_path: Path) -> Iterator[VisitBench]:
    with VisitBench(kafka_broker.bootstrap_servers, f"{topic_prefix}visits", tmp_path) as made:
        yield made


def test_visits_and_kills_and_a_planned_move(bench: VisitBench, seed: int) -> None:
    rng, count = random.Random(seed), 1_200
    bench.put(count)

    def all_joined() -> bool:
        return all(member.times("generation") for member in members.values())

    def some(run: str, least: int) -> None:
        wait_until(lambda: sum(bench.visited()[run].values()) >= least, f"{least} keys are visited in {run}")

    members = {name: bench.start(name) for name in ("one", "two")}
    wait_until(all_joined, "all have joined")
    wait_until(lambda: bench.handled() >= count, "all keys are there")
    for number in range(3):
        run = f"kill-{number}"
        assert bench.kes("--run", run) == {"visit": "look", "run": run}
        some(run, rng.randrange(1, count // 2))
        let_pass(rng.uniform(0.0, 0.1))
        name = rng.choice(sorted(members))
        members[name].kill()
        bench.kes("--run", run)  # a second time, while its partitions are between two members
        members[name] = bench.start(name)
        some(run, count)
        wait_until(all_joined, "all have joined")
    bench.kes("--run", program.MOVE)
    some(program.MOVE, 1)
    members["three"] = bench.start("three")
    some(program.MOVE, count)
    wait_until(lambda: bench.is_over(program.MOVE, "ended"), "its members say so")
    bench.kes("--run", program.CANCELLED)
    some(program.CANCELLED, 1)
    bench.kes("--run", program.CANCELLED, "--cancel")
    wait_until(lambda: bench.is_over(program.CANCELLED, "cancelled"), "its members say so")
    bench.kes("--run", program.CANCELLED)
    bench.kes("--run", "last")
    some("last", count)
    assert all(member.stop() == 0 for member in members.values()), members["one"].last_words()
    found = bench.visited()
    assert any("three" in names for names in bench.moved_in(program.MOVE).values()), (
        "a partition has moved during the run"
    )
    for run in ("kill-0", "kill-1", "kill-2", program.MOVE, "last"):
        assert found[run] == Counter({f"k{number}": 1 for number in range(count)}), run
    assert 0 < len(found[program.CANCELLED]) < count
    assert set(found[program.CANCELLED].values()) == {1}
