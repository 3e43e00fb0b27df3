"""The group of a simulated world as those see it who watch: reports and plans, read from the bytes of its members."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Final, NamedTuple

from streams.kafka.wire import group_bytes
from streams.model.group import Assignment, MemberReport
from streams.testing.simulation.classic_group import ClassicGroup
from streams.testing.simulation.wire_groups import WireGroups

_decode_report: Final = lru_cache(1_000)(group_bytes.decode_report)


class KnownMember(NamedTuple):
    """A member as its coordinator knows it."""

    report: MemberReport
    strategies: frozenset[str]


class Group:
    """The group whose offsets the broker has. ``planned``: called with the reports and the plan made of them."""

    def __init__(self, groups: WireGroups, topic: str, partitions: int) -> None:
        self._groups, self._topic, self._partitions = groups, topic, partitions
        self.planned: Callable[[Mapping[str, MemberReport], Mapping[str, Assignment]], None] = lambda reports, plan: (
            None
        )
        groups.on_plan = self._on_plan

    @property
    def members(self) -> dict[str, KnownMember]:
        """Members by their ids."""
        members = self._groups.group.members.items()
        return {
            name: KnownMember(self._report(name, next(iter(each.protocols.values()))), _strategies(each.protocols))
            for name, each in members
        }

    @property
    def state(self) -> str:
        """The state's name, by DescribeGroups."""
        return self._groups.group.state.value.lower()

    @property
    def strategy(self) -> str:
        """The strategy that the members have chosen."""
        return _strategy(self._groups.group.protocol or "")

    @property
    def generation(self) -> int:
        return self._groups.group.generation

    def leave(self, member: str) -> None:
        """Take a member out of the group."""
        self._groups.group.leave(member)

    def forget(self) -> None:
        """Restart the coordinator without its memory: members, generation and offsets are gone."""
        self._groups.forget()

    def _report(self, member: str, data: bytes) -> MemberReport:
        report, wrong = _decode_report(self._topic, member, data)
        assert wrong is None, wrong
        return report

    def _on_plan(self, group: ClassicGroup) -> None:
        if group is not self._groups.group:
            return
        chosen = group.protocol or ""
        reports = {name: self._report(name, each.protocols[chosen]) for name, each in group.members.items()}
        plan = {
            name: group_bytes.decode_assignment(each.assignment, self._partitions, name)
            for name, each in group.members.items()
        }
        self.planned(reports, plan)


def _strategy(protocol: str) -> str:
    return protocol.partition("-")[2].rpartition("-")[0]


def _strategies(protocols: Mapping[str, bytes]) -> frozenset[str]:
    return frozenset(map(_strategy, protocols))
