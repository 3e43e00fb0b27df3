"""The term of a leader: appends that share transactions, barriers and checkpoints. On one event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Final

from anyio import CancelScope

from streams.core.journal import BARRIER_TYPE, CHECKPOINT_TYPE, CheckpointRecord, Payload, TermState, control
from streams.errors import AppendConflict, AppendUnsettled, ConfigError, NotLeading, RecordRefused, RecordsRefused
from streams.journal.appending import Appending, PendingCheckpoint
from streams.journal.entries import EntryTypes
from streams.journal.writer import TermWriter
from streams.runtime.bridge import Worker
from streams.runtime.signal import Signal

_GROUP_BYTES: Final = 900_000
"""Of the entries that share a transaction: they are one batch, unless the topic's ``max.message.bytes`` is smaller. One
append that has more is a transaction of its own."""
_GROUP_ENTRIES: Final = 5_000
_CLOSE_SECONDS: Final = 30.0

_checkpoint: ContextVar[object] = ContextVar("checkpoint")
"""The one in whose block this task is, or was made."""


class JournalTerm:
    """The time in which this process leads, and may append. Made by ``Journal.lead``; on its event loop.

    ``token``: the offset of the term's first entry, higher than that of all terms before it. ``position``: behind the
    last entry that is committed. ``is_strict``: a refused append ends the term, since others rest on it.
    """

    def __init__(self, name: str, writer: TermWriter, types: EntryTypes, *, is_strict: bool = False) -> None:
        self.token, self.name = writer.token, name
        self.reason = ""
        self.is_over = False
        self.is_strict = is_strict
        self._writer, self._types = writer, types
        self._queue: deque[Appending] = deque()
        self._changed, self._idle = Signal(), Signal()
        self._ended: asyncio.Event | None = None
        self._under_way = False
        self._checkpoint: PendingCheckpoint | None = None
        self._pump: asyncio.Task[None] | None = None
        self.failure: BaseException | None = None
        """The error of the log that has ended the term: ``JournalError``, ``OffsetError``, ``TopicError``."""

    def __repr__(self) -> str:
        return f"JournalTerm({self.name!r}, {self.token})"

    @property
    def position(self) -> int:
        """Behind the last entry that is committed."""
        return self._writer.position

    @property
    def state(self) -> TermState:
        """Return what it does now."""
        return self._writer.state

    async def append(self, *events: object, expect: int | None = None) -> int:
        """Append events, all or none, and return the position behind them once all in-sync replicas have them.

        ``expect``: only if nothing was appended behind this position, else ``AppendConflict``; a barrier that no append
        shares, and a checkpoint, are entries, too: take ``position`` behind them. ``NotLeading``: it is not in the log,
        and never will be. ``RecordRefused``, ``EncodeError``, ``ConfigError``: the same, by the fault of an event.
        Cancelled, it is withdrawn if it was not sent; else the log decides: ``submit`` lets you know.
        """
        return await self.submit(*events, expect=expect).answer

    def submit(self, *events: object, expect: int | None = None) -> Appending:
        """Begin an append, and return at once. Its order is that of the calls. Raises as ``append`` where it can be
        known at once."""
        if not events:
            raise ConfigError("append() without an event: nothing would be appended")
        return self.submit_payloads([self._types.payload(event) for event in events], expect)

    def submit_payloads(self, payloads: Sequence[Payload], expect: int | None = None) -> Appending:
        """``submit`` for events that are encoded already (``Journal.types.payload``); none: a barrier."""
        return self._put(Appending(payloads, expect))

    async def barrier(self) -> None:
        """Return when it is sure that this process led at a moment after the call, and that everything appended before
        is committed. Those who wait share one commit. Raises ``NotLeading``."""
        await self.submit_payloads([])

    @asynccontextmanager
    async def checkpoint(self, name: str = "", *, at: int | None = None) -> AsyncIterator[PendingCheckpoint]:
        """Make a checkpoint: save a state within the block; leaving it appends the entry, an exception appends none.

        Without ``at``: appends that are under way are ended first, and new ones wait for the end of the block; the
        state of ``checkpoint.position`` is the one that is there. With ``at``: appends go on, and the state that is
        saved is a copy of that position. Raises ``NotLeading``, and ``ConfigError`` for one within another, for an
        append within it, and for a position that is not known yet.
        """
        self._check_position()
        if at is not None and not 0 <= at <= self.position:
            raise ConfigError(f"{self.name}: a checkpoint at {at}: the journal is known up to {self.position}")
        while at is None and self._checkpoint is not None:
            await self._idle.wait(0.05)
        # Again: the term may have ended while another checkpoint was waited for.
        self._check()
        pending = PendingCheckpoint(self.position if at is None else at)
        if at is None:
            self._checkpoint = pending
        mark = _checkpoint.set(pending if at is None else _checkpoint.get(None))
        try:
            while at is None and self._under_way:
                await self._idle.wait(0.05)
            # Not before: an append under way at the start of the block has moved the position.
            if at is None:
                pending.position = self.position
            self._check()
            yield pending
            entry = control(CHECKPOINT_TYPE, CheckpointRecord(pending.position, name))
            appending = Appending([entry], None, passes=True)
            self._check()
            # In front of the appends that were held back: they are not covered by it.
            self._queue.appendleft(appending)
            self._changed.notify()
            try:
                pending.entry_position = await appending
            except asyncio.CancelledError:
                appending.withdraw()
                raise
        finally:
            _checkpoint.reset(mark)
            if at is None:
                self._checkpoint = None
                self._changed.notify()

    async def ended(self) -> str:
        """Wait until the term is over, and return why."""
        if self._ended is None:
            self._ended = asyncio.Event()
            if self.is_over:
                self._ended.set()
        await self._ended.wait()
        return self.reason

    def end(self, reason: str) -> None:
        """Begin no append any more; only the first reason counts."""
        if not self.is_over:
            self.is_over, self.reason = True, reason
            if self._ended is not None:
                self._ended.set()
            self._changed.notify()

    # -- for Journal ---------------------------------------------------------------------------------------------------

    def start(self, worker: Worker, on_failure: Callable[[str], None]) -> None:
        """Begin to append, on this thread; ``on_failure(reason)`` ends the term."""
        self._pump = asyncio.create_task(self._run(worker, on_failure))

    async def close(self, close_seconds: float = _CLOSE_SECONDS) -> None:
        """Settle what is under way, refuse the rest. An append that no broker answers for so long is given up."""
        self.end("it was left")
        with CancelScope(shield=True):
            if self._pump is not None:
                done, _ = await asyncio.wait([self._pump], timeout=close_seconds)
                if not done:
                    self._writer.give_up()
                    await asyncio.wait([self._pump])

    # -- the pump ------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self.is_over:
            raise NotLeading(f"{self.name}: the term {self.token} is over: {self.reason}; nothing is appended")

    def _check_position(self) -> None:
        if self._checkpoint is not None and _checkpoint.get(None) is self._checkpoint:  # a task may outlive the block
            raise ConfigError(f"{self.name}: neither append nor checkpoint within the block of a checkpoint")

    def _put(self, appending: Appending) -> Appending:
        self._check_position()
        self._check()
        self._queue.append(appending)
        self._changed.notify()
        return appending

    async def _run(self, worker: Worker, on_failure: Callable[[str], None]) -> None:
        try:
            while not self.is_over:
                group = self._next_group()
                if not group:
                    await self._changed.wait()
                    continue
                self._under_way = True
                await self._send(worker, group)
                self._under_way = False
                self._idle.notify()
                # Those that were answered append again, and share the next transaction: callers of ``append`` after one
                # turn of the loop, those that await an ``Appending``, as decisions do, after two.
                await asyncio.sleep(0)
                await asyncio.sleep(0)
        except BaseException as error:
            damage = error.__cause__ if isinstance(error, AppendUnsettled) and error.__cause__ else error
            self.failure = None if isinstance(error, NotLeading) else damage
            self.end(self._writer.reason or str(damage))
            on_failure(self.reason)
        finally:
            self._under_way = False
            self._writer.end(self.reason)
            refusal = NotLeading(f"{self.name}: the term {self.token} is over: {self.reason}; nothing is appended")
            for appending in self._queue:
                appending.fail(refusal)
            self._queue.clear()
            self._idle.notify()

    def _next_group(self) -> list[Appending]:
        group: list[Appending] = []
        size = entries = 0
        while self._queue:
            first = self._queue[0]
            if first.is_settled:  # withdrawn
                self._queue.popleft()
                continue
            if self._checkpoint is not None and not first.passes:
                break
            if group and (first.is_alone or first.expect is not None or size + first.bytes > _GROUP_BYTES):
                break
            self._queue.popleft()
            if first.expect is not None and first.expect < self.position:
                first.fail(
                    AppendConflict(
                        f"{self.name}: entries were appended up to {self.position}, behind the expected "
                        f"{first.expect}; nothing is appended"
                    )
                )
                continue
            group.append(first)
            size, entries = size + first.bytes, entries + len(first.payloads)
            if first.is_alone or entries >= _GROUP_ENTRIES:
                break
        return group

    async def _send(self, worker: Worker, group: list[Appending]) -> None:
        """Commit a group, and give each append its answer."""
        payloads = [payload for appending in group for payload in appending.payloads]
        origins = [index for index, appending in enumerate(group) for _ in appending.payloads]
        if not payloads:
            payloads, origins = [control(BARRIER_TYPE)], [0]
        # Before the call: from here on an append can no longer be withdrawn, whatever becomes of its caller.
        for appending in group:
            appending.is_sent = True
        try:
            offsets = await worker.call(self._writer.commit, payloads, origins)
        except RecordsRefused as refused:
            self._refused(group, refused)
            return
        except BaseException as error:
            for appending in group:
                appending.fail(error)
            raise
        done = 0
        for appending in group:
            done += len(appending.payloads)
            appending.succeed(offsets[done - 1] + 1 if done else self._writer.position)

    def _refused(self, group: list[Appending], refused: RecordsRefused) -> None:
        """Refuse the appends at fault, and send the others again, one by one if no record was named."""
        named = {record.output.origin for record in refused.refused if record.output is not None}
        error = RecordRefused(f"{refused}; nothing of the append is in the log")
        if self.is_strict:
            for index, appending in enumerate(group):
                appending.fail(error if index in named or len(group) == 1 else self._unfit())
            raise NotLeading(str(error))
        # Backwards, since each goes to the front of the queue: the order of the appends stays.
        for index, appending in reversed(list(enumerate(group))):
            if index in named or len(group) == 1:
                appending.fail(error)
            else:
                appending.is_alone = appending.is_alone or not named
                appending.is_sent = False
                self._queue.appendleft(appending)

    def _unfit(self) -> NotLeading:
        return NotLeading(f"{self.name}: the term {self.token} is over: an append that this one rests on was refused")
