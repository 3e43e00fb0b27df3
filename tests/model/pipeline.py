"""A member's transactions: filled, produced, flushed, offsets sent, committed; and every way in which that fails."""

from __future__ import annotations

from .broker import (
    add_offset,
    append,
    end,
    initialise,
    may_commit_offsets,
    remember,
    status_of,
)
from .rules import Fault, Model, Rule
from .state import (
    ABORTING,
    ACCEPTED,
    ACTIVE,
    EMPTY,
    ENDING,
    FENCED,
    FENCING,
    FILLED,
    FLUSHED,
    FOUND,
    GONE,
    HANDED_OVER,
    HUNG,
    INIT,
    KEPT,
    NAMES,
    NO_MARK,
    NONE,
    NOT_HELD,
    OFFSETS,
    ONGOING,
    OUT,
    READY,
    RELEASED,
    RELEASING,
    UNCLEAR,
    Broken,
    Entry,
    Event,
    Late,
    Member,
    Note,
    Role,
    Txn,
    World,
    outsider,
    put,
)

Steps = list[tuple[tuple[object, ...], World]]
"""What is possible next: (name of the action, instance, details...) and the state it leads to."""


def tid_of(model: Model, instance: int, slot: int) -> int:
    """The transactional id of a slot."""
    return instance * model.config.pool + slot


def free_slot(member: Member) -> int:
    """A slot that looks ready and is not in the pipeline, or -1. (That it is fenced shows when it is used.)"""
    used = [txn.slot for txn in member.pipe]
    for slot, state in enumerate(member.slots):
        if state != INIT and slot not in used:
            return slot
    return -1


def intake_steps(world: World, model: Model, instance: int, steps: Steps) -> None:
    """Fill a transaction with the next record of a partition, or with a release marker."""
    member = world.members[instance]
    slot = free_slot(member)
    if slot < 0 or len(member.pipe) >= model.config.pool:
        return
    for part, role in enumerate(member.roles):
        if role.kind == ACTIVE and role.a < model.config.records:
            if role.b != role.a:
                raise Broken(f"the store of p{part} at {NAMES[instance]} counts {role.b} at position {role.a}")
            txn = Txn(slot, FILLED, part, role.a, role.a + 1, role.b + 1)
            roles = put(member.roles, part, Role(ACTIVE, role.a + 1, role.b + 1))
            steps.append((("fill", instance, part, role.a), _fill(world, instance, member, roles, txn)))
        elif role.kind == RELEASING:
            txn = Txn(slot, FILLED, part, role.a, role.a, role.b, mark=role.mark)
            kind = RELEASED if Rule.S8_DONOR_STOPS not in model.out else ACTIVE
            roles = put(member.roles, part, role._replace(kind=kind))
            steps.append((("fill_release", instance, part, role.a), _fill(world, instance, member, roles, txn)))


def _fill(world: World, instance: int, member: Member, roles: tuple[Role, ...], txn: Txn) -> World:
    return remember(world, instance, member._replace(roles=roles, pipe=(*member.pipe, txn)))


def pipeline_steps(world: World, model: Model, instance: int, steps: Steps, faults: Steps) -> None:
    """Whatever the transactions of one member may do next."""
    member = world.members[instance]
    flushed = True  # every transaction before this one
    for index, txn in enumerate(member.pipe):
        first = index == 0 or Rule.R2_COMMIT_IN_ORDER in model.out
        if txn.phase == FILLED:
            if flushed or Rule.R2_PRODUCE_IN_ORDER in model.out:
                _produce(world, model, instance, member, index, steps)
        elif txn.phase == FLUSHED:
            if first and (member.member_id or model.config.lag):
                _send_offsets(world, model, instance, member, index, steps)
        elif txn.phase == OFFSETS:
            _offsets_arrive(world, model, instance, member, index, steps)
        elif txn.phase == ACCEPTED:
            if first:
                steps.append((("end_transaction", instance, txn.slot), _phase(world, instance, index, ENDING)))
        elif txn.phase == ENDING:
            _end_arrives(world, model, instance, member, index, steps)
        elif txn.phase in (UNCLEAR, FOUND) and index == 0:
            _look_up(world, model, instance, member, txn, steps)
        if txn.phase in (OFFSETS, ENDING) and world.faults and Fault.TIMEOUT in model.config.kinds:
            _time_out(world, model, instance, index, faults)
        flushed = flushed and FLUSHED <= txn.phase <= ENDING


def _phase(world: World, instance: int, index: int, phase: int) -> World:
    member = world.members[instance]
    txn = member.pipe[index]._replace(phase=phase)
    return remember(world, instance, member._replace(pipe=put(member.pipe, index, txn)))


def _produce(world: World, model: Model, instance: int, member: Member, index: int, steps: Steps) -> None:
    """All records land and are acknowledged. Refused work waits for another snapshot than the one refused (R4)."""
    txn = member.pipe[index]
    if txn.generation == member.generation and member.generation >= 0:
        return
    label = ("produce", instance, txn.slot, txn.part, txn.start, txn.end)
    if member.slots[txn.slot] == FENCED:
        steps.append(((*label, "refused"), fenced(world, model, instance)))
        return
    tid = tid_of(model, instance, txn.slot)
    if member.slots[txn.slot] != READY or status_of(world, tid) not in (EMPTY, ONGOING):
        return
    entry = Entry(tid, False, txn.start, txn.end, txn.count, txn.mark)
    after = append(_phase(world, instance, index, FLUSHED), txn.part, entry)
    steps.append((label, after))


def _send_offsets(world: World, model: Model, instance: int, member: Member, index: int, steps: Steps) -> None:
    """The snapshot is read once, right before; the request carries it from here on."""
    txn = member.pipe[index]
    if member.member_id != member.engine_id and Rule.INCARNATION not in model.out:
        steps.append((("engine_lost", instance), engine_lost(world, model, instance)))
        return
    generation = -1 if Rule.R1_REAL_METADATA in model.out else member.generation
    pipe = put(member.pipe, index, txn._replace(phase=OFFSETS, generation=generation))
    label = ("send_offsets", instance, txn.slot, generation)
    steps.append((label, remember(world, instance, member._replace(pipe=pipe))))


def _offsets_arrive(world: World, model: Model, instance: int, member: Member, index: int, steps: Steps) -> None:
    txn = member.pipe[index]
    label = ("offsets_arrive", instance, txn.slot, txn.part, txn.end, txn.generation)
    if member.slots[txn.slot] == FENCED:
        steps.append(((*label, "FENCED"), fenced(world, model, instance)))
        return
    error = may_commit_offsets(world, instance, txn.generation, _sender(member, model))
    tid = tid_of(model, instance, txn.slot)
    if error == "UNKNOWN_MEMBER_ID":
        steps.append(((*label, error), lose(world, model, instance)))
    elif error and Rule.R4_WAIT_FOR_SNAPSHOT in model.out:
        dropped = fail(world, model, instance, index, ABORTING)
        kept = dropped.members[instance]
        steps.append(((*label, error), remember(dropped, instance, kept._replace(pipe=kept.pipe[1:]))))
    elif error:
        steps.append(((*label, error), fail(world, model, instance, index, ABORTING, refused=True)))
    else:
        after = add_offset(_phase(world, instance, index, ACCEPTED), tid, txn.part, txn.end)
        steps.append(((*label, "accepted"), after))


def _end_arrives(world: World, model: Model, instance: int, member: Member, index: int, steps: Steps) -> None:
    txn = member.pipe[index]
    label = ("end_arrives", instance, txn.slot, txn.part, txn.start, txn.end)
    tid = tid_of(model, instance, txn.slot)
    if member.slots[txn.slot] == FENCED:
        steps.append(((*label, "FENCED"), fenced(world, model, instance)))
    elif status_of(world, tid) != ONGOING:
        steps.append(((*label, "INVALID_TXN_STATE"), fail(world, model, instance, index, UNCLEAR)))
    else:
        steps.append((label, settle_committed(end(world, tid, commit=True), instance, index)))


def settle_committed(world: World, instance: int, index: int) -> World:
    """The member knows that the transaction is committed."""
    member = world.members[instance]
    txn = member.pipe[index]
    roles = member.roles
    notes = member.notes
    if txn.mark != NO_MARK:
        role = roles[txn.part]
        notes = (*notes, Note(HANDED_OVER, txn.part, txn.mark, member.engine_id))
        if role.kind == RELEASED:
            # Withdrawn while the marker was under way: it is ours, but the receiver may have worked on it meanwhile.
            after = Role(GONE, role.a, role.b, txn.mark) if role.mark == txn.mark else Role(FENCING, mark=role.mark)
            roles = put(roles, txn.part, after)
    pipe = (*member.pipe[:index], *member.pipe[index + 1 :])
    return remember(world, instance, member._replace(pipe=pipe, roles=roles, notes=notes))


def _time_out(world: World, model: Model, instance: int, index: int, faults: Steps) -> None:
    """Fault: no answer in time. The request may still arrive, or never (then nothing ever delivers it)."""
    txn = world.members[instance].pipe[index]
    world = world._replace(faults=world.faults - 1)
    label = ("time_out", instance, txn.slot, "EndTxn" if txn.phase == ENDING else "TxnOffsetCommit")
    if Rule.R7_DEADLINE in model.out:
        faults.append((label, _phase(world, instance, index, HUNG)))
        return
    faults.append((label, fail(world, model, instance, index, UNCLEAR)))


def _in_flight(world: World, model: Model, instance: int, txn: Txn) -> World:
    """The process stops waiting for the request of ``txn``; the network does not forget it."""
    if txn.phase not in (OFFSETS, ENDING):
        return world
    tid = tid_of(model, instance, txn.slot)
    if world.members[instance].slots[txn.slot] == FENCED:
        return world
    member_id = _sender(world.members[instance], model)
    late = Late(tid, txn.part, txn.end, txn.generation, member_id) if txn.phase == OFFSETS else Late(tid, -1, 0, 0, 0)
    return world._replace(late=tuple(sorted((*world.late, late))))


def _sender(member: Member, model: Model) -> int:
    """The member id of a request in flight."""
    return member.member_id if Rule.INCARNATION in model.out else member.engine_id


def fail(world: World, model: Model, instance: int, index: int, phase: int, refused: bool = False) -> World:
    """A transaction failed: it and every later one that was produced are aborted by new producers of the same ids.

    ``refused``: its generation was, so it waits for another one before it is sent again."""
    member = world.members[instance]
    pipe, slots = list(member.pipe), list(member.slots)
    for i in range(index, len(pipe)):
        txn = pipe[i]
        if txn.phase == FILLED or (i > index and _later_goes_on(model, phase)):
            continue
        world = _in_flight(world, model, instance, txn)
        pipe[i] = txn._replace(phase=phase if i == index else ABORTING)
        slots[txn.slot] = INIT
        if i == index and phase == UNCLEAR:
            if Rule.R3_NEW_PRODUCER in model.out:
                slots[txn.slot] = READY
                world = end(world, tid_of(model, instance, txn.slot), commit=False)
            if Rule.R3_NOT_GUESSED_ABORTED in model.out:
                pipe[i] = txn._replace(phase=ABORTING)
        if not (refused and i == index):
            pipe[i] = pipe[i]._replace(generation=-2)
    return remember(world, instance, member._replace(pipe=tuple(pipe), slots=tuple(slots)))


def _later_goes_on(model: Model, phase: int) -> bool:
    rule = Rule.R3_LATER_ABORTED_FIRST if phase == UNCLEAR else Rule.R4_LATER_SENT_AGAIN
    return rule in model.out


def slot_steps(world: World, model: Model, instance: int, steps: Steps) -> None:
    """InitProducerId on the slots that need it; done, the work that was aborted is ready to be sent again (R4). Not
    between a loss and the next plan: another process of our name may have come, and would be fenced."""
    member = world.members[instance]
    for slot, state in enumerate(member.slots):
        if state != INIT:
            continue
        tid = tid_of(model, instance, slot)
        if status_of(world, tid) not in (EMPTY, ONGOING):
            continue
        if Rule.R5_LOST_SETTLES_ITS_SLOTS in model.out and not member.pipe and not _processes(member):
            continue  # when a slot is needed again, not before
        if member.applied < 0:  # the name is not known to be ours: aborted under the old epoch, no new producer yet
            if status_of(world, tid) == ONGOING:
                steps.append((("abort", instance, slot), end(world, tid, commit=False)))
            continue
        after, settled = initialise(world, tid)
        if settled:
            now = after.members[instance]
            pipe = tuple(
                txn._replace(phase=FILLED if index or not model.config.look_again else UNCLEAR)
                if txn.slot == slot and txn.phase == ABORTING
                else txn
                for index, txn in enumerate(now.pipe)
            )
            after = remember(after, instance, now._replace(slots=put(now.slots, slot, READY), pipe=pipe))
        steps.append((("init_producer", instance, slot, "settled" if settled else "aborts"), after))


def _processes(member: Member) -> bool:
    return any(role.kind == ACTIVE for role in member.roles)


def _look_up(world: World, model: Model, instance: int, member: Member, txn: Txn, steps: Steps) -> None:
    """R3: the changelog up to its high watermark says which way the unclear transaction went."""
    tid = tid_of(model, instance, txn.slot)
    if member.slots[txn.slot] == FENCED and model.config.fenced_is_lost:
        steps.append((("look_up", instance, txn.slot, "fenced"), lose(world, model, instance)))
        return
    if member.slots[txn.slot] == INIT or status_of(world, tid) != EMPTY:  # fenced or not: reading needs no producer
        return
    if Rule.R3_NOT_GUESSED_COMMITTED in model.out:
        steps.append((("guess", instance, txn.slot, "committed"), settle_committed(world, instance, 0)))
        return
    log = world.logs[txn.part]
    # The offset record carries member and serial, so the first reading that finds it is an answer; only "it is not
    # there" takes reading up to the high watermark.
    ours = log.writer == instance and log.offset == txn.end and log.mark == txn.mark
    if log.entries and txn.phase != FOUND:
        return
    if txn.phase == FOUND or ours:
        steps.append((("look_up", instance, txn.slot, "committed"), settle_committed(world, instance, 0)))
    elif log.offset == txn.start:
        steps.append((("look_up", instance, txn.slot, "aborted"), _phase(world, instance, 0, FILLED)))
    else:
        steps.append((("look_up", instance, txn.slot, "overtaken by another member"), lose(world, model, instance)))


def fenced(world: World, model: Model, instance: int) -> World:
    """Another member initialised one of our ids: we looked dead to it. A new producer, and the work is sent again; but
    a commit that was asked for is looked up first (R3)."""
    if model.config.fenced_is_lost:
        return lose(world, model, instance)
    for index, txn in enumerate(world.members[instance].pipe):
        if world.members[instance].slots[txn.slot] == FENCED:
            if txn.phase in (UNCLEAR, FOUND):
                continue  # being looked up, for which it needs no producer
            if txn.phase != FILLED:
                return fail(world, model, instance, index, UNCLEAR if txn.phase == ENDING else ABORTING)
            member = world.members[instance]
            member = member._replace(
                slots=put(member.slots, txn.slot, INIT),
                pipe=put(member.pipe, index, txn._replace(phase=ABORTING)),
            )
            world = remember(world, instance, member)
    return world


def lose(world: World, model: Model, instance: int) -> World:
    """R5: what was owned is void, and we join as somebody new."""
    if Rule.INCARNATION not in model.out:
        world = engine_lost(world, model, instance)
    member = world.members[instance]
    if Rule.INCARNATION in model.out:
        nothing = (Role(),) * len(member.roles)
        pipe = tuple(txn._replace(phase=FLUSHED) if txn.phase == OFFSETS else txn for txn in member.pipe)
        return remember(
            world,
            instance,
            member._replace(
                member_id=0,
                join=OUT,
                generation=-1,
                roles=nothing,
                pipe=pipe,
                rejoin=False,
                applied=-1,
                held=(NOT_HELD,) * len(member.held),
                notes=(),
            ),
        )
    left = outsider(model.config, member.last_id)
    return remember(world, instance, left._replace(roles=member.roles, slots=member.slots))


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
        slots[txn.slot] = INIT
    kept = Rule.R5_LOST_IS_NOT_REVOKED in model.out
    roles = tuple(role._replace(kind=KEPT) if kept and role.kind == ACTIVE else Role(NONE) for role in member.roles)
    return remember(world, instance, member._replace(engine_id=0, roles=roles, pipe=(), slots=tuple(slots)))
