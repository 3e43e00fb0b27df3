"""``ports.Connections`` over the simulated broker, for one member's process."""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn, TypeVar

from streams.core.admission import size_of_records
from streams.core.incremental import PlanSettings
from streams.core.strategies import assignor
from streams.errors import BrokerUnavailable, OffsetError, Stopped
from streams.kafka.group.group_settings import GroupSettings
from streams.kafka.questions.takeover import WireTakeOver
from streams.kafka.wire.cluster import Cluster
from streams.kafka.wire.settings import ProducerSettings
from streams.kafka.writing.encoded_transaction import EncodedTransaction
from streams.kafka.writing.slot import WireSlot
from streams.model.partitioners import NullKeys, PlaceOf
from streams.model.topics import SentTo, TopicSpec
from streams.records import IncomingRecord
from streams.runtime.ports import Input, Polled
from streams.settings.config import EventSourceConfig
from streams.testing.simulation.broker import Broker
from streams.testing.simulation.followed import SimLogClients
from streams.testing.simulation.member import SimClient, SimMember
from streams.testing.simulation.network import SimNetwork
from streams.testing.simulation.plain_producer import SimPlainProducer
from streams.testing.simulation.process import Process, SimWorker, wait_for
from streams.testing.simulation.tail import SimTail
from streams.testing.simulation.virtual_time import ORDERED
from streams.testing.simulation.wire_broker import WireBroker

T = TypeVar("T")


class SimConnections:
    """``ports.Connections``."""

    def __init__(self, process: Process, config: EventSourceConfig, wire: WireBroker) -> None:
        """``wire``: the nodes to which the real producer's own code sends transactions."""
        self.process, self.config = process, config
        self._reports_ends = False
        self._addresses = SimNetwork(process, wire).addresses
        settings = ProducerSettings.of(self._addresses, process.name, config.client_settings)
        self._cluster = Cluster(settings, lambda: process.broker.wall_ms() / 1000)
        self.message_limit = settings.message_limit

    def worker(self, name: str) -> SimWorker:
        return SimWorker(self.process)

    async def in_process(self, function: Callable[..., T], *args: Any) -> T:
        """Run a function as in a process of its own, with its arguments only."""
        worker = self.worker("process")
        try:
            return await worker.call(function, *args)
        finally:
            worker.abandon()

    def place_by(self, partitioners: Mapping[str, PlaceOf], null_keys: Mapping[str, NullKeys]) -> None:
        self._cluster.partitioner_of, self._cluster.null_keys_of = partitioners.get, null_keys.get

    def records(self, topics: SentTo | None = None) -> EncodedTransaction:
        return EncodedTransaction(self._cluster, self.config.timeouts.call_timeout_seconds, topics)

    def slot(self, transactional_id: str) -> WireSlot:
        timeouts = self.config.timeouts
        return WireSlot(
            transactional_id,
            self._cluster,
            self.config.group_id,
            call_timeout_seconds=timeouts.call_timeout_seconds,
            transaction_timeout_seconds=timeouts.transaction_timeout_seconds,
        )

    def plain_producer(
        self,
        bootstrap_servers: str,
        client_settings: Mapping[str, object],
        delivery_timeout_seconds: float,
    ) -> SimPlainProducer:
        """Make a producer; topics of other clusters are in this broker, too."""
        return SimPlainProducer(self.process)

    def wait_for(
        self, loop: AbstractEventLoop, start: Callable[[], Coroutine[Any, Any, T]], timeout_seconds: float | None
    ) -> T:
        return wait_for(self.process, start, timeout_seconds)

    def input(self) -> SimInput:
        return self._input(self.config.topic)

    def further_inputs(self, topics: Sequence[str]) -> list[Input]:
        self._reports_ends = True
        return [self._input(topic) for topic in topics]

    def _input(self, topic: str) -> SimInput:
        return SimInput(self.process, topic, self.config.queues.max_poll_records, reports_ends=self._reports_ends)

    def reader(self) -> SimReader:
        return SimReader(self.process)

    def tail(self) -> SimTail:
        return SimTail(self.process, self.config.changelog)

    def followed(self, topic: str) -> SimLogClients:
        return SimLogClients(self.process, topic)

    def topics(self) -> SimTopics:
        return SimTopics(self.process.broker)

    def source_topics(self) -> SimTopics:
        return SimTopics(self.process.broker)

    def source_log(self) -> SimSourceLog:
        return SimSourceLog(self.client(), self.config.group_id, self.config.topic)

    def status_board(self) -> NoReturn:
        raise NotImplementedError("a simulated group has no status board: set publish_status=False")

    def client(self) -> SimClient:
        """Make a client of the process."""
        return SimClient(self.process, self._addresses, self.config.instance_id)

    def group(self, alive: Callable[[], bool]) -> tuple[SimMember, WireTakeOver]:
        process, config = self.process, self.config
        settings = PlanSettings(
            num_standbys=config.group.num_standbys,
            max_moves=config.group.max_moves,
            max_move_bytes=config.group.max_move_bytes,
        )
        strategies = {name: assignor(name, settings) for name in config.group.strategies}
        timeouts = config.timeouts
        checked = GroupSettings(
            group_id=config.group_id,
            topic=config.topic,
            partitions=config.num_partitions,
            instance=config.instance_id,
            assignors=strategies,
            session_timeout_ms=int(1000 * timeouts.session_timeout_seconds),
            heartbeat_interval_ms=int(1000 * timeouts.heartbeat_interval_seconds),
            rebalance_timeout_ms=int(1000 * timeouts.rebalance_timeout_seconds),
        )
        client = self.client()
        member = SimMember(process, client, checked, alive)
        process.memberships.append(member)
        return member, WireTakeOver(client, config.group_id, config.topic, changelog=config.changelog)


class SimSourceLog(WireTakeOver):
    """``ports.SourceLog``: on a client of its own."""

    def close(self) -> None:
        self._client.close(0.0)


class SimInput:
    """``ports.Input``: polls while there is something to read."""

    def __init__(self, process: Process, topic: str, limit: int, *, reports_ends: bool = False) -> None:
        self._process, self._topic, self._limit = process, topic, limit
        self._reports_ends = reports_ends
        self._positions: dict[int, int] = {}
        self._epochs: dict[int, int] = {}
        self._paused: set[int] = set()
        self._reported: dict[int, int] = {}  # partition -> the end that was reported last
        self._outstanding = self.received_bytes = 0
        self._arrives_at = self._thawed = 0.0
        self._closed = self._polling = False
        process.world.inputs.append(self)

    def start(
        self,
        deliver: Callable[[Any], None],
        make_room: Callable[[], None],
        fail: Callable[[Exception], None],
        gone: Callable[[tuple[int, int]], None] | None = None,
    ) -> None:
        self._deliver, self._fail, self._gone = deliver, fail, gone

    def expect(self, partitions: Collection[int]) -> None: ...

    def add(self, partition: int, offset: int, epoch: int) -> None:
        self._positions[partition] = offset
        self._epochs = self._epochs | {partition: epoch}
        self._paused.discard(partition)
        self._reported.pop(partition, None)
        self.wake()

    def remove(self, partitions: Collection[int]) -> None:
        for partition in partitions:
            if self._positions.pop(partition, None) is not None:
                self._process.note("closed", partition)
        self._epochs = {number: epoch for number, epoch in self._epochs.items() if number not in partitions}

    def pause(self, partition: int) -> None:
        self._paused.add(partition)

    def resume(self, partition: int) -> None:
        self._paused.discard(partition)
        self.wake()

    def handled(self, records: int, size: int) -> None:
        self._outstanding -= records
        assert self._outstanding >= 0, "more records were handled than delivered"
        self.wake()

    def ends(self) -> Future[Mapping[int, int]]:
        answer: Future[Mapping[int, int]] = Future()
        answer.set_result({number: self._process.broker.log(self._topic, number).end for number in self._positions})
        return answer

    def close(self) -> None:
        self._closed = True

    @property
    def is_closed(self) -> bool:
        """Check whether nothing wakes it any more."""
        return self._closed or self._process.dead

    def wake(self) -> None:
        if not self._polling and not self._closed:
            self._polling = True
            self._process.loop.call_later(self._process.faults.one_way(), self._poll)

    def _poll(self) -> None:
        process = self._process
        if self._closed or process.dead:
            return
        wait = process.away()
        if wait > 0:
            process.loop.call_later(wait + process.faults.one_way(), self._poll)
            return
        self._polling = False
        batch: dict[int, list[IncomingRecord]] = {}
        at_end: set[int] = set()
        for partition, position in list(self._positions.items()):
            if partition in self._paused or self._outstanding >= 8 * self._limit:
                continue
            log = process.broker.log(self._topic, partition)
            if position < log.start:
                self._out_of_range(partition, OffsetError(f"{self._topic}[{partition}]: {position} is gone"))
                continue
            reached = position + process.rng.randint(1, self._limit)
            records = list(log.committed(position, reached))
            if records:
                batch[partition] = records
                self._positions[partition] = records[-1].offset + 1
                self._outstanding += len(records)
            elif position < log.stable:  # markers and aborted records only: it goes on behind them
                self._positions[partition] = min(reached, log.stable)
                self.wake()
            elif self._reports_ends and self._reported.get(partition) != position:
                self._reported[partition] = position
                batch[partition] = []
                at_end.add(partition)
        if batch:
            self._arrives_at = max(self._arrives_at + ORDERED, process.loop.time() + process.faults.poll())
            process.loop.call_at(self._arrives_at, self._hand_over, batch, self._epochs, frozenset(at_end))
            self.wake()

    def _out_of_range(self, partition: int, error: OffsetError) -> None:
        epoch = self._epochs[partition]
        self.remove([partition])
        if self._gone is None:
            self._fail(error)
        else:
            self._gone((partition, epoch))

    def _hand_over(self, batch: Any, epochs: Any, at_end: frozenset[int]) -> None:
        process, frozen = self._process, self._process.frozen()
        if frozen > 0:
            self._thawed += ORDERED
            process.loop.call_at(process.loop.time() + frozen + self._thawed, self._hand_over, batch, epochs, at_end)
        elif not process.dead:
            process.passes("poll.after")
            if not process.dead:
                sizes = {partition: size_of_records(records) for partition, records in batch.items()}
                self.received_bytes += sum(sizes.values())
                self._deliver(Polled(batch, sizes, epochs, at_end))


class SimReader:
    """``ports.Reader``: ``read_committed``."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def read(
        self,
        topic: str,
        ranges: Mapping[int, tuple[int, int]],
        receive: Callable[[int, list[IncomingRecord]], None],
        *,
        stalled_after_seconds: float,
        cancelled: Callable[[], bool],
    ) -> None:
        process = self._process
        positions = {number: start for number, (start, _) in ranges.items()}
        progress = process.loop.time()
        while any(positions[number] < end for number, (_, end) in ranges.items()):
            if cancelled():
                raise Stopped("cancelled")
            process.travel()
            for number, (_, end) in ranges.items():
                log, start = process.broker.log(topic, number), positions[number]
                reached = min(end, log.stable, start + process.rng.randint(1, 200))
                if reached <= start:
                    continue
                records = list(log.committed(start, reached))
                positions[number] = reached
                progress = process.loop.time()
                if records:
                    receive(number, records)
            if process.loop.time() - progress > stalled_after_seconds:
                raise BrokerUnavailable(f"no progress in {topic}")
            process.pause(0.005)

    def close(self) -> None:
        pass


class SimTopics:
    """``ports.Topics``: everything is there."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def create(self, specs: Sequence[TopicSpec], timeout_seconds: float) -> list[str]:
        return []

    def differences(self, specs: Sequence[TopicSpec]) -> list[str]:
        return []

    def identity(self, name: str, timeout_seconds: float) -> tuple[str, int] | None:
        found = self._broker.identity(name)
        return found.topic_id, found.partitions

    def describe(self, names: Collection[str], timeout_seconds: float) -> dict[str, None]:
        return dict.fromkeys(names)

    def delete(self, names: Collection[str], timeout_seconds: float) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass
