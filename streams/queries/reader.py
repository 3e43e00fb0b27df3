"""``StateReader``: the state of a running group, read from any process at the member that owns it."""

from __future__ import annotations

import heapq
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import msgspec

from streams.codecs import codec_for
from streams.errors import ConfigError, StoreError
from streams.model.answers import Answer, Row
from streams.protocols import Codec
from streams.queries.asking import GroupAsker, together
from streams.records import Delivery, TopicPartition
from streams.runtime.queries.questions import PAGE, NamedOffset, Question, Reply, encode_bounds
from streams.runtime.queries.readable import read_from
from streams.sak.murmur2 import partition_of
from streams.settings.config import EventSourceConfig
from streams.source.event_source import EventSource
from streams.stores.engines import after_prefix

if TYPE_CHECKING:
    from streams.stores.structured import StructuredBytes
    from streams.stores.table import Table

K = TypeVar("K")
V = TypeVar("V")
StoresT = TypeVar("StoresT", bound="StructuredBytes")

AtLeast = Delivery | Mapping[TopicPartition, int]


class StateReader(GroupAsker[Question, Reply], Generic[K, V]):
    """Reads the ``Table`` of a running source, or a structure of its ``Stores``, from any process::

        async with StateReader(config, key=str, value=Account) as accounts:
            answer = await accounts.get("ada")
        async with StateReader.of(source, table="orders") as orders:
            async for key, order in orders.by("customer", "ada"): ...

    It finds the owner of a key by the group, and the owner's address by its status note (``kes run --queries``), over
    moves and restarts: a member that does not own it says so, and the search goes on until ``timeout_seconds`` are
    over. Answers are committed, with the owner's proof (docs/guides/queries.md).

    ``config``: the settings of the source; of them it needs group, topic, partitions, brokers and
    ``QueryConfig.secret_file``. ``routed_by`` makes the key of the *records* from a key of the table, as that of
    ``EventSource``; without it they count as the same text or bytes. Use it on one loop.

    All reads raise ``NotOwned`` when no member has answered at the deadline, ``NotCaughtUp`` when the owner has not
    come to ``at_least`` by then, ``StoreError`` for what its store cannot do, ``ConfigError`` for arguments that cannot
    be, ``TicketRefused`` when the group's secret differs, ``BrokerUnavailable``.
    """

    _reply = Reply

    def __init__(
        self,
        config: EventSourceConfig,
        *,
        key: type[K],
        value: type[V],
        key_codec: Codec[K] | None = None,
        value_codec: Codec[V] | None = None,
        routed_by: Callable[[K], str | bytes] | None = None,
    ) -> None:
        super().__init__(config)
        self._keys: Codec[K] = codec_for(key) if key_codec is None else key_codec
        self._values: Codec[V] = codec_for(value) if value_codec is None else value_codec
        self._routed_by = routed_by
        self._table = ""
        self._row_key: Callable[[bytes], Any] | None = None

    @overload
    @classmethod
    def of(
        cls, source: EventSource[Table[K, V]], *, bootstrap_servers: str = "", **settings: Any
    ) -> StateReader[K, V]: ...

    @overload
    @classmethod
    def of(
        cls, source: EventSource[StoresT], *, table: str = "", bootstrap_servers: str = "", **settings: Any
    ) -> StateReader[Any, Any]: ...

    @classmethod
    def of(
        cls, source: EventSource[Any], *, table: str = "", bootstrap_servers: str = "", **settings: Any
    ) -> StateReader[Any, Any]:
        """Make a reader of the state of an event source, with the codecs of its store and its ``routed_by``.

        ``table``: the structure of a ``Stores``, which a single one does not need. The keys of ``Windows`` are
        (key, start_ms, end_ms), and ``routed_by`` gets the first of them. ``bootstrap_servers``: in place of those of
        the source. ``settings`` are those of this class. Raises ``ConfigError``, also for a store that is neither
        ``Table`` nor ``Stores``, and for a structure that it has not."""
        config = source.config
        if bootstrap_servers:
            config = msgspec.structs.replace(config, bootstrap_servers=bootstrap_servers)
        found = read_from(source.program().store_factory, config, table)
        any_: Any = object
        common: dict[str, Any] = {"key_codec": found.keys, "value_codec": found.values, "routed_by": source.routed_by}
        made = cls(config, key=any_, value=any_, **common | settings)
        made._table, made._row_key = found.name, found.row_key
        return made

    @property
    def codecs(self) -> tuple[Codec[K], Codec[V]]:
        """Return the codecs of keys and values."""
        return self._keys, self._values

    # -- reads ---------------------------------------------------------------------------------------------------------

    async def get(
        self,
        key: K,
        *,
        at_least: AtLeast | None = None,
        confirm: bool = False,
        max_staleness: float | None = None,
        timeout_seconds: float = 10.0,
        partition: int | None = None,
    ) -> Answer[V | None]:
        """Return the value of a key in one partition, ``None`` if that has none: where it is not known by what the
        store is routed (``routed_by``), another one may have it (``get_everywhere``). ``at_least`` and ``confirm``:
        as of ``EventSource.query``. ``max_staleness``: a copy may answer, too, if it has everything that was committed
        so many seconds before the call. ``partition``: by the key if it is not given."""
        encoded, number = self._encoded(key), self.partition_of(key) if partition is None else partition
        question = self._question(
            "get",
            number,
            key=encoded,
            at_least=_named(at_least, number),
            confirm=confirm,
            max_staleness=max_staleness,
            record_key=self._record_key(key, encoded),
        )
        reply, put_at = await self._ask(question, timeout_seconds)
        value = None if reply.value is None else self._values.decode(reply.value)
        positions = {TopicPartition(topic, placed): offset for topic, placed, offset in reply.positions}
        # The question came after it was put: what was there so long before it came, was there so long before this.
        as_of = put_at - reply.age_seconds
        return Answer(value, reply.partition, positions, as_of, reply.served_by, reply.parked, reply.due)

    async def get_everywhere(
        self,
        key: K,
        *,
        at_least: Mapping[TopicPartition, int] | None = None,
        confirm: bool = False,
        max_staleness: float | None = None,
        timeout_seconds: float = 10.0,
    ) -> list[Answer[V | None]]:
        """Return the value of a key in each partition, in their order, each as of a moment of its own; otherwise as
        ``get``. For a key of which it is not known by what its records are routed."""
        numbers = range(self.config.num_partitions)
        proof: dict[str, Any] = {"at_least": at_least, "confirm": confirm, "max_staleness": max_staleness}
        asked = (self.get(key, **proof, timeout_seconds=timeout_seconds, partition=number) for number in numbers)
        return await together(asked)

    async def len(self, *, max_staleness: float | None = None, timeout_seconds: float = 10.0) -> int:
        """Count the keys of all partitions, each at a moment of its own."""
        numbers = range(self.config.num_partitions)
        questions = [self._question("len", number, max_staleness=max_staleness) for number in numbers]
        replies = await together(self._ask(question, timeout_seconds) for question in questions)
        return sum(reply.count for reply, _ in replies)

    async def range(
        self,
        low: K | None = None,
        high: K | None = None,
        *,
        reverse: bool = False,
        max_staleness: float | None = None,
        timeout_seconds: float = 10.0,
    ) -> AsyncGenerator[Row[K, V], None]:
        """Iterate over the keys from ``low`` up to and without ``high`` of an ordered table, in order, all partitions;
        from the high end if ``reverse``. Rows come in pages, each read in several turns: it is no snapshot.
        ``timeout_seconds``: for each page."""
        ends = (None if each is None else self._encoded(each) for each in (low, high))
        wanted = dict(zip(("low", "high"), ends, strict=True), reverse=reverse, max_staleness=max_staleness)
        async for row in self._merged(wanted, timeout_seconds):
            yield row

    async def prefix(
        self,
        prefix: K | tuple[Any, ...],
        *,
        reverse: bool = False,
        max_staleness: float | None = None,
        timeout_seconds: float = 10.0,
    ) -> AsyncGenerator[Row[K, V], None]:
        """Iterate over the keys that start with ``prefix``, as ``range``. ``(key,)``: the windows of a key."""
        encode = getattr(self._keys, "encode_prefix", None)
        if encode is None:
            raise StoreError(f"keys of {type(self._keys).__name__} have no prefixes; use range(low, high)")
        low: bytes = encode(prefix)
        wanted = {"low": low, "high": after_prefix(low), "reverse": reverse, "max_staleness": max_staleness}
        async for row in self._merged(wanted, timeout_seconds):
            yield row

    def by(self, index: str, value: Any, **more: Any) -> AsyncGenerator[Row[K, V], None]:
        """Iterate over the entries for which an index of the structure has ``value``, by their keys. ``more``: as of
        ``by_range``."""
        if value is None:
            raise ConfigError(f"the index {index!r} has no entries of None")
        return self.by_range(index, value, value, include_high=True, **more)

    async def by_range(
        self,
        index: str,
        low: Any = None,
        high: Any = None,
        *,
        include_high: bool = False,
        reverse: bool = False,
        max_staleness: float | None = None,
        timeout_seconds: float = 10.0,
        page: int = PAGE,
    ) -> AsyncGenerator[Row[K, V], None]:
        """Iterate over the entries in the order of what an index has, from ``low`` up to and without ``high``, all
        partitions, otherwise as ``range``. ``Windows`` have the index ``"end"`` (ms), a ``Heap`` has ``"priority"``.
        An entry that moves in the index meanwhile may come twice, or not at all. ``page``: rows of one question."""
        bounds = encode_bounds(low, high, include_high)
        wanted = {"index": index, "bounds": bounds, "reverse": reverse, "max_staleness": max_staleness, "limit": page}
        async for row in self._merged(wanted, timeout_seconds):
            yield row

    async def min(self, **more: Any) -> Row[K, V] | None:
        """Return the lowest entry of a ``Heap``, of all partitions, ``None`` if it is empty. ``more``: as of
        ``by_range``."""
        async with aclosing(self.by_range("priority", page=1, **more)) as rows:
            return await anext(rows, None)

    async def max(self, **more: Any) -> Row[K, V] | None:
        """Return the highest entry of a ``Heap``, as ``min``."""
        return await self.min(reverse=True, **more)

    @property
    def is_routed(self) -> bool:
        """Check whether it is known by what the store is routed: then no other partition than that of
        ``partition_of`` has the key."""
        return self._routed_by is not None

    def partition_of(self, key: K) -> int:
        """Return the partition of a key. Raises ``ConfigError`` for a key that is no text or bytes, without
        ``routed_by``."""
        return partition_of(self._routed(key), self.config.num_partitions)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _routed(self, key: K) -> bytes:
        """Return the key of the records."""
        row: Any = key if self._row_key is None else self._row_key(self._encoded(key))  # of a window, without its span
        try:
            routed: object = row if self._routed_by is None else self._routed_by(row)
        except Exception as error:  # of the user's function
            raise ConfigError(f"routed_by makes no key of records of {key!r}: {error!r}") from error
        if isinstance(routed, str):
            routed = routed.encode()
        if not isinstance(routed, bytes):
            raise ConfigError(
                f"keys are {type(routed).__name__}: say by routed_by=... which key their records have, as text or bytes"
            )
        return routed

    def _record_key(self, key: K, encoded: bytes) -> bytes | None:
        """Return the key of the records where it is known, and another one than that of the table. Members of older
        releases refuse a question that names it."""
        # Without ``routed_by`` the key counts as that of the records: of a structure's, what handlers call so.
        is_same = self._row_key is None or not isinstance(self._row_key(encoded), str | bytes)
        if self._routed_by is None and is_same:
            return None
        routed = self._routed(key)
        return None if routed == encoded else routed

    def _encoded(self, key: K) -> bytes:
        if key is None:
            raise ConfigError("a query needs a key, and this is None")
        return self._keys.encode(key)

    def _question(self, kind: str, partition: int, **fields: Any) -> Question:
        return Question(group=self.config.group_id, kind=kind, table=self._table, partition=partition, **fields)

    async def _merged(self, wanted: dict[str, Any], timeout_seconds: float) -> AsyncIterator[Row[K, V]]:
        """Merge the rows of all partitions by their places. ``wanted``: fields of the questions."""

        def place(number: int, at: int) -> tuple[bytes, int, int]:
            page = pages[number]
            found = page.places[at] if wanted.get("index") else page.rows[at][0], number, at
            return _Backwards(found) if wanted["reverse"] else found

        numbers = range(self.config.num_partitions)
        asked = (self._ask(self._question("range", number, **wanted), timeout_seconds) for number in numbers)
        pages = {number: reply for number, (reply, _) in enumerate(await together(asked))}
        heap = [place(number, 0) for number, page in pages.items() if page.rows]
        heapq.heapify(heap)
        while heap:
            after, number, at = heapq.heappop(heap)
            page = pages[number]
            key, value = page.rows[at]
            row = Row((self._keys.decode(key), self._values.decode(value)))
            if at in page.due_rows:
                row.due = True
            yield row
            at += 1
            if at == len(page.rows) and page.more:
                question = self._question("range", number, **wanted, after=after)
                pages[number], _ = await self._ask(question, timeout_seconds)
                page, at = pages[number], 0
            if at < len(page.rows):
                heapq.heappush(heap, place(number, at))


class _Backwards(tuple[bytes, int, int]):
    """A place that sorts in front of lower ones."""

    __slots__ = ()
    __lt__ = tuple.__gt__


def _named(at_least: AtLeast | None, partition: int) -> tuple[NamedOffset, ...]:
    if at_least is None:
        return ()
    if isinstance(at_least, Delivery):
        if at_least.offset < 0 or at_least.partition != partition:
            raise ConfigError(
                f"at_least: {at_least.record.topic}[{at_least.partition}]@{at_least.offset} is no record of partition "
                f"{partition}, which the key is in"
            )
        return ((at_least.record.topic, at_least.partition, at_least.offset + 1),)
    return tuple((where[0], where[1], offset) for where, offset in at_least.items() if where[1] == partition)
