"""Topics that are not what they were: each offset names its topics, and a running member looks whether they are still
there."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import msgspec
import pytest

from streams import EventSourceConfig
from streams.errors import BrokerUnavailable, OffsetError, StreamsError, TopicError, TopicReplaced
from streams.kafka.questions.takeover import WireTakeOver
from streams.metrics import Measurement, PartitionsAdded
from streams.model.topics import TopicIdentity
from streams.runtime.changelog import OFFSET_KEY, OffsetRecord, TopicIds, decode_offset
from streams.runtime.engine import Engine
from streams.runtime.ownership.replica import Replica
from streams.runtime.ownership.replicas import Replicas
from streams.runtime.system import Environment
from streams.testing import TestDriver, world
from streams.testing.simulation.broker import printed_id
from streams.testing.simulation.clients import SimConnections, SimSourceLog
from tests.unit.driver_kit import totals
from tests.vocabulary import Totals

from .driver_kit import Added, Slow, build, config

pytestmark = pytest.mark.usefixtures("quiet")

Driver = TestDriver[Totals]
SOURCE, LOG = config().topic, config().changelog
A_LOOK = 15.0
"""Simulated seconds in which a member has looked."""


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
        for said in (f"{topic}[", f"id {printed_id(topic)}", f"id {printed_id(topic, 1)} now", LOG, "start over"):
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
        monkeypatch.setattr(world, "Environment", partial(Environment, topic_check_seconds=1e6))
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
        with pytest.raises(TopicReplaced, match=f"id {printed_id(LOG)}, .* id {printed_id(LOG, 1)} now"):
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


def test_what_may_only_go_further_is_asked_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that stood still asks while another one works in its place: were the source asked first, the offset
    that the other one commits meanwhile would lie beyond its end."""
    asked: list[str] = []
    stable_offsets, log_range = WireTakeOver.stable_offsets, WireTakeOver.log_range
    with TestDriver(build(partitions=1)) as driver:
        driver.send(Added("ann"))
        driver.crash()
        with monkeypatch.context() as patch:
            patch.setattr(WireTakeOver, "stable_offsets", lambda *of: asked.append("group") or stable_offsets(*of))
            patch.setattr(
                WireTakeOver, "log_range", lambda self, topic, *of: asked.append(topic) or log_range(self, topic, *of)
            )
            driver.restart()
    assert asked[:3] == ["group", LOG, SOURCE]


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
        assert {record.ids for record in offset_records(driver)} == {TopicIds(printed_id(SOURCE), printed_id(LOG))}
        driver.check()


# -- answers that change, are missing, or come from elsewhere ----------------------------------------------------------


def engine_of(driver: Driver) -> Engine:
    engine = driver._world.members[0].engine
    assert engine is not None
    return engine


def test_a_source_elsewhere_is_looked_at_on_its_own_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    driven, found = world._driven, ["elsewhere-1"]

    class Elsewhere(SimSourceLog):
        def __init__(self, connections: SimConnections) -> None:
            super().__init__(connections.client(), "g", SOURCE)

        def identity(self, topic: str, deadline: float) -> TopicIdentity:
            return TopicIdentity(found[0], 1)

    def with_source_elsewhere(*config: Any) -> EventSourceConfig:
        return msgspec.structs.replace(driven(*config), source_bootstrap_servers="elsewhere:1")

    monkeypatch.setattr(world, "_driven", with_source_elsewhere)
    monkeypatch.setattr(SimConnections, "source_log", lambda self: Elsewhere(self))
    with TestDriver(build(partitions=1)) as driver:
        driver.send(Added("ann"))
        assert offset_records(driver)[-1].ids == ("elsewhere-1", printed_id(LOG))
        found[0] = "elsewhere-2"
        with pytest.raises(TopicReplaced, match=r"elsewhere-1, .* elsewhere-2 now"):
            driver.advance(A_LOOK)


def test_a_source_that_cannot_be_read_because_it_was_created_again_is_told_as_that() -> None:
    with TestDriver(build(partitions=1)) as driver:
        driver._world.broker.recreate(SOURCE)
        error = OffsetError(f"{SOURCE}[0]: offset 7 is not in the log")
        driver._world.loop.call_soon(engine_of(driver).reading_failed, error)
        with pytest.raises(TopicReplaced, match=f"{printed_id(SOURCE, 1)} now"):
            driver.advance(1)


@pytest.mark.parametrize("topic", [SOURCE, LOG])
def test_a_topic_that_is_gone_stops_it_and_no_answer_does_not(topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [BrokerUnavailable("nobody answers") for _ in range(5)]
    identity = WireTakeOver.identity

    def ask(client: WireTakeOver, about: str, deadline: float) -> TopicIdentity:
        if answers:
            raise answers.pop()
        if about == topic:
            raise TopicError("unknown")
        return identity(client, about, deadline)

    with TestDriver(build(partitions=1)) as driver:
        monkeypatch.setattr(WireTakeOver, "identity", ask)
        with pytest.raises(TopicError, match=f"{topic} does not exist any more"):
            driver.advance(10 * A_LOOK)
    assert answers == []


def test_ids_that_a_donor_of_an_older_version_did_not_say_are_found_out() -> None:
    with TestDriver(build(partitions=1)) as driver:
        worker = engine_of(driver).workers[0]
        worker.ids = TopicIds(printed_id(SOURCE))
        driver.advance(A_LOOK)
        driver.send(Added("ann"))
        assert worker.ids == offset_records(driver)[-1].ids == (printed_id(SOURCE), printed_id(LOG))


def test_a_topic_that_is_created_again_between_two_questions_is_asked_about_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The end of the old topic must not be where the new one begins (``latest``)."""
    log_range, asked = WireTakeOver.log_range, []

    def ask(client: WireTakeOver, topic: str, *question: Any) -> Any:
        found = log_range(client, topic, *question)
        if topic == SOURCE:
            asked.append(topic)
            driver._world.broker.recreated[SOURCE] = 1
        return found

    monkeypatch.setattr(WireTakeOver, "log_range", ask)
    with TestDriver(build(partitions=1), start=False) as driver:
        driver.start()
    assert len(asked) == 2


def test_a_copy_that_is_not_complete_any_more_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tail reads on its own thread: the copy may fail, or start over, while the broker is asked once more."""
    take, taken = Replicas.take, []

    def fails_first(self: Replicas, partition: int, when: Any) -> Replica | None:
        taken.append(partition)
        if len(taken) == 1:
            self._failed(partition, self._copies[partition].epoch, StreamsError("it cannot be read on"))
        return take(self, partition, when)

    monkeypatch.setattr(Replicas, "take", fails_first)
    with TestDriver(build(partitions=1)) as driver:
        assert (len(taken), driver.owner(0)) == (2, 0)
