"""The questions of a take-over at the simulated broker: requests in bytes, and what is answered."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from streams.kafka.wire.schemas.delete_records import DeleteRecordsRequest
from streams.kafka.wire.schemas.describe_log_dirs import DescribeLogDirsRequest
from streams.kafka.wire.schemas.describe_transactions import DescribeTransactionsRequest
from streams.kafka.wire.schemas.find_coordinator import FindCoordinatorRequest
from streams.kafka.wire.schemas.init_producer_id import InitProducerIdRequest
from streams.kafka.wire.schemas.list_offsets import ListOffsetsRequest
from streams.kafka.wire.schemas.list_transactions import ListTransactionsRequest
from streams.kafka.wire.schemas.metadata import MetadataRequest
from streams.testing.simulation.broker import LogEntry
from streams.testing.simulation.faults import Strike
from streams.testing.simulation.virtual_time import elapse

from .wire_asker import GROUP, Asker, run

Scene = Callable[[Asker], Coroutine[Any, Any, None]]
TOPIC = "topic"


async def offsets_by_end_and_by_time(asker: Asker) -> None:
    broker, log = asker.broker, asker.broker.log(TOPIC, 1)
    for number in range(4):
        broker.append(TOPIC, 1, None, b"v", None, 100 + number)
    broker.init("id", 5.0)
    broker.produce("id", 0, TOPIC, 1, LogEntry(None, b"open", None, None, timestamp_ms=200))
    log.entries[1].gone = True
    log.start = 1
    for timestamp, is_stable, expected in [
        (-2, False, (1, -1)),
        (-1, False, (5, -1)),
        (-1, True, (4, -1)),
        (100, False, (2, 102)),  # 0 is deleted, 1 is compacted away
        (103, True, (3, 103)),
        (104, False, (4, 200)),
        (104, True, (-1, -1)),  # behind the last stable offset
        (201, False, (-1, -1)),
    ]:
        for version in (3, 5, 9):
            assert await offset(asker, timestamp, is_stable, version) == (0, *expected), (timestamp, version)
    assert await offset(asker, -7) == (35, -1, -1)
    broker.end("id", 0, False)
    await elapse(1.0)
    assert await offset(asker, -1, True) == (0, 6, -1)


async def leaders_only_answer_for_what_they_lead(asker: Asker) -> None:
    leader = asker.wire.node_of(TOPIC, 1)
    assert (await offset(asker, -1, node=1 - leader))[0] == 6
    assert (await offset(asker, -1, partition=4))[0] == 3
    asker.broker.blocked["gone"] = 29
    assert (await offset(asker, -1, topic="gone"))[0] == 3
    assert (await offset(asker, -1, node=leader, strike=Strike.NOT_YET))[0] == 19
    assert (await offset(asker, -1, node=leader, strike=Strike.MOVED))[0] == 6
    assert asker.wire.node_of(TOPIC, 1) == 1 - leader


async def records_are_deleted_up_to_an_offset(asker: Asker) -> None:
    for _ in range(5):
        asker.broker.append(TOPIC, 1, None, b"v", None)
    kind = DeleteRecordsRequest
    of = kind.DeleteRecordsTopic
    for before, expected in [(3, (0, 3)), (2, (0, 3)), (6, (1, -1)), (-2, (1, -1)), (-1, (0, 5))]:
        topics = [of(name=TOPIC, partitions=[of.DeleteRecordsPartition(partition_index=1, offset=before)])]
        answer = await ask_leader(asker, kind(topics=topics, timeout_ms=1000), 2)
        found = answer.topics[0].partitions[0]
        assert (found.error_code, found.low_watermark) == expected, before
    assert asker.broker.range(TOPIC, 1) == (5, 5)


async def sizes_come_from_the_leaders(asker: Asker) -> None:
    asker.broker.append(TOPIC, 1, None, b"v", None)
    kind = DescribeLogDirsRequest
    topics = [kind.DescribableLogDirTopic(topic=TOPIC, partitions=[0, 1, 2, 3])]
    sizes: dict[int, int] = {}
    for node in range(2):
        answer = await asker.ask(kind(topics=topics), 4, node=node)
        found = answer.results[0].topics[0].partitions
        assert not sizes.keys() & {each.partition_index for each in found}
        sizes |= {each.partition_index: each.partition_size for each in found}
    assert sizes == {0: 0, 1: 100, 2: 0, 3: 0}


async def transactions_are_listed_by_their_coordinators(asker: Asker) -> None:
    broker = asker.broker
    for name in ("open", "ending", "ended", "idle"):
        broker.init(name, 5.0)
        if name != "idle":
            broker.produce(name, 0, TOPIC, 1, LogEntry(None, name.encode(), None, None))
    broker.end("ended", 0, True)
    await elapse(1.0)
    broker.end("ending", 0, False)
    states = {"open": "Ongoing", "ending": "PrepareAbort", "ended": "CompleteCommit", "idle": "Empty"}
    assert await listed(asker) == states
    assert await listed(asker, ["Ongoing", "PrepareAbort", "PrepareEpochFence"]) == {
        "open": "Ongoing",
        "ending": "PrepareAbort",
    }
    kind = DescribeTransactionsRequest
    for name, state in states.items():
        request = kind(transactional_ids=[name])
        node = asker.wire.node_of(name)
        found = (await asker.ask(request, 0, node=node)).transaction_states[0]
        assert (found.error_code, found.transaction_state, found.transaction_timeout_ms) == (0, state, 5000)
        assert [(each.topic, list(each.partitions)) for each in found.topics] == (
            [(TOPIC, [1])] if name in ("open", "ending") else []
        )
        assert await listed(asker, producers=[found.producer_id]) == {name: state}
        elsewhere = (await asker.ask(kind(transactional_ids=[name]), 0, node=1 - node)).transaction_states[0]
        assert elsewhere.error_code == 16
    request = kind(transactional_ids=["nobody"])
    assert (await asker.ask(request, 0, node=asker.wire.node_of("nobody"))).transaction_states[0].error_code == 105


async def an_open_transaction_is_fenced_by_another_producer(asker: Asker) -> None:
    broker = asker.broker
    broker.init("id", 5.0)
    broker.produce("id", 0, TOPIC, 1, LogEntry(None, b"open", None, None))
    kind = InitProducerIdRequest
    codes = []
    while 0 not in codes:
        request = kind(transactional_id="id", transaction_timeout_ms=5000, producer_id=-1, producer_epoch=-1)
        codes.append((await asker.ask(request, 4, node=asker.wire.node_of("id"))).error_code)
        await elapse(0.005)
    assert set(codes) == {51, 0}
    assert broker.log(TOPIC, 1).stable == 2
    assert await listed(asker, ["Ongoing"]) == {}


async def metadata_has_the_ids_of_topics(asker: Asker) -> None:
    asker.broker.topics["other"] = 2
    asker.broker.append(TOPIC, 1, None, b"v", None)
    kind = MetadataRequest
    of = kind.MetadataRequestTopic

    async def ids(names: list[str] | None) -> dict[str, tuple[uuid.UUID, int]]:
        topics = None if names is None else [of(name=name) for name in names]
        request = kind(
            topics=topics, allow_auto_topic_creation=False, include_cluster_authorized_operations=False,
            include_topic_authorized_operations=False,
        )  # fmt: skip
        answer = await asker.ask(request, 10)
        assert [each.node_id for each in answer.brokers] == [0, 1]
        return {topic.name: (topic.topic_id, len(topic.partitions)) for topic in answer.topics}

    before = await ids(None)
    assert {name: count for name, (_, count) in before.items()} == {"other": 2, TOPIC: 4}
    assert await ids([]) == {}
    asker.broker.recreate("other")
    after = await ids(["other", TOPIC])
    assert after[TOPIC] == before[TOPIC]
    assert after["other"] != before["other"]


async def coordinators_are_found_and_move(asker: Asker) -> None:
    kind = FindCoordinatorRequest
    for version in (3, 4):
        before = asker.wire.node_of(GROUP)
        asker.wire.move(GROUP)
        request = kind(key=GROUP, key_type=0, coordinator_keys=[GROUP])
        answer = await asker.ask(request, version, node=0)
        found = answer.coordinators[0] if version >= 4 else answer
        assert (found.error_code, found.node_id, found.port) == (0, 1 - before, 9000 + 1 - before)


SCENES: tuple[Scene, ...] = (
    offsets_by_end_and_by_time,
    leaders_only_answer_for_what_they_lead,
    records_are_deleted_up_to_an_offset,
    sizes_come_from_the_leaders,
    transactions_are_listed_by_their_coordinators,
    an_open_transaction_is_fenced_by_another_producer,
    metadata_has_the_ids_of_topics,
    coordinators_are_found_and_move,
)


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_answers_to_a_take_over(scene: Scene) -> None:
    run(lambda loop: scene(Asker(loop, nodes=2)))


async def ask_leader(asker: Asker, request: Any, version: int) -> Any:
    return await asker.ask(request, version, node=asker.wire.node_of(TOPIC, 1))


async def offset(
    asker: Asker, timestamp: int, is_stable: bool = False, version: int = 5, *, topic: str = TOPIC, partition: int = 1,
    node: int | None = None, strike: Strike | None = None,
) -> tuple[int, int, int]:  # fmt: skip
    kind = ListOffsetsRequest
    of = kind.ListOffsetsTopic
    entry = of.ListOffsetsPartition(partition_index=partition, current_leader_epoch=-1, timestamp=timestamp)
    topics = [of(name=topic, partitions=[entry])]
    request = kind(replica_id=-1, isolation_level=int(is_stable), topics=topics)
    at = asker.wire.node_of(topic, partition) if node is None else node
    found = (await asker.ask(request, version, node=at, strike=strike)).topics[0].partitions[0]
    return found.error_code, found.offset, found.timestamp


async def listed(asker: Asker, states: list[str] | None = None, producers: list[int] | None = None) -> dict[str, str]:
    kind = ListTransactionsRequest
    found: dict[str, str] = {}
    for node in range(2):
        request = kind(state_filters=states or [], producer_id_filters=producers or [])
        answer = await asker.ask(request, 0, node=node)
        assert all(asker.wire.node_of(each.transactional_id) == node for each in answer.transaction_states)
        found |= {each.transactional_id: each.transaction_state for each in answer.transaction_states}
    return found
