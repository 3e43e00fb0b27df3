"""The ids that a ``TestDriver``'s source remembers of events that it handles once."""

from __future__ import annotations

from streams.core.seen import digest_of
from streams.runtime.partition.seen_ids import SeenIds
from streams.testing.driven_jobs import DrivenJobs


class SeenScope:
    """The ids of one scope, in all partitions that are worked on: ``"p-1" in driver.seen("Payment")``."""

    def __init__(self, scope: str, tables: list[SeenIds]) -> None:
        self._scope = scope
        self._tables = tables

    def __contains__(self, id: str | bytes | int) -> bool:
        return self.kept(id) is not None

    def kept(self, id: str | bytes | int) -> bytes | None:
        """Return what is kept beside an id, ``b""`` if that is nothing; ``None``: the id is not remembered. Raises
        ``ValueError`` for what is no id."""
        digest = digest_of(self._scope, id)
        found = (table.find(digest) for table in self._tables)
        return next((kept for kept in found if kept is not None), None)


class DrivenOnce(DrivenJobs):
    """The part of ``TestDriver`` about ids."""

    def seen(self, scope: str) -> SeenScope:
        """Return the ids of a scope (default of ``Once``: the event type's name) that are remembered: of events that
        are complete, on the members that work on the partitions. Ids that are there may not be listed: only their
        digests are known."""
        workers = [self._worker(number) for number in self._partitions()]
        return SeenScope(scope, [worker.seen for worker in workers if worker is not None])
