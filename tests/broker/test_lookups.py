"""A source with a lookup on a real broker: its owner is killed while the successor's table is behind, and its topic is
deleted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from confluent_kafka import Producer

from streams import EventSource
from streams.clients.admin import TopicAdmin
from streams.clients.reader import PartitionReader
from streams.clients.settings import ClientSettings
from streams.codecs import int_codec
from streams.errors import StreamsError, TopicError
from streams.records import TYPE_HEADER, IncomingRecord
from streams.runtime.changelog import OFFSET_KEY, LookupPosition, decode_offset
from streams.runtime.reading.log_reader import LogReader
from streams.testing.fixtures import BrokerAddress
from streams.topics import TopicSpec
from tests.broker import lookup_program as program
from tests.broker.battery_kit import Worker, wait_until

pytestmark = [pytest.mark.broker, pytest.mark.nightly, pytest.mark.timeout(300)]


class LookupWorker(Worker):
    program = Path(__file__).with_name("lookup_program.py")


class LookupBench:
    """The topics of one test, and what is in them."""

    def __init__(self, bootstrap: str, group: str) -> None:
        self.bootstrap, self.group = bootstrap, group
        self.settings = ClientSettings(bootstrap, {}, client_id="lookups")
        self.admin = TopicAdmin(self.settings)
        self.payments, self.rates, self.said_topic = program.topics_of(group)
        self._producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, "log_level": 0})

    def create(self, policy: str = "compact") -> None:
        self.admin.create(
            [
                TopicSpec(name=self.payments, partitions=1, replication_factor=1),
                TopicSpec(name=self.said_topic, partitions=1, replication_factor=1),
                TopicSpec(name=self.rates, partitions=2, replication_factor=1, configs={"cleanup.policy": policy}),
            ],
            30.0,
        )

    def rate(self, value: int) -> None:
        self._producer.produce(self.rates, int_codec.encode(value), "EUR", 1)
        assert self._producer.flush(60) == 0

    def pay(self) -> None:
        value = msgspec.json.encode(program.Paid("EUR"))
        self._producer.produce(self.payments, value, "EUR", 0, headers=[(TYPE_HEADER, b"looked.Paid")])
        assert self._producer.flush(60) == 0

    def read(self, topic: str) -> list[IncomingRecord]:
        marks = self.admin.watermarks(topic)
        with closing(PartitionReader(self.settings)) as reader:
            found = reader.read_all(topic, {0: (marks[0].start, marks[0].stable)}, stalled_after_seconds=60.0)
        return found.get(0, [])

    def said(self) -> list[str]:
        return [(record.value or b"").decode() for record in self.read(self.said_topic)]


@pytest.fixture
def bench(kafka_broker: BrokerAddress, topic_prefix: str) -> Iterator[LookupBench]:
    made = LookupBench(kafka_broker.bootstrap_servers, f"{topic_prefix}look")
    yield made
    made.admin.close()


@contextmanager
def running(source: EventSource[Any]) -> Iterator[list[BaseException]]:
    """A member on a thread of this process. Gives what it ended with."""
    ended: list[BaseException] = []

    def run() -> None:
        try:
            source.run()
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_until(lambda: bool(ended or (source._engine and source.member_id)), "it has joined")
        yield ended
    finally:
        source.stop_now()
        thread.join(60)
        assert not thread.is_alive()


def reader_of(source: EventSource[Any]) -> LogReader:
    assert source._engine is not None
    (reading,) = source._engine.lookups._readings.values()
    return reading.reader


def is_awaited(source: EventSource[Any]) -> bool:
    try:
        return source.statistics_threadsafe().result(10).lookups[0].is_awaited
    except StreamsError:
        return False


def test_the_owner_is_killed_while_its_successors_lookup_is_behind(bench: LookupBench, tmp_path: Path) -> None:
    bench.create()
    bench.rate(1)
    bench.pay()
    owner = LookupWorker(bench.bootstrap, bench.group, "one", tmp_path)
    try:
        wait_until(lambda: bench.said() == ["one: 1"], "the first is handled")
        successor = program.build(bench.bootstrap, bench.group, "two")
        with running(successor) as ended:
            following = reader_of(successor).running()
            following.pause(None)
            bench.rate(2)
            # Until the owner has seen the new rate: the table has no place in the order of the events.
            wait_until(lambda: bool(bench.pay() or "one: 2" in bench.said()), "the owner has the new rate")
            owner.kill()
            handled = len(bench.said())
            bench.pay()
            wait_until(lambda: is_awaited(successor), "the successor waits")
            assert len(bench.said()) == handled
            following.resume(None, None)
            wait_until(lambda: bench.said()[-1] == "two: 2", "the successor goes on")
            assert not ended
    finally:
        owner.kill()
    assert "two: 1" not in bench.said()
    last = [record for record in bench.read(f"{bench.group}.{bench.payments}.changelog") if record.key == OFFSET_KEY][
        -1
    ]
    identity = bench.admin.identity(bench.rates, 10.0)
    assert identity is not None
    record = decode_offset(last)
    assert record.position_of_lookup(bench.rates) == LookupPosition(identity[0], (0, 2), record.writer)


def test_the_topic_is_deleted_while_the_source_runs(bench: LookupBench) -> None:
    bench.create()
    bench.rate(1)
    with running(program.build(bench.bootstrap, bench.group, "one")) as ended:
        bench.pay()
        wait_until(lambda: bench.said() == ["one: 1"], "the first is handled")
        bench.admin.delete([bench.rates])
        wait_until(lambda: bool(ended), "the source has stopped")
    assert isinstance(ended[0], TopicError), ended
    assert f"the lookup {bench.rates} cannot be read on: topic {bench.rates} does not exist any more" in str(ended[0])


def test_a_topic_that_is_missing_or_not_compacted_is_refused_at_the_start(bench: LookupBench) -> None:
    bench.create(policy="delete")
    with pytest.raises(TopicError, match=r"-rates has cleanup.policy=delete.*the topic of a lookup is compacted"):
        program.build(bench.bootstrap, bench.group, "one").run()
    bench.admin.delete([bench.rates])
    with pytest.raises(TopicError, match=r"-rates does not exist \(a lookup is never made at the start: kes topics"):
        program.build(bench.bootstrap, bench.group, "one").run()
