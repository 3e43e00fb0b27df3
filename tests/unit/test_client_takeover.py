"""The questions of a take-over to a cluster in which a broker stands still."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from streams.errors import BrokerUnavailable, ConfigError
from streams.kafka.questions import asking as questions
from streams.kafka.questions import takeover
from streams.kafka.questions.takeover import WireTakeOver
from streams.kafka.wire.client import WireClient
from streams.kafka.wire.codes import Code
from streams.kafka.wire.connection import LostConnection
from streams.kafka.wire.schemas.heartbeat import HeartbeatResponse
from streams.kafka.wire.schemas.init_producer_id import InitProducerIdResponse
from streams.kafka.wire.schemas.list_offsets import ListOffsetsResponse
from streams.kafka.wire.schemas.list_transactions import ListTransactionsResponse
from streams.kafka.wire.schemas.metadata import MetadataResponse
from streams.kafka.wire.schemas.offset_fetch import OffsetFetchResponse

pytestmark = pytest.mark.timeout(90)

BROKER_SECONDS = 0.2


class Cluster:
    """Brokers 1 to 3, each leader of the partition of its number. ``asked``: (question, broker), as they came.
    ``timed_out``: how many questions had been asked at the first that nobody answered."""

    def __init__(self, client: WireClient) -> None:
        self.client = client
        self.frozen: set[int] = set()
        self.answered_still = ""
        self.open: dict[str, int] = {}
        self.refused: dict[int, int] = {}
        self.asked: list[tuple[str, int | None]] = []
        self.ended: list[str] = []
        self.timed_out = 0

    async def connected(self, deadline: float) -> None: ...

    async def coordinator(self, kind: int, key: str, deadline: float) -> int:
        return self.open[key] if kind == 1 else 1

    async def send(self, request: Any, node: int | None, deadline: float, **versions: int) -> Any:
        kind = type(request).__name__.removesuffix("Request")
        self.asked.append((kind, node))
        if node in self.frozen and kind != self.answered_still:
            try:
                async with asyncio.timeout_at(deadline):
                    await asyncio.Event().wait()
            except TimeoutError:
                self.timed_out = self.timed_out or len(self.asked)
                raise LostConnection("no answer", "_TIMED_OUT") from None
        return getattr(self, re.sub("(?<=[a-z])(?=[A-Z])", "_", kind).lower())(request, node)

    def metadata(self, request: Any, _: int) -> Any:
        numbers = (1, 2, 3)
        of = MetadataResponse.MetadataResponseTopic
        leaders = [of.MetadataResponsePartition(partition_index=number, leader_id=number) for number in numbers]
        brokers = [MetadataResponse.MetadataResponseBroker(node_id=number) for number in numbers]
        return MetadataResponse(brokers=brokers, topics=[of(partitions=leaders)], cluster_id="cluster")

    def list_transactions(self, request: Any, node: int) -> Any:
        code = self.refused.pop(node, 0)
        of = ListTransactionsResponse.TransactionState
        found = [of(transactional_id=name) for name, at in self.open.items() if at == node]
        return ListTransactionsResponse(error_code=code, transaction_states=[] if code else found)

    def heartbeat(self, request: Any, node: int) -> Any:
        return HeartbeatResponse()

    def init_producer_id(self, request: Any, node: int) -> Any:
        self.ended.append(request.transactional_id)
        return InitProducerIdResponse()

    def list_offsets(self, request: Any, node: int) -> Any:
        [topic] = request.topics
        of = ListOffsetsResponse.ListOffsetsTopicResponse
        numbers = [each.partition_index for each in topic.partitions]
        found = [of.ListOffsetsPartitionResponse(partition_index=number, offset=node) for number in numbers]
        return ListOffsetsResponse(topics=[of(name=topic.name, partitions=found)])


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr(questions, "BROKER_SECONDS", BROKER_SECONDS)
    monkeypatch.setattr(takeover, "FENCE_SECONDS", 2 * BROKER_SECONDS)
    client = WireClient("127.0.0.1:1", "test")
    made = Cluster(client)
    for name in ("connected", "coordinator", "send"):
        monkeypatch.setattr(client, name, getattr(made, name))
    client.start()
    yield made
    client.close(1.0)


def asking(cluster: Cluster) -> WireTakeOver:
    return WireTakeOver(cluster.client, "shop", "orders")


def soon() -> float:
    return time.monotonic() + 10.0


def test_a_frozen_broker_is_left_out_and_the_others_are_asked_beside_it(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.frozen = {1}
    cluster.open = {f"shop.gone.kes~{number}": number for number in (1, 2, 3)}
    assert asking(cluster).fence_departed(["me"], soon()) == ["shop.gone.kes~2", "shop.gone.kes~3"]
    listed = [at for at, (kind, _) in enumerate(cluster.asked) if kind == "ListTransactions"]
    assert [cluster.asked[at][1] for at in listed] == [1, 2, 3]
    assert max(listed) < cluster.timed_out, "somebody was asked after the frozen one had its time"
    assert "broker 1 is left out" in caplog.text


def test_a_coordinator_that_freezes_after_its_list_holds_up_its_own_fence_only(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.open = {f"shop.gone.kes~{number}": number for number in (1, 2, 3)}
    cluster.frozen, cluster.answered_still = {2}, "ListTransactions"
    assert asking(cluster).fence_departed(["me"], soon()) == cluster.ended == ["shop.gone.kes~1", "shop.gone.kes~3"]
    assert "shop.gone.kes~2 is not ended yet" in caplog.text


def test_a_coordinator_that_is_still_loading_is_waited_for(cluster: Cluster) -> None:
    """The new one after a fail-over says so for a moment, and knows more than anybody else then."""
    cluster.refused = {2: Code.COORDINATOR_LOAD_IN_PROGRESS}
    cluster.open = {"shop.gone.kes~0": 2}
    assert asking(cluster).fence_departed(["me"], soon()) == ["shop.gone.kes~0"]


def test_that_nobody_answers_and_that_we_may_not_ask_are_errors(cluster: Cluster) -> None:
    cluster.frozen = {1, 2, 3}
    with pytest.raises(BrokerUnavailable, match="no broker answers"):
        asking(cluster).fence_departed(["me"], soon())
    cluster.frozen, cluster.refused = set(), {3: Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED}
    with pytest.raises(ConfigError, match="not authorised"):
        asking(cluster).fence_departed(["me"], soon())


@pytest.mark.parametrize(
    ("name", "ended"),
    [
        ("shop.gone.kes~0", True),
        ("shop.here.kes~0", False),
        ("shop.me.kes~0", False),
        ("shop.gone.0", False),
        ("shop.billing.eu.kes~0", False),
    ],
)
def test_only_marked_ids_of_members_that_are_gone_are_ended(cluster: Cluster, name: str, ended: bool) -> None:
    cluster.open = {name: 2}
    assert asking(cluster).fence_departed(["here", "me"], soon()) == [name] * ended
    assert cluster.ended == [name] * ended


def test_only_the_first_question_looks_for_a_broker_by_the_configured_addresses(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them may be frozen by now, and is asked by chance."""
    looked: list[float] = []

    async def connected(deadline: float) -> None:
        looked.append(deadline)
        monkeypatch.setattr(cluster.client, "brokers", lambda: {1: ("known", 1)})

    monkeypatch.setattr(cluster.client, "connected", connected)
    takeover = asking(cluster)
    for _ in range(3):
        assert takeover.log_range("orders", [1], soon()) == {1: (1, 1)}
        assert takeover.is_member("me-1", 5, soon())
    assert len(looked) == 1
    cluster.frozen = {1, 2, 3}  # all are at other addresses now, for example
    with pytest.raises(BrokerUnavailable):
        takeover.log_range("orders", [1], time.monotonic() + 2 * BROKER_SECONDS)
    cluster.frozen = set()
    for _ in range(2):
        assert takeover.log_range("orders", [1], soon()) == {1: (1, 1)}
    assert len(looked) == 2


def test_a_leader_that_freezes_is_asked_for_again_soon(cluster: Cluster) -> None:
    """By then another one leads: a try takes as long as one broker may, not as long as the step."""
    cluster.frozen = {2}
    seen = cluster.metadata

    def moved(request: Any, node: int) -> Any:
        if cluster.timed_out:
            cluster.frozen = set()
        return seen(request, node)

    cluster.metadata = moved  # type: ignore[method-assign]
    before = time.monotonic()
    assert asking(cluster).log_range("orders", [1, 2, 3], before + 60.0) == {n: (n, n) for n in (1, 2, 3)}
    first_try = cluster.asked[: cluster.timed_out]
    assert [node for kind, node in first_try if kind == "ListOffsets"] == [1, 2, 3, 1, 2, 3], "one after the other"
    assert time.monotonic() - before < 30.0


@pytest.mark.parametrize(("question", "stable"), [("stable_offsets", True), ("committed_offsets", False)])
def test_committed_offsets_are_those_of_now_and_stable_ones_wait(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, question: str, stable: bool
) -> None:
    """The loop is purged by the former: under load there is always a further one that is pending."""
    required: list[bool] = []

    def offset_fetch(request: Any, node: int) -> Any:
        required.append(request.require_stable)
        return offsets({0: 7, 1: -1})

    monkeypatch.setattr(cluster, "offset_fetch", offset_fetch, raising=False)
    assert getattr(asking(cluster), question)([0, 1], soon(), "loop") == {0: 7, 1: None}
    assert required == [stable]


def test_a_partition_that_an_answer_leaves_out_is_not_one_without_an_offset(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "offset_fetch", lambda *_: offsets({0: 7}), raising=False)
    with pytest.raises(BrokerUnavailable, match=r"the answer says nothing of orders\[1\]"):
        asking(cluster).stable_offsets([0, 1], time.monotonic() + 2 * BROKER_SECONDS)


def offsets(found: dict[int, int]) -> OffsetFetchResponse:
    of = OffsetFetchResponse.OffsetFetchResponseGroup
    entry_of = of.OffsetFetchResponseTopics.OffsetFetchResponsePartitions
    entries = [entry_of(partition_index=number, committed_offset=offset) for number, offset in found.items()]
    return OffsetFetchResponse(groups=[of(topics=[of.OffsetFetchResponseTopics(partitions=entries)])])
