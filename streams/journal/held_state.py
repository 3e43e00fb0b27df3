"""The state of one member of a replicated service: loaded, changed entry by entry, saved at checkpoints."""

from __future__ import annotations

import asyncio
import io
import logging
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import Any, BinaryIO, Final, Generic, Protocol, Self, TypeVar

from anyio import CancelScope

from streams.core.journal import Payload
from streams.errors import BrokerUnavailable, JournalError, RecordRefused, ReplicaFailed
from streams.journal.appending import Appending
from streams.journal.entries import JournalEntry
from streams.journal.journal import Journal, JournalTopic
from streams.journal.snapshots import SnapshotFolder
from streams.records import record_size
from streams.runtime.bridge import Worker

_log = logging.getLogger(__name__)

_PAUSE_SECONDS: Final = 1.0


class StateMachine(Protocol):
    """The state of a service. It starts empty, as the class makes it without arguments."""

    def apply(self, event: Any) -> None:
        """Change the state; the only way in which it changes. It depends on state and event alone: no clock, no random
        numbers, no I/O. Called on the event loop."""
        ...

    def save(self, file: BinaryIO) -> None:
        """Write the state; equal states give equal bytes. On another thread; nothing is applied meanwhile."""
        ...

    @classmethod
    def load(cls, file: BinaryIO) -> Self:
        """Make the state that was saved. On another thread."""
        ...


M = TypeVar("M", bound=StateMachine)


class HeldState(Generic[M]):
    """A state machine, and how far it is. On the loop; ``state`` is ``None`` while it is being built.

    ``position``: everything before it is applied. ``applied``: behind the last entry that was. ``covered``: of the last
    checkpoint. ``is_spoilt``: an event is half applied; nothing is read or saved until the state is built again.
    """

    def __init__(self, journal: Journal, machine: type[M], snapshots: SnapshotFolder) -> None:
        self.state: M | None = None
        self.is_spoilt = False
        self.position = self.applied = self.covered = 0
        self.topic: JournalTopic
        self._journal, self._class, self._snapshots = journal, machine, snapshots
        self._unsettled: deque[Appending] = deque()  # decisions of the term, but for those that are committed
        self._worker = Worker(f"kes-{journal.name}-state")

    async def open(self) -> None:
        """Look at the topic, and load. Raises as ``Journal.check`` and ``load``."""
        self.topic = await self._journal.check()
        await self.load()

    def close(self) -> None:
        """Let go of the thread. Repeating is harmless."""
        self._worker.abandon()

    async def load(self) -> None:
        """Drop the state, and load the newest snapshot, or start from nothing. Waits for brokers.

        Raises ``ReplicaFailed``, and as ``SnapshotFolder.newest`` and ``Journal.check``.
        """
        self.state = None
        self._unsettled.clear()
        name, topic_id = self._journal.name, self.topic.topic_id
        topic = await self._now()
        found = await self._worker.call(self._snapshots.newest, name, topic_id, topic.start, topic.end)
        state, position = self._class(), 0
        if found is not None:
            position = found.head.position
            try:
                state = await self._worker.call(self._class.load, io.BytesIO(found.state))
            except Exception as error:
                where = f"{name}: {self._class.__name__}.load failed on the snapshot of {position}"
                raise ReplicaFailed(f"{where}: {error!r}") from error
        self.position = self.applied = self.covered = position
        self.state, self.is_spoilt = state, False

    async def save(self, position: int) -> None:
        """Save the state as that of a position. Raises ``JournalError`` (it cannot be written), ``ReplicaFailed``."""
        assert self.state is not None
        name, write = self._journal.name, self.state.save
        try:
            await _to_its_end(self._worker.call(self._snapshots.save, name, self.topic.topic_id, position, write))
        except JournalError:
            raise
        except Exception as error:
            where = f"{name}: {self._class.__name__}.save failed at {position}"
            raise ReplicaFailed(f"{where}: {error!r}") from error
        self.covered = position

    def take(self, entry: JournalEntry) -> None:
        """Apply an entry of the log. Raises ``ReplicaFailed``."""
        self.apply(entry.event, f"{self._journal.name}[0]@{entry.offset}")
        self.applied = entry.position

    def apply(self, event: object, where: str) -> None:
        """Apply an event. Raises ``ReplicaFailed``: a part of it may be applied."""
        assert self.state is not None
        try:
            self.state.apply(event)
        except Exception as error:
            self.is_spoilt = True
            name = f"{self._class.__name__}.apply"
            raise ReplicaFailed(f"{where}: {name} failed on {type(event).__name__}: {error!r}") from error

    # -- on the leader -------------------------------------------------------------------------------------------------

    def decided(self, events: Sequence[object]) -> list[Payload]:
        """Apply the events of a decision, and return them encoded. Raises ``EncodeError``, ``ConfigError`` and
        ``RecordRefused`` (they are too large), before anything is applied; ``ReplicaFailed``."""
        types, name, limit = self._journal.types, self._journal.name, self.topic.entry_limit
        payloads = [types.payload(event) for event in events]
        size = sum(record_size(None, one.value, one.headers) for one in payloads)
        if size > limit:
            raise RecordRefused(f"{name}: a decision of {size} bytes, and {limit} are taken; nothing of it is applied")
        # As the replicas will see them: an event that its codec changes must not make the members differ.
        for event in [types.event_of(payload) for payload in payloads]:
            self.apply(event, f"a decision for {name}")
        return payloads

    def note(self, appending: Appending) -> None:
        """Note an append of what is applied already."""
        while len(self._unsettled) > 1 and self._unsettled[0].is_committed:
            self._unsettled.popleft()
        self._unsettled.append(appending)

    @property
    def is_ahead(self) -> bool:
        """Check, once the term has ended, whether the state has something that is not in the log."""
        return self.is_spoilt or not all(one.is_committed for one in self._unsettled)

    async def settle(self) -> None:
        """Go on behind the decisions of the term, all of which are committed."""
        if self._unsettled:
            self.position = self.applied = await self._unsettled[-1]
        self._unsettled.clear()

    async def _now(self) -> JournalTopic:
        while True:
            try:
                return await self._journal.check()
            except BrokerUnavailable as error:
                _log.warning("%s: %s", self._journal.name, error)
                await asyncio.sleep(_PAUSE_SECONDS)


async def until_done(*tasks: asyncio.Future[Any]) -> bool:
    """Wait until all are done, also when this task is cancelled meanwhile; returns whether it was."""
    is_cancelled = False
    with CancelScope(shield=True):  # else a scope that is cancelled would do it again at each turn of the loop
        while not all(task.done() for task in tasks):
            try:
                await asyncio.wait(tasks)
            except asyncio.CancelledError:
                is_cancelled = True
    return is_cancelled


async def _to_its_end(call: Coroutine[Any, Any, object]) -> None:
    """Wait for a call on another thread also when this task is cancelled: the state must not change meanwhile."""
    running = asyncio.ensure_future(call)
    if await until_done(running):  # before the result: its error would swallow the cancellation, and the task go on
        if (error := running.exception()) is not None:
            _log.error("a snapshot fails while its member stops: %s", error)
        raise asyncio.CancelledError
    running.result()
