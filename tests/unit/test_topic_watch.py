"""Topics that are not what they were: each offset names its topics, and a running member looks whether they are still
there."""

from __future__ import annotations

import logging
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from streams import Table
from streams.errors import BrokerUnavailable, OffsetError, StreamsError, TopicError, TopicReplaced
from streams.metrics import Measurement, PartitionsAdded
from streams.runtime.changelog import OFFSET_KEY, OffsetRecord, TopicIds, decode_offset
from streams.runtime.ownership.replicas import Replica, Replicas
from streams.runtime.system import Environment
from streams.testing import TestDriver, world
from streams.topics import TopicIdentity

from .driver_kit import OUT, Added, Slow, Total, build, config
from .runtime_kit import CHANGELOG, TOPIC, Bench, count

pytestmark = pytest.mark.usefixtures("quiet")

Driver = TestDriver[Table[str, int]]
SOURCE, LOG = config().topic, config().changelog
A_LOOK = 15.0
"""Simulated seconds in which a member has looked."""


def totals(driver: Driver) -> list[int]:
    return [total.total for total in driver.outputs(OUT, Total)]


def offset_records(driver: Driver) -> list[OffsetRecord]:
    logs = [log for (topic, _), log in driver._world.broker.logs.items() if topic == LOG]
    records = [record for log in logs for record in log.committed(0, log.end)]
    return [decode_offset(record) for record in records if record.key == OFFSET_KEY and record.value]


def test_partitions_that_are_added_are_told_of_and_do_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    logging.disable(logging.NOTSET)
    measured: list[Measurement] = []
    with TestDriver(build(partitions=2, metrics_handler=measured.append)) as driver:
        driver.send(Added("ann"), partition=1)
        driver.advance(A_LOOK)
        assert PartitionsAdded(SOURCE, 2, 3) not in measured
        driver._world.broker.topics[SOURCE] = 3
        driver.advance(A_LOOK)
        assert PartitionsAdded(SOURCE, 2, 3) in measured
        said = f"topic {SOURCE} has 3 partitions, settings say 2: no member reads the records in the partitions 2 to 2"
        assert caplog.text.count(said) == 1
        driver.advance(10 * A_LOOK)
        assert 2 <= caplog.text.count(said) <= measured.count(PartitionsAdded(SOURCE, 2, 3)) // 5
        driver.crash()
        driver.restart()
        driver.send(Added("ann"), partition=1)
        assert totals(driver) == [1, 2]


@pytest.mark.parametrize("topic", [SOURCE, LOG])
def test_a_topic_that_is_created_again_stops_a_running_member_by_name(topic: str) -> None:
    """And a restart is refused, for the partitions that were not touched as well."""
    with TestDriver(build(partitions=2)) as driver:
        for partition in (0, 0, 0, 1):
            driver.send(Added("ann"), partition=partition)
        driver.advance(A_LOOK)
        driver._world.broker.recreate(topic)
        with pytest.raises(TopicReplaced) as stopped:
            driver.advance(A_LOOK)
        for said in (f"{topic}[", f"id {topic}#0", f"id {topic}#1 now", LOG, "begin anew"):
            assert said in str(stopped.value)
        assert driver.members == []
        if topic == SOURCE:
            for _ in range(5):  # beyond the old offset
                driver.send(Added("bob"), partition=0, wait=False)
        before = totals(driver)
        with pytest.raises(OffsetError):
            driver.restart(0)
        assert totals(driver) == before


@pytest.mark.parametrize("found_by", ["a look", "a take-over"])
def test_nothing_is_drained_into_a_changelog_that_was_created_again(
    found_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if found_by == "a take-over":
        monkeypatch.setattr(world, "Environment", partial(Environment, topic_look_seconds=1e6))
    with TestDriver(build(partitions=2), members=2) as driver:
        for partition in (0, 1):
            driver.send(Added("ann"), partition=partition)
        before = totals(driver)
        driver._world.broker.recreate(LOG)
        driver.advance(8.0)
        driver.send(Slow("ann", seconds=10.0), partition=0, wait=False)
        if found_by == "a take-over":
            driver.crash(driver.owner(1))
        with pytest.raises(TopicReplaced):
            driver.advance(20.0)
        assert totals(driver) == before
        assert offset_records(driver) == []


def test_what_the_members_wrote_into_another_changelog_does_not_make_it_theirs() -> None:
    """It was created again and written to before anybody looked: a member that is killed then cannot restart."""
    with TestDriver(build(partitions=1)) as driver:
        driver.send(Added("ann"))
        driver._world.broker.recreate(LOG)
        driver.send(Added("bob"))
        driver.crash()
        with pytest.raises(TopicReplaced, match=f"id {LOG}#0, .* id {LOG}#1 now"):
            driver.restart()


def test_a_member_that_only_keeps_copies_stops_as_well() -> None:
    with TestDriver(build(partitions=1, num_standbys=1), members=2) as driver:
        driver.send(Added("ann"))
        owner = driver.owner(0)
        driver.advance(A_LOOK)
        driver._world.broker.recreate(LOG)
        driver.crash(owner)
        with pytest.raises(TopicReplaced):
            driver.advance(A_LOOK)
        assert driver.members == []


def test_a_changelog_that_lost_records_stops_a_running_member() -> None:
    with TestDriver(build(partitions=1)) as driver:
        for _ in range(3):
            driver.send(Added("ann"))
        driver.advance(A_LOOK)
        log = driver._world.broker.log(LOG, 0)
        end = log.end
        del log.entries[-2:]
        driver.send(Slow("ann", seconds=11.0), wait=False)
        with pytest.raises(
            OffsetError, match=rf"{LOG}\[0\]: the log ended at offset {end} before, and ends at {end - 2}"
        ):
            driver.advance(A_LOOK)
        assert totals(driver) == [1, 2, 3], "nothing is drained"
        with pytest.raises(OffsetError, match=r"has committed offset 3, but the state in .* goes on at offset 2"):
            driver.restart(0)


def test_a_leader_that_stood_still_is_asked_again_before_it_is_believed() -> None:
    with TestDriver(build(partitions=1)) as driver:
        for _ in range(3):
            driver.send(Added("ann"))
        driver.advance(A_LOOK)
        log = driver._world.broker.log(LOG, 0)
        newest = log.entries[-2:]
        del log.entries[-2:]
        driver.advance(6.0)  # the look is at 20 s, the second question three seconds later
        log.entries += newest
        driver.advance(2 * A_LOOK)
        driver.send(Added("ann"))
        assert totals(driver) == [1, 2, 3, 4]


def test_markers_carry_the_ids() -> None:
    with TestDriver(build(partitions=4)) as driver:
        for _ in range(2):
            for partition in range(4):
                driver.send(Added("ann"), partition=partition)
            driver.join()
        assert len({driver.owner(partition) for partition in range(4)}) > 1
        assert {record.ids for record in offset_records(driver)} == {TopicIds(f"{SOURCE}#0", f"{LOG}#0")}
        driver.check()


@pytest.mark.parametrize("members", [1, 2])
def test_a_group_offset_ahead_of_the_changelog_is_refused(members: int) -> None:
    """Otherwise the outputs of the records between would be 1 2 3 4 5 4 5 6."""
    with TestDriver(build(partitions=1), members=members) as driver:
        for _ in range(5):
            driver.send(Added("ann"))
        driver.crash(driver.owner(0))
        driver._world.broker.offsets[0] = 7
        with pytest.raises(
            OffsetError, match=r"committed offset 7, .* at offset 5: .*records 5 to 6 .*kes offsets accept"
        ):
            driver.send(Added("ann")) if members > 1 else driver.restart(0)
        assert totals(driver) == [1, 2, 3, 4, 5]


# -- over lists in memory ----------------------------------------------------------------------------------------------


def ignore(ctx: Any, event: Any) -> None:
    count(ctx, event.name)


def often(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Members look every few milliseconds."""
    consume = type(bench.source)._consume
    environment = Environment(topic_look_seconds=0.01)
    monkeypatch.setattr(type(bench.source), "_consume", lambda self, connect: consume(self, connect, environment))


async def test_a_source_elsewhere_is_looked_at_on_its_own_cluster(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.make(ignore, source_bootstrap_servers="elsewhere:1")
    often(bench, monkeypatch)
    task = bench.run()
    group, found = bench.connections.membership, ["elsewhere-1"]

    def identity(topic: str, deadline: float) -> TopicIdentity:
        return TopicIdentity(found[0], 1)

    log = SimpleNamespace(log_range=group.log_range, identity=identity, close=lambda: None)
    bench.connections.source_topics = bench.connections.topics  # type: ignore[attr-defined]
    bench.connections.source_log = lambda: log  # type: ignore[attr-defined]
    bench.broker.send("a")
    await bench.committed()
    assert decode_offset(bench.broker.logs[CHANGELOG, 0][-1]).ids == ("elsewhere-1", "id")
    found[0] = "elsewhere-2"
    with pytest.raises(TopicReplaced, match=r"elsewhere-1, .* elsewhere-2 now"):
        await task


async def test_a_source_that_cannot_be_read_because_it_was_created_again_is_told_as_that(bench: Bench) -> None:
    bench.make(ignore)
    task = await bench.start()

    def beyond_the_end(timeout_seconds: float, limit: int) -> None:
        raise OffsetError("in[0]: offset 7 is not in the log")

    bench.broker.topic_ids[TOPIC] = "another"
    bench.connections.consumer.poll_batch = beyond_the_end  # type: ignore[method-assign]
    with pytest.raises(TopicReplaced, match="another now"):
        await task


@pytest.mark.parametrize("topic", [TOPIC, CHANGELOG])
async def test_a_topic_that_is_gone_stops_it_and_no_answer_does_not(
    bench: Bench, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.make(ignore)
    often(bench, monkeypatch)
    task = await bench.start()
    group, answers = bench.connections.membership, [BrokerUnavailable("nobody answers") for _ in range(5)]

    def identity(about: str, deadline: float) -> TopicIdentity:
        if answers:
            raise answers.pop()
        if about == topic:
            raise TopicError("unknown")
        return TopicIdentity("id", 1)

    group.identity = identity  # type: ignore[method-assign]
    with pytest.raises(TopicError, match=f"{topic} does not exist any more"):
        await task
    assert answers == []


async def test_ids_that_a_donor_of_an_older_version_did_not_say_are_found_out(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.make(ignore)
    often(bench, monkeypatch)
    await bench.start()
    engine = bench.engine
    engine.workers[0].ids = TopicIds("id")
    await bench.until(lambda: engine.workers[0].ids == ("id", "id"), "it has looked")
    bench.broker.send("a")
    await bench.committed()
    assert decode_offset(bench.broker.logs[CHANGELOG, 0][-1]).ids == ("id", "id")


async def test_a_topic_that_is_created_again_between_two_questions_is_asked_about_again(bench: Bench) -> None:
    """The end of the old topic must not be where the new one begins (``latest``)."""
    bench.make(ignore)
    bench.run()
    group, asked = bench.connections.membership, []
    log_range = group.log_range

    def ask(topic: str, *question: Any) -> Any:
        found = log_range(topic, *question)
        if topic == TOPIC:
            asked.append(topic)
            bench.broker.topic_ids[TOPIC] = "another"
        return found

    group.log_range = ask  # type: ignore[method-assign]
    await bench.until_active()
    assert len(asked) == 2


async def test_a_copy_that_is_not_complete_any_more_is_read_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tail reads on its own thread: the copy may fail, or begin anew, while the broker is asked once more."""
    take, taken = Replicas.take, []

    def fails_first(self: Replicas, partition: int, when: Any) -> Replica | None:
        taken.append(partition)
        if len(taken) == 1:
            self._failed(partition, self._copies[partition].epoch, StreamsError("it cannot be read on"))
        return take(self, partition, when)

    monkeypatch.setattr(Replicas, "take", fails_first)
    bench.make(ignore)
    await bench.start()
    assert len(taken) == 2
