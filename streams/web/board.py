"""One status a second, for all viewers together, while there are any."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import msgspec

from streams.errors import StreamsError
from streams.looks.group_picture import Picture
from streams.views.state import ViewStatistics
from streams.views.view import View
from streams.web.facts import MemberFacts, Members
from streams.web.group_client import GroupClient

STATUS_SECONDS: Final = 1.0
GROUP_SECONDS: Final = 2.0
"""Between two reads of the group: each costs the cluster some requests."""
GROUP_PATIENCE_SECONDS: Final = 2.0
"""The wait of the first viewer for the group; then the last known one is shown."""
IDLE_SECONDS: Final = 30.0
"""The clients for the group are closed when there was no viewer for so long."""
RATES: Final = 120
"""Seconds of which rates are kept."""
_Totals = dict[tuple[str, int], int]


class GroupStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A group at one moment, as a monitor sees it. ``picture``: of the whole group, ``picture_seconds`` old;
    ``problem``: why there is none, or no newer one. ``rates``: events a second, of the last seconds with a
    viewer, the newest last."""

    group: str
    at_ms: int
    members: tuple[MemberFacts, ...] = ()
    picture: Picture | None = None
    picture_seconds: float = 0.0
    problem: str = ""
    rates: tuple[float, ...] = ()
    views: tuple[ViewStatistics, ...] = ()


class Board:
    """Describes the group on the loop of the monitor. Nothing runs while there are no viewers."""

    def __init__(
        self,
        group: str,
        members: Members | None,
        group_client: GroupClient | None,
        views: Sequence[View[Any, Any]] = (),
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._group, self._members, self._group_client = group, members, group_client
        self._views, self._now = views, now
        self._status: GroupStatus | None = None
        self._made_at = self._pictured_at = float("-inf")
        self._making: asyncio.Task[GroupStatus] | None = None
        self._picturing: asyncio.Future[Picture] | None = None
        self._picture: Picture | None = None
        self._problem = ""
        self._totals: tuple[float, _Totals] = (0.0, {})
        self._rates: deque[float] = deque(maxlen=RATES)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kes-web-group")
        self._idle: asyncio.TimerHandle | None = None
        self.closed = False

    async def status(self) -> GroupStatus:
        """Return a status that is a second old at most. All that wait get the same one."""
        if self._status is not None and self._now() - self._made_at < STATUS_SECONDS:
            return self._status
        if self._making is None or self._making.done():
            self._making = asyncio.create_task(self._make())
        return await asyncio.shield(self._making)

    def close(self) -> None:
        """End; streams see ``closed``. On the loop."""
        self.closed = True
        if self._idle is not None:
            self._idle.cancel()
        self._close_client()
        self._thread.shutdown(wait=False)

    async def _make(self) -> GroupStatus:
        self._stay_awake()
        members, _ = await asyncio.gather(self._read_members(), self._read_group())
        now = self._now()
        self._count(now, members)
        self._status = GroupStatus(
            group=self._group,
            at_ms=time.time_ns() // 1_000_000,
            members=members,
            picture=self._picture,
            picture_seconds=max(0.0, now - self._pictured_at) if self._picture is not None else 0.0,
            problem=self._problem,
            rates=tuple(self._rates),
            views=tuple(view.statistics() for view in self._views),
        )
        self._made_at = now
        return self._status

    async def _read_members(self) -> tuple[MemberFacts, ...]:
        return () if self._members is None else await self._members.read()

    async def _read_group(self) -> None:
        """Begin a read, if it is time for one; wait for it a while if none has succeeded yet."""
        if self._group_client is None or self.closed:
            return
        if self._picturing is None and self._now() - self._pictured_at >= GROUP_SECONDS:
            self._picturing = asyncio.get_running_loop().run_in_executor(self._thread, self._group_client.read)
            self._picturing.add_done_callback(self._pictured)
        if self._picturing is not None and self._picture is None and not self._problem:
            with contextlib.suppress(TimeoutError, Exception):  # ``_pictured`` notes what went wrong
                await asyncio.wait_for(asyncio.shield(self._picturing), GROUP_PATIENCE_SECONDS)

    def _pictured(self, read: asyncio.Future[Picture]) -> None:
        self._picturing, self._pictured_at = None, self._now()
        if read.cancelled():
            return
        error = read.exception()
        if error is None:
            self._picture, self._problem = read.result(), ""
        elif isinstance(error, StreamsError):
            self._problem = str(error)
        else:
            self._problem = f"{type(error).__name__}: {error}"

    def _count(self, now: float, members: Sequence[MemberFacts]) -> None:
        """Add a rate: by the members' own counts, else by what the group has committed."""
        totals: _Totals = {
            (each.name, each.starts): each.statistics.committed_events for each in members if each.statistics
        }
        if not members and self._picture is not None:
            totals = {
                (topic, partition): offset
                for topic, offsets in self._picture.view.committed.items()
                for partition, offset in offsets.items()
            }
        before, known = self._totals
        # A member that was not there has counted since its start, a moment ago; one that restarted begins at 0.
        gained = sum(max(0, total - known[place]) for place, total in totals.items() if place in known)
        if known and now > before:
            if now - before > 3 * STATUS_SECONDS:  # there was no viewer meanwhile
                self._rates.clear()
            self._rates.append(gained / (now - before))
        self._totals = now, {**known, **totals} if totals else known

    def _stay_awake(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        self._idle = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._close_client)

    def _close_client(self) -> None:
        if self._group_client is not None:
            self._thread.submit(self._group_client.close)
