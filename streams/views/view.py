"""``View``: a compacted topic, or the state of an event source, as a table that any process may read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, NoReturn, Protocol, Self, TypeVar, overload

import anyio.to_thread

from streams.errors import ConfigError, NotCaughtUp, RegistrationError, Stopped, StoreError, StreamsError
from streams.outcomes import STOP
from streams.protocols import Codec, DiskEngine
from streams.records import Delivery, TopicPartition
from streams.runtime.bridge import Inlet
from streams.runtime.reading.view_follower import OnError, Starts
from streams.runtime.signal import Signal
from streams.runtime.system import elapsed_seconds
from streams.settings.config import EventSourceConfig
from streams.statistics import SourceState
from streams.views.blocking import BlockingView, LoopThread
from streams.views.global_table import make_table
from streams.views.on_disk import ViewFolders
from streams.views.reads import ViewReads
from streams.views.state import ViewState, ViewStatistics
from streams.views.table import ViewChange, ViewTable, ViewWatch
from streams.views.topic_reader import reader_of

if TYPE_CHECKING:  # a view reads without an event source and its engine
    from streams.runtime.reading.followed_topic import FollowedTopic
    from streams.runtime.reading.log_reader import LogReader
    from streams.stores.indexes import Index
    from streams.stores.structured import StructuredBytes
    from streams.stores.table import Table

K = TypeVar("K")
V = TypeVar("V")
Key = TypeVar("Key")  # of `of`, which is called on the bare class: pyright wants variables of its own there
Value = TypeVar("Value")
StoreT_co = TypeVar("StoreT_co", covariant=True)

MARK_SECONDS: Final = 60.0
"""Seconds between two proofs that a view on disk is complete. From the last one on the next block reads on."""
SETTLE_SECONDS: Final = 1.0
"""Seconds for open transactions to end, before everything behind them counts as not committed yet."""
_CHECK_SECONDS: Final = 0.25
"""Seconds between two checks of the state."""


class ViewedSource(Protocol[StoreT_co]):
    """An event source, as ``View.of`` reads it."""

    @property
    def config(self) -> EventSourceConfig: ...
    @property
    def store_factory(self) -> Callable[[TopicPartition], StoreT_co]: ...


class View(ViewReads[K, V], Generic[K, V]):
    """All partitions of a compacted topic as one read-only table, in any process and without a group::

        prices = View("prices", key=str, value=Price, ordered=True)     # or View.of(source)
        async with prices:
            await prices.ready(timeout_seconds=60)
            prices.get("apples")

    ``with prices as blocking:`` is the same without an event loop, see ``BlockingView``. The block begins to read, and
    follows until its end; then the view may be entered again, and reads everything again.

    Only what is committed comes in. Until everything is here that was committed when the block began, reads raise
    ``NotCaughtUp``; after the block, and after a failure, ``StoreError``. Reads may be made on any thread; the waiting
    methods belong to the loop of the block.

    A view fails as a ``GlobalChangeLog`` does, whose reader is the same: the body of the block is cancelled, and
    the error is raised. A topic that is not compacted is refused (``TopicError``). ``key`` to ``value_codec`` are as
    those of ``Table.factory``, the other settings as those of ``GlobalChangeLog``. Raises ``ConfigError``.

    ``engine`` (``SQLite()``, ``RocksDB()``) with ``folder`` keeps the table on disk: for more of it than memory takes,
    and the next block goes on from there. ``len`` reads everything then. A disk that refuses fails the view.
    ``index``: by name, for ``by`` and ``by_range``: ``index={"city": Index(str, lambda shop: shop.city)}``. It is the
    view's own, in memory; one with a value that it cannot place refuses its reads (``StoreError``).
    """

    def __init__(
        self,
        topic: str,
        *,
        key: type[K],
        value: type[V],
        ordered: bool = False,
        key_codec: Codec[K] | None = None,
        value_codec: Codec[V] | None = None,
        index: Mapping[str, Index[V]] | None = None,
        engine: DiskEngine | None = None,
        folder: str = "",
        bootstrap_servers: str = "",
        client_settings: Mapping[str, Any] | None = None,
        on_error: OnError = STOP,
        client_id: str = "kes",
        topic_timeout_seconds: float = 30.0,
    ) -> None:
        if (engine is None) != (not folder):
            raise ConfigError(f"the view of {topic}: engine and folder go together: state on disk needs both")
        self.topic = topic
        self._disk = None if engine is None else (engine, folder)
        self._reader_settings: dict[str, Any] = {
            "bootstrap_servers": bootstrap_servers,
            "client_settings": client_settings,
            "on_error": on_error,
            "client_id": client_id,
            "topic_timeout_seconds": topic_timeout_seconds,
        }
        self._table_settings = key, value, ordered, key_codec, value_codec
        self._structure, self._index = "", dict(index or {})
        self._takes: Callable[[bytes], bool] | None = None
        self._new_table()  # to refuse its settings here
        self._reader: LogReader | None = None
        self._table: ViewTable[K, V] | None = None
        self._is_complete = False
        self._completing: asyncio.Task[None] | None = None
        self._proving: asyncio.Lock  # made on the loop
        self._proof: tuple[float, bool] | None = None  # when the ends were requested; whether nothing was held back
        self._thread: LoopThread | None = None

    @overload
    @classmethod
    def of(cls, source: ViewedSource[Table[Key, Value]], **settings: Any) -> View[Key, Value]: ...

    @overload
    @classmethod
    def of(cls, source: ViewedSource[StructuredBytes], *, table: str = "", **settings: Any) -> View[Any, Any]: ...

    @classmethod
    def of(cls, source: ViewedSource[Any], *, table: str = "", **settings: Any) -> View[Any, Any]:
        """Make a view of the state of an event source: of its changelog, with the types of its ``Table``, or of the
        structure ``table`` of its ``Stores``, ordered if that is. ``settings`` are those of this class; addresses come
        from the source, unless they are among them.

        The keys of ``Windows`` are (key, start_ms, end_ms). A single structure needs no name. Raises ``ConfigError``
        for a store that is neither, and for a structure that it has not.
        """
        from streams.runtime.queries.readable import read_from

        # With an address of its own it needs none of the source, which may have no other than that of its cluster.
        config = source.config if settings.get("bootstrap_servers") else source.config.resolved()
        found = read_from(source.store_factory, config, table)
        make: Any = cls  # with codecs, the types are not looked at
        cluster = {"bootstrap_servers": config.bootstrap_servers, "client_settings": config.client_settings}
        codecs = {"key": object, "value": object, "key_codec": found.keys, "value_codec": found.values}
        made: View[Any, Any] = make(config.changelog, **codecs, **{**cluster, "ordered": found.is_ordered, **settings})
        made._structure, made._takes = found.name, found.takes
        return made

    def __repr__(self) -> str:
        return f"View({self.topic!r}, {self.state.value})"

    # -- its life ------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Find the topic and begin to read. Enter and leave it in the same task. Raises as ``GlobalChangeLog.start``,
        and ``RegistrationError`` while another block has it."""
        if self.state in (ViewState.STARTING, ViewState.CATCHING_UP, ViewState.LIVE, ViewState.STALE):
            raise RegistrationError(f"the view of {self.topic} is in use by another block: each needs one of its own")
        reader = reader_of(self.topic, **self._reader_settings, only_compacted=True)
        self._proving, self._proof, self._is_complete = asyncio.Lock(), None, False
        self._reader, self._table = reader, (table := self._new_table())
        reader.receivers.append(table.receiver())
        if self._disk is not None:
            reader.begin_at = partial(self._open_folders, table, *self._disk)
            loop = asyncio.get_running_loop()
            table.on_failure = lambda error: loop.call_soon_threadsafe(reader.fail, error)
        try:
            await reader.__aenter__()
        except BaseException:
            table.close(f"the view of {self.topic} was not entered")
            self._reader = self._table = None
            raise
        self._completing = asyncio.create_task(self._complete(reader, table))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop. Raises the error that the view failed with, unless the block ended with an error of its own."""
        assert self._reader is not None
        assert self._completing is not None
        self._completing.cancel()
        await self._reader.__aexit__(kind, error, trace)

    def __enter__(self) -> BlockingView[K, V]:
        """Do the same without an event loop of the caller's: one runs on a thread."""
        thread = LoopThread()
        try:
            thread.enter(self)
        except BaseException:
            thread.end()
            raise
        self._thread = thread
        return BlockingView(self, thread)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        thread, self._thread = self._thread, None
        assert thread is not None
        try:
            thread.leave(error)
        finally:
            thread.end()

    async def _complete(self, reader: LogReader, table: ViewTable[K, V]) -> None:
        while True:
            as_of_ms = _now_ms()  # before the proof: everything that was committed by then is here after it
            try:
                await reader.wait_caught_up(None, SETTLE_SECONDS)
            except StreamsError:  # the reader raises it
                return
            self._completed(as_of_ms)
            if self._disk is None:
                return
            try:
                await asyncio.to_thread(table.checkpoint, self.positions)
            except (OSError, StoreError) as error:
                reader.fail(StreamsError(f"the view of {self.topic} cannot be kept on disk: {error}"))
                return
            await asyncio.sleep(MARK_SECONDS)

    def _completed(self, as_of_ms: int) -> None:
        self._is_complete = True
        if self._table is not None:
            self._table.as_of_ms = as_of_ms

    async def _open_folders(
        self, table: ViewTable[K, V], engine: DiskEngine, folder: str, followed: FollowedTopic
    ) -> Starts:
        """Open what is on disk; return where to go on."""
        settings = await followed.settings()
        ends = await followed.ends(time.monotonic() + self._reader_settings["topic_timeout_seconds"])

        def open_all() -> Starts:
            began, began_ms = elapsed_seconds(), _now_ms()
            folders = ViewFolders(engine, folder, self.topic, table.layout, followed.topic_id, began_ms)
            opened = folders.open_all(ends, settings)
            table.keep_on_disk(folders, opened)
            return {
                number: (each.position, began - (began_ms - each.as_of_ms) / 1000)
                for number, each in opened.items()
                if each.position >= 0
            }

        return await anyio.to_thread.run_sync(open_all)  # a cancel waits for it: then the folders are closed

    # -- how far it is -------------------------------------------------------------------------------------------------

    @property
    def state(self) -> ViewState:
        """Return the state of the view. Any thread."""
        reader = self._reader
        if reader is None or reader.state is SourceState.CREATED:
            return ViewState.CREATED if reader is None else ViewState.STARTING
        if reader.state is SourceState.RUNNING:
            if not self._is_complete:
                return ViewState.CATCHING_UP
            return ViewState.STALE if reader.is_cut_off else ViewState.LIVE
        return {SourceState.STARTING: ViewState.STARTING, SourceState.FAILED: ViewState.FAILED}.get(
            reader.state, ViewState.STOPPED
        )

    async def states(self) -> AsyncIterator[ViewState]:
        """Yield the state, and each later one, up to the end of the block. Short ones may be left out."""
        last = None
        while last not in (ViewState.STOPPED, ViewState.FAILED):
            if self.state is not last:
                last = self.state
                yield last
            elif self._reader is not None:
                await self._reader.wait_changed(_CHECK_SECONDS)
            else:
                await asyncio.sleep(_CHECK_SECONDS)

    @property
    def codecs(self) -> tuple[Codec[K], Codec[V]]:
        """Return the codecs of keys and values."""
        return self._new_table().codecs

    @property
    def positions(self) -> dict[int, int]:
        """Return the offsets below which everything is here, by partition. Any thread."""
        partitions = () if self._reader is None else self._reader.statistics()[1]
        return {partition.partition: max(partition.position, 0) for partition in partitions}

    def statistics(self) -> ViewStatistics:
        """Return the present state in figures. Any thread."""
        partitions = () if self._reader is None else self._reader.statistics()[1]
        try:
            keys = 0 if self._table is None else self._table.estimated_len()
        except StoreError:  # it was closed
            keys = 0
        return ViewStatistics(self.state, self.topic, keys, partitions)

    async def ready(self, timeout_seconds: float | None = None) -> None:
        """Wait until the view is complete, and may be read.

        Raises ``NotCaughtUp`` after ``timeout_seconds`` (``None``: waits on), ``BrokerUnavailable`` if no broker
        answered until then, and the error that the view failed with.
        """
        reader, as_of_ms = self._running(), _now_ms()
        if not self._is_complete or reader.state is not SourceState.RUNNING:
            await reader.wait_caught_up(timeout_seconds, SETTLE_SECONDS)
            self._completed(as_of_ms)

    async def wait_for(self, place: Delivery | Mapping[int, int], timeout_seconds: float | None = None) -> None:
        """Wait until the view has come to a place: a ``Delivery``, so that you read what you wrote; or ``positions`` of
        a view or a snapshot, so that no later read is older than an earlier one.

        Raises ``NotCaughtUp`` after ``timeout_seconds`` (an open transaction may hold the record back), ``ConfigError``
        for a place that is not in the topic, and the error that the view failed with.
        """
        await self._running().wait_for_positions(self._positions_of(place), timeout_seconds)

    async def wait_for_key(self, key: K, timeout_seconds: float | None = None) -> V:
        """Wait until there is a value for this key, and return it. Raises ``NotCaughtUp`` after ``timeout_seconds``,
        ``Stopped``, and the error that the view failed with."""
        try:
            async with asyncio.timeout(timeout_seconds), aclosing(self.changes()) as changes:
                while True:
                    value = self.get(key)
                    if value is not None:
                        return value
                    await anext(changes)
        except NotCaughtUp:  # a TimeoutError, too: the view is not complete
            raise
        except TimeoutError:
            raise NotCaughtUp(f"{self.topic}: no value for {key!r} within {timeout_seconds:g} s") from None
        except StopAsyncIteration:
            raise Stopped(f"the view of {self.topic} was stopped") from None

    async def fresh_within(self, seconds: float, timeout_seconds: float = 10.0) -> bool:
        """Wait until it is proven that everything is here that was committed up to ``seconds`` ago.

        The proof is that the view has reached the ends of all partitions, which were requested from the cluster less
        than ``seconds`` ago; one proof serves all callers. ``False``: a transaction that is open, or whose end is not
        written yet, holds back what is behind it from all readers of committed records.

        Raises ``NotCaughtUp`` after ``timeout_seconds``, ``BrokerUnavailable`` without an answer, and the error that
        the view failed with.
        """
        if not seconds > 0:
            raise ConfigError(f"fresh_within({seconds!r}): it must be more than 0 seconds; a question takes time")
        reader, deadline = self._running(), elapsed_seconds() + timeout_seconds
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._proving.acquire()  # one proof at a time, and those who waited take the last one
        except TimeoutError:
            raise self._not_proven(seconds, timeout_seconds) from None
        try:
            while (
                self._proof is None
                or elapsed_seconds() - self._proof[0] > seconds
                or reader.state is not SourceState.RUNNING  # below that is raised
            ):
                requested = elapsed_seconds()  # before the question: the proof is as old as that
                if requested >= deadline:
                    raise self._not_proven(seconds, timeout_seconds)
                settle_seconds = min(SETTLE_SECONDS, seconds / 2)
                whole = await reader.wait_caught_up(deadline - requested, settle_seconds)
                self._is_complete, self._proof = True, (requested, whole)
            return self._proof[1]
        finally:
            self._proving.release()

    def changes(self, *, initial: bool = False) -> AsyncGenerator[ViewChange[K, V], None]:
        """Iterate over the changes from now on, on the loop of the block; with ``initial``, over everything that is
        there first.

        What a slow reader has not taken is merged per key, the first old value and the last new one: it may miss values
        in between, never the last one. Changes of one key come in their order, others may change places. It ends with
        the block, and raises the error that the view failed with. ``NotCaughtUp``, ``StoreError``: as reads.
        """
        table, reader, signal = self._current(), self._running(), Signal()
        inlet: Inlet[None] = Inlet(lambda _: signal.notify())
        return _arriving(table.watch(lambda: inlet.put(None), initial), signal, reader)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _new_table(self) -> ViewTable[K, V]:
        table = make_table(self.topic, *self._table_settings, kind=ViewTable)
        assert isinstance(table, ViewTable)
        table.structure, table.takes = self._structure, self._takes
        table.index_by(self._index)
        return table

    def _current(self) -> ViewTable[K, V]:
        table = self._table
        if table is None or not self._is_complete:
            self._refuse()
        return table

    def _passed(self) -> Mapping[int, int]:
        return self.positions

    def _refuse(self) -> NoReturn:
        if self._table is None:
            raise StoreError(f"the view of {self.topic} is not running: enter it, by async with or with")
        if self.state in (ViewState.STARTING, ViewState.CATCHING_UP):
            lag = sum(partition.lag for partition in self.statistics().partitions)
            raise NotCaughtUp(
                f"the view of {self.topic} is not complete yet ({self.state.value}, {lag:,} offsets to go): await "
                "ready() before it is read"
            )
        len(self._table)  # raises why it was closed
        raise StoreError(f"the view of {self.topic} is {self.state.value}")

    def _not_proven(self, seconds: float, timeout_seconds: float) -> NotCaughtUp:
        return NotCaughtUp(f"{self.topic}: not proven to be fresh within {seconds:g} s, for {timeout_seconds:g} s")

    def _running(self) -> LogReader:
        if self._reader is None:
            raise Stopped(f"the view of {self.topic} is not running: enter it, by async with or with")
        return self._reader

    def _positions_of(self, place: Delivery | Mapping[int, int]) -> Mapping[int, int]:
        if not isinstance(place, Delivery):
            return place
        if place.record.topic != self.topic or place.offset < 0:
            raise ConfigError(
                f"a record of {place.record.topic}[{place.partition}]@{place.offset} is not in the view of {self.topic}"
            )
        return {place.partition: place.offset + 1}


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


async def _arriving(
    watch: ViewWatch[K, V], signal: Signal, reader: LogReader
) -> AsyncGenerator[ViewChange[K, V], None]:
    while True:
        over = watch.ended  # first: what came before the end is taken below
        for change in watch.take():
            yield change
        if over:
            await reader.wait_stopped()
            return
        await signal.wait()
