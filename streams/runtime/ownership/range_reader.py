"""Read ranges of a topic on a thread of their own, for as long as the answer is wanted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from streams.records import IncomingRecord
from streams.runtime.ports import Connections
from streams.runtime.transactions.hung_calls import HungCalls

STALLED_SECONDS: Final = 20.0
"""A read without progress for so many seconds ends with an error."""

Range = tuple[int, int]
"""The start and the end of a partition's log, or of a part of it: the first offset, and the one behind the last."""
Receive = Callable[[int, list[IncomingRecord]], None]
Read = Callable[[str, Mapping[int, Range], Receive, Callable[[], bool]], Awaitable[None]]
"""``RangeReader.read``."""


class RangeReader:
    """Reads for the take-overs and look-ups of one member. On the loop."""

    def __init__(self, connections: Connections, hung_calls: HungCalls) -> None:
        self._connections = connections
        self._hung_calls = hung_calls

    async def read(
        self, topic: str, ranges: Mapping[int, Range], receive: Receive, cancelled: Callable[[], bool]
    ) -> None:
        """Read committed records of these ranges of partitions; ``receive`` and ``cancelled`` are called on the
        thread. Raises as ``ports.Reader.read``."""
        # Each read has a thread: one that hangs in its client holds up no other.
        worker = self._connections.worker("kes-look-up")
        unwanted = False  # the caller does not wait for it any more

        def read() -> None:
            reader = self._connections.reader()
            try:
                reader.read(
                    topic,
                    ranges,
                    receive,
                    stalled_after_seconds=STALLED_SECONDS,
                    cancelled=lambda: unwanted or cancelled(),
                )
            finally:
                reader.close()

        try:
            await worker.call(read)
        except asyncio.CancelledError:
            # The read ends when it looks at this the next time. A read that hangs never looks: it is counted.
            unwanted = True
            self._hung_calls.abandon(worker, f"look-up in {topic}")
            raise
        except BaseException:
            worker.abandon()
            raise
        worker.abandon()
