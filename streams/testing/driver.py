"""``TestDriver``: the real engine without a broker, with time and crashes in the hands of a test."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Generic, Literal, TypeVar, overload

from streams.errors import ConfigError, NotOwned
from streams.events import to_record
from streams.records import IncomingRecord, Record
from streams.runtime.partition.event_context import EventContext
from streams.source.event_source import EventSource
from streams.source.lookups import Lookup
from streams.statistics import SourceStatistics
from streams.stores.joined import Joined
from streams.stores.joined_table import JoinedTable
from streams.testing.driven_beginnings import DrivenBeginnings
from streams.testing.driven_commands import DrivenCommands
from streams.testing.driven_once import DrivenOnce
from streams.testing.driven_tables import DrivenTable, declared_table
from streams.testing.driver_base import Unsettled
from streams.testing.fault_points import Point, Trap
from streams.testing.quiescence import broken_promises
from streams.testing.simulation.faults import Conditions, Strike
from streams.testing.simulation.virtual_time import elapse
from streams.testing.world import CALM, committed_records, until, watched
from streams.views.global_table import GlobalTable

StoreT = TypeVar("StoreT")
E = TypeVar("E")
K = TypeVar("K")
V = TypeVar("V")

Call = Literal["init", "flush", "send_offsets", "commit", "abort", "ask"]
"""Calls to the broker that can be struck: those of a transaction, and the questions of a take-over."""

START_TIME: Final = 1_700_000_000.0
"""The time of day at which drivers start, in seconds since 1970."""


class TestDriver(DrivenBeginnings, DrivenCommands, DrivenOnce, Generic[StoreT]):
    """Runs an event source over a simulated broker, in virtual time: no waiting, no network, the same run each time.

    ``source`` is not started itself; its copies are (same handlers, schedules and store factory, each with an instance
    name of its own), so it can be used again. A function that makes a source is called for each start of a member
    instead, as a new process would run it. ``members`` are started, numbered from 0. All chance comes from ``seed``.
    ``topics`` gives numbers of partitions to topics that have not as many as the source. ``conditions`` are the delays
    of things; ``patience`` for how many simulated seconds a call waits until everything is done. ``start=False``
    leaves it to ``start``, to set traps before. ``state_folder``: where state on disk and snapshots go in the place of
    ``StateConfig.folder`` (a path; empty: a new folder, removed by ``close``).

    Use it from one thread, as a context manager: ``close`` ends everything. In a running event loop (an async test, a
    notebook) it is used in the same way, without ``await``: that loop stands still during a call. What makes a
    member stop with an error is raised by the call during which it happens. Raises ``ConfigError``, ``Stopped``.
    """

    __test__ = False

    def __init__(
        self,
        source: EventSource[StoreT] | Callable[[], EventSource[StoreT]],
        members: int = 1,
        seed: int = 0,
        *,
        topics: Mapping[str, int] | None = None,
        conditions: Conditions = CALM,
        patience: float = 60.0,
        start_time: float = START_TIME,
        start: bool = True,
        state_folder: str = "",
    ) -> None:
        super().__init__(source, members, seed, topics or {}, conditions, patience, start_time, state_folder)
        self.seed = seed
        if start:
            try:
                self.start()
            except BaseException:
                self.close()
                raise

    def start(self) -> None:
        """Start the members; returns when every partition is worked on. Without effect on those that run."""
        self._check_open()
        for number in range(self._first_members):
            if number not in self._world.members:
                self._world.start(number)
        self._settle(balanced=True)

    def __enter__(self) -> TestDriver[StoreT]:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- input ---------------------------------------------------------------------------------------------------------

    def send(
        self,
        event: object,
        *,
        key: str | bytes | None = None,
        partition: int | None = None,
        headers: Iterable[tuple[str, bytes | None]] = (),
        topic: str = "",
        wait: bool = True,
    ) -> IncomingRecord:
        """Append an event to the source's topic, or to another input of it, and run until everything is committed.
        Returns the record.

        ``partition``: by the key if it is not given (murmur2, as Java does), by chance without a key. ``wait=False``
        leaves the running to the next call. Returns early when no member is running (any more). Raises ``Unsettled``
        when something is left to do at the end of the patience, and what makes a member stop.
        """
        record = to_record(topic or self._world.config.topic, event, key=key, headers=headers, partition=partition)
        return self.send_record(record, wait=wait)

    def send_record(self, record: Record, *, wait: bool = True) -> IncomingRecord:
        """Append a ready record, which may be one that no handler can read, and run as ``send`` does."""
        self._check_open()
        world = self._world
        is_looked_into = record.topic in world.lookups_read
        if record.topic not in world.topics_read and not is_looked_into:
            read = ", ".join(world.topics_read)
            raise ConfigError(f"the record is for {record.topic}; this driver's source reads {read}")
        partition = record.partition
        if partition is None:
            partition = world.broker.partition_of(record.topic, record.key)
        if not is_looked_into:
            self._check_partition(partition)
        headers, at = list(record.headers or ()) or None, record.timestamp_ms or world.broker.wall_ms()
        offset = world.broker.append(record.topic, partition, record.key, record.value, headers, at)
        if wait:
            self.settle()
        received = None if headers is None else tuple(headers)
        return IncomingRecord(record.topic, partition, offset, record.key, record.value, received, at)

    def table(self, topic: str) -> DrivenTable:
        """The topic of a joined table, or of a lookup, to ``put`` and ``delete`` rows; they are in the tables of all
        running members when it returns. Raises ``ConfigError`` for another topic."""
        declared = declared_table(self._world.inputs_read, self._world.lookups_read, topic)
        return DrivenTable(declared, lambda record, wait: self.send_record(record, wait=wait))

    # -- time ----------------------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """Simulated seconds since the driver was made."""
        return self._world.loop.time()

    def time(self) -> float:
        """The simulated time of day, in seconds since 1970: what ``time.time`` is outside."""
        return self._world.wall_seconds()

    def settle(self, patience: float | None = None) -> None:
        """Run until everything that was sent is committed, and nothing is under way. Raises as ``send``."""
        self._settle(balanced=False, patience=patience)

    def advance(self, seconds: float) -> None:
        """Let so much time pass: what is scheduled, timed or to be tried again by then happens."""
        if seconds < 0:
            raise ConfigError(f"time cannot go back by {-seconds} seconds")
        if not seconds < math.inf:
            raise ConfigError(f"time cannot go on by {seconds} seconds")
        self._run(elapse(seconds))

    # -- what came of it -----------------------------------------------------------------------------------------------

    @overload
    def outputs(self, topic: str, /) -> list[IncomingRecord]: ...
    @overload
    def outputs(self, topic: str, event_class: type[E], /) -> list[E]: ...
    @overload
    def outputs(self, topic: str, /, *event_classes: type[Any]) -> list[Any]: ...

    def outputs(self, topic: str, /, *event_classes: type[Any]) -> list[Any]:
        """Return the committed records of a topic, in the order in which they were written: within a partition that of
        the events; a transaction writes its partitions one after the other.

        Records; or events, if their classes are named. Raises ``DecodeError`` for a record of another type.
        """
        found = sorted(committed_records(self._world.broker, topic), key=lambda pair: pair[0].number)
        records = [record for _, record in found]
        return self._decoded(topic, records, event_classes) if event_classes else records

    @overload
    def new_outputs(self, topic: str, /) -> list[IncomingRecord]: ...
    @overload
    def new_outputs(self, topic: str, event_class: type[E], /) -> list[E]: ...
    @overload
    def new_outputs(self, topic: str, /, *event_classes: type[Any]) -> list[Any]: ...

    def new_outputs(self, topic: str, /, *event_classes: type[Any]) -> list[Any]:
        """Return the outputs that no earlier call for this topic has returned."""
        seen = self._read.get(topic, -1)
        found = sorted(committed_records(self._world.broker, topic), key=lambda pair: pair[0].number)
        self._read[topic] = max([seen, *(entry.number for entry, _ in found)])
        records = [record for entry, record in found if entry.number > seen]
        return self._decoded(topic, records, event_classes) if event_classes else records

    def dead_letters(self) -> list[IncomingRecord]:
        """Committed dead letters, in the order in which they were written."""
        return self.outputs(self._world.config.dead_letters)

    def committed_offsets(self, topic: str = "") -> dict[int, int]:
        """The group's offsets in the source's topic, or in another input: of each partition that has one, the first
        that is not handled."""
        broker = self._world.broker
        found = {number: broker.offsets.get(broker.offset_key(topic, number)) for number in self._partitions()}
        return {number: offset for number, offset in found.items() if offset is not None}

    def changelog(self, partition: int) -> dict[bytes, bytes]:
        """The state as it is committed: the last value of each key, without the engine's own records."""
        self._check_partition(partition)
        state: dict[bytes, bytes] = {}
        for record in self._world.changes(partition):
            assert record.key is not None
            if record.value is None:
                state.pop(record.key, None)
            else:
                state[record.key] = record.value
        return state

    def store(self, partition: int) -> StoreT:
        """The store of the member that works on this partition; look at it, do not write. Raises ``NotOwned``."""
        self._check_partition(partition)
        owner = self.owner(partition)
        engine = None if owner is None else self._world.members[owner].engine
        if engine is None:
            raise NotOwned(f"{self._world.config.topic}[{partition}] is not active on any member")
        store: StoreT = engine.workers[partition].store
        return store

    def stores(self) -> dict[int, StoreT]:
        """The stores of all partitions that are worked on."""
        return {number: self.store(number) for number in self._partitions() if self.owner(number) is not None}

    def joined(self, table: Joined[K, V], partition: int) -> JoinedTable[K, V]:
        """The rows of a joined table in this partition, on the member that works on it. Raises ``NotOwned``."""
        self.store(partition)
        owner = self.owner(partition)
        assert owner is not None
        engine = self._world.members[owner].engine
        assert engine is not None
        rows: Any = engine.workers[partition].joined.tables[table.topic]
        found: JoinedTable[K, V] = rows
        return found

    def lookup(self, table: Lookup[K, V], member: int | None = None) -> GlobalTable[K, V]:
        """The table of a lookup on a member. Raises ``NotOwned`` for one that is starting, or has none."""
        running = self._member(member)
        declared = running.source._declared.lookups.by_topic.get(table.topic)
        rows: Any = None if running.engine is None or declared is None else running.engine.lookups.table(declared)
        if rows is None:
            raise NotOwned(f"{table!r} is not on member {running.number} (yet)")
        found: GlobalTable[K, V] = rows
        return found

    def restored_store(self, partition: int) -> StoreT:
        """A new store, filled from the committed changelog: what the next owner would begin with."""
        self._check_partition(partition)
        store: StoreT = self._world.restored_store(partition)
        return store

    def check(self) -> None:
        """Raise ``AssertionError`` for what contradicts exactly-once, whatever the source does: a transaction that
        hangs, input that is not handled or was handled again, a store (or warm copy, if it has ``items()``) that
        differs from its changelog. When everything is settled."""
        broken = list(broken_promises(self._world))
        if broken:
            raise AssertionError("\n".join(broken))

    # -- members -------------------------------------------------------------------------------------------------------

    @property
    def members(self) -> list[int]:
        """Running members, frozen ones included."""
        return sorted(member.number for member in self._world.running())

    def owner(self, partition: int) -> int | None:
        """The member on which this partition is active."""
        self._check_partition(partition)
        for member in self._world.running():
            engine = member.engine
            worker = engine.workers.get(partition) if engine is not None else None
            if worker is not None and worker.state.value == "active" and not member.is_frozen:
                return member.number
        return None

    def statistics(self, member: int | None = None) -> SourceStatistics:
        """Return the statistics of a member."""
        return self._member(member).source.statistics()

    def interject(self, partition: int, handler: Callable[[EventContext[StoreT]], Any]) -> Any:
        """``EventSource.interject`` on the partition's owner: returns its answer once it is committed, raises what it
        raises, and ``NotOwned``."""
        owner = self.owner(partition)
        if owner is None:
            raise NotOwned(f"{self._world.config.topic}[{partition}] is not active on any member")
        member = self._world.members[owner]
        seen = watched(handler, member.process, is_async=inspect.iscoroutinefunction(handler))
        try:
            answer = self._run(asyncio.wait_for(member.source.interject(partition, seen), self._patience))
        except TimeoutError:
            raise Unsettled(f"the interjection is not committed after {self._patience} simulated seconds") from None
        self.settle()
        return answer

    def join(self) -> int:
        """Start one more member; returns its number when the group is settled."""
        self._check_open()
        number = max(self._world.members, default=-1) + 1
        self._world.start(number)
        self._settled_if_outside()
        return number

    def leave(self, member: int | None = None) -> None:
        """Stop a member in good order; returns when it has stopped, and the group is settled."""
        found = self._member(member)
        self._world.note(f"member {found.number} is stopped")
        found.source._run.ask_to_stop(drain=True)
        if not self._stepping:
            if not self._run(until(lambda: found.is_down, self.now + self._patience)):
                raise Unsettled(f"member {found.number} has not stopped after {self._patience} simulated seconds")
            self._settled_if_outside()

    def rebalance(self, member: int | None = None) -> None:
        """Let a guest join and leave again once the group is settled. (``member`` is of no importance.)"""
        guest = self.join()
        if self._stepping:
            self._world.loop.call_later(1.0, self._dismiss, guest)
        else:
            self.leave(guest)

    def restart(self, member: int | None = None) -> None:
        """Start a member that is down, with the same instance name; returns when the group is settled."""
        self._check_open()
        world = self._world
        down = [number for number, known in world.members.items() if known.is_down]
        if member is None and len(down) == 1:
            member = down[0]
        if member is None:
            raise ConfigError(f"name the member to restart; down are {down or 'none'}")
        if member in world.members and member not in down:
            raise ConfigError(f"member {member} is running; crash it, or let it leave, before it is restarted")
        self._check_known(member)
        world.start(member)
        self._settled_if_outside()

    # -- faults --------------------------------------------------------------------------------------------------------

    def at(
        self,
        point: Point,
        action: Callable[[int], object],
        *,
        member: int | None = None,
        partition: int | None = None,
        skip: int = 0,
        times: int = 1,
    ) -> Trap:
        """Call ``action(member)`` when a member passes this point (``fault_points.POINTS``) the next time.

        ``driver.at("commit.before", driver.crash)``; any function of a member's number will do. ``member`` and
        ``partition`` let it wait for these only, ``skip`` lets so many pass before, ``times`` makes it spring more
        than once. Not all points know a partition: those of transactions have none.
        """
        if partition is not None:
            self._check_partition(partition)
        trap = Trap(point, action, member=member, partition=partition, skip=skip, times=times)
        self._world.traps.append(trap)
        return trap

    def crash(self, member: int | None = None) -> None:
        """Kill a member (SIGKILL), without a LeaveGroup: the group notices when its session has expired."""
        found = self._member(member)
        self._world.note(f"member {found.number} is killed")
        found.crash()

    def freeze(self, member: int | None = None, seconds: float | None = None) -> None:
        """Freeze a member (SIGSTOP): its connections stand still, for so long or until ``thaw``."""
        found = self._member(member)
        self._world.note(f"member {found.number} is frozen")
        found.process.frozen_until = float("inf") if seconds is None else self.now + seconds

    def thaw(self, member: int | None = None) -> None:
        """Let a frozen member go on (SIGCONT)."""
        found = self._member(member)
        self._world.note(f"member {found.number} is thawed")
        found.process.frozen_until = self.now

    def fence(self, member: int | None = None) -> None:
        """Take a member's transactional ids, as another process: its transactions are aborted, its producers fenced."""
        found, broker = self._member(member), self._world.broker
        self._world.note(f"member {found.number} is fenced")
        for name in found.transactional_ids:
            if name in broker.ids:
                broker.init(name, self._world.config.timeouts.transaction_timeout_seconds)

    def evict(self, member: int | None = None) -> None:
        """Evict a member from the group; it notices at its next heartbeat or commit, and joins again."""
        found = self._member(member)
        self._world.note(f"member {found.number} is evicted")
        for membership in found.process.memberships:
            self._world.group.leave(membership.member)

    def abort(self, member: int | None = None) -> None:
        """Abort a member's open transaction on the broker; without one, the next one right before its commit."""
        found = self._member(member)
        if not self._world.broker.expire(found.transactional_ids):
            self.at("commit.before", self.abort, member=found.number)

    def lose_reply(self, call: Call, member: int | None = None) -> None:
        """Lose the answer to the next such call: it has its effect."""
        self._strike(call, Strike.REPLY_LOST, member)

    def lose_request(self, call: Call, member: int | None = None) -> None:
        """Lose the next such call: it has no effect and no answer."""
        self._strike(call, Strike.REQUEST_LOST, member)

    def delay(self, call: Call, member: int | None = None) -> None:
        """Delay the next such call (of a transaction): it has its effect after its caller has given up."""
        self._strike(call, Strike.LATE, member)

    def refuse(self, call: Call, member: int | None = None) -> None:
        """Answer the next such call (of a transaction) with an error after which it has to be aborted."""
        self._strike(call, Strike.ABORTABLE, member)

    def outage(self, seconds: float) -> None:
        """Stop the broker's answers for so long."""
        self._world.note(f"the broker is away for {seconds} s")
        self._world.broker.down_until = self.now + seconds

    def forget_group(self) -> None:
        """Restart the group's coordinator without its memory: members, generation and offsets are gone."""
        self._world.note("the coordinator forgets the group")
        self._world.group.forget()

    def compact(self) -> None:
        """Compact the changelog."""
        for log in self._world.broker.logs.values():
            if log.topic == self._world.config.changelog:
                log.compact(log.stable)

    @property
    def trace(self) -> list[str]:
        """Events of the members, with times, for messages."""
        return list(self._world.trace)
