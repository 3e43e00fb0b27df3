"""A group that the broker shares out (KIP-848): its settings, its members, and the questions of a take-over.

Its members cannot send each other data, so no assignment names the other members. Their client id is their instance
name instead (that of all members of the toolkit is), and the coordinator lists the members.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Final

import msgspec

from streams.errors import BrokerUnavailable, ConfigError, MembershipFatal
from streams.kafka import permissions
from streams.kafka.group.link import NoCommonStrategy
from streams.kafka.permissions import is_denial
from streams.kafka.questions.groups import describe_group
from streams.kafka.questions.takeover import WireTakeOver
from streams.kafka.wire import group_bytes
from streams.kafka.wire.codes import BrokerRefusal, Code, raise_for
from streams.kafka.wire.schemas.describe_configs import DescribeConfigsRequest
from streams.kafka.wire.topic_questions import only

log = logging.getLogger(__name__)

ASSIGNORS: Final = {"cooperative-sticky": "uniform", "range": "range"}
"""Strategies by the broker's assignor that does the same: ``uniform`` is sticky and moves one by one."""
_CLASSIC: Final = 0
"""Kafka's number for a member that joined by the classic protocol (Kafka 4.1; older brokers do not say it)."""
_GROUP_RESOURCE: Final = 32  # Kafka's number for the settings of groups
_SESSION: Final = "consumer.session.timeout.ms"
_DEFAULT_SESSION_MS: Final = 45_000  # of a broker


class RosterMember(msgspec.Struct, frozen=True):
    """One member as the coordinator knows it. ``client_id`` is its instance name, if it is a member of ours.
    ``is_classic``: it joined by the classic protocol."""

    member_id: str
    client_id: str
    host: str
    is_classic: bool

    @property
    def is_ours(self) -> bool:
        """Check for a member of ours, by the id that it has chosen. Kafka's own clients have one of 22 letters."""
        is_older = len(self.member_id) == 36 and self.member_id.count("-") == 4  # of a release without the mark
        return not self.is_classic and (is_older or self.member_id.startswith(group_bytes.MEMBER_PREFIX))


class Roster(msgspec.Struct, frozen=True):
    """The members of a group at one moment. ``kind``: ``classic``, ``consumer`` (KIP-848; it may have classic members,
    too), or ``none``: no such group, or no member in it. ``protocol``: the assignor that they share, empty while they
    agree on it."""

    kind: str = "none"
    protocol: str = ""
    members: tuple[RosterMember, ...] = ()

    @property
    def instances(self) -> frozenset[str]:
        """The instance names of all members, foreign ones as they call themselves."""
        return frozenset(member.client_id for member in self.members)

    @property
    def strangers(self) -> tuple[str, ...]:
        """Name the members that are not ours: those by the classic protocol, and those of other programs."""
        return tuple(sorted(f"{member.client_id} at {member.host}" for member in self.members if not member.is_ours))

    def rivals(self, instance: str, member_id: str) -> list[str]:
        """Ids of other members of the same instance name."""
        return [each.member_id for each in self.members if each.client_id == instance and each.member_id != member_id]


class RosterTakeOver(WireTakeOver):
    """The questions of a take-over, in a group whose assignments do not name the members.

    ``member_id``: gives this member's own id at the moment, empty when it is none.
    """

    member_id: Callable[[], str] = str

    async def _present(self, members: Collection[str], deadline: float) -> frozenset[str]:
        """List the group's instances by the coordinator; ``members`` is ignored. ``BrokerUnavailable``: this member is
        not on the list. Then nothing is fenced, and the take-over is tried again."""
        # After the open transactions, so that no live member is fenced. An instance with a transaction open when they
        # were listed, and still at work, was a member before, and is one still. If it left in between, it has settled
        # all it had; if it was evicted, its transaction is to be ended. One that joins in between has none listed.
        roster = await self.roster(deadline)
        own = self.member_id()
        # Without ourselves the list is not complete: a restarted coordinator may have loaded a part of its log only
        # (Kafka 4.1.1).
        if own not in {member.member_id for member in roster.members}:
            raise BrokerUnavailable(
                f"group {self._group_id}: the coordinator's list of members does not have this member "
                f"({own or 'none at the moment'}); no member is fenced by it"
            )
        return roster.instances

    async def roster(self, deadline: float) -> Roster:
        """List the members of the group. On the client's loop. ``ConfigError`` without the right to describe it."""
        step = f"asking for the members of group {self._group_id}"
        needed = [permissions.on_group("Describe", self._group_id)]
        return await self._until(deadline, step, self._roster_once, needed)

    async def _roster_once(self, deadline: float) -> Roster:
        classic, broker_side = await describe_group(self._client, self._group_id, deadline)
        if classic is not None and classic.members:
            members = tuple(RosterMember(m.member_id, m.client_id, m.client_host, True) for m in classic.members)
            return Roster("classic", classic.protocol_data, members)
        if broker_side is not None and broker_side.members:
            members = tuple(
                RosterMember(m.member_id, m.client_id, m.client_host, m.member_type == _CLASSIC)
                for m in broker_side.members
            )
            return Roster("consumer", broker_side.assignor_name, members)
        return Roster()

    async def session_ms(self, transaction_timeout_ms: int, deadline: float) -> int:
        """Return the broker's session timeout of the group. On the client's loop. ``ConfigError`` if the transaction
        timeout does not fit."""
        step = f"reading the settings of group {self._group_id}"
        setting = await self._until(deadline, step, self._session_setting)
        if not setting:
            log.warning(
                "group %s: the broker does not report the session timeout of the group (%s); it must be above "
                "transaction_timeout_seconds (%g)",
                self._group_id,
                _SESSION,
                transaction_timeout_ms / 1000,
            )
            return _DEFAULT_SESSION_MS
        if int(setting) <= transaction_timeout_ms:
            raise ConfigError(
                f"transaction_timeout_seconds ({transaction_timeout_ms / 1000:g}) must be smaller than the session "
                f"timeout that the broker has for group {self._group_id}, {int(setting) / 1000:g} s: lower it, or "
                f"raise {_SESSION} of the group (kafka-configs.sh --entity-type groups)"
            )
        log.info("group %s: the broker's session timeout is %g s", self._group_id, int(setting) / 1000)
        return int(setting)

    async def _session_setting(self, deadline: float) -> str:
        """Empty: the broker refuses to describe the settings of groups."""
        resource = DescribeConfigsRequest.DescribeConfigsResource(
            resource_type=_GROUP_RESOURCE, resource_name=self._group_id, configuration_keys=None
        )
        answer = await self._client.send(DescribeConfigsRequest(resources=[resource]), None, deadline, least=1)
        result = only(answer.results, f"group {self._group_id}")
        if is_denial(BrokerRefusal(result.error_code).name) or result.error_code == Code.INVALID_REQUEST:
            return ""
        raise_for(result.error_code)
        return next((entry.value or "" for entry in result.configs if entry.name == _SESSION), "")


def broker_assignor(strategies: Sequence[str]) -> str:
    """The server's assignor for these strategies. ``ConfigError``: the broker has none that does it."""
    if len(strategies) != 1:
        raise ConfigError(
            f"membership 'broker' takes one strategy, not {' and '.join(strategies)}: members may name different ones "
            "while you restart them one by one, and the broker uses what most of them name"
        )
    name = strategies[0]
    if name not in ASSIGNORS:
        raise ConfigError(
            f"membership 'broker' cannot run the strategy {name!r}: the broker decides, by its assignor 'uniform' "
            "(strategy='cooperative-sticky') or 'range' (strategy='range'). Use one of these, or membership 'streams'"
        )
    return ASSIGNORS[name]


def no_other_protocol(group_id: str, roster: Roster) -> None:
    """Check that all members are of membership ``broker``. Raises ``MembershipFatal`` for those of membership
    ``streams``, ``NoCommonStrategy`` for those of another program, ``BrokerUnavailable``: not known yet."""
    # The broker would convert the group. Those of ours do not understand its assignments, and the others would get
    # partitions whose events no member of ours sees.
    if roster.kind == "classic" and not roster.protocol:
        raise BrokerUnavailable(f"group {group_id} rebalances; what its members use is not known yet")
    if roster.protocol.startswith(group_bytes.PROTOCOL_PREFIX):
        raise MembershipFatal(
            f"group {group_id}: its members use membership 'streams' ({roster.protocol}), which the broker-side "
            "protocol cannot take over; stop all of them before changing the membership, or use a group id of its own"
        )
    if roster.strangers:
        raise NoCommonStrategy
