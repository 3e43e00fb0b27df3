"""The table of actions: what each step is called, in words, and the function that puts all of them together.

*Fair* steps happen sooner or later when they are possible; faults, late arrivals and restarts may or may not. A state
from which no fair step leads on, and in which records are still open, is a stall.
"""

from __future__ import annotations

from .broker import arrive, bump, end, marker, owner_of
from .membership import coordinator_steps, crash_steps, membership_steps
from .pipeline import Steps, intake_steps, pipeline_steps, slot_steps
from .rules import Fault, Model, Rule
from .state import AWAIT, GROUP, NAMES, ONGOING, OWN, PREPARE_COMMIT, RELEASE, TAKE_OVER, Said, World
from .takeover import takeover_steps

ACTIONS: dict[str, str] = {
    # a member's transactions (pipeline.py)
    "fill": "{0} handles p{1} record {2} and fills a transaction with it",
    "fill_release": "{0} fills a transaction with the release marker of p{1} at {2}",
    "produce": "{0}.{1} produces p{2} records {3}..<{4} and is acknowledged",
    "send_offsets": "{0}.{1} sends its offsets with generation {2}",
    "offsets_arrive": "the offsets of {0}.{1} (p{2} at {3}, generation {4}) reach the group coordinator",
    "end_transaction": "{0}.{1} sends EndTxn(commit)",
    "end_arrives": "EndTxn of {0}.{1} (p{2} records {3}..<{4}) reaches the transaction coordinator",
    "init_producer": "{0}.{1}: InitProducerId by a new producer of the same id",
    "abort": "{0}.{1}, out of the group, aborts what it has open",
    "look_up": "{0}.{1} reads the changelog for the outcome of the unclear transaction",
    "guess": "{0}.{1} guesses the outcome of the unclear transaction",
    # the broker (broker.py)
    "marker": "the marker of {0}.{1}'s transaction is written to {2}",
    # the group (membership.py)
    "join": "{0} sends JoinGroup",
    "user_data": "{0} wants a rebalance: its user data changed (a standby is ready)",
    "plan": "the group enters generation {0}, the leader plans {1}",
    "join_response": "{0} has its JoinGroup response: generation {1}",
    "sync": "{0} has the plan of generation {1}",
    "notice_lost": "{0} learns that its membership is gone",
    "revoked": "{0} has released p{1}",
    "apply": "{0} has released what was revoked, and applies the plan of generation {1}",
    "hears": "{0}'s engine hears what its membership told it",
    "engine_lost": "{0}'s engine sees that the snapshot is of another incarnation, and drops everything",
    "handed_over": "{0}'s membership hears that p{1} was handed over, as ordered in generation {2}",
    "took": "{0}'s membership hears that p{1} was taken",
    "expire_session": "the session of {0}'s dead incarnation expires",
    # taking over and starting (takeover.py)
    "fence": "{0} fences the transactional id {1}",
    "fence_again": "{0}, taking p{1} over, sees a departed member's transaction and goes back to the fence",
    "stable_offset": "{0} reads the group's offset of p{1}: {2}",
    "end_offset": "{0} reads the high watermark of changelog p{1}: {2} transactions not readable yet",
    "start": "{0} has restored p{1} and starts at {2}",
    "start_at_marker": "{0} starts p{1} at {2}, by the release marker",
    "restore_early": "{0}, a standby, restores p{1} up to {2}",
    # faults and luck
    "evict": "FAULT the session of {0} expires while it runs on",
    "crash": "FAULT {0} dies",
    "restart": "{0} is started again",
    "time_out": "FAULT {0}.{1} gets no answer to {2}",
    "expire_transaction": "the broker's timeout ends the transaction of {0}.{1}",
    "amnesia": "FAULT the group coordinator comes back without its memory",
    "stale_memory": "FAULT the group coordinator comes back with its memory of generation {0}",
    "late": "a late {2} of {0}.{1} arrives",
}


def successors(world: World, model: Model) -> tuple[Steps, Steps]:
    """(fair steps, faults and luck) out of ``world``. Raises Broken when an invariant does not hold."""
    steps: Steps = []
    luck: Steps = []
    bury = Rule.S8_MARKER_IS_LAST in model.out
    for tid, (status, targets) in enumerate(world.tids):
        if status >= PREPARE_COMMIT:
            for target in (*(1 << part for part in range(len(world.logs))), GROUP):
                if targets & target:
                    steps.append((("marker", tid, target), marker(world, tid, target, bury)))
        elif status == ONGOING:
            _expire(world, model, tid, steps, luck)
    for instance, member in enumerate(world.members):
        if member.alive:
            if member.pipe:
                pipeline_steps(world, model, instance, steps, luck)
            intake_steps(world, model, instance, steps)
            slot_steps(world, model, instance, steps)
            takeover_steps(world, model, instance, steps)
            membership_steps(world, model, instance, steps, luck)
        crash_steps(world, model, instance, luck)
    coordinator_steps(world, model, steps, luck)
    for late in world.late:
        luck.append((("late", late.tid, late.part), arrive(world, late)))
    return steps, luck


def _expire(world: World, model: Model, tid: int, steps: Steps, luck: Steps) -> None:
    """The broker's transaction timeout. Progress may count on it in one case only: a dead member's transaction that
    nobody's take-over waits for (a zombie opened it after it was fenced; readers stall, members do not)."""
    ended = bump(end(world, tid, commit=False), tid)
    if not world.members[owner_of(world, tid)[0]].alive:
        waiting = any(role.kind in TAKE_OVER for member in world.members for role in member.roles)
        if not waiting:
            steps.append((("expire_transaction", tid), ended))
    elif world.faults and Fault.EXPIRE in model.config.kinds:
        luck.append((("expire_transaction", tid), ended._replace(faults=world.faults - 1)))


def describe(label: tuple[object, ...], model: Model) -> str:
    """One step as a sentence."""
    name, *details = label
    pool = model.config.pool
    words: list[object] = list(details)
    if name in ("marker", "late", "expire_transaction"):
        tid, what = (*details, 0)[:2]
        assert isinstance(tid, int)
        assert isinstance(what, int)
        words = [NAMES[tid // pool], tid % pool]
        if name == "marker":
            words.append("the group's offsets" if what == GROUP else f"changelog p{what.bit_length() - 1}")
        elif name == "late":
            words.append("EndTxn(commit)" if what < 0 else "TxnOffsetCommit")
    elif name == "plan":
        generation, plan = details
        assert isinstance(plan, tuple)
        told = (
            f"{NAMES[i]}: {', '.join(f'{_said(said)} p{p}' for p, said in enumerate(row))}"
            for i, row in enumerate(plan)
        )
        words = [generation, "; ".join(told)]
    elif words and name not in ("amnesia", "stale_memory"):
        assert isinstance(words[0], int)
        words[0] = NAMES[words[0]]
        if name == "fence":
            assert isinstance(words[1], int)
            words[1] = f"{NAMES[words[1] // pool]}.{words[1] % pool}"
    text = ACTIONS[str(name)]
    used = text.count("{")
    rest = [str(word) for word in words[used:]]
    return text.format(*words) + (f" -> {' '.join(rest)}" if rest else "")


def _said(said: object) -> str:
    assert isinstance(said, Said)
    if said.kind == RELEASE:
        return f"release to {NAMES[said.instance]}{said.member_id}{' as before' if said.known else ''}"
    if said.kind == AWAIT:
        return f"incoming since {said.since or 'now'}"
    return "own" if said.kind == OWN else "nothing of"
