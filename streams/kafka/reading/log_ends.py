"""Questions for the ends of logs that nothing waits for."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Final

from streams.errors import BrokerUnavailable
from streams.kafka.settings import ClientSettings
from streams.kafka.wire.client import WireClient
from streams.kafka.wire.codes import raise_for
from streams.kafka.wire.security import Security
from streams.kafka.wire.topic_questions import LATEST, leader_of, list_offsets, metadata, only

_CLOSE_SECONDS: Final = 1.0
"""Seconds for the end of the connections."""


class LogEnds:
    """Looks up where the committed records of partitions end. One thread; the first question connects."""

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._client: WireClient | None = None

    def ask(self, topic: str, partition: int, timeout_seconds: float) -> Future[int]:
        """Ask for the end of a partition (LSO). The answer comes within this time: an offset, or an error of the
        broker (``BrokerRefusal``), of the connection (``LostConnection``) or of a client that is closed meanwhile."""
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
                answer.set_result(await _end_of(client, topic, partition, time.monotonic() + timeout_seconds))
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
