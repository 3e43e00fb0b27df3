"""Durable jobs on the pages, without their items: those are for ``kes jobs show``."""

from __future__ import annotations

import re
from typing import Any, ClassVar, Final
from urllib.parse import quote, unquote

import msgspec

from streams.core.jobs import JobAction
from streams.core.parking import NEVER_MS
from streams.errors import ConfigError
from streams.looks.records import one_line, plain_text, shortened
from streams.queries.operating import JobClient
from streams.runtime.queries.jobs import JobReply, ShownJob
from streams.runtime.queries.operating import Named
from streams.sak.harmless import harmless
from streams.settings.config import EventSourceConfig
from streams.web.actions import ActionRun
from streams.web.waiting import LONGEST, LONGEST_KEY, WaitingTable

_PLACE: Final = re.compile(r"(\d{1,9})-(\d{1,18})-(\d{1,18})-([!-~]+)")


class JobOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An act on durable jobs, by the ``place`` of each in ``JobTable.read``: it names the starts that were shown."""

    action: JobAction
    places: tuple[str, ...]


class JobTable(WaitingTable[JobReply]):
    """The durable jobs of one source."""

    noun: ClassVar[str] = "job"
    action: ClassVar[str] = "act-on-jobs"
    doubt: ClassVar[str] = "To cancel jobs, say that you are sure."

    def client(self, config: EventSourceConfig) -> JobClient:
        return JobClient(config)

    def totals(self, replies: list[JobReply]) -> dict[str, Any]:
        return {"count": sum(reply.count for reply in replies), "parked": sum(reply.parked for reply in replies)}

    async def act(self, jobs: JobOrder, run: ActionRun) -> str:
        """Have durable jobs tried at once, or cancel them: at their owners, each act once."""
        return await self.carry_out(jobs.action, jobs.places, _named, run)

    def shown(self, number: int, entry: ShownJob) -> dict[str, Any]:
        key = None if entry.key is None else shortened(one_line(plain_text(entry.key)), LONGEST_KEY)
        progress = "" if entry.progress is None else "{:g} of {:g} {}".format(*entry.progress)
        is_due = entry.due_ms < NEVER_MS and entry.state in ("waiting", "unknown")
        return {
            # Browsers change the ends of lines in what a form sends.
            "place": f"{number}-{entry.number}-{entry.since_ms}-{quote(entry.name, safe='')}",
            "partition": number,
            "name": shortened(one_line(entry.name), LONGEST_KEY),
            "jobs": shortened(harmless(entry.jobs), LONGEST_KEY),
            "id": harmless(entry.id),
            "key": key,
            "state": entry.state,
            "progress": shortened(harmless(progress), LONGEST_KEY),
            "since_ms": entry.since_ms,
            "attempts": entry.attempts,
            "next_attempt_ms": entry.due_ms if is_due else None,
            "error": shortened(harmless(entry.error), LONGEST),
        }


def _named(text: str) -> tuple[int, Named]:
    place = _PLACE.fullmatch(text)
    if place is None:
        raise ConfigError("name jobs by their places, as the table of jobs has them")
    return int(place[1]), (unquote(place[4]), int(place[2]), int(place[3]))
