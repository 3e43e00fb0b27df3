"""``StateReader``: the state of a running group, read from any process at the member that owns it."""

from __future__ import annotations

import asyncio
import heapq
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any, Final, Generic, Self, TypeVar

import aiohttp
import msgspec

from streams.codecs import codec_for
from streams.errors import (
    BrokerUnavailable,
    ConfigError,
    NotCaughtUp,
    NotOwned,
    Stopped,
    StoreError,
    StreamsError,
)
from streams.model.answers import Answer
from streams.protocols import Codec
from streams.queries.finding import MemberFinder
from streams.queries.hedging import hedged
from streams.queries.routing import Server, is_likely
from streams.queries.tickets import (
    SEAL_HEADER,
    TICKET_HEADER,
    TicketRefused,
    check_seal,
    group_secret,
    ticket,
)
from streams.records import Delivery, TopicPartition
from streams.runtime.ownership.replicas import make_store
from streams.runtime.queries.questions import (
    BUSY_SECONDS,
    MOST_BYTES_IN,
    MOST_BYTES_READ,
    PATH,
    NamedOffset,
    Question,
    Refusal,
    Reply,
)
from streams.sak.forks import MadeHere
from streams.sak.murmur2 import partition_of
from streams.settings.config import EventSourceConfig
from streams.source.event_source import EventSource
from streams.stores.engines import after_prefix
from streams.stores.table import Table

K = TypeVar("K")
V = TypeVar("V")

_REQUEST_SECONDS: Final = 6.0
_ANSWER_SECONDS: Final = 0.5
"""Of the time of a request, what is left to the member to say that it cannot answer."""
_PAUSE_SECONDS: Final = 0.05

_Answered = tuple[Reply, float]
"""An answer, and when the question was put, by the clock of this process."""
AtLeast = Delivery | Mapping[TopicPartition, int]


class _Busy(NotOwned):
    """A member has no room for a question, and wants it again."""


class StateReader(Generic[K, V]):
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
        self.config = config.resolved()
        self._secret = group_secret(config.queries.secret_file)
        self._keys: Codec[K] = codec_for(key) if key_codec is None else key_codec
        self._values: Codec[V] = codec_for(value) if value_codec is None else value_codec
        self._routed_by = routed_by
        self._session: aiohttp.ClientSession | None = None
        self._finder: MemberFinder

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

    async def __aenter__(self) -> Self:
        """Connect. The group is looked at by the first read."""
        self._made_here = MadeHere("this StateReader", ConfigError)
        self._finder = MemberFinder(self.config)
        ca = self.config.queries.tls_ca_file
        context = ssl.create_default_context(cafile=ca or None)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=context, limit=64),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            auto_decompress=False,  # no member compresses, and a forged address could send what grows without end
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()
        await self._finder.close()

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
        )
        reply, put_at = await self._ask(question, timeout_seconds)
        value = None if reply.value is None else self._values.decode(reply.value)
        positions = {TopicPartition(topic, placed): offset for topic, placed, offset in reply.positions}
        # The question came after it was put: what was there so long before it came, was there so long before this.
        return Answer(value, reply.partition, positions, put_at - reply.age_seconds, reply.served_by)

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
        return await _together(asked)

    async def len(self, *, max_staleness: float | None = None, timeout_seconds: float = 10.0) -> int:
        """Count the keys of all partitions, each at a moment of its own."""
        questions = [
            Question(group=self.config.group_id, kind="len", partition=number, max_staleness=max_staleness)
            for number in range(self.config.num_partitions)
        ]
        replies = await _together(self._ask(question, timeout_seconds) for question in questions)
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
        return partition_of(routed, self.config.num_partitions)

    # -- inside --------------------------------------------------------------------------------------------------------

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
        pages = {number: reply for number, (reply, _) in enumerate(await _together(asked))}
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

    async def _ask(self, question: Question, timeout_seconds: float) -> _Answered:
        """Put the question to members until one answers."""
        if self._session is None:
            raise Stopped("the reader is not open: enter it, by async with")
        self._made_here.check()
        if not timeout_seconds > 0:
            raise ConfigError(f"timeout_seconds is {timeout_seconds}; it must be more than 0")
        deadline = time.monotonic() + timeout_seconds
        nobody = f"no member of {self.config.group_id} has an address for queries (kes run --queries)"
        reason: StreamsError = NotOwned(nobody)
        copies, is_first = question.max_staleness is not None, True
        while (left := deadline - time.monotonic()) > 0:
            try:  # the owner alone can answer a read that no copy may: it comes first once, also if it was silent
                asked = await self._finder.candidates(
                    question.partition, left, copies=copies, silent_last=copies or not is_first
                )
            except BrokerUnavailable:
                if is_first:
                    raise
                break  # a member has said more than that
            if is_first:  # the description may be too old: look once more before others are bothered
                asked = [each for each in asked if copies and is_likely(each, question.partition)] or asked[:1]
            answered = await (self._hedged if copies else self._in_turn)(asked, question, deadline)
            if isinstance(answered, tuple):
                return answered
            reason, is_first = answered or reason, False
            self._finder.forget()
            await asyncio.sleep(min(_PAUSE_SECONDS, max(0.0, deadline - time.monotonic())))
        where = f"{self.config.topic}[{question.partition}]"
        raise type(reason)(f"{where}: no answer within {timeout_seconds:g} s; the last reason: {reason}")

    async def _in_turn(
        self, servers: list[Server], question: Question, deadline: float
    ) -> _Answered | StreamsError | None:
        """Ask one member after the other. Returns the answer, or the last reason why there is none."""
        reason: StreamsError | None = None
        for server in servers:
            answered = await self._put_until(server, question, deadline)
            if isinstance(answered, tuple):
                return answered
            reason = answered or reason
        return reason

    async def _hedged(
        self, servers: list[Server], question: Question, deadline: float
    ) -> _Answered | StreamsError | None:
        """Ask the owner, and members with a copy as well while it is silent. Returns as ``_in_turn``."""

        async def look() -> list[Server]:
            left = deadline - time.monotonic()
            try:
                await self._finder.refresh(left)
                found = await self._finder.candidates(question.partition, left, copies=True, silent_last=True)
            except BrokerUnavailable:  # the members may answer all the same
                return []
            return [each for each in found if is_likely(each, question.partition)]

        put = partial(self._put_until, question=question, deadline=deadline)
        return await hedged(question.partition, servers, put, look, self._finder.note_silence)

    async def _put_until(self, server: Server, question: Question, deadline: float) -> _Answered | StreamsError | None:
        """Put the question to one member, again while it is busy. Returns its answer, or the reason why there is none;
        ``None``: there was no time."""
        reason: StreamsError | None = None
        while (left := deadline - time.monotonic()) > 0:
            try:
                put_at = time.time()
                return await self._put(server, question, left), put_at
            except _Busy as error:
                reason = NotOwned(str(error))
                await asyncio.sleep(min(max(_PAUSE_SECONDS, BUSY_SECONDS), max(0.0, deadline - time.monotonic())))
            except (NotOwned, NotCaughtUp, TicketRefused) as error:  # of a forged note, perhaps
                return error
        return reason

    async def _put(self, server: Server, question: Question, left: float) -> Reply:
        """Put the question to one member. Raises ``NotOwned`` also for one that does not answer."""
        assert self._session is not None
        most = min(left, _REQUEST_SECONDS)
        patience = most - min(_ANSWER_SECONDS, most / 4)
        body = msgspec.json.encode(msgspec.structs.replace(question, timeout_seconds=patience))
        if len(body) > MOST_BYTES_IN:
            raise ConfigError(f"the question has {len(body)} bytes, its keys included; members take {MOST_BYTES_IN}")
        asked = ticket(self._secret, "POST", PATH, body, server.address, time.time())
        timeout = aiohttp.ClientTimeout(total=most, ceil_threshold=2 * most)  # a longer one is rounded up
        try:
            async with self._session.post(
                server.address + PATH,
                data=body,
                headers={TICKET_HEADER: asked, "content-type": "application/json"},
                timeout=timeout,
                allow_redirects=False,
            ) as response:
                content = await response.content.read(MOST_BYTES_READ)
                while not response.content.at_eof() and len(content) < MOST_BYTES_READ:
                    content += await response.content.read(MOST_BYTES_READ - len(content))
                status, sealed = response.status, response.headers.get(SEAL_HEADER, "")
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            self._finder.note_silence(server)
            raise NotOwned(f"{server.instance} at {server.address} does not answer: {error!r}") from None
        if status == 401 and not sealed:
            raise TicketRefused(
                f"{server.instance} at {server.address} does not accept the ticket: secret or clocks differ"
            )
        if not sealed and status in (413, 503, 504):
            raise NotOwned(f"{server.instance} at {server.address} is busy ({status})")
        check_seal(self._secret, sealed, asked, status, content)
        self._finder.note_answer(server)
        if status == 200:
            return msgspec.json.decode(content, type=Reply)
        refusal = msgspec.json.decode(content, type=Refusal)
        kinds = {"Busy": _Busy, "NotCaughtUp": NotCaughtUp, "ConfigError": ConfigError, "StoreError": StoreError}
        kinds |= dict.fromkeys(("NotOwned", "MembershipLost", "Stopped"), NotOwned)
        raise kinds.get(refusal.error, StreamsError)(f"{server.instance}: {refusal.message}")


async def _together(asked: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Return the answers to all. An error ends the others, which would go on without the reader."""
    tasks = [asyncio.create_task(each) for each in asked]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


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
