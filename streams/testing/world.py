"""The world of a ``TestDriver``: members of one event source over a simulated broker, on one loop of virtual time."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import functools
import math
import random
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec

from streams.codecs import RESERVED_KEY_PREFIX
from streams.core.commands import CommandRules
from streams.core.router import Route
from streams.errors import ConfigError, StreamsError
from streams.formats.cloudevents import CloudEvents
from streams.metrics import Measurement
from streams.model.group import transactional_id
from streams.model.topics import InputSpec
from streams.records import TYPE_HEADER, Change, IncomingRecord, TopicPartition
from streams.runtime.async_work.async_stage import Ahead
from streams.runtime.async_work.concurrent_stage import ConcurrentStageDefinition
from streams.runtime.changelog import OFFSET_KEY, OffsetRecord, decode_offset
from streams.runtime.engine import Engine
from streams.runtime.system import Environment
from streams.settings.config import EventSourceConfig
from streams.source.event_source import EventSource
from streams.source.lookups import Lookup
from streams.testing.fault_points import Point, Trap, point_of_move
from streams.testing.simulation.broker import Broker, Log, LogEntry
from streams.testing.simulation.clients import SimConnections
from streams.testing.simulation.faults import Conditions, Faults
from streams.testing.simulation.group import Group
from streams.testing.simulation.process import Process, SourceReader, Watched
from streams.testing.simulation.virtual_time import Fibers, VirtualTimeLoop, elapse
from streams.testing.simulation.wire_broker import WireBroker
from streams.testing.simulation.wire_groups import WireGroups
from streams.testing.simulation.wire_questions import WireQuestions
from streams.testing.state_folder import StateFolder

Source = EventSource[Any] | Callable[[], EventSource[Any]]
"""A source, whose copies are run; or a function that makes one, called for each start of a member, as a new process
would."""

CALM = Conditions(one_way=0.001, hear=(0.0,), post=(0.0,), polls=(0.0,), slow_markers=0.002, queue_limit=100_000)
"""Everything is quick, nothing is struck."""
NAP = 0.05
"""Seconds after which what is frozen looks whether it was thawed."""


class Exited(StreamsError):
    """An error policy of the source under test ended the process (``fatally_exit``)."""


class _Died(Exception):
    """The handler's process was killed in front of it."""


class DrivenMember:
    """One process: a source of its own, its connections, its task."""

    def __init__(self, world: DrivenWorld, number: int) -> None:
        self.number = number
        self.process = Process(world, str(number))
        self.process.longest_wait = NAP
        self.source = world.build(self.process, number)
        self.reported = False
        self.exit: SystemExit | None = None
        self.task = world.loop.create_task(self._run(world), name=f"member {number}")

    async def _run(self, world: DrivenWorld) -> None:
        try:
            await self.source._run.consume(
                lambda config: SimConnections(self.process, config, world.wire), world.environment(self)
            )
        except SystemExit as exit_:  # of a task it would end the loop, in the middle of what other members do
            self.exit = exit_

    @property
    def failure(self) -> BaseException | None:
        """The error that it has stopped with."""
        if not self.task.done() or self.task.cancelled():
            return None
        return self.exit or self.task.exception()

    @property
    def engine(self) -> Engine | None:
        """Engine of the member, while it runs."""
        return None if self.is_down else self.source._run.engine

    @property
    def is_down(self) -> bool:
        """Check whether it was killed, or has ended."""
        return self.process.dead or self.task.done()

    @property
    def is_frozen(self) -> bool:
        """Check whether the member is frozen."""
        return self.process.frozen() > 0

    @property
    def transactional_ids(self) -> list[str]:
        """Transactional ids of the member's producers."""
        config = self.source.config
        slots = range(config.pool.pool_size)
        return [transactional_id(config.group_id, config.instance_id, number) for number in slots]

    def crash(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.task.cancel()


class _Broker(Broker):
    def __init__(self, world: DrivenWorld, partitions: int) -> None:
        super().__init__(world.loop, world.rng, partitions)
        self._world = world

    def wall_ms(self) -> int:
        return int(self._world.wall_seconds() * 1000)


def _made_by(make: object) -> EventSource[Any]:
    source: object = make() if callable(make) else None
    if not isinstance(source, EventSource):
        raise ConfigError(f"a driver takes an event source, or a function that makes one; it got {make!r}")
    return source


class DrivenWorld:
    """``simulation.process.World``: the state that all members share. Everything that chance decides comes from
    ``seed``."""

    def __init__(
        self, source: Source, *, seed: int, conditions: Conditions, start_time: float, state_folder: str = ""
    ) -> None:
        self._make = source if not isinstance(source, EventSource) else None
        self.state_folder = StateFolder(state_folder)
        self._source = _copied(source) if isinstance(source, EventSource) else _made_by(source)
        self._start_time = start_time
        self.loop = VirtualTimeLoop(float("inf"))
        self.rng = random.Random(seed)
        self._numbers = random.Random(seed)
        self.fibers = Fibers(self.loop)
        self.faults = Faults(conditions, self.rng)
        config = self.config = self._source.config
        self.broker = _Broker(self, config.num_partitions)
        self.broker.topics.update({spec.name: spec.partitions for spec in self._source.outputs})
        self.broker.further = frozenset(self._source.inputs)
        self.broker.slow_markers = conditions.slow_markers
        self.broker.on_stable.append(self._grown)
        self.broker.on_marker = self._marker
        self.wire = WireBroker(self.broker)
        WireQuestions(self.wire)
        self.groups = WireGroups(self.wire, config.group_id, changelog=config.changelog, sessions=(0.0, math.inf))
        self.group = Group(self.groups, config.topic, config.num_partitions)
        self.inputs: list[SourceReader] = []
        self.members: dict[int, DrivenMember] = {}
        self.all_members: list[DrivenMember] = []
        self.traps: list[Trap] = []
        self.trace: list[str] = []
        self.errors: list[BaseException] = []
        """Errors that traps raised."""
        self.awaited = 0
        """Members that are down and will be started again by themselves."""

    @property
    def command_rules(self) -> CommandRules[Any] | None:
        """The functions of the commands of the source that runs; ``None``: it takes none."""
        source = next((member.source for member in self.running()), self._source)
        declared = source._declared.aggregate
        return None if declared is None else declared.rules

    def changes(self, partition: int) -> Iterator[IncomingRecord]:
        """The committed changelog without the engine's own records."""
        log = self.broker.log(self.config.changelog, partition)
        for record in log.committed(0, log.end):
            if record.key is not None and not record.key.startswith(RESERVED_KEY_PREFIX):
                yield record

    def restored_store(self, partition: int) -> Any:
        """A new store, filled from the committed changelog."""
        store = self._source._declared.store_factory(TopicPartition(self.config.topic, partition))
        for record in self.changes(partition):
            assert record.key is not None
            kind = record.header(TYPE_HEADER)
            store.receive_change(Change(record.key, record.value, None, kind.decode() if kind else ""))
        return store

    def wall_seconds(self) -> float:
        """The time of day."""
        return self._start_time + self.loop.time()

    def environment(self, member: DrivenMember) -> Environment:
        """Make the environment of one run of a member."""

        def leave(code: int) -> Any:
            self.errors.append(Exited(f"member {member.number} ended its process with code {code}: fatally_exit"))
            member.crash()
            raise asyncio.CancelledError

        return Environment(
            rng=lambda: random.Random(self._numbers.getrandbits(64)),
            wall_seconds=self.wall_seconds,
            elapsed_seconds=self.loop.time,
            watchdog=Watched,
            look_up_records=1_000,
            exit=leave,
        )

    def start(self, number: int) -> DrivenMember:
        """Start a process with this number, which must not be running."""
        self.note(f"member {number} starts")
        member = self.members[number] = DrivenMember(self, number)
        self.all_members.append(member)
        return member

    def note(self, text: str) -> None:
        """Add a line to the trace."""
        self.trace.append(f"{self.loop.time():.6f} {text}")

    def running(self) -> list[DrivenMember]:
        """Members that are not down."""
        return [member for member in self.members.values() if not member.is_down]

    @property
    def topics_read(self) -> list[str]:
        """All inputs, the source's own topic first."""
        return [self.config.topic, *self._source.inputs]

    @property
    def visits(self) -> list[str]:
        """The names of the visits."""
        return [*self._source._declared.router.visits]

    @property
    def inputs_read(self) -> dict[str, InputSpec]:
        """The inputs beside the source's own topic, as they are declared."""
        return self._source._declared.inputs.by_topic

    @property
    def forms_sent(self) -> dict[str, CloudEvents]:
        """The forms of topics whose events have not our headers."""
        return self._source._declared.outputs.forms

    @property
    def lookups_read(self) -> dict[str, Lookup[Any, Any]]:
        """The lookups, as they are declared."""
        return self._source._declared.lookups.by_topic

    def handled(self, partition: int, topic: str = "") -> int:
        """The first offset of an input (by default the source's own topic) that is not handled, by what is committed
        in the changelog."""
        log = self.broker.log(self.config.changelog, partition)
        for offset in range(log.stable - 1, -1, -1):
            if log.entries[offset].key == OFFSET_KEY:
                for record in log.committed(offset, offset + 1):
                    return max(offset_in(decode_offset(record), topic, partition), 0)
        return 0

    async def end(self) -> None:
        """Kill everything, wait for all tasks to end."""
        for member in self.all_members:
            member.crash()
        rest = asyncio.all_tasks(self.loop) - {asyncio.current_task(self.loop)}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    # -- World ---------------------------------------------------------------------------------------------------------

    def passed(self, name: str, point: str, partition: int) -> bool:
        """Spring the traps that wait for this point of a member."""
        number = int(name)
        sprung = [trap for trap in self.traps if trap.meets(point, number, partition)]
        for trap in sprung:
            action = getattr(trap.action, "__name__", repr(trap.action))
            self.note(f"member {number} at {point}: {action}")
            try:
                trap.action(number)
            except Exception as error:
                self.errors.append(error)
        return bool(sprung)

    def noted(self, name: str, what: str, partition: int) -> None:
        """Note a step of a move, for the traps that wait for it."""
        point = point_of_move(what)
        if point is not None:
            self.passed(name, point, partition)

    def measured(self, name: str, measurement: Measurement) -> None:
        """Drop a measurement: the source's own ``metrics_handler`` gets it too."""

    def _grown(self, log: Log) -> None:
        if log.topic == self.config.topic or log.topic in self.broker.further:
            self.inputs = [reader for reader in self.inputs if not reader.is_closed]
            for reader in self.inputs:
                reader.wake()

    def _marker(self, what: str, partition: int, entry: LogEntry) -> None:
        assert entry.txn is not None
        instance = entry.txn.name.rsplit(".", 2)[1]
        number = instance.rpartition("-")[2]
        point: Point | None = {"produced": "release.produced", "committed": "release.committed"}.get(what)  # type: ignore[assignment]
        if point is not None:
            self.loop.call_soon(self.passed, number, point, partition)

    # -- sources -------------------------------------------------------------------------------------------------------

    def build(self, process: Process, number: int) -> EventSource[Any]:
        """Build the source of a member."""
        made = _copied(self._source) if self._make is None else self._make()
        self.broker.further |= frozenset(made.inputs)
        given = made.config
        made.config = msgspec.structs.replace(
            _driven(given, number, process), state=self.state_folder.holding(given.state)
        )
        wrap = functools.partial(_watched, process=process)
        made._declared.wrap_handlers(wrap)
        return made


def offset_in(record: OffsetRecord, topic: str, partition: int) -> int:
    """The next offset to read in an input, -1 before it was one; without a topic in the source's own."""
    if not topic:
        return record.offset
    at = record.position_in(topic, partition)
    return -1 if at is None else at[0]


def _copied(source: EventSource[Any]) -> EventSource[Any]:
    """Copy a source with its declarations; the source itself is left as it is."""
    made = copy.copy(source)
    made._hold(source._declared.copy())
    return made


def _driven(config: EventSourceConfig, number: int, process: Process) -> EventSourceConfig:
    activated = config.on_partition_activated

    def active(partition: int) -> None:
        process.note("active", partition)
        if activated is not None:
            activated(partition)

    return msgspec.structs.replace(
        config,
        bootstrap_servers="simulated",
        source_bootstrap_servers="",
        source_client_settings={},
        instance_id=f"{config.instance_id or 'member'}-{number}",
        group=msgspec.structs.replace(
            config.group, membership="streams", static_membership=False, publish_status=False
        ),
        on_partition_activated=active,
    )


def _watched(route: Route, process: Process) -> Route:
    """Copy a route, with points around its handler."""
    made = copy.copy(route)
    made.handler = watched(route.handler, process, is_async=route.is_async)
    ahead = route.ahead
    if isinstance(ahead, Ahead) and isinstance(ahead.stage, ConcurrentStageDefinition):
        made.ahead = Ahead(dataclasses.replace(ahead.stage, handler=made.handler), ahead.plan)
    return made


def watched(handler: Callable[..., Any], process: Process, *, is_async: bool) -> Callable[..., Any]:
    """Wrap a handler with points around it."""

    def passes(point: Point, ctx: Any) -> None:
        process.passes(point, ctx.topic_partition.partition)
        if process.dead:
            raise _Died

    if is_async:

        @functools.wraps(handler)
        async def watched_async(ctx: Any, *event: Any) -> Any:
            passes("handler.before", ctx)
            answer = await handler(ctx, *event)
            passes("handler.after", ctx)
            return answer

        return watched_async

    @functools.wraps(handler)
    def watched_plain(ctx: Any, *event: Any) -> Any:
        passes("handler.before", ctx)
        answer = handler(ctx, *event)
        if not isinstance(answer, Awaitable):
            passes("handler.after", ctx)
        return answer

    return watched_plain


def committed_records(broker: Broker, topic: str) -> Iterator[tuple[LogEntry, IncomingRecord]]:
    """Yield the committed records of a topic, partition by partition."""
    for (name, _), log in sorted(broker.logs.items()):
        if name == topic:
            for record in log.committed(0, log.end):
                yield log.entries[record.offset], record


async def until(done: Callable[[], bool], deadline: float) -> bool:
    """Wait in virtual time; ``False``: it did not come to that before ``deadline``."""
    loop, step = asyncio.get_running_loop(), 0.0005
    while not done():
        if loop.time() >= deadline:
            return False
        await elapse(min(step, max(deadline - loop.time(), 0.0)))
        step = min(step * 1.5, 0.1)
    return True
