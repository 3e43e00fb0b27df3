"""Answers that come later, on the connections of the simulated network."""

from __future__ import annotations

import asyncio
import random
from typing import Any, cast

import pytest

from streams.kafka.wire.connection import LostConnection
from streams.kafka.wire.lines import REQUEST_SECONDS, Line
from streams.kafka.wire.schemas.heartbeat import HeartbeatRequest, HeartbeatResponse
from streams.kafka.wire.schemas.join_group import JoinGroupRequest
from streams.testing.simulation.faults import Conditions, Faults, Strike
from streams.testing.simulation.network import SimNetwork
from streams.testing.simulation.process import Process
from streams.testing.simulation.virtual_time import VirtualTimeLoop, elapse

from .wire_asker import GROUP, Asker, frame_of, run

HEARTBEAT = HeartbeatRequest(group_id=GROUP, generation_id=9, member_id="m", group_instance_id=None)


class Bare:
    """A process that has nothing but its network."""

    dead = False

    def __init__(self, asker: Asker, *strikes: Strike | None) -> None:
        self.loop, self.broker, self.rng = asker.loop, asker.broker, random.Random(0)
        self.faults = Faults(Conditions(), self.rng)
        self.passed: list[str] = []
        self._strikes = list(strikes)

    def travel_times(self) -> tuple[float, ...]:
        return (0.001,)

    def passes(self, point: str) -> None:
        self.passed.append(point)

    def strike(self, kind: str, share: float) -> Strike | None:
        return self._strikes.pop(0) if self._strikes else None

    def frozen(self) -> float:
        return 0.0


class Client(asyncio.Protocol):
    """Keeps the numbers of the answers that came, and whether the connection ended."""

    def __init__(self) -> None:
        self.came: list[int] = []
        self.is_lost = False

    def data_received(self, data: bytes) -> None:
        self.came.append(int.from_bytes(data[4:8], "big"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True


async def connected(asker: Asker, process: Bare) -> tuple[Any, Client]:
    network = SimNetwork(cast("Process", process), asker.wire)
    transport, client = await network.connect(Client, 9000)
    return transport, client


def send(transport: Any, request: Any, version: int, number: int) -> None:
    frame = frame_of(request, version, number)
    transport.writelines([len(frame).to_bytes(4, "big"), frame])


def joining(member: str) -> Any:
    kind = JoinGroupRequest
    return kind(
        group_id=GROUP,
        session_timeout_ms=10_000,
        rebalance_timeout_ms=5_000,
        member_id=member,
        group_instance_id=None,
        protocol_type="consumer",
        protocols=[kind.JoinGroupRequestProtocol(name="a", metadata=b"2")],
        reason=None,
    )


def test_a_join_holds_up_what_is_behind_it_on_its_connection_only() -> None:
    async def script(loop: VirtualTimeLoop) -> None:
        asker = Asker(loop)
        first = await asker.member()
        pending = await asker.join()
        process = Bare(asker)
        transport, client = await connected(asker, process)
        beside, other = await connected(asker, process)
        send(transport, joining(first.member_id), 9, 1)
        send(transport, HEARTBEAT, 4, 2)
        send(beside, HEARTBEAT, 4, 3)
        await elapse(1.0)
        assert (client.came, other.came) == ([], [3])
        await asker.leave(pending.member_id)
        await elapse(1.0)
        assert client.came == [1, 2]
        after = [point for point in process.passed if point.endswith(".after")]
        assert after == ["Heartbeat.after", "join.after", "Heartbeat.after"]

    run(script)


@pytest.mark.parametrize("strike", [Strike.REPLY_LOST, Strike.REQUEST_LOST, Strike.CUT, Strike.LATE, Strike.HANGS])
def test_a_join_may_be_lost_on_its_way(strike: Strike) -> None:
    """``CUT``: its answer comes; all others take their connection with them, or leave it silent."""

    async def script(loop: VirtualTimeLoop) -> None:
        asker = Asker(loop)
        first = await asker.member()
        pending = await asker.join()
        transport, client = await connected(asker, Bare(asker, strike))
        send(transport, joining(first.member_id), 9, 1)
        send(transport, HEARTBEAT, 4, 2)
        await elapse(8.0)
        assert asker.groups.group.generation == (1 if strike in (Strike.REQUEST_LOST, Strike.HANGS) else 2)
        assert not {pending.member_id} & asker.groups.group.members.keys()
        assert client.came == ([1] if strike is Strike.CUT else [])
        assert client.is_lost or strike in (Strike.HANGS, Strike.REPLY_LOST)

    run(script)


@pytest.mark.parametrize("pieces", [20, 0])
def test_a_connection_is_dead_when_nothing_comes_and_not_when_an_answer_takes_long(pieces: int) -> None:
    """A large answer of a broker that gives a few bytes a second; and a broker that says nothing."""

    class Connection(Bare):
        lost, expires_at, received_at = None, float("inf"), 0.0

        async def ask(self, request: Any, most: int, least: int) -> HeartbeatResponse:
            self._ended = self.loop.create_future()
            for _ in range(pieces):
                await elapse(REQUEST_SECONDS - 1.0)
                self.received_at = self.loop.time()
            return HeartbeatResponse() if pieces else await self._ended

        def close(self, reason: str) -> None:
            self._ended.set_exception(LostConnection(reason))

    async def script(loop: VirtualTimeLoop) -> None:
        connection = Connection(Asker(loop))

        async def connect(host: str, port: int) -> Any:
            return connection

        line = Line(("b", 1), connect)
        began = loop.time()
        if pieces:
            assert await line.ask(HEARTBEAT, 0, 4, float("inf")) == HeartbeatResponse()
            await elapse(2 * REQUEST_SECONDS)
            assert not connection._ended.done(), "it was closed behind its answer"
        else:
            with pytest.raises(LostConnection, match="no answer within 10 seconds"):
                await line.ask(HEARTBEAT, 0, 4, float("inf"))
            assert loop.time() - began < REQUEST_SECONDS + 1.0

    run(script)
