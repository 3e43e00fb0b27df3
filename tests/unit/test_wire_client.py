"""The client of a cluster, and a broker that does as it is told."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any

import pytest

from streams.errors import BrokerUnavailable, ConfigError, StreamsError, TopicError
from streams.kafka.permissions import on_group
from streams.kafka.wire import client as client_module
from streams.kafka.wire.client import GROUP
from streams.kafka.wire.codes import Code, is_retriable
from tests.unit.scripted_broker import GARBAGE, GONE, MUTE, SHORT, TORN, TWICE, WEB, ScriptedBroker
from tests.unit.waiting import PATIENCE, stays, until
from tests.unit.wire_client_kit import NOBODY, SECRET, Ours, asked

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]


@pytest.fixture
def ours() -> Iterator[Ours]:
    made = Ours()
    yield made
    made.close()


async def test_questions_go_to_any_broker_and_to_one(ours: Ours) -> None:
    async with ScriptedBroker(brokers=3) as broker:
        client = ours.client(broker.bootstrap_servers)
        answer = await asked(ours, client, "t")
        assert len(answer.topics[0].partitions) == 4
        broker.requests.clear()
        for node in (0, 1, 2):
            await asked(ours, client, "t", node=node)
        assert [number for number, name, request in broker.requests if name == "Metadata" and request.topics] == [
            0,
            1,
            2,
        ]


async def test_an_address_where_nothing_is_costs_nothing(ours: Ours) -> None:
    async with ScriptedBroker() as broker:
        client = ours.client(f"{NOBODY},{broker.bootstrap_servers},127.0.0.1:2")
        assert (await asked(ours, client, "t")).topics[0].name == "t"


async def test_it_says_once_that_no_broker_answers(
    ours: Ours, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(client_module, "_LOG_UNREACHABLE_AFTER", 0.1)
    broker = ScriptedBroker()
    with closing(socket.create_server(("127.0.0.1", 0))) as reserved:
        port = reserved.getsockname()[1]
    client = ours.client(f"127.0.0.1:{port}")
    asking = asyncio.create_task(asked(ours, client, "t", seconds=PATIENCE))
    await until(lambda: "trying on" in caplog.text)
    await asyncio.to_thread(stays, lambda: caplog.text.count("trying on") == 1, 0.5, "it says so again")
    async with broker:
        server = await asyncio.start_server(partial(broker._serve, 0), "127.0.0.1", port)
        broker._ports[0] = port
        await asking
        server.close()
    said = [record.getMessage() for record in caplog.records if record.name.startswith("streams.kafka.wire")]
    assert [("trying on" in text, f"broker at 127.0.0.1:{port} answers" in text) for text in said] == [
        (True, False),
        (False, True),
    ]
    assert "127.0.0.1" in said[0]


async def test_a_deadline_is_kept_and_named(ours: Ours) -> None:
    client = ours.client(NOBODY)
    before = time.monotonic()
    with pytest.raises(BrokerUnavailable, match=f"no broker answers at {NOBODY}.*check the address"):
        await asked(ours, client, seconds=0.3)
    assert 0.2 < time.monotonic() - before < PATIENCE / 3


@pytest.mark.parametrize("said", [GONE, GARBAGE, TORN, TWICE, SHORT, WEB, 5, 9])
async def test_what_goes_by_is_asked_again(ours: Ours, said: Any) -> None:
    async with ScriptedBroker(brokers=2) as broker:
        client = ours.client(broker.bootstrap_servers)
        await asked(ours, client, "t")
        broker.answer("Metadata", said)
        before = time.monotonic()
        assert (await asked(ours, client, "t")).topics[0].name == "t"
        assert time.monotonic() - before < PATIENCE / 3


REFUSED = [
    ("Metadata", Code.UNKNOWN_TOPIC_OR_PARTITION, TopicError, "does not exist"),
    ("Metadata", Code.TOPIC_AUTHORIZATION_FAILED, ConfigError, "not authorised"),
    ("Metadata", Code.INVALID_TOPIC_EXCEPTION, TopicError, "does not exist"),
    ("Metadata", Code.UNSUPPORTED_VERSION, ConfigError, "Kafka 3.0 or newer"),
    ("Metadata", Code.SASL_AUTHENTICATION_FAILED, ConfigError, "refuses the credentials"),
    ("Metadata", Code.LEADER_NOT_AVAILABLE, BrokerUnavailable, "no answer in time, the last was"),
]


@pytest.mark.parametrize(("api", "code", "error", "said"), REFUSED, ids=[code.name for _, code, _, _ in REFUSED])
async def test_each_refusal_has_its_error(ours: Ours, api: str, code: Code, error: type[Exception], said: str) -> None:
    async with ScriptedBroker() as broker:
        client = ours.client(broker.bootstrap_servers)
        await asked(ours, client)
        broker.answer(api, *[int(code)] * 500)
        # Some are retried until their time is over; a busy machine needs some for a first answer.
        seconds = 3.0 if is_retriable(code) else PATIENCE
        with pytest.raises(error, match=f"asking for topics at {broker.bootstrap_servers}: .*{said}"):
            await asked(ours, client, "t", seconds=seconds)


async def test_a_missing_right_is_named_with_its_command(ours: Ours) -> None:
    async with ScriptedBroker() as broker:
        client = ours.client(broker.bootstrap_servers)
        deadline = time.monotonic() + PATIENCE
        broker.answer("FindCoordinator", int(Code.GROUP_AUTHORIZATION_FAILED))
        attempt = partial(client.coordinator, GROUP, "g", deadline)
        with pytest.raises(ConfigError, match="needs Read on group g: kafka-acls"):
            await asyncio.to_thread(client.ask, "asking", deadline, attempt, needed=[on_group("Read", "g")])


async def test_the_coordinator_is_looked_for_each_time(ours: Ours) -> None:
    async with ScriptedBroker(brokers=2) as broker:
        client = ours.client(broker.bootstrap_servers)
        deadline = time.monotonic() + PATIENCE
        for number in (0, 1, 0):
            broker.group_coordinator = number
            broker.answer(
                "FindCoordinator", int(Code.COORDINATOR_NOT_AVAILABLE), int(Code.COORDINATOR_LOAD_IN_PROGRESS)
            )
            attempt = partial(client.coordinator, GROUP, "g", deadline)
            assert await asyncio.to_thread(client.ask, "asking", deadline, attempt) == number


async def test_a_broker_that_is_gone_is_left_for_the_others(ours: Ours) -> None:
    async with ScriptedBroker(brokers=3) as broker:
        client = ours.client(broker.bootstrap_servers)
        await asked(ours, client, "t")
        for number in (0, 1):
            broker.kill(number)
            before = time.monotonic()
            answer = await asked(ours, client, "t")
            assert {entry.leader_id for entry in answer.topics[0].partitions}.isdisjoint(range(number + 1))
            assert time.monotonic() - before < PATIENCE / 3


async def test_a_lost_connection_is_made_again_soon(ours: Ours) -> None:
    async with ScriptedBroker() as broker:
        client = ours.client(broker.bootstrap_servers)
        await asked(ours, client, "t")
        for _ in range(3):
            for _, writer in broker._writers:
                writer.close()
            before = time.monotonic()
            await asked(ours, client, "t")
            assert time.monotonic() - before < PATIENCE / 3


@pytest.mark.parametrize("moment", ["nothing answers", "an answer is late", "it is closed already"])
async def test_calls_end_with_the_client(ours: Ours, moment: str) -> None:
    async with ScriptedBroker() as broker:
        client = ours.client(NOBODY if moment == "nothing answers" else broker.bootstrap_servers)
        if moment == "an answer is late":
            await asked(ours, client)
            broker.answer("Metadata", MUTE)
        elif moment == "it is closed already":
            client.close(2.0)
        asking = asyncio.create_task(asked(ours, client, "t", seconds=PATIENCE))
        if moment == "an answer is late":
            await until(lambda: not broker.script["Metadata"])
        else:
            await until(lambda: client._asking or asking.done())
        before = time.monotonic()
        await asyncio.to_thread(client.close, 2.0)
        with pytest.raises(BrokerUnavailable, match="closed"):
            await asking
        assert time.monotonic() - before < PATIENCE / 3
        assert not client.post(lambda: None)
        client.close(2.0)


async def test_wrong_addresses_are_refused(ours: Ours) -> None:
    for wrong in ("", "broker", "broker:0", "a:1,,b:2"):
        with pytest.raises(ConfigError, match="bootstrap_servers"):
            ours.client(wrong)


async def test_no_secret_is_shown(ours: Ours) -> None:
    who = {"sasl.mechanism": "PLAIN", "sasl.username": "u", "sasl.password": SECRET}
    client = ours.client(NOBODY, {"security.protocol": "sasl_plaintext", **who})
    with pytest.raises(StreamsError) as failed:
        await asked(ours, client, seconds=0.1)
    assert SECRET not in repr(client) + str(failed.value) + str(vars(client))
