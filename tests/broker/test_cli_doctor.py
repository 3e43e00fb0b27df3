"""``kes doctor`` on a real broker: nothing wrong, and each thing that may be, with what to type."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from streams import EventSource, Record
from streams.cli import machine_checks, main
from streams.errors import ConfigError
from streams.kafka.questions.cluster_view import ClockView, ClusterQuestions
from streams.kafka.questions.group_checks import GroupChecks
from streams.kafka.questions.open_transactions import OpenTransactions
from streams.model.group import OpenTransaction
from streams.model.topics import TopicSpec
from streams.runtime.changelog import OFFSET_KEY, OffsetRecord
from streams.sak import leaves
from streams.testing.fixtures import BrokerAddress
from tests.broker.engine_kit import Lab, Running, producer_to, source_of
from tests.unit.waiting import PATIENCE

pytestmark = [pytest.mark.broker, pytest.mark.asyncio, pytest.mark.timeout(120)]

PARTITIONS = 2
Kes = Callable[..., tuple[int, Any, str]]


class Office:
    """``kes doctor`` for a source: what it finds, by check and state."""

    def __init__(self, kes: Kes) -> None:
        self._kes = kes

    async def look(self, source: EventSource[Any], code: int = 0) -> dict[tuple[str, str], list[str]]:
        ended, answer, err = await asyncio.to_thread(self._kes, source, "doctor", behind=1)
        assert ended == code, ([f for f in answer["findings"] if f["state"] == "problem"], err)
        found: dict[tuple[str, str], list[str]] = {}
        for each in answer["findings"]:
            found.setdefault((each["check"], each["state"]), []).append(f"{each['text']} -> {each['remedy']}")
        assert answer["problems"] == sum(len(texts) for (_, state), texts in found.items() if state == "problem")
        is_compiled = leaves.summary() == leaves.COMPILED
        remedy = "" if is_compiled else leaves.advice()
        (hot_path,) = found.pop(("hot path", "ok" if is_compiled else "warning"))
        assert hot_path == f"{leaves.summary()} -> {remedy}"
        return found


@pytest.fixture
def office(kes: Kes) -> Office:
    return Office(kes)


async def test_a_source_that_is_well(lab: Lab, office: Office) -> None:
    source = source_of(lab)
    found = await office.look(source)
    assert {check for check, state in found if state != "ok"} == {"topics"}
    assert all(text.endswith("does not exist -> kes topics apply shop:source") for text in found["topics", "warning"])
    async with Running(source) as running:
        await lab.send(b'{"name":"a","amount":1}', b"a")  # partition 0 is murmur2's for it
        await lab.send(b"", b"b", partition=1, topic=lab.dead_letter_topic)
        await lab.flush()
        await running.until_committed(1)
        found = await office.look(source)
    assert {state for _, state in found} == {"ok"}
    assert len(found["topics", "ok"]) == 3
    assert [f"{lab.group}: Stable, member-0 -> "] == found["group", "ok"]
    assert "answers like Kafka " in found["brokers", "ok"][0]
    assert "librdkafka " in found["libraries", "ok"][0]
    assert found["keys", "ok"] == ["the keys of the newest 1 records are where murmur2 puts them -> "]
    assert f"the newest changes of {lab.changelog} can be read: those of 1 key(s) -> " in found["state", "ok"]


def hanging(topic: str) -> OpenTransaction:
    """A transaction without a coordinator (``test_hanging_transaction.py`` has a real one)."""
    numbers = {"partition": 1, "producer_id": 7, "producer_epoch": 0, "coordinator_epoch": 0, "last_timestamp_ms": 0}
    return OpenTransaction(topic=topic, start_offset=4711, **numbers)


async def test_all_that_is_wrong_with_a_source_is_named_with_what_to_type(
    lab: Lab, office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = source_of(lab, session_timeout_seconds=2_000, transaction_timeout_seconds=1_900, replication_factor=2)
    changelog = TopicSpec(name=lab.changelog, partitions=3, replication_factor=1)
    await asyncio.to_thread(lab.admin.create, [changelog])
    await lab.create(lab.topic)
    for partition in (0, 1):
        await lab.send(b"{}", b"a", partition=partition)
    await lab.flush()
    config = source.config.resolved()
    with GroupChecks(config) as group:
        await asyncio.to_thread(group.set_offsets, {0: 5, 1: 1})
    offset = OffsetRecord(3, "w", 1, 1)
    record = Record(lab.changelog, msgspec.json.encode(offset), OFFSET_KEY, partition=0)
    producer = producer_to(lab.bootstrap)
    producer.produce(record.topic, record.value, record.key, 0)
    producer.produce(record.topic, b"spoilt", b"ada", 1)
    assert producer.flush(PATIENCE) == 0
    monkeypatch.setattr(ClusterQuestions, "clock", lambda self, deadline: ClockView(-100.0, 0.1))
    monkeypatch.setattr(OpenTransactions, "find", lambda self, topic, numbers, deadline: [hanging(topic)])
    found = await office.look(source, code=1)
    said = {check: "\n".join(texts) for (check, state), texts in found.items() if state == "problem"}
    assert "the cluster's clock is 100 s behind this machine's -> synchronise" in said["clock"]
    assert (
        "transaction_timeout_seconds is 1900, and the brokers' transaction.max.timeout.ms is 900000" in said["settings"]
    )
    assert "session_timeout_seconds is 2000, and the brokers' group.max.session.timeout.ms is" in said["settings"]
    assert "replication_factor is 2, and there are 1 brokers" in said["settings"]
    assert f"topic {lab.changelog} has 3 partitions, settings say 2" in said["topics"]
    assert "cleanup.policy" in said["topics"]
    assert (
        f"{lab.topic}[0]: the group's offset 5 is ahead of the changelog's (3): the source would not start"
        in said["group"]
    )
    assert f"{lab.topic}[1]: the group's offset 1 is ahead of the changelog's (None)" in said["group"]
    assert "-> kes offsets accept shop:source -p 0" in said["group"]
    assert f"kes offsets start shop:source --from-group {lab.group}" in said["group"]
    arguments = f"--topic {lab.changelog} --partition 1 --start-offset 4711"
    assert f"{lab.changelog}[1]: a transaction from 4711 on never ends" in said["transactions"]
    assert f"-> kes txn end shop:source {arguments}" in said["transactions"]
    assert f"1 of the newest 2 records of {lab.topic} are in other partitions" in said["keys"]
    assert "partitioner=murmur2_random" in said["keys"]
    assert (
        f"1 of the newest values of {lab.changelog} cannot be read, the last: {lab.changelog}[1]@0, key ada"
        in (said["state"])
    )
    assert "kes state verify shop:source --what changelog --decode" in said["state"]


async def test_a_source_that_has_stopped_at_a_record_is_seen(lab: Lab, office: Office) -> None:
    source = source_of(lab)
    await lab.create(lab.topic)
    for value in (b'{"name":"a","amount":1}', b"no JSON", b'{"name":"a","amount":1}'):
        await lab.send(value, b"a", partition=0)
    await lab.flush()
    with GroupChecks(source.config.resolved()) as group:
        for offset, state, said in [
            (1, "problem", f"{lab.topic}[0] cannot be read, and a start would stop there: {lab.topic}[0]@1: "),
            (1, "problem", "or kes skip shop:source 0@1 --dead-letter --reason '...'"),
            (
                1,
                "warning",
                f"no member is running, and records are waiting (2); the next start continues at {lab.topic}[0]@1 ->",
            ),
            (
                2,
                "warning",
                f"no member is running, and records are waiting (1); the next start continues at {lab.topic}[0]@2 ->",
            ),
            (3, "ok", "no records are waiting"),
        ]:
            await asyncio.to_thread(group.set_offsets, {0: offset})
            found = await office.look(source, code=1)
            [text] = found["progress", state]
            assert said in text
            # Offsets alone, without a changelog, are another program's.
            assert f"offset {offset} is ahead of the changelog's (None)" in found["group", "problem"][0]


async def test_what_cannot_be_looked_at_is_unknown_and_no_problem(
    lab: Lab, office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: ClusterQuestions, deadline: float) -> ClockView:
        raise ConfigError("not authorised")

    monkeypatch.setattr(ClusterQuestions, "clock", refused)
    assert (await office.look(source_of(lab)))["clock", "unknown"] == ["not authorised -> "]


async def test_a_cluster_alone_and_for_people(kafka_broker: BrokerAddress, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["doctor", "--bootstrap-servers", kafka_broker.bootstrap_servers]
    assert await asyncio.to_thread(main.main, arguments) == 0
    out = capsys.readouterr().out
    assert "ok      brokers      broker " in out
    assert out.splitlines()[-1].startswith("0 problems, ")


async def test_nothing_listens(capsys: pytest.CaptureFixture[str]) -> None:
    assert await asyncio.to_thread(main.main, ["doctor", "--bootstrap-servers", "127.0.0.1:1,127.0.0.1:2"]) == 1
    out = capsys.readouterr().out
    assert "127.0.0.1:1 refuses connections" in out
    assert out.splitlines()[-1].startswith("2 problems, ")
    assert await asyncio.to_thread(main.main, ["doctor", "--bootstrap-servers", "nonsense"]) == 1
    assert "must be host:port" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("found", "bounds", "fit"),
    [
        ("2.16.1", ">=2.16.1,<2.17", True),
        ("2.17.0", ">=2.16.1,<2.17", False),
        ("2.9", "<2.17,>=2.16.1", False),
        ("2.16.1rc1", ">=2.16.1", True),
        ("1", "", True),
        ("10.0", ">=4", True),
    ],
)
async def test_versions_are_compared_by_their_numbers(found: str, bounds: str, fit: bool) -> None:
    assert machine_checks.fits(found, bounds) is fit
