"""The client of a cluster, and a broker that does as it is told."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from functools import partial
from typing import Any

import pytest

from streams.errors import BrokerUnavailable, ConfigError, StreamsError, TopicError
from streams.kafka.permissions import on_group
from streams.kafka.wire import client as client_module
from streams.kafka.wire import lines
from streams.kafka.wire.client import GROUP, WireClient
from streams.kafka.wire.codes import Code, raise_for
from streams.kafka.wire.schemas.find_coordinator import FindCoordinatorRequest
from streams.kafka.wire.schemas.list_transactions import ListTransactionsRequest
from streams.kafka.wire.schemas.metadata import MetadataRequest
from streams.kafka.wire.security import Security
from tests.unit.scripted_broker import GARBAGE, GONE, MUTE, SHORT, TORN, TWICE, WEB, ScriptedBroker
from tests.unit.test_forks import refused_in_a_child
from tests.unit.waiting import PATIENCE, until, wait_until

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]

NOBODY = "127.0.0.1:1"
SECRET = "planted-secret"


class Ours:
    """How our client is made and asked. ``made`` are closed at the end of a test."""

    def __init__(self) -> None:
        self.made: list[Any] = []

    def client(self, servers: str, settings: dict[str, Any] | None = None) -> Any:
        client = WireClient(servers, "me", Security.of(settings or {}))
        self.made.append(client)
        client.start()
        return client

    def topics(self, *names: str) -> Any:
        named = [MetadataRequest.MetadataRequestTopic(name=name) for name in names]
        return MetadataRequest(topics=named, allow_auto_topic_creation=False)


@pytest.fixture
def ours() -> Iterator[Ours]:
    made = Ours()
    yield made
    for client in made.made:
        client.close(2.0)


async def asked(
    ours: Ours, client: Any, *topics: str, seconds: float = 20.0, node: int | None = None, **options: Any
) -> Any:
    """The metadata of topics, asked for on a thread."""
    deadline = time.monotonic() + seconds

    async def attempt() -> Any:
        answer = await client.send(ours.topics(*topics), node, deadline)
        for topic in answer.topics:
            raise_for(topic.error_code)
        return answer

    return await asyncio.to_thread(client.ask, "asking for topics", deadline, attempt, **options)


@asynccontextmanager
async def frozen() -> AsyncIterator[str]:
    """The address of a broker that stands still: the system takes connections for it, and nothing answers."""
    with socket.create_server((("127.0.0.1"), 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


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
    await asyncio.sleep(0.5)  # several tries more
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


@pytest.mark.parametrize("quiet", [True, False])
async def test_a_deadline_is_kept_and_named(ours: Ours, quiet: bool) -> None:
    client = ours.client(NOBODY)
    before = time.monotonic()
    with pytest.raises(BrokerUnavailable, match=f"no broker answers at {NOBODY}.*check the address"):
        await asked(ours, client, seconds=0.3, quiet=quiet)
    assert 0.2 < time.monotonic() - before < 2.0


@pytest.mark.parametrize("said", [GONE, GARBAGE, TORN, TWICE, SHORT, WEB, 5, 9])
async def test_what_goes_by_is_asked_again(ours: Ours, said: Any) -> None:
    async with ScriptedBroker(brokers=2) as broker:
        client = ours.client(broker.bootstrap_servers)
        await asked(ours, client, "t")
        broker.answer("Metadata", said)
        before = time.monotonic()
        assert (await asked(ours, client, "t")).topics[0].name == "t"
        assert time.monotonic() - before < (5.0 if type(ours) is Ours else PATIENCE)


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
        with pytest.raises(error, match=f"asking for topics at {broker.bootstrap_servers}: .*{said}"):
            await asked(ours, client, "t", seconds=0.5)


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
            assert time.monotonic() - before < 5.0


async def test_a_lost_connection_is_made_again_soon(ours: Ours) -> None:
    async with ScriptedBroker() as broker:
        client = ours.client(broker.bootstrap_servers)
        await asked(ours, client, "t")
        for _ in range(3):
            for _, writer in broker._writers:
                writer.close()
            before = time.monotonic()
            await asked(ours, client, "t")
            assert time.monotonic() - before < 2.0


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
        await asyncio.sleep(0.05)
        before = time.monotonic()
        await asyncio.to_thread(client.close, 2.0)
        with pytest.raises(BrokerUnavailable, match="closed"):
            await asking
        assert time.monotonic() - before < 1.5
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


async def test_a_frozen_broker_in_the_list_costs_half_a_second(ours: Ours) -> None:
    async with frozen() as still, frozen() as another, ScriptedBroker() as broker:
        client = ours.client(f"{still},{another},{broker.bootstrap_servers}")
        before = time.monotonic()
        await asked(ours, client, "t")
        assert time.monotonic() - before < 2 * lines.NEXT_SECONDS + 1.0
        before = time.monotonic()
        await asked(ours, client, "t")
        assert time.monotonic() - before < lines.NEXT_SECONDS


async def test_a_broker_that_freezes_is_left_for_the_others(ours: Ours) -> None:
    async with ScriptedBroker(brokers=2) as broker:
        client = ours.client(broker.bootstrap_servers)
        await asked(ours, client, "t")
        deadline = time.monotonic() + PATIENCE
        broker.answer("Metadata", MUTE)

        async def attempt() -> Any:
            return await client.send(ours.topics("t"), None, min(deadline, time.monotonic() + 0.3))

        before = time.monotonic()
        await asyncio.to_thread(client.ask, "asking", deadline, attempt)
        assert time.monotonic() - before < 3.0


async def test_a_caller_that_gives_up_ends_nothing_for_the_others(ours: Ours) -> None:
    """Its answer, when it comes, is nobody's; those behind it get their own."""
    async with ScriptedBroker() as broker:
        client = ours.client(broker.bootstrap_servers)
        await asked(ours, client)

        async def both() -> Any:
            loop = asyncio.get_running_loop()
            hasty = client.spawn(client.send(ours.topics("slow"), 0, loop.time() + 0.1))
            patient = client.spawn(client.send(ours.topics("t"), 0, loop.time() + PATIENCE))
            await asyncio.wait([hasty])
            return hasty.exception(), await patient

        def late(answer: Any) -> None:
            held.append(time.monotonic())
            time.sleep(0.3)  # the broker's loop: a broker handles one request of a connection at a time

        held: list[float] = []
        broker.answer("Metadata", late)
        failure, answer = await asyncio.to_thread(client.call, both, time.monotonic() + PATIENCE)
        assert (failure.code, held != []) == ("_TIMED_OUT", True)
        assert answer.topics[0].name == "t"


async def test_a_connection_without_an_answer_is_taken_for_dead(ours: Ours) -> None:
    async with ScriptedBroker() as broker:
        client = ours.client(broker.bootstrap_servers)
        await asked(ours, client)
        broker.answer("Metadata", MUTE)
        deadline = time.monotonic() + PATIENCE
        send = partial(client.send, ours.topics("t"), 0, deadline, patience_seconds=0.2)
        answer = await asyncio.to_thread(client.ask, "asking", deadline, send)
        assert answer.topics[0].name == "t"
        assert time.monotonic() < deadline - PATIENCE / 2


async def test_requests_of_another_purpose_do_not_wait_behind_a_long_one(ours: Ours) -> None:
    async with ScriptedBroker() as broker:
        client = ours.client(broker.bootstrap_servers)
        await asked(ours, client)
        broker.answer("FindCoordinator", MUTE)
        deadline = time.monotonic() + PATIENCE

        async def both() -> Any:
            request = FindCoordinatorRequest(key="g", coordinator_keys=["g"])
            client.spawn(client.send(request, 0, deadline, purpose="group"))
            await asyncio.sleep(0.1)
            return await client.send(ours.topics("t"), 0, deadline)

        answer = await asyncio.to_thread(client.call, both, deadline)
        assert answer.topics[0].name == "t"


@pytest.mark.parametrize(("throttle_ms", "seconds"), [(300, 0.3), (3_600_000, 0.5)])
async def test_throttle_times_are_honoured_and_bounded(
    ours: Ours, throttle_ms: int, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "MOST_THROTTLE_SECONDS", 0.5)
    async with ScriptedBroker() as broker:
        client = ours.client(broker.bootstrap_servers)
        await asked(ours, client)
        broker.answer("Metadata", lambda answer: setattr(answer, "throttle_time_ms", throttle_ms))
        await asked(ours, client, "t")
        before = time.monotonic()
        await asked(ours, client, "t")
        assert seconds - 0.1 < time.monotonic() - before < seconds + 1.0


async def test_a_session_that_ends_gets_a_new_connection_and_what_is_under_way_its_answer(ours: Ours) -> None:
    async with ScriptedBroker() as broker:
        client = ours.client(broker.bootstrap_servers)
        await asked(ours, client)

        async def across() -> Any:
            loop = asyncio.get_running_loop()
            line = client._lines.get(client.brokers()[0])
            first = await line.open()
            under_way = client.spawn(client.send(ours.topics("t"), 0, loop.time() + PATIENCE))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            first.expires_at = loop.time()
            second = await line.open()
            return (first is second, first.lost is None), (await under_way).topics[0].name, second.lost

        broker.answer("Metadata", TORN)
        said = await asyncio.to_thread(client.call, across, time.monotonic() + PATIENCE)
        assert said[0][0] is False
        assert said[1:] == ("t", None)
        await until(lambda: "ApiVersions" in broker.asked("ApiVersions")[1:])


async def test_answers_may_be_large_but_not_any_size(ours: Ours, monkeypatch: pytest.MonkeyPatch) -> None:
    def larger(answer: Any) -> None:
        answer.cluster_id = None
        answer.topics[0].partitions[0].replica_nodes = [7] * (20_000_000 // 4)

    async with ScriptedBroker() as broker:
        client = ours.client(broker.bootstrap_servers)
        await asked(ours, client)
        broker.answer("Metadata", larger)
        answer = await asked(ours, client, "t")
        assert len(answer.topics[0].partitions[0].replica_nodes) == 5_000_000


async def test_a_broker_that_is_too_old_is_named(ours: Ours) -> None:
    async with ScriptedBroker() as broker:
        client = ours.client(broker.bootstrap_servers)
        deadline = time.monotonic() + PATIENCE
        for request, said in [(ListTransactionsRequest(), "ListTransactions"), (ours.topics("t"), "in version 13")]:
            send = partial(client.send, request, None, deadline, least=request.LAST_VERSION)
            with pytest.raises(ConfigError, match=f"too old, Kafka 3.0 or newer is needed.*{said}"):
                await asyncio.to_thread(client.ask, "asking", deadline, send)

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readexactly(12)
        writer.write(struct.pack(">iihi", 10, int.from_bytes(head[8:12], "big"), Code.UNSUPPORTED_VERSION, 0))
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    client = ours.client(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    with pytest.raises(ConfigError, match=r"too old, Kafka 3\.0"):
        await asked(ours, client)
    server.close()


async def test_one_thread_serves_all_clients_of_a_process_and_ends_with_the_last(ours: Ours) -> None:
    def threads() -> int:
        return sum(thread.name == "kes-group" for thread in threading.enumerate())

    before = threads()
    one, other = ours.client(NOBODY), ours.client(NOBODY)
    assert threads() == 1
    one.start()
    one.close(2.0)
    one.close(2.0)
    assert other.call(answers, time.monotonic() + PATIENCE) == "done"
    other.close(2.0)
    assert threads() == before
    third = ours.client(NOBODY)
    assert third.call(answers, time.monotonic() + PATIENCE) == "done"


async def answers() -> str:
    return "done"


async def test_a_blocking_call_on_its_own_loop_is_refused_and_close_is_not(ours: Ours) -> None:
    client, other = ours.client(NOBODY), ours.client(NOBODY)

    async def wrong() -> Any:
        with pytest.raises(RuntimeError, match="await the coroutine"):
            client.call(answers, time.monotonic() + PATIENCE)
        client.close(5.0)
        return "closed"

    before = time.monotonic()
    assert other.call(wrong, before + PATIENCE) == "closed"
    assert time.monotonic() - before < 2.0


async def test_a_thread_that_ends_by_an_error_is_reported(ours: Ours, caplog: pytest.LogCaptureFixture) -> None:
    client, crashed = ours.client(NOBODY), []
    client.on_crash = crashed.append

    def fail() -> None:
        raise SystemExit("an error")

    waiting = asyncio.create_task(asked(ours, client, seconds=PATIENCE))
    await asyncio.sleep(0.05)
    client.post(fail)
    with pytest.raises(BrokerUnavailable, match=r"thread .* failed: SystemExit"):
        await waiting
    assert isinstance(crashed[0], SystemExit)
    assert "failed" in caplog.text
    with pytest.raises(BrokerUnavailable, match="closed"):
        await asked(ours, client)
    assert ours.client(NOBODY).call(answers, time.monotonic() + PATIENCE) == "done"


async def test_an_error_of_a_step_is_logged_and_ends_nothing(ours: Ours, caplog: pytest.LogCaptureFixture) -> None:
    client = ours.client(NOBODY)

    async def fail() -> None:
        raise ValueError("a step")

    client.post(fail)
    assert client.call(answers, time.monotonic() + PATIENCE) == "done"
    wait_until(lambda: "a step" in caplog.text)


async def test_a_client_on_a_loop_that_is_given_has_no_thread() -> None:
    before = {*threading.enumerate()}
    async with ScriptedBroker() as broker:
        client = WireClient(broker.bootstrap_servers, "me", loop=asyncio.get_running_loop())
        client.start()
        await client.connected(time.monotonic() + PATIENCE)
        assert client.brokers() == {0: ("127.0.0.1", broker._ports[0])}
        own = await client.connect(0, time.monotonic() + PATIENCE)
        waiting = client.spawn(client.connected())
        assert {*threading.enumerate()} - before == set()
        client.close(1.0)
        assert own.lost is not None
        await asyncio.wait([waiting])


async def test_a_child_of_the_process_is_told_that_it_has_no_thread(ours: Ours) -> None:
    client = ours.client(NOBODY)
    assert refused_in_a_child(lambda: client.call(answers, time.monotonic() + PATIENCE))

    def anew() -> None:
        other = WireClient(NOBODY, "me")
        other.start()
        assert other.call(answers, time.monotonic() + PATIENCE) == "done"
        other.close(1.0)
        client.close(1.0)
        client.call(answers, time.monotonic() + PATIENCE)

    assert refused_in_a_child(anew)
    assert client.call(answers, time.monotonic() + PATIENCE) == "done"


async def test_a_coordinator_that_has_moved_to_an_unknown_broker_is_found(ours: Ours) -> None:
    async with ScriptedBroker(brokers=2) as broker:
        client = ours.client(broker.bootstrap_servers)
        await asked(ours, client)
        deadline = time.monotonic() + PATIENCE
        client._brokers = {}
        send = partial(client.send, ours.topics("t"), 1, deadline)
        assert (await asyncio.to_thread(client.ask, "asking", deadline, send)).topics[0].name == "t"
        send = partial(client.send, ours.topics("t"), 9, deadline)
        with pytest.raises(BrokerUnavailable, match="no broker 9 is known"):
            await asyncio.to_thread(client.ask, "asking", time.monotonic() + 0.3, send)
