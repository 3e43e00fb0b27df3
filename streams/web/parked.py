"""Parked keys on the pages: look, and act on their queues at the members that own them."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from typing import Any, Final

import msgspec

from streams.core.parking import NEVER_MS
from streams.core.parking_rules import Action
from streams.errors import ConfigError, StreamsError
from streams.looks.records import one_line, plain_text, shortened
from streams.queries.operating import ParkedClient
from streams.runtime.queries.parked import ParkedQueue, ParkedReply
from streams.sak.harmless import harmless
from streams.source.event_source import EventSource
from streams.web.actions import ActionRun
from streams.web.group_client import GroupClient
from streams.web.look_up import OWNER_SECONDS

MOST_QUEUES: Final = 100
"""Queues on a page: those that wait longest."""
_ACT_SECONDS: Final = 30.0
_LONGEST_KEY: Final = 120
_LONGEST: Final = 1_000
_PLACE: Final = re.compile(r"(\d{1,9})-([0-9a-f]{32})-(\d{1,10})-(\d{1,10})")


class ParkedOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An act on queues, by the ``place`` of each in ``ParkedTable.read``: it names the events that were shown.
    ``as_letters``: what goes is kept as dead letters."""

    action: Action
    places: tuple[str, ...]
    as_letters: bool = False

    def queues(self) -> dict[int, list[tuple[str, int, int]]]:
        """Return the queues that are meant, by partition. Raises ``ConfigError``."""
        found: dict[int, list[tuple[str, int, int]]] = defaultdict(list)
        for text in dict.fromkeys(self.places):
            place = _PLACE.fullmatch(text)
            if place is None:
                raise ConfigError("name queues by their places, as the table of parked keys has them")
            found[int(place[1])].append((place[2], int(place[3]), int(place[4])))
        if not found:
            raise ConfigError("choose queues")
        return found


class ParkedTable:
    """The parked keys of one source. On the loop of the monitor."""

    def __init__(self, source: EventSource[Any], group_client: GroupClient) -> None:
        self._source, self._group_client = source, group_client
        self._looking = asyncio.Lock()

    async def read(self) -> dict[str, Any]:
        """Return the queues that wait longest, for people: texts are cut, and harmless. ``parked_keys`` and
        ``parked_events``: of all partitions whose owners answer; ``problem``: why others do not. Raises ``ConfigError``
        without the group's secret."""
        async with self._looking, self._client() as client:  # one look at a time
            numbers = range(self._source.config.num_partitions)
            answers = await asyncio.gather(
                *(client.listed(number, timeout_seconds=OWNER_SECONDS) for number in numbers), return_exceptions=True
            )
        replies = [answer for answer in answers if isinstance(answer, ParkedReply)]
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        for error in errors:
            if not isinstance(error, StreamsError):
                raise error
        queues = [(reply.partition, queue) for reply in replies for queue in reply.queues]
        queues.sort(key=lambda each: each[1].place)
        problem = f"{len(errors)} of {len(answers)} partitions are not known: {errors[0]}" if errors else ""
        return {
            "parked_keys": sum(reply.keys for reply in replies),
            "parked_events": sum(reply.events for reply in replies),
            "queues": [_shown(number, queue) for number, queue in queues[:MOST_QUEUES]],
            "problem": shortened(harmless(problem), _LONGEST),
        }

    @staticmethod
    def nothing(problem: str) -> dict[str, Any]:
        """Return what a page shows instead."""
        return {
            "parked_keys": None,
            "parked_events": None,
            "queues": [],
            "problem": shortened(harmless(problem), _LONGEST),
        }

    async def act(self, parked: ParkedOrder, run: ActionRun) -> str:
        """Have parked keys tried at once, let their first events go, or all of them: at their owners, each act once."""
        wanted, done, count = parked.queues(), 0, len(set(parked.places))
        async with self._client() as client:
            for number, queues in wanted.items():
                acted = await client.act(
                    number, parked.action, queues, as_letters=parked.as_letters, timeout_seconds=_ACT_SECONDS
                )
                done += len(acted)
                run.progress(done, count)
        rest = f"; other ones by now: {count - done}" if done < count else ""
        return f"{parked.action}: {done} of {count} queues{rest}"

    def _client(self) -> ParkedClient:
        config = msgspec.structs.replace(self._source.config, bootstrap_servers=self._group_client.servers)
        return ParkedClient(config)


def _shown(number: int, queue: ParkedQueue) -> dict[str, Any]:
    key = "" if queue.key is None else shortened(one_line(plain_text(queue.key)), _LONGEST_KEY)
    return {
        "place": f"{number}-{queue.queue}-{queue.head}-{queue.next}",
        "partition": number,
        "queue": queue.queue,
        "key": key,
        "has_key": queue.key is not None,
        "key_bytes": queue.key_bytes,
        "events": queue.next - queue.head,
        "bytes": queue.size,
        "since_ms": queue.since_ms,
        "attempts": queue.attempts,
        "next_retry_ms": None if queue.due_ms >= NEVER_MS else queue.due_ms,
        "error": shortened(harmless(queue.error), _LONGEST),
        "handler": shortened(harmless(queue.handler), _LONGEST),
    }
