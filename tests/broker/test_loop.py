"""A source with a loop on a real broker, in processes that are killed: each event of the loop is handled once, in its
order, and what is deleted of it was handled."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from streams.errors import BrokerUnavailable
from streams.testing.fixtures import BrokerAddress
from tests.broker import shop_loop as shop
from tests.broker.battery_kit import Worker, wait_until
from tests.broker.bench_kit import Bench

pytestmark = [pytest.mark.broker, pytest.mark.timeout(300)]


class LoopWorker(Worker):
    program = Path(__file__).with_name("shop_loop.py")


class LoopBench(Bench):
    worker = LoopWorker

    def __init__(self, bootstrap: str, group: str) -> None:
        super().__init__(bootstrap, group)
        self.orders, self.output = shop.orders_of(group), shop.output_of(group)
        self.loop = f"{group}.{self.orders}.loop"
        self.sent: dict[int, int] = {}  # chain -> hops
        self.make(self.orders, self.output, partitions=shop.PARTITIONS)

    def send(self, count: int, rng: random.Random) -> None:
        for _ in range(count):
            chain, hops = len(self.sent), rng.randrange(4)
            self.sent[chain] = hops
            value = msgspec.json.encode(shop.Hop(chain, hops))
            self.produce(self.orders, value, "k", rng.randrange(shop.PARTITIONS), b"Hop")
        self.flush()

    def seen(self) -> dict[int, list[tuple[int, str, int, int, int]]]:
        """Count, topic, offset, chain and hops that are left, by partition."""
        found = self.read(self.output, stable=True)
        lines: dict[int, list[tuple[int, str, int, int, int]]] = {number: [] for number in found}
        for number, records in found.items():
            for record in records:
                count, topic, *rest = (record.value or b"").decode().split()
                offset, chain, left = map(int, rest)
                lines[number].append((int(count), topic, offset, chain, left))
        return lines

    @property
    def due(self) -> int:
        return sum(hops + 1 for hops in self.sent.values())

    def handled(self) -> int:
        return sum(len(lines) for lines in self.seen().values())

    def deleted(self) -> int:
        """Offsets that are deleted from the loop."""
        return sum(mark.start for mark in self.admin.watermarks(self.loop).values())

    def all_deleted(self) -> bool:
        """Whether nothing is left that is handled."""
        try:
            committed = self.admin.committed(self.group, self.loop, 5.0)
        except BrokerUnavailable:
            return False
        return self.deleted() == sum(committed.values())

    def judge(self) -> None:
        hops: dict[int, list[int]] = defaultdict(list)
        for number, lines in self.seen().items():
            assert [count for count, *_ in lines] == list(range(1, len(lines) + 1)), "counts, in their order"
            for topic in (self.orders, self.loop):
                offsets = [offset for _, name, offset, *_ in lines if name == topic]
                assert offsets == sorted(set(offsets)), f"{topic}[{number}]"
            for *_, chain, left in lines:
                hops[chain].append(left)
        for chain, of in self.sent.items():
            assert sorted(hops[chain]) == list(range(of + 1)), f"chain {chain} of {of} hops: {hops[chain]}"
        marks, committed = self.admin.watermarks(self.loop), self.admin.committed(self.group, self.loop, 30.0)
        for number, offset in committed.items():
            assert marks[number].start <= offset, "deleted above the committed position"


@pytest.fixture
def bench(kafka_broker: BrokerAddress, topic_prefix: str) -> Iterator[LoopBench]:
    with LoopBench(kafka_broker.bootstrap_servers, f"{topic_prefix}shop") as made:
        yield made


def test_a_loop_and_a_kill(bench: LoopBench, tmp_path: Path, seed: int) -> None:
    """The process is killed right after a commit; the next one goes on, and deletes what is handled."""
    rng = random.Random(seed)
    bench.send(60, rng)
    worker = bench.start("one", tmp_path, KILL_AT="commit.after", KILL_TIMES="2")
    try:
        wait_until(lambda: not worker.running, "it is killed")
        worker = bench.start("one", tmp_path)
        wait_until(lambda: bench.handled() >= bench.due, "all are handled")
        wait_until(lambda: bench.deleted() > 0 and bench.all_deleted(), "what is handled is deleted")
        assert worker.stop() == 0, worker.last_words()
    finally:
        worker.kill()
    bench.judge()


@pytest.mark.nightly
@pytest.mark.parametrize("point", sorted(shop.POINTS))
def test_a_loop_and_kills_at_named_points(bench: LoopBench, tmp_path: Path, seed: int, point: str) -> None:
    """Two members, one of which dies at this point, again and again."""
    rng = random.Random(seed)
    steady = bench.start("two", tmp_path)
    workers = [steady]
    try:
        for times in (1, 2, 4):
            bench.send(300, rng)
            victim = bench.start("one", tmp_path, KILL_AT=point, KILL_TIMES=str(times))
            workers.append(victim)
            wait_until(lambda victim=victim: victim.times("generation") > 0, "it has joined")
            while victim.running:
                bench.send(20, rng)
                wait_until(lambda victim=victim: not victim.running or bench.handled() >= bench.due, "it goes on")
            assert victim.process.wait(1) == -9, victim.last_words()
        wait_until(lambda: bench.handled() >= bench.due, "all are handled")
        wait_until(bench.all_deleted, "what is handled is deleted")
        assert steady.stop() == 0, steady.last_words()
    finally:
        for worker in workers:
            worker.kill()
    bench.judge()
