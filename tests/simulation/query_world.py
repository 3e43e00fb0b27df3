"""Histories of events and queries of one key, while members are cut off, thrown out, moved, killed, and the coordinator
loses its memory.

The key's value counts its events, so it only grows, and a query is right as a register's read if its answer is between
what was committed when it was called and what was committed when it was answered: neither stale, nor dirty; and then no
later query can go backwards.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any, NamedTuple

from streams.errors import StreamsError
from streams.runtime.queries.local import LocalQueries
from streams.runtime.queries.points import PointRead
from streams.runtime.queries.questions import Question, Reply
from streams.testing import TestDriver
from streams.testing.simulation.faults import Conditions
from streams.testing.simulation.virtual_time import elapse
from tests.unit.driver_kit import build
from tests.vocabulary import INTS, Added

CHANGELOG = "driven.added.changelog"
STALENESS = 1.0
"""What readers of copies bear, in seconds."""
HALF_A_SESSION = 3.0


class Seen(NamedTuple):
    """One answer. ``kind``: "leased", "confirmed", "copy", or "point": of a single key, as other processes read."""

    kind: str
    called: float
    answered: float
    value: int
    member: int


class QueryWorld:
    """What one seed decides. ``wrong``: the answers that may not be; ``counts``: how many there were of each kind."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(f"queries {seed}")
        conditions = Conditions(
            one_way=rng.choice((0.001, 0.005, 0.02)),
            slow_markers=rng.choice((0.005, 0.3)),
            strikes=dict.fromkeys(("send", "commit"), rng.choice((0.0, 0.0, 0.1))),
            calm_at=40.0,
        )
        self.rate = rng.choice((0.5, 0.1, 0.03))  # often nothing is under way when a member is struck
        self.pauses = rng.choice(((0.2, 1.0, 4.0), (12.0, 15.0)))  # or each strike has its consequences alone
        # A member that is cut off with a confirmed query has a transaction under way, which all later ones wait for.
        self.kinds = rng.choice(
            (("leased", "point", "copy"), ("leased", "point", "leased", "point", "confirmed", "copy"))
        )
        source = build(partitions=2, num_standbys=1)
        self.driver = TestDriver(source, members=3, seed=seed, conditions=conditions)
        self.visible: list[tuple[float, int]] = [(0.0, 0)]
        self.forgot_at = -100.0
        self.wrong: list[str] = []
        self.counts: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self) -> QueryWorld:
        with self.driver as driver:
            driver._run(self._live())
        return self

    async def _live(self) -> None:
        driver, rng = self.driver, self.rng
        until = driver.now + 40.0
        sending = asyncio.ensure_future(self._send(until))
        while driver.now < until:
            self._strike()
            await elapse(rng.choice(self.pauses))
        await sending
        for number in driver.members:
            driver.thaw(number)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=100.0)

    async def _send(self, until: float) -> None:
        driver, rng = self.driver, self.rng
        while driver.now < until:
            if rng.random() < self.rate:
                driver.send(Added("k"), partition=0, wait=False)
            for number in driver.members:
                self._ask(number)
            await elapse(rng.choice((0.001, 0.02, 0.1, 0.3)))

    def _strike(self) -> None:
        driver, rng = self.driver, self.rng
        alive = driver.members
        owner = driver.owner(0)
        number = owner if owner is not None and rng.random() < 0.7 else rng.choice(alive) if alive else None
        kinds: tuple[str, ...] = ("freeze", "freeze", "freeze", "evict", "forget", "crash", "leave", "join", "none")
        alone = self.pauses[0] > HALF_A_SESSION
        if alone:
            number, kinds = owner, ("freeze", "freeze", "freeze", "evict", "crash")
        kind = rng.choice(kinds)
        if kind == "forget":
            driver.forget_group()
            self.forgot_at = driver.now
        elif kind == "join" and len(alive) < 4:
            driver._world.start(max(driver._world.members) + 1)
        elif number is None or (kind in ("crash", "leave") and len(alive) < 3):
            return
        elif kind == "freeze":
            driver.freeze(number, 12.0 if alone else rng.choice((1.0, 4.0, 8.0, 12.0)))
        elif kind == "evict":
            driver.evict(number)
        elif kind == "crash":
            driver.crash(number)
        elif kind == "leave":
            driver._world.members[number].source._run.ask_to_stop(drain=True)

    def _ask(self, number: int) -> None:
        kind = self.rng.choice(self.kinds)
        task = asyncio.ensure_future(self._query(number, kind))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _query(self, number: int, kind: str) -> None:
        driver = self.driver
        source = driver._world.members[number].source
        called, least = driver.now, self._visible()
        try:
            local = source._run.queries()
            if kind == "point":
                value = await point_of(local, "k")
            else:
                answer = await local.query(
                    0,
                    lambda store: store.get("k", 0),
                    confirm=kind == "confirmed",
                    max_staleness=STALENESS if kind == "copy" else None,
                    timeout_seconds=20.0,
                )
                value = answer.value
        except StreamsError:
            self.counts["refused"] += 1
            return
        self.counts[kind] += 1
        self._judge(Seen(kind, called, driver.now, value, number), least)

    def _judge(self, seen: Seen, least: int) -> None:
        if seen.kind == "copy":
            least = self._visible_at(seen.called - STALENESS)
        elif seen.kind in ("leased", "point") and seen.answered - self.forgot_at < 2 * HALF_A_SESSION:
            least = self._visible_at(seen.called - HALF_A_SESSION)
        if seen.value < least:
            self.wrong.append(f"stale: {seen}, where {least} was committed before")
        if seen.value > (most := self._decided()):
            self.wrong.append(f"dirty: {seen}, where {most} is committed")

    def _visible(self) -> int:
        """What is committed now, noted for later looks back."""
        now = self._decided()
        if now != self.visible[-1][1]:
            self.visible.append((self.driver.now, now))
        return now

    def _visible_at(self, moment: float) -> int:
        return next((value for at, value in reversed(self.visible) if at <= moment), 0)

    def _decided(self) -> int:
        """What is committed, also where its markers are not written yet."""
        entries = self.driver._world.broker.log(CHANGELOG, 0).entries
        found = [
            INTS.decode(entry.value)
            for entry in entries
            if entry.key == b"k" and entry.value and (entry.txn is None or entry.txn.outcome)
        ]
        return max(found, default=0)


async def point_of(local: LocalQueries, key: str) -> int:
    """Read a counter as ``Crossing`` does."""
    question = Question(group="", kind="get", partition=0, key=key.encode(), timeout_seconds=20.0)
    read = PointRead(question, asyncio.get_running_loop().create_future())
    local.points.read([read], lambda one: one.waiter.set_result(None))
    await read.waiter
    if not isinstance(read.outcome, Reply):
        assert read.outcome is not None
        raise read.outcome
    return INTS.decode(read.outcome.value) if read.outcome.value else 0


def simulate_queries(seed: int, patch: Any, without: Any = ()) -> None:
    """Run one world; raises ``AssertionError`` for what is wrong in it. ``without``: proofs that are taken out."""
    from .test_queries import PROOFS

    with patch.context() as taken_out:
        for rule in without:
            PROOFS[rule](taken_out)
        world = QueryWorld(seed).run()
    assert not world.wrong, f"{len(world.wrong)} of {dict(world.counts)}: {world.wrong[0]}"
