"""``CommandClient``: commands to a running source, from any process, and their answers."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AsyncExitStack
from typing import Any, Final, Generic, Self, TypeVar

import msgspec

from streams.core.commands import CommandRules, content_of
from streams.errors import (
    BrokerUnavailable,
    CommandFailed,
    ConfigError,
    NotKnown,
    Parked,
    Stopped,
    StreamsError,
)
from streams.model.answers import Answer
from streams.model.commands import CommandDone, Versioned
from streams.queries.asking import GroupAsker
from streams.queries.reader import StateReader
from streams.queries.tickets import TicketRefused
from streams.records import Delivery, Record, TopicPartition
from streams.runtime.queries.commands import LONGEST_HOLD, CommandAnswer, CommandQuestion
from streams.sak.murmur2 import partition_of
from streams.source.event_producer import AsyncEventProducer, EventProducer
from streams.source.event_source import EventSource
from streams.stores.table import Table

K = TypeVar("K", str, bytes)
S = TypeVar("S")
Key = TypeVar("Key", str, bytes)  # of `of`, which is called on the bare class: pyright wants variables of its own there
State = TypeVar("State")

MOST_AT_A_TIME: Final = 64
"""Commands that wait for their answers at a time; further ones wait for their turn, before they are sent. Each has a
connection."""
UNPLACED_HOLD: Final = 0.2
"""Seconds that a member holds a question while it is not known where the command's record is: so soon the next
question can name the place, and a command that has failed or waits in a queue is found."""
_DELIVERY_SECONDS: Final = 30.0

_log = logging.getLogger(__name__)


class CommandClient(GroupAsker[CommandQuestion, CommandAnswer], Generic[K, S]):
    """Sends commands to a source with an aggregate, and waits for their answers::

        async with CommandClient.of(source) as accounts:
            done = await accounts.ask(Withdraw(100), key="ada", id="3f2c", timeout_seconds=5)

    The source does not run here: its declarations say what there is, and its settings where the group is; they need
    ``QueryConfig.secret_file``, and the members serve queries (``kes run --queries``). One client for the life of a
    service. Use it on one loop.
    """

    _reply = CommandAnswer

    def __init__(self, source: EventSource[Table[K, Versioned[S]]], *, bootstrap_servers: str = "") -> None:
        config = source.config
        if bootstrap_servers:
            config = msgspec.structs.replace(config, bootstrap_servers=bootstrap_servers)
        super().__init__(config)
        declared = source._declared.aggregate
        if declared is None:
            raise ConfigError(f"the source of {config.group_id} has no aggregate: it takes no commands")
        self._rules: CommandRules[Any] = declared.rules
        self._longest = declared.remember.total_seconds() / 2
        self._state: StateReader[K, Versioned[S]] = StateReader.of(source, bootstrap_servers=bootstrap_servers)
        self._room = asyncio.Semaphore(MOST_AT_A_TIME)
        self._positions: dict[TopicPartition, int] = {}
        self._sending: set[asyncio.Task[Delivery]] = set()
        self._stack: AsyncExitStack
        self._producer: AsyncEventProducer

    @staticmethod
    def of(
        source: EventSource[Table[Key, Versioned[State]]], *, bootstrap_servers: str = ""
    ) -> CommandClient[Key, State]:
        """Make a client of this source. ``bootstrap_servers``: in place of those of the source. Raises
        ``ConfigError``, also for a source without aggregate."""
        return CommandClient(source, bootstrap_servers=bootstrap_servers)

    async def __aenter__(self) -> Self:
        """Connect."""
        config = self.config
        apart = bool(config.source_bootstrap_servers)
        producer = EventProducer(
            config.source_bootstrap_servers if apart else config.bootstrap_servers,
            client_settings=config.source_client_settings if apart else config.client_settings,
            delivery_timeout_seconds=_DELIVERY_SECONDS,
        )
        async with AsyncExitStack() as stack:
            self._producer = await stack.enter_async_context(producer)
            stack.push_async_callback(self._wait_sent)
            await stack.enter_async_context(self._state)
            await super().__aenter__()
            stack.push_async_exit(super().__aexit__)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._stack.__aexit__(*error)

    async def ask(
        self,
        command: object,
        *,
        key: K,
        id: str,
        expected_version: int | None = None,
        timeout_seconds: float = 10.0,
    ) -> CommandDone:
        """Send a command, and return what came of it once that is committed.

        ``id``: 1 to 100 characters, chosen by the caller. For all calls with one id, of all
        clients, the command takes effect once, and the answer is the same, as long as the source remembers it
        (``source.aggregate(remember=)``). ``expected_version``: of the state that the command is meant for.

        Raises ``Rejected``, ``VersionConflict`` and ``IdReused``, which are answers: no effect. ``CommandFailed``: no
        effect, and the id is free again. ``Parked``: it waits for a repair; ask again later. ``NotKnown`` after
        ``timeout_seconds``, half of ``remember`` at most: ask again, with the same id. Before anything is sent:
        ``RegistrationError`` for a class without ``decide``, ``ConfigError`` for arguments that cannot be,
        ``EncodeError``. ``RecordRefused``: the topic does not take the record. ``TicketRefused``: the group's secret
        differs, and what became of the command is not known either.
        """
        if not 0 < timeout_seconds <= self._longest:
            raise ConfigError(
                f"timeout_seconds is {timeout_seconds}; it is more than 0, and {self._longest:g} at most: half of what "
                "the source remembers (remember)"
            )
        if self._session is None:
            raise Stopped(f"this {type(self).__name__} is not open: enter it, by async with")
        record = self._rules.record(self.config.topic, command, key, id, expected_version)
        deadline = time.monotonic() + timeout_seconds
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._room.acquire()
        except TimeoutError:
            raise NotKnown(
                f"the command {id!r} was not sent: {MOST_AT_A_TIME} others of this client wait for their answers"
            ) from None
        try:
            return await self._asked(record, id, deadline, timeout_seconds)
        finally:
            self._room.release()

    async def get(self, key: K, *, timeout_seconds: float = 10.0) -> Answer[Versioned[S] | None]:
        """Return the state of a key, with the effects of all commands that this client has an answer for. Raises as
        ``StateReader.get``."""
        return await self._state.get(key, at_least=dict(self._positions), timeout_seconds=timeout_seconds)

    async def _asked(self, record: Record, id: str, deadline: float, timeout_seconds: float) -> CommandDone:
        assert record.key is not None
        number = partition_of(record.key, self.config.num_partitions)
        content = content_of(record.key, record.value, record.headers)
        # The question goes out while the record is on its way: the member holds it until then.
        sending = asyncio.create_task(self._producer.send(msgspec.structs.replace(record, partition=number)))
        self._sending.add(sending)
        sending.add_done_callback(self._sent)
        reason: Exception | None = None
        while (left := deadline - time.monotonic()) > 0:
            at = None
            if sending.done():
                if (error := sending.exception()) is None:
                    at = (self.config.topic, number, sending.result().offset)
                elif not isinstance(error, BrokerUnavailable):
                    raise error
            question = CommandQuestion(
                group=self.config.group_id,
                partition=number,
                id=id,
                key=record.key,
                at=at,
                hold_seconds=min(left, UNPLACED_HOLD if at is None else LONGEST_HOLD),
            )
            try:
                answer, _ = await self._ask(question, left)
            except TicketRefused:
                raise
            except StreamsError as error:  # whatever a member says: the command is in the topic, or on its way
                reason = error
                break
            if answer.kind == "reply" and answer.reply is not None:
                positions = {TopicPartition(topic, place): offset for topic, place, offset in answer.positions}
                self._positions.update(
                    (where, max(offset, self._positions.get(where, 0))) for where, offset in positions.items()
                )
                return self._rules.done(answer.reply, content, positions, answer.served_by)
            if answer.kind == "parked":
                raise Parked(f"the command {id!r} waits in the queue of its key; ask again later, with the same id")
            if answer.kind == "failed":
                raise CommandFailed(
                    f"the command {id!r} has failed, and its error policy, or an operator, let it go; no effect"
                )
        raise NotKnown(
            f"the command {id!r}: no answer within {timeout_seconds:g} s; it may have taken effect, or may still: ask "
            f"again, with the same id{'' if reason is None else f'. The last reason: {reason}'}"
        ) from reason

    def _sent(self, sending: asyncio.Task[Delivery]) -> None:
        self._sending.discard(sending)
        if not sending.cancelled() and (error := sending.exception()) is not None:
            _log.debug("a command was not sent: %s", error)  # ``ask`` raises it, if its caller still waits

    async def _wait_sent(self) -> None:
        """Wait for the records of calls that have ended without them."""
        await asyncio.gather(*self._sending, return_exceptions=True)
