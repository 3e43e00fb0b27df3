"""Views over a real broker: no answer is dirty, stale or older than the one before; views of sources; a service."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from examples import bank as example_bank
from examples import view_service
from streams import BlockingView, Delivery, EventProducer, Record, View, ViewState
from streams.codecs import RESERVED_KEY_PREFIX
from streams.disk.sqlite import SQLite
from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.settings import ClientSettings
from streams.records import IncomingRecord
from streams.testing.faults import FaultPlan
from streams.testing.fixtures import BrokerAddress
from tests.broker import bank
from tests.broker.battery_kit import ENDLESS, QUICK, Bank
from tests.broker.client_kit import PATIENCE, create, read_topic, writing
from tests.broker.engine_kit import Running
from tests.broker.gate import nightly
from tests.broker.view_history import Read, wrong_reads
from tests.unit.waiting import until

pytestmark = [pytest.mark.broker, pytest.mark.timeout(300), pytest.mark.usefixtures("no_reader_is_left")]

PARTITIONS = 2
KEYS = [f"key-{n}" for n in range(8)]


@pytest.fixture
def topic(admin: TopicAdmin, topic_prefix: str) -> str:
    create(admin, topic_prefix + "prices", PARTITIONS, cleanup_policy="compact")
    return topic_prefix + "prices"


def committed(settings: ClientSettings, topic: str, admin: TopicAdmin) -> list[IncomingRecord]:
    """Everything that readers of committed records see."""
    return [
        record
        for records in read_topic(settings, topic, stable=True).values()
        for record in records
        if not (record.key or b"").startswith(RESERVED_KEY_PREFIX)
    ]


class Writes:
    """Writes that are acknowledged, beside transactions of which every second one is aborted. On threads."""

    def __init__(self, settings: ClientSettings, topic: str) -> None:
        self.settings, self.topic = settings, topic
        self.acknowledged: list[tuple[float, int, int]] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=work) for work in (self._send, self._commit)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE)

    def floors(self, before: float) -> dict[int, int]:
        """Return the positions that were acknowledged before this time."""
        found: dict[int, int] = {}
        for at, partition, offset in list(self.acknowledged):
            if at < before:
                found[partition] = max(found.get(partition, 0), offset + 1)
        return found

    def _send(self) -> None:
        number = 0
        with EventProducer(self.settings.bootstrap_servers) as producer:
            while not self._stop.is_set():
                number += 1
                key = random.choice(KEYS)
                sent = producer.send(Record(self.topic, b"sent-%d" % number, key, partition=hash(key) % PARTITIONS))
                self.acknowledged.append((time.monotonic(), sent.partition, sent.offset))

    def _commit(self) -> None:
        number = 0
        with writing(self.settings, self.topic) as writer:
            while not self._stop.is_set():
                number += 1
                end = writer.commit if number % 2 else writer.abort
                word = "committed" if number % 2 else "aborted"
                end(*((hash(key) % PARTITIONS, key, f"{word}-{number}") for key in random.sample(KEYS, 3)))


@pytest.mark.asyncio
@pytest.mark.parametrize("on_disk", [False, nightly(True)])
async def test_every_read_is_that_of_a_register(
    settings: ClientSettings, admin: TopicAdmin, topic: str, on_disk: bool, tmp_path: Path
) -> None:
    writes, reads = await asyncio.to_thread(Writes, settings, topic), list[Read]()
    kept: dict[str, Any] = {"engine": SQLite(), "folder": str(tmp_path)} if on_disk else {}
    view = View(topic, key=str, value=bytes, bootstrap_servers=settings.bootstrap_servers, ordered=True, **kept)
    built: dict[str, bytes] = {}

    async def watch() -> None:
        async for change in view.changes(initial=True):
            assert built.get(change.key) == change.old
            assert change.new is not None
            built[change.key] = change.new
            reads.append(Read("changes", change.key, change.new, {}))

    def read(reader: str, floors: dict[int, int]) -> None:
        reads.extend(Read(reader, key, view.get(key), floors) for key in KEYS)

    async def lag() -> None:
        """Have the view fall behind again and again: on an idle machine it is too quick to be caught."""
        while view.state is not ViewState.STOPPED:
            view._running().running().pause(None)
            await asyncio.sleep(0.3)
            view._running().running().resume(None, None)
            await asyncio.sleep(0.1)

    proven = 0
    try:
        async with view:
            await view.ready(PATIENCE)
            watching, lagging = asyncio.create_task(watch()), asyncio.create_task(lag())
            await until(lambda: len(writes.acknowledged) > 10, "it is written")
            end = time.monotonic() + 4.0
            while time.monotonic() < end:
                read("plain", dict(view.positions))
                with view.snapshot() as frozen:
                    await asyncio.sleep(0)
                    reads.extend(Read("snapshot", key, frozen.get(key), frozen.positions) for key in KEYS)
                floors = writes.floors(time.monotonic() - 0.25)
                if await view.fresh_within(0.25, PATIENCE):
                    proven += bool(floors)
                    read("fresh", floors)
                _, partition, offset = writes.acknowledged[-1]
                await view.wait_for(Delivery(Record(topic, b""), partition, offset), PATIENCE)
                read("own", {partition: offset + 1})
            await asyncio.to_thread(writes.stop)
            lagging.cancel()
            view._running().running().resume(None, None)
            assert await view.fresh_within(0.25, PATIENCE) or await view.fresh_within(0.25, PATIENCE)
            await until(lambda: built == dict(view.items()))
        await watching
    finally:
        await asyncio.to_thread(writes.stop)
    found = await asyncio.to_thread(committed, settings, topic, admin)
    assert wrong_reads(reads, found) == []
    assert proven > 1
    assert len(found) > 100
    if on_disk:
        async with view:  # from its folder
            await view.ready(PATIENCE)
            assert dict(view.items()) == built
            assert sum(each.records for each in view.statistics().partitions) < 100


@pytest.mark.nightly
@pytest.mark.timeout(420)
def test_a_view_of_a_source_whose_members_are_killed(bank_group: Bank, seed: int) -> None:
    """The ends that a read had to reach are requested by another client, longer ago than the view's proof may be."""
    names = ["one", "two", "three"]
    members = {name: bank_group.start(name, **QUICK) for name in names}
    load = bank_group.load(ENDLESS, 50, seed, 500)
    bank_group.wait_handled(1)
    source = bank.build(bank_group.bootstrap, bank_group.group, "reader", FaultPlan())
    stop, reads, errors, proofs = threading.Event(), list[Read](), list[Exception](), [0]
    settings, changelog = ClientSettings(bank_group.bootstrap), source.config.changelog
    admin = TopicAdmin(settings)

    def read(view: BlockingView[str, bank.Account]) -> None:
        chance = random.Random(seed)
        try:
            while not stop.is_set():
                ends = {n: mark.stable for n, mark in admin.watermarks(changelog, None, PATIENCE).items()}
                requested = time.monotonic()
                while time.monotonic() < requested + 0.3:
                    account = f"account-{chance.randrange(50)}"
                    floors = view.positions
                    reads.append(Read("plain", account, _encoded(view.get(account)), floors))
                view.fresh_within(0.3, PATIENCE)  # so the proof begins after ``requested``
                with view.snapshot() as frozen:
                    account = f"account-{chance.randrange(50)}"
                    reads.append(Read("fresh", account, _encoded(view.get(account)), ends))
                    reads.append(Read("snapshot", account, _encoded(frozen.get(account)), frozen.positions))
                proofs[0] += 1
        except Exception as error:
            errors.append(error)

    with View.of(source) as view:
        view.ready(PATIENCE)
        reader = threading.Thread(target=read, args=[view])
        reader.start()
        try:
            bank_group.strike_at_random(members, names, 6, seed, **QUICK)
        finally:
            stop.set()
            reader.join(PATIENCE)
        load.stop()
        bank_group.wait_handled(seconds=180)
        assert view.state is ViewState.LIVE
        assert errors == []
        view.fresh_within(0.5, PATIENCE)
        found = committed(settings, changelog, admin)
        assert wrong_reads(reads, found) == []
        assert {key: _encoded(value) for key, value in view.items()} == {
            (record.key or b"").decode(): record.value for record in found
        }
    assert proofs[0] > 10
    admin.close()
    bank_group.must_be_exact()


def _encoded(account: bank.Account | None) -> bytes | None:
    return None if account is None else msgspec.json.encode(account)


@pytest.mark.asyncio
async def test_the_service_over_a_view(
    kafka_broker: BrokerAddress, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = example_bank.source
    config = msgspec.structs.replace(
        source.config,
        group_id=topic_prefix + "bank",
        topic=topic_prefix + "bank-events",
        num_partitions=2,
        bootstrap_servers=kafka_broker.bootstrap_servers,
    )
    monkeypatch.setattr(source, "config", config)
    settings = ClientSettings(kafka_broker.bootstrap_servers)
    create(TopicAdmin(settings), "bank-balances", 10)
    app = view_service.app
    assert await source.create_source()
    async with (
        view_service.lifespan(app),
        Running(source),
        EventProducer(kafka_broker.bootstrap_servers) as producer,
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://bank") as client,
    ):

        async def get(path: str) -> Any:
            answer = await client.get(path)
            return answer.status_code, answer.json()

        await until_ready(client)
        for name, cents in (("ada", 500), ("bob", 70), ("ada", 250)):
            await producer.send(config.topic, example_bank.Deposited(name, cents), key=name)
        view = view_service.accounts_of(httpx_request(app))
        async with aclosing(view.changes(initial=True)) as changes:
            cents = dict[str, int]()
            while cents != {"ada": 750, "bob": 70}:
                change = await anext(changes)
                cents[change.key] = change.new.cents
        assert await get("/accounts/ada?fresh_within=5") == (200, {"account": "ada", "cents": 750})
        assert await get("/accounts/eve") == (404, {"detail": "no such account"})
        assert (await get("/accounts/ada?fresh_within=0"))[0] == 422
        status, total = await get("/total")
        assert (status, total["accounts"], total["cents"]) == (200, 2, 820)
    status, answer = (
        0,
        await httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://bank").get("/accounts/ada"),
    )
    assert (answer.status_code, "stopped" in answer.json()["detail"]) == (503, True)


def httpx_request(app: Any) -> Any:
    return type("Asked", (), {"app": app})


async def until_ready(client: httpx.AsyncClient) -> None:
    while (await client.get("/ready")).status_code != 200:
        await asyncio.sleep(0.02)
