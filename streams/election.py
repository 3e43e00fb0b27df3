"""One leader among many processes, for work that one of them should do: an election over a Kafka group.

async with Election("nightly-report", bootstrap_servers="localhost:9092") as election:
    async with election.term() as term:  # waits; the block is cancelled when the term ends
        await db.execute("UPDATE report SET body = $1, fence = $2 WHERE fence <= $2", body, term.token)

No group can keep a frozen leader from going on for a moment once it is thawed. So each term has a *token* that only
grows: what is written to carries the highest it has seen, and refuses a lower one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import msgspec
from anyio import CancelScope

from streams.clients.admin import TopicAdmin
from streams.clients.settings import ClientSettings
from streams.config import host_name
from streams.errors import BrokerUnavailable, ConfigError, NotLeading, RecordsRefused, TopicError, TransactionFailed
from streams.records import Output
from streams.runtime.bridge import Inlet, Worker
from streams.runtime.claim import Claim
from streams.runtime.ownership.tenure import SESSION_SECONDS, GroupTenures, Tenure, TenureOwner
from streams.runtime.signal import Signal
from streams.sak.backoff import backoff_seconds
from streams.settings_sources import bootstrap_servers as named_servers
from streams.settings_sources import joined_client_settings
from streams.topics import TopicSpec

_log = logging.getLogger(__name__)

_KEY: Final = b"term"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
_CLAIM_SECONDS: Final = 10.0
_CLOSE_SECONDS: Final = 5.0
_LOOKS: Final = 4
"""Questions to the group in the time of a session."""


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
        self._changed = Signal()
        self._tenure: Tenure | None = None
        self._failure: Exception | None = None
        self._term: ElectionTerm | None = None
        self._end_term: Callable[[str], None] = lambda reason: None

    def on_event(self, listener: Callable[[ElectionEvent], None]) -> None:
        """Call ``listener`` with each event, on the loop. What it raises is logged."""
        self._listeners.append(listener)

    @property
    def is_elected(self) -> bool:
        """Check whether the group has elected this process; a term may not have begun."""
        return self._tenure is not None and not self._tenure.is_over

    @asynccontextmanager
    async def term(self) -> AsyncIterator[ElectionTerm]:
        """Wait until this process is elected, and begin a term, for the time of the block.

        When the term ends before the block does (the group elects another one, does not know this process any more, or
        has not answered for ``session_seconds``), the block is cancelled, and ``NotLeading`` is raised. Leaving the
        block ends the term; the process stays elected until the election is closed, and may begin another term.

        Raises ``MembershipFatal`` or ``ConfigError`` if the group refuses this process, and ``TopicError`` if it cannot
        write to the topic.
        """
        if self._term is not None:
            raise ConfigError(f"the election of {self.name} has a term already: one at a time")
        term, tenure, confirmed = await self._begin()
        with CancelScope() as scope:

            def end(reason: str) -> None:
                if not term.is_over:
                    term.is_over, term.reason = True, reason
                    scope.cancel()

            self._term, self._end_term = term, end
            watch = asyncio.create_task(self._watch(tenure, confirmed))
            self._notify(LeaderAcquired(term.token))
            try:
                if tenure.is_over:
                    end(tenure.reason)
                yield term
            finally:
                watch.cancel()
                self._term, self._end_term = None, lambda reason: None
                term.is_over = True
                self._notify(LeaderRevoked(term.token, term.reason))
                if tenure.is_over:
                    tenure.done()
        if scope.cancelled_caught:
            raise NotLeading(f"{self.name}: the term {term.token} is over: {term.reason}")

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        # One for the claim, one for the group: its answers must not wait for a broker that does not answer the other.
        self._claims, self._questions = Worker(f"kes-{self._topic}"), Worker(f"kes-{self._topic}-group")
        try:
            self._claim, self._group = await self._claims.call(self._connect, _Posts(self))
        except BaseException:
            self._abandon()
            raise
        self._group.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with CancelScope(shield=True):
            await self._questions.call(self._group.close, _CLOSE_SECONDS)  # first: now another process may lead
            await self._claims.call(self._claim.close)
        self._abandon()

    def _abandon(self) -> None:
        for worker in (self._claims, self._questions):
            worker.abandon()

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

    # -- the beginning of a term ---------------------------------------------------------------------------------------

    async def _begin(self) -> tuple[ElectionTerm, Tenure, float]:
        """Wait for the election, take the claim, and open a term; with the time of the group's last word."""
        failures = 0
        while True:
            tenure = await self._elected()
            try:
                token = await self._claims.call(self._open)
                # The answer of the append may be late, because this process was frozen: another one may lead by now.
                asked = self._loop.time()
                if await self._questions.call(tenure.is_confirmed, self._session):
                    return ElectionTerm(token), tenure, asked
            except RecordsRefused as refused:
                raise TopicError(str(refused)) from None
            except (TransactionFailed, BrokerUnavailable) as error:
                _log.warning("%s: the claim is taken again: %s", self._topic, error)
            # It may have been taken from us by one that was elected: claim only what the group confirms from now on.
            failures += 1
            while not tenure.is_over:
                await asyncio.sleep(backoff_seconds(failures, _FIRST_PAUSE, _LONGEST_PAUSE))
                if await self._questions.call(tenure.is_confirmed, self._session):
                    break

    async def _elected(self) -> Tenure:
        while self._tenure is None or self._tenure.is_over:
            if self._failure is not None:
                raise self._failure
            if self._tenure is not None:
                self._tenure.done()
            await self._changed.wait(1.0)
        return self._tenure

    def _open(self) -> int:
        """Take the claim, and write the record that opens a term; returns its token. Behind the record, not its own
        offset, so that it is never 0."""
        self._claim.take()
        opened = _Opened(f"{host_name()}, process {os.getpid()}", int(time.time() * 1000))
        return self._claim.append([Output(self._topic, msgspec.json.encode(opened), _KEY, None, 0, 0, 0, -1)])

    # -- its end -------------------------------------------------------------------------------------------------------

    async def _watch(self, tenure: Tenure, confirmed: float) -> None:
        """End the term when the group has not confirmed it for the time of a session: it may have elected another."""
        while not tenure.is_over:
            try:
                async with asyncio.timeout_at(confirmed + self._session):
                    confirmed = await self._confirmed(tenure)
            except TimeoutError:
                self._end_term(f"the group has not confirmed it for {self._session:g} seconds")
            except Exception as error:
                self._end_term(str(error))
            else:
                continue
            return

    async def _confirmed(self, tenure: Tenure) -> float:
        while True:
            await asyncio.sleep(self._session / _LOOKS)
            asked = self._loop.time()
            if await self._questions.call(tenure.is_confirmed, self._session):
                return asked

    def tenure_begins(self, tenure: Tenure) -> None:
        """Note an election; on the loop."""
        self._tenure = tenure
        self._changed.notify()

    def tenure_ends(self, tenure: Tenure) -> None:
        """Note the end of one; on the loop."""
        if self._term is not None:
            self._end_term(tenure.reason)
        else:
            tenure.done()
        self._changed.notify()

    def refused(self, error: Exception) -> None:
        """Note that the group refuses this process; on the loop."""
        self._failure = error
        self._changed.notify()

    def _notify(self, event: ElectionEvent) -> None:
        for listener in self._listeners:
            try:
                listener(event)
            except Exception:
                _log.exception("a listener of the election of %s has failed", self.name)


class _Posts:
    """Passes calls of the group's threads on to the loop that it is made on (``tenure.TenureOwner``)."""

    def __init__(self, election: Election) -> None:
        self._election = election
        self._inlet: Inlet[Callable[[], None]] = Inlet(lambda call: call())

    def begin(self, tenure: Tenure) -> None:
        self._inlet.put(partial(self._election.tenure_begins, tenure))

    def end(self, tenure: Tenure) -> None:
        self._inlet.put(partial(self._election.tenure_ends, tenure))

    def failed(self, error: Exception) -> None:
        self._inlet.put(partial(self._election.refused, error))
