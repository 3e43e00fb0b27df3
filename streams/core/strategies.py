"""The strategies by name: how partitions are shared among the members.

``incremental`` moves a partition once its new owner has it ready (``incremental.py``), ``cooperative-sticky`` keeps
what it can (``assignor.py``). The two here look at names only: every member knows each partition's owner from the list
of members. All of them give up first and assign in the follow-up round, and all of them keep moves that are under way,
so a group may change from any of them to any other while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from streams.core.assignor import sticky_plan
from streams.core.claims import Draft, read_claims
from streams.core.incremental import PlanSettings as PlanSettings
from streams.core.incremental import incremental
from streams.model.group import Assignment, Assignor, MemberReport


def assignor(name: str, settings: PlanSettings) -> Assignor:
    """Return the strategy of this name, one of ``settings.groups.STRATEGIES``. Raises ``KeyError`` for any other."""
    known: dict[str, Callable[[PlanSettings], Assignor]] = {
        "incremental": incremental,
        "cooperative-sticky": lambda _: sticky_plan,
        "range": lambda _: _by_formula(_range),
        "roundrobin": lambda _: _by_formula(_round_robin),
    }
    return known[name](settings)


def _by_formula(formula: Callable[[int, int, int], int]) -> Assignor:
    """Make a strategy in which each partition has its place in the list of the members. An owner at another place gives
    it up; it is assigned when it has no owner any more."""

    def plan(partitions: int, reports: Mapping[str, MemberReport]) -> dict[str, Assignment]:
        claims = read_claims(partitions, reports)
        draft = Draft(claims)
        free = set(claims.free)
        for partition in range(partitions) if claims.active else ():
            member = claims.active[formula(partition, partitions, len(claims.active))]
            # From another owner it is only taken away in this round: assigned at once, it would have two.
            if partition in free or partition in claims.settled[member]:
                draft.own[member].add(partition)
        return draft.assignments()

    return plan


def _range(partition: int, partitions: int, members: int) -> int:
    """Return the place by ranges, the larger ones first."""
    least, larger = divmod(partitions, members)
    in_larger = larger * (least + 1)
    return partition // (least + 1) if partition < in_larger else larger + (partition - in_larger) // least


def _round_robin(partition: int, _: int, members: int) -> int:
    return partition % members
