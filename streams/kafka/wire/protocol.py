"""The transaction protocol of a cluster: the versions of its requests, and their retries."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Final, NamedTuple

from streams.kafka.wire.connection import BrokerConnection
from streams.kafka.wire.messages import COMMIT_OFFSETS, END, PRODUCE

FIRST_PAUSE_SECONDS: Final = 0.001
LONGEST_PAUSE_SECONDS: Final = 0.05
"""Seconds between two tries of one request: the first pause, and the longest, each twice as long as the one before."""
MARKER_SECONDS: Final = 0.05
"""Seconds behind the acknowledged end of a transaction in which its markers may still be written."""
LEADER_PAUSE_SECONDS: Final = 0.02
"""Seconds after which a leader that met unfinished markers looks again (``add.partitions.to.txn.retry.backoff.ms``)."""
WARY_TRANSACTIONS: Final = 300
"""Number of transactions that enlist themselves after one that met unfinished markers."""


class TransactionProtocol(NamedTuple):
    """The highest versions of the requests. ``bumps_epoch``: transactions v2, where each end gives the next epoch."""

    bumps_epoch: bool
    versions: Mapping[int, int]

    def version(self, connection: BrokerConnection, key: int) -> int:
        """Return the version for one broker: while brokers are upgraded, some take less than others."""
        return min(self.versions[key], connection.versions.get(key, (0, 0))[1])


V1: Final = TransactionProtocol(False, {PRODUCE: 11, COMMIT_OFFSETS: 4, END: 4})
"""The last versions that leave the epoch alone; Kafka 2.8 takes 9, 3 and 3, which have the same fields."""
V2: Final = TransactionProtocol(True, {PRODUCE: 12, COMMIT_OFFSETS: 5, END: 5})


def protocol_of(connection: BrokerConnection) -> TransactionProtocol:
    """Choose the protocol: v2 where the cluster has finalized it and the broker takes the requests of it."""
    # The feature alone is not enough: while brokers are rolled, some do not take the requests yet.
    takes_them = all(connection.versions.get(key, (0, 0))[1] >= version for key, version in V2.versions.items())
    return V2 if takes_them and connection.features.get("transaction.version", 0) >= 2 else V1


class Pauses:
    """The pauses between tries of one request: 1 ms, doubling to 50."""

    def __init__(self) -> None:
        self._seconds = FIRST_PAUSE_SECONDS
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.time()

    @property
    def elapsed(self) -> float:
        """Return the seconds since the first try."""
        return self._loop.time() - self._started

    async def next(self) -> None:
        """Pause."""
        await asyncio.sleep(self._seconds)
        self._seconds = min(self._seconds * 2, LONGEST_PAUSE_SECONDS)


class Markers:
    """The markers of an id's last transaction: whether they may be late, so that the next one should enlist itself.
    ``alone``: no other id takes turns with it; otherwise its transactions do not follow each other closely."""

    def __init__(self, alone: bool) -> None:
        self._alone, self._wary = alone, 0
        self._ended_at = self._began_at = -math.inf

    def may_be_late(self) -> bool:
        """Note that records are about to be sent; return whether to enlist before. Only the first call of a transaction
        may return ``True``."""
        now = asyncio.get_running_loop().time()
        is_close = self._alone and now - self._ended_at < MARKER_SECONDS
        self._began_at, self._ended_at = now if is_close else math.inf, -math.inf
        return is_close and self._wary > 0

    def sent(self) -> None:
        """Note that the records are acknowledged."""
        # Enlisting costs a round trip, meeting unfinished markers 20 ms or more. On a quiet broker they are there in
        # time, so it is done only behind a transaction whose records took that long.
        took = asyncio.get_running_loop().time() - self._began_at
        self._wary = WARY_TRANSACTIONS if took >= LEADER_PAUSE_SECONDS else self._wary - 1

    def ended(self) -> None:
        """Note the end of a transaction."""
        self._ended_at = asyncio.get_running_loop().time()
