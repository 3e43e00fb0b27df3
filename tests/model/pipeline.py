"""A member's transactions: filled, sent with their offsets, committed; and every way in which that fails."""

from __future__ import annotations

from .broker import add_offset, append, end, enlist, may_commit_offsets, status_of, takes
from .failures import (
    Steps,
    called,
    engine_lost,
    fail,
    fenced,
    in_flight,
    lose,
    sender,
    tid_of,
)
from .rules import Fault, Model, Rule
from .search import Broken, put
from .state import (
    GROUP,
    NAMES,
    NO_MARK,
    UNDER_WAY,
    Done,
    Kind,
    Member,
    Note,
    Phase,
    Role,
    Slot,
    Status,
    Txn,
    World,
    changed,
)


def free_slots(world: World, model: Model, instance: int) -> list[int]:
    """Slots that a transaction may take, without those that stand exactly like another one. (That a slot is fenced
    shows when it is used.)"""
    member = world.members[instance]
    used = [txn.slot for txn in member.pipe]
    found: dict[object, int] = {}
    for slot, state in enumerate(member.slots):
        tid = tid_of(model, instance, slot)
        if state in (Slot.READY, Slot.FENCED) and slot not in used:
            late = tuple(item._replace(tid=0) for item in world.late if item.tid == tid)
            found.setdefault((state, world.tids[tid], late), slot)
    return list(found.values())


def intake_steps(world: World, model: Model, instance: int, steps: Steps) -> None:
    """Fill a transaction with the next record of a partition, or with a release marker."""
    member, name = world.members[instance], NAMES[instance]
    if len(member.pipe) >= model.config.pool:
        return
    for part, role in enumerate(member.roles):
        if role.kind == Kind.ACTIVE and role.a < model.config.records:
            if role.b != role.a:
                raise Broken(f"the store of p{part} at {name} counts {role.b} at position {role.a}")
            txn = Txn(-1, Phase.FILLED, part, role.a, role.a + 1, role.b + 1)
            roles = put(member.roles, part, Role(Kind.ACTIVE, role.a + 1, role.b + 1))
            told = f"{name} handles p{part} record {role.a} and fills a transaction with it"
            steps.append((told, changed(world, instance, roles=roles, pipe=(*member.pipe, txn))))
        elif role.kind == Kind.RELEASING:
            txn = Txn(-1, Phase.FILLED, part, role.a, role.a, role.b, mark=role.mark)
            kind = Kind.RELEASED if Rule.S8_DONOR_STOPS not in model.out else Kind.ACTIVE
            roles = put(member.roles, part, role._replace(kind=kind))
            told = f"{name} fills a transaction with the release marker of p{part} at {role.a}"
            steps.append((told, changed(world, instance, roles=roles, pipe=(*member.pipe, txn))))


def pipeline_steps(world: World, model: Model, instance: int, steps: Steps, luck: Steps) -> None:
    """Whatever the transactions of one member may do next."""
    member = world.members[instance]
    flushed = True  # every transaction before this one
    for index, txn in enumerate(member.pipe):
        first = index == 0 or Rule.R2_COMMIT_IN_ORDER in model.out
        if txn.phase == Phase.FILLED:
            if flushed or Rule.R2_PRODUCE_IN_ORDER in model.out:
                _send(world, model, instance, index, steps)
        elif txn.phase in (Phase.FLUSHED, Phase.AGAIN):
            if first:
                _request_end(world, model, instance, index, steps)
        elif txn.phase == Phase.ENDING:
            _end_arrives(world, model, instance, index, steps)
        elif txn.phase in (Phase.UNCLEAR, Phase.FOUND):
            if index == 0:
                _look_up(world, model, instance, member, txn, steps)
        elif txn.phase != Phase.ABORTING:
            if txn.phase != Phase.LANDED:
                _records_arrive(world, model, instance, index, steps)
            if txn.phase in (Phase.SENDING, Phase.LANDED):
                _offsets_arrive(world, model, instance, index, steps)
                _offsets_again(world, model, instance, index, luck)
        if txn.phase in UNDER_WAY and world.faults and Fault.TIMEOUT in model.config.kinds:
            _time_out(world, model, instance, index, luck)
        if txn.phase == Phase.AGAIN:
            told = f"the deadline for the end of {called(instance, txn)} passes"
            luck.append((told, fail(world, model, instance, index, Phase.UNCLEAR)))
        flushed = flushed and Phase.FLUSHED <= txn.phase <= Phase.AGAIN


def _phase(world: World, instance: int, index: int, phase: int) -> World:
    member = world.members[instance]
    return changed(world, instance, pipe=put(member.pipe, index, member.pipe[index]._replace(phase=phase)))


def _send(world: World, model: Model, instance: int, index: int, steps: Steps) -> None:
    """Take a slot, and send the records and, beside them, the offsets. The snapshot is read right before; the request
    carries it from here on. Refused work waits for another snapshot than the one refused (R4)."""
    member = world.members[instance]
    txn, generation = member.pipe[index], member.generation
    if not _is_ours(member, model):
        _drop(world, model, instance, steps)
        return
    if generation < 0 or txn.generation == generation:
        return
    if Rule.R1_REAL_METADATA in model.out:
        generation = -1
    for slot in free_slots(world, model, instance):
        txn = txn._replace(slot=slot)
        tid, told = tid_of(model, instance, slot), f"{called(instance, txn)} sends p{txn.part} "
        told += f"records {txn.start}..<{txn.end}, and offsets with generation {generation}"
        if member.slots[slot] == Slot.FENCED:
            pipe = put(member.pipe, index, txn._replace(phase=Phase.ABORTING, generation=-2))
            after = changed(world, instance, pipe=pipe, slots=put(member.slots, slot, Slot.INIT))
            steps.append((f"{told}: FENCED", after))
        elif status_of(world, tid) in (Status.EMPTY, Status.ONGOING):  # else it is answered: again
            txn = txn._replace(phase=Phase.SENDING, generation=generation)
            after = changed(world, instance, pipe=put(member.pipe, index, txn))
            if not world.bumps_epoch:
                after = enlist(after, tid, 1 << txn.part | GROUP)
            steps.append((told, after))


def _is_ours(member: Member, model: Model) -> bool:
    """Whether the newest snapshot is of the incarnation that the engine works in."""
    return member.member_id == member.engine_id or Rule.INCARNATION in model.out


def _drop(world: World, model: Model, instance: int, steps: Steps) -> None:
    told = f"{NAMES[instance]}'s engine sees that the snapshot is of another incarnation, and drops everything"
    steps.append((told, engine_lost(world, model, instance)))


def _records_arrive(world: World, model: Model, instance: int, index: int, steps: Steps) -> None:
    """All records land and are acknowledged. Offsets that were refused let the transaction fail then, not before."""
    member = world.members[instance]
    txn = member.pipe[index]
    tid = tid_of(model, instance, txn.slot)
    told = f"the records of {called(instance, txn)} (p{txn.part} {txn.start}..<{txn.end}) reach their leader"
    if member.slots[txn.slot] == Slot.FENCED:
        steps.append((f"{told}: FENCED", fenced(world, model, instance)))
    elif not takes(world, tid):
        _not_taken(world, model, instance, index, told, steps)
    elif txn.phase == Phase.REFUSED:
        after = fail(append(world, tid, txn), model, instance, index, Phase.ABORTING, refused=True)
        steps.append((told, after))
    else:
        phase = Phase.LANDED if txn.phase == Phase.SENDING else Phase.FLUSHED
        steps.append((told, append(_phase(world, instance, index, phase), tid, txn)))


def _not_taken(world: World, model: Model, instance: int, index: int, told: str, steps: Steps) -> None:
    """The transaction has ended behind its back. While its markers are written the answer is: again."""
    if status_of(world, tid_of(model, instance, world.members[instance].pipe[index].slot)) == Status.EMPTY:
        steps.append((f"{told}: INVALID_TXN_STATE", fail(world, model, instance, index, Phase.ABORTING)))


def _offsets_arrive(world: World, model: Model, instance: int, index: int, steps: Steps) -> None:
    member = world.members[instance]
    txn = member.pipe[index]
    tid = tid_of(model, instance, txn.slot)
    told = f"the offsets of {called(instance, txn)} (p{txn.part} at {txn.end}, generation {txn.generation}) "
    told += "reach the group coordinator"
    error = may_commit_offsets(world, instance, txn.generation, sender(member, model))
    if member.slots[txn.slot] == Slot.FENCED:
        error, after = "FENCED", fenced(world, model, instance)
    elif error == "UNKNOWN_MEMBER_ID":
        if Rule.INCARNATION in model.out:  # the work outlives the membership
            world = fail(world, model, instance, index, Phase.ABORTING)
        after = lose(world, model, instance)
    elif error and Rule.R4_WAIT_FOR_SNAPSHOT in model.out:
        after = fail(world, model, instance, index, Phase.ABORTING)
        after = changed(after, instance, pipe=after.members[instance].pipe[1:])
    elif error and txn.phase == Phase.SENDING:
        after = _phase(world, instance, index, Phase.REFUSED)
        if Rule.R3_ANSWERED_BEFORE_ABORT in model.out:
            after = in_flight(after, model, instance, after.members[instance].pipe[index])
            after = fail(after, model, instance, index, Phase.ABORTING, refused=True)
    elif error:
        after = fail(world, model, instance, index, Phase.ABORTING, refused=True)
    elif not takes(world, tid):
        _not_taken(world, model, instance, index, told, steps)
        return
    else:
        phase = Phase.ACCEPTED if txn.phase == Phase.SENDING else Phase.FLUSHED
        after = add_offset(_phase(world, instance, index, phase), tid, txn.part, txn.end)
    steps.append((f"{told}: {error or 'accepted'}", after))


def _offsets_again(world: World, model: Model, instance: int, index: int, luck: Steps) -> None:
    """The group coordinator loads or has moved: they are sent again, under the metadata of that moment."""
    member = world.members[instance]
    txn = member.pipe[index]
    if -1 < txn.generation != member.generation > -1 and member.member_id == member.engine_id:
        pipe = put(member.pipe, index, txn._replace(generation=member.generation))
        told = f"{called(instance, txn)} sends its offsets again, with generation {member.generation}"
        luck.append((told, changed(world, instance, pipe=pipe)))


def _request_end(world: World, model: Model, instance: int, index: int, steps: Steps) -> None:
    """The second look at the membership, then the end is requested."""
    member = world.members[instance]
    txn = member.pipe[index]
    if not _is_ours(member, model) and Rule.SECOND_LOOK not in model.out:
        _drop(world, model, instance, steps)
        return
    told = f"{called(instance, txn)} sends EndTxn(commit){' again' if txn.phase == Phase.AGAIN else ''}"
    steps.append((told, _phase(world, instance, index, Phase.ENDING)))


def _ends_again(world: World, model: Model) -> bool:
    """Whether an end without an answer is requested again."""
    return world.bumps_epoch or Rule.R3_END_ONCE_PER_EPOCH in model.out


def _end_arrives(world: World, model: Model, instance: int, index: int, steps: Steps) -> None:
    member = world.members[instance]
    txn, error = member.pipe[index], ""
    tid = tid_of(model, instance, txn.slot)
    status = status_of(world, tid)
    if member.slots[txn.slot] == Slot.FENCED:
        error, after = ": FENCED", fenced(world, model, instance)
    elif status == Status.ONGOING:
        after = settle_committed(end(world, tid, commit=True), instance, index)
    elif not _ends_again(world, model):
        error, after = ": INVALID_TXN_STATE", fail(world, model, instance, index, Phase.UNCLEAR)
    elif status == Status.EMPTY:  # an earlier request of this end has arrived: the coordinator knows, and says so
        error, after = ": it is committed", settle_committed(world, instance, index)
    else:
        return  # CONCURRENT_TRANSACTIONS: its markers are being written
    what = f"EndTxn of {called(instance, txn)} (p{txn.part} records {txn.start}..<{txn.end})"
    steps.append((f"{what} reaches the transaction coordinator{error}", after))


def settle_committed(world: World, instance: int, index: int) -> World:
    """The member knows that the transaction is committed."""
    member = world.members[instance]
    txn, roles, notes = member.pipe[index], member.roles, member.notes
    if txn.mark != NO_MARK:
        role = roles[txn.part]
        notes = (*notes, Note(Done.HANDED_OVER, txn.part, txn.mark, member.engine_id))
        if role.kind == Kind.RELEASED:
            # Withdrawn while the marker was under way: it is ours, but the receiver may have worked on it meanwhile.
            gone = Role(Kind.GONE, role.a, role.b, txn.mark)
            roles = put(roles, txn.part, gone if role.mark == txn.mark else Role(Kind.FENCING, mark=role.mark))
    pipe = (*member.pipe[:index], *member.pipe[index + 1 :])
    return changed(world, instance, pipe=pipe, roles=roles, notes=notes)


def _time_out(world: World, model: Model, instance: int, index: int, luck: Steps) -> None:
    """Fault: no answer, of one request or of several. A request may still arrive, or never (then nothing ever delivers
    it). While it was being sent, the transaction is known not to be committed."""
    txn = world.members[instance].pipe[index]
    world = world._replace(faults=world.faults - 1)
    if txn.phase == Phase.ENDING and _ends_again(world, model):
        after = _phase(in_flight(world, model, instance, txn), instance, index, Phase.AGAIN)
    else:
        phase = Phase.UNCLEAR if txn.phase == Phase.ENDING else Phase.ABORTING
        after = fail(world, model, instance, index, phase, answered=False)
    call = "EndTxn" if txn.phase == Phase.ENDING else "what it has sent"
    luck.append((f"FAULT {called(instance, txn)} gets no answer to {call}", after))


def _look_up(world: World, model: Model, instance: int, member: Member, txn: Txn, steps: Steps) -> None:
    """R3: the changelog up to its high watermark says which way the unclear transaction went."""
    tid = tid_of(model, instance, txn.slot)
    if member.slots[txn.slot] == Slot.INIT or status_of(world, tid) != Status.EMPTY:
        return  # fenced or not: reading needs no producer
    if Rule.R3_NOT_GUESSED_COMMITTED in model.out:
        told = f"{called(instance, txn)} guesses that the unclear transaction is committed"
        steps.append((told, settle_committed(world, instance, 0)))
        return
    log = world.logs[txn.part]
    # The offset record carries member and serial, so the first reading that finds it is an answer; only "it is not
    # there" takes reading up to the high watermark.
    ours = log.writer == instance and log.offset == txn.end and log.mark == txn.mark
    if log.entries and txn.phase != Phase.FOUND:
        return
    if txn.phase == Phase.FOUND or ours:
        outcome, after = "committed", settle_committed(world, instance, 0)
    elif log.offset == txn.start:
        pipe = put(member.pipe, 0, txn._replace(phase=Phase.FILLED, slot=-1))
        outcome, after = "aborted", changed(world, instance, pipe=pipe)
    else:
        outcome, after = "overtaken by another member", lose(world, model, instance)
    steps.append((f"{called(instance, txn)} reads in the changelog what became of the transaction: {outcome}", after))
