"""Quiescence of a driven world: whether it has nothing left to do, the reasons to wait, in words, and what must hold of
every event source then (``TestDriver.check``)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Final

from streams.core.visits import TIMER_PREFIX as VISIT_PREFIX
from streams.core.visits import state_of
from streams.runtime.changelog import OFFSET_KEY, decode_offset, decode_timer, timer_key
from streams.runtime.engine import Engine
from streams.runtime.partition.joined_rows import JoinedRows
from streams.statistics import SourceState
from streams.testing.driven_tables import committed_rows
from streams.testing.simulation.broker import Log
from streams.testing.world import DrivenMember, DrivenWorld, offset_in

_VISITS: Final = timer_key(VISIT_PREFIX)


def nothing_can_happen(world: DrivenWorld) -> bool:
    """Check whether all members are down, or frozen until they are thawed."""
    if world.awaited:
        return False
    return all(member.is_frozen and member.process.frozen_until == float("inf") for member in world.running())


def unhandled(world: DrivenWorld, topic: str = "") -> dict[int, tuple[int, int]]:
    """Return partition -> (first offset of an input that is not committed, number of such records)."""
    found = {}
    for partition in range(world.config.num_partitions):
        log = world.broker.logs.get((topic or world.config.topic, partition))
        if log is not None:
            left = [record.offset for record in log.committed(world.handled(partition, topic), log.end)]
            if left:
                found[partition] = left[0], len(left)
    return found


def reasons_to_wait(world: DrivenWorld, *, balanced: bool) -> Iterator[str]:
    """List what is not done yet. ``balanced``: nor in its place."""
    for topic, own in zip(world.topics_read, ("", *world.topics_read[1:]), strict=True):
        for partition, (offset, count) in unhandled(world, own).items():
            workers = _worker_of(world, partition)
            yield f"{topic}[{partition}]: {count} record(s) from offset {offset} on are not committed; {workers}"
    for log in world.broker.logs.values():
        if log.open:
            yield f"{log.topic}[{log.partition}]: {_open_transactions(log)}"
    if world.broker.pending:
        yield "the group's offsets wait for the markers of a transaction"
    for member in world.running():
        engine = member.engine
        if member.source.state is SourceState.STARTING:
            yield f"member {member.number} is starting"
        elif engine is not None and not member.is_frozen and engine.pool.unsettled:
            yield f"member {member.number} has {len(engine.pool.unsettled)} transaction(s) that are not settled"
        if engine is not None and not member.is_frozen:
            yield from _lookups_behind(world, member.number, engine)
            yield from _parked(member.number, engine)
            yield from _jobs(member.number, engine)
    yield from _visits(world)
    if world.awaited:
        yield f"{world.awaited} member(s) are about to be started again"
    if balanced:
        yield from _misassigned(world)


def _visits(world: DrivenWorld) -> Iterator[str]:
    """List runs of visits that are under way, by what is committed, and that every running member can go on with."""
    names = [set(member.source._declared.router.visits) for member in world.running()]
    known = set.intersection(*names) if names else set()
    for partition in range(world.config.num_partitions if known else 0):
        log = world.broker.log(world.config.changelog, partition)
        timers = [record for record in log.committed(0, log.end) if (record.key or b"").startswith(_VISITS)]
        for name, timer in {record.key: decode_timer(record) for record in timers}.values():
            visit, state = name.removeprefix(VISIT_PREFIX), state_of(timer)
            if state is not None and state.run and visit in known:
                yield f"{log.topic}[{partition}]: run {state.run} of the visit {visit!r} has {state.keys} keys"


def _parked(number: int, engine: Engine) -> Iterator[str]:
    """List the parked keys whose first events a member tries now, or has found and not tried."""
    for worker in engine.workers.values():
        for queue in worker.timers.parked.by_name.values():
            is_due = queue.record.due_ms <= engine.wall_ms()
            if worker.state.value == "active" and (is_due or queue.is_found_by(engine.writer)):
                yield f"{worker.topic_partition} on member {number}: the parked key {queue.key!r} is to be tried"


def _jobs(number: int, engine: Engine) -> Iterator[str]:
    """List the durable jobs that a member runs, or is to run now."""
    for worker in engine.workers.values():
        jobs = worker.timers.jobs
        for record in jobs.by_name.values():
            is_due = record.due_ms <= engine.wall_ms() and worker.jobs.is_known(record) and jobs.is_first(record)
            if worker.state.value == "active" and (is_due or worker.jobs.is_running(record.name)):
                yield f"{worker.topic_partition} on member {number}: the {record.title} runs, or is to run"


def _lookups_behind(world: DrivenWorld, number: int, engine: Engine) -> Iterator[str]:
    """List the lookups that a member has not read to their ends, unless a test holds them back."""
    for topic, partitions in engine.lookups.positions().items():
        for partition, (position, is_paused) in enumerate(partitions):
            stable = world.broker.log(topic, partition).stable
            if position < stable and not is_paused:
                yield f"the lookup {topic}[{partition}] of member {number} is at {position} of {stable}"


def _worker_of(world: DrivenWorld, partition: int) -> str:
    """Describe the members that work on a partition."""
    stuck = []
    for member in world.running():
        engine = member.engine
        worker = engine.workers.get(partition) if engine is not None else None
        if worker is not None:
            frozen = ", which is frozen" if member.is_frozen else ""
            stuck.append(
                f"it is {worker.state.value} on member {member.number}{frozen}, at offset {worker.watermark}, "
                f"{sum(inbox.records for inbox in worker.inboxes)} record(s) in its inbox"
            )
    return "; ".join(stuck) or "no member works on it"


def _open_transactions(log: Log) -> str:
    names = ", ".join(
        f"{txn.name} ({'open' if txn.outcome is None else 'its marker is not written yet'})" for txn in log.open
    )
    return f"readers wait at offset {log.stable} for {names}"


def _misassigned(world: DrivenWorld) -> Iterator[str]:
    """Partitions without exactly one owner, moves under way, members that are not (or still) known to the group."""
    members = [member for member in world.running() if not member.is_frozen]
    group, counts = world.group, dict.fromkeys((member.number for member in members), 0)
    known = {instance_number(known.report.instance) for known in group.members.values()}
    if group.state != "stable":
        yield f"the group is {group.state}"
    if gone := known - counts.keys():
        yield f"the group still waits for member(s) {sorted(gone)}"
    owners: dict[int, list[int]] = {partition: [] for partition in range(world.config.num_partitions)}
    for member in members:
        engine = member.engine
        if engine is None:
            yield f"member {member.number} is starting"
            continue
        yield from _unclear(world, member, engine)
        for partition, worker in engine.workers.items():
            if worker.state.value == "active":
                owners[partition].append(member.number)
                counts[member.number] += 1
    for partition, numbers in owners.items():
        if len(numbers) != 1:
            yield f"{world.config.topic}[{partition}] is worked on by {numbers or 'no member'}"
    if counts and max(counts.values()) - min(counts.values()) > 1:
        yield f"the partitions are not spread evenly yet: {counts}"
    yield from _missing_copies(world, members)


def _unclear(world: DrivenWorld, member: DrivenMember, engine: Engine) -> Iterator[str]:
    """Check whether a member and the group agree on its partitions."""
    memberships = member.process.memberships
    if not memberships or memberships[-1].member not in world.group.members or not engine.is_current:
        yield f"member {member.number} is joining the group"
        return
    holdings = memberships[-1].holdings
    if holdings.releasing or holdings.incoming:
        moving = sorted([*holdings.releasing, *holdings.incoming])
        yield f"member {member.number} is moving partition(s) {moving}"
    elif holdings.owned != engine.workers.keys():
        yield f"member {member.number} owns {sorted(holdings.owned)}, and works on {sorted(engine.workers)}"


def _missing_copies(world: DrivenWorld, members: list[DrivenMember]) -> Iterator[str]:
    wanted = min(world.config.group.num_standbys, len(members) - 1)
    if world.group.strategy != "incremental" or wanted <= 0:
        return
    for partition in range(world.config.num_partitions):
        ready = [
            member.number
            for member in members
            if member.process.memberships and partition in member.process.memberships[-1].holdings.copies.ready
        ]
        if len(ready) < wanted:
            yield f"{world.config.topic}[{partition}] has warm copies at {ready or 'no member'}, {wanted} are wanted"


def instance_number(instance: str) -> int:
    """The number of a member, from its instance's name."""
    return int(instance.rpartition("-")[2])


def broken_promises(world: DrivenWorld) -> Iterator[str]:
    """List the contradictions to exactly-once: transactions that hang, input that was left out or handled again,
    stores that differ from the changelog."""
    for log in world.broker.logs.values():
        if log.stable != log.end:
            yield f"{log.topic}[{log.partition}]: a transaction hangs, readers see {log.stable} of {log.end} offsets"
    for partition in range(world.config.num_partitions):
        for topic in ("", *world.topics_read[1:]):
            yield from _offsets(world, partition, topic)
        yield from _stores(world, partition)


def contents_of(store: Any) -> Any:
    """Return the contents of a store as a value that can be compared; ``None`` if it has no ``items``."""
    return dict(store.items()) if hasattr(store, "items") else None


def _offsets(world: DrivenWorld, partition: int, topic: str) -> Iterator[str]:
    source = world.broker.log(topic or world.config.topic, partition)
    changes = world.broker.log(world.config.changelog, partition)
    records = [record for record in changes.committed(0, changes.end) if record.key == OFFSET_KEY]
    offsets = [offset_in(decode_offset(record), topic, partition) for record in records]
    for before, after in itertools.pairwise(offsets):
        if after < before:
            yield f"{source.topic}[{partition}]: after {before} was committed, {after} was: events were handled twice"
    handled = offsets[-1] if offsets else 0
    left = [record.offset for record in source.committed(max(handled, 0), source.end)]
    if left:
        yield f"{source.topic}[{partition}]: {len(left)} record(s) from offset {left[0]} on are not handled"
    known = world.broker.offsets.get(world.broker.offset_key(topic, partition))
    if known is not None and offsets and known != handled:
        yield f"{source.topic}[{partition}]: the group's offset is {known}, the changelog's {handled}"


def _rows(world: DrivenWorld, partition: int, where: str, joined: JoinedRows) -> Iterator[str]:
    """Compare joined rows with those in the changelog."""
    for topic, table in joined.tables.items():
        expected = committed_rows(world.broker.log(world.config.changelog, partition), topic)
        rows: Any = table
        found = dict(rows.dump())
        if found != expected:
            yield f"the rows of {topic} in {where} are {found}, in the changelog {expected}"


def _stores(world: DrivenWorld, partition: int) -> Iterator[str]:
    expected = contents_of(world.restored_store(partition))
    end = world.broker.log(world.config.changelog, partition).stable
    for member in world.running():
        engine = member.engine
        if engine is None or member.is_frozen:
            continue
        worker, copy = engine.workers.get(partition), engine.replicas.standing().get(partition)
        where = f"{world.config.topic}[{partition}] on member {member.number}"
        if worker is not None and worker.state.value == "active":
            yield from _rows(world, partition, where, worker.joined)
        if copy is not None and copy.position >= end:
            yield from _rows(world, partition, f"the warm copy of {where}", copy.joined)
        if expected is None:
            continue
        if worker is not None and worker.state.value == "active" and contents_of(worker.store) != expected:
            yield f"the store of {where} holds {contents_of(worker.store)}, the changelog {expected}"
        if copy is not None and copy.position >= end and contents_of(copy.store) != expected:
            yield f"the warm copy of {where} holds {contents_of(copy.store)}, the changelog {expected}"
