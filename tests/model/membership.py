"""The group protocol: sessions, joins with claims, the leader's plan, snapshots; and who may own what when.

The plan is made from the claims that came with JoinGroup. The leader keeps what is owned where it is, keeps a move
under way as it is while both are members, gives a partition without owner to the member that awaits it, and may move a
partition (budget) either by a release marker or by a revoke.

A member's holdings (what it claims) belong to the membership's thread. The engine tells what it did by notes, which
arrive later.
"""

from __future__ import annotations

from itertools import product

from .failures import Steps, engine_lost, membership_lost
from .rules import Fault, Model, Rule
from .search import put
from .state import (
    NAMES,
    NO_MARK,
    NOT_HELD,
    NOT_SAID,
    TAKE_OVER,
    THIS_GENERATION,
    Done,
    Event,
    Group,
    Held,
    Join,
    Kind,
    Mark,
    Phase,
    Role,
    Said,
    Says,
    Slot,
    World,
    changed,
    no_claims,
    outsider,
    remember,
)

Choice = tuple[int, dict[int, Said]]
"""Of the leader, for one partition: (cost in moves, what it says to whom)."""


def membership_steps(world: World, model: Model, instance: int, steps: Steps, luck: Steps) -> None:
    """Whatever one living member may do next in the group protocol."""
    member, group, name = world.members[instance], world.group, NAMES[instance]
    known = member.member_id and group.ids[instance] == member.member_id
    # With another generation only after a coordinator that went back in time: its heartbeat gets ILLEGAL_GENERATION.
    is_old = member.join in (Join.BARRIER, Join.IN) and member.generation != group.generation
    if member.member_id and (not known or is_old):
        steps.append((f"{name} learns that its membership is gone", membership_lost(world, model, instance)))
    restless = model.config.restless and world.moves
    if restless and member.join == Join.IN and known and not member.rejoin and not group.preparing:
        nudged = changed(world._replace(moves=world.moves - 1), instance, rejoin=True)
        luck.append((f"{name} wants a rebalance: its user data changed (a standby is ready)", nudged))
    if member.join == Join.JOINING and known and not group.joined & 1 << instance:
        # New metadata, even when its number is one that was refused before: numbers repeat after a loss of memory.
        sent_again = (Phase.FILLED, Phase.ABORTING, Phase.UNCLEAR, Phase.FOUND)
        pipe = tuple(txn._replace(generation=-2) if txn.phase in sent_again else txn for txn in member.pipe)
        after = changed(world, instance, join=Join.JOINED, generation=group.generation, pipe=pipe)
        steps.append((f"{name} has its JoinGroup response: generation {group.generation}", after))
    elif member.join == Join.JOINED and known and not group.preparing:
        steps.append((f"{name} has the plan of generation {group.generation}", _sync(world, model, instance)))
    if _may_join(world, instance):
        steps.append((f"{name} sends JoinGroup", _join(world, instance)))
    if member.inbox:
        steps.append((f"{name}'s engine hears what its membership told it", _hears(world, model, instance)))
    for part, role in enumerate(member.roles):
        is_over = Rule.S8_REVOKE_BARRIER in model.out or not any(txn.part == part for txn in member.pipe)
        if role.kind == Kind.REVOKING and is_over:
            steps.append((f"{name} has released p{part}", _revoked(world, model, instance, part)))
    if member.notes:
        kind, part, mark, _ = member.notes[0]
        what = f"handed over, as ordered in generation {mark.generation}" if kind == Done.HANDED_OVER else "taken"
        steps.append((f"{name}'s membership hears that p{part} was {what}", _noted(world, model, instance)))


def _may_join(world: World, instance: int) -> bool:
    member, group = world.members[instance], world.group
    if member.member_id == 0:
        return True
    if (
        group.ids[instance] != member.member_id
        or group.joined & (1 << instance)
        or member.join not in (Join.JOINED, Join.IN)
    ):
        return False
    return group.preparing or (member.join == Join.IN and member.rejoin)


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
    return remember(world._replace(group=group), instance, member._replace(join=Join.JOINING, rejoin=False))


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
            told = f"the group enters generation {after.generation}, the leader plans {_in_words(plan)}"
            steps.append((told, world_after._replace(group=after)))
    kinds = model.config.kinds
    for instance, id_ in enumerate(group.ids):
        member = world.members[instance]
        if not id_:
            continue
        evicted = world._replace(group=_evict(group, instance))
        if not member.alive or member.member_id != id_:
            steps.append((f"the session of {NAMES[instance]}'s dead incarnation expires", evicted))
        elif world.faults and Fault.EVICT in kinds:
            told = f"FAULT the session of {NAMES[instance]} expires while it runs on"
            faults.append((told, evicted._replace(faults=world.faults - 1)))
    if not world.faults:
        return
    if Fault.AMNESIA in kinds and (any(group.ids) or any(group.committed)):
        parts = model.config.partitions
        empty = group._replace(
            generation=0, preparing=False, ids=(0,) * model.config.members, joined=0,
            plan=((NOT_SAID,) * parts,) * model.config.members, claims=no_claims(model.config),
            committed=(-1,) * parts, pending=((),) * parts,
        )  # fmt: skip
        after_it = world._replace(group=empty, faults=world.faults - 1, forgot=True)
        faults.append(("FAULT the group coordinator comes back without its memory", after_it))
    if Fault.STALE_MEMORY in kinds and world.earlier[0] != group:
        # A JoinGroup under way gets an error, and is sent again if the coordinator still knows its sender.
        joins = (Join.JOINING, Join.JOINED, Join.BARRIER)
        members = tuple(
            member._replace(join=Join.IN, rejoin=True) if member.join in joins else member for member in world.members
        )
        stale = world._replace(group=world.earlier[0], members=members, faults=world.faults - 1, forgot=True)
        generation = world.earlier[0].generation
        faults.append((f"FAULT the group coordinator comes back with its memory of generation {generation}", stale))


def _in_words(plan: tuple[tuple[Said, ...], ...]) -> str:
    words = {Says.OWN: "own", Says.NOTHING: "nothing of"}
    told = []
    for name, row in zip(NAMES, plan, strict=False):
        for part, said in enumerate(row):
            word = words.get(said.kind, f"incoming since {said.since or 'now'}")
            if said.kind == Says.RELEASE:
                word = f"release to {NAMES[said.instance]}{said.member_id}{' as before' if said.known else ''}"
            told.append(f"{name}: {word} p{part}")
    return ", ".join(told)


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
    own = Said(Says.OWN)
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
        release = Said(Says.RELEASE, order.instance, order.member_id, known=True)
        expected = claims[order.instance].since >= 0
        return [(0, {owner: release, order.instance: Said(Says.AWAIT, known=expected, since=since)})]
    choices: list[Choice] = [(0, {owner: own})]
    for other in present:
        if other != owner and model.config.warm:
            release = Said(Says.RELEASE, other, group.ids[other])
            cost = 0 if claims[other].since >= 0 else 1
            awaits = Said(Says.AWAIT, known=claims[other].since >= 0, since=THIS_GENERATION)
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
    member, plan = world.members[instance], world.group.plan[instance]
    revoked = tuple(held.owned and _takes_away(model, said) for held, said in zip(member.held, plan, strict=True))
    if any(said.kind == Says.NOTHING and said.known for said in plan):
        # Also when it was handed over since the claim: the leader counts on our next JoinGroup.
        rejoin = member.rejoin or Rule.S8_TAKEN_AWAY_REJOINS not in model.out
        world = changed(world, instance, rejoin=rejoin)
    if not any(revoked):
        return _apply(world, model, instance)
    world = changed(world, instance, join=Join.BARRIER, rejoin=True)
    return _tell(world, model, instance, Event(member.member_id, revoked=revoked))


def _tell(world: World, model: Model, instance: int, event: Event) -> World:
    """From the membership to the engine: heard at once, or later."""
    world = changed(world, instance, inbox=(*world.members[instance].inbox, event))
    return world if model.config.lag else _hears(world, model, instance)


def _hears(world: World, model: Model, instance: int) -> World:
    member = world.members[instance]
    event, *inbox = member.inbox
    world = changed(world, instance, inbox=tuple(inbox))
    if not event.member_id:
        return engine_lost(world, model, instance)
    if event.revoked:
        roles = tuple(
            Role(Kind.REVOKING) if gone and role.kind != Kind.KEPT else role
            for gone, role in zip(event.revoked, member.roles, strict=True)
        )
        return changed(world, instance, roles=roles)
    roles = tuple(_role_after(model, role, now) for role, now in zip(member.roles, event.held, strict=True))
    return changed(world, instance, roles=roles, plan_members=event.members, engine_id=event.member_id)


def _takes_away(model: Model, said: Said) -> bool:
    """Whether it has to be given up, if we own it. What our claim awaited, and we took since, is ours."""
    if said.kind == Says.AWAIT:
        return not said.known or Rule.S8_TAKEN_IS_NOT_REVOKED in model.out
    return said.kind == Says.NOTHING


def _revoked(world: World, model: Model, instance: int, part: int) -> World:
    member = world.members[instance]
    roles = put(member.roles, part, Role())
    world = changed(world, instance, roles=roles)
    ours = member.engine_id == member.member_id or Rule.S8_NOTES_OF_INCARNATION in model.out
    if member.join != Join.BARRIER or not ours:
        return world
    world = changed(world, instance, held=put(member.held, part, member.held[part]._replace(owned=False)))
    if any(role.kind == Kind.REVOKING for role in roles) or member.generation != world.group.generation:
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
    after = changed(world, instance, join=Join.IN, applied=group.generation, held=held)
    return _tell(after, model, instance, Event(member.member_id, members, held))


def _held_after(model: Model, held: Held, said: Said, generation: int) -> Held:
    owned = held.owned or said.kind == Says.OWN
    if said.kind == Says.RELEASE:
        # An order that our claim did not know is for an owner, also when the old one was carried out since the claim.
        owned = owned or (not said.known and Rule.S8_NEW_ORDER_IS_OWNED not in model.out)
        old = held.releasing
        same = (old.instance, old.member_id) == (said.instance, said.member_id)
        order = old if same else Mark(said.instance, said.member_id, generation)
        return Held(owned, order if owned else NO_MARK)
    if said.kind == Says.AWAIT and not owned:
        return Held(since=said.since or generation)
    return Held(owned)


def _role_after(model: Model, role: Role, held: Held) -> Role:
    """What the engine makes of an assignment. What it works on it gives up by a revoke only."""
    order = held.releasing
    if held.owned:
        goes_on = role.kind == Kind.GONE and order != role.mark and Rule.S8_WITHDRAWN_IS_ANEW in model.out
        if role.kind in (Kind.ACTIVE, Kind.RELEASING, Kind.KEPT) or goes_on:
            return Role(Kind.ACTIVE if order == NO_MARK else Kind.RELEASING, role.a, role.b, order)
        if role.kind == Kind.GONE and (order == role.mark or Rule.S8_WITHDRAWN_IS_TAKEN in model.out):
            return role
        if role.kind == Kind.RELEASED or role.kind in TAKE_OVER:
            return role._replace(mark=order)
        return role if role.kind == Kind.STANDBY else Role(Kind.FENCING, mark=order, since=role.since)
    if held.since >= 0 and role.kind in (Kind.NONE, Kind.INCOMING, Kind.STANDBY, Kind.GONE):
        return Role(Kind.INCOMING, since=held.since)
    return Role() if role.kind in (Kind.INCOMING, Kind.GONE) else role


def _noted(world: World, model: Model, instance: int) -> World:
    """The membership hears what the engine did some time ago."""
    member = world.members[instance]
    (kind, part, mark, member_id), *notes = member.notes
    held = member.held[part]
    if member_id != member.member_id and Rule.S8_NOTES_OF_INCARNATION not in model.out:
        pass
    elif kind == Done.HANDED_OVER:
        stands = held.releasing == mark or Rule.S8_WITHDRAWN_BY_IDENTITY in model.out
        held = NOT_HELD if stands else held
    elif held.since >= 0:
        held = Held(True)
    return changed(world, instance, held=put(member.held, part, held), notes=tuple(notes))


def crash_steps(world: World, model: Model, instance: int, faults: Steps) -> None:
    """A member dies, or a dead one comes back (which nobody may count on)."""
    member, name = world.members[instance], NAMES[instance]
    if not member.alive:
        if world.restarts:
            back = outsider(model.config, member.last_id, slot=Slot.INIT)
            after = remember(world._replace(restarts=world.restarts - 1), instance, back)
            faults.append((f"{name} is started again", after))
    elif world.faults and Fault.CRASH in model.config.kinds and all(other.alive for other in world.members):
        after = engine_lost(world._replace(faults=world.faults - 1), model._replace(out=frozenset()), instance)
        dead = outsider(model.config, member.last_id, alive=False, slot=Slot.INIT)
        faults.append((f"FAULT {name} dies", remember(after, instance, dead)))
