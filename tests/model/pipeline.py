"""A member's transactions: filled, produced, flushed, offsets sent, committed; and every way in which that fails."""

from __future__ import annotations

from .broker import add_offset, append, end, initialise, may_commit_offsets, status_of
from .rules import Fault, Model, Rule
from .search import Broken, put
from .state import (
    NAMES,
    NO_MARK,
    Done,
    Entry,
    Event,
    Kind,
    Late,
    Member,
    Note,
    Phase,
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


def free_slot(member: Member) -> int:
    """A slot that looks ready and is not in the pipeline, or -1. (That it is fenced shows when it is used.)"""
    used = [txn.slot for txn in member.pipe]
    for slot, state in enumerate(member.slots):
        if state != Slot.INIT and slot not in used:
            return slot
    return -1


def intake_steps(world: World, model: Model, instance: int, steps: Steps) -> None:
    """Fill a transaction with the next record of a partition, or with a release marker."""
    member, name = world.members[instance], NAMES[instance]
    slot = free_slot(member)
    if slot < 0 or len(member.pipe) >= model.config.pool:
        return
    for part, role in enumerate(member.roles):
        if role.kind == Kind.ACTIVE and role.a < model.config.records:
            if role.b != role.a:
                raise Broken(f"the store of p{part} at {name} counts {role.b} at position {role.a}")
            txn = Txn(slot, Phase.FILLED, part, role.a, role.a + 1, role.b + 1)
            roles = put(member.roles, part, Role(Kind.ACTIVE, role.a + 1, role.b + 1))
            told = f"{name} handles p{part} record {role.a} and fills a transaction with it"
            steps.append((told, changed(world, instance, roles=roles, pipe=(*member.pipe, txn))))
        elif role.kind == Kind.RELEASING:
            txn = Txn(slot, Phase.FILLED, part, role.a, role.a, role.b, mark=role.mark)
            kind = Kind.RELEASED if Rule.S8_DONOR_STOPS not in model.out else Kind.ACTIVE
            roles = put(member.roles, part, role._replace(kind=kind))
            told = f"{name} fills a transaction with the release marker of p{part} at {role.a}"
            steps.append((told, changed(world, instance, roles=roles, pipe=(*member.pipe, txn))))


def pipeline_steps(world: World, model: Model, instance: int, steps: Steps, faults: Steps) -> None:
    """Whatever the transactions of one member may do next."""
    member = world.members[instance]
    flushed = True  # every transaction before this one
    for index, txn in enumerate(member.pipe):
        first = index == 0 or Rule.R2_COMMIT_IN_ORDER in model.out
        if txn.phase == Phase.FILLED:
            if flushed or Rule.R2_PRODUCE_IN_ORDER in model.out:
                _produce(world, model, instance, member, index, steps)
        elif txn.phase == Phase.FLUSHED:
            if first and (member.member_id or model.config.lag):
                _send_offsets(world, model, instance, member, index, steps)
        elif txn.phase == Phase.OFFSETS:
            _offsets_arrive(world, model, instance, member, index, steps)
        elif txn.phase == Phase.ACCEPTED:
            if first:
                after = _phase(world, instance, index, Phase.ENDING)
                steps.append((f"{called(instance, txn)} sends EndTxn(commit)", after))
        elif txn.phase == Phase.ENDING:
            _end_arrives(world, model, instance, member, index, steps)
        elif txn.phase in (Phase.UNCLEAR, Phase.FOUND) and index == 0:
            _look_up(world, model, instance, member, txn, steps)
        if txn.phase in (Phase.OFFSETS, Phase.ENDING) and world.faults and Fault.TIMEOUT in model.config.kinds:
            _time_out(world, model, instance, index, faults)
        flushed = flushed and Phase.FLUSHED <= txn.phase <= Phase.ENDING


def _phase(world: World, instance: int, index: int, phase: int) -> World:
    member = world.members[instance]
    return changed(world, instance, pipe=put(member.pipe, index, member.pipe[index]._replace(phase=phase)))


def _produce(world: World, model: Model, instance: int, member: Member, index: int, steps: Steps) -> None:
    """All records land and are acknowledged. Refused work waits for another snapshot than the one refused (R4)."""
    txn = member.pipe[index]
    if txn.generation == member.generation and member.generation >= 0:
        return
    told = f"{called(instance, txn)} produces p{txn.part} records {txn.start}..<{txn.end} and is "
    if member.slots[txn.slot] == Slot.FENCED:
        steps.append((told + "refused", fenced(world, model, instance)))
        return
    tid = tid_of(model, instance, txn.slot)
    if member.slots[txn.slot] != Slot.READY or status_of(world, tid) not in (Status.EMPTY, Status.ONGOING):
        return
    entry = Entry(tid, False, txn.start, txn.end, txn.count, txn.mark)
    after = append(_phase(world, instance, index, Phase.FLUSHED), txn.part, entry)
    steps.append((told + "acknowledged", after))


def _send_offsets(world: World, model: Model, instance: int, member: Member, index: int, steps: Steps) -> None:
    """The snapshot is read once, right before; the request carries it from here on."""
    txn = member.pipe[index]
    if member.member_id != member.engine_id and Rule.INCARNATION not in model.out:
        told = f"{NAMES[instance]}'s engine sees that the snapshot is of another incarnation, and drops everything"
        steps.append((told, engine_lost(world, model, instance)))
        return
    generation = -1 if Rule.R1_REAL_METADATA in model.out else member.generation
    pipe = put(member.pipe, index, txn._replace(phase=Phase.OFFSETS, generation=generation))
    told = f"{called(instance, txn)} sends its offsets with generation {generation}"
    steps.append((told, changed(world, instance, pipe=pipe)))


def _offsets_arrive(world: World, model: Model, instance: int, member: Member, index: int, steps: Steps) -> None:
    txn = member.pipe[index]
    error = may_commit_offsets(world, instance, txn.generation, _sender(member, model))
    if member.slots[txn.slot] == Slot.FENCED:
        error, after = "FENCED", fenced(world, model, instance)
    elif error == "UNKNOWN_MEMBER_ID":
        after = lose(world, model, instance)
    elif error and Rule.R4_WAIT_FOR_SNAPSHOT in model.out:
        after = fail(world, model, instance, index, Phase.ABORTING)
        after = changed(after, instance, pipe=after.members[instance].pipe[1:])
    elif error:
        after = fail(world, model, instance, index, Phase.ABORTING, refused=True)
    else:
        tid = tid_of(model, instance, txn.slot)
        after = add_offset(_phase(world, instance, index, Phase.ACCEPTED), tid, txn.part, txn.end)
    offsets = f"offsets of {called(instance, txn)} (p{txn.part} at {txn.end}, generation {txn.generation})"
    steps.append((f"the {offsets} reach the group coordinator: {error or 'accepted'}", after))


def _end_arrives(world: World, model: Model, instance: int, member: Member, index: int, steps: Steps) -> None:
    txn, error = member.pipe[index], ""
    tid = tid_of(model, instance, txn.slot)
    if member.slots[txn.slot] == Slot.FENCED:
        error, after = ": FENCED", fenced(world, model, instance)
    elif status_of(world, tid) != Status.ONGOING:
        error, after = ": INVALID_TXN_STATE", fail(world, model, instance, index, Phase.UNCLEAR)
    else:
        after = settle_committed(end(world, tid, commit=True), instance, index)
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


def _time_out(world: World, model: Model, instance: int, index: int, faults: Steps) -> None:
    """Fault: no answer in time. The request may still arrive, or never (then nothing ever delivers it)."""
    txn = world.members[instance].pipe[index]
    world = world._replace(faults=world.faults - 1)
    call = "EndTxn" if txn.phase == Phase.ENDING else "TxnOffsetCommit"
    if Rule.R7_DEADLINE in model.out:
        after = _phase(world, instance, index, Phase.HUNG)
    else:
        after = fail(world, model, instance, index, Phase.UNCLEAR)
    faults.append((f"FAULT {called(instance, txn)} gets no answer to {call}", after))


def _in_flight(world: World, model: Model, instance: int, txn: Txn) -> World:
    """The process stops waiting for the request of ``txn``; the network does not forget it."""
    if txn.phase not in (Phase.OFFSETS, Phase.ENDING):
        return world
    tid = tid_of(model, instance, txn.slot)
    if world.members[instance].slots[txn.slot] == Slot.FENCED:
        return world
    member_id = _sender(world.members[instance], model)
    late = (
        Late(tid, txn.part, txn.end, txn.generation, member_id)
        if txn.phase == Phase.OFFSETS
        else Late(tid, -1, 0, 0, 0)
    )
    return world._replace(late=tuple(sorted((*world.late, late))))


def _sender(member: Member, model: Model) -> int:
    """The member id of a request in flight."""
    return member.member_id if Rule.INCARNATION in model.out else member.engine_id


def fail(world: World, model: Model, instance: int, index: int, phase: int, refused: bool = False) -> World:
    """A transaction failed: it and every later one that was produced are aborted by new producers of the same ids.

    ``refused``: its generation was, so it waits for another one before it is sent again."""
    member = world.members[instance]
    pipe, slots = list(member.pipe), list(member.slots)
    rule = Rule.R3_LATER_ABORTED_FIRST if phase == Phase.UNCLEAR else Rule.R4_LATER_SENT_AGAIN
    later_goes_on = rule in model.out
    for i in range(index, len(pipe)):
        txn = pipe[i]
        if txn.phase == Phase.FILLED or (i > index and later_goes_on):
            continue
        world = _in_flight(world, model, instance, txn)
        pipe[i] = txn._replace(phase=phase if i == index else Phase.ABORTING)
        slots[txn.slot] = Slot.INIT
        if i == index and phase == Phase.UNCLEAR:
            if Rule.R3_NEW_PRODUCER in model.out:
                slots[txn.slot] = Slot.READY
                world = end(world, tid_of(model, instance, txn.slot), commit=False)
            if Rule.R3_NOT_GUESSED_ABORTED in model.out:
                pipe[i] = txn._replace(phase=Phase.ABORTING)
        if not (refused and i == index):
            pipe[i] = pipe[i]._replace(generation=-2)
    return changed(world, instance, pipe=tuple(pipe), slots=tuple(slots))


def slot_steps(world: World, model: Model, instance: int, steps: Steps) -> None:
    """InitProducerId on the slots that need it; done, the work that was aborted is ready to be sent again (R4). Not
    between a loss and the next plan: another process of our name may have come, and would be fenced."""
    member = world.members[instance]
    for slot, state in enumerate(member.slots):
        tid, name = tid_of(model, instance, slot), f"{NAMES[instance]}.{slot}"
        if state != Slot.INIT or status_of(world, tid) not in (Status.EMPTY, Status.ONGOING):
            continue
        processes = any(role.kind == Kind.ACTIVE for role in member.roles)
        if Rule.R5_LOST_SETTLES_ITS_SLOTS in model.out and not member.pipe and not processes:
            continue  # when a slot is needed again, not before
        if member.applied < 0:  # the name is not known to be ours: aborted under the old epoch, no new producer yet
            if status_of(world, tid) == Status.ONGOING:
                after = end(world, tid, commit=False)
                steps.append((f"{name}, out of the group, aborts what it has open", after))
            continue
        after, settled = initialise(world, tid)
        if settled:
            now = after.members[instance]
            pipe = tuple(
                txn._replace(phase=Phase.FILLED) if txn.slot == slot and txn.phase == Phase.ABORTING else txn
                for txn in now.pipe
            )
            after = changed(after, instance, slots=put(now.slots, slot, Slot.READY), pipe=pipe)
        told = f"{name}: InitProducerId by a new producer of the same id {'settles it' if settled else 'aborts'}"
        steps.append((told, after))


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
        outcome, after = "aborted", _phase(world, instance, 0, Phase.FILLED)
    else:
        outcome, after = "overtaken by another member", lose(world, model, instance)
    steps.append((f"{called(instance, txn)} reads in the changelog what became of the transaction: {outcome}", after))


def fenced(world: World, model: Model, instance: int) -> World:
    """Another member initialised one of our ids: we looked dead to it. A new producer, and the work is sent again; but
    a commit that was asked for is looked up first (R3)."""
    for index, txn in enumerate(world.members[instance].pipe):
        member = world.members[instance]
        if member.slots[txn.slot] == Slot.FENCED:
            if txn.phase in (Phase.UNCLEAR, Phase.FOUND):
                continue  # being looked up, for which it needs no producer
            if txn.phase != Phase.FILLED:
                phase = Phase.UNCLEAR if txn.phase == Phase.ENDING else Phase.ABORTING
                return fail(world, model, instance, index, phase)
            pipe = put(member.pipe, index, txn._replace(phase=Phase.ABORTING))
            world = changed(world, instance, slots=put(member.slots, txn.slot, Slot.INIT), pipe=pipe)
    return world


def lose(world: World, model: Model, instance: int) -> World:
    """R5: what was owned is void, and we join as somebody new."""
    if Rule.INCARNATION not in model.out:
        world = engine_lost(world, model, instance)
        member = world.members[instance]
        left = outsider(model.config, member.last_id)
        return remember(world, instance, left._replace(roles=member.roles, slots=member.slots))
    member = world.members[instance]
    pipe = tuple(txn._replace(phase=Phase.FLUSHED) if txn.phase == Phase.OFFSETS else txn for txn in member.pipe)
    left = outsider(model.config, member.last_id)._replace(
        pipe=pipe, slots=member.slots, plan_members=member.plan_members,
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
    """R5: nothing more is sent, every store is closed, open transactions are settled."""
    member = world.members[instance]
    for txn in member.pipe:
        world = _in_flight(world, model, instance, txn)
    slots = list(member.slots)  # idle ones stay as they are: one that was fenced is found out when it is used
    for txn in member.pipe:
        slots[txn.slot] = Slot.INIT
    kept = Rule.R5_LOST_IS_NOT_REVOKED in model.out
    roles = tuple(
        role._replace(kind=Kind.KEPT) if kept and role.kind == Kind.ACTIVE else Role() for role in member.roles
    )
    return changed(world, instance, engine_id=0, roles=roles, pipe=(), slots=tuple(slots))
