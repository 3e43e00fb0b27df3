"""The broker's half: transaction coordinator (v1 and v2), logs with markers, the group's transactional offsets.

EndTxn carries the producer's id and epoch, nothing else: whatever transaction is ongoing under that epoch when it
arrives is the one it ends. Under v2 each end gives the next epoch. Settling a transaction takes several writes, one
marker per log, in any order.
"""

from __future__ import annotations

from .rules import Model
from .search import Broken, put
from .state import GROUP, NO_MARK, Entry, Kind, Late, Log, Phase, Request, Slot, Status, Txn, World, changed

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
    """EndTxn under the current epoch; on an id without an ongoing transaction it changes nothing. Under v2 it gives the
    next epoch, so what is in flight under the old one can only be refused."""
    status, targets = world.tids[tid]
    if status != Status.ONGOING:
        return world
    if world.bumps_epoch:
        world = _without_late(world, tid)
    return world._replace(
        tids=put(world.tids, tid, (Status.PREPARE_COMMIT if commit else Status.PREPARE_ABORT, targets))
    )


def bump(world: World, tid: int) -> World:
    """A new epoch: the holder of the old one is fenced, and its requests in flight can only be refused."""
    instance, slot = owner_of(world, tid)
    slots = world.members[instance].slots
    if slots[slot] == Slot.READY:
        world = changed(world, instance, slots=put(slots, slot, Slot.FENCED))
    elif slots[slot] == Slot.ABORT:  # its abort is refused, and it is opened again
        world = changed(world, instance, slots=put(slots, slot, Slot.INIT))
    return _without_late(world, tid)


def _without_late(world: World, tid: int) -> World:
    if not world.late:
        return world
    return world._replace(late=tuple(late for late in world.late if late.tid != tid))


def takes(world: World, tid: int) -> bool:
    """Whether records and offsets under the current epoch are taken. Under v1 they are enlisted before, and the broker
    verifies that; under v2 they begin the transaction."""
    return status_of(world, tid) == Status.ONGOING or (world.bumps_epoch and status_of(world, tid) == Status.EMPTY)


def initialise(world: World, tid: int) -> tuple[World, bool]:
    """One try of InitProducerId: aborts what is ongoing; True when the id is settled and has a new epoch."""
    status = world.tids[tid][0]
    if status == Status.EMPTY:
        return bump(world, tid), True
    return bump(end(world, tid, commit=False), tid), False


def append(world: World, tid: int, txn: Txn) -> World:
    """Records land in the changelog (and with them the outputs)."""
    return enlist(_logged(world, tid, txn), tid, 1 << txn.part)


def _logged(world: World, tid: int, txn: Txn) -> World:
    log = world.logs[txn.part]
    entry = Entry(tid, False, txn.start, txn.end, txn.count, txn.mark)
    return world._replace(logs=put(world.logs, txn.part, log._replace(entries=(*log.entries, entry))))


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


def arrive(world: World, model: Model, late: Late) -> World:
    """A request that no process waits for any more arrives. Its epoch is current (see :func:`bump`)."""
    world = world._replace(late=tuple(item for item in world.late if item is not late))
    tid, txn = late.tid, late.txn
    if late.request in (Request.COMMIT, Request.ABORT):
        return end(world, tid, commit=late.request == Request.COMMIT)
    if late.request == Request.RECORDS:
        if takes(world, tid):
            return append(world, tid, txn)
        return world if model.config.verified else _logged(world, tid, txn)  # behind the marker: it hangs
    if not takes(world, tid) or may_commit_offsets(world, owner_of(world, tid)[0], txn.generation, late.member_id):
        return world
    return add_offset(world, tid, txn.part, txn.end)
