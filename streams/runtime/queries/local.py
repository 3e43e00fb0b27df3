"""Queries of the state that is in this process, on the loop of its event source.

A query is a read-only interjection, with a proof of its own (``runtime/read_proofs.py``). Those that wait for a turn
of their partition share it, and its proof.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, MappingView
from typing import Any, Final

from streams.core.partition import PartitionState
from streams.core.position import offsets_of
from streams.errors import ConfigError, NotCaughtUp, NotOwned, StoreError
from streams.model.answers import Answer
from streams.protocols import JournalledStore
from streams.records import Delivery, TopicPartition
from streams.runtime.engine import Engine
from streams.runtime.partition.event_context import EventContext
from streams.runtime.partition.failures import cancelled_inside
from streams.runtime.partition.interjections import Proof
from streams.runtime.partition.worker import PartitionWorker
from streams.runtime.queries.copies import CopyReads
from streams.runtime.queries.points import PointReads
from streams.sak.murmur2 import partition_of
from streams.settings.config import EventSourceConfig
from streams.stores.journalled import JournalledBytes

MOST_IN_A_TURN: Final = 128
"""So many queries share a turn, at most. Between two turns of queries events have theirs."""
CHECK_SECONDS: Final = 0.005
"""A query looks every so many seconds whether its partition has come as far as it wants."""

Read = Callable[[Any], Any]
Positions = dict[TopicPartition, int]


def partition_of_key(config: EventSourceConfig, key: str | bytes | None, partition: int | None) -> int:
    """Return the partition that records with this key go to, or the one that is named. Raises ``ConfigError``."""
    if (key is None) == (partition is None):
        raise ConfigError("a query needs the key of its records, or key None and a partition: one of the two")
    if isinstance(key, str | bytes):
        return partition_of(key.encode() if isinstance(key, str) else key, config.num_partitions)
    if key is not None:
        raise ConfigError(
            f"the key of a query is a {type(key).__name__}; it is that of the records, text or bytes: convert it as "
            "those who send them do, or name the partition"
        )
    assert partition is not None
    if not 0 <= partition < config.num_partitions:
        raise ConfigError(f"partition {partition} of {config.topic}: it has 0 to {config.num_partitions - 1}")
    return partition


def wanted_positions(
    at_least: Delivery | Mapping[TopicPartition, int] | None, topics: tuple[str, ...], partition: int
) -> Positions:
    """Return the positions that are to be reached in this partition. Raises ``ConfigError`` for a delivery to another
    one, to a topic that is no input, or one that failed."""
    if at_least is None:
        return {}
    if isinstance(at_least, Delivery):
        topic, number = at_least.record.topic, at_least.partition
        if topic not in topics or number != partition or at_least.offset < 0:
            raise ConfigError(
                f"at_least={topic}[{number}]@{at_least.offset}: it is no record of an input in partition {partition} "
                f"({', '.join(topics)})"
            )
        return {TopicPartition(topic, number): at_least.offset + 1}
    here = {TopicPartition(*where): offset for where, offset in at_least.items() if where[1] == partition}
    for where in here:
        if where.topic not in topics:
            raise ConfigError(f"at_least names {where}; the inputs are {', '.join(topics)}")
    return here


class _Request:
    """One query in a turn. ``outcome``: its value, or its error."""

    __slots__ = ("error", "future", "is_parked", "key", "least", "positions", "read", "read_at", "value")

    def __init__(self, read: Read, least: Positions, key: bytes | None, future: asyncio.Future[None]) -> None:
        self.read, self.least, self.key, self.future = read, least, key, future
        self.is_parked = False
        self.value: Any = None
        self.error: Exception | None = None
        self.positions: Positions = {}
        self.read_at = 0.0


class LocalQueries:
    """The queries of one run. On the loop."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.topics = (engine.config.topic, *(spec.topic for spec, _ in engine.further_inputs))
        self.points = PointReads(engine, self.topics, self.query)
        self._copies = CopyReads(engine, self.topics)
        self._turns: dict[tuple[int, bool], list[_Request]] = {}  # those that have not begun; the last of each kind
        self._running: set[asyncio.Task[None]] = set()

    async def query(
        self,
        partition: int,
        read: Read,
        *,
        key: bytes | None = None,
        at_least: Delivery | Mapping[TopicPartition, int] | None = None,
        confirm: bool = False,
        max_staleness: float | None = None,
        timeout_seconds: float = 10.0,
    ) -> Answer[Any]:
        """See ``EventSource.query``. ``key``: that of the records, which may be parked. ``max_staleness``: a copy may
        answer, if the partition is not active here and the copy is proven to have everything that was committed so many
        seconds ago. ``read`` must be ours then, and quick: it holds up the thread that fills the copies."""
        if inspect.iscoroutinefunction(read):
            raise StoreError("the read of a query is a coroutine function; it must be plain: its turn cannot wait")
        if not timeout_seconds > 0:
            raise ConfigError(f"timeout_seconds is {timeout_seconds}; it must be more than 0")
        # This comes before any wait: a handler that awaits a query of its own partition would wait for its own end.
        self.engine.ad_hoc.refuse_to_wait_for_itself([partition])
        least = wanted_positions(at_least, self.topics, partition)
        limit = asyncio.timeout(timeout_seconds)
        try:
            async with limit:
                while True:
                    # A copy is read only while the owner is not here: it cannot be newer than the owner.
                    if max_staleness is not None and not self._is_active(partition):
                        answer = await self._copies.read(partition, read, key, least, max_staleness)
                        if answer is not None:
                            return answer
                    if await self._has_come(partition, least, patient=max_staleness is not None):
                        request = await self._read(partition, read, key, least, confirm)
                        if request is not None:
                            return self._answered(partition, request)
        except TimeoutError:
            if not limit.expired():  # it is an error of the read itself
                raise
            raise NotCaughtUp(self._late(partition, least, timeout_seconds)) from None

    def _answered(self, partition: int, request: _Request) -> Answer[Any]:
        if request.error is not None:
            raise request.error
        instance = self.engine.config.instance_id
        return Answer(request.value, partition, request.positions, request.read_at, instance, request.is_parked)

    def _is_active(self, partition: int) -> bool:
        worker = self.engine.workers.get(partition)
        return worker is not None and worker.takes_interjections

    async def _has_come(self, partition: int, least: Positions, *, patient: bool) -> bool:
        """Check whether the partition is active here and has come so far; if not, wait for a moment. Raises
        ``NotOwned`` if it is not here, and (not ``patient``) is not about to be."""
        worker = self.engine.workers.get(partition)
        if worker is not None and worker.takes_interjections:
            # During a restart the query waits in the inbox, and its turn compares the positions: those of now are
            # void.
            if worker.state is not PartitionState.ACTIVE or self._reached(worker, least):
                return True
        elif not patient and (worker is None or worker.state is not PartitionState.RESTORING):
            raise NotOwned(f"{self.engine.config.topic}[{partition}] is not active on this member")
        await asyncio.sleep(CHECK_SECONDS)
        return False

    def positions(self, worker: PartitionWorker) -> Positions:
        """Return the position of a partition, by the topics of its inputs."""
        offsets = offsets_of(worker.position)
        return {
            TopicPartition(topic, worker.partition): offset for topic, offset in zip(self.topics, offsets, strict=True)
        }

    def _reached(self, worker: PartitionWorker, least: Positions) -> bool:
        here = self.positions(worker) if least else {}
        return all(here[where] >= offset for where, offset in least.items())

    async def _read(
        self, partition: int, read: Read, key: bytes | None, least: Positions, confirm: bool
    ) -> _Request | None:
        """Have one turn; ``None``: the partition was not as far as it is to be."""
        request = _Request(read, least, key, asyncio.get_running_loop().create_future())
        turn = self._turns.get((partition, confirm))
        # A turn that has not begun takes the query in: all queries of a turn share its wait and its proof.
        if turn is not None and len(turn) < MOST_IN_A_TURN:
            turn.append(request)
        else:
            self._turns[partition, confirm] = turn = [request]
            task = asyncio.create_task(self._take_turn(partition, confirm, turn))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        await request.future
        return None if request.error is None and not request.positions else request

    async def _take_turn(self, partition: int, confirm: bool, turn: list[_Request]) -> None:
        def read(ctx: EventContext[Any]) -> None:
            # The turn is closed first: a query that joined it from now on would be ended without a read.
            self._begun(partition, confirm, turn)
            worker = self.engine.workers[partition]
            # One position holds for the whole turn: no event comes between its reads.
            positions, read_at = self.positions(worker), self.engine.environment.wall_seconds()
            for request in turn:
                if not request.future.done():  # it may have been cancelled
                    self._read_one(ctx, request, positions, read_at)

        try:
            await self.engine.ad_hoc.interject(
                partition, read, blocking=False, proof=Proof.FENCE if confirm else Proof.LEASE
            )
        # A cancellation is caught, too: the other queries of the turn would wait until their own deadlines.
        except BaseException as error:
            self._end(turn, error)
            if not isinstance(error, Exception):
                raise
        else:
            self._end(turn, None)
        finally:
            # A turn that was refused before its look is still open to further queries.
            self._begun(partition, confirm, turn)

    def _begun(self, partition: int, confirm: bool, turn: list[_Request]) -> None:
        """Let no other query come to this turn."""
        if self._turns.get((partition, confirm)) is turn:
            del self._turns[partition, confirm]

    @staticmethod
    def _end(turn: list[_Request], error: BaseException | None) -> None:
        for request in turn:
            if request.future.done():
                continue
            if error is None:
                request.future.set_result(None)
            elif isinstance(error, asyncio.CancelledError):
                request.future.cancel()
            else:
                request.future.set_exception(error)

    def _read_one(self, ctx: EventContext[Any], request: _Request, positions: Positions, read_at: float) -> None:
        """Read for one query. It may be once more, after a restart of the partition."""
        request.value, request.error, request.positions = None, None, {}
        # The positions were reached when the query was queued, but a restart goes back to what is committed.
        if any(positions[where] < offset for where, offset in request.least.items()):
            return
        request.positions, request.read_at = positions, read_at
        request.is_parked = request.key is not None and ctx.is_parked(request.key)
        store: Any = ctx.store
        before = len(ctx._journal)
        try:
            request.value = request.read(store)
        except (Exception, asyncio.CancelledError) as error:  # nothing is awaited: it has raised that itself
            request.error = cancelled_inside(error)
        changes = ctx._journal[before:]
        # The changes are taken back at once: the next query of the turn must not see them, and nothing commits them.
        if changes and isinstance(store, JournalledStore):
            store.end()
            store.undo(changes)
            del ctx._journal[before:]
            store.begin(ctx._journal)
            request.error = StoreError(f"a query of {ctx.topic_partition} writes to the store; use interject for that")
        elif request.error is None:
            request.error = unfit(request.value, store)

    def _late(self, partition: int, least: Positions, seconds: float) -> str:
        where, worker = f"{self.engine.config.topic}[{partition}]", self.engine.workers.get(partition)
        if worker is None or not worker.takes_interjections:
            return f"{where} did not become active on this member within {seconds:g} s"
        here = self.positions(worker)
        behind = [f"{where} at {here[where]} of {offset}" for where, offset in least.items() if here[where] < offset]
        return f"{where}: no answer within {seconds:g} s: {', '.join(behind) or 'no proof that it is still ours'}"


def unfit(value: object, store: object) -> StoreError | None:
    """Return why this cannot be the answer of a query: it would be read on when the state is another one."""
    if isinstance(value, Iterator | MappingView):
        return StoreError(
            "a query returned an iterator or a view, which would go on in a later state: return a list of it"
        )
    if isinstance(value, Awaitable):
        if inspect.iscoroutine(value):
            # Without this Python warns of a coroutine that was never awaited.
            value.close()
        return StoreError("a query returned an awaitable; its read must be a plain function: its turn cannot wait")
    parts: tuple[Any, ...] = (store, *getattr(store, "_parts", {}).values())
    is_part = isinstance(value, JournalledBytes) or any(value is part for part in parts)
    if store is not None and (is_part or getattr(value, "__self__", None) is store):
        return StoreError(
            "a query returned the store itself, or what is a part of it; return what you want to know of it"
        )
    return None
