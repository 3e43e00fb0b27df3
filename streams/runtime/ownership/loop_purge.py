"""Delete what is handled from the loop's topic: nothing else does, since it is kept without a limit of time or size.

A member that was frozen may be behind what others have handled and deleted meanwhile: it finds that out
(``Partitions.position_gone``), or learns that it was evicted, whichever comes first.
"""

from __future__ import annotations

import logging
from typing import Final

import anyio

from streams.errors import StreamsError
from streams.runtime.member import Member

_log = logging.getLogger(__name__)

PURGE_SECONDS: Final = 60.0
"""What is handled is deleted every so many seconds."""
ASK_SECONDS: Final = 10.0
"""One request to the broker takes so many seconds, at most."""


class LoopPurge:
    """The regular purge by one member, of the partitions that it has. On the loop. Best effort: what fails is tried
    again the next time, and is logged when it begins to."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._thread = member.thread("kes-loop-purge")
        self._purged: dict[int, int] = {}
        self._is_failing = False

    async def run(self) -> None:
        """Purge until cancelled."""
        while True:
            await anyio.sleep(PURGE_SECONDS)
            try:
                await self._purge()
                self._is_failing = False
            except StreamsError as error:
                _log.log(
                    logging.DEBUG if self._is_failing else logging.WARNING,
                    "what is handled stays in %s for now: %s",
                    self._member.config.loop_topic,
                    error,
                )
                self._is_failing = True

    async def _purge(self) -> None:
        member, call = self._member, self._thread.call
        client, topic, numbers = member.takeover_client, member.config.loop_topic, list(member.workers)
        # Only what is committed is deleted: what this member has admitted is further, and may still be taken back. The
        # transaction that committed these offsets has put the same ones into the changelog, and no take-over goes back
        # behind them. So it does not matter which member deletes, or how late its request arrives. The stable offsets
        # would wait for pending commits, and under load there is always one more.
        committed = await call(client.committed_offsets, numbers, member.now() + ASK_SECONDS, topic)
        before = {number: at for number, at in committed.items() if at is not None and at > self._purged.get(number, 0)}
        if before:
            await call(client.delete_records, topic, before, member.now() + ASK_SECONDS)
            self._purged |= before
