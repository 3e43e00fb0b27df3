"""Candidates: one process among many is elected by a group, takes a claim, and has a term until the group ends it.

The group says which process should lead; the claim decides which one can write. Both look at the same partition, the
only one of its topic, whose records are the order of the terms.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Final, Protocol, TypeVar

from anyio import CancelScope

from streams.errors import BrokerUnavailable, ConfigError, NotLeading, RecordsRefused, TopicError, TransactionFailed
from streams.runtime.bridge import Inlet, Worker
from streams.runtime.claim import Claim
from streams.runtime.ownership.tenure import GroupTenures, Tenure, TenureOwner
from streams.runtime.signal import Signal
from streams.sak.backoff import backoff_seconds

_log = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
"""The first pause before the claim is taken again, and the longest one, take so many seconds."""
_CLOSE_SECONDS: Final = 5.0
"""Leaving the group takes so many seconds, at most."""
_QUESTION_SECONDS: Final = 3.0
"""The answer to a question takes so many seconds, at most: leaving the group waits for it."""
_CHECKS: Final = 4
"""So many questions go to the group in the time of a session, if each is answered at once."""


class CandidateTerm(Protocol):
    """A term, as the candidate sees it. ``token`` is higher than those of all terms before it."""

    token: int
    reason: str

    def end(self, reason: str) -> None:
        """Note that it is over. Repeating is harmless."""
        ...


T = TypeVar("T", bound=CandidateTerm)


class Candidate:
    """One process that may lead, between ``open`` and ``close``; on one event loop. ``name`` is for messages.

    ``session_seconds``: a term ends when the group has not confirmed it for so long.
    """

    def __init__(self, name: str, session_seconds: float) -> None:
        self.name = name
        self._session = session_seconds
        self._patience = min(session_seconds, _QUESTION_SECONDS)
        self._changed = Signal()
        self._tenure: Tenure | None = None
        self._failure: Exception | None = None
        self._has_term = self._is_open = False
        self._end_term: Callable[[str], None] | None = None

    @property
    def member_id(self) -> str:
        """Return the group's name for this process; empty before it has one."""
        return self.group.member_id if self._is_open else ""

    @property
    def is_elected(self) -> bool:
        """Check whether the group has elected this process; a term may not have begun."""
        return self._tenure is not None and not self._tenure.is_over

    async def open(self, connect: Callable[[TenureOwner], tuple[Claim, GroupTenures]]) -> None:
        """Join the group. ``connect`` makes claim and group, on the thread of the claim. Raises as it does."""
        self._loop = asyncio.get_running_loop()
        # One for the claim, one for the group: its answers must not wait for a broker that does not answer the other.
        self.claims, self._questions = Worker(f"kes-{self.name}"), Worker(f"kes-{self.name}-group")
        posts, made = _Posts(self), list[tuple[Claim, GroupTenures]]()
        try:
            await self.claims.call(lambda: made.append(connect(posts)))
        except BaseException:
            self.claims.post(_close_all, made)  # cancelled, they may be made only now; calls of a worker are in order
            self._abandon()
            raise
        self._claim, self.group = made[0]
        self._is_open = True
        self.group.start()

    async def close(self) -> None:
        """Leave the group, then let go of the claim: another process may lead at once."""
        with CancelScope(shield=True):
            await self._questions.call(self.group.close, _CLOSE_SECONDS)
            await self.claims.call(self._claim.close)
        self._abandon()

    def _abandon(self) -> None:
        for worker in (self.claims, self._questions):
            worker.abandon()

    @asynccontextmanager
    async def term(self, begin: Callable[[Claim, Tenure], T]) -> AsyncIterator[T]:
        """Wait for the election, and begin a term, for the time of the block; it is cancelled when the term ends.

        ``begin`` takes the claim and opens the term, on the thread of the claim; it is called again when brokers do
        not answer, or another process took the claim. Raises ``NotLeading`` when the term ends before the block, what
        ``begin`` raises for good, and the group's refusal (``MembershipFatal``, ``ConfigError``).
        """
        if self._has_term:
            raise ConfigError(f"{self.name} has a term already: one at a time")
        self._has_term = True
        try:
            term, tenure, confirmed = await self._begin(begin)
            with CancelScope() as scope:

                def end(reason: str) -> None:
                    if not scope.cancel_called:
                        term.end(reason)
                        scope.cancel()

                self._end_term = end
                watch = asyncio.create_task(self._watch(tenure, confirmed, end))
                try:
                    # The tenure may be over since before ``_end_term`` was set: ``tenure_ends`` has found no term
                    # then.
                    if tenure.is_over:
                        end(tenure.reason)
                    yield term
                finally:
                    watch.cancel()
                    self._end_term = None
                    term.end("")
                    # This comes behind the end of the term: from ``done`` on the next process may get the partition.
                    if tenure.is_over:
                        tenure.done()
        finally:
            self._has_term = False
        if scope.cancelled_caught:
            raise NotLeading(f"{self.name}: the term {term.token} is over: {term.reason}")

    # -- the beginning of a term ---------------------------------------------------------------------------------------

    async def _begin(self, begin: Callable[[Claim, Tenure], T]) -> tuple[T, Tenure, float]:
        """Wait for the election, take the claim, and open a term. Returns them with the time of the group's last
        answer."""
        failures = 0
        while True:
            tenure = await self._elected()
            try:
                term = await self.claims.call(begin, self._claim, tenure)
                # The answer of the append may be late, because this process was frozen: another one may lead by now.
                asked = self._loop.time()
                if await self._questions.call(tenure.is_confirmed, self._patience):
                    return term, tenure, asked
            except RecordsRefused as refused:
                raise TopicError(str(refused)) from None
            except (TransactionFailed, BrokerUnavailable) as error:
                _log.warning("%s: the claim is taken again: %s", self.name, error)
            # It may have been taken from us by one that was elected: claim only what the group confirms from now on.
            failures += 1
            while not tenure.is_over:
                await asyncio.sleep(backoff_seconds(failures, _FIRST_PAUSE, _LONGEST_PAUSE))
                if await self._questions.call(tenure.is_confirmed, self._patience):
                    break

    async def _elected(self) -> Tenure:
        while self._tenure is None or self._tenure.is_over:
            if self._failure is not None:
                raise self._failure
            if self._tenure is not None:
                self._tenure.done()
            await self._changed.wait(1.0)
        return self._tenure

    # -- its end -------------------------------------------------------------------------------------------------------

    async def _watch(self, tenure: Tenure, confirmed: float, end: Callable[[str], None]) -> None:
        """End the term when the group has not confirmed it for the time of a session: it may have elected another."""
        while not tenure.is_over:
            try:
                async with asyncio.timeout_at(confirmed + self._session):
                    confirmed = await self._confirmed(tenure)
            except TimeoutError:
                end(f"the group has not confirmed it for {self._session:g} seconds")
            except Exception as error:
                end(str(error))
            else:
                continue
            return

    async def _confirmed(self, tenure: Tenure) -> float:
        while True:
            await asyncio.sleep(self._session / _CHECKS)
            # The time of the question counts, and not that of its answer: right behind the answer the group may elect
            # another process.
            asked = self._loop.time()
            if await self._questions.call(tenure.is_confirmed, self._patience):
                return asked

    def end_term(self, reason: str) -> None:
        """End the term that there is; on the loop."""
        if self._end_term is not None:
            self._end_term(reason)

    def tenure_begins(self, tenure: Tenure) -> None:
        """Note an election; on the loop."""
        self._tenure = tenure
        self._changed.notify()

    def tenure_ends(self, tenure: Tenure) -> None:
        """Note the end of one; on the loop."""
        if self._end_term is not None:
            self._end_term(tenure.reason)
        else:
            tenure.done()
        self._changed.notify()

    def refused(self, error: Exception) -> None:
        """Note that the group refuses this process; on the loop."""
        self._failure = error
        self._changed.notify()


def _close_all(made: list[tuple[Claim, GroupTenures]]) -> None:
    for claim, group in made:
        group.close(0.0)
        claim.close()


class _Posts:
    """Passes calls of the group's threads on to the loop that it is made on (``tenure.TenureOwner``)."""

    def __init__(self, candidate: Candidate) -> None:
        self._candidate = candidate
        self._inlet: Inlet[Callable[[], None]] = Inlet(lambda call: call())

    def begin(self, tenure: Tenure) -> None:
        self._inlet.put(partial(self._candidate.tenure_begins, tenure))

    def end(self, tenure: Tenure) -> None:
        self._inlet.put(partial(self._candidate.tenure_ends, tenure))

    def failed(self, error: Exception) -> None:
        self._inlet.put(partial(self._candidate.refused, error))
