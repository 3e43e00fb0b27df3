"""Transactions that fail, and how their slots are settled: aborted, opened again, fenced, lost with the membership."""

from __future__ import annotations

from .broker import end, initialise, status_of
from .rules import Fault, Model, Rule
from .search import put
from .state import (
    NAMES,
    UNDER_WAY,
    Event,
    Kind,
    Late,
    Member,
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


def in_flight(world: World, model: Model, instance: int, txn: Txn) -> World:
    """The process stops waiting for the requests of ``txn``; the network does not forget them."""
    if txn.phase not in UNDER_WAY or world.members[instance].slots[txn.slot] == Slot.FENCED:
        return world
    tid, sent = tid_of(model, instance, txn.slot), txn._replace(slot=-1, phase=Phase.FILLED)
    late = []
    if txn.phase in (Phase.SENDING, Phase.ACCEPTED, Phase.REFUSED):
        late.append(Late(tid, Request.RECORDS, sent._replace(generation=-2)))
    if txn.phase in (Phase.SENDING, Phase.LANDED):
        late.append(Late(tid, Request.OFFSETS, sent, sender(world.members[instance], model)))
    if txn.phase == Phase.ENDING:
        late.append(Late(tid, Request.COMMIT))
    return world._replace(late=tuple(sorted({*world.late, *late})))


def sender(member: Member, model: Model) -> int:
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
            world = in_flight(world, model, instance, txn)
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


def _abort(world: World, model: Model, instance: int, slot: int, in_use: bool, steps: Steps, luck: Steps) -> None:
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
        world = in_flight(world, model, instance, txn)
        if txn.slot >= 0 and slots[txn.slot] in (Slot.READY, Slot.FENCED):
            in_order = slots[txn.slot] == Slot.READY and txn.phase in (Phase.FLUSHED, Phase.AGAIN)
            slots[txn.slot] = Slot.ABORT if in_order else Slot.INIT
    kept = Rule.R5_LOST_IS_NOT_REVOKED in model.out
    roles = tuple(
        role._replace(kind=Kind.KEPT) if kept and role.kind == Kind.ACTIVE else Role() for role in member.roles
    )
    return changed(world, instance, engine_id=0, roles=roles, pipe=(), slots=tuple(slots))
