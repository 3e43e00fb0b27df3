"""Reading whole partitions up to a position: changelogs at a restore, and look-ups."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from streams.clients.settings import ClientSettings
from streams.records import IncomingRecord


class PartitionReader:
    """``read_committed``; owned by one thread."""

    def __init__(self, settings: ClientSettings, *, fetch_wait_ms: int = 20) -> None: ...

    def read(
        self,
        topic: str,
        ranges: Mapping[int, tuple[int, int]],
        receive: Callable[[int, list[IncomingRecord]], None],
        *,
        stalled_after_seconds: float,
        cancelled: Callable[[], bool],
    ) -> None:
        """Read each partition from ``start`` until its position is at ``end``, several partitions at once.

        ``cancelled()`` is asked between batches; when true, ``Stopped`` is raised (so a partial read is never taken for a
        whole one).
        """
        raise NotImplementedError

    def close(self) -> None:
        """Free everything. Does not raise."""
        raise NotImplementedError
