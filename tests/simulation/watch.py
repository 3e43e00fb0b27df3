"""What the world sees of moves while they go on: steps to strike at, things to count, and what may never be.

* No partition is worked on by two members whose commits could both succeed.
* Where nothing goes wrong, a planned move stops its partition for a few transactions' time.
* When the faults are over everything settles: each partition has an owner, the owners are even, copies are in place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from streams.metrics import BatchFailed, Measurement, OffsetMismatch, TransactionSettled
from streams.model.group import Assignment, MemberReport
from streams.runtime.changelog import ReleaseMarker
from streams.testing.simulation.broker import LogEntry
from streams.testing.simulation.virtual_time import elapse

STEPS = ("ordered", "told", "closed", "produced", "committed", "handing", "handed", "taking", "took", "announced")
"""Of a move, in their order: by the plan, to the donor, whose intake is closed; its marker; the donor tells the group
that it handed over, and that is heard; the same of the receiver; a receiver tells that its copies are ready."""
SETTLE = 60.0
"""Simulated seconds, after the last event is handled, in which everything must be in its place."""
TRANSACTIONS = 3
"""A planned move stops a partition for this many of the slowest transaction's time, at most."""


class Trap(NamedTuple):
    """The next time that this step of a move happens: ``verb`` (an action) to ``who`` (donor, target or other)."""

    step: str
    verb: str
    who: str


class Watch:
    """Sees one world. ``counts``: what happened how often; ``moving``: partition -> (donor, target), as ordered."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self.counts: Counter[str] = Counter()
        self.moving: dict[int, tuple[str, str]] = {}
        self.slowest = 0.0
        self.stalls: list[tuple[float, int, str]] = []
        self._traps: list[Trap] = []
        self._closed: dict[int, tuple[float, str]] = {}
        world.group.planned = self._planned
        world.broker.on_marker = self._marker

    # -- steps ---------------------------------------------------------------------------------------------------------

    def arm(self, trap: Trap) -> None:
        """It springs once."""
        self._traps.append(trap)

    def noted(self, name: str, step: str, partition: int) -> None:
        """A member's part of the process has come to this step."""
        self.counts[step] += 1
        if step == "closed":
            self._closed[partition] = self._world.loop.time(), name
        if step == "active":
            self._started(name, partition)
        self._spring(step, *self.moving.get(partition, (name, name)))
        if step == "took":
            self.moving.pop(partition, None)

    def measured(self, name: str, measurement: Measurement) -> None:
        """What members measure."""
        if isinstance(measurement, TransactionSettled):
            self.slowest = max(self.slowest, measurement.open_seconds + measurement.commit_seconds)
        elif isinstance(measurement, BatchFailed):
            self.counts["lists that failed"] += 1
        elif isinstance(measurement, OffsetMismatch) and self._is_member(name) and not self._world.forgot:
            # One that was evicted, and has not heard of it, may ask while its successor commits: it starts in vain.
            self._say(f"{name} sees a mismatch, but nobody lost his memory: {measurement}")

    def _is_member(self, name: str) -> bool:
        return any(known.report.instance == name for known in self._world.group.members.values())

    def struck(self, name: str) -> None:
        """Something happens to a member: is it in the middle of a move?"""
        if any(name in pair for pair in self.moving.values()):
            self.counts["struck within a move"] += 1

    def _marker(self, what: str, partition: int, entry: LogEntry) -> None:
        assert entry.txn is not None
        marker = msgspec.json.decode(entry.value or b"", type=ReleaseMarker)
        donor = entry.txn.name.split(".")[1]
        known = self._world.group.members.get(marker.to)
        self.counts[what] += 1
        self._spring(what, donor, known.report.instance if known is not None else donor)

    def _planned(self, reports: Mapping[str, MemberReport], plan: Mapping[str, Assignment]) -> None:
        self._check_plan(plan)
        instances = {member: report.instance for member, report in reports.items()}
        self._world.instances.update(instances)
        owned = {partition for report in reports.values() for partition in report.owned}
        for member, assignment in plan.items():
            for partition in assignment.own - owned:
                warm = partition in reports[member].copies.ready
                self.counts["promotions" if warm else "cold starts"] += 1
        before, self.moving = (
            self.moving,
            {
                partition: (instances[member], instances.get(to, to))
                for member, assignment in plan.items()
                for partition, to in assignment.release.items()
            },
        )
        for partition in self.moving.keys() - before.keys():
            self._spring("ordered", *self.moving[partition])

    def _spring(self, step: str, donor: str, target: str) -> None:
        for trap in [trap for trap in self._traps if trap.step == step]:
            self._traps.remove(trap)
            others = sorted(self._world.members.keys() - {donor, target}) or [target]
            name = {"donor": donor, "target": target}.get(trap.who) or self._world.rng.choice(others)
            delay = self._world.rng.choice((0.0, 0.0, 0.001, 0.01, 0.1, 0.5))
            self.counts[f"trap {step}"] += 1
            self._world.loop.call_later(delay, self._world.act, f"{trap.verb} {name}", f"after {step}")

    def _check_plan(self, plan: Mapping[str, Assignment]) -> None:
        """What members refuse to understand, and what would make two owners."""
        now = self._world.loop.time()
        owners: Counter[int] = Counter()
        for member, told in plan.items():
            parts = [told.own, told.release.keys(), told.incoming.keys()]
            if sum(map(len, parts)) != len(frozenset().union(*parts)) or member in told.release.values():
                self._say(f"{now:.3f}: contradictions in {told}")
            owners.update([*told.own, *told.release])
        if twice := {partition for partition, count in owners.items() if count > 1}:
            self._say(f"{now:.3f}: {twice} have two owners in {plan}")

    # -- what may never be ---------------------------------------------------------------------------------------------

    def _started(self, name: str, partition: int) -> None:
        now = self._world.loop.time()
        workers = sorted(self._workers(partition))
        if len(workers) > 1:
            self._say(f"{now:.3f}: partition {partition} is worked on by {' and '.join(workers)}")
        stopped, by = self._closed.pop(partition, (now, name))
        if by != name and self.moving.get(partition) == (by, name):
            self.stalls.append((now - stopped, partition, f"{by} to {name} at {now:.3f}"))

    def _workers(self, partition: int) -> Iterator[str]:
        """Members that admit events of this partition, and could commit them."""
        world = self._world
        for name, member in world.members.items():
            engine = member.source._run.engine
            worker = engine.workers.get(partition) if engine is not None and not member.process.dead else None
            if worker is None or not worker.state.admits or worker.finished.is_set():
                continue
            if self.is_current(member):
                yield name

    def is_current(self, member: Any) -> bool:
        """Check for a process that lives, is in the group, and knows of no other incarnation of itself: its commits
        could succeed."""
        engine = member.source._run.engine
        if engine is None or member.process.dead:
            return False
        metadata = engine.membership.group_metadata
        is_there: bool = metadata.member_id in self._world.group.members
        return is_there and metadata.incarnation == engine.incarnation

    # -- in the end ----------------------------------------------------------------------------------------------------

    async def settled(self) -> None:
        """Wait until everything is in its place; says so if that takes too long."""
        began = self._world.loop.time()
        while (why := self._unsettled()) is not None:
            if self._world.loop.time() > began + SETTLE:
                self._say(f"not settled after {SETTLE} s: {why}")
                return
            await elapse(0.5)
        self.counts["settled"] += 1
        self._world.judge.stores()
        if self._world.plan.smooth:
            self._judge_stalls()

    def _unsettled(self) -> str | None:
        world, plan = self._world, self._world.plan
        running = {name: member for name, member in world.members.items() if not member.task.done()}
        if any(member.source.state.value != "running" for member in running.values()):
            return f"states {[member.source.state.value for member in running.values()]}"
        engines = {name: member.source._run.engine for name, member in running.items()}
        owners: dict[int, list[str]] = {partition: [] for partition in range(plan.partitions)}
        counts = dict.fromkeys(engines, 0)
        for name, engine in engines.items():
            holdings = engine.membership.holdings
            if engine.membership.member not in world.group.members or not engine.is_current:
                return f"{name} is not a member, or does not know what the group said last"
            if holdings.releasing or holdings.incoming:
                return f"{name} is to release {holdings.releasing}, to take {holdings.incoming}"
            if holdings.owned != engine.workers.keys():
                return f"{name} claims {set(holdings.owned)}, and works on {set(engine.workers)}"
            for partition, worker in engine.workers.items():
                if worker.state.value == "active":
                    owners[partition].append(name)
                    counts[name] += 1
        if wrong := {partition: names for partition, names in owners.items() if len(names) != 1}:
            return f"owners {wrong}"
        if max(counts.values()) - min(counts.values()) > 1:
            return f"not even: {counts}"
        if world.group.state != "stable":
            return f"the group is {world.group.state}"
        if world.group.strategy == "incremental":
            wanted = min(plan.num_standbys, len(running) - 1)
            for partition, names in owners.items():
                ready = {
                    name
                    for name, engine in engines.items()
                    if name not in names and partition in engine.membership.holdings.copies.ready
                }
                if len(ready) < wanted:
                    return f"partition {partition} of {names} has copies at {ready}"
        return None

    def _judge_stalls(self) -> None:
        allowed = TRANSACTIONS * self.slowest
        for seconds, partition, text in self.stalls:
            if seconds > allowed:
                self._say(f"partition {partition} stood still for {seconds:.3f} s ({text}), {allowed:.3f} are allowed")

    def _say(self, text: str) -> None:
        if text not in self._world.differences:
            self._world.differences.append(text)
