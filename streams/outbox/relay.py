"""Relays: a thread for each shard of an outbox, in a program of your own or under ``kes outbox relay``.

with Relay(RelayConfig(name="bank", database=DATABASE, bootstrap_servers="localhost:9092")):
    serve()
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from streams.clients.admin import TopicAdmin
from streams.clients.settings import ClientSettings
from streams.errors import ConfigError, OutboxError, TopicError
from streams.outbox.config import RelayConfig
from streams.outbox.positions import positions_name, positions_spec
from streams.outbox.postgres import DatabaseLost, PostgresSession
from streams.outbox.shard import RelayEvent, ShardLoop

_log = logging.getLogger(__name__)

_STOP_SECONDS: Final = 10.0


def apply(config: RelayConfig, shards: int = 4, replication_factor: int = 1) -> list[str]:
    """Make what is missing of an outbox: its tables, and its positions topic. Returns what was made; harmless if
    repeated.

    Raises ``OutboxError`` (tables of another version, or with other shards), ``TopicError`` (a topic that differs),
    ``BrokerUnavailable``.
    """
    made = []
    try:
        with PostgresSession(config.database, config.table) as session:
            if session.apply(shards):
                made.append(
                    f"tables {config.table}, {config.table}_parked, {config.table}_shards, {config.table}_about"
                )
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

    Any number of relays may run for one outbox: each shard is owned by one of them, the others wait for it. Kafka
    decides who owns it; a lock in the database says who should try. Raises ``ConfigError``.
    """

    def __init__(self, config: RelayConfig) -> None:
        self.config = config
        self._listeners: list[Callable[[RelayEvent], None]] = []
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._loops: list[ShardLoop] = []
        self._threads: list[threading.Thread] = []

    def on_event(self, listener: Callable[[RelayEvent], None]) -> None:
        """Call ``listener`` with each event, on the thread of its shard, which waits for it. What it raises is logged.
        Before ``start``."""
        self._listeners.append(listener)

    def start(self) -> None:
        """Look at the outbox, and start a thread for each shard. Blocks for a look at the database.

        Raises ``OutboxError`` (no database, no tables, or of another version), ``ConfigError`` (it was started before).
        """
        if self._threads:
            raise ConfigError("a relay is started once: make another one")
        try:
            with PostgresSession(self.config.database, self.config.table) as session:
                shards = session.about().shards
        except DatabaseLost as error:
            raise OutboxError(f"the database does not answer: {error}") from None
        self._loops = [ShardLoop(self.config, shard, self._stopping, self._notify) for shard in range(shards)]
        # Daemons: a call that never returns must not keep the process alive.
        self._threads = [
            threading.Thread(target=self._run, args=[loop], name=f"kes-outbox-{loop.shard}", daemon=True)
            for loop in self._loops
        ]
        for thread in self._threads:
            thread.start()

    def wake(self) -> None:
        """Look for rows at once: after a commit of this program. Harmless at any time; any thread."""
        for loop in self._loops:
            loop.wake()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it is stopped, at most so long; returns whether it is. Raises the error that has stopped it:
        ``OutboxError``, ``OffsetError``, ``TopicError``."""
        is_stopped = self._stopping.wait(seconds)
        if self._failure is not None:
            raise self._failure
        return is_stopped

    def stop(self) -> None:
        """End batches and their deletion, and let go of the shards. Blocks, 10 seconds at most in good order. Raises as
        ``wait``."""
        self._stopping.set()
        self.wake()
        for thread in self._threads:
            thread.join(_STOP_SECONDS)
        for loop, thread in zip(self._loops, self._threads, strict=True):
            if thread.is_alive():  # a database that hangs: the next owner settles what is open
                loop.interrupt()
        if self._failure is not None:
            raise self._failure

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.start)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.stop)

    def _run(self, loop: ShardLoop) -> None:
        try:
            loop.run()
        except BaseException as error:
            if self._failure is None:
                self._failure = error
            _log.error("%s, shard %d: %s", positions_name(self.config.name), loop.shard, error)
            self._stopping.set()
            self.wake()

    def _notify(self, event: RelayEvent) -> None:
        for listener in self._listeners:
            try:
                listener(event)
            except Exception:
                _log.exception("a listener of relay %s has failed", self.config.name)
