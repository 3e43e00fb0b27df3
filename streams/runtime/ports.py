"""What the runtime needs from outside, and nothing more: the seam between the engine and the clients.

Real ones are in ``clients`` and ``bridge``; simulated ones, on a loop whose time is an illusion, in the tests. Blocking
methods are only ever called through a ``Blocking`` worker.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from streams.group import Membership, TakeOver
from streams.records import Acknowledgement, IncomingRecord, Output, Record
from streams.topics import TopicIdentity, TopicSpec

T = TypeVar("T")


class Blocking(Protocol):
    """Runs blocking calls for the loop, one at a time (``bridge.Worker``)."""

    async def call(self, function: Callable[..., T], *args: Any, timeout: float | None = None) -> T: ...

    def post(self, function: Callable[..., object], *args: Any) -> None: ...
    def abandon(self) -> None: ...


class Refusal(Protocol):
    """A delivery that was refused (``clients.transactional.RefusedDelivery``, which documents the fields)."""

    @property
    def topic(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def is_own(self) -> bool: ...
    @property
    def output(self) -> Output | None: ...


class Producer(Protocol):
    """One transactional producer (``clients.transactional.TransactionalProducer``, which documents the methods)."""

    @property
    def refused(self) -> Sequence[Refusal]: ...

    def init(self, timeout_seconds: float) -> None: ...
    def warm_up(self, topics: Collection[str], timeout_seconds: float) -> None: ...
    def begin(self) -> None: ...
    def produce_many(self, outputs: Sequence[Output], start: int) -> int: ...
    def produce(self, output: Output) -> bool: ...
    def poll(self) -> None: ...
    def flush(self, timeout_seconds: float) -> None: ...
    def send_offsets(self, topic: str, offsets: Mapping[int, int], metadata: bytes, timeout_seconds: float) -> None: ...
    def commit(self, timeout_seconds: float) -> None: ...
    def abort(self, timeout_seconds: float) -> None: ...
    def close(self) -> None: ...


class PlainProducer(Protocol):
    """A producer without transactions (``clients.plain_producer.PlainProducer``, which documents the methods)."""

    @property
    def is_broken(self) -> bool: ...

    def produce(self, record: Record, token: object) -> bool: ...
    def poll(self, timeout_seconds: float) -> list[Acknowledgement]: ...
    def close(self) -> None: ...


class Batch(NamedTuple):
    """What one poll brought, by partition: records, how many bytes they have, and the epoch under which each partition
    was being read. A partition that was removed and added again has another epoch, so what was on its way from before
    can be told apart."""

    records: Mapping[int, list[IncomingRecord]]
    sizes: Mapping[int, int]
    epochs: Mapping[int, int]


class Input(Protocol):
    """The stream of input records (``poller.Poller``). Methods return at once."""

    def start(
        self,
        deliver: Callable[[Batch], None],
        fail: Callable[[Exception], None],
    ) -> None:
        """Deliver batches to the loop until ``close``; or ``fail``, once. An empty batch says that there is no room and
        has not been any for a while."""
        ...

    def expect(self, partitions: Collection[int]) -> None:
        """These may be added soon, and whoever waits for them should not wait long. It replaces what was expected."""
        ...

    def add(self, partition: int, offset: int, epoch: int) -> None: ...
    def remove(self, partitions: Collection[int]) -> None: ...
    def pause(self, partition: int) -> None: ...
    def resume(self, partition: int) -> None: ...

    def handled(self, records: int, size: int) -> None:
        """So many of the delivered records, of so many bytes, left the queues: room for more."""
        ...

    def close(self) -> None: ...


class Reader(Protocol):
    """Reads partitions up to a position (``clients.reader.PartitionReader``)."""

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


class Tail(Protocol):
    """Follows partitions of the changelog, read committed, for as long as it is asked to (``runtime.tail.Tail``).
    Methods return at once, and may be called from any thread."""

    def start(
        self,
        receive: Callable[[int, int, list[IncomingRecord], int, int], None],
        fail: Callable[[int, int, Exception], None],
    ) -> None:
        """``receive(partition, epoch, records, position, end)`` on the tail's own thread, in order, also without
        records when only the position moved: all below ``position`` was read; ``end`` is the high watermark as far as
        it is known (-1: not yet). ``position == end``, or a call without records: caught up for now. ``fail(partition,
        epoch, error)``: following that partition has ended (it is not at this place any more)."""
        ...

    def follow(self, partition: int, offset: int, epoch: int) -> None:
        """Read a partition from this offset on (-1: from the start of its log). The epoch comes back with each call of
        ``receive``."""
        ...

    def forget(self, partition: int) -> None:
        """Stop reading it. What is on its way may still come."""
        ...

    def close(self) -> None: ...


class SourceLog(Protocol):
    """Questions about the source topic, on its own cluster (``clients.source_log.SourceLog``). They block; see
    ``group.TakeOver``."""

    def log_range(self, topic: str, partitions: Collection[int], deadline: float) -> dict[int, tuple[int, int]]: ...
    def identity(self, topic: str, deadline: float) -> TopicIdentity: ...
    def close(self) -> None: ...


class Topics(Protocol):
    """Creates and checks topics (``clients.admin.TopicAdmin``)."""

    def create(self, specs: Sequence[TopicSpec], timeout_seconds: float) -> list[str]: ...
    def differences(self, specs: Sequence[TopicSpec]) -> list[str]: ...
    def delete(self, names: Collection[str], timeout_seconds: float) -> None: ...
    def close(self) -> None: ...


class StatusBoard(Protocol):
    """Where a member tells what it is doing (``clients.status_board.StatusBoard``, which documents the methods)."""

    def publish(
        self, instance: str, notes: Mapping[tuple[str, int], tuple[int, str]], timeout_seconds: float
    ) -> None: ...
    def remove(self, instance: str, timeout_seconds: float) -> None: ...
    def close(self) -> None: ...


class Connections(Protocol):
    """Everything that one running event source connects to. Building one may block: call these through a worker."""

    def worker(self, name: str) -> Blocking: ...
    async def in_process(self, function: Callable[..., T], *args: Any) -> T: ...
    def producer(self, transactional_id: str, *, one_by_one: bool = False) -> Producer: ...

    def plain_producer(
        self,
        bootstrap_servers: str,
        client_settings: Mapping[str, object],
        delivery_timeout_seconds: float,
        *,
        one_by_one: bool = False,
    ) -> PlainProducer:
        """Without ``bootstrap_servers`` it is connected as the event source is, and ``client_settings`` come on top."""
        ...

    def wait_for(
        self, loop: AbstractEventLoop, start: Callable[[], Coroutine[Any, Any, T]], timeout_seconds: float | None
    ) -> T:
        """On the thread of a worker: run a coroutine on the loop, and wait for its result (``bridge.wait_for``)."""
        ...

    def input(self) -> Input: ...
    def reader(self) -> Reader: ...
    def tail(self) -> Tail: ...
    def status_board(self) -> StatusBoard: ...
    def topics(self) -> Topics: ...

    def source_topics(self) -> Topics:
        """As ``topics``, on the cluster of the source; asked for only if that is another one."""
        ...

    def source_log(self) -> SourceLog:
        """Asked for only if the source is on another cluster."""
        ...

    def group(self, alive: Callable[[], bool]) -> tuple[Membership, TakeOver]: ...
