"""A transaction that nobody ends, in a changelog: it is named, ended by the command, and the restore goes on."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from streams import EventSource, Outbox, Record, Relay, RelayConfig
from streams.cli.main import main
from streams.clients.admin import TopicAdmin
from streams.clients.kafka_python_client import KafkaPythonClient
from streams.clients.open_transactions import OpenTransactions
from streams.clients.settings import ClientSettings
from streams.errors import OffsetError
from streams.outbox import relay as relay_module
from streams.outbox.positions import positions_name
from streams.outbox.shard import ShardLoop
from streams.runtime.claim import Claim
from streams.runtime.ownership import takeover
from streams.testing.fixtures import OwnBroker
from streams.topics import TopicSpec
from tests.broker.client_kit import leave_hanging, read_topic
from tests.broker.engine_kit import PATIENCE, Lab, Running, source_of, until
from tests.broker.membership_kit import Transactor
from tests.vocabulary import Totals

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.asyncio, pytest.mark.timeout(120)]


@pytest.fixture
def lab(own_broker: OwnBroker) -> Lab:
    """At a broker that takes records of a transaction without asking its coordinator, as all did before Kafka 3.6."""
    broker = own_broker(properties={"transaction.partition.verification.enable": "false"})
    return Lab(broker.bootstrap_servers, "hanging-")


@pytest.fixture
def client(lab: Lab) -> Iterator[KafkaPythonClient]:
    client = KafkaPythonClient(lab.bootstrap, "test", {})
    client.start()
    yield client
    client.close(2.0)


async def test_a_restore_names_what_holds_it_up_and_the_command_ends_it(
    lab: Lab,
    client: KafkaPythonClient,
    kes: Callable[..., tuple[int, Any, str]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(takeover, "STALLED_SECONDS", 1.0)
    quick = {"transaction_timeout_seconds": 1.5, "session_timeout_seconds": 6.0}
    await lab.create()
    first: EventSource[Totals] = source_of(lab, **quick)
    changelog = first.config.changelog
    async with Running(first):
        await lab.add("a")
        await until(lambda: first.statistics().committed_events == 1, "the first event is committed")
    offset = await asyncio.to_thread(leave_hanging, client, changelog)

    async def answer(*words: str) -> dict[str, Any]:
        code, found, messages = await asyncio.to_thread(kes, first, "txn", *words)
        assert code == 0, messages
        return dict(found)

    place = ("--topic", changelog, "--partition", "0", "--start-offset", str(offset))
    second = source_of(lab, **quick)
    async with Running(second, active=0):
        await lab.add("a")
        await until(lambda: "hanging transaction" in caplog.text, "it is named")
        assert f"kes txn abort MODULE:SOURCE {' '.join(place)}" in caplog.text
        with pytest.raises(OffsetError, match=r"is younger than 900 s, so it may be alive.* try again in 8\d\d s"):
            await asyncio.to_thread(OpenTransactions(client).abort, changelog, 0, offset, time.monotonic() + PATIENCE)
        assert second.statistics().committed_events == 0
        [found] = (await answer("hanging"))["transactions"]
        assert (found["topic"], found["partition"], found["start_offset"]) == (changelog, 0, offset)
        ended = await answer("abort", *place, "--min-age", "0", "--yes")
        assert ended["aborted"]["start_offset"] == offset
        await until(lambda: second.statistics().committed_events == 1, "the restore goes on")
        assert (await answer("list"))["transactions"] == []


async def test_what_a_coordinator_knows_is_not_ended_by_hand(lab: Lab, client: KafkaPythonClient) -> None:
    await lab.create()
    open_ = Transactor(lab.bootstrap, "alive", lab.output)
    open_.producer.begin_transaction()
    open_.producer.produce(lab.output, b"x", partition=0)
    assert open_.producer.flush(PATIENCE) == 0
    questions, deadline = OpenTransactions(client), time.monotonic() + PATIENCE

    def look() -> None:
        [found] = questions.find(lab.output, [0], deadline)
        assert (found.transactional_id, found.state, found.is_hanging) == ("alive", "Ongoing", False)
        with pytest.raises(OffsetError, match="is not hanging: alive has it"):
            questions.abort(lab.output, 0, found.start_offset, deadline)
        with pytest.raises(OffsetError, match=r"began at offset 77 \(open ones: 0\)"):
            questions.abort(lab.output, 0, 77, deadline)

    await asyncio.to_thread(look)
    open_.producer.commit_transaction(PATIENCE)
    while await asyncio.to_thread(questions.find, lab.output, [0], deadline):  # its marker comes after the answer
        assert time.monotonic() < deadline


@pytest.mark.nightly
async def test_a_relay_names_what_holds_up_its_positions_and_goes_on_when_it_is_ended(
    lab: Lab,
    client: KafkaPythonClient,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    impatient = partial(ShardLoop, claim=partial(Claim, call_seconds=3.0))
    monkeypatch.setattr(relay_module, "ShardLoop", impatient)
    file, topic, servers = tmp_path / "shop.db", "hanging-rows", lab.bootstrap
    config = RelayConfig(name="hanging-relay", database=f"sqlite:{file}", bootstrap_servers=servers)
    relay_module.apply(config, 1)
    admin = TopicAdmin(ClientSettings(servers))
    admin.create([TopicSpec(name=topic, partitions=1, replication_factor=1)])
    db = sqlite3.connect(file, timeout=30)

    async def is_sent() -> None:
        def is_empty() -> bool:
            return bool(db.execute("SELECT count(*) FROM kes_outbox").fetchone() == (0,))

        await until(is_empty, "the rows are sent")

    def stash(value: bytes) -> None:
        with db:
            Outbox().stash_many(db, [Record(topic, value, b"k")])

    stash(b"1")
    async with Relay(config):
        await is_sent()
    positions = positions_name(config.name)
    offset = await asyncio.to_thread(leave_hanging, client, positions)
    stash(b"2")
    async with Relay(config):
        await until(lambda: f"kes txn hanging --topic {positions}" in caplog.text, "the command is named")
        place = ["--topic", positions, "--partition", "0", "--start-offset", str(offset)]
        where = ["--bootstrap-servers", servers, "--json"]
        capsys.readouterr()
        assert await asyncio.to_thread(main, ["txn", "hanging", "--topic", positions, *where]) == 0
        [found] = json.loads(capsys.readouterr().out)["transactions"]
        assert found["start_offset"] == offset
        ended = ["txn", "abort", *place, "--min-age", "0", "--yes", *where]
        assert await asyncio.to_thread(main, ended) == 0
        await is_sent()
    db.close()
    admin.close()
    assert [record.value for record in read_topic(ClientSettings(servers), topic)[0]] == [b"1", b"2"]
