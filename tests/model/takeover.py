"""Section 7, taking a partition over: fence, barrier, restore, start; and section 8, the start at a release marker."""

from __future__ import annotations

from .broker import initialise, remember
from .pipeline import Steps
from .rules import Model, Rule
from .state import (
    ACTIVE,
    END,
    FENCING,
    IN,
    INCOMING,
    NAMES,
    NO_MARK,
    NONE,
    ONGOING,
    READING,
    RELEASING,
    STANDBY,
    TOOK,
    Broken,
    Mark,
    Note,
    Role,
    World,
    put,
)


def takeover_steps(world: World, model: Model, instance: int, steps: Steps) -> None:
    """The next step of each partition that one member is preparing."""
    member = world.members[instance]
    for part, role in enumerate(member.roles):
        under_way = role.kind in (END, READING) or (role.kind == FENCING and role.a)
        if under_way and _opened_again(world, model, instance):
            # A zombie's own InitProducerId (R3, R4) may come after our fence, and its next transaction holds us up.
            steps.append((("fence_again", instance, part), _role(world, instance, part, _phase(role, FENCING))))
        if role.kind == FENCING:
            _fence(world, model, instance, part, role, steps)
        elif role.kind == END:
            end = len(world.logs[part].entries)
            label = ("end_offset", instance, part, end)
            steps.append((label, _role(world, instance, part, _phase(role, READING, end, role.b))))
        elif role.kind == READING:
            if role.a == 0 or Rule.S7_POSITION_REACHES_END in model.out:
                log = world.logs[part]
                _start(world, model, instance, part, (log.offset, log.count), role, steps)
        elif role.kind != INCOMING and Rule.S7_BARRIER_BEFORE_RESTORE in model.out:
            _restored_early(world, model, instance, part, role, steps)
        if role.since >= 0:  # also when it takes over what it awaited: whichever comes first
            _await_marker(world, model, instance, part, role, steps)


def _phase(role: Role, kind: int, a: int = 0, b: int = 0) -> Role:
    """Another step of the same take-over."""
    return role._replace(kind=kind, a=a, b=b)


def _role(world: World, instance: int, part: int, role: Role) -> World:
    member = world.members[instance]
    return remember(world, instance, member._replace(roles=put(member.roles, part, role)))


def _fence(world: World, model: Model, instance: int, part: int, role: Role, steps: Steps) -> None:
    """A throw-away InitProducerId on every id of every instance that is not in the plan, one after the other."""
    pool = model.config.pool
    listed = world.members[instance].plan_members
    tid = role.a
    while tid < len(world.tids) and listed & (1 << tid // pool):
        tid += 1
    if tid == len(world.tids) or Rule.S7_FENCE in model.out:
        _stable(world, model, instance, part, role, steps)  # nothing (more) to fence: no step of its own
        return
    if world.tids[tid][0] not in (0, ONGOING):
        return  # CONCURRENT_TRANSACTIONS: its markers are being written
    if world.tids[tid][0] == 0 and not model.config.fence_idle:
        steps.append(
            (("fence", instance, tid, "idle, left alone"), _role(world, instance, part, _phase(role, FENCING, tid + 1)))
        )
        return
    after, settled = initialise(world, tid)
    after = _role(after, instance, part, _phase(role, FENCING, tid + 1 if settled else tid))
    steps.append((("fence", instance, tid, "settled" if settled else "aborts"), after))


def _opened_again(world: World, model: Model, instance: int) -> bool:
    if Rule.S7_FENCE_WHILE_WAITING in model.out or Rule.S7_FENCE in model.out:
        return False
    listed, pool = world.members[instance].plan_members, model.config.pool
    return any(status == ONGOING and not listed & (1 << tid // pool) for tid, (status, _) in enumerate(world.tids))


def _stable(world: World, model: Model, instance: int, part: int, role: Role, steps: Steps) -> None:
    """OffsetFetch(require_stable): waits while a transaction holds an offset of the partition."""
    if not world.group.pending[part] or Rule.S7_STABLE_OFFSET in model.out:
        offset = world.group.committed[part]
        after = _role(world, instance, part, _phase(role, END, 0, offset))
        steps.append((("stable_offset", instance, part, offset), after))


def _start(
    world: World, model: Model, instance: int, part: int, state: tuple[int, int], role: Role, steps: Steps
) -> None:
    """Section 6: state and offset are one cut of one log; a group offset that differs is reported, never obeyed."""
    (offset, count), groups = state, role.b
    member = world.members[instance]
    current = (member.member_id, member.generation) == (world.group.ids[instance], world.group.generation)
    if groups != offset and current and not world.forgot:
        raise Broken(
            f"{NAMES[instance]} takes p{part} over at {offset} and reports a mismatch with the group's offset "
            f"{groups}, although the coordinator never lost anything"
        )
    if Rule.S6_OFFSET_IN_CHANGELOG in model.out:
        offset = max(groups, 0)
    steps.append((("start", instance, part, offset), _role(world, instance, part, _begun(role, offset, count))))


def _begun(role: Role, offset: int, count: int) -> Role:
    """It works on the partition; an order that came meanwhile is carried out next."""
    return Role(ACTIVE if role.mark == NO_MARK else RELEASING, offset, count, role.mark)


def _await_marker(world: World, model: Model, instance: int, part: int, role: Role, steps: Steps) -> None:
    log = world.logs[part]
    if _is_for(world, model, instance, part, log.mark, role.since) or (
        log.buried != NO_MARK and _is_for(world, model, instance, part, log.buried, role.since)
    ):
        after = _by_marker(world, instance, part, log.offset, log.count)
        steps.append((("start_at_marker", instance, part, log.offset), after))
    elif Rule.S8_MARKER_COMMITTED in model.out:
        for entry in log.entries:
            if _is_for(world, model, instance, part, entry.mark, role.since):
                after = _by_marker(world, instance, part, entry.end, entry.count)
                steps.append((("start_at_marker", instance, part, entry.end, "not committed"), after))


def _by_marker(world: World, instance: int, part: int, offset: int, count: int) -> World:
    member = world.members[instance]
    role = member.roles[part]
    notes = member.notes
    if role.kind == INCOMING:  # else the group said already that it is ours
        notes = (*notes, Note(TOOK, part, NO_MARK, member.engine_id))
    roles = put(member.roles, part, _begun(role, offset, count))
    return remember(world, instance, member._replace(roles=roles, notes=notes))


def _is_for(world: World, model: Model, instance: int, part: int, mark: Mark, told: int) -> bool:
    if mark.instance != instance:
        return False
    member = world.members[instance]
    if model.config.lag and Rule.S8_START_IS_ASKED not in model.out:
        held = member.held[part]
        if member.member_id != member.engine_id or not (held.owned or 0 <= held.since <= mark.generation):
            return False
    if mark.member_id != member.engine_id and Rule.S8_MARKER_TO_MEMBER_ID not in model.out:
        return False
    return mark.generation >= told or Rule.S8_MARKER_OF_GENERATION in model.out


def _restored_early(world: World, model: Model, instance: int, part: int, role: Role, steps: Steps) -> None:
    """A standby that took what it had read for everything, and did not finish at the take-over."""
    member, log = world.members[instance], world.logs[part]
    if role.kind == NONE and member.join == IN:
        early = _role(world, instance, part, Role(STANDBY, log.offset, log.count))
        steps.append((("restore_early", instance, part, log.offset), early))
    elif role.kind == STANDBY and member.join == IN and member.held[part].owned:
        after = _role(world, instance, part, Role(ACTIVE, role.a, role.b))
        steps.append((("start", instance, part, role.a), after))
