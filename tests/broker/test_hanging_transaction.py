"""A transaction that nobody ends, in a changelog: it is named, ended by the command, and the restore goes on."""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from streams import EventSource, Outbox, Record, Relay, RelayConfig
from streams.cli.main import main
from streams.errors import ConfigError, OffsetError
from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.questions.hanging_transactions import HangingTransactions
from streams.kafka.settings import ClientSettings
from streams.kafka.wire.client import WireClient
from streams.model.group import HangingEnd
from streams.model.topics import TopicSpec
from streams.outbox import relay as relay_module
from streams.outbox.positions import positions_name
from streams.outbox.shard import ShardLoop
from streams.records import Output
from streams.runtime.claim import Claim
from streams.runtime.ownership import takeover
from streams.testing.fixtures import OwnBroker
from tests.broker.client_kit import leave_hanging, read_topic
from tests.broker.engine_kit import PATIENCE, Lab, Running, source_of, until
from tests.broker.gate import gate
from tests.broker.membership_kit import Transactor
from tests.broker.wire_kit import encoding, send, set_transaction_version, slot_at, transact
from tests.vocabulary import Totals

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.asyncio, pytest.mark.timeout(120)]


@pytest.fixture
def lab(own_broker: OwnBroker) -> Lab:
    """At a broker that takes records of a transaction without asking its coordinator, as all did before Kafka 3.6."""
    broker = own_broker(properties={"transaction.partition.verification.enable": "false"})
    return Lab(broker.bootstrap_servers, "hanging-")


@pytest.fixture
def client(lab: Lab) -> Iterator[WireClient]:
    client = WireClient(lab.bootstrap, "test")
    client.start()
    yield client
    client.close(2.0)


async def end_by_hand(kes: Callable[..., tuple[int, Any, str]], source: Any, *words: str) -> dict[str, Any]:
    code, found, messages = await asyncio.to_thread(kes, source, "txn", *words)
    assert code == 0, messages
    return dict(found)


@pytest.mark.parametrize("how", gate([True, False, None], True))
async def test_what_holds_up_a_restore_is_ended_as_it_ended_elsewhere(
    how: bool | None,
    lab: Lab,
    client: WireClient,
    kes: Callable[..., tuple[int, Any, str]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A transaction of the group is committed, aborted, or known to nobody, and has no marker in the changelog."""
    monkeypatch.setattr(takeover, "STALLED_SECONDS", 1.0)
    quick = {"transaction_timeout_seconds": 1.5, "session_timeout_seconds": 6.0}
    await lab.create()
    first: EventSource[Totals] = source_of(lab, **quick)
    changelog = first.config.changelog
    async with Running(first):
        await lab.add("a")
        await until(lambda: first.statistics().committed_events == 1, "the first event is committed")
    if how is None:
        offset = await asyncio.to_thread(leave_hanging, client, changelog)
    else:
        async with slot_at(lab.bootstrap, f"{lab.group}.gone.kes~0", topic=lab.output) as slot:
            await send(slot, lab.output, 0)
            offset = await asyncio.to_thread(leave_hanging, client, changelog, 0, slot._session.who[1:])
            await (slot.commit(lambda: None) if how else slot.abort())
    place = ("--topic", changelog, "--partition", "0", "--start-offset", str(offset))
    second = source_of(lab, **quick)
    async with Running(second, active=0):
        await lab.add("a")
        if how is None:
            await until(lambda: f"Run kes txn end MODULE:SOURCE {' '.join(place)}" in caplog.text, "it is named")
            assert "is younger than 900 s, so it may be alive" in caplog.text
            assert second.statistics().committed_events == 0
            [found] = (await end_by_hand(kes, second, "hanging"))["transactions"]
            assert (found["topic"], found["partition"], found["start_offset"]) == (changelog, 0, offset)
            ended = await end_by_hand(kes, second, "abort", *place, "--min-age", "0", "--yes")
            assert ended["aborted"]["start_offset"] == offset
            assert "it is committed nowhere" in ended["proof"]
        await until(lambda: second.statistics().committed_events == 1, "the restore goes on")
        assert (await end_by_hand(kes, second, "list"))["transactions"] == []
    if how is not None:
        said = f"is {'committed' if how else 'aborted'}: __transaction_state has it as"
        assert said in caplog.text
    assert (b"late" in await lab.state()) == bool(how)


def judged(client: WireClient, topic: str, offset: int, **settings: Any) -> HangingEnd:
    return HangingTransactions(client).judge(topic, 1, offset, time.monotonic() + PATIENCE, **settings)


ROWS = [
    # transaction version, log of the coordinators can be read, committed, what proves the end, or why it is refused
    (2, True, True, "__transaction_state has it as committed"),
    (2, True, False, "__transaction_state has it as aborted"),
    (2, False, True, r"a marker at offset \d+ of __consumer_offsets\[0\] commits it"),
    (2, False, False, "refused: .*the log of the coordinators cannot be read .*; no marker of its commit in the 2"),
    (1, True, True, "refused: .*has commits under its epoch, which transactions v1 share"),
    (1, True, False, "it is committed nowhere: "),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("version", "reads_log", "commit", "said"), ROWS)
async def test_the_proof_decides_how_it_is_ended(
    lab: Lab,
    client: WireClient,
    version: int,
    reads_log: bool,
    commit: bool,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of its two partitions gets its marker, the other one none; under v2 its id goes on."""
    await set_transaction_version(lab.bootstrap, version)
    await lab.create(partitions=2)
    async with slot_at(lab.bootstrap, "id", topic=lab.output) as slot, slot_at(lab.bootstrap, "x") as other:
        await transact(other, lab.output, 0)
        begun = Output(lab.output, b"1", b"k", None, 0, 0, 0, 0)
        await slot.flush(await encoding(slot, [begun]), {lab.topic: {0: 1}}, None)
        stray = Output(lab.output, b"0", b"k", None, 1, 0, 0, 0)
        await other.flush(await encoding(other, [stray]), {lab.topic: {0: 1}}, None)
        await other.commit(lambda: None)
        offset = await asyncio.to_thread(leave_hanging, client, lab.output, 1, slot._session.who[1:])
        await (slot.commit(lambda: None) if commit else slot.abort())
        if version == 2:  # a later transaction elsewhere
            await slot.flush(await encoding(slot, [begun]), {lab.topic: {0: 2}}, None)
            await slot.abort()
    if not reads_log:
        denied = ConfigError("not authorised")
        monkeypatch.setattr(HangingTransactions, "_log_leaders", Mock(side_effect=denied))
        monkeypatch.setattr(HangingTransactions, "_known", AsyncMock(return_value={}))
    if said.startswith("refused: "):
        with pytest.raises(OffsetError, match=said.replace("refused", "neither committed nor aborted")):
            await asyncio.to_thread(judged, client, lab.output, offset, min_age_seconds=0)
        return
    end = await asyncio.to_thread(judged, client, lab.output, offset, min_age_seconds=0)
    assert (end.commit, bool(re.search(said, end.proof))) == (commit, True), end.proof
    for _ in range(2):  # two at once, or again: nothing is left to be done the second time
        await asyncio.to_thread(HangingTransactions(client).end, end, time.monotonic() + PATIENCE)
    mark = (await lab.watermarks(lab.output))[1]
    assert mark.stable == mark.end
    found = await lab.records(lab.output, 1)
    assert (b"late" in [record.key for record in found]) == commit


async def test_what_a_coordinator_knows_is_not_ended_by_hand(lab: Lab, client: WireClient) -> None:
    await lab.create()
    open_ = Transactor(lab.bootstrap, "alive", lab.output)
    open_.producer.begin_transaction()
    open_.producer.produce(lab.output, b"x", partition=0)
    assert open_.producer.flush(PATIENCE) == 0
    questions, deadline = HangingTransactions(client), time.monotonic() + PATIENCE

    def look() -> None:
        [found] = questions.find(lab.output, [0], deadline)
        assert (found.transactional_id, found.state, found.is_hanging) == ("alive", "Ongoing", False)
        with pytest.raises(OffsetError, match="is not hanging: alive has it"):
            questions.judge(lab.output, 0, found.start_offset, deadline)
        with pytest.raises(OffsetError, match=r"began at offset 77 \(open ones: 0\)"):
            questions.judge(lab.output, 0, 77, deadline)
        questions.end(HangingEnd(found, False, ""), deadline)
        assert questions.find(lab.output, [0], deadline) == [found]

    await asyncio.to_thread(look)
    open_.producer.commit_transaction(PATIENCE)
    while await asyncio.to_thread(questions.find, lab.output, [0], deadline):  # its marker comes after the answer
        assert time.monotonic() < deadline


@pytest.mark.parametrize("commit", gate([True, False], True))
async def test_a_slot_that_lost_its_broker_ends_its_last_transaction_again(
    lab: Lab, client: WireClient, commit: bool
) -> None:
    """Otherwise the next transaction of its id ends what lacks a marker as it ends itself."""
    await lab.create(partitions=2)
    async with slot_at(lab.bootstrap, "id", topic=lab.output) as slot:
        outputs = [Output(lab.output, b"1", b"k", None, number, 0, 0, 0) for number in range(2)]
        await slot.flush(await encoding(slot, outputs[:1]), {lab.topic: {0: 1}}, None)
        await asyncio.to_thread(leave_hanging, client, lab.output, 1, slot._session.who[1:])
        slot._last.writes([(lab.output, 1)])
        await (slot.commit(lambda: None) if commit else slot.abort())
        assert (await lab.watermarks(lab.output))[1].stable == 0
        next(iter(slot._session.connections.values())).close()
        was_shaken = slot.is_shaken
        await slot.flush(await encoding(slot, outputs[1:]), {lab.topic: {0: 2}}, None)
        await (slot.abort() if commit else slot.commit(lambda: None))
        assert (was_shaken, slot.is_shaken) == (True, False)
        await until(lambda: lab.admin.watermarks(lab.output)[1].stable > 2, "the markers are written")
        assert [record.key for record in await lab.records(lab.output, 1)] == [b"late" if commit else b"k"]


@pytest.mark.nightly
async def test_a_relay_names_what_holds_up_its_positions_and_goes_on_when_it_is_ended(
    lab: Lab,
    client: WireClient,
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

    def has_marker() -> bool:
        mark = lab.admin.watermarks(positions)[0]
        return 0 < mark.end == mark.stable

    await until(has_marker, "the marker before it is written: the proof begins there")
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
