"""Requests of a global change log about its topic: whether it exists, is still the same one, and where its logs end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import anyio

from streams.core.checkpoints import TOMBSTONES_MS
from streams.errors import BrokerUnavailable, OffsetError, Stopped, StreamsError, TopicError
from streams.kafka.questions.admin import TopicAdmin, Watermarks
from streams.kafka.reading.fetch_session import FOLLOWING
from streams.kafka.reading.fetching import LogFetcher
from streams.kafka.settings import ClientSettings
from streams.runtime import ports
from streams.runtime.bridge import Worker
from streams.runtime.reading.log_follower import Tail

_log = logging.getLogger(__name__)

REQUEST_SECONDS = 5.0
"""A request without an answer is repeated after so many seconds."""
SHORTEST_LIFE_MS = 1_000
"""Tombstones have to live for so many milliseconds, at least: below that a reader could not prove often enough that it
has all of them."""
_PAUSE_SECONDS = 0.25
"""Two tries of a request are so many seconds apart."""

T = TypeVar("T")


def loop_time() -> float:
    """Return the time of the running loop, in seconds; virtual in a simulation."""
    return asyncio.get_running_loop().time()


class LogConnections:
    """Builds the clients of a global change log: a thread for requests, the requests, and the reading thread. That may
    take milliseconds, and does no I/O."""

    def __init__(self, settings: ClientSettings, topic: str) -> None:
        self.addresses = settings.bootstrap_servers
        self._settings = settings
        self._topic = topic

    def worker(self) -> ports.Blocking:
        return Worker("kes-topic-questions")

    def topics(self) -> ports.TopicRequests:
        return TopicAdmin(self._settings)

    def tail(self) -> ports.LogTail:
        return Tail(lambda: LogFetcher(self._settings, self._topic, FOLLOWING))


class FollowedTopic:
    """One topic, as it was when it was found. On the loop; requests run on a thread of its own, and raise ``Stopped``
    after ``close``."""

    def __init__(self, topic: str, connections: ports.LogClients) -> None:
        self.topic = topic
        self.partitions = 0
        self.topic_id = ""
        self._connections = connections
        self._worker = connections.worker()
        self._clients: list[ports.TopicRequests] = []
        self._requests: set[anyio.CancelScope] = set()
        self._silent: set[int] = set()  # partitions that did not answer the last time
        self._closed = False

    async def find(self, seconds: float) -> None:
        """Wait until the topic exists. Raises ``TopicError`` if it never does, ``BrokerUnavailable`` without an
        answer."""
        # The clients are built on the thread, too: that may take milliseconds, in which the loop would stand still.
        self._clients.append(await self._request(self._connections.topics))
        deadline = loop_time() + seconds
        while (found := await self._identity(deadline)) is None:
            if loop_time() >= deadline:
                raise TopicError(
                    f"topic {self.topic} does not exist at {self._connections.addresses} (waited {seconds:g} s for "
                    "it): create it, or check the name"
                )
            await anyio.sleep(_PAUSE_SECONDS)
        self.topic_id, self.partitions = found

    async def loss(self, deadline: float) -> StreamsError | None:
        """Return an error if the topic is not the one any more that was found. Otherwise set ``partitions`` to its
        number now. Raises the error of the request."""
        found = await self._identity(deadline)
        if found is None:  # requested twice: a broker that has just started may not know everything
            await anyio.sleep(_PAUSE_SECONDS)
            found = await self._identity(deadline)
        if found is None:
            return TopicError(f"topic {self.topic} does not exist any more at {self._connections.addresses}")
        identity, partitions = found
        if identity != self.topic_id:
            return OffsetError(
                f"topic {self.topic} was deleted and created again (its id was {self.topic_id}, and is {identity}): "
                "all that was received came from the old one. Start a new global change log"
            )
        if partitions > self.partitions:
            _log.warning(
                "%s has %d partitions now, %d before: the new ones are read too; keys that are written to another "
                "partition from now on stay in their old one until they are deleted there",
                self.topic,
                partitions,
                self.partitions,
            )
            self.partitions = partitions
        return None

    async def ends(self, deadline: float) -> Mapping[int, Watermarks]:
        """Return start, last stable offset and high watermark of all partitions."""
        return await self._repeat_until(
            deadline, lambda seconds: self._clients[0].watermarks(self.topic, None, seconds)
        )

    async def stable_ends(self) -> dict[int, int]:
        """Return the last stable offsets of the partitions that answer soon: one without a leader hides no other."""
        watermarks = self._clients[0].watermarks
        # One request for all partitions fails if one of them has no leader. Only then each is requested by itself.
        with contextlib.suppress(BrokerUnavailable):
            marks = await self._request(watermarks, self.topic, None, REQUEST_SECONDS)
            return {number: mark.stable for number, mark in marks.items()}
        found: dict[int, int] = {}
        deadline = loop_time() + REQUEST_SECONDS
        for number in sorted(range(self.partitions), key=self._silent.__contains__):  # the silent ones last
            if loop_time() > deadline:
                break
            self._silent.add(number)
            with contextlib.suppress(BrokerUnavailable):
                found[number] = (await self._request(watermarks, self.topic, [number], 1.0))[number].stable
                self._silent.discard(number)
        return found

    def why_not_compacted(self, settings: Mapping[str, str]) -> str:
        """Return what is wrong with a topic whose records are deleted by age or size: it has more than a view of it
        will have later. Empty if it is compacted, or if that cannot be seen: a reader needs no right to see settings.
        """
        policy = settings.get("cleanup.policy", "")
        if not policy or "compact" in policy:
            return ""
        return (
            f"{self.topic} has cleanup.policy={policy}, not compact: keys that retention deletes are still here, and "
            "missing wherever the topic is read from the start later"
        )

    def tombstones_seconds(self, settings: Mapping[str, str]) -> float:
        """Return for how long the topic keeps tombstones: infinity if it is not compacted, a day (Kafka's default)
        where its settings cannot be seen. Raises ``TopicError`` if no reader can be sure to see them."""
        if "compact" not in settings.get("cleanup.policy", "compact"):
            return math.inf
        life_ms = int(settings.get("delete.retention.ms", TOMBSTONES_MS))
        if life_ms < SHORTEST_LIFE_MS:
            raise TopicError(
                f"{self.topic} keeps tombstones for {life_ms} ms (delete.retention.ms): a reader cannot be sure to see "
                f"each deletion in time. Set it to {SHORTEST_LIFE_MS} at least; Kafka's default is a day"
            )
        return life_ms / 1000

    async def settings(self) -> Mapping[str, str]:
        """Return the settings of the topic; none if they cannot be seen."""
        try:
            found = await self._request(lambda: self._clients[0].describe([self.topic], REQUEST_SECONDS))
        except Stopped:
            raise
        except StreamsError as error:
            _log.debug("%s: its settings cannot be looked at: %s", self.topic, error)
            return {}
        description = found.get(self.topic)
        return {} if description is None else description.configs

    def close(self) -> None:
        """End the thread as soon as it has its answer; tasks that wait for one get ``Stopped``."""
        if not self._closed:
            self._closed = True
            self._worker.post(self._clients.clear)  # there, since the end of a client takes a moment
            self._worker.abandon()
            for scope in self._requests:
                scope.cancel()

    async def _identity(self, deadline: float) -> tuple[str, int] | None:
        return await self._repeat_until(deadline, lambda seconds: self._clients[0].identity(self.topic, seconds))

    async def _repeat_until(self, deadline: float, request: Callable[[float], T]) -> T:
        """Repeat a request without an answer, until the deadline."""
        while True:
            left = deadline - loop_time()
            try:
                # There is one try at least, also if no time is left.
                return await self._request(request, min(max(left, 0.1), REQUEST_SECONDS))
            except BrokerUnavailable:
                # This try had the rest of the time.
                if left <= REQUEST_SECONDS:
                    raise
            await anyio.sleep(_PAUSE_SECONDS)

    async def _request(self, request: Callable[..., T], *args: Any) -> T:
        if self._closed:
            raise Stopped(f"the global change log of {self.topic} is stopped")
        with anyio.CancelScope() as scope:
            self._requests.add(scope)
            try:
                return await self._worker.call(request, *args)
            finally:
                self._requests.discard(scope)
        # Only ``close`` cancels this scope: a cancellation from outside has left it already.
        raise Stopped(f"the global change log of {self.topic} is stopped")
