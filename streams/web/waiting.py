"""Tables of what waits in a source, on the pages: looked at and acted on at its owners."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Any, ClassVar, Final, Generic, TypeVar

import msgspec

from streams.errors import ConfigError, StreamsError
from streams.looks.records import shortened
from streams.queries.operating import OperatorClient
from streams.runtime.queries.operating import Named
from streams.sak.harmless import harmless
from streams.settings.config import EventSourceConfig
from streams.source.event_source import EventSource
from streams.web.actions import ActionRun
from streams.web.group_client import GroupClient
from streams.web.look_up import OWNER_SECONDS

MOST_SHOWN: Final = 100
"""Entries on a page: those that wait longest."""
LONGEST_KEY: Final = 120
LONGEST: Final = 1_000
_ACT_SECONDS: Final = 30.0

R = TypeVar("R")


class WaitingTable(Generic[R]):
    """One kind of what waits in one source. On the loop of the monitor. ``noun``: what an entry is called; ``action``:
    the built-in action that acts on it; ``doubt``: the refusal of an act that ends entries, and is not confirmed."""

    noun: ClassVar[str]
    action: ClassVar[str]
    doubt: ClassVar[str]

    def __init__(self, source: EventSource[Any], group_client: GroupClient) -> None:
        self._source, self._group_client = source, group_client
        self._looking = asyncio.Lock()

    def client(self, config: EventSourceConfig) -> OperatorClient[Any, Any, Any]:
        """Make the client of the owners."""
        raise NotImplementedError

    def totals(self, replies: list[R]) -> dict[str, Any]:
        """Return figures of all partitions whose owners answer."""
        raise NotImplementedError

    def shown(self, number: int, entry: Any) -> dict[str, Any]:
        """Return an entry for people: its texts are cut, and harmless. ``place``: for an act."""
        raise NotImplementedError

    async def read(self, **only: Any) -> dict[str, Any]:
        """Return the entries that wait longest, for people. ``only``: fields of the request that choose some of them.
        ``problem``: why partitions are missing. Raises ``ConfigError`` without the group's secret."""
        async with self._looking, self._client() as client:  # one look at a time
            numbers = range(self._source.config.num_partitions)
            answers = await asyncio.gather(
                *(client.listed(number, timeout_seconds=OWNER_SECONDS, **only) for number in numbers),
                return_exceptions=True,
            )
        replies: list[Any] = [answer for answer in answers if not isinstance(answer, BaseException)]
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        for error in errors:
            if not isinstance(error, StreamsError):
                raise error
        found = [(reply.partition, entry) for reply in replies for entry in reply.found]
        found.sort(key=lambda each: (each[1].since_ms, each[1].place))
        problem = f"{len(errors)} of {len(answers)} partitions are not known: {errors[0]}" if errors else ""
        return self.totals(replies) | {
            f"{self.noun}s": [self.shown(number, entry) for number, entry in found[:MOST_SHOWN]],
            "problem": shortened(harmless(problem), LONGEST),
        }

    def nothing(self, problem: str) -> dict[str, Any]:
        """Return what a page shows instead."""
        totals = dict.fromkeys(self.totals([]))
        return totals | {f"{self.noun}s": [], "problem": shortened(harmless(problem), LONGEST)}

    async def carry_out(
        self,
        action: str,
        places: Collection[str],
        read: Callable[[str], tuple[int, Named]],
        run: ActionRun,
        **more: Any,
    ) -> str:
        """Act on entries, by their places, which ``read`` takes apart: at their owners, each act once. ``more``: fields
        of the requests."""
        wanted, done, count = defaultdict[int, list[Named]](list), 0, len(set(places))
        for place in dict.fromkeys(places):
            number, named = read(place)
            wanted[number].append(named)
        if not wanted:
            raise ConfigError(f"choose {self.noun}s")
        async with self._client() as client:
            for number, seen in wanted.items():
                done += len(await client.act(number, action, seen, timeout_seconds=_ACT_SECONDS, **more))
                run.progress(done, count)
        rest = f"; other ones by now: {count - done}" if done < count else ""
        return f"{action}: {done} of {count} {self.noun}s{rest}"

    def _client(self) -> OperatorClient[Any, Any, Any]:
        config = msgspec.structs.replace(self._source.config, bootstrap_servers=self._group_client.servers)
        return self.client(config)
