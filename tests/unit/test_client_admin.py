from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from types import SimpleNamespace
from typing import Any, TypeVar
from uuid import UUID

import anyio
import msgspec
import pytest

from streams import EventSourceConfig
from streams.errors import BrokerUnavailable, TopicError
from streams.kafka.questions.admin import TopicAdmin, TopicDescription, Watermarks, differences
from streams.kafka.questions.trimming import LogTrimmer
from streams.kafka.settings import ClientSettings
from streams.model.topics import TopicSpec
from streams.runtime import source_topics
from streams.runtime.bridge import Worker
from tests.unit.scripted_broker import GARBAGE, GONE, MUTE
from tests.unit.topics_broker import EXISTS, NO_TOPIC, TopicsBroker
from tests.unit.waiting import wait_until

T = TypeVar("T")

SPEC = TopicSpec(name="t", partitions=10, replication_factor=3, configs={"cleanup.policy": "compact"})


def found(**changes: object) -> TopicDescription:
    values: dict[str, object] = {
        "name": "t",
        "topic_id": "id",
        "partitions": 10,
        "replication_factor": 3,
        "configs": {"cleanup.policy": "compact", "retention.ms": "5"},
    }
    return TopicDescription(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("topic", "sentences"),
    [
        (found(), []),
        (None, ["topic t does not exist"]),
        (found(partitions=3), ["topic t has 3 partitions, settings say 10"]),
        (found(replication_factor=1), ["topic t has replication factor 1, settings say 3"]),
        (found(configs={"cleanup.policy": "delete"}), ["topic t has cleanup.policy=delete, settings say compact"]),
        (found(configs={}), ["topic t has cleanup.policy=None, settings say compact"]),
    ],
)
def test_differences(topic: TopicDescription | None, sentences: list[str]) -> None:
    assert differences(SPEC, topic) == sentences


def test_lists_have_no_order_and_minus_one_means_the_brokers_default() -> None:
    spec = TopicSpec(name="t", partitions=10, replication_factor=-1, configs={"cleanup.policy": "delete,compact"})
    assert differences(spec, found(configs={"cleanup.policy": "compact, delete"})) == []


class Cluster:
    """``ports.Topics`` over the partitions of each topic; ``cleanup.policy`` and the rest are as they must be."""

    def __init__(self, **there: int) -> None:
        self.there = {name.replace("_", "."): count for name, count in there.items()}

    def create(self, specs: Sequence[TopicSpec], timeout_seconds: float) -> list[str]:
        created = [spec.name for spec in specs if spec.name not in self.there]
        self.there |= {spec.name: spec.partitions for spec in specs if spec.name in created}
        return created

    def differences(self, specs: Sequence[TopicSpec]) -> list[str]:
        return [sentence for spec in specs for sentence in differences(spec, self._found(spec))]

    def identity(self, name: str, timeout_seconds: float) -> tuple[str, int] | None:
        return ("id", self.there[name]) if name in self.there else None

    def _found(self, spec: TopicSpec) -> TopicDescription | None:
        if spec.name not in self.there:
            return None
        return found(partitions=self.there[spec.name], replication_factor=spec.replication_factor, configs=spec.configs)

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("there", "refused"),
    [
        ({"t": 10, "g_t_changelog": 8}, ""),  # a member that starts again goes on with what it knows
        ({"t": 10}, "topic t has 10 partitions, settings say 8"),  # the first start
        ({"t": 6, "g_t_changelog": 8}, "topic t has 6 partitions, settings say 8"),
        ({"t": 10, "g_t_changelog": 10}, "topic g.t.changelog has 10 partitions, settings say 8"),
        ({}, ""),
    ],
)
async def test_a_source_may_have_grown_after_the_first_start(there: dict[str, int], refused: str) -> None:
    cluster = Cluster(**there)
    before = dict(cluster.there)
    connections: Any = SimpleNamespace(topics=lambda: cluster, worker=Worker)
    config = EventSourceConfig(group_id="g", topic="t", num_partitions=8)
    if not refused:
        await source_topics.create_and_verify(config, connections)
        assert cluster.there.keys() == {"t", "g.t.changelog", "g.t.dead-letters"}
        return
    with pytest.raises(TopicError, match=refused):
        await source_topics.create_and_verify(config, connections)
    assert cluster.there == before, "or the next start would not be the first one"


@pytest.mark.parametrize(
    ("there", "refused"),
    [
        (
            {},
            r"topic o does not exist \(an output is never made at the start: kes topics apply MODULE:SOURCE makes it",
        ),
        ({"o": 2}, r"topic o has 2 partitions, settings say 3 \(correct source.output\(...\), or the topic\)"),
        ({"o": 3}, ""),
    ],
)
async def test_declared_outputs_are_verified_at_the_start_and_made_on_purpose_only(
    there: dict[str, int], refused: str
) -> None:
    cluster = Cluster(**there)
    connections: Any = SimpleNamespace(topics=lambda: cluster, worker=Worker)
    config = EventSourceConfig(group_id="g", topic="t", num_partitions=8)
    outputs = [source_topics.spec(config, "o", 3)]
    if refused:
        with pytest.raises(TopicError, match=refused):
            await source_topics.prepare(config, connections, outputs)
        assert cluster.there == there, "nothing is made before everything is right"
    else:
        await source_topics.prepare(config, connections, outputs)
    if there != {"o": 2}:
        created = await source_topics.create_and_verify(config, connections, outputs, creates_others=True)
        assert ("o" in created) == (not there)
        assert cluster.there["o"] == 3


def test_a_refusal_is_told_in_plain_words_and_long_before_the_time_is_over(caplog: pytest.LogCaptureFixture) -> None:
    admin = TopicAdmin(ClientSettings("127.0.0.1:1"))
    words = "nothing listens at 127.0.0.1:1: is it running? (kes broker start)"
    ended: list[str] = []

    def ask() -> None:
        with pytest.raises(BrokerUnavailable) as caught:
            admin.describe(["t"], timeout_seconds=6.0)
        ended.append(str(caught.value))

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: words in caplog.text, words)
    assert ended == []
    asking.join()
    assert ended == [f"describing topic t: {words}"]
    admin.close()


async def test_a_cluster_that_is_slow_to_make_topics_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It has taken the topics, and elects leaders after a while."""
    monkeypatch.setattr(source_topics, "REQUEST_SECONDS", 0.1)
    monkeypatch.setattr(source_topics, "FIRST_PAUSE", 0.01)
    config = EventSourceConfig(group_id="g", topic="t", num_partitions=1)
    async with TopicsBroker(topics={}) as broker, connected(broker) as admin:
        monkeypatch.setattr(admin, "differences", lambda specs: [])
        monkeypatch.setattr(admin, "close", lambda: None)
        broker.leaderless = 40
        connections: Any = SimpleNamespace(topics=lambda: admin, worker=Worker)
        with anyio.fail_after(30):
            await source_topics.prepare(config, connections)
        assert broker.leaderless == 0
        assert f"at {broker.bootstrap_servers}: waited in vain until it has a leader" in caplog.text


@pytest.mark.parametrize("name", ["", "\udcff"], ids=["empty", "no UTF-8"])
def test_a_name_that_would_crash_the_client_is_refused(name: str) -> None:
    with closing(TopicAdmin(ClientSettings("127.0.0.1:1"))) as admin, pytest.raises(TopicError, match="is no name of"):
        admin.describe(["orders", name])


# ------------------------------------------------------------------------------------------------ by a scripted broker


@asynccontextmanager
async def connected(broker: TopicsBroker) -> AsyncIterator[LogTrimmer]:
    with closing(LogTrimmer(ClientSettings(broker.bootstrap_servers))) as admin:
        yield admin


async def asked(question: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Ask on a thread: the broker is served by this one."""
    return await asyncio.to_thread(question, *arguments, **options)


async def test_topics_are_made_with_their_settings_in_one_request_and_described_as_they_are() -> None:
    specs = [SPEC, msgspec.structs.replace(SPEC, name="u", partitions=2, configs={}, replication_factor=-1), SPEC]
    async with TopicsBroker(brokers=2, topics={}) as broker, connected(broker) as admin:
        broker.topic_id = UUID(int=2**128 - 1)
        broker.leaderless = 1
        assert await asked(admin.create, specs) == ["t", "u"]
        assert await asked(admin.create, specs) == []
        assert broker.asked("CreateTopics") == ["CreateTopics"]
        made = next(request for _, name, request in broker.requests if name == "CreateTopics")
        assert [(topic.num_partitions, topic.replication_factor) for topic in made.topics] == [(10, 3), (2, -1)]
        assert await asked(admin.describe, ["t", "gone"]) == {
            "t": TopicDescription(
                name="t",
                topic_id="/" * 21 + "w",  # as librdkafka has it, which stored positions name
                partitions=10,
                replication_factor=2,
                configs={"cleanup.policy": "compact"},
            ),
            "gone": None,
        }
        assert await asked(admin.identity, "u") == ("/" * 21 + "w", 2)
        assert await asked(admin.differences, [SPEC]) == ["topic t has replication factor 2, settings say 3"]


@pytest.mark.parametrize("lost", [GONE, GARBAGE, EXISTS, 7, 41, 89], ids=str)
async def test_a_topic_is_made_whatever_becomes_of_an_answer(lost: Any) -> None:
    """Connections that break, garbage, another client that is faster, and what passes (REQUEST_TIMED_OUT,
    NOT_CONTROLLER, THROTTLING_QUOTA_EXCEEDED)."""
    async with TopicsBroker(topics={}) as broker, connected(broker) as admin:
        broker.answer("CreateTopics", lost)
        if lost == EXISTS:
            broker.topics["t"] = 10
            broker.answer("Metadata", 0, NO_TOPIC)  # it was made after the look
            assert await asked(admin.create, [SPEC]) == []
        else:
            await asked(admin.create, [SPEC])
        assert broker.topics["t"] == 10


@pytest.mark.parametrize(
    ("api", "code", "call", "said"),
    [
        ("CreateTopics", 38, lambda admin: admin.create([SPEC]), "creating topic t: INVALID_REPLICATION_FACTOR: why"),
        ("CreateTopics", 40, lambda admin: admin.create([SPEC]), "creating topic t: INVALID_CONFIG: why"),
        (
            "CreateTopics",
            29,
            lambda admin: admin.create([SPEC]),
            "topic t: not authorised .*Create on topic t",
        ),
        ("Metadata", 17, lambda admin: admin.describe(["t"]), "describing topic t: INVALID_TOPIC_EXCEPTION"),
        ("Metadata", 29, lambda admin: admin.identity("t"), "describing topic t: not authorised .*Describe on topic t"),
        (
            "DescribeConfigs",
            29,
            lambda admin: admin.describe(["t"]),
            "reading the settings of topic t: not authorised .*DescribeConfigs on topic t",
        ),
        (
            "CreatePartitions",
            29,
            lambda admin: admin.grow("t", 9),
            "adding partitions to topic t: not authorised .*Alter on topic t",
        ),
        ("DeleteTopics", 29, lambda admin: admin.delete(["t"]), "deleting topic t: not authorised .*Delete on topic t"),
        ("DeleteTopics", 73, lambda admin: admin.delete(["t"]), "deleting topic t: TOPIC_DELETION_DISABLED"),
        (
            "ListOffsets",
            29,
            lambda admin: admin.watermarks("t"),
            "offsets of t: not authorised .*Describe on topic",
        ),
        (
            "DeleteRecords",
            1,
            lambda admin: admin.delete_before("t", 3, 5),
            r"deleting records of t\[3\]: OFFSET_OUT_OF_RANGE",
        ),
        ("DeleteRecords", 29, lambda admin: admin.delete_before("t", 3, 5), "not authorised .*Delete on topic t"),
        ("FindCoordinator", 30, lambda admin: admin.committed("g", "t"), "not authorised .*Describe on group g"),
        ("OffsetFetch", 29, lambda admin: admin.committed("g", "t"), "not authorised .*Describe on topic t"),
        ("OffsetFetch", 29, lambda admin: admin.note("g", "t", 0), "not authorised .*Describe on topic t"),
    ],
)
async def test_what_is_refused_is_said_at_once_with_topic_and_right(
    api: str, code: int, call: Callable[[LogTrimmer], object], said: str
) -> None:
    topics = {} if api == "CreateTopics" else {"t": 4}
    async with TopicsBroker(topics=topics) as broker, connected(broker) as admin:
        broker.answer(api, *[0] * (api == "Metadata"), *[code] * 3)  # the first one is a look for brokers
        with pytest.raises(TopicError, match=said):
            await asyncio.wait_for(asked(call, admin), 5)
        assert len(broker.asked(api)) == 1 + (api == "Metadata")


async def test_partitions_are_added_and_never_taken_away() -> None:
    async with TopicsBroker() as broker, connected(broker) as admin:
        broker.answer("CreatePartitions", 7)
        await asked(admin.grow, "t", 6)
        await asked(admin.grow, "t", 6)
        assert (broker.topics["t"], broker.asked("CreatePartitions")) == (6, ["CreatePartitions"] * 2)
        with pytest.raises(TopicError, match="topic t has 6 partitions, not 5, and none can be taken away"):
            await asked(admin.grow, "t", 5)
        with pytest.raises(TopicError, match="topic nope does not exist at 127"):
            await asked(admin.grow, "nope", 5)


async def test_deleted_topics_are_waited_for_and_missing_ones_are_no_error() -> None:
    async with TopicsBroker() as broker, connected(broker) as admin:
        await asked(admin.delete, ["t", "never-there"])
        assert broker.topics == {}
        await asked(admin.delete, [])


async def test_offsets_come_from_the_leader_of_each_partition() -> None:
    async with TopicsBroker(brokers=2) as broker, connected(broker) as admin:
        assert await asked(admin.watermarks, "t") == dict.fromkeys(range(4), Watermarks(2, 7, 9))
        assert await asked(admin.watermarks, "t", [3]) == {3: Watermarks(2, 7, 9)}
        assert await asked(admin.watermarks, "t", []) == {}
        assert await asked(admin.offsets_at, "t", 1234) == dict.fromkeys(range(4), 1234)
        for node, name, request in broker.requests:
            if name == "ListOffsets":
                assert {part.partition_index % 2 for part in request.topics[0].partitions} == {node}
        with pytest.raises(TopicError, match=r"topic t has 4 partitions, none with number \[9\]"):
            await asked(admin.watermarks, "t", [0, 9])


async def test_a_leader_that_is_another_one_by_now_is_looked_for() -> None:
    async with TopicsBroker(brokers=2) as broker, connected(broker) as admin:
        broker.answer("ListOffsets", 6, 75, GONE)
        broker.leaderless = 1
        assert (await asked(admin.watermarks, "t", [0]))[0].end == 9
        broker.kill(1)
        assert (await asked(admin.watermarks, "t", [1]))[1].end == 9


async def test_a_broker_that_does_not_answer_is_given_up_before_the_time_is_over() -> None:
    async with TopicsBroker(brokers=2) as broker, connected(broker) as admin:
        broker.answer("Metadata", 0, MUTE)
        assert await asked(admin.identity, "t") is not None


async def test_records_are_deleted_at_the_leader() -> None:
    async with TopicsBroker(brokers=2) as broker, connected(broker) as admin:
        assert await asked(admin.delete_before, "t", 3, 5) == 5
        assert [node for node, name, _ in broker.requests if name == "DeleteRecords"] == [1]


async def test_committed_offsets_wait_for_a_transaction_that_holds_them() -> None:
    pending = 88
    async with TopicsBroker() as broker, connected(broker) as admin:
        broker.committed = {0: 7, 2: 0}
        broker.answer("OffsetFetch", pending, 14, 15, 16)
        assert await asked(admin.committed, "g", "t") == {0: 7, 2: 0}
        assert await asked(admin.committed, "g", "elsewhere", partitions=[0]) == {0: 7}
        assert await asked(admin.committed, "g", "elsewhere", partitions=[]) == {}
        with pytest.raises(TopicError, match="topic elsewhere does not exist"):
            await asked(admin.committed, "g", "elsewhere")
        broker.answer("OffsetFetch", *[pending] * 1000)
        with pytest.raises(BrokerUnavailable, match="group g: a transaction that holds offsets is still open at 127"):
            await asked(admin.committed, "g", "t", 0.5)


async def test_a_note_is_read_without_waiting_for_a_transaction() -> None:
    async with TopicsBroker() as broker, connected(broker) as admin:
        assert await asked(admin.note, "g", "t", 0) is None
        broker.committed, broker.text = {0: 7, 2: 0}, "text"
        broker.answer("OffsetFetch", 14, 16)
        assert await asked(admin.note, "g", "t", 0) == (7, "text")
        assert await asked(admin.note, "g", "t", 2) == (0, "text")
        assert not any(request.require_stable for _, name, request in broker.requests if name == "OffsetFetch")
        broker.answer("OffsetFetch", 69)
        assert await asked(admin.note, "g", "t", 0) is None


async def test_it_is_closed_and_asked_again() -> None:
    async with TopicsBroker() as broker, connected(broker) as admin:
        for _ in range(2):
            assert await asked(admin.identity, "t") is not None
            admin.close()
            admin.close()
