"""Questions for the ends of logs that nothing waits for."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Final

from streams.errors import BrokerUnavailable
from streams.kafka.reading.record_batches import FetchedBatches
from streams.kafka.settings import ClientSettings
from streams.kafka.wire.client import WireClient
from streams.kafka.wire.codes import raise_for
from streams.kafka.wire.security import Security
from streams.kafka.wire.topic_questions import LATEST, fetch, leader_of, list_offsets, metadata, only

_CLOSE_SECONDS: Final = 1.0
"""Seconds for the end of the connections."""
_TAIL_BYTES: Final = 64 << 10
"""Bytes of one look at what is behind a position."""


class LogEnds:
    """Looks up where the committed records of partitions end. One thread; the first question connects."""

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._client: WireClient | None = None

    def ask(self, topic: str, partition: int, timeout_seconds: float) -> Future[int]:
        """Ask for the end of a partition (LSO). The answer comes within this time: an offset, or an error of the
        broker (``BrokerRefusal``), of the connection (``LostConnection``) or of a client that is closed meanwhile."""
        return self._post(lambda client, deadline: _end_of(client, topic, partition, deadline), timeout_seconds)

    def ask_next(self, topic: str, partition: int, position: int, timeout_seconds: float) -> Future[int]:
        """Ask for the first offset from ``position`` on that has a committed record, or that of what was not looked at:
        a few markers are looked at, and not a log. The answer comes as that of ``ask``, and may be a ``StreamsError``
        of a log that is damaged, too."""
        return self._post(
            lambda client, deadline: _next_of(client, topic, partition, position, deadline), timeout_seconds
        )

    def _post(self, ask: Callable[[WireClient, float], Awaitable[int]], timeout_seconds: float) -> Future[int]:
        if self._client is None:
            settings = self._settings
            self._client = WireClient(
                settings.bootstrap_servers, f"{settings.client_id}.ends", Security.of(settings.overrides)
            )
            self._client.start()
        answer: Future[int] = Future()
        client = self._client

        async def work() -> None:
            try:
                answer.set_result(await ask(client, time.monotonic() + timeout_seconds))
            except Exception as error:
                answer.set_exception(error)

        if not client.post(work):
            answer.set_exception(BrokerUnavailable(f"the client of {client.addresses} has ended"))
        return answer

    def close(self) -> None:
        """Close the connections. Questions that wait get no answer any more."""
        client, self._client = self._client, None
        if client is not None:
            client.close(_CLOSE_SECONDS)


async def _end_of(client: WireClient, topic: str, partition: int, deadline: float) -> int:
    # Each time by the metadata of now: a leader that was known before an outage may be another one behind it.
    found = only((await metadata(client, [topic], deadline)).topics, f"topic {topic}")
    raise_for(found.error_code)
    ends = await list_offsets(client, {topic: {partition: LATEST}}, leader_of(found, partition), deadline, stable=True)
    return ends[topic][partition]


async def _next_of(client: WireClient, topic: str, partition: int, position: int, deadline: float) -> int:
    found = only((await metadata(client, [topic], deadline)).topics, f"topic {topic}")
    raise_for(found.error_code)
    data = await fetch(client, found, partition, position, _TAIL_BYTES, deadline, stable=True)
    aborted = [(one.producer_id, one.first_offset) for one in data.aborted_transactions or ()]
    batches = FetchedBatches(topic, partition, position, data.records or b"", aborted)
    while not batches.is_done:
        if records := batches.take(1):
            return records[0].offset
    return batches.position
