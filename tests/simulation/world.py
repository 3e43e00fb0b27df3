"""One seed's world: members that come and go over a simulated broker, and what must be true when all is over."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import tempfile
import zlib
from typing import Any

from streams.errors import MembershipFatal
from streams.metrics import Measurement
from streams.runtime.partition.event_context import EventContext
from streams.runtime.system import Environment
from streams.source.event_source import EventSource
from streams.testing.simulation.broker import Broker
from streams.testing.simulation.clients import SimConnections
from streams.testing.simulation.faults import Faults
from streams.testing.simulation.group import Group
from streams.testing.simulation.network import WIRE_POINTS
from streams.testing.simulation.process import Process, SourceReader, Watched
from streams.testing.simulation.virtual_time import Fibers, VirtualTimeLoop, elapse, run
from streams.testing.simulation.wire_broker import WireBroker
from streams.testing.simulation.wire_groups import WireGroups
from streams.testing.simulation.wire_questions import WireQuestions

from . import program
from .jobs_program import Receiver
from .judge import CHANGELOG, Judge
from .parked_operator import ParkedOperator
from .plans import Plan
from .watch import Trap, Watch

MEMORY = "/dev/shm" if os.path.ismount("/dev/shm") and os.access("/dev/shm", os.W_OK | os.X_OK) else None
"""Where folders do not wait for a disk that others use; ``None``: where temporary files are."""
PATIENCE = 60.0
"""Simulated seconds, after the last fault, in which something must be committed, until everything is."""


class Member:
    """One process: an event source, its connections, its task."""

    def __init__(self, world: World, name: str, strategies: tuple[str, ...], instance: str) -> None:
        self.name, self.instance = name, instance
        self.strategies = strategies
        self.process, self.environment, self.wire = Process(world, name), world.environment, world.wire
        self.source: EventSource[Any] = program.build(world.plan, instance, strategies, self.process)
        self.connections: list[SimConnections] = []
        self.task = world.loop.create_task(self._run(), name=name)

    async def _run(self) -> None:
        await self.source._run.consume(lambda config: SimConnections(self.process, config, self.wire), self.environment)

    def crash(self) -> None:
        self.process.kill()
        engine = self.source._run.engine
        for kept in engine.keeper.open_ones if engine is not None and engine.keeper is not None else ():
            kept.abandon()  # the kernel frees the locks of a process that is gone
        if self.process.world.plan.snapshots:
            shutil.rmtree(self.process.world.folder_of(self.process.name), ignore_errors=True)
        self.task.cancel()


class _Broker(Broker):
    def partition_of(self, topic: str, key: bytes | None) -> int:
        """By a hash that is quick to compute: there are many worlds."""
        return zlib.crc32(key or b"") % self.partitions


class World:
    """Everything that one seed decides."""

    def __init__(self, seed: int, plan: Plan, loop: VirtualTimeLoop) -> None:
        self.plan, self.loop = plan, loop
        self.rng = random.Random(seed)
        self.fibers = Fibers(loop)
        self.faults = Faults(plan, self.rng)
        self.broker = _Broker(loop, self.rng, plan.partitions)
        self.broker.slow_markers = plan.slow_markers
        self.broker.refuses = lambda _, entry: program.REFUSED_VALUE in (entry.value or b"")
        self.broker.on_append = lambda _: [reader.wake() for reader in self.inputs]
        self.wire = WireBroker(
            self.broker, nodes=plan.nodes, transaction_version=plan.transaction_version, verifies=plan.verifies
        )
        WireQuestions(self.wire)
        self.groups = WireGroups(self.wire, program.GROUP, changelog=CHANGELOG)
        self.group = Group(self.groups, program.TOPIC, plan.partitions)
        self.inputs: list[SourceReader] = []
        self.members: dict[str, Member] = {}
        self.differences: list[str] = []
        self.tokens: list[tuple[str, asyncio.Task[None], Member]] = []
        self.trace: list[str] = []
        self.forgot = self.twins = False
        self.instances: dict[str, str] = {}
        self.phase = 0
        self.rolling: list[asyncio.Task[None]] = []
        numbers = random.Random(seed)
        self.environment = Environment(
            rng=lambda: random.Random(numbers.getrandbits(64)),
            wall_seconds=loop.time,
            elapsed_seconds=loop.time,
            watchdog=Watched,
            look_up_records=1,  # there are not many in these worlds
        )
        self.folder = tempfile.mkdtemp(prefix="kes-simulation-", dir=MEMORY) if plan.kept else ""
        self.operator = ParkedOperator(self)
        self.ends = self.operator.ends
        self.receiver = Receiver(self)
        self.judge = Judge(self)
        self.watch = Watch(self)

    def folder_of(self, name: str) -> str:
        """The disk of a member's own machine."""
        return f"{self.folder}/machine-{name}"

    async def live(self) -> None:
        """From the first start to the last word."""
        try:
            for number in range(self.plan.members):
                self._start(f"a{number}")
            feeding = self.loop.create_task(self._feed())
            for at, action in self.plan.actions:
                await self._until(at)
                self.act(action)
            await self._until(self.plan.calm_at)
            await feeding
            await asyncio.gather(*self.rolling)
            self.trace.append(f"{self.loop.time():.6f} calm")
            for name in [name for name in self.members if name.endswith("'")]:
                self.members[name].crash()
            self._start("last")  # the others may be stopping, all of them
            await self._all_handled()
            if not self.differences:
                await self.watch.settled()
            await self._stop_all()
            await elapse(self.plan.transaction_timeout + 5.0)  # until the broker has ended what hangs
            self.judge.judge()
        finally:
            for member in self.members.values():
                member.crash()
            await asyncio.gather(*(member.task for member in self.members.values()), return_exceptions=True)
            for task in [*self.rolling, *(task for _, task, _ in self.tokens)]:
                task.cancel()
            self.fibers.close()
            if self.folder:
                shutil.rmtree(self.folder)

    # -- what happens --------------------------------------------------------------------------------------------------

    async def _until(self, at: float) -> None:
        while (left := at - self.loop.time()) > 0:
            await elapse(min(left, 1.0))
            self._look_for_failures()

    def _running(self) -> list[Member]:
        return [member for member in self.members.values() if not member.task.done()]

    def _start(self, name: str, instance: str = "") -> None:
        before = self.members.get(name)
        if before is None or before.task.done():
            self._look_for_failures()
            self.members[name] = Member(self, name, self._strategies(), instance or name)

    def _strategies(self) -> tuple[str, ...]:
        """The newest ones that go with those of everybody who is there, or not known to be gone."""
        others = [set(member.strategies) for member in self._running()]
        others += [set(known.strategies) for known in self.group.members.values()]
        for strategies in self.plan.strategies[self.phase :: -1]:
            if set(strategies).intersection(*others):
                return strategies
        raise AssertionError(f"nothing goes with {others}")

    async def _roll(self) -> None:
        """One after the other, each is stopped, or killed, and started again."""
        for name in sorted(self.members):
            member = self.members[name]
            if member.task.done():
                continue
            self.act(self.rng.choice(("stop ", "stop ", "crash ")) + name)
            await asyncio.wait([member.task], timeout=60.0)
            await elapse(self.rng.choice((0.0, 0.5, 3.0)))
            self.act(f"start {name}")
            await elapse(self.rng.choice((0.1, 1.0, 2.0)))

    def act(self, action: str, why: str = "") -> None:
        """Something happens. ``why`` is for the trace. Nothing does any more once the world is calm."""
        if why and self.loop.time() > self.plan.calm_at:
            return
        kind, _, name = action.partition(" ")
        self.trace.append(f"{self.loop.time():.6f} {action} {why}".rstrip())
        member = self.members.get(name)
        alive = member is not None and not member.task.done()
        if alive and kind in ("crash", "freeze", "evict", "halt", "cancel"):
            self.watch.struck(name)
        match kind:
            case "on":
                self.watch.arm(Trap(*name.split()))
            case "evict" if alive:
                for membership in member.process.memberships:
                    self.group.leave(membership.member)
            case "roll":
                self.rolling.append(self.loop.create_task(self._roll()))
            case "migrate":
                self.phase = min(self.phase + 1, len(self.plan.strategies) - 1)
                self.rolling.append(self.loop.create_task(self._roll()))
            case "start":
                self._start(name)
            case "twin" if alive:
                self.twins = True
                self._start(f"{name}'", name)
            case "crash" if alive:
                member.crash()
            case "stop" if alive:
                member.source._run.ask_to_stop(drain=True)
            case "halt" if alive:
                member.source.stop_now()
            case "cancel" if alive:
                member.task.cancel()
            case "freeze" if alive:
                member.process.frozen_until = self.loop.time() + self.rng.choice((1.0, 5.0, 8.0, 12.0))
            case "outage":
                self.broker.down_until = self.loop.time() + self.rng.choice((0.5, 3.0, 8.0))
            case "move":
                self.wire.move(program.GROUP)
            case "forget":
                self.forgot = True
                self.group.forget()
            case "compact":
                share = self.rng.choice((0.5, 0.9, 1.0))
                for log in self.broker.logs.values():
                    if log.topic == CHANGELOG:
                        log.compact(int(log.stable * share))
            case "operate" if (task := self.operator.operate()) is not None:
                self.rolling.append(task)
            case "interject" if alive:
                self._interject(member)

    def _interject(self, member: Member) -> None:
        token = f"t{len(self.tokens)}"
        pauses = self.rng.choice((None, 0.0, 0.3, 2.0))

        async def handler(ctx: EventContext[Any]) -> None:
            if pauses is not None:
                await elapse(pauses)
            ctx.forward(program.TOKENS, program.ValueAt(0, ctx.offset), key=token)

        async def ask() -> None:
            await member.source.interject(self.rng.randrange(self.plan.partitions), handler)

        self.tokens.append((token, self.loop.create_task(ask()), member))

    async def _feed(self) -> None:
        pause = self.plan.calm_at / max(self.plan.records, 1)
        for partition, key, value, headers in list(program.inputs(self.plan, self.rng)):
            self.broker.append(program.TOPIC, partition, key, value, headers)
            await elapse(self.rng.choice((0.0, 0.0, 0.0, pause, 2 * pause)))

    async def _all_handled(self) -> None:
        before, deadline = (self.judge.changelog_offsets(), self.judge.rings_left()), self.loop.time() + PATIENCE
        while (now := (self.judge.changelog_offsets(), self.judge.rings_left())) != (self.judge.ends(), 0):
            if now != before:
                before, deadline = now, self.loop.time() + PATIENCE
            if self.loop.time() > deadline:
                self.differences.append(f"no progress: {now[0]} of {self.judge.ends()} handled, {now[1]} timers left")
                return
            await elapse(0.5)
            self._look_for_failures()
            if self.differences:
                return

    async def _stop_all(self) -> None:
        await elapse(1.0)  # one that is not started yet does not hear
        running = self._running()
        for member in running:
            member.source._run.ask_to_stop(drain=True)
        if running:
            _, late = await asyncio.wait([member.task for member in running], timeout=60.0)
            self.differences += [f"{task.get_name()} did not stop" for task in late]
        self._look_for_failures()

    def _look_for_failures(self) -> None:
        for name, member in self.members.items():
            for error in (error for membership in member.process.memberships for error in membership.failures):
                raise AssertionError("the simulation is wrong") from error
            task = member.task
            if task.done() and not task.cancelled() and task.exception() is not None and not member.process.dead:
                if self.twins and isinstance(task.exception(), MembershipFatal):
                    continue  # one of two that have the same name
                said = f"{name} failed: {task.exception()!r}"
                if said not in self.differences:
                    self.differences.append(said)

    def noted(self, name: str, what: str, partition: int) -> None:
        """A step of a move on a member."""
        self.watch.noted(name, what, partition)
        if what == "active":
            # A restart of the partition in the same process is no new owner.
            self.operator.activated.setdefault((self.members[name].process, partition), self.loop.time())

    def passed(self, name: str, point: str, partition: int) -> bool:
        """A member's way through a transaction: now and then it is killed right there, and started again."""
        if point == "SyncGroup.before" and self.plan.moved and self.rng.random() < self.plan.moved:
            self.act("move", "in the middle of a join")
        share = self.plan.kills if point in WIRE_POINTS else 0.0
        if share and self.loop.time() < self.plan.calm_at and self.rng.random() < share:
            self.broker.met.add(f"kill {point}")
            self.act(f"crash {name}", point)
            if name == self.members[name].instance:  # else it is a twin
                self.loop.call_later(self.rng.choice((0.0, 0.5, 5.0)), self.act, f"start {name}", "after a kill")
        return False

    def measured(self, name: str, measurement: Measurement) -> None:
        """A member's event source measured something."""
        self.watch.measured(name, measurement)

    def fingerprint(self) -> list[tuple[str, int, list[tuple[bytes | None, bytes | None, bool]]]]:
        """Every entry of every log, but for headers: dead letters have the time of the wall clock in theirs."""
        return [
            (*name, [(entry.key, entry.value, entry.marker) for entry in log.entries])
            for name, log in sorted(self.broker.logs.items())
        ]


def simulate(seed: int, plan: Plan) -> World:
    """Run one world to its end. ``differences`` of the result must be empty."""
    made: list[World] = []

    async def main(loop: VirtualTimeLoop) -> None:
        world = World(seed, plan, loop)
        made.append(world)
        await world.live()

    try:
        run(main, limit_seconds=1_000.0)
    except AssertionError as error:
        made[0].differences.append(str(error))
    return made[0]
