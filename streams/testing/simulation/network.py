"""The connections of one simulated process to the nodes of the broker, for clients that speak Kafka's protocol.

The client's own code, from frames up, runs over transports of this module. A node handles one request of a connection
at a time, in order. Requests and answers take their time, are lost with their connection or without a word, and may be
done long after their connection is gone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

from streams.runtime.changelog import RELEASE_KEY
from streams.testing.simulation.faults import Strike
from streams.testing.simulation.process import Process
from streams.testing.simulation.virtual_time import ORDERED, elapse
from streams.testing.simulation.wire_broker import FIRST_PORT, Answer, WireBroker
from streams.testing.simulation.wire_requests import POINTS, Request

WIRE_POINTS: Final = tuple(f"{name}.{when}" for name in POINTS for when in ("before", "after"))
"""Points of a process around each request: before it is written, and when the broker has done it."""


class SimNetwork:
    """The network as one process sees it. ``addresses``: of all nodes."""

    def __init__(self, process: Process, wire: WireBroker) -> None:
        self.process, self.wire = process, wire
        self.host = f"simulated{next(wire.hosts)}"
        self.addresses = ",".join(f"{self.host}:{FIRST_PORT + node}" for node in range(wire.nodes))
        process.loop.hosts[self.host] = self.connect

    async def connect(self, factory: Callable[[], Any], port: int) -> tuple[SimTransport, Any]:
        """Connect to a node. Raises ``ConnectionRefusedError`` during an outage."""
        for seconds in self.process.travel_times():
            await elapse(seconds)
            if self.process.loop.time() < self.process.broker.down_until and self.process.rng.random() < 0.5:
                raise ConnectionRefusedError(111, "Connection refused")
        protocol = factory()
        transport = SimTransport(self, port - FIRST_PORT, protocol)
        protocol.connection_made(transport)
        return transport, protocol


class SimTransport(asyncio.Transport):
    """One connection. ``is_closed``: by the client, which gets nothing any more; ``is_cut``: by the broker, or on the
    way, so that nothing arrives any more. ``is_stuck``: nothing comes back, without an error."""

    def __init__(self, network: SimNetwork, node: int, protocol: Any) -> None:
        super().__init__()
        self._network, self._process, self._node, self._protocol = network, network.process, node, protocol
        self._loop, self._faults = network.process.loop, network.process.faults
        self._arrives = self._returns = 0.0
        self._departing: deque[tuple[Request, Strike | None]] = deque()
        self._behind: deque[tuple[Request, Strike | None]] = deque()
        self._is_waiting = False  # at the node, for an answer that comes later; what arrives is behind it
        self.is_closed = self.is_cut = self.is_stuck = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return what takes the options of a socket."""
        return _Socket()

    def abort(self) -> None:
        """Close at once. What is on its way may arrive all the same."""
        self.is_closed = True

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        """Send requests, each in a frame."""
        written, at = b"".join(list_of_data), 0
        while at < len(written):
            end = at + 4 + int.from_bytes(written[at : at + 4], "big")
            self._send(written[at + 4 : end])
            at = end

    def _send(self, frame: bytes) -> None:
        process = self._process
        if self._is_gone():
            return
        request = Request(frame)
        process.passes(f"{request.point}.before")
        if self._is_gone():
            return
        kind = request.kind
        share = self._faults.plan.marker_strikes.get(kind, 0.0) if self._releases(request) else 0.0
        self._departing.append((request, process.strike(kind, share)))
        if len(self._departing) == 1:
            self._depart()

    def _depart(self) -> None:
        """Send what was written; a frozen process does when it goes on."""
        process = self._process
        while self._departing and not self._is_gone():
            if (frozen := process.frozen()) > 0:
                self._loop.call_later(frozen, self._depart)
                return
            request, strike = self._departing.popleft()
            delay = self._faults.one_way()
            if strike is Strike.LATE:
                late = delay + process.rng.choice((0.02, 0.2, 1.0, 10.0)) * process.rng.random()
                self._loop.call_later(late, self._done, request, None)
                self._fail()
                continue
            self._arrives = max(self._arrives + ORDERED, self._loop.time() + delay)
            self._loop.call_at(self._arrives, self._arrive, request, strike)

    def _releases(self, request: Request) -> bool:
        """Check whether the request belongs to a transaction with a release marker."""
        if request.name == "Produce":
            batches = [part.records for topic in request.body.topic_data for part in topic.partition_data]
            return any(RELEASE_KEY in bytes(records) for records in batches)
        return request.kind in ("send", "commit") and self._network.wire.has_release(request.transactional_id)

    def _arrive(self, request: Request, strike: Strike | None) -> None:
        process = self._process
        if self._is_waiting:
            self._behind.append((request, strike))
            return
        if self.is_cut or self.is_stuck or (self.is_closed and process.rng.random() < 0.5):
            return
        if strike in (Strike.HANGS, Strike.REQUEST_LOST) or self._loop.time() < process.broker.down_until:
            self._fail(silent=strike is Strike.HANGS)
            return
        answer = self._done(request, strike)
        if isinstance(answer, bytes):
            self._send_back(answer, strike)
        else:
            self._is_waiting = True
            answer.add_done_callback(lambda done: self._came_late(done.result(), request, strike))

    def _came_late(self, answer: bytes, request: Request, strike: Strike | None) -> None:
        if not self._process.dead:
            self._process.passes(f"{request.point}.after")
        self._is_waiting = False
        self._send_back(answer, strike)
        while self._behind and not self._is_waiting:
            self._arrive(*self._behind.popleft())

    def _send_back(self, answer: bytes, strike: Strike | None) -> None:
        process = self._process
        if strike is Strike.REPLY_LOST:
            self._fail(silent=process.rng.random() < 0.5)
            return
        self._returns = max(self._returns + ORDERED, self._loop.time() + self._faults.one_way())
        self._loop.call_at(self._returns, self._reply, answer, strike is Strike.CUT)

    def _done(self, request: Request, strike: Strike | None) -> Answer:
        try:
            answer = self._network.wire.answer(self._node, self._network.host, request, strike)
        except Exception as error:  # in a callback, where nothing else would see it
            self._loop.give_up(f"the simulated broker is wrong: {error!r}")
            raise
        if isinstance(answer, bytes) and not self._process.dead:
            self._process.passes(f"{request.point}.after")
        return answer

    def _reply(self, answer: bytes, then_cut: bool) -> None:
        if self._is_away(self._reply, answer, then_cut) or self.is_cut:
            return
        self._protocol.data_received(answer)
        if then_cut:
            self._fail()

    def _fail(self, *, silent: bool = False) -> None:
        if silent:
            self.is_stuck = True
        elif not self.is_cut:
            self.is_cut = True
            self._loop.call_later(self._faults.one_way(), self._notify)

    def _notify(self) -> None:
        if not self._is_away(self._notify):
            self._protocol.connection_lost(None)

    def _is_gone(self) -> bool:
        return self._process.dead or self.is_closed

    def _is_away(self, step: Callable[..., None], *args: Any) -> bool:
        """Check whether the client is gone; a frozen process gets what has come when it goes on, in order."""
        if self._is_gone():
            return True
        frozen = self._process.frozen()
        if frozen <= 0:
            return False
        self._returns = max(self._returns + ORDERED, self._loop.time() + frozen)
        self._loop.call_at(self._returns, step, *args)
        return True


class _Socket:
    def setsockopt(self, *_: object) -> None:
        """Do nothing."""
