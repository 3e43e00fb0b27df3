"""The interfaces of the clients to the runtime: the seam between the engine and the outside.

Real ones are in ``streams/kafka`` and ``bridge``; simulated ones, on a loop with virtual time, in
``streams/testing/simulation``. Blocking methods are only ever called through a ``Blocking`` worker.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from streams.model.group import GroupMetadata, Membership, TakeOver
from streams.model.partitioners import NullKeys, PlaceOf
from streams.model.topics import SentTo, TopicIdentity, TopicSpec
from streams.records import Acknowledgement, IncomingRecord, PolledPartition, Record

if TYPE_CHECKING:  # types only: the interfaces must not load the clients
    from streams.kafka.questions.admin import TopicDescription, Watermarks
    from streams.kafka.writing.encoded_transaction import EncodedTransaction

T = TypeVar("T")
TableT_co = TypeVar("TableT_co", covariant=True)


class Blocking(Protocol):
    """Runs blocking calls for the loop, one at a time (``bridge.Worker``)."""

    async def call(self, function: Callable[..., T], *args: Any) -> T: ...

    def post(self, function: Callable[..., object], *args: Any) -> None: ...
    def abandon(self) -> None: ...


class TransactionSlot(Protocol):
    """One transactional id, used by one transaction of the pool at a time. On the loop.
    (``kafka.writing.slot.WireSlot``, which documents the methods.)"""

    transactional_id: str
    is_open: bool

    @property
    def is_shaken(self) -> bool: ...
    def settled(self, committed: bool) -> None: ...
    async def reopen(
        self, topics: Collection[str], *, may_open: Callable[[], Awaitable[None]] | None = None
    ) -> None: ...
    def abandon(self) -> None: ...
    async def flush(
        self, records: EncodedTransaction, offsets: Mapping[str, Mapping[int, int]], fence: Callable[[], GroupMetadata]
    ) -> None: ...
    async def commit(self, requested: Callable[[], None]) -> None: ...
    async def abort(self) -> None: ...


class PlainProducer(Protocol):
    """A producer without transactions (``kafka.writing.plain_producer.PlainProducer``, which documents the methods)."""

    @property
    def is_broken(self) -> bool: ...

    def produce(self, record: Record, token: object) -> bool: ...
    def poll(self, timeout_seconds: float) -> list[Acknowledgement]: ...
    def close(self) -> None: ...


class LogSource(Protocol):
    """Reads partitions of one log, for one thread (``kafka.reading.fetching.LogFetcher`` documents the methods)."""

    def add(self, partition: int, offset: int) -> None: ...
    def remove(self, partitions: Collection[int]) -> None: ...
    def poll_batch(self, timeout_seconds: float, limit: int) -> Mapping[int, PolledPartition]: ...
    def take_failures(self) -> Mapping[int, Exception]: ...
    def close(self) -> None: ...


class LogConsumer(LogSource, Protocol):
    """The same of an input, whose partitions wait for their queues (``kafka.reading.consumer.LogConsumer``)."""

    def pause(self, partitions: Collection[int]) -> None: ...
    def resume(self, partitions: Collection[int]) -> None: ...
    def ends(self) -> Mapping[int, int]: ...


class Polled(NamedTuple):
    """The records of one poll, by partition: records, their bytes, and the epoch under which each partition was being
    read. A partition that was removed and added again has another epoch, so older records on their way are
    recognised. ``at_end``: partitions without a further record for now, where ends are reported."""

    records: Mapping[int, list[IncomingRecord]]
    sizes: Mapping[int, int]
    epochs: Mapping[int, int]
    at_end: frozenset[int] = frozenset()


class Reading(Protocol):
    """Partitions of a log that are read by a thread (``reading.thread.ReadingThread``). Methods return at once, and may
    be called from any thread."""

    def add(self, partition: int, offset: int, epoch: int) -> None:
        """Read a partition from this offset on (-1: from the start of its log). The epoch comes back with its news."""
        ...

    def remove(self, partitions: Collection[int]) -> None:
        """Stop reading these. What is on its way may still come."""
        ...

    def close(self) -> None: ...


class Input(Reading, Protocol):
    """The stream of input records (``poller.Poller``). ``received_bytes``: of keys, values and headers, so far."""

    received_bytes: int

    def start(
        self,
        deliver: Callable[[Polled], None],
        make_room: Callable[[], None],
        fail: Callable[[Exception], None],
        gone: Callable[[tuple[int, int]], None] | None = None,
    ) -> None:
        """Deliver batches to the loop until ``close``; or ``fail``, once. ``make_room``: there is no room, and has not
        been any for a while. ``gone``, if there is one: is called with partition and epoch, in place of ``fail``, when
        the next offset of a partition is not in the log; the others are read on."""
        ...

    def expect(self, partitions: Collection[int]) -> None:
        """Expect these partitions to be added soon, without a long wait then. Replaces those expected before."""
        ...

    def pause(self, partition: int) -> None: ...
    def resume(self, partition: int) -> None: ...

    def handled(self, records: int, size: int) -> None:
        """Report that so many of the delivered records, of so many bytes, left the queues: room for more."""
        ...

    def ends(self) -> Future[Mapping[int, int]]:
        """Return the ends of the partitions that are read, as far as they are known, once the poll under way is over.
        Never fails; after ``close`` there is no answer."""
        ...


class Reader(Protocol):
    """Reads partitions up to a position (``kafka.reading.reader.PartitionReader``)."""

    def read(
        self,
        topic: str,
        ranges: Mapping[int, tuple[int, int]],
        receive: Callable[[int, list[IncomingRecord]], None],
        *,
        stalled_after_seconds: float,
        cancelled: Callable[[], bool],
    ) -> None: ...

    def close(self) -> None: ...


class Tail(Reading, Protocol):
    """Follows partitions of the changelog, read committed (``reading.log_follower.Tail``)."""

    def start(
        self,
        receive: Callable[[int, int, list[IncomingRecord], int, int], None],
        fail: Callable[[int, int, Exception], None],
    ) -> None:
        """Begin to follow: ``receive(partition, epoch, records, position, end)`` runs on the tail's own thread, in
        order, also without records when only the position moved: all below ``position`` was read; ``end`` is the high
        watermark as far as it is known (-1: not yet). ``position == end``, or a call without records: caught up for
        now. ``fail(partition, epoch, error)``: following that partition has ended (it is not at this place any
        more)."""
        ...


class LogTail(Tail, Protocol):
    """The thread that reads a followed topic (``reading.log_follower.Tail``)."""

    @property
    def ended(self) -> bool: ...


class TopicRequests(Protocol):
    """Requests about a followed topic (``kafka.questions.admin.TopicAdmin``). They block."""

    def identity(self, name: str, timeout_seconds: float) -> tuple[str, int] | None: ...
    def watermarks(
        self, topic: str, partitions: Collection[int] | None, timeout_seconds: float
    ) -> Mapping[int, Watermarks]: ...
    def describe(self, names: list[str], timeout_seconds: float) -> Mapping[str, TopicDescription | None]: ...


class LogClients(Protocol):
    """The clients of one topic that is followed as a whole (``reading.followed_topic.LogConnections``). Building one
    may take milliseconds, and does no I/O. ``addresses``: of the brokers, for messages."""

    @property
    def addresses(self) -> str: ...
    def worker(self) -> Blocking: ...
    def topics(self) -> TopicRequests: ...
    def tail(self) -> LogTail: ...


class LookupTopic(Protocol[TableT_co]):
    """A lookup as it is declared (``lookups.Lookup``)."""

    @property
    def topic(self) -> str: ...

    def table(self) -> TableT_co:
        """Make the empty table of a process."""
        ...


class LookupTables(Protocol):
    """The tables of the declared lookups in this process (``reading.lookups.Lookups``). Any thread."""

    def table(self, declared: LookupTopic[Any]) -> Any | None:
        """Return the table of a declared lookup; ``None``: it is of another source."""
        ...


class SourceLog(Protocol):
    """Requests about the source topic, on its own cluster (``kafka.questions.takeover.SourceLog``). They block; see
    ``group.TakeOver``."""

    def log_range(self, topic: str, partitions: Collection[int], deadline: float) -> dict[int, tuple[int, int]]: ...
    def identity(self, topic: str, deadline: float) -> TopicIdentity: ...
    def stable_end(self, topic: str, partition: int, deadline: float) -> int: ...
    def offset_of_time(self, topic: str, partition: int, timestamp_ms: int, deadline: float) -> int | None: ...
    def close(self) -> None: ...


class DescribedTopic(Protocol):
    """A topic as it is (``kafka.questions.admin.TopicDescription``)."""

    @property
    def configs(self) -> Mapping[str, str]: ...


class Topics(Protocol):
    """Creates and checks topics (``kafka.questions.admin.TopicAdmin``)."""

    def create(self, specs: Sequence[TopicSpec], timeout_seconds: float) -> list[str]: ...
    def differences(self, specs: Sequence[TopicSpec]) -> list[str]: ...
    def identity(self, name: str, timeout_seconds: float) -> tuple[str, int] | None: ...
    def describe(self, names: Collection[str], timeout_seconds: float) -> Mapping[str, DescribedTopic | None]: ...
    def delete(self, names: Collection[str], timeout_seconds: float) -> None: ...
    def close(self) -> None: ...


class StatusBoard(Protocol):
    """The board of status notes (``kafka.group.status_board.StatusBoard``, which documents the methods)."""

    def publish(
        self, instance: str, notes: Mapping[tuple[str, int], tuple[int, str]], timeout_seconds: float
    ) -> None: ...
    def remove(self, instance: str, timeout_seconds: float) -> None: ...
    def close(self) -> None: ...


class Connections(Protocol):
    """Everything that one running event source connects to. Building one may block: call these through a worker."""

    def worker(self, name: str) -> Blocking: ...
    async def in_process(self, function: Callable[..., T], *args: Any) -> T: ...
    def records(self, topics: SentTo | None = None) -> EncodedTransaction:
        """Make the encoder of one transaction's records, for its slot. ``topics``: the only ones that are sent to."""
        ...

    def place_by(self, partitioners: Mapping[str, PlaceOf], null_keys: Mapping[str, NullKeys]) -> None:
        """Place the keys of these topics by other functions than murmur2, and records without one in other ways than by
        transactions. Called before the first record."""
        ...

    def slot(self, transactional_id: str) -> TransactionSlot: ...

    def plain_producer(
        self,
        bootstrap_servers: str,
        client_settings: Mapping[str, object],
        delivery_timeout_seconds: float,
    ) -> PlainProducer:
        """Build a producer. Without ``bootstrap_servers`` it is connected as the event source is, and
        ``client_settings`` come on top."""
        ...

    def wait_for(
        self, loop: AbstractEventLoop, start: Callable[[], Coroutine[Any, Any, T]], timeout_seconds: float | None
    ) -> T:
        """Run a coroutine on the loop and wait for its result, on the thread of a worker (``bridge.wait_for``)."""
        ...

    def input(self) -> Input: ...
    def further_inputs(self, topics: Sequence[str]) -> list[Input]:
        """Build the readers of these topics beside that of the source's own, whose ends are reported then, too. Called
        before ``input``."""
        ...

    def reader(self) -> Reader: ...
    def tail(self) -> Tail: ...
    def followed(self, topic: str) -> LogClients: ...
    def status_board(self) -> StatusBoard: ...
    def topics(self) -> Topics: ...

    def source_topics(self) -> Topics:
        """Build ``topics`` on the cluster of the source; called only if that is another one."""
        ...

    def source_log(self) -> SourceLog:
        """Build the requests about the source; called only if it is on another cluster."""
        ...

    def group(self, alive: Callable[[], bool]) -> tuple[Membership, TakeOver]: ...
