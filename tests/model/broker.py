"""The broker's half: transaction coordinator (transactions v1), logs with markers, the group's transactional offsets.

EndTxn carries the producer's id and epoch, nothing else: whatever transaction is ongoing under that epoch when it
arrives is the one it ends. Settling a transaction takes several writes, one marker per log, in any order.
"""

from __future__ import annotations

from .search import Broken, put
from .state import GROUP, NO_MARK, Entry, Kind, Late, Log, Phase, Slot, Status, World, changed

SUPERSEDED = -1


def owner_of(world: World, tid: int) -> tuple[int, int]:
    """(instance, slot) of a transactional id."""
    return divmod(tid, len(world.tids) // len(world.members))


def status_of(world: World, tid: int) -> int:
    """Where the transaction of this id stands at its coordinator."""
    return world.tids[tid][0]


def enlist(world: World, tid: int, target: int) -> World:
    """AddPartitionsToTxn or AddOffsetsToTxn: the transaction is ongoing, and ``target`` will get a marker."""
    return world._replace(tids=put(world.tids, tid, (Status.ONGOING, world.tids[tid][1] | target)))


def end(world: World, tid: int, commit: bool) -> World:
    """EndTxn under the current epoch; on an id without an ongoing transaction it changes nothing."""
    status, targets = world.tids[tid]
    if status != Status.ONGOING:
        return world
    return world._replace(
        tids=put(world.tids, tid, (Status.PREPARE_COMMIT if commit else Status.PREPARE_ABORT, targets))
    )


def bump(world: World, tid: int) -> World:
    """A new epoch: whoever holds the old one is fenced, and its requests in flight can only be refused."""
    instance, slot = owner_of(world, tid)
    member = world.members[instance]
    if member.slots[slot] == Slot.READY:
        world = changed(world, instance, slots=put(member.slots, slot, Slot.FENCED))
    if world.late:
        world = world._replace(late=tuple(late for late in world.late if late.tid != tid))
    return world


def initialise(world: World, tid: int) -> tuple[World, bool]:
    """One try of InitProducerId: aborts what is ongoing; True when the id is settled and has a new epoch."""
    status = world.tids[tid][0]
    if status == Status.EMPTY:
        return bump(world, tid), True
    return bump(end(world, tid, commit=False), tid), False


def append(world: World, part: int, entry: Entry) -> World:
    """Records land in the changelog of ``part`` (and with them the outputs)."""
    log = world.logs[part]
    world = world._replace(logs=put(world.logs, part, log._replace(entries=(*log.entries, entry))))
    return enlist(world, entry.tid, 1 << part)


def add_offset(world: World, tid: int, part: int, offset: int) -> World:
    """TxnOffsetCommit, accepted: the offset is pending until the transaction's marker."""
    pending = world.group.pending
    kept = tuple(item for item in pending[part] if item[0] != tid)
    group = world.group._replace(pending=put(pending, part, (*kept, (tid, offset))))
    return enlist(world._replace(group=group), tid, GROUP)


def may_commit_offsets(world: World, instance: int, generation: int, member_id: int) -> str:
    """The group coordinator's answer: "" or the error. Ownership of partitions is never checked."""
    if generation == -1:
        return ""
    if world.group.ids[instance] != member_id:
        return "UNKNOWN_MEMBER_ID"
    return "" if world.group.generation == generation else "ILLEGAL_GENERATION"


def marker(world: World, tid: int, target: int, bury: bool = False) -> World:
    """The coordinator writes one marker; after the last one the transaction is complete."""
    status, targets = world.tids[tid]
    left = targets & ~target
    world = world._replace(tids=put(world.tids, tid, (status if left else Status.EMPTY, left)))
    commit = status == Status.PREPARE_COMMIT
    if target == GROUP:
        return _mark_offsets(world, tid, commit)
    return _mark_log(world, target.bit_length() - 1, tid, commit, bury)


def _mark_offsets(world: World, tid: int, commit: bool) -> World:
    """Markers may come in another order than the offsets did: the broker compares the places of the offset records,
    so a marker that comes after a later one's changes nothing. Until then its offset holds up stable readers."""
    group = world.group
    for part, pending in enumerate(group.pending):
        for index, item in enumerate(pending):
            if item[0] == tid:
                earlier = pending[:index]
                if commit and item[1] != SUPERSEDED:
                    group = group._replace(committed=put(group.committed, part, item[1]))
                    earlier = tuple((other, SUPERSEDED) for other, _ in earlier)
                group = group._replace(pending=put(group.pending, part, (*earlier, *pending[index + 1 :])))
    return world._replace(group=group)


def _mark_log(world: World, part: int, tid: int, commit: bool, bury: bool) -> World:
    log = world.logs[part]
    entries = list(log.entries)
    for index in reversed([i for i, entry in enumerate(entries) if entry.tid == tid and not entry.done]):
        if commit:
            entries[index] = entries[index]._replace(done=True)
        else:
            del entries[index]
            world = _lower_ends(world, part, index)
    log = log._replace(entries=tuple(entries))
    while log.entries and log.entries[0].done:
        world = _found(world, part, log.entries[0])
        log = _fold(world, part, log, bury)
        world = _lower_ends(world, part, 0)
    return world._replace(logs=put(world.logs, part, log))


def _found(world: World, part: int, entry: Entry) -> World:
    """A member that asks itself what became of this transaction can read it now."""
    instance, slot = owner_of(world, entry.tid)
    member = world.members[instance]
    for index, txn in enumerate(member.pipe):
        if txn.phase == Phase.UNCLEAR and (txn.slot, txn.part, txn.start, txn.end) == (
            slot,
            part,
            entry.start,
            entry.end,
        ):
            return changed(world, instance, pipe=put(member.pipe, index, txn._replace(phase=Phase.FOUND)))
    return world


def _fold(world: World, part: int, log: Log, bury: bool) -> Log:
    """The last stable offset moves over one committed entry: here effects become visible, so here they are judged."""
    entry = log.entries[0]
    if entry.start != log.offset:
        what = "seen twice" if entry.start < log.offset else "lost or out of order"
        raise Broken(
            f"effects of p{part} records {entry.start}..{entry.end - 1} become visible where "
            f"{log.offset} is next: {what}"
        )
    if entry.count != entry.end:
        raise Broken(
            f"the changelog of p{part} says {entry.count}, the fold of the input up to {entry.end} is {entry.end}"
        )
    buried = (log.mark if log.mark != NO_MARK else log.buried) if bury else NO_MARK
    return Log(entry.end, entry.count, owner_of(world, entry.tid)[0], entry.mark, log.entries[1:], buried)


def _lower_ends(world: World, part: int, index: int) -> World:
    """An entry below a restoring reader's high watermark is out of its way."""
    for instance, member in enumerate(world.members):
        role = member.roles[part]
        if role.kind == Kind.READING and role.a > index:
            world = changed(world, instance, roles=put(member.roles, part, role._replace(a=role.a - 1)))
    return world


def arrive(world: World, late: Late) -> World:
    """A request that nobody waits for any more reaches its coordinator. Its epoch is current (see :func:`bump`)."""
    world = world._replace(late=tuple(item for item in world.late if item is not late))
    if late.part < 0:
        return end(world, late.tid, commit=True)
    if world.tids[late.tid][0] != Status.ONGOING:
        return world  # the partition verifies with the coordinator that the transaction is ongoing
    if may_commit_offsets(world, owner_of(world, late.tid)[0], late.generation, late.member_id):
        return world
    return add_offset(world, late.tid, late.part, late.end)
