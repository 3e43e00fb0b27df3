"""One leader among many processes, for work that one of them should do: an election over a Kafka group.

async with Election("nightly-report", bootstrap_servers="localhost:9092") as election:
    async with election.term() as term:  # waits; the block is cancelled when the term ends
        await db.execute("UPDATE report SET body = $1, fence = $2 WHERE fence <= $2", body, term.token)

No group can keep a frozen leader from going on for a moment once it is thawed. So each term has a *token* that only
grows: what is written to carries the highest it has seen, and refuses a lower one.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple, Self

import msgspec

from streams.errors import ConfigError, TopicError
from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.settings import ClientSettings
from streams.model.topics import TopicSpec
from streams.records import Output
from streams.runtime.claim import Claim
from streams.runtime.ownership.candidate import Candidate
from streams.runtime.ownership.tenure import SESSION_SECONDS, GroupTenures, Tenure, TenureOwner
from streams.settings.config import host_name
from streams.settings.sources import bootstrap_servers as named_servers
from streams.settings.sources import joined_client_settings

_log = logging.getLogger(__name__)

_KEY: Final = b"term"
_CLAIM_SECONDS: Final = 10.0


class LeaderAcquired(NamedTuple):
    """This process leads: a term has begun."""

    token: int


class LeaderRevoked(NamedTuple):
    """The term of this process is over; ``reason`` is empty when the process left it by itself."""

    token: int
    reason: str


ElectionEvent = LeaderAcquired | LeaderRevoked


class ElectionTerm:
    """The time in which this process leads. ``token``, 1 or more, is higher than those of all terms before it.
    ``is_over`` and ``reason`` may be read from any thread."""

    def __init__(self, token: int) -> None:
        self.token = token
        self.reason = ""
        """Why it is over; empty while it lasts, and when the process left it by itself."""
        self.is_over = False

    def end(self, reason: str) -> None:
        """Note that it is over; only the first reason counts."""
        if not self.is_over:
            self.is_over, self.reason = True, reason

    def __repr__(self) -> str:
        return f"ElectionTerm({self.token})"


class _Opened(msgspec.Struct, frozen=True):
    """The record that opens a term."""

    leader: str
    began_ms: int


class Election:
    """A candidate for the leadership of ``name``, in an ``async with`` block; on one event loop.

    Members of the group ``<name>.election`` elect one of themselves, and each term is a record of the topic
    ``<name>.election``, which is made if it is missing (``replication_factor``). ``bootstrap_servers`` (else
    ``KES_BOOTSTRAP_SERVERS``) and ``client_settings`` are as those of ``EventSourceConfig``. A leader that is killed or
    cut off is replaced after ``session_seconds``, and stops by itself before that; one that closes its election is
    replaced at once. Raises ``ConfigError``.
    """

    def __init__(
        self,
        name: str,
        *,
        bootstrap_servers: str = "",
        client_settings: Mapping[str, Any] | None = None,
        replication_factor: int = 1,
        session_seconds: float = SESSION_SECONDS,
    ) -> None:
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,200}", name):
            raise ConfigError(f"the name of an election is {name!r}; use letters, digits, '.', '_', '-', at most 200")
        self.name = name
        if not 1.0 <= session_seconds <= 1_800:
            raise ConfigError(f"session_seconds is {session_seconds!r}; it must be from 1 to 1800")
        self._session = session_seconds
        self._topic = f"{name}.election"
        self._spec = TopicSpec(
            name=self._topic,
            partitions=1,
            replication_factor=replication_factor,
            configs={"cleanup.policy": "compact"},
        )
        self._settings = ClientSettings(
            named_servers(bootstrap_servers), joined_client_settings(client_settings), client_id=self._topic
        )
        self._listeners: list[Callable[[ElectionEvent], None]] = []
        self._candidate = Candidate(name, session_seconds)

    def on_event(self, listener: Callable[[ElectionEvent], None]) -> None:
        """Call ``listener`` with each event, on the loop. What it raises is logged."""
        self._listeners.append(listener)

    @property
    def is_elected(self) -> bool:
        """Check whether the group has elected this process; a term may not have begun."""
        return self._candidate.is_elected

    @asynccontextmanager
    async def term(self) -> AsyncIterator[ElectionTerm]:
        """Wait until this process is elected, and begin a term, for the time of the block.

        When the term ends before the block does (the group elects another one, does not know this process any more, or
        has not answered for ``session_seconds``), the block is cancelled, and ``NotLeading`` is raised. Leaving the
        block ends the term; the process stays elected until the election is closed, and may begin another term.

        Raises ``MembershipFatal`` or ``ConfigError`` if the group refuses this process, and ``TopicError`` if it cannot
        write to the topic.
        """
        async with self._candidate.term(self._open) as term:
            self._notify(LeaderAcquired(term.token))
            try:
                yield term
            finally:
                term.end("")
                self._notify(LeaderRevoked(term.token, term.reason))

    async def __aenter__(self) -> Self:
        await self._candidate.open(self._connect)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._candidate.close()

    def _connect(self, owner: TenureOwner) -> tuple[Claim, GroupTenures]:
        admin = TopicAdmin(self._settings)
        try:
            admin.create([self._spec])
            found = admin.identity(self._topic)
        finally:
            admin.close()
        if found is None or found[1] != 1:
            raise TopicError(f"topic {self._topic} must have one partition: it is the order of the terms")
        group = GroupTenures.connect(self._settings, self._topic, self._topic, 1, owner, session_seconds=self._session)
        claim = Claim(
            self._settings, self._topic, self._topic, transaction_seconds=_CLAIM_SECONDS, call_seconds=_CLAIM_SECONDS
        )
        return claim, group

    def _open(self, claim: Claim, tenure: Tenure) -> ElectionTerm:
        """Take the claim, and write the record that opens a term. Its token is the position behind the record, not its
        own offset, so that it is never 0."""
        claim.take()
        opened = _Opened(f"{host_name()}, process {os.getpid()}", int(time.time() * 1000))
        end = claim.append([Output(self._topic, msgspec.json.encode(opened), _KEY, None, 0, 0, 0, -1)])
        return ElectionTerm(end)

    def _notify(self, event: ElectionEvent) -> None:
        for listener in self._listeners:
            try:
                listener(event)
            except Exception:
                _log.exception("a listener of the election of %s has failed", self.name)
