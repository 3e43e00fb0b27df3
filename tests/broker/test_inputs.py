"""A source with two inputs on a real broker, in two processes that are killed: nothing is lost, doubled, or out of
order in its input, and state, outputs and the positions of both inputs belong together."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
from confluent_kafka import Producer

from streams.cli.main import main
from streams.clients.admin import TopicAdmin
from streams.clients.reader import PartitionReader
from streams.clients.settings import ClientSettings
from streams.errors import BrokerUnavailable, EventFailure, TopicError
from streams.records import TYPE_HEADER, IncomingRecord
from streams.runtime.changelog import OFFSET_KEY, decode_offset
from streams.testing.fixtures import BrokerAddress
from streams.topics import TopicSpec
from tests.broker import shop_inputs as shop
from tests.broker.battery_kit import Worker, let_pass, wait_until

pytestmark = [pytest.mark.broker, pytest.mark.timeout(300)]


class ShopWorker(Worker):
    program = Path(__file__).with_name("shop_inputs.py")


class Shop:
    """The topics of one test, and what is in them."""

    def __init__(self, bootstrap: str, group: str) -> None:
        self.bootstrap, self.group = bootstrap, group
        self.settings = ClientSettings(bootstrap, {}, client_id="shop")
        self.admin = TopicAdmin(self.settings)
        self.inputs = [shop.orders_of(group), shop.payments_of(group)]
        self.output, self.changelog = shop.output_of(group), f"{group}.{self.inputs[0]}.changelog"
        self.sent = 0
        self._producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, "log_level": 0})

    def create(self, **partitions: int) -> None:
        names = {name: partitions.get(name.rpartition("-")[2], shop.PARTITIONS) for name in [*self.inputs, self.output]}
        specs = [TopicSpec(name=name, partitions=count, replication_factor=1) for name, count in names.items()]
        self.admin.create(specs, 30.0)

    def send(self, count: int, rng: random.Random) -> None:
        for _ in range(count):
            place, partition = rng.randrange(2), rng.randrange(shop.PARTITIONS)
            headers = None if place else [(TYPE_HEADER, b"Ordered")]
            value = msgspec.json.encode(shop.Paid(self.sent))
            self._producer.produce(self.inputs[place], value, b"k", partition, headers=headers)
            self.sent += 1
        assert self._producer.flush(60) == 0

    def handled(self) -> int:
        """Records of both inputs below the group's offsets, -1 while a transaction hides them."""
        try:
            return sum(sum(self.admin.committed(self.group, topic, 5.0).values()) for topic in self.inputs)
        except BrokerUnavailable:
            return -1

    def read(self, topic: str) -> dict[int, list[IncomingRecord]]:
        marks = self.admin.watermarks(topic)
        ranges = {number: (mark.start, mark.end) for number, mark in marks.items()}
        with closing(PartitionReader(self.settings)) as reader:
            found = reader.read_all(topic, ranges, stalled_after_seconds=60.0)
        return {number: found.get(number, []) for number in ranges}

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


@contextmanager
def workers(bench: Shop, folder: Path, *names: str) -> Iterator[dict[str, ShopWorker]]:
    members = {name: ShopWorker(bench.bootstrap, bench.group, name, folder) for name in names}
    try:
        yield members
    finally:
        for member in members.values():
            member.kill()


@pytest.fixture
def bench(kafka_broker: BrokerAddress, topic_prefix: str) -> Iterator[Shop]:
    made = Shop(kafka_broker.bootstrap_servers, f"{topic_prefix}shop")
    yield made
    made.admin.close()


def killed_under_load(bench: Shop, folder: Path, seed: int, *, kills: int, records: int) -> None:
    rng = random.Random(seed)
    bench.create()
    with workers(bench, folder, "one", "two") as members:
        for _ in range(kills):
            before = bench.handled()
            bench.send(records, rng)
            wait_until(lambda before=before: bench.handled() > before, "some are handled")
            let_pass(rng.uniform(0.0, 0.3))
            name = rng.choice([name for name, member in sorted(members.items()) if member.times("generation")])
            members[name].kill()
            members[name] = ShopWorker(bench.bootstrap, bench.group, name, folder)
        bench.send(records, rng)
        wait_until(lambda: bench.handled() == bench.sent, "all are handled")
        wait_until(lambda: all(member.times("generation") for member in members.values()), "all have joined")
        assert all(member.stop() == 0 for member in members.values()), members["one"].last_words()
    bench.judge()


@pytest.mark.nightly  # in the gate: test_battery_merged
def test_two_inputs_and_a_kill(bench: Shop, tmp_path: Path, seed: int) -> None:
    killed_under_load(bench, tmp_path, seed, kills=1, records=400)


@pytest.mark.nightly
def test_two_inputs_and_many_kills(bench: Shop, tmp_path: Path, seed: int) -> None:
    killed_under_load(bench, tmp_path, seed, kills=12, records=4_000)


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
    payments, producer = bench.inputs[1], Producer({"bootstrap.servers": bench.bootstrap, "log_level": 0})
    for number in range(handled):
        producer.produce(payments, b'{"number":%d}' % number, b"k", 0)
    producer.produce(payments, b"{", b"k", 0)
    producer.produce(payments, b'{"number":9}', b"k", 0)
    assert producer.flush(30) == 0
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
