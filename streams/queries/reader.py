"""``StateReader``: the state of a running group, read from any process at the member that owns it."""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Generic, TypeVar

import msgspec

from streams.codecs import codec_for
from streams.errors import ConfigError, StoreError
from streams.model.answers import Answer
from streams.protocols import Codec
from streams.queries.asking import GroupAsker, together
from streams.records import Delivery, TopicPartition
from streams.runtime.ownership.replicas import make_store
from streams.runtime.queries.questions import NamedOffset, Question, Reply
from streams.sak.murmur2 import partition_of
from streams.settings.config import EventSourceConfig
from streams.source.event_source import EventSource
from streams.stores.engines import after_prefix
from streams.stores.table import Table

K = TypeVar("K")
V = TypeVar("V")

AtLeast = Delivery | Mapping[TopicPartition, int]


class StateReader(GroupAsker[Question, Reply], Generic[K, V]):
    """Reads the ``Table`` of a running source, from any process::

        async with StateReader(config, key=str, value=Account) as accounts:
            answer = await accounts.get("ada")

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

    @classmethod
    def of(cls, source: EventSource[Table[K, V]], *, bootstrap_servers: str = "", **settings: Any) -> StateReader[K, V]:
        """Make a reader of the state of an event source, with the codecs of its ``Table`` and its ``routed_by``.
        ``bootstrap_servers``: in place of those of the source. ``settings`` are those of this class. Raises
        ``ConfigError``, also for a source whose store is no ``Table``."""
        config = source.config
        if bootstrap_servers:
            config = msgspec.structs.replace(config, bootstrap_servers=bootstrap_servers)
        store: Any = make_store(source.program().store_factory, TopicPartition(config.topic, 0))
        try:
            if not isinstance(store, Table):
                raise ConfigError(
                    f"the store of {config.group_id} is {type(store).__name__}, and only a Table answers other "
                    "processes: use EventSource.query in its own"
                )
            keys, values = store.codecs
        finally:
            store.revoked()
        any_: Any = object
        common: dict[str, Any] = {"key_codec": keys, "value_codec": values, "routed_by": source.routed_by}
        return cls(config, key=any_, value=any_, **common | settings)

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
        question = Question(
            group=self.config.group_id,
            kind="get",
            partition=number,
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
        return Answer(value, reply.partition, positions, put_at - reply.age_seconds, reply.served_by, reply.parked)

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
        questions = [
            Question(group=self.config.group_id, kind="len", partition=number, max_staleness=max_staleness)
            for number in range(self.config.num_partitions)
        ]
        replies = await together(self._ask(question, timeout_seconds) for question in questions)
        return sum(reply.count for reply, _ in replies)

    async def range(
        self,
        low: K | None = None,
        high: K | None = None,
        *,
        max_staleness: float | None = None,
        timeout_seconds: float = 10.0,
    ) -> AsyncIterator[tuple[K, V]]:
        """Iterate over the keys from ``low`` up to and without ``high`` of an ordered table, in order, all partitions.
        Rows come in pages, each read in several turns: it is no snapshot. ``timeout_seconds``: for each page."""
        low_bytes = None if low is None else self._encoded(low)
        high_bytes = None if high is None else self._encoded(high)
        async for row in self._merged(low_bytes, high_bytes, max_staleness, timeout_seconds):
            yield row

    async def prefix(
        self, prefix: K | tuple[Any, ...], *, max_staleness: float | None = None, timeout_seconds: float = 10.0
    ) -> AsyncIterator[tuple[K, V]]:
        """Iterate over the keys that start with ``prefix``, as ``range``."""
        encode = getattr(self._keys, "encode_prefix", None)
        if encode is None:
            raise StoreError(f"keys of {type(self._keys).__name__} have no prefixes; use range(low, high)")
        low: bytes = encode(prefix)
        async for row in self._merged(low, after_prefix(low), max_staleness, timeout_seconds):
            yield row

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
        try:
            routed: object = key if self._routed_by is None else self._routed_by(key)
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
        if self._routed_by is None:
            return None
        routed = self._routed(key)
        return None if routed == encoded else routed

    def _encoded(self, key: K) -> bytes:
        if key is None:
            raise ConfigError("a query needs a key, and this is None")
        return self._keys.encode(key)

    async def _merged(
        self, low: bytes | None, high: bytes | None, max_staleness: float | None, timeout_seconds: float
    ) -> AsyncIterator[tuple[K, V]]:
        def question(number: int, after: bytes | None) -> Question:
            common: dict[str, Any] = {"group": self.config.group_id, "kind": "range", "partition": number}
            return Question(**common, low=low, high=high, after=after, max_staleness=max_staleness)

        numbers = range(self.config.num_partitions)
        asked = (self._ask(question(number, None), timeout_seconds) for number in numbers)
        pages = {number: reply for number, (reply, _) in enumerate(await together(asked))}
        heap = [(page.rows[0][0], number, 0) for number, page in pages.items() if page.rows]
        heapq.heapify(heap)
        while heap:
            key, number, place = heapq.heappop(heap)
            page = pages[number]
            yield self._keys.decode(key), self._values.decode(page.rows[place][1])
            place += 1
            if place == len(page.rows) and page.more:
                pages[number], _ = await self._ask(question(number, key), timeout_seconds)
                page, place = pages[number], 0
            if place < len(page.rows):
                heapq.heappush(heap, (page.rows[place][0], number, place))


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
