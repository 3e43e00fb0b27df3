"""What our client of a cluster does besides: frozen brokers, late answers, throttling, its thread and its loop."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from streams.errors import BrokerUnavailable, ConfigError
from streams.kafka.wire import lines
from streams.kafka.wire.client import WireClient
from streams.kafka.wire.codes import Code
from streams.kafka.wire.connection import CONNECT_SECONDS
from streams.kafka.wire.schemas.list_transactions import ListTransactionsRequest
from tests.unit.scripted_broker import MUTE, ScriptedBroker
from tests.unit.test_forks import refused_in_a_child
from tests.unit.waiting import PATIENCE, until, wait_until
from tests.unit.wire_client_kit import NOBODY, Ours, asked

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]


@pytest.fixture
def ours() -> Iterator[Ours]:
    made = Ours()
    yield made
    made.close()


@asynccontextmanager
async def frozen() -> AsyncIterator[str]:
    """The address of a broker that stands still: the system takes connections for it, and nothing answers."""
    with socket.create_server((("127.0.0.1"), 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


async def test_a_frozen_broker_in_the_list_costs_little(ours: Ours) -> None:
    async with frozen() as still, frozen() as another, ScriptedBroker() as broker:
        client = ours.client(f"{still},{another},{broker.bootstrap_servers}")
        before = time.monotonic()
        await asked(ours, client, "t")
        await asked(ours, client, "t")
        assert time.monotonic() - before < CONNECT_SECONDS


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
        assert time.monotonic() - before < PATIENCE / 2


async def test_a_caller_that_gives_up_ends_nothing_for_the_others(ours: Ours) -> None:
    """Its answer, when it comes, is nobody's; those behind it get their own."""
    async with ScriptedBroker() as broker:
        client = ours.client(broker.bootstrap_servers)
        await asked(ours, client)

        given_up, held = threading.Event(), []

        async def both() -> Any:
            loop = asyncio.get_running_loop()
            hasty = client.spawn(client.send(ours.topics("slow"), 0, loop.time() + 0.1))
            patient = client.spawn(client.send(ours.topics("t"), 0, loop.time() + PATIENCE))
            await asyncio.wait([hasty])
            given_up.set()
            return hasty.exception(), await patient

        # On the broker's loop: a broker handles one request of a connection at a time.
        broker.answer("Metadata", lambda _: held.append(given_up.wait(PATIENCE)))
        failure, answer = await asyncio.to_thread(client.call, both, time.monotonic() + PATIENCE)
        assert (failure.code, held) == ("_TIMED_OUT", [True])
        assert answer.topics[0].name == "t"


async def test_a_connection_without_an_answer_is_taken_for_dead(ours: Ours, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "REQUEST_SECONDS", 0.2)
    async with ScriptedBroker() as broker:
        client = ours.client(broker.bootstrap_servers)
        await asked(ours, client)
        broker.answer("Metadata", MUTE)
        deadline = time.monotonic() + PATIENCE
        send = partial(client.send, ours.topics("t"), 0, deadline)
        answer = await asyncio.to_thread(client.ask, "asking", deadline, send)
        assert answer.topics[0].name == "t"
        assert time.monotonic() < deadline - PATIENCE / 2


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
        assert seconds - 0.1 < time.monotonic() - before < PATIENCE / 2


async def test_a_session_that_ends_gets_a_new_connection_and_what_is_under_way_its_answer(ours: Ours) -> None:
    async with ScriptedBroker() as broker:
        client = ours.client(broker.bootstrap_servers)
        await asked(ours, client)

        retired = threading.Event()

        async def across() -> tuple[Any, bool]:
            loop = asyncio.get_running_loop()
            line = client._lines.get(client.brokers()[0])
            first = await line.open()
            under_way = client.spawn(client.send(ours.topics("t"), 0, loop.time() + PATIENCE))
            await until(lambda: first._waiting)
            first.expires_at = loop.time()
            opening = client.spawn(line.open())
            await until(lambda: first._is_retired)
            retired.set()
            second = await opening
            answer = await under_way
            await until(lambda: first.lost)
            return answer, first is not second and second.lost is None

        broker.answer("Metadata", lambda _: retired.wait(PATIENCE))
        answer, is_new = await asyncio.to_thread(client.call, across, time.monotonic() + PATIENCE)
        assert (answer.topics[0].name, is_new) == ("t", True)


async def test_answers_may_be_large_but_not_any_size(ours: Ours, monkeypatch: pytest.MonkeyPatch) -> None:
    def larger(answer: Any) -> None:
        answer.cluster_id = "c" * 20_000_000

    async with ScriptedBroker() as broker:
        client = ours.client(broker.bootstrap_servers)
        await asked(ours, client)
        broker.answer("Metadata", larger)
        answer = await asked(ours, client, "t")
        assert answer.cluster_id == "c" * 20_000_000


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


async def test_a_handler_that_computes_stops_no_heartbeats(ours: Ours) -> None:
    """It holds the loop of the program; that of members is on a thread of its own."""
    client, beats = ours.client(NOBODY), list[float]()

    async def beat() -> None:
        while True:
            beats.append(time.monotonic())
            await asyncio.sleep(0.01)

    client.start()
    client.post(beat)
    deadline = time.monotonic() + PATIENCE
    while len(beats) < 20:
        assert time.monotonic() < deadline, beats
        sum(range(1000))
    client.close(2.0)


async def test_a_blocking_call_on_its_own_loop_is_refused_and_close_is_not(ours: Ours) -> None:
    client, other = ours.client(NOBODY), ours.client(NOBODY)

    async def wrong() -> Any:
        with pytest.raises(RuntimeError, match="await the coroutine"):
            client.call(answers, time.monotonic() + PATIENCE)
        client.close(PATIENCE)
        return "closed"

    before = time.monotonic()
    assert other.call(wrong, before + PATIENCE) == "closed"
    assert time.monotonic() - before < PATIENCE / 3


async def test_a_thread_that_ends_by_an_error_is_reported(ours: Ours, caplog: pytest.LogCaptureFixture) -> None:
    client = ours.client(NOBODY)
    crashed: list[BaseException] = []
    client.on_crash = crashed.append

    def fail() -> None:
        raise SystemExit("an error")

    waiting = asyncio.create_task(asked(ours, client, seconds=PATIENCE))
    await until(lambda: client._asking)
    client.post(fail)
    with pytest.raises(BrokerUnavailable, match=r"thread .* failed: SystemExit"):
        await waiting
    assert isinstance(crashed[0], SystemExit)
    assert "failed" in caplog.text
    with pytest.raises(BrokerUnavailable, match="closed"):
        await asked(ours, client)
    assert ours.client(NOBODY).call(answers, time.monotonic() + PATIENCE) == "done"
    client.start()
    assert client.call(answers, time.monotonic() + PATIENCE) == "done"


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
