"""Section 7, taking a partition over: fence, barrier, restore, start; and section 8, the start at a release marker."""

from __future__ import annotations

from .broker import initialise
from .failures import Steps
from .rules import Model, Rule
from .search import Broken, put
from .state import NAMES, NO_MARK, Done, Join, Kind, Mark, Note, Role, Status, World, changed


def takeover_steps(world: World, model: Model, instance: int, steps: Steps) -> None:
    """The next step of each partition that one member is preparing."""
    name = NAMES[instance]
    for part, role in enumerate(world.members[instance].roles):
        under_way = role.kind in (Kind.END, Kind.READING) or (role.kind == Kind.FENCING and role.a)
        if under_way and _opened_again(world, model, instance):
            # A zombie's own InitProducerId (R3, R4) may come after our fence, and its next transaction holds us up.
            told = f"{name}, taking p{part} over, sees a departed member's transaction and goes back to the fence"
            steps.append((told, _role(world, instance, part, _phase(role, Kind.FENCING))))
        if role.kind == Kind.FENCING:
            _fence(world, model, instance, part, role, steps)
        elif role.kind == Kind.END:
            end = len(world.logs[part].entries)
            told = f"{name} reads the high watermark of changelog p{part}: {end} transactions not readable yet"
            steps.append((told, _role(world, instance, part, _phase(role, Kind.READING, end, role.b))))
        elif role.kind == Kind.READING:
            if role.a == 0 or Rule.S7_POSITION_REACHES_END in model.out:
                _start(world, model, instance, part, role, steps)
        elif role.kind != Kind.INCOMING and Rule.S7_BARRIER_BEFORE_RESTORE in model.out:
            _restored_early(world, instance, part, role, steps)
        if role.since >= 0:  # also when it takes over what it awaited: whichever comes first
            _await_marker(world, model, instance, part, role, steps)


def _phase(role: Role, kind: int, a: int = 0, b: int = 0) -> Role:
    """Another step of the same take-over."""
    return role._replace(kind=kind, a=a, b=b)


def _role(world: World, instance: int, part: int, role: Role) -> World:
    return changed(world, instance, roles=put(world.members[instance].roles, part, role))


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
    told = f"{NAMES[instance]} fences the transactional id {NAMES[tid // pool]}.{tid % pool}: "
    status = world.tids[tid][0]
    if status == Status.EMPTY:
        steps.append((told + "idle, left alone", _role(world, instance, part, _phase(role, Kind.FENCING, tid + 1))))
    elif status == Status.ONGOING:  # else CONCURRENT_TRANSACTIONS: its markers are being written
        after, _ = initialise(world, tid)
        steps.append((told + "aborts", _role(after, instance, part, _phase(role, Kind.FENCING, tid))))


def _opened_again(world: World, model: Model, instance: int) -> bool:
    if Rule.S7_FENCE_WHILE_WAITING in model.out or Rule.S7_FENCE in model.out:
        return False
    listed, pool = world.members[instance].plan_members, model.config.pool
    ongoing = (tid for tid, (status, _) in enumerate(world.tids) if status == Status.ONGOING)
    return any(not listed & (1 << tid // pool) for tid in ongoing)


def _stable(world: World, model: Model, instance: int, part: int, role: Role, steps: Steps) -> None:
    """OffsetFetch(require_stable): waits while a transaction holds an offset of the partition."""
    if not world.group.pending[part] or Rule.S7_STABLE_OFFSET in model.out:
        offset = world.group.committed[part]
        told = f"{NAMES[instance]} reads the group's offset of p{part}: {offset}"
        steps.append((told, _role(world, instance, part, _phase(role, Kind.END, 0, offset))))


def _start(world: World, model: Model, instance: int, part: int, role: Role, steps: Steps) -> None:
    """Section 6: state and offset are one cut of one log; a group offset that differs is reported, never obeyed."""
    member, log, groups = world.members[instance], world.logs[part], role.b
    current = (member.member_id, member.generation) == (world.group.ids[instance], world.group.generation)
    if groups != log.offset and current and not world.forgot:
        raise Broken(
            f"{NAMES[instance]} takes p{part} over at {log.offset} and reports a mismatch with the group's offset "
            f"{groups}, although the coordinator never lost anything"
        )
    offset = max(groups, 0) if Rule.S6_OFFSET_IN_CHANGELOG in model.out else log.offset
    after = _role(world, instance, part, _begun(role, offset, log.count))
    steps.append((f"{NAMES[instance]} has restored p{part} and starts at {offset}", after))


def _begun(role: Role, offset: int, count: int) -> Role:
    """It works on the partition; an order that came meanwhile is carried out next."""
    return Role(Kind.ACTIVE if role.mark == NO_MARK else Kind.RELEASING, offset, count, role.mark)


def _await_marker(world: World, model: Model, instance: int, part: int, role: Role, steps: Steps) -> None:
    log = world.logs[part]
    told = f"{NAMES[instance]} starts p{part} by the release marker"
    if any(_is_for(world, model, instance, part, mark, role.since) for mark in (log.mark, log.buried)):
        steps.append((f"{told}, at {log.offset}", _by_marker(world, instance, part, log.offset, log.count)))
    elif Rule.S8_MARKER_COMMITTED in model.out:
        for entry in log.entries:
            if _is_for(world, model, instance, part, entry.mark, role.since):
                after = _by_marker(world, instance, part, entry.end, entry.count)
                steps.append((f"{told} that is not committed, at {entry.end}", after))


def _by_marker(world: World, instance: int, part: int, offset: int, count: int) -> World:
    member = world.members[instance]
    role, notes = member.roles[part], member.notes
    if role.kind == Kind.INCOMING:  # else the group said already that it is ours
        notes = (*notes, Note(Done.TOOK, part, NO_MARK, member.engine_id))
    return changed(world, instance, roles=put(member.roles, part, _begun(role, offset, count)), notes=notes)


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


def _restored_early(world: World, instance: int, part: int, role: Role, steps: Steps) -> None:
    """A standby that took what it had read for everything, and did not finish at the take-over."""
    member, log, name = world.members[instance], world.logs[part], NAMES[instance]
    if role.kind == Kind.NONE and member.join == Join.IN:
        early = _role(world, instance, part, Role(Kind.STANDBY, log.offset, log.count))
        steps.append((f"{name}, a standby, restores p{part} up to {log.offset}", early))
    elif role.kind == Kind.STANDBY and member.join == Join.IN and member.held[part].owned:
        after = _role(world, instance, part, Role(Kind.ACTIVE, role.a, role.b))
        steps.append((f"{name} starts p{part} at {role.a}", after))
