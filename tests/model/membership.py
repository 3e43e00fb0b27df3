"""The group protocol: sessions, joins with claims, the leader's plan, snapshots; and who may own what when.

The plan is made from the claims that came with JoinGroup. The leader keeps what is owned or being taken over where it
is, gives a partition without owner to the member that awaits it, and may move a partition (budget) either by a release
marker or by a revoke.
"""

from __future__ import annotations

from itertools import product

from .broker import remember
from .pipeline import Steps, lose
from .rules import Fault, Model, Rule
from .state import (
    ABORTING,
    ACTIVE,
    AWAIT,
    AWAITED,
    FENCING,
    FILLED,
    IN,
    INCOMING,
    INIT,
    JOINED,
    JOINING,
    KEPT,
    MEMBERS,
    NO_CLAIM,
    NONE,
    NOTHING,
    OUT,
    OWN,
    OWNED,
    RELEASE,
    RELEASED,
    RELEASING,
    REVOKE,
    REVOKING,
    STANDBY,
    TAKE_OVER,
    TAKING,
    Group,
    Mark,
    Member,
    Role,
    World,
    put,
)

_CLAIM_OF = {ACTIVE: OWNED, RELEASING: OWNED, RELEASED: OWNED, REVOKING: OWNED, INCOMING: AWAITED}
_CLAIM_OF.update(dict.fromkeys(TAKE_OVER, TAKING))


def membership_steps(world: World, model: Model, instance: int, steps: Steps, luck: Steps) -> None:
    """Whatever one living member may do next in the group protocol."""
    member, group = world.members[instance], world.group
    bit = 1 << instance
    known = member.member_id and group.ids[instance] == member.member_id
    if member.member_id and not known:
        steps.append((("notice_lost", instance), lose(world, model, instance)))
    elif member.join == IN and member.generation != group.generation:
        # Only a coordinator that went back in time: the heartbeat is answered with ILLEGAL_GENERATION.
        steps.append((("notice_lost", instance), lose(world, model, instance)))
    restless = model.config.restless and world.moves
    if restless and member.join == IN and known and not member.rejoin and not group.preparing:
        nudged = remember(world._replace(moves=world.moves - 1), instance, member._replace(rejoin=True))
        luck.append((("user_data", instance), nudged))
    if member.join == JOINING and known and not group.joined & bit:
        # A new snapshot, even when its number is one that was refused before: numbers repeat after a loss of memory.
        pipe = tuple(txn._replace(generation=-2) if txn.phase in (FILLED, ABORTING) else txn for txn in member.pipe)
        after = member._replace(join=JOINED, generation=group.generation, pipe=pipe)
        steps.append((("join_response", instance, group.generation), remember(world, instance, after)))
    elif member.join == JOINED and known and not group.preparing:
        steps.append((("sync", instance, group.generation), _apply_plan(world, model, instance)))
    if _may_join(world, model, instance):
        steps.append((("join", instance), _join(world, instance)))
    for part, role in enumerate(member.roles):
        if role.kind == REVOKING and _revoke_is_over(member, model, part):
            after = member._replace(roles=put(member.roles, part, Role()), rejoin=True)
            steps.append((("revoked", instance, part), remember(world, instance, after)))


def _may_join(world: World, model: Model, instance: int) -> bool:
    member, group = world.members[instance], world.group
    if member.member_id == 0:
        return True
    if group.ids[instance] != member.member_id or group.joined & (1 << instance) or member.join not in (JOINED, IN):
        return False
    if not (group.preparing or (member.join == IN and member.rejoin)):
        return False
    if any(role.kind == REVOKING for role in member.roles):
        return False  # the barrier comes before the answer to the group
    # What we claim must not depend on a release marker under way.
    return Rule.S8_CLAIMS_ARE_FROZEN in model.out or not any(role.kind == RELEASED for role in member.roles)


def _revoke_is_over(member: Member, model: Model, part: int) -> bool:
    if Rule.S8_REVOKE_BARRIER in model.out:
        return True
    return not any(txn.part == part for txn in member.pipe)


def _join(world: World, instance: int) -> World:
    """JoinGroup, with what we own, take over, or await now. A new member also starts a rebalance."""
    member, group = world.members[instance], world.group
    last = member.last_id
    if member.member_id == 0:
        last += 1
        member = member._replace(member_id=last, last_id=last)
    claims = tuple(_CLAIM_OF.get(role.kind, NO_CLAIM) for role in member.roles)
    group = group._replace(
        preparing=True,
        ids=put(group.ids, instance, last),
        joined=group.joined | (1 << instance),
        claims=put(group.claims, instance, claims),
    )
    return remember(world._replace(group=group), instance, member._replace(join=JOINING, rejoin=False))


def coordinator_steps(world: World, model: Model, steps: Steps, faults: Steps) -> None:
    """Rebalances end; sessions expire; the coordinator forgets."""
    group = world.group
    if group.preparing and all(not id_ or group.joined & (1 << i) for i, id_ in enumerate(group.ids)):
        for world_after, plan in _plans(world, model):
            after = group._replace(
                generation=group.generation + 1, preparing=False, joined=0, plan=plan,
                claims=((NO_CLAIM,) * model.config.partitions,) * MEMBERS,
            )  # fmt: skip
            if world.earlier:
                world_after = world_after._replace(
                    earlier=(world.earlier[-1], after._replace(pending=((),) * len(after.pending)))
                )
            steps.append((("plan", group.generation + 1, plan), world_after._replace(group=after)))
    kinds = model.config.kinds
    for instance, id_ in enumerate(group.ids):
        member = world.members[instance]
        if not id_:
            continue
        evicted = world._replace(group=_evict(group, instance))
        if not member.alive or member.member_id != id_:
            steps.append((("expire_session", instance), evicted))
        elif world.faults and Fault.EVICT in kinds:
            faults.append((("evict", instance), evicted._replace(faults=world.faults - 1)))
    if not world.faults:
        return
    if Fault.AMNESIA in kinds and (any(group.ids) or any(group.committed)):
        parts = model.config.partitions
        empty = group._replace(
            generation=0, preparing=False, ids=(0,) * MEMBERS, joined=0, plan=((NOTHING,) * parts,) * MEMBERS,
            claims=((NO_CLAIM,) * parts,) * MEMBERS, committed=(-1,) * parts, pending=((),) * parts,
        )  # fmt: skip
        faults.append((("amnesia",), world._replace(group=empty, faults=world.faults - 1, forgot=True)))
    if Fault.STALE_MEMORY in kinds and world.earlier[0] != group:
        # A JoinGroup under way gets an error, and is sent again if the coordinator still knows its sender.
        members = tuple(
            member._replace(join=IN, rejoin=True) if member.join in (JOINING, JOINED) else member
            for member in world.members
        )
        stale = world._replace(group=world.earlier[0], members=members, faults=world.faults - 1, forgot=True)
        faults.append((("stale_memory", world.earlier[0].generation), stale))


def _evict(group: Group, instance: int) -> Group:
    ids = put(group.ids, instance, 0)
    return group._replace(
        ids=ids,
        joined=group.joined & ~(1 << instance),
        preparing=any(ids),
        claims=put(group.claims, instance, (NO_CLAIM,) * len(group.committed)),
    )


def _plans(world: World, model: Model) -> list[tuple[World, tuple[tuple[int, ...], ...]]]:
    """Every plan the leader may make: per partition keep, assign, or move."""
    group = world.group
    present = [i for i, id_ in enumerate(group.ids) if id_]
    choices = [_choices(world, model, present, part) for part in range(model.config.partitions)]
    plans = []
    for chosen in product(*choices):
        moves = sum(cost for cost, _ in chosen)
        if moves > world.moves:
            continue
        plan = tuple(tuple(orders.get(i, NOTHING) for _, orders in chosen) for i in range(MEMBERS))
        plans.append((world._replace(moves=world.moves - moves), plan))
    return plans


def _choices(world: World, model: Model, present: list[int], part: int) -> list[tuple[int, dict[int, int]]]:
    """(cost in moves, orders by member) for one partition."""
    claims = [world.group.claims[i][part] for i in range(MEMBERS)]
    owners = [i for i in present if claims[i] in (OWNED, TAKING)]
    awaiting = [i for i in present if claims[i] == AWAITED]
    if not owners:
        if awaiting and Rule.S8_INCOMING_KEEPS not in model.out:
            return [(0, {awaiting[0]: OWN})]
        return [(0, {i: OWN}) for i in present if i not in awaiting or len(present) == 1]
    owner = owners[0]
    choices: list[tuple[int, dict[int, int]]] = [(0, {owner: OWN})]
    for other in present:
        if other == owner or claims[owner] != OWNED:
            continue
        if model.config.warm:
            choices.append((0 if other in awaiting else 1, {owner: RELEASE, other: AWAIT}))
        if model.config.cold:
            choices.append((1, {owner: REVOKE}))
    return choices


def _apply_plan(world: World, model: Model, instance: int) -> World:
    member, group = world.members[instance], world.group
    roles = tuple(
        _role_after(world, model, instance, role, group.plan[instance][part]) for part, role in enumerate(member.roles)
    )
    rejoin = any(role.kind == REVOKING and new.kind == NONE for role, new in zip(member.roles, roles, strict=True))
    members = sum(1 << i for i, id_ in enumerate(group.ids) if id_)
    after = member._replace(join=IN, plan_members=members, roles=roles, rejoin=member.rejoin or rejoin)
    return remember(world, instance, after)


def _role_after(world: World, model: Model, instance: int, role: Role, order: int) -> Role:
    group = world.group
    if order == OWN:
        if role.kind == ACTIVE:
            return role
        if role.kind == RELEASING:
            return Role(ACTIVE, role.a, role.b)
        if role.kind == KEPT:
            return Role(ACTIVE, role.a, role.b)
        if role.kind == STANDBY:
            return role
        return role if role.kind in TAKE_OVER else Role(FENCING)
    if order == RELEASE:
        if role.kind in (ACTIVE, RELEASING):
            target = 1 - instance
            return Role(RELEASING, role.a, role.b, Mark(target, group.ids[target], group.generation))
        return role
    if order == AWAIT:
        return Role(INCOMING, group.generation) if role.kind in (NONE, INCOMING, STANDBY) else role
    if role.kind in (ACTIVE, RELEASING):
        return Role(REVOKING)  # also when a plan forgets what we own: finish the transaction, then let go
    if role.kind in (RELEASED, REVOKING, STANDBY, KEPT):
        return role
    return Role()


def crash_steps(world: World, model: Model, instance: int, faults: Steps) -> None:
    """A member dies, or a dead one comes back (which nobody may count on)."""
    member = world.members[instance]
    nobody = tuple(Role() for _ in member.roles)
    slots = (INIT,) * len(member.slots)
    if not member.alive:
        if world.restarts:
            back = Member(True, 0, member.last_id, -1, OUT, False, 0, nobody, (), slots)
            faults.append(
                (("restart", instance), remember(world._replace(restarts=world.restarts - 1), instance, back))
            )
        return
    if world.faults and Fault.CRASH in model.config.kinds and all(other.alive for other in world.members):
        after = lose(world._replace(faults=world.faults - 1), model._replace(out=frozenset()), instance)
        dead = Member(False, 0, member.last_id, -1, OUT, False, 0, nobody, (), slots)
        faults.append((("crash", instance), remember(after, instance, dead)))
