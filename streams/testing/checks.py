"""Invariants of every event source when nothing is under way: the checks of ``TestDriver.check``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from streams.runtime.changelog import OFFSET_KEY, decode_offset
from streams.testing.world import DrivenWorld


def broken_promises(world: DrivenWorld) -> Iterator[str]:
    """List the contradictions to exactly-once: transactions that hang, input that was left out or handled again,
    stores that differ from the changelog."""
    for log in world.broker.logs.values():
        if log.stable != log.end:
            yield f"{log.topic}[{log.partition}]: a transaction hangs, readers see {log.stable} of {log.end} offsets"
    for partition in range(world.config.num_partitions):
        yield from _offsets(world, partition)
        yield from _stores(world, partition)


def contents_of(store: Any) -> Any:
    """Return the contents of a store as a value that can be compared; ``None`` if it has no ``items``."""
    return dict(store.items()) if hasattr(store, "items") else None


def _offsets(world: DrivenWorld, partition: int) -> Iterator[str]:
    source, changes = (world.broker.log(topic, partition) for topic in (world.config.topic, world.config.changelog))
    offsets = [decode_offset(record).offset for record in changes.committed(0, changes.end) if record.key == OFFSET_KEY]
    for before, after in itertools.pairwise(offsets):
        if after < before:
            yield f"{source.topic}[{partition}]: after {before} was committed, {after} was: events were handled twice"
    handled = offsets[-1] if offsets else 0
    left = [record.offset for record in source.committed(max(handled, 0), source.end)]
    if left:
        yield f"{source.topic}[{partition}]: {len(left)} record(s) from offset {left[0]} on are not handled"
    known = world.broker.offsets.get(partition)
    if known is not None and offsets and known != handled:
        yield f"{source.topic}[{partition}]: the group's offset is {known}, the changelog's {handled}"


def _stores(world: DrivenWorld, partition: int) -> Iterator[str]:
    expected = contents_of(world.restored_store(partition))
    end = world.broker.log(world.config.changelog, partition).stable
    for member in world.running():
        engine = member.engine
        if engine is None or expected is None or member.is_frozen:
            continue
        worker, copy = engine.workers.get(partition), engine.replicas.standing().get(partition)
        where = f"{world.config.topic}[{partition}] on member {member.number}"
        if worker is not None and worker.state.value == "active" and contents_of(worker.store) != expected:
            yield f"the store of {where} holds {contents_of(worker.store)}, the changelog {expected}"
        if copy is not None and copy.position >= end and contents_of(copy.store) != expected:
            yield f"the warm copy of {where} holds {contents_of(copy.store)}, the changelog {expected}"
