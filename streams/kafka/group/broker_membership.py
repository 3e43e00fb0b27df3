"""A member of a group that the broker shares out (KIP-848). The rules are those of ``membership``, on another
protocol: no report and no order travels, and a barrier ends with the heartbeat that no longer names what was revoked.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import Any, Final, cast

from streams.core.group_member import GracePeriod
from streams.errors import BrokerUnavailable, MembershipFatal, StreamsError
from streams.kafka.group import refusals
from streams.kafka.group.broker_group import RosterTakeOver, broker_assignor, no_other_protocol
from streams.kafka.group.broker_protocol import BrokerProtocol, NameHeld
from streams.kafka.group.group_settings import GroupSettings
from streams.kafka.group.link import CannotJoinYet
from streams.kafka.group.membership import GroupMembership
from streams.kafka.wire.client import WireClient
from streams.kafka.wire.security import PLAINTEXT, Security
from streams.model.group import Assigned, Assignment, Copies

log = logging.getLogger(__name__)

_ASK_SECONDS: Final = 1.5  # for one question to the coordinator
_PAUSE: Final = 0.2  # seconds between two tries while another member has the name
RIVAL_SECONDS: Final = 1.0
"""Seconds from an assignment to a look for another member of our name, and between such looks."""


def connect_broker_group(
    bootstrap_servers: str,
    group_id: str,
    topic: str,
    partitions: int,
    instance: str,
    strategies: tuple[str, ...],
    *,
    transaction_timeout_ms: int = 5000,
    security: Security = PLAINTEXT,
    alive: Callable[[], bool] = lambda: True,
    changelog: str = "",
    **settings: Any,
) -> tuple[BrokerMembership, RosterTakeOver]:
    """A membership and the take-over questions, as of ``connect_group``. Session and heartbeat are settings of the
    broker, and those of ``settings`` have no effect. Raises ``ConfigError``."""
    checked = GroupSettings(
        group_id=group_id,
        topic=topic,
        instance=instance,
        partitions=partitions,
        server_assignor=broker_assignor(strategies),
        **settings,
    )
    client = WireClient(bootstrap_servers, instance, security)
    take_over = RosterTakeOver(client, group_id, topic, changelog=changelog)
    return BrokerMembership(client, checked, take_over, alive, transaction_timeout_ms), take_over


class BrokerMembership(GroupMembership):
    """See ``GroupMembership``. ``take_over`` is on the same client."""

    def __init__(
        self,
        client: WireClient,
        settings: GroupSettings,
        take_over: RosterTakeOver,
        alive: Callable[[], bool] = lambda: True,
        transaction_timeout_ms: int = 5000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(client, settings, alive, clock=clock)
        self._take_over, self._transaction_ms = take_over, transaction_timeout_ms
        take_over.member_id = lambda: self.group_metadata.member_id
        self._is_admitted, self._session = False, 0.0
        self._strangers: tuple[str, ...] = ()  # members of another program
        self._others: frozenset[str] = frozenset()  # as of the last look: a take-over asks for them when it needs them
        self._look_at = math.inf

    def report(self, copies: Copies, *, announce: bool) -> None:
        """Do nothing: no leader would read it."""

    # ------------------------------------------------------------------ the client's loop

    def _new_protocol(self) -> BrokerProtocol:
        return BrokerProtocol(self, self._client, self._settings)

    @property
    def _member(self) -> BrokerProtocol:
        return cast("BrokerProtocol", self._protocol)

    @property
    def owned(self) -> frozenset[int]:
        """See ``broker_protocol.BrokerHooks``."""
        return self._state.holdings.owned

    async def shared_out(self, epoch: int, own: frozenset[int]) -> None:
        """See ``broker_protocol.BrokerHooks``."""
        incarnation, holdings = self.group_metadata.incarnation, self._state.holdings
        if self.group_metadata.generation < 0 or (own == holdings.owned and holdings.generation >= 0):
            return  # lost meanwhile; or applied already
        while revoked := holdings.owned - own:
            if not await self._barrier(incarnation, revoked):
                return
        self._state.rival.passed()
        self._look_at = self._now() + RIVAL_SECONDS
        members = self._instance, *sorted(self._others)
        self._assigned(self.group_metadata.generation, Assignment(own=own, members=members))

    async def _step(self) -> None:
        if self._state.holdings.leaving:
            await self._leave()
            return
        try:
            if not self._is_admitted:
                await self._look_before()
            elif self._now() >= self._look_at:
                await self._look_again()
            if self._is_admitted:
                await super()._step()
                return
        except NameHeld:
            self._met_rival()
        if self._state.rival.is_over(self._now()):
            self._end(refusals.name_taken(self._group_id, self._instance))
        await asyncio.sleep(_PAUSE)

    async def _look_before(self) -> None:
        """Join only when no member of the group has our name (a killed predecessor expires), and nothing else speaks
        against it. Raises ``CannotJoinYet``, and ``NoCommonStrategy`` for members of another program."""
        deadline = self._now() + _ASK_SECONDS
        try:
            roster = await self._take_over.roster(deadline)
            self._has_session(await self._take_over.session_ms(self._transaction_ms, deadline) / 1000)
            self._strangers = roster.strangers
            no_other_protocol(self._group_id, roster)
        except BrokerUnavailable as error:
            raise CannotJoinYet(str(error), is_outage=False) from error
        # Of a static name the broker itself allows one member only.
        if self._static_id is None and roster.rivals(self._instance, ""):
            self._met_rival()
        else:
            self._is_admitted, self._others = True, roster.instances - {self._instance}

    def _has_session(self, seconds: float) -> None:
        if seconds != self._session:
            self._session = seconds
            self._member.has_session(seconds)
            self._state.rival = GracePeriod(seconds + self._settings.rebalance_timeout_ms / 1000)
            self._state.no_common_strategy = GracePeriod(seconds + 1.0)

    async def _look_again(self) -> None:
        """Two processes of one name that joined at the same moment did not see each other before."""
        self._look_at = self._now() + RIVAL_SECONDS
        own = self.group_metadata.member_id
        try:
            roster = await self._take_over.roster(self._now() + _ASK_SECONDS)
        except StreamsError:
            return
        self._others = roster.instances - {self._instance}
        if roster.strangers != self._strangers:  # it came after us, which the broker allows
            self._strangers = roster.strangers
            if self._strangers:
                log.error("%s", refusals.strangers(self._group_id, self._strangers))
        rivals = [] if self._static_id is not None else roster.rivals(self._instance, own)
        if not rivals:
            self._state.rival.passed()
            self._look_at = math.inf
        elif own > min(rivals):  # the one with the least id stays: both would go, otherwise
            self._met_rival()

    async def _leave(self) -> None:
        """Give everything up, leave for good, and say that it is done."""
        if not self.owned or await self._barrier(self.group_metadata.incarnation, self.owned):
            generation = self.group_metadata.generation
            await self._depart_at_once()
            assert self._deliver is not None
            dismissed = Assignment(members=(self._instance,), quit=True)
            none = frozenset[int]()
            self._deliver(Assigned(self.group_metadata.incarnation, generation, none, none, dismissed))

    async def _depart(self, deadline: float) -> None:
        member_id, stays = self.joining_as, self._static_id is not None and not self._state.holdings.leaving
        await super()._depart(deadline)
        if member_id and stays:
            await self._member.leave(member_id, deadline, for_good=False)

    def _foreign(self) -> MembershipFatal:
        if self._strangers:
            return refusals.strangers(self._group_id, self._strangers)
        return refusals.other_protocol(self._group_id)
