"""A member's transactions: filled, sent with their offsets, committed; and every way in which that fails."""

from __future__ import annotations

from .broker import add_offset, append, end, enlist, initialise, may_commit_offsets, status_of, takes
from .rules import Fault, Model, Rule
from .search import Broken, put
from .state import (
    GROUP,
    NAMES,
    NO_MARK,
    UNDER_WAY,
    Done,
    Event,
    Kind,
    Late,
    Member,
    Note,
    Phase,
    Request,
    Role,
    Slot,
    Status,
    Txn,
    World,
    changed,
    outsider,
    remember,
)

Steps = list[tuple[str, World]]
"""What is possible next, in words, and the state it leads to."""


def tid_of(model: Model, instance: int, slot: int) -> int:
    """The transactional id of a slot."""
    return instance * model.config.pool + slot


def called(instance: int, txn: Txn) -> str:
    """The slot of a transaction, in words."""
    return f"{NAMES[instance]}.{txn.slot}"


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
    error = may_commit_offsets(world, instance, txn.generation, _sender(member, model))
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
            after = _in_flight(after, model, instance, after.members[instance].pipe[index])
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
        after = _phase(_in_flight(world, model, instance, txn), instance, index, Phase.AGAIN)
    else:
        phase = Phase.UNCLEAR if txn.phase == Phase.ENDING else Phase.ABORTING
        after = fail(world, model, instance, index, phase, answered=False)
    call = "EndTxn" if txn.phase == Phase.ENDING else "what it has sent"
    luck.append((f"FAULT {called(instance, txn)} gets no answer to {call}", after))


def _in_flight(world: World, model: Model, instance: int, txn: Txn) -> World:
    """The process stops waiting for the requests of ``txn``; the network does not forget them."""
    if txn.phase not in UNDER_WAY or world.members[instance].slots[txn.slot] == Slot.FENCED:
        return world
    tid, sent = tid_of(model, instance, txn.slot), txn._replace(slot=-1, phase=Phase.FILLED)
    late = []
    if txn.phase in (Phase.SENDING, Phase.ACCEPTED, Phase.REFUSED):
        late.append(Late(tid, Request.RECORDS, sent._replace(generation=-2)))
    if txn.phase in (Phase.SENDING, Phase.LANDED):
        late.append(Late(tid, Request.OFFSETS, sent, _sender(world.members[instance], model)))
    if txn.phase == Phase.ENDING:
        late.append(Late(tid, Request.COMMIT))
    return world._replace(late=tuple(sorted({*world.late, *late})))


def _sender(member: Member, model: Model) -> int:
    """The member id of a request in flight."""
    return member.member_id if Rule.INCARNATION in model.out else member.engine_id


def fail(
    world: World,
    model: Model,
    instance: int,
    index: int,
    phase: int,
    *,
    refused: bool = False,
    answered: bool = True,
) -> World:
    """A transaction failed: it and every later one that was sent are aborted. A slot is aborted under its epoch if all
    its requests are ``answered``; those of later transactions are cancelled. Else it is opened again.

    ``refused``: its generation was, so it waits for another one before it is sent again."""
    member = world.members[instance]
    pipe, slots = list(member.pipe), list(member.slots)
    later_goes_on = Rule.R3_LATER_ABORTED_FIRST in model.out
    for i in range(index, len(pipe)):
        txn = pipe[i]
        if txn.phase == Phase.FILLED or (i > index and later_goes_on):
            continue
        if i > index or not answered:
            world = _in_flight(world, model, instance, txn)
        pipe[i] = txn._replace(phase=phase if i == index else Phase.ABORTING)
        in_order = answered and phase != Phase.UNCLEAR if i == index else txn.phase not in UNDER_WAY
        is_usable = slots[txn.slot] in (Slot.READY, Slot.ABORT)
        slots[txn.slot] = Slot.ABORT if in_order and is_usable else Slot.INIT
        if i == index and phase == Phase.UNCLEAR:
            if Rule.R3_NEW_PRODUCER in model.out:
                slots[txn.slot] = Slot.READY
                world = end(world, tid_of(model, instance, txn.slot), commit=False)
            if Rule.R3_NOT_GUESSED_ABORTED in model.out:
                pipe[i] = txn._replace(phase=Phase.ABORTING)
        if not (refused and i == index):
            pipe[i] = pipe[i]._replace(generation=-2)
    if Rule.R4_LATER_SENT_AGAIN in model.out:
        pipe = pipe[: index + 1]
    return changed(world, instance, pipe=tuple(pipe), slots=tuple(slots))


def slot_steps(world: World, model: Model, instance: int, steps: Steps, luck: Steps) -> None:
    """Slots are aborted or opened again; then the work that was aborted is ready to be sent again (R4)."""
    member = world.members[instance]
    processes = any(role.kind == Kind.ACTIVE for role in member.roles)
    for slot, state in enumerate(member.slots):
        if state not in (Slot.ABORT, Slot.INIT):
            continue
        in_use = any(txn.slot == slot for txn in member.pipe)
        if Rule.R5_LOST_SETTLES_ITS_SLOTS in model.out and not in_use and not member.pipe and not processes:
            continue  # when a slot is needed again, not before
        if state == Slot.ABORT:
            _abort(world, model, instance, slot, in_use, steps, luck)
        elif member.applied >= 0:  # else another process of our name may have come since a loss, and would be fenced
            _open(world, model, instance, slot, steps)


def _abort(
    world: World, model: Model, instance: int, slot: int, in_use: bool, steps: Steps, luck: Steps
) -> None:
    """EndTxn(abort) under the slot's epoch. Under v2 it gives the next one, and the slot goes on; under v1, or after a
    loss, it is opened again."""
    tid, slots = tid_of(model, instance, slot), world.members[instance].slots
    told = f"{NAMES[instance]}.{slot} sends EndTxn(abort)"
    again = changed(world, instance, slots=put(slots, slot, Slot.INIT))
    if status_of(world, tid) != Status.ONGOING:
        steps.append((f"{told}: INVALID_TXN_STATE", again))
        return
    after = end(world, tid, commit=False)
    goes_on = world.bumps_epoch and in_use
    after = changed(after, instance, slots=put(slots, slot, Slot.READY if goes_on else Slot.INIT))
    steps.append((told, _ready_again(after, instance, slot)))
    if world.faults and Fault.TIMEOUT in model.config.kinds:
        after = world if goes_on else again
        late = tuple(sorted({*world.late, Late(tid, Request.ABORT)}))
        luck.append((f"FAULT {told}, and gets no answer", after._replace(late=late, faults=world.faults - 1)))


def _open(world: World, model: Model, instance: int, slot: int, steps: Steps) -> None:
    """InitProducerId."""
    tid = tid_of(model, instance, slot)
    if status_of(world, tid) not in (Status.EMPTY, Status.ONGOING):
        return
    after, settled = initialise(world, tid)
    if settled:
        slots = put(after.members[instance].slots, slot, Slot.READY)
        after = _ready_again(changed(after, instance, slots=slots), instance, slot)
    told = f"{NAMES[instance]}.{slot} is opened again: InitProducerId {'settles it' if settled else 'aborts'}"
    steps.append((told, after))


def _ready_again(world: World, instance: int, slot: int) -> World:
    """What was aborted is sent again, by any slot."""
    pipe = tuple(
        txn._replace(phase=Phase.FILLED, slot=-1) if txn.slot == slot and txn.phase == Phase.ABORTING else txn
        for txn in world.members[instance].pipe
    )
    return changed(world, instance, pipe=pipe)


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


def fenced(world: World, model: Model, instance: int) -> World:
    """Another member initialised one of our ids: we looked dead to it. The slot is opened again, and the work is sent
    again; but a commit that was requested is looked up first (R3)."""
    member = world.members[instance]
    for index, txn in enumerate(member.pipe):
        is_looked_up = txn.phase in (Phase.UNCLEAR, Phase.FOUND)  # for which it needs no producer
        if txn.slot >= 0 and member.slots[txn.slot] == Slot.FENCED and not is_looked_up:
            phase = Phase.UNCLEAR if txn.phase in (Phase.ENDING, Phase.AGAIN) else Phase.ABORTING
            return fail(world, model, instance, index, phase)
    return world


def lose(world: World, model: Model, instance: int) -> World:
    """R5: what was owned is void, and we join as somebody new."""
    if Rule.INCARNATION not in model.out:
        world = engine_lost(world, model, instance)
        member = world.members[instance]
        left = outsider(model.config, member.last_id)
        return remember(world, instance, left._replace(roles=member.roles, slots=member.slots))
    member = world.members[instance]
    left = outsider(model.config, member.last_id)._replace(
        pipe=member.pipe, slots=member.slots, plan_members=member.plan_members,
        engine_id=member.engine_id, inbox=member.inbox,
    )  # fmt: skip
    return remember(world, instance, left)


def membership_lost(world: World, model: Model, instance: int) -> World:
    """The membership learns it first. The engine hears of it, sooner or later."""
    if not model.config.lag:
        return lose(world, model, instance)
    member = world.members[instance]
    left = outsider(model.config, member.last_id)._replace(
        roles=member.roles, pipe=member.pipe, slots=member.slots, notes=member.notes,
        engine_id=member.engine_id, inbox=(*member.inbox, Event(0)),
    )  # fmt: skip
    return remember(world, instance, left)


def engine_lost(world: World, model: Model, instance: int) -> World:
    """R5: nothing more is sent, every store is closed, open transactions are settled: by an abort where all requests
    are answered, else by opening the slot again."""
    member = world.members[instance]
    slots = list(member.slots)  # idle ones stay as they are: one that was fenced is found out when it is used
    for txn in member.pipe:
        world = _in_flight(world, model, instance, txn)
        if txn.slot >= 0 and slots[txn.slot] in (Slot.READY, Slot.FENCED):
            in_order = slots[txn.slot] == Slot.READY and txn.phase in (Phase.FLUSHED, Phase.AGAIN)
            slots[txn.slot] = Slot.ABORT if in_order else Slot.INIT
    kept = Rule.R5_LOST_IS_NOT_REVOKED in model.out
    roles = tuple(
        role._replace(kind=Kind.KEPT) if kept and role.kind == Kind.ACTIVE else Role() for role in member.roles
    )
    return changed(world, instance, engine_id=0, roles=roles, pipe=(), slots=tuple(slots))
