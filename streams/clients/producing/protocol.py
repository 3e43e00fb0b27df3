"""Which transaction protocol is spoken, in which versions of its requests, and how requests are tried again."""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple

from streams.clients.producing import messages
from streams.clients.producing.broker_connection import BrokerConnection

FIRST_PAUSE_SECONDS: Final = 0.001
LONGEST_PAUSE_SECONDS: Final = 0.05


class TransactionProtocol(NamedTuple):
    """The versions of the four requests. ``bumps_epoch``: transactions v2, where each end gives the next epoch."""

    bumps_epoch: bool
    produce: int
    commit_offsets: int
    end: int


UNDECIDED: Final = TransactionProtocol(False, 0, 0, 0)
V2: Final = TransactionProtocol(True, 12, 5, 5)


def protocol_of(connection: BrokerConnection) -> TransactionProtocol:
    """Choose the protocol: v2 where the cluster has finalized it and the broker takes the requests of it."""
    highest = {key: most for key, (_, most) in connection.versions.items()}
    if connection.features.get("transaction.version", 0) >= 2 and all(
        highest.get(key, 0) >= version
        for key, version in (
            (messages.PRODUCE, V2.produce),
            (messages.COMMIT_OFFSETS, V2.commit_offsets),
            (messages.END, V2.end),
        )
    ):
        return V2
    # Kafka 2.8 takes these from 9 and 3 on; 11 and 4 are the last that leave the epoch alone.
    return TransactionProtocol(
        False,
        min(11, highest[messages.PRODUCE]),
        min(4, highest[messages.COMMIT_OFFSETS]),
        min(4, highest[messages.END]),
    )


class Pauses:
    """The pauses between tries of one request: 1 ms, doubling to 50."""

    def __init__(self) -> None:
        self._seconds = FIRST_PAUSE_SECONDS

    async def next(self) -> None:
        await asyncio.sleep(self._seconds)
        self._seconds = min(self._seconds * 2, LONGEST_PAUSE_SECONDS)
