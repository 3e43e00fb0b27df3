"""One seed's world: members that come and go over a simulated broker, and what must be true when all is over."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import defaultdict
from typing import Any

from streams import event_source
from streams.codecs import RESERVED_KEY_PREFIX
from streams.errors import MembershipLost, NotOwned, RecordRefused, Stopped
from streams.event_source import EventSource
from streams.events import event_type_of
from streams.runtime import lifecycle
from streams.runtime.event_context import EventContext
from streams.runtime.lifecycle import Engine
from streams.runtime.takeover import decode_offset
from streams.runtime.transaction_pool import OFFSET_KEY

from . import program
from .broker import Broker, Log
from .clients import SimConnections, SimInput
from .faults import Faults, Plan
from .group import Group
from .process import Process
from .virtual_time import Fibers, VirtualTimeLoop, elapse, run

CHANGELOG, DEAD_LETTERS = "sim.in.changelog", "sim.in.dead-letters"
PATIENCE = 60.0
"""Simulated seconds, after the last fault, in which something must be committed, until everything is."""


EXPECTED = (MembershipLost, NotOwned, Stopped, RecordRefused)
"""What ``interject`` may raise; the last one when another event of its transaction is refused, and it is undone too."""


class SimWatchdog:
    """The watchdog is a thread that looks at the real clock: it has nothing to see here."""

    def __init__(self, limit_seconds: float) -> None: ...

    def alive(self) -> bool:
        return True

    async def run(self) -> None:
        await asyncio.Event().wait()

    def stop(self) -> None: ...


class Member:
    """One process: an event source, its connections, its task."""

    def __init__(self, world: World, name: str) -> None:
        self.name = name
        self.process = Process(world, name)
        self.source: EventSource[Any] = program.build(world.plan, name, world.rng, self.process.pause)
        self.connections: list[SimConnections] = []
        self.task = world.loop.create_task(self._run(), name=name)

    async def _run(self) -> None:
        await self.source._consume(lambda config: SimConnections(self.process, config))

    def crash(self) -> None:
        self.process.kill()
        self.task.cancel()


class World:
    """Everything that one seed decides."""

    def __init__(self, seed: int, plan: Plan, loop: VirtualTimeLoop) -> None:
        self.plan, self.loop = plan, loop
        self.rng = random.Random(seed)
        self.fibers = Fibers(loop)
        self.faults = Faults(plan, self.rng)
        self.broker = Broker(loop, self.rng, plan.partitions)
        self.broker.slow_markers = plan.slow_markers
        self.broker.on_append = lambda _: [reader.wake() for reader in self.inputs]
        self.group = Group(self.broker, plan.session, 15.0)
        self.inputs: list[SimInput] = []
        self.members: dict[str, Member] = {}
        self.differences: list[str] = []
        self.tokens: list[tuple[str, asyncio.Task[None], Member]] = []
        self.trace: list[str] = []
        self.forgot = False

    async def live(self) -> None:
        """From the first start to the last word."""
        try:
            for number in range(self.plan.members):
                self._start(f"a{number}")
            feeding = self.loop.create_task(self._feed())
            for at, action in self.plan.actions:
                await self._until(at)
                self._act(action)
            await self._until(self.plan.calm_at)
            await feeding
            self.trace.append(f"{self.loop.time():.6f} calm")
            self._start("last")  # the others may be stopping, all of them
            await self._all_handled()
            await self._stop_all()
            await elapse(self.plan.transaction_timeout + 5.0)  # until the broker has ended what hangs
            self._judge()
        finally:
            for member in self.members.values():
                member.crash()
            await asyncio.gather(*(member.task for member in self.members.values()), return_exceptions=True)
            for _, task, _ in self.tokens:
                task.cancel()
            self.fibers.close()

    # -- what happens --------------------------------------------------------------------------------------------------

    async def _until(self, at: float) -> None:
        while (left := at - self.loop.time()) > 0:
            await elapse(min(left, 1.0))
            self._look_for_failures()

    def _running(self) -> list[Member]:
        return [member for member in self.members.values() if not member.task.done()]

    def _start(self, name: str) -> None:
        before = self.members.get(name)
        if before is None or before.task.done():
            self._look_for_failures()
            self.members[name] = Member(self, name)

    def _act(self, action: str) -> None:
        kind, _, name = action.partition(" ")
        self.trace.append(f"{self.loop.time():.6f} {action}")
        member = self.members.get(name)
        alive = member is not None and not member.task.done()
        match kind:
            case "start":
                self._start(name)
            case "crash" if alive:
                member.crash()
            case "stop" if alive:
                member.source._ask_to_stop(drain=True)
            case "halt" if alive:
                member.source.stop_now()
            case "cancel" if alive:
                member.task.cancel()
            case "freeze" if alive:
                member.process.frozen_until = self.loop.time() + self.rng.choice((1.0, 5.0, 8.0, 12.0))
            case "outage":
                self.broker.down_until = self.loop.time() + self.rng.choice((0.5, 3.0, 8.0))
                self.broker.last_outage = self.broker.down_until
            case "forget":
                self.forgot = True
                self.group.forget()
            case "interject" if alive:
                self._interject(member)

    def _interject(self, member: Member) -> None:
        token = f"t{len(self.tokens)}"
        pauses = self.rng.choice((None, 0.0, 0.3, 2.0))

        async def handler(ctx: EventContext[Any]) -> None:
            if pauses is not None:
                await elapse(pauses)
            ctx.forward(program.TOKENS, program.Total(0, ctx.offset), key=token)

        async def ask() -> None:
            await member.source.interject(self.rng.randrange(self.plan.partitions), handler)

        self.tokens.append((token, self.loop.create_task(ask()), member))

    async def _feed(self) -> None:
        pause = self.plan.calm_at / max(self.plan.records, 1)
        for partition, key, value, headers in list(program.inputs(self.plan, self.rng)):
            self.broker.append(program.TOPIC, partition, key, value, headers)
            await elapse(self.rng.choice((0.0, 0.0, 0.0, pause, 2 * pause)))

    async def _all_handled(self) -> None:
        before, deadline = self._changelog_offsets(), self.loop.time() + PATIENCE
        while (now := self._changelog_offsets()) != self._ends():
            if now != before:
                before, deadline = now, self.loop.time() + PATIENCE
            if self.loop.time() > deadline:
                self.differences.append(f"no progress: {now} of {self._ends()} handled")
                return
            await elapse(0.5)
            self._look_for_failures()
            if self.differences:
                return

    async def _stop_all(self) -> None:
        await elapse(1.0)  # one that is not started yet does not hear
        running = self._running()
        for member in running:
            member.source._ask_to_stop(drain=True)
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
                said = f"{name} failed: {task.exception()!r}"
                if said not in self.differences:
                    self.differences.append(said)

    def fingerprint(self) -> list[tuple[str, int, list[tuple[bytes | None, bytes | None, bool]]]]:
        """Every entry of every log, but for headers: dead letters have the time of the wall clock in theirs."""
        return [
            (*name, [(entry.key, entry.value, entry.marker) for entry in log.entries])
            for name, log in sorted(self.broker.logs.items())
        ]

    # -- what must be true ---------------------------------------------------------------------------------------------

    def _partitions(self, topic: str) -> list[Log]:
        return [self.broker.log(topic, number) for number in range(self.plan.partitions)]

    def _ends(self) -> dict[int, int]:
        return {log.partition: log.end for log in self._partitions(program.TOPIC) if log.end}

    def _changelog_offsets(self) -> dict[int, int]:
        return {
            log.partition: decode_offset(record).offset
            for log in self._partitions(CHANGELOG)
            for record in log.committed(0, log.end)
            if record.key == OFFSET_KEY and decode_offset(record).offset
        }

    def _judge(self) -> None:
        say = self.differences.append
        for log in self.broker.logs.values():
            if log.stable != log.end:
                say(f"{log.topic}[{log.partition}]: a transaction hangs, {log.stable} of {log.end}")
        expected: dict[bytes, list[bytes]] = defaultdict(list)
        for log in self._partitions(program.TOPIC):
            state: dict[str, int] = {}
            letters = []
            for record in log.committed(0, log.end):
                outputs, letter = program.fold(state, record)
                for key, value in outputs:
                    expected[key].append(value)
                letters += [record.value] if letter else []
            self._compare(f"state of {log.partition}", state, self._changelog(log.partition))
            dead = self.broker.log(DEAD_LETTERS, log.partition)
            self._compare(f"dead letters of {log.partition}", letters, [r.value for r in dead.committed(0, dead.end)])
        seen: dict[bytes, list[bytes]] = defaultdict(list)
        for log in self._partitions(program.OUT):
            for record in log.committed(0, log.end):
                seen[record.key or b""].append(record.value or b"")
        for key in sorted(expected.keys() | seen.keys()):
            self._compare(f"outputs of {key!r}", expected[key], seen[key])
        if not self.forgot:
            committed = {partition: offset for partition, offset in self.broker.offsets.items() if offset}
            self._compare("committed offsets", self._changelog_offsets(), committed)
        self._judge_interjections()

    def _compare(self, what: str, expected: Any, seen: Any) -> None:
        if isinstance(expected, list) and expected != seen:
            pairs = enumerate(zip(expected, seen, strict=False))
            at = next((number for number, (one, other) in pairs if one != other), min(len(expected), len(seen)))
            what += f" ({len(expected)} expected, {len(seen)} seen), from number {at} on"
            expected, seen = expected[at : at + 3], seen[at : at + 3]
        if expected != seen:
            self.differences.append(f"{what}: expected {expected}, but there is {seen}")

    def _changelog(self, partition: int) -> dict[str, int]:
        log = self.broker.log(CHANGELOG, partition)
        state: dict[str, int] = {}
        self._ticks = 0
        for record in log.committed(0, log.end):
            if record.key is None or record.key.startswith(RESERVED_KEY_PREFIX):
                continue
            key = record.key.decode() if self.plan.patient else program.codec_for(str).decode(record.key)
            if record.value is None:
                state.pop(key, None)
            else:
                value = int(record.value) if self.plan.patient else program.codec_for(int).decode(record.value)
                state[key] = value
        ticks = state.pop(program.TICK_KEY, 0)
        sent = [
            event_type_of(program.Total).decode(record.value).value
            for log in self._partitions(program.TICKS)
            for record in log.committed(0, log.end)
            if record.key == b"%d" % partition
        ]
        self._compare(f"ticks of {partition}", list(range(1, ticks + 1)), sent)
        return state

    def _judge_interjections(self) -> None:
        seen = [r.key.decode() for log in self._partitions(program.TOKENS) for r in log.committed(0, log.end) if r.key]
        for token, task, member in self.tokens:
            count = seen.count(token)
            if member.process.dead:
                allowed = {0, 1}
            elif not task.done():
                self.differences.append(f"the interjection {token} is waited for, for ever")
                continue
            else:
                error = task.exception()
                allowed = {1} if error is None else {0, 1} if isinstance(error, MembershipLost) else {0}
                if error is not None and not isinstance(error, EXPECTED):
                    self.differences.append(f"the interjection {token} failed: {error!r}")
            if count not in allowed:
                self.differences.append(f"the interjection {token} is there {count} times, {task!r}")


def simulate(seed: int, plan: Plan) -> World:
    """Run one world to its end. ``differences`` of the result must be empty."""
    made: list[World] = []

    async def main(loop: VirtualTimeLoop) -> None:
        world = World(seed, plan, loop)
        made.append(world)
        await world.live()

    with _seams(seed):
        try:
            run(main, limit_seconds=1_000.0)
        except AssertionError as error:
            made[0].differences.append(str(error))
    return made[0]


@contextlib.contextmanager
def _seams(seed: int) -> Any:
    """What the engine takes from outside of its connections: the watchdog's thread, and chance."""
    numbers = random.Random(seed)

    def engine(*args: Any, **kwargs: Any) -> Engine:
        return Engine(*args, **kwargs, rng=random.Random(numbers.getrandbits(64)))

    watchdog, lifecycle.Watchdog = lifecycle.Watchdog, SimWatchdog  # type: ignore[assignment,misc]
    event_source.Engine = engine  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        lifecycle.Watchdog = watchdog  # type: ignore[misc]
        event_source.Engine = Engine  # type: ignore[misc]
