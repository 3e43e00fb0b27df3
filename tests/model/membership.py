"""The group protocol: sessions, joins with claims, the leader's plan, snapshots; and who may own what when.

The plan is made from the claims that came with JoinGroup. The leader keeps what is owned where it is, keeps a move
under way as it is while both are members, gives a partition without owner to the member that awaits it, and may move a
partition (budget) either by a release marker or by a revoke.

A member's holdings (what it claims) belong to the membership's thread. The engine tells what it did by notes, which
arrive later.
"""

from __future__ import annotations

from itertools import product

from .broker import remember
from .pipeline import Steps, engine_lost, membership_lost
from .rules import Fault, Model, Rule
from .state import (
    ABORTING,
    ACTIVE,
    AWAIT,
    BARRIER,
    FENCING,
    FILLED,
    FOUND,
    GONE,
    HANDED_OVER,
    IN,
    INCOMING,
    INIT,
    JOINED,
    JOINING,
    KEPT,
    NO_MARK,
    NONE,
    NOT_HELD,
    NOT_SAID,
    NOTHING,
    OWN,
    RELEASE,
    RELEASED,
    RELEASING,
    REVOKING,
    STANDBY,
    TAKE_OVER,
    THIS_GENERATION,
    UNCLEAR,
    Event,
    Group,
    Held,
    Mark,
    Member,
    Role,
    Said,
    World,
    no_claims,
    outsider,
    put,
)

Choice = tuple[int, dict[int, Said]]
"""Of the leader, for one partition: (cost in moves, what it says to whom)."""


def membership_steps(world: World, model: Model, instance: int, steps: Steps, luck: Steps) -> None:
    """Whatever one living member may do next in the group protocol."""
    member, group = world.members[instance], world.group
    bit = 1 << instance
    known = member.member_id and group.ids[instance] == member.member_id
    if member.member_id and not known:
        steps.append((("notice_lost", instance), membership_lost(world, model, instance)))
    elif member.join in (BARRIER, IN) and member.generation != group.generation:
        # Only a coordinator that went back in time: the heartbeat is answered with ILLEGAL_GENERATION.
        steps.append((("notice_lost", instance), membership_lost(world, model, instance)))
    restless = model.config.restless and world.moves
    if restless and member.join == IN and known and not member.rejoin and not group.preparing:
        nudged = remember(world._replace(moves=world.moves - 1), instance, member._replace(rejoin=True))
        luck.append((("user_data", instance), nudged))
    if member.join == JOINING and known and not group.joined & bit:
        # A new snapshot, even when its number is one that was refused before: numbers repeat after a loss of memory.
        pipe = tuple(
            txn._replace(generation=-2) if txn.phase in (FILLED, ABORTING, UNCLEAR, FOUND) else txn
            for txn in member.pipe
        )
        after = member._replace(join=JOINED, generation=group.generation, pipe=pipe)
        steps.append((("join_response", instance, group.generation), remember(world, instance, after)))
    elif member.join == JOINED and known and not group.preparing:
        steps.append((("sync", instance, group.generation), _sync(world, model, instance)))
    if _may_join(world, instance):
        steps.append((("join", instance), _join(world, instance)))
    if member.inbox:
        steps.append((("hears", instance), _hears(world, model, instance)))
    for part, role in enumerate(member.roles):
        if role.kind == REVOKING and _revoke_is_over(member, model, part):
            steps.append((("revoked", instance, part), _revoked(world, model, instance, part)))
    if member.notes:
        kind, part, mark, _ = member.notes[0]
        name = "handed_over" if kind == HANDED_OVER else "took"
        steps.append(((name, instance, part, mark.generation), _noted(world, model, instance)))


def _may_join(world: World, instance: int) -> bool:
    member, group = world.members[instance], world.group
    if member.member_id == 0:
        return True
    if group.ids[instance] != member.member_id or group.joined & (1 << instance) or member.join not in (JOINED, IN):
        return False
    return group.preparing or (member.join == IN and member.rejoin)


def _revoke_is_over(member: Member, model: Model, part: int) -> bool:
    if Rule.S8_REVOKE_BARRIER in model.out:
        return True
    return not any(txn.part == part for txn in member.pipe)


def _join(world: World, instance: int) -> World:
    """JoinGroup, with what we hold as far as the membership has heard. A new member also starts a rebalance."""
    member, group = world.members[instance], world.group
    last = member.last_id
    if member.member_id == 0:
        last += 1
        member = member._replace(member_id=last, last_id=last)
    group = group._replace(
        preparing=True,
        ids=put(group.ids, instance, last),
        joined=group.joined | (1 << instance),
        claims=put(group.claims, instance, (member.applied, member.held)),
    )
    return remember(world._replace(group=group), instance, member._replace(join=JOINING, rejoin=False))


def coordinator_steps(world: World, model: Model, steps: Steps, faults: Steps) -> None:
    """Rebalances end; sessions expire; the coordinator forgets."""
    group = world.group
    if group.preparing and all(not id_ or group.joined & (1 << i) for i, id_ in enumerate(group.ids)):
        for world_after, plan in _plans(world, model):
            after = group._replace(
                generation=group.generation + 1, preparing=False, joined=0, plan=plan,
                claims=no_claims(model.config),
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
            generation=0, preparing=False, ids=(0,) * model.config.members, joined=0,
            plan=((NOT_SAID,) * parts,) * model.config.members, claims=no_claims(model.config),
            committed=(-1,) * parts, pending=((),) * parts,
        )  # fmt: skip
        faults.append((("amnesia",), world._replace(group=empty, faults=world.faults - 1, forgot=True)))
    if Fault.STALE_MEMORY in kinds and world.earlier[0] != group:
        # A JoinGroup under way gets an error, and is sent again if the coordinator still knows its sender.
        members = tuple(
            member._replace(join=IN, rejoin=True) if member.join in (JOINING, JOINED, BARRIER) else member
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
        claims=put(group.claims, instance, (-1, (NOT_HELD,) * len(group.committed))),
    )


def _plans(world: World, model: Model) -> list[tuple[World, tuple[tuple[Said, ...], ...]]]:
    """Every plan the leader may make: per partition keep, assign, or move."""
    group = world.group
    present = [i for i, id_ in enumerate(group.ids) if id_]
    choices = [_choices(world, model, present, part) for part in range(model.config.partitions)]
    plans = []
    for chosen in product(*choices):
        moves = sum(cost for cost, _ in chosen)
        if moves > world.moves:
            continue
        plan = tuple(
            tuple(said.get(i) or Said(known=claims[part].owned) for part, (_, said) in enumerate(chosen))
            for i, (_, claims) in enumerate(group.claims)
        )
        plans.append((world._replace(moves=world.moves - moves), plan))
    return plans


def _choices(world: World, model: Model, present: list[int], part: int) -> list[Choice]:
    """What may be said about one partition."""
    group, out = world.group, model.out
    own = Said(OWN)
    claims = {i: group.claims[i][1][part] for i in present}
    receiver = _has_it(world, claims)
    if receiver >= 0 and Rule.S8_RECEIVER_HAS_IT not in out and Rule.S8_ONE_STEP not in out:
        return [(0, {receiver: own})]
    owner = _owner(world, model, claims, receiver)
    if owner < 0:
        awaiting = [i for i in present if claims[i].since >= 0]
        if awaiting and Rule.S8_INCOMING_KEEPS not in out:
            awaiting.sort(key=lambda i: group.claims[i][0])  # the generation each of them was in last
            return [(0, {awaiting[0 if Rule.S8_INCOMING_NEWEST in out else -1]: own})]
        return [(0, {i: own}) for i in present if i not in awaiting or len(present) == len(awaiting)]
    order = claims[owner].releasing
    if order != NO_MARK and group.ids[order.instance] == order.member_id and Rule.S8_TRANSIT_KEPT not in out:
        since = THIS_GENERATION if Rule.S8_SINCE_OF_THE_ORDER in out else order.generation
        release = Said(RELEASE, order.instance, order.member_id, known=True)
        expected = claims[order.instance].since >= 0
        return [(0, {owner: release, order.instance: Said(AWAIT, known=expected, since=since)})]
    choices: list[Choice] = [(0, {owner: own})]
    for other in present:
        if other != owner and model.config.warm:
            release = Said(RELEASE, other, group.ids[other])
            cost = 0 if claims[other].since >= 0 else 1
            awaits = Said(AWAIT, known=claims[other].since >= 0, since=THIS_GENERATION)
            choices.append((cost, {owner: release, other: awaits}))
    if model.config.cold and len(present) > 1:
        choices.append((1, {}))
    return choices


def _has_it(world: World, claims: dict[int, Held]) -> int:
    """The receiver of a move that owns the partition already, while the donor claims it still; or -1."""
    for held in claims.values():
        to, id_, _ = held.releasing
        if to in claims and claims[to].owned and world.group.ids[to] == id_:
            return to
    return -1


def _owner(world: World, model: Model, claims: dict[int, Held], receiver: int) -> int:
    """Who owns a partition once double claims are decided, or -1."""
    owners = [i for i, held in claims.items() if held.owned]
    if receiver >= 0:
        return min(owners, key=lambda i: i == receiver) if Rule.S8_RECEIVER_HAS_IT in model.out else receiver
    return max(owners, key=lambda i: (world.group.claims[i][0], claims[i].releasing == NO_MARK), default=-1)


def _sync(world: World, model: Model, instance: int) -> World:
    """The plan is here: apply it, or first give up what it takes away."""
    member = world.members[instance]
    plan = zip(member.held, world.group.plan[instance], strict=True)
    revoked = [held.owned and _takes_away(model, said) for held, said in plan]
    if any(said.kind == NOTHING and said.known for said in world.group.plan[instance]):
        # Also when it was handed over since the claim: the leader counts on our next JoinGroup.
        member = member._replace(rejoin=member.rejoin or Rule.S8_TAKEN_AWAY_REJOINS not in model.out)
        world = remember(world, instance, member)
    if not any(revoked):
        return _apply(world, model, instance)
    world = remember(world, instance, member._replace(join=BARRIER, rejoin=True))
    return _tell(world, model, instance, Event(member.member_id, revoked=tuple(revoked)))


def _tell(world: World, model: Model, instance: int, event: Event) -> World:
    """From the membership to the engine: heard at once, or later."""
    member = world.members[instance]
    world = remember(world, instance, member._replace(inbox=(*member.inbox, event)))
    return world if model.config.lag else _hears(world, model, instance)


def _hears(world: World, model: Model, instance: int) -> World:
    member = world.members[instance]
    event, *inbox = member.inbox
    member = member._replace(inbox=tuple(inbox))
    if not event.member_id:
        return engine_lost(remember(world, instance, member), model, instance)
    roles = member.roles
    if event.revoked:
        roles = tuple(
            Role(REVOKING) if gone and role.kind != KEPT else role
            for gone, role in zip(event.revoked, roles, strict=True)
        )
        return remember(world, instance, member._replace(roles=roles))
    roles = tuple(_role_after(model, role, now) for role, now in zip(roles, event.held, strict=True))
    return remember(
        world, instance, member._replace(roles=roles, plan_members=event.members, engine_id=event.member_id)
    )


def _takes_away(model: Model, said: Said) -> bool:
    """Whether it has to be given up, if we own it. What our claim awaited, and we took since, is ours."""
    if said.kind == AWAIT:
        return not said.known or Rule.S8_TAKEN_IS_NOT_REVOKED in model.out
    return said.kind == NOTHING


def _revoked(world: World, model: Model, instance: int, part: int) -> World:
    member = world.members[instance]
    member = member._replace(roles=put(member.roles, part, Role()))
    world = remember(world, instance, member)
    ours = member.engine_id == member.member_id or Rule.S8_NOTES_OF_INCARNATION in model.out
    if member.join != BARRIER or not ours:
        return world
    held = put(member.held, part, member.held[part]._replace(owned=False))
    member = member._replace(held=held)
    world = remember(world, instance, member)
    if any(role.kind == REVOKING for role in member.roles) or member.generation != world.group.generation:
        return world
    return _apply(world, model, instance)


def _apply(world: World, model: Model, instance: int) -> World:
    """Everything that the plan takes away is given up: the rest of it."""
    member, group = world.members[instance], world.group
    held = tuple(
        _held_after(model, old, said, group.generation)
        for old, said in zip(member.held, group.plan[instance], strict=True)
    )
    members = sum(1 << i for i, id_ in enumerate(group.ids) if id_)
    after = member._replace(join=IN, applied=group.generation, held=held)
    return _tell(remember(world, instance, after), model, instance, Event(member.member_id, members, held))


def _held_after(model: Model, held: Held, said: Said, generation: int) -> Held:
    owned = held.owned or said.kind == OWN
    if said.kind == RELEASE:
        # An order that our claim did not know is for an owner, also when the old one was carried out since the claim.
        owned = owned or (not said.known and Rule.S8_NEW_ORDER_IS_OWNED not in model.out)
        old = held.releasing
        same = (old.instance, old.member_id) == (said.instance, said.member_id)
        order = old if same else Mark(said.instance, said.member_id, generation)
        return Held(owned, order if owned else NO_MARK)
    if said.kind == AWAIT and not owned:
        return Held(since=said.since or generation)
    return Held(owned)


def _role_after(model: Model, role: Role, held: Held) -> Role:
    """What the engine makes of an assignment. What it works on it gives up by a revoke only."""
    order = held.releasing
    if held.owned:
        if role.kind in (ACTIVE, RELEASING, KEPT):
            return Role(ACTIVE if order == NO_MARK else RELEASING, role.a, role.b, order)
        if role.kind == GONE and order != role.mark and Rule.S8_WITHDRAWN_IS_ANEW in model.out:
            return Role(ACTIVE if order == NO_MARK else RELEASING, role.a, role.b, order)
        if role.kind == GONE and (order == role.mark or Rule.S8_WITHDRAWN_IS_TAKEN in model.out):
            return role
        if role.kind == RELEASED or role.kind in TAKE_OVER:
            return role._replace(mark=order)
        return role if role.kind == STANDBY else Role(FENCING, mark=order, since=role.since)
    if held.since >= 0 and role.kind in (NONE, INCOMING, STANDBY, GONE):
        return Role(INCOMING, since=held.since)
    return Role() if role.kind in (INCOMING, GONE) else role


def _noted(world: World, model: Model, instance: int) -> World:
    """The membership hears what the engine did some time ago."""
    member = world.members[instance]
    (kind, part, mark, member_id), *notes = member.notes
    held = member.held[part]
    if member_id != member.member_id and Rule.S8_NOTES_OF_INCARNATION not in model.out:
        pass
    elif kind == HANDED_OVER:
        stands = held.releasing == mark or Rule.S8_WITHDRAWN_BY_IDENTITY in model.out
        held = NOT_HELD if stands else held
    elif held.since >= 0:
        held = Held(True)
    member = member._replace(held=put(member.held, part, held), notes=tuple(notes))
    return remember(world, instance, member)


def crash_steps(world: World, model: Model, instance: int, faults: Steps) -> None:
    """A member dies, or a dead one comes back (which nobody may count on)."""
    member = world.members[instance]
    if not member.alive:
        if world.restarts:
            back = outsider(model.config, member.last_id, slot=INIT)
            faults.append(
                (("restart", instance), remember(world._replace(restarts=world.restarts - 1), instance, back))
            )
        return
    if world.faults and Fault.CRASH in model.config.kinds and all(other.alive for other in world.members):
        after = engine_lost(world._replace(faults=world.faults - 1), model._replace(out=frozenset()), instance)
        dead = outsider(model.config, member.last_id, alive=False, slot=INIT)
        faults.append((("crash", instance), remember(after, instance, dead)))
