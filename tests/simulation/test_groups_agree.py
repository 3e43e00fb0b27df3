"""The same members, with the same joins, leaves and deaths, at the group that the simulation runs and at the one in
bytes: both give the same answers at the same moments."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from streams.model.group import Assignment, MemberReport
from streams.testing.simulation.broker import Broker
from streams.testing.simulation.group import Group, Illegal, Inconsistent, Unknown
from streams.testing.simulation.virtual_time import VirtualTimeLoop, elapse

from .wire_asker import Asker, run

SESSION, REBALANCE, BEAT = 10.0, 15.0, 3.0
REFUSED = {Unknown: 25, Illegal: 22, Inconsistent: 23}


@dataclass
class Life:
    """One member: times in seconds. ``strategies``: the wanted one first."""

    name: str
    strategies: tuple[str, ...]
    born: float
    news: list[float]
    """Times at which it joins again, with other bytes."""
    end: float
    leaves: bool
    """Whether it leaves at its end; otherwise it dies without a word."""


class Coordinator(Protocol):
    """Answers of a group: a code, and what comes with it."""

    async def join(self, life: Life, member: str, sequence: int) -> tuple[int, str, int, str]: ...

    async def sync(self, life: Life, member: str, generation: int) -> int: ...

    async def heartbeat(self, member: str, generation: int) -> int: ...

    async def leave(self, member: str) -> None: ...


class InPython:
    """The group that the simulation runs."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        self.group = Group(Broker(loop, random.Random(0), 4), SESSION, REBALANCE)

    async def join(self, life: Life, member: str, sequence: int) -> tuple[int, str, int, str]:
        is_new, member = not member, member or self.group.new_id()
        strategies = dict.fromkeys(life.strategies, lambda _, reports: dict.fromkeys(reports, Assignment()))
        report = MemberReport(instance=life.name, sequence=sequence)
        try:
            generation = await self.group.join(member, report, strategies, new=is_new)
        except (Unknown, Inconsistent) as error:
            return REFUSED[type(error)], "", -1, ""
        return 0, member, generation, self.group.strategy

    async def sync(self, life: Life, member: str, generation: int) -> int:
        return await self._code(self.group.sync(member, generation) if self._is(member, generation) else None, member)

    def _is(self, member: str, generation: int) -> bool:
        group = self.group
        return member in group.members and generation == group.generation and group.state != "preparing"

    async def _code(self, work: Awaitable[Any] | None, member: str) -> int:
        if work is None:
            return 22 if member in self.group.members else 25
        try:
            await work
        except (Unknown, Illegal) as error:
            return REFUSED[type(error)]
        return 0

    async def heartbeat(self, member: str, generation: int) -> int:
        try:
            self.group.heartbeat(member, generation)
        except (Unknown, Illegal) as error:
            return REFUSED[type(error)]
        return 0

    async def leave(self, member: str) -> None:
        self.group.leave(member)


class InBytes:
    """The group of the broker on the wire."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        self.asker = Asker(loop)

    async def join(self, life: Life, member: str, sequence: int) -> tuple[int, str, int, str]:
        protocols = [(name, f"{life.name} {sequence}".encode()) for name in life.strategies]
        join = partial(self.asker.join, session=SESSION, rebalance=REBALANCE)
        answer = await join(member, *protocols)
        if answer.error_code == 79:
            answer = await join(answer.member_id, *protocols)
        if answer.error_code:
            return answer.error_code, "", -1, ""
        return 0, answer.member_id, answer.generation_id, answer.protocol_name

    async def sync(self, life: Life, member: str, generation: int) -> int:
        answer = await self.asker.sync(member, generation, {})
        return 22 if answer.error_code == 27 else int(answer.error_code)

    async def heartbeat(self, member: str, generation: int) -> int:
        code = await self.asker.heartbeat(member, generation)
        return 22 if code == 27 else code

    async def leave(self, member: str) -> None:
        await self.asker.leave(member)


History = list[tuple[Any, ...]]


async def lives(loop: VirtualTimeLoop, group: Coordinator, life: Life, history: History) -> None:
    """Live as a member does, and write down each answer with its moment."""
    member, sequence, news = "", 0, list(life.news)

    def note(what: str, *answer: object) -> None:
        history.append((round(loop.time(), 3), life.name, what, *answer))

    while True:
        sequence += 1
        code, member, generation, strategy = await group.join(life, member, sequence)
        note("joined", code, generation, strategy)
        if code:
            await elapse(0.5)
            continue
        # With heartbeats meanwhile: Kafka keeps a member that waits for its assignment, the other group does not.
        beating = loop.create_task(beats(group, member, generation))
        try:
            code = await group.sync(life, member, generation)
        finally:
            beating.cancel()
        note("synced", code)
        while not code:
            soonest = min([*news[:1], loop.time() + BEAT, life.end])
            await elapse(max(0.0, soonest - loop.time()))
            if life.leaves and loop.time() >= life.end:
                await group.leave(member)
                return note("left")
            if news and loop.time() >= news[0]:
                news.pop(0)
                break
            code = await group.heartbeat(member, generation)
            note("beat", code)
        member = "" if code == 25 else member


async def beats(group: Coordinator, member: str, generation: int) -> None:
    while True:
        await elapse(BEAT)
        await group.heartbeat(member, generation)


async def history_of(
    loop: VirtualTimeLoop, *, kind: Callable[[VirtualTimeLoop], Coordinator], script: list[Life]
) -> History:
    group = kind(loop)
    history: History = []

    async def one(life: Life) -> None:
        await elapse(life.born)
        task = loop.create_task(lives(loop, group, life, history))
        await elapse(life.end - life.born + 0.001)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()

    await asyncio.gather(*(one(life) for life in script))
    return ranked(sorted(history))


def ranked(history: History) -> History:
    """Number the generations as they occur. A real group counts one more when it becomes empty."""
    numbers: dict[int, int] = {-1: -1}
    return [
        (*event[:4], numbers.setdefault(event[4], len(numbers)), *event[5:]) if event[2] == "joined" else event
        for event in history
    ]


def script_of(rng: random.Random) -> list[Life]:
    lifes = []
    for number in range(rng.randint(1, 5)):
        born = rng.uniform(0.0, 60.0)
        end = born + rng.choice((0.5, 10.0, 40.0, 120.0)) * rng.uniform(0.5, 1.5)
        news = sorted(rng.uniform(born, end) for _ in range(rng.randint(0, 4)))
        strategies = rng.choice((("a",), ("a", "b"), ("b", "a"), ("a", "b"), ("b",)))
        lifes.append(Life(f"m{number}", strategies, born, news, end, rng.random() < 0.5))
    return lifes


def test_both_groups_give_the_same_answers() -> None:
    met: set[tuple[str, int]] = set()
    for seed in range(60):
        script = script_of(random.Random(seed))
        expected, found = [run(partial(history_of, kind=kind, script=script)) for kind in (InPython, InBytes)]
        differences = [(one, other) for one, other in zip(expected, found, strict=False) if one != other]
        assert expected == found, f"seed {seed}: {script}\n{differences[:3]}, {len(expected)}, {len(found)}"
        met |= {(event[2], event[3]) for event in found if len(event) > 3}
    assert met >= {("joined", 0), ("synced", 0), ("synced", 22), ("beat", 0), ("beat", 22), ("joined", 23)}
