from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from contextlib import closing
from types import SimpleNamespace
from typing import Any, Never

import anyio
import pytest

from streams import EventSourceConfig
from streams.errors import BrokerUnavailable, TopicError
from streams.kafka.questions.admin import TopicAdmin, TopicDescription, _gather, differences
from streams.kafka.settings import ClientSettings
from streams.model.topics import TopicSpec
from streams.runtime import source_topics
from streams.runtime.bridge import Worker
from tests.unit.waiting import wait_until

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
            admin.describe(["t"], timeout_seconds=4.0)
        ended.append(str(caught.value))

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: words in caplog.text, words, seconds=3.0)
    assert ended == []
    asking.join()
    assert ended == [f"describing topic t: {words}"]
    admin.close()


async def test_a_cluster_that_is_slow_to_make_topics_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It has taken the topics, and elects leaders after a while."""
    looks: list[float] = []

    def layouts(names: Collection[str], deadline: float) -> dict[str, Any]:
        looks.append(deadline)
        leader = SimpleNamespace(id=1) if len(looks) > 20 else None
        return {name: SimpleNamespace(partitions=[SimpleNamespace(leader=leader)]) for name in names}

    admin = TopicAdmin(ClientSettings("127.0.0.1:1"))
    monkeypatch.setattr(admin, "_layouts", layouts)
    monkeypatch.setattr(admin, "differences", lambda specs: [])
    monkeypatch.setattr(source_topics, "REQUEST_SECONDS", 0.1)
    monkeypatch.setattr(source_topics, "FIRST_PAUSE", 0.01)
    connections: Any = SimpleNamespace(topics=lambda: admin, worker=Worker)
    config = EventSourceConfig(group_id="g", topic="t", num_partitions=1)
    with anyio.fail_after(30):
        await source_topics.prepare(config, connections)
    assert len(looks) > 20
    assert "waiting for the broker: topic t at 127.0.0.1:1: waited in vain until it has a leader" in caplog.text


@pytest.mark.parametrize("name", ["", "\udcff"], ids=["empty", "no UTF-8"])
def test_a_name_that_would_crash_the_client_is_refused(name: str) -> None:
    with closing(TopicAdmin(ClientSettings("127.0.0.1:1"))) as admin, pytest.raises(TopicError, match="is no name of"):
        admin.describe(["orders", name])


def test_a_signal_within_the_c_client_is_the_signal() -> None:
    """Seen as ``SystemError: list_offsets returned a result with an exception set``, on Ctrl-C at the wrong moment."""
    for cause, raised in ((KeyboardInterrupt(), KeyboardInterrupt), (None, SystemError)):

        def ask(*_: object) -> Never:
            raise SystemError("list_offsets returned a result with an exception set") from cause  # noqa: B023

        with pytest.raises(raised):
            _gather(ask, None, 1.0)  # type: ignore[arg-type]
