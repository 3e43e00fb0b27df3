"""All steps out of a state of the protocol.

*Fair* steps happen sooner or later when they are possible; faults, late arrivals and restarts may or may not. A state
from which no fair step leads on, and in which records are still open, is a stall.
"""

from __future__ import annotations

from . import state
from .broker import arrive, bump, end, marker, owner_of
from .failures import Steps, slot_steps
from .membership import coordinator_steps, crash_steps, membership_steps
from .pipeline import intake_steps, pipeline_steps
from .rules import Fault, Model, Rule
from .state import GROUP, NAMES, TAKE_OVER, Status, World
from .takeover import takeover_steps

_REQUESTS = ("Produce", "TxnOffsetCommit", "EndTxn(commit)", "EndTxn(abort)")  # by ``Request``


class Protocol(Model):
    """``search.Rules``: commits and hand-overs."""

    def initial(self) -> World:
        return state.initial(self.config)

    def successors(self, world: World) -> tuple[Steps, Steps]:
        steps: Steps = []
        luck: Steps = []
        bury = Rule.S8_MARKER_IS_LAST in self.out
        for tid, (status, targets) in enumerate(world.tids):
            if status >= Status.PREPARE_COMMIT:
                for target in (*(1 << part for part in range(len(world.logs))), GROUP):
                    if targets & target:
                        where = "the group's offsets" if target == GROUP else f"changelog p{target.bit_length() - 1}"
                        told = f"the marker of {_name(world, tid)}'s transaction is written to {where}"
                        steps.append((told, marker(world, tid, target, bury)))
            elif status == Status.ONGOING:
                self._expire(world, tid, steps, luck)
        for instance, member in enumerate(world.members):
            if member.alive:
                if member.pipe:
                    pipeline_steps(world, self, instance, steps, luck)
                intake_steps(world, self, instance, steps)
                slot_steps(world, self, instance, steps, luck)
                takeover_steps(world, self, instance, steps)
                membership_steps(world, self, instance, steps, luck)
            crash_steps(world, self, instance, luck)
        coordinator_steps(world, self, steps, luck)
        for late in world.late:
            told = f"a late {_REQUESTS[late.request]} of {_name(world, late.tid)} arrives"
            luck.append((told, arrive(world, self, late)))
        return steps, luck

    def _expire(self, world: World, tid: int, steps: Steps, luck: Steps) -> None:
        """The broker's transaction timeout. Progress may count on it in one case only: a dead member's transaction that
        nobody's take-over waits for (a zombie opened it after it was fenced; readers stall, members do not)."""
        ended = bump(end(world, tid, commit=False), tid)
        told = f"the broker's timeout ends the transaction of {_name(world, tid)}"
        if not world.members[owner_of(world, tid)[0]].alive:
            waiting = any(role.kind in TAKE_OVER for member in world.members for role in member.roles)
            if not waiting:
                steps.append((told, ended))
        elif world.faults and Fault.EXPIRE in self.config.kinds:
            luck.append((told, ended._replace(faults=world.faults - 1)))

    def done(self, world: World) -> bool:
        """Every input record is processed, committed, and readable."""
        return all(log.offset == self.config.records and not log.entries for log in world.logs)

    def stalled(self, world: World) -> str:
        if any(member.alive for member in world.members):
            return "stalled: records are open, and without another fault, restart or timeout nothing happens any more"
        return ""


def _name(world: World, tid: int) -> str:
    instance, slot = owner_of(world, tid)
    return f"{NAMES[instance]}.{slot}"
