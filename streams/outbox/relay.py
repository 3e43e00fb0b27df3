"""Relays: a thread for each shard that the group gives, in a program of your own or under ``kes outbox relay``.

with Relay(RelayConfig(name="bank", database=DATABASE, bootstrap_servers="localhost:9092")):
    serve()
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Callable
from typing import Final, Self

from streams.errors import BrokerUnavailable, ConfigError, OutboxError, TopicError
from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.settings import ClientSettings
from streams.outbox.config import RelayConfig
from streams.outbox.database import DatabaseLost
from streams.outbox.positions import positions_name, positions_spec
from streams.outbox.sessions import open_session
from streams.outbox.shard import BatchRelayed, RelayEvent, ShardLoop, described
from streams.runtime.ownership.tenure import GroupTenures, Tenure
from streams.statistics import SourceState

_log = logging.getLogger(__name__)

_STOP_SECONDS: Final = 10.0
_LEAVE_SECONDS: Final = 5.0
_CHECK_SECONDS: Final = 0.2
_PATIENCE_SECONDS: Final = 30.0
"""With a database that does not answer, before the group is left."""
_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def apply(config: RelayConfig, shards: int = 4, replication_factor: int = 1) -> list[str]:
    """Make what is missing of an outbox: its tables, and its positions topic; bring tables of an older version to this
    one. Returns what was made; harmless if repeated.

    Raises ``OutboxError`` (tables of a newer version, or with other shards), ``TopicError`` (a topic that differs),
    ``BrokerUnavailable``.
    """
    made = []
    try:
        with open_session(config.database, config.table) as session:
            if tables := session.apply(shards):
                made.append(tables)
    except DatabaseLost as error:
        raise OutboxError(f"the database does not answer: {error}") from None
    admin = TopicAdmin(ClientSettings(config.bootstrap_servers, config.client_settings, client_id="kes-outbox"))
    try:
        spec = positions_spec(config.name, shards, replication_factor)
        made += [f"topic {name}" for name in admin.create([spec])]
        if differences := admin.differences([spec]):
            raise TopicError("; ".join(differences))
    finally:
        admin.close()
    return made


class Relay:
    """Moves the rows of an outbox to Kafka, between ``start`` and ``stop`` (or in a ``with`` or ``async with`` block).

    Any number of relays may run for one outbox: they share its shards by the group ``<name>.outbox``, and move them
    when relays come and go. The group only says who should own a shard; Kafka's transactions decide. A relay whose
    database does not answer leaves the group until it does, since others may reach it. Raises ``ConfigError``.
    """

    def __init__(self, config: RelayConfig) -> None:
        self.config = config
        self._settings = ClientSettings(config.bootstrap_servers, config.client_settings, client_id="kes-outbox")
        self._listeners: list[Callable[[RelayEvent], None]] = []
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._at_work: dict[Tenure, tuple[ShardLoop, threading.Thread]] = {}
        self._group: GroupTenures | None = None
        self._thread: threading.Thread | None = None

    def on_event(self, listener: Callable[[RelayEvent], None]) -> None:
        """Call ``listener`` with each event, on the thread of its shard, which waits for it. What it raises is logged.
        Before ``start``."""
        self._listeners.append(listener)

    def start(self) -> None:
        """Look at the outbox, and join the group. Blocks for a look at the database.

        Raises ``OutboxError`` (no database, no tables, or of another version), ``ConfigError`` (it was started before).
        """
        if self._thread is not None:
            raise ConfigError("a relay is started once: make another one")
        try:
            shards = self._shards()
        except DatabaseLost as error:
            raise OutboxError(f"the database does not answer: {error}") from None
        # A daemon, as those of the shards: a call that never returns must not keep the process alive.
        self._thread = threading.Thread(target=self._keep, args=[shards], name="kes-outbox", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Look for rows at once: after a commit of this program. Harmless at any time; any thread."""
        for loop, _ in self._loops():
            loop.wake()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it is stopped, at most so long; returns whether it is. Raises the error that has stopped it:
        ``OutboxError``, ``OffsetError``, ``TopicError``, ``ConfigError``, ``MembershipFatal``."""
        is_stopped = self._stopping.wait(seconds)
        if self._failure is not None:
            raise self._failure
        return is_stopped

    def stop(self) -> None:
        """End batches and their deletion, let go of the shards, and leave the group. Blocks, some 15 seconds at most.
        Raises as ``wait``."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_STOP_SECONDS + _LEAVE_SECONDS)
        if self._failure is not None:
            raise self._failure

    def run(self) -> None:
        """Relay until SIGTERM or SIGINT, or until it fails. Main thread only. Raises as ``start`` and ``wait``."""
        before = {number: signal.signal(number, lambda *_: self._stopping.set()) for number in _STOP_SIGNALS}
        try:
            with self:
                while not self.wait(_CHECK_SECONDS):  # signals are handled in between
                    pass
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.start)
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.stop)

    # -- what a supervisor looks at, as at an event source -------------------------------------------------------------

    @property
    def member_id(self) -> str:
        """The group's name for this relay; empty before it has one."""
        return "" if self._group is None else self._group.member_id

    @property
    def state(self) -> SourceState:
        """``RUNNING`` once it is in the group, ``STOPPING`` when it is to end."""
        if self._stopping.is_set():
            return SourceState.STOPPING
        return SourceState.RUNNING if self._group is not None else SourceState.STARTING

    def remove_member(self, member_id: str, instance: str = "", timeout_seconds: float = 10.0) -> bool:
        """Take another relay out of the group that is known to be dead. Blocks. ``False``: it was not there. Raises
        ``BrokerUnavailable``."""
        if self._group is None:
            raise BrokerUnavailable("the relay has not joined its group yet")
        return self._group.remove_member(member_id, timeout_seconds)

    # -- the relay's own thread ----------------------------------------------------------------------------------------

    def _shards(self) -> int:
        with open_session(self.config.database, self.config.table) as session:
            return session.about().shards

    def _keep(self, shards: int) -> None:
        """Stay in the group, but for the times in which the database does not answer."""
        try:
            while not self._stopping.is_set():
                self._share(shards)
                while not self._stopping.wait(_CHECK_SECONDS):
                    try:
                        shards = self._shards()
                        break
                    except DatabaseLost as error:
                        _log.warning("%s: the database does not answer: %s", self.config.name, error)
        except BaseException as error:
            self._fail(error)

    def _share(self, shards: int) -> None:
        topic = positions_name(self.config.name)
        self._group = group = GroupTenures.connect(
            self._settings, topic, topic, shards, _Shards(self), session_seconds=self.config.session_seconds
        )
        group.start()
        try:
            while not self._stopping.wait(_CHECK_SECONDS):
                if any(self._is_cut_off(loop) for loop, _ in self._loops()):
                    _log.warning("%s: the database does not answer: the group is left", self.config.name)
                    return
        finally:
            group.stop()
            until = time.monotonic() + _STOP_SECONDS
            for loop, thread in self._loops():
                thread.join(max(0.0, until - time.monotonic()))
                if thread.is_alive():  # a database that hangs: the next owner settles what is open
                    loop.interrupt()
            # Left last: another relay gets the shards when nothing of ours is under way. Its claim settles what hangs.
            group.close(_LEAVE_SECONDS)

    @staticmethod
    def _is_cut_off(loop: ShardLoop) -> bool:
        return loop.database_lost_at is not None and time.monotonic() - loop.database_lost_at > _PATIENCE_SECONDS

    def _loops(self) -> list[tuple[ShardLoop, threading.Thread]]:
        with self._lock:
            return list(self._at_work.values())

    # -- the shards ----------------------------------------------------------------------------------------------------

    def _begin(self, tenure: Tenure) -> None:
        loop = ShardLoop(self.config, tenure, self._notify)
        thread = threading.Thread(target=self._work, args=[loop], name=f"kes-outbox-{tenure.partition}", daemon=True)
        # Noted before it runs: the thread takes itself out again when it ends.
        with self._lock:
            self._at_work[tenure] = loop, thread
        thread.start()

    def _end(self, tenure: Tenure) -> None:
        with self._lock:
            at_work = self._at_work.get(tenure)
        if at_work is not None:
            at_work[0].wake()

    def _work(self, loop: ShardLoop) -> None:
        try:
            loop.run()
        except BaseException as error:
            _log.error("%s, shard %d: %s", positions_name(self.config.name), loop.shard, error)
            self._fail(error)
        finally:
            with self._lock:
                del self._at_work[loop.tenure]
            if self._failure is None:  # else it would be given the shard once more
                loop.tenure.done()

    def _fail(self, error: BaseException) -> None:
        # The error first: those that the stop wakes up raise what they find.
        if self._failure is None:
            self._failure = error
        self._stopping.set()

    def _notify(self, event: RelayEvent) -> None:
        if not isinstance(event, BatchRelayed):
            _log.info("%s: %s", self.config.name, described(event))
        for listener in self._listeners:
            try:
                listener(event)
            except Exception:
                _log.exception("a listener of relay %s has failed", self.config.name)


class _Shards:
    """The relay as its group knows it (``tenure.TenureOwner``)."""

    def __init__(self, relay: Relay) -> None:
        self.begin, self.end, self.failed = relay._begin, relay._end, relay._fail
