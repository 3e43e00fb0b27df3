"""A source with two inputs on a real broker, in two processes that are killed: nothing is lost, doubled, or out of
order in its input, and state, outputs and the positions of both inputs belong together."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from streams.cli.main import main
from streams.errors import EventFailure, TopicError
from streams.runtime.changelog import OFFSET_KEY, decode_offset
from streams.testing.fixtures import BrokerAddress
from tests.broker import shop_inputs as shop
from tests.broker.battery_kit import Worker, wait_until
from tests.broker.bench_kit import LoadedBench

pytestmark = [pytest.mark.broker, pytest.mark.timeout(300)]


class ShopWorker(Worker):
    program = Path(__file__).with_name("shop_inputs.py")


class Shop(LoadedBench):
    worker = ShopWorker

    def __init__(self, bootstrap: str, group: str) -> None:
        super().__init__(bootstrap, group)
        self.inputs = [shop.orders_of(group), shop.payments_of(group)]
        self.output, self.changelog = shop.output_of(group), f"{group}.{self.inputs[0]}.changelog"

    def create(self, **partitions: int) -> None:
        for name in (*self.inputs, self.output):
            self.make(name, partitions=partitions.get(name.rpartition("-")[2], shop.PARTITIONS))

    def send(self, count: int, rng: random.Random) -> None:
        for _ in range(count):
            place, partition = rng.randrange(2), rng.randrange(shop.PARTITIONS)
            value, event = msgspec.json.encode(shop.Paid(self.sent)), None if place else b"Ordered"
            self.produce(self.inputs[place], value, "k", partition, event)
            self.sent += 1
        self.flush()

    def judge(self) -> None:
        seen: dict[tuple[str, int], list[int]] = defaultdict(list)
        for partition, records in self.read(self.output).items():
            lines = [(record.value or b"").decode().split() for record in records]
            assert [int(count) for count, _, _ in lines] == list(range(1, len(lines) + 1)), "counts, in their order"
            for _, topic, offset in lines:
                seen[topic, partition].append(int(offset))
        for topic in self.inputs:
            for partition, records in self.read(topic).items():
                assert seen[topic, partition] == [record.offset for record in records], f"{topic}[{partition}]"
        for partition, records in self.read(self.changelog).items():
            last = decode_offset([record for record in records if record.key == OFFSET_KEY][-1])
            known = last.position_in(self.inputs[1], partition)
            assert known is not None
            found = [self.admin.committed(self.group, topic, 30.0)[partition] for topic in self.inputs]
            assert [last.offset, known[0]] == found, "the group's offsets are the changelog's"


@pytest.fixture
def bench(kafka_broker: BrokerAddress, topic_prefix: str) -> Iterator[Shop]:
    with Shop(kafka_broker.bootstrap_servers, f"{topic_prefix}shop") as made:
        yield made


@pytest.mark.nightly  # in the gate: test_battery_merged
def test_two_inputs_and_a_kill(bench: Shop, tmp_path: Path, seed: int) -> None:
    bench.create()
    bench.kill_under_load(tmp_path, random.Random(seed), kills=1, records=400)


@pytest.mark.nightly
def test_two_inputs_and_many_kills(bench: Shop, tmp_path: Path, seed: int) -> None:
    bench.create()
    bench.kill_under_load(tmp_path, random.Random(seed), kills=12, records=4_000)


@pytest.mark.nightly
def test_the_numbers_of_partitions_must_be_the_same(bench: Shop) -> None:
    bench.create(payments=3)
    with pytest.raises(TopicError, match=r"payments has 3 partitions.*same number of partitions"):
        shop.build(bench.bootstrap, bench.group, "one").run()


@pytest.mark.nightly
def test_an_input_that_is_missing_is_not_made(bench: Shop) -> None:
    with pytest.raises(TopicError, match=r"payments does not exist \(an input is never made at the start"):
        shop.build(bench.bootstrap, bench.group, "one").run()


@pytest.mark.nightly
@pytest.mark.parametrize("handled", [0, 3])
def test_a_poison_of_a_further_input_is_passed(
    bench: Shop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], handled: int
) -> None:
    """Also the very first record, before there is any position; the own topic stays where it is."""
    bench.create()
    source = shop.build(bench.bootstrap, bench.group, "one")
    module = ModuleType("shop_of_skip")
    vars(module).update(source=source)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    payments = bench.inputs[1]
    for value in (*(b'{"number":%d}' % number for number in range(handled)), b"{", b'{"number":9}'):
        bench.produce(payments, value, "k", 0)
    bench.flush()
    place = f"{payments}:0@{handled}"
    with pytest.raises(EventFailure, match=f"kes skip MODULE:SOURCE {place}"):
        source.run()
    for wrong, code, said in [
        (f"{payments}:0@{handled + 1}", 1, f"the next record is the one at {handled}"),
        (f"other:0@{handled}", 2, "is no input of"),
    ]:
        assert main(["skip", "shop_of_skip:source", wrong, "--yes"]) == code
        assert said in " ".join(capsys.readouterr().err.split())
    assert main(["skip", "shop_of_skip:source", place, "--dead-letter", "--yes"]) == 0
    assert f"{payments}[0] goes on behind {handled}" in capsys.readouterr().out
    [letter] = bench.read(source.config.dead_letters)[0]
    assert (letter.value, letter.header("__kes_dlq_topic")) == (b"{", payments.encode())
    running = threading.Thread(target=lambda: asyncio.run(source.consume_events()))
    running.start()
    wait_until(lambda: bench.admin.committed(bench.group, payments, 30.0).get(0) == handled + 2, "the rest is handled")
    source.stop_now()
    running.join(30)
    assert [(line.value or b"").split()[2] for line in bench.read(bench.output)[0]] == [
        b"%d" % offset for offset in (*range(handled), handled + 1)
    ]
