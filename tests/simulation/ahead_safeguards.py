"""The safeguards of work that runs ahead of its turn, each with a way to take it out, as in ``safeguards.py``."""

from __future__ import annotations

from typing import Any

from streams.runtime.async_work.job_stage import JobStage
from streams.runtime.partition import reorder_buffer, worker

from .safeguards import Patch, Safeguard


def whoever_is_done_is_next(patch: Patch) -> None:
    """Finalizers run as their jobs end, and what is admitted has gaps before it."""

    def is_ready(self: reorder_buffer.ReorderBuffer) -> bool:
        for entry in list(self.entries):
            if entry.is_settled:
                self.entries.remove(entry)
                self.entries.appendleft(entry)
                return True
        return False

    patch.setattr(reorder_buffer.ReorderBuffer, "is_ready", property(is_ready))


def plain_handlers_do_not_wait_for_jobs(patch: Patch) -> None:
    """They are not put in the reorder buffer, and are admitted although there are events before them."""
    handle = worker.PartitionWorker._step_ahead

    async def at_once(self: Any, records: Any, start: int) -> int:
        if not self._issuer.is_blocked and not self._issuer.goes_ahead(records[start]):
            await self._execution.one(records[start], None)
            self.inbox.handled(1)
            return start + 1
        return await handle(self, records[: start + 1], start)

    patch.setattr(worker.PartitionWorker, "_step_ahead", at_once)


def jobs_are_done_when_they_have_begun(patch: Patch) -> None:
    """As if the result did not matter: committed, although a crash may take the job with it."""
    add = JobStage.add

    def told(self: JobStage, entry: reorder_buffer.Entry, key: Any, item: Any) -> None:
        add(self, entry, key, item)
        entry.settle(lambda ctx: None)

    patch.setattr(JobStage, "add", told)


AHEAD_SAFEGUARDS: dict[str, Safeguard] = {
    made.out.__name__: made
    for made in (
        Safeguard("section 3", whoever_is_done_is_next, ("ahead",)),
        Safeguard("section 3", plain_handlers_do_not_wait_for_jobs, ("ahead",)),
        Safeguard("section 3", jobs_are_done_when_they_have_begun, ("ahead",), 1),
    )
}
