"""The state of a replay as the beginning of an event source: all of it or nothing, and never beside a living one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from pyspark.sql import SparkSession

import streams.spark as kes_spark
from streams import EventSource
from streams.codecs import RESERVED_KEY_PREFIX
from streams.errors import ConfigError, OffsetError, TopicError
from streams.kafka.questions.group_checks import GroupChecks
from streams.metrics import OffsetMismatch, TakeOverDone
from streams.runtime.changelog import OFFSET_KEY, decode_offset
from tests.broker.engine_kit import Lab, Running
from tests.spark.log_kit import until
from tests.spark.replay_kit import Stage, by_key, state_of
from tests.spark.replay_sources import PARTITIONS, bank

pytestmark = [pytest.mark.spark, pytest.mark.broker, pytest.mark.timeout(400)]
STATE = "partition int, key binary, value binary, type string"
POSITIONS = "partition int, offset long"
ONE = [(0, b"a", b'{"cents":1,"events":1}', None)]


class Bank(Stage):
    def state(self, rows: list[Any], positions: dict[int, int]) -> kes_spark.State:
        stores = self.spark.createDataFrame(rows, STATE)
        return kes_spark.State(stores, self.spark.createDataFrame(list(positions.items()), POSITIONS))

    def bootstrap(self, state: kes_spark.State) -> kes_spark.Bootstrapped:
        return kes_spark.bootstrap(self.bank(), state)

    def changelog_offsets(self) -> dict[int, int]:
        found = self.records(self.changelog)
        return {record.partition: decode_offset(record).offset for record in found if record.key == OFFSET_KEY}

    def changelog_ids(self) -> set[frozenset[str]]:
        found = self.records(self.changelog)
        return {frozenset(decode_offset(record).ids) - {""} for record in found if record.key == OFFSET_KEY}

    def committed(self) -> dict[int, int]:
        return self.lab.admin.committed(self.config.group_id, self.topic)

    def is_untouched(self) -> bool:
        """Whether there is no trace of a bootstrap that readers could see."""
        there = self.lab.admin.describe([self.changelog], 30.0)[self.changelog] is not None
        return not (there and self.records(self.changelog)) and self.committed() == {}


@pytest.fixture
def stage(servers: str, topic_prefix: str, spark: SparkSession) -> Bank:
    return Bank(Lab(servers, topic_prefix, PARTITIONS), topic_prefix, spark)


@pytest.mark.nightly
def test_a_source_goes_on_from_a_replay_of_its_history(stage: Bank) -> None:
    """Byte-equal stores, the offsets of the replay, and from there on everything once."""
    stage.produce(600, seed=1)
    history = stage.read()
    with kes_spark.replay(stage.bank(), history) as replayed:
        begun = stage.bootstrap(replayed)
        assert (begun.written, dict(begun.offsets), begun.keys) == (True, replayed.offsets, replayed.stores.count())
        assert stage.changelog_offsets() == stage.committed() == replayed.offsets
        assert {len(ids) for ids in stage.changelog_ids()} == {2}, "each position names source and changelog"
        stage.must_have_stored(replayed.stores)
        stage.produce(300, seed=2)
        stage.run()
        with kes_spark.replay(stage.bank(), stage.read()) as everything:
            assert everything.records == 900
            stage.must_have_stored(everything.stores)
            assert stage.changelog_offsets() == stage.committed() == everything.offsets
            news = everything.outputs.collect()
    after = [row for row in news if row.cause.offset >= begun.offsets[row.cause.partition]]
    sent = stage.records(*stage.out)
    assert 0 < len(sent) == len(after) < len(news)
    assert by_key(sent) == by_key(after)
    assert not [each for each in stage.measured if isinstance(each, OffsetMismatch)]
    assert len([each for each in stage.measured if isinstance(each, TakeOverDone)]) == PARTITIONS


@pytest.mark.nightly
def test_the_same_state_again_is_harmless_and_another_one_is_refused(stage: Bank) -> None:
    stage.produce(60, seed=1)
    first = stage.bootstrap(stage.state(ONE, {0: 5}))
    again = stage.bootstrap(stage.state(ONE, {0: 5}))
    assert (again.written, again.committed_at_ms) == (False, first.committed_at_ms)
    stage.run()
    assert not stage.bootstrap(stage.state(ONE, {0: 5})).written  # it says that it is done, not that it is there now
    for other in (stage.state(ONE, {0: 6}), stage.state([(0, b"a", b'{"cents":2,"events":1}', None)], {0: 5})):
        with pytest.raises(OffsetError, match="was given another state before"):
            stage.bootstrap(other)


# ------------------------------------------------------------------------------------------------- refusals


def test_refused_while_the_group_is_alive(stage: Bank) -> None:
    async def run() -> None:
        async with Running(stage.bank()):
            with pytest.raises(OffsetError, match=r"group .* is alive .*: stop all members"):
                await asyncio.to_thread(stage.bootstrap, stage.state(ONE, {}))

    asyncio.run(run())
    assert stage.is_untouched()


def test_refused_where_the_group_has_been_at_work(stage: Bank) -> None:
    """Also when the group's offsets have expired, or were deleted."""
    stage.produce(30, seed=1)
    stage.run()
    before = len(stage.records(stage.changelog))
    with pytest.raises(OffsetError, match=r"has a position already \(.*moves\[0\] at offset"):
        stage.bootstrap(stage.state(ONE, {}))
    admin = AdminClient({"bootstrap.servers": stage.lab.settings.bootstrap_servers})
    admin.delete_consumer_groups([stage.config.group_id])[stage.config.group_id].result(30)
    with pytest.raises(OffsetError, match="holds state or a position already"):
        stage.bootstrap(stage.state(ONE, {}))
    assert stage.committed() == {}
    assert len(stage.records(stage.changelog)) == before


def test_refused_where_positions_are_not_in_the_log(stage: Bank) -> None:
    stage.produce(90, seed=1)
    ends = stage.ends
    with pytest.raises(
        OffsetError, match=rf"moves\[1\]: the state goes on at offset {ends[1] + 1}, but the log begins"
    ):
        stage.bootstrap(stage.state(ONE, {1: ends[1] + 1}))
    asyncio.run(stage.lab.delete_records(stage.topic, {1: 4}))
    with pytest.raises(OffsetError, match=r"moves\[1\]: the state goes on at offset 3, but the log begins at 4"):
        stage.bootstrap(stage.state(ONE, {1: 3}))
    with pytest.raises(ConfigError, match=f"a position of partition {PARTITIONS}, but the source has {PARTITIONS}"):
        stage.bootstrap(stage.state(ONE, {PARTITIONS: 0}))
    assert stage.is_untouched()
    begun = stage.bootstrap(stage.state(ONE, {0: ends[0]}))
    assert begun.written
    assert dict(begun.offsets) == stage.changelog_offsets() == {0: ends[0], 1: 4, 2: 0}, "or where its log begins"


@pytest.mark.nightly
def test_refused_for_a_state_that_is_none(stage: Bank) -> None:
    wrong: list[tuple[list[Any], str]] = [
        ([(PARTITIONS, b"a", b"1", None)], f"partition {PARTITIONS} .* no store can have"),
        ([(0, None, b"1", None)], "no store can have"),
        ([(0, b"a", None, None)], "no store can have"),
        ([(0, RESERVED_KEY_PREFIX + b"offset", b"1", None)], "no store can have"),
        ([(0, b"a", b"1", None), (0, b"a", b"2", None)], "key b'a' of partition 0 more than once"),
    ]
    for rows, told in wrong:
        with pytest.raises(ConfigError, match=told):
            stage.bootstrap(stage.state(rows, {}))
    assert stage.is_untouched()


@pytest.mark.nightly
def test_refused_for_a_source_without_a_topic_or_a_store(stage: Bank) -> None:
    missing = msgspec.structs.replace(stage.config, topic="nobody-made-this")
    with pytest.raises(TopicError, match="nobody-made-this"):
        kes_spark.bootstrap(EventSource(missing), stage.state([], {}))
    source: EventSource[None] = EventSource(stage.config)
    with pytest.raises(ConfigError, match="the source's store does not take the state"):
        kes_spark.bootstrap(source, stage.state(ONE, {}))
    assert kes_spark.bootstrap(source, stage.state([], {})).written


# ------------------------------------------------------------------------------------------------- attacks


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Callable[[], None]]]:
    """What to do right before and right after the last look inside of the transaction (two functions)."""
    steps: list[Callable[[], None]] = []
    original = GroupChecks.refuse_if_begun
    looks = 0

    def look(checks: GroupChecks) -> None:
        nonlocal looks
        looks += 1
        if looks > 1:  # of another run
            return original(checks)
        steps[0]()
        original(checks)
        steps[1]()

    monkeypatch.setattr(GroupChecks, "refuse_if_begun", look)
    yield steps
    assert looks >= 1


class Beside:
    def __init__(self, stage: Bank) -> None:
        self.source = stage.bank()
        self._thread = threading.Thread(target=self.source.run, daemon=True)

    def start(self) -> None:
        self._thread.start()
        asyncio.run(asyncio.wait_for(self._joined(), 60))

    async def _joined(self) -> None:
        while not self.source.member_id:
            await asyncio.sleep(0.01)

    def states(self) -> set[str]:
        return {partition.state for partition in self.source.statistics().partitions}

    def start_and_wait_in_vain(self) -> None:
        """Start it; it gets its partitions, and in a time that would do it does not begin to work on any."""
        self.start()
        until(self.states, "it is given partitions", 60)
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            assert self.states() == {"restoring"}, "it did not wait for the transaction"
            time.sleep(0.02)

    def stop(self) -> None:
        asyncio.run(asyncio.wait_for(self.source.stop(), 30))
        self._thread.join(30)


@pytest.mark.nightly
def test_who_joins_before_the_last_look_is_seen(stage: Bank, between: list[Callable[[], None]]) -> None:
    stage.produce(60, seed=1)
    member = Beside(stage)
    between.extend([member.start, lambda: pytest.fail("somebody is at work, and was not seen")])
    with pytest.raises(OffsetError, match="is alive"):
        stage.bootstrap(stage.state(ONE, {0: 5}))
    member.stop()
    assert stage.committed().get(0, 0) == stage.changelog_offsets().get(0, 0) != 5  # its own work, nothing of ours


@pytest.mark.nightly
def test_who_joins_after_the_last_look_waits_for_the_outcome(stage: Bank, between: list[Callable[[], None]]) -> None:
    stage.produce(60, seed=1)
    member = Beside(stage)
    between.extend([lambda: None, member.start_and_wait_in_vain])
    with kes_spark.replay(stage.bank(), stage.read().where("offset < 10")) as replayed:
        assert stage.bootstrap(replayed).written
        ends = stage.ends

        async def until_handled() -> None:
            while stage.committed() != ends:
                await asyncio.sleep(0.05)

        asyncio.run(asyncio.wait_for(until_handled(), 60))
        member.stop()
        with kes_spark.replay(stage.bank(), stage.read()) as everything:
            stage.must_have_stored(everything.stores)
            sent = stage.records(*stage.out)
            assert len(sent) == everything.outputs.where("cause.offset >= 10").count()


def test_what_a_dead_member_left_open_cannot_be_committed_any_more(stage: Bank) -> None:
    stage.lab.admin.create(bank(stage.prefix).specs(), 30.0)
    zombie = Producer(
        {
            "bootstrap.servers": stage.lab.bootstrap,
            "transactional.id": f"{stage.config.group_id}.dead.kes~0",
            "log_level": 0,
        }
    )
    zombie.init_transactions(30)
    zombie.begin_transaction()
    zombie.produce(stage.changelog, b'{"offset":1,"writer":"z","serial":1,"generation":1}', OFFSET_KEY, 0)
    group = Consumer({"bootstrap.servers": stage.lab.bootstrap, "group.id": stage.config.group_id})
    zombie.send_offsets_to_transaction([TopicPartition(stage.topic, 0, 1)], group.consumer_group_metadata(), 30)
    group.close()
    assert zombie.flush(30) == 0
    assert stage.bootstrap(stage.state(ONE, {})).written
    with pytest.raises(KafkaException):
        zombie.commit_transaction(30)
    assert stage.changelog_offsets() == stage.committed() == {0: 0, 1: 0, 2: 0}


def test_a_run_that_fails_half_way_leaves_nothing_and_can_be_repeated(
    stage: Bank, between: list[Callable[[], None]]
) -> None:
    def fail() -> None:
        raise RuntimeError("killed here")

    between.extend([lambda: None, fail])
    with pytest.raises(RuntimeError, match="killed here"):
        stage.bootstrap(stage.state(ONE, {}))
    assert stage.is_untouched()
    assert stage.bootstrap(stage.state(ONE, {})).written
    assert state_of(stage.lab, stage.changelog, 0) == {b"a": ONE[0][2]}


@pytest.mark.nightly
def test_a_changelog_is_the_beginning_of_another_source(stage: Bank) -> None:
    """A group of another name goes on where this one stands: what it has stored, without its history."""
    stage.produce(120, seed=3)
    stage.run()
    config = msgspec.structs.replace(stage.config, group_id=f"{stage.prefix}other")
    other: EventSource[Any] = EventSource(config, stage.bank()._declared.store_factory)
    with kes_spark.changelog_state(stage.read(stage.changelog)) as state:
        begun = kes_spark.bootstrap(other, state)
        assert dict(begun.offsets) == stage.changelog_offsets()
    for partition in range(PARTITIONS):
        mine, theirs = (state_of(stage.lab, name, partition) for name in (config.changelog, stage.changelog))
        assert mine == theirs
