"""Parked keys on the pages."""

from __future__ import annotations

import re
from typing import Any, ClassVar, Final

import msgspec

from streams.core.parking import NEVER_MS
from streams.core.parking_rules import Action
from streams.errors import ConfigError
from streams.looks.records import one_line, plain_text, shortened
from streams.queries.operating import ParkedClient
from streams.runtime.queries.operating import Named
from streams.runtime.queries.parked import ParkedQueue, ParkedReply
from streams.sak.harmless import harmless
from streams.settings.config import EventSourceConfig
from streams.web.actions import ActionRun
from streams.web.waiting import LONGEST, LONGEST_KEY, WaitingTable

_PLACE: Final = re.compile(r"(\d{1,9})-([0-9a-f]{32})-(\d{1,10})-(\d{1,10})")


class ParkedOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An act on queues, by the ``place`` of each in ``ParkedTable.read``: it names the events that were shown.
    ``as_letters``: what goes is kept as dead letters."""

    action: Action
    places: tuple[str, ...]
    as_letters: bool = False


class ParkedTable(WaitingTable[ParkedReply]):
    """The parked keys of one source."""

    noun: ClassVar[str] = "queue"
    action: ClassVar[str] = "act-on-parked-keys"
    doubt: ClassVar[str] = "To let events go, say that you are sure."

    def client(self, config: EventSourceConfig) -> ParkedClient:
        return ParkedClient(config)

    def totals(self, replies: list[ParkedReply]) -> dict[str, Any]:
        return {
            "parked_keys": sum(reply.keys for reply in replies),
            "parked_events": sum(reply.events for reply in replies),
        }

    async def act(self, parked: ParkedOrder, run: ActionRun) -> str:
        """Have parked keys tried at once, let their first events go, or all of them: at their owners, each act once."""
        return await self.carry_out(parked.action, parked.places, _named, run, as_letters=parked.as_letters)

    def shown(self, number: int, entry: ParkedQueue) -> dict[str, Any]:
        key = "" if entry.key is None else shortened(one_line(plain_text(entry.key)), LONGEST_KEY)
        return {
            "place": f"{number}-{entry.queue}-{entry.head}-{entry.next}",
            "partition": number,
            "queue": entry.queue,
            "key": key,
            "has_key": entry.key is not None,
            "key_bytes": entry.key_bytes,
            "events": entry.next - entry.head,
            "bytes": entry.size,
            "since_ms": entry.since_ms,
            "attempts": entry.attempts,
            "next_retry_ms": None if entry.due_ms >= NEVER_MS else entry.due_ms,
            "error": shortened(harmless(entry.error), LONGEST),
            "handler": shortened(harmless(entry.handler), LONGEST),
        }


def _named(text: str) -> tuple[int, Named]:
    place = _PLACE.fullmatch(text)
    if place is None:
        raise ConfigError("name queues by their places, as the table of parked keys has them")
    return int(place[1]), (place[2], int(place[3]), int(place[4]))
