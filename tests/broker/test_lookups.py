"""A source with a lookup on a real broker: its owner is killed while the successor's table is behind, and its topic is
deleted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streams import EventSource
from streams.codecs import int_codec
from streams.errors import StreamsError, TopicError
from streams.runtime.changelog import OFFSET_KEY, LookupPosition, decode_offset
from streams.runtime.reading.log_reader import LogReader
from streams.testing.fixtures import BrokerAddress
from tests.broker import lookup_program as program
from tests.broker.battery_kit import Worker, wait_until
from tests.broker.bench_kit import Bench

pytestmark = [pytest.mark.broker, pytest.mark.nightly, pytest.mark.timeout(300)]


class LookupWorker(Worker):
    program = Path(__file__).with_name("lookup_program.py")


class LookupBench(Bench):
    worker = LookupWorker

    def __init__(self, bootstrap: str, group: str, folder: Path) -> None:
        super().__init__(bootstrap, group, folder)
        self.payments, self.rates, self.said_topic = program.topics_of(group)
        self.make(self.payments, self.said_topic, partitions=1)
        self.make(self.rates, partitions=2, cleanup_policy="compact")

    def rate(self, value: int) -> None:
        self.produce(self.rates, int_codec.encode(value), "EUR", 1)
        self.flush()

    def pay(self) -> None:
        value = msgspec.json.encode(program.Paid("EUR"))
        self.produce(self.payments, value, "EUR", 0, b"looked.Paid")
        self.flush()

    def said(self) -> list[str]:
        return [(record.value or b"").decode() for record in self.read(self.said_topic, stable=True)[0]]


@pytest.fixture
def bench(kafka_broker: BrokerAddress, topic_prefix: str, tmp_path: Path) -> Iterator[LookupBench]:
    with LookupBench(kafka_broker.bootstrap_servers, f"{topic_prefix}look", tmp_path) as made:
        yield made


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


def test_the_owner_is_killed_while_its_successors_lookup_is_behind(bench: LookupBench) -> None:
    bench.rate(1)
    bench.pay()
    owner = bench.start("one")
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
    assert "two: 1" not in bench.said()
    changelog = bench.read(f"{bench.group}.{bench.payments}.changelog", stable=True)[0]
    last = [record for record in changelog if record.key == OFFSET_KEY][-1]
    identity = bench.admin.identity(bench.rates, 10.0)
    assert identity is not None
    record = decode_offset(last)
    assert record.position_of_lookup(bench.rates) == LookupPosition(identity[0], (0, 2), record.writer)


def test_the_topic_is_deleted_while_the_source_runs(bench: LookupBench) -> None:
    bench.rate(1)
    with running(program.build(bench.bootstrap, bench.group, "one")) as ended:
        bench.pay()
        wait_until(lambda: bench.said() == ["one: 1"], "the first is handled")
        bench.admin.delete([bench.rates])
        wait_until(lambda: bool(ended), "the source has stopped")
    assert isinstance(ended[0], TopicError), ended
    assert f"the lookup {bench.rates} cannot be read on: topic {bench.rates} does not exist any more" in str(ended[0])
