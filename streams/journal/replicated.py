"""State machines that are replicated by a journal: one member decides, the others follow, and any can take over.

async with Replicated(journal, Bank, snapshots=SnapshotFolder("/var/lib/bank")) as bank:
    reply = await bank.decide(lambda state: ([Transferred("a", "b", 5)], "done"))
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, Generic, Self, TypeVar

from streams.core.journal import MemberState
from streams.errors import BrokerUnavailable, ConfigError, JournalError, NotLeading, ReplicaFailed
from streams.journal.entries import JournalCheckpoint, JournalEntry, JournalItem, TermBegan
from streams.journal.held_state import HeldState, M, until_done
from streams.journal.journal import Journal
from streams.journal.reader import JournalReader
from streams.journal.snapshots import SnapshotFolder
from streams.journal.term import JournalTerm
from streams.runtime.signal import Broadcast, Signal

_log = logging.getLogger(__name__)

T = TypeVar("T")

_PAUSE_SECONDS: Final = 1.0


class Replicated(Generic[M]):
    """One member of a replicated service, in an ``async with`` block; on one event loop.

    ``machine``: a class as ``StateMachine``. ``snapshots``: a folder of this member alone. ``checkpoint_every``:
    offsets after which the leader makes a checkpoint, at which every member saves its state. ``address``: where this
    member is reached when it leads. Raises ``ConfigError``.
    """

    def __init__(
        self,
        journal: Journal,
        machine: type[M],
        *,
        snapshots: SnapshotFolder,
        checkpoint_every: int = 100_000,
        address: str = "",
    ) -> None:
        if checkpoint_every < 1:
            raise ConfigError(f"checkpoint_every is {checkpoint_every}; it must be 1 or more")
        self.journal, self.machine, self.snapshots, self.address = journal, machine, snapshots, address
        self.leader = ""
        """The address of the leader, as far as this member has read; it may have lost its term."""
        self._held: HeldState[M] = HeldState(journal, machine, snapshots)
        self._every = checkpoint_every
        self.state = MemberState.LOADING
        self._candidate = journal.candidate()
        self._term: JournalTerm | None = None
        self._turn = asyncio.Lock()
        self._due = Signal()
        self._moved = Broadcast()
        self._reader: JournalReader | None = None
        self._failure: BaseException | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def is_leading(self) -> bool:
        """Check whether decisions are made here. Without a barrier, that may be over."""
        return self._term is not None and not self._term.is_over and not self._held.is_spoilt

    @property
    def member_id(self) -> str:
        """Return the group's name for this member; another one after each term. It is for ``Journal.remove_member``, by
        the program that has started this process, and sees that it is dead."""
        return self._candidate.member_id

    @property
    def position(self) -> int:
        """Everything before it is applied; on the leader, everything before its term at least."""
        return self._held.position

    @property
    def failure(self) -> BaseException | None:
        """The error that has stopped this member: of its state machine, of its log, of its group."""
        return self._failure

    async def decide(self, decision: Callable[[M], tuple[Sequence[object], T]]) -> T:
        """Have the leader decide: ``decision(state)`` returns events and a reply. The events are applied and appended,
        and the reply is returned when they, and all that they rest on, are committed.

        The function must not change the state, nor take long: one decision is made at a time, on the loop. Raises
        ``NotLeading`` (nothing of it is in the log; the message has the leader's address), what the function raises,
        ``EncodeError``, ``RecordRefused`` (too large), ``ReplicaFailed`` (``apply`` raised: nothing is appended, and
        the state is rebuilt).
        """
        async with self._turn:
            term, state = self._leading()
            events, reply = decision(state)
            try:
                payloads = self._held.decided(events)
            except ReplicaFailed:
                self._due.notify()
                raise
            appending = term.submit_payloads(payloads)
            self._held.note(appending)
        await appending
        self._check_due(term)
        return reply

    async def read(self, query: Callable[[M], T], *, barrier: bool = True) -> T:
        """Return ``query(state)``. With a barrier: on the leader alone, and as of a moment within the call; else
        ``NotLeading``. Without: on any member, from what it has applied, on the leader also what is not committed yet.
        """
        if barrier:
            term, state = self._leading()
            value = query(state)
            await term.barrier()  # behind everything that the state has
            self._check_due(term)  # a barrier is an entry, too
            return value
        while self._held.state is None or self._held.is_spoilt:
            self._check()
            await self._moved.wait(_PAUSE_SECONDS)
        self._check()
        return query(self._held.state)

    async def lag(self) -> int:
        """Return by how many offsets this member is behind the end of the log, markers included; 0 on the leader, -1
        while it is not known. Raises ``BrokerUnavailable``."""
        self._check()
        if self.is_leading:
            return 0
        reader = self._reader
        return -1 if reader is None else max(await reader.end() - max(self.position, reader.position), 0)

    async def wait(self) -> None:
        """Wait until this member stops by itself, and raise why."""
        if self._task is not None:
            await asyncio.wait([self._task])
        self._check()

    async def __aenter__(self) -> Self:
        try:
            await self._held.open()
        except BaseException:
            self._held.close()
            self.state = self.state.to(MemberState.STOPPED)
            raise
        self.state = self.state.to(MemberState.FOLLOWING)
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self.state is not MemberState.STOPPED:  # cancelled before its first step
            self.state = self.state.to(MemberState.STOPPED)
        self._held.close()
        if error is None:
            self._check()

    # -- following and leading -----------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while True:
                await self._one_turn()
                await self._return()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            _log.error("%s: this member stops: %s", self.journal.name, error)
            self._failure = error
            self._moved.notify()
        finally:
            self.state = self.state.to(MemberState.STOPPED)

    async def _one_turn(self) -> None:
        """Follow, and stand for the leadership; lead until the term ends. Raises what stops this member."""
        following = asyncio.create_task(self._follow())
        leading = asyncio.create_task(self._lead(following))
        try:
            await asyncio.wait([leading, following], return_when=asyncio.FIRST_COMPLETED)
            if following.cancelled():  # this member leads
                await asyncio.wait([leading])
        finally:
            for task in (leading, following):
                task.cancel()
            if await until_done(leading, following):  # cancelled once more: nothing of the turn is left behind
                raise asyncio.CancelledError
        for task in (following, leading):
            if not task.cancelled():
                task.result()

    async def _lead(self, following: asyncio.Task[None]) -> None:
        self._candidate = candidate = self.journal.candidate()
        try:
            async with self.journal.lead(address=self.address, is_strict=True, candidate=candidate) as term:
                self.state = self.state.to(MemberState.CATCHING_UP)
                while self.position <= term.token:  # J4: everything before the term, and its own record
                    await self._moved.wait(_PAUSE_SECONDS)
                following.cancel()
                await asyncio.wait([following])
                self._term = term
                self.state = self.state.to(MemberState.LEADING)
                _log.info("%s: this member leads, term %d", self.journal.name, term.token)
                try:
                    while not self._held.is_spoilt:
                        if term.position - self._held.covered >= self._every:
                            await self._checkpoint(term)
                        await self._due.wait()
                finally:
                    self._term = None
                    self.state = self.state.to(MemberState.SETTLING)
        except NotLeading as error:
            _log.info("%s: %s", self.journal.name, error)
        except BrokerUnavailable as error:
            _log.warning("%s: %s", self.journal.name, error)
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _checkpoint(self, term: JournalTerm) -> None:
        """Save the state, and append the checkpoint; without the one there is not the other."""
        async with self._turn:
            if self._held.is_spoilt:  # by a decision that had the turn before
                return
            await term.barrier()  # all that the state has is committed
            try:
                async with term.checkpoint() as pending:
                    await self._held.save(pending.position)
            except JournalError as error:  # a full disk: the older snapshots are there
                _log.error("%s: no checkpoint: %s", self.journal.name, error)
                self._held.covered = term.position

    async def _return(self) -> None:
        """Go on as a follower, once a term has ended and every append of it is settled."""
        if self._held.is_ahead:
            _log.info("%s: the state ran ahead of the log, and is rebuilt", self.journal.name)
            self.state = self.state.to(MemberState.REBUILDING)
            await self._held.load()
        else:
            await self._held.settle()
        if self.state is not MemberState.FOLLOWING:  # as it is when no term has begun
            self.state = self.state.to(MemberState.FOLLOWING)
        self._moved.notify()

    async def _follow(self) -> None:
        while True:
            try:
                async with self.journal.reader(after=self.position, topic_id=self._held.topic.topic_id) as reader:
                    self._reader = reader
                    async for item in reader.follow():
                        await self._take(item)
            except BrokerUnavailable as error:
                _log.warning("%s: %s", self.journal.name, error)
                await asyncio.sleep(_PAUSE_SECONDS)
            finally:
                self._reader = None

    async def _take(self, item: JournalItem) -> None:
        held = self._held
        match item:
            case JournalEntry():
                held.take(item)
            case TermBegan():
                self.leader = item.address
            case JournalCheckpoint():
                try:
                    await held.save(item.covers if held.applied <= item.covers else item.offset)
                except JournalError as error:
                    _log.error("%s: no snapshot: %s", self.journal.name, error)
        held.position = item.position
        self._moved.notify()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _leading(self) -> tuple[JournalTerm, M]:
        self._check()
        term, state = self._term, self._held.state
        if not self.is_leading or term is None or state is None:
            where = f"; {self.leader} may lead" if self.leader and self.leader != self.address else ""
            raise NotLeading(f"{self.journal.name}: this member does not lead{where}; nothing is appended")
        return term, state

    def _check_due(self, term: JournalTerm) -> None:
        if term.position - self._held.covered >= self._every:
            self._due.notify()
