"""Safeguards of the group member's I/O, and of a take-over's questions, against a coordinator that speaks bytes."""

from __future__ import annotations

import inspect
import itertools
import math
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

from streams.kafka.group import join_answers
from streams.kafka.group.join_answers import GroupRequest, JoinStep
from streams.kafka.group.join_protocol import JoinProtocol
from streams.kafka.group.locating import CoordinatorLine
from streams.kafka.group.membership import GroupMembership
from streams.kafka.questions.takeover import WireTakeOver
from streams.kafka.wire import lines
from streams.kafka.wire.codes import Code
from streams.kafka.wire.connection import BrokerConnection

from .safeguards import Patch, left_out, missed, nothing


def _edited(function: Callable[..., Any], before: str, after: str) -> Any:
    """Return a function with a piece of its text replaced."""
    text = textwrap.dedent(inspect.getsource(function))
    assert text.count(before) == 1, f"AttributeError(: {function.__qualname__} has no {before!r} any more"
    names: dict[str, Any] = {}
    exec(compile("from __future__ import annotations\n" + text.replace(before, after), __file__, "exec"), function.__globals__, names)
    return names[function.__name__]


def edited(
    safeguard: str, owner: Any, name: str, before: str, after: str, rule: str, *profiles: str, seed: int = 0
) -> None:
    """Register a safeguard that is a piece of a method's text."""
    missed(rule, *profiles, seed=seed)(
        _named(safeguard, lambda patch: patch.setattr(owner, name, _edited(getattr(owner, name), before, after)))
    )


def _named(name: str, out: Callable[[Patch], None]) -> Callable[[Patch], None]:
    out.__name__ = name
    return out


def answered(
    safeguard: str, asked: Iterable[GroupRequest], codes: Iterable[Code], step: JoinStep, *profiles: str, seed: int = 0
) -> None:
    """Register a safeguard that is a row of the member's table: the next step after an answer."""

    def out(patch: Patch) -> None:
        for question, code in itertools.product(asked, codes):
            patch.setitem(join_answers._ROWS[question], code, step)
            for key in [key for key in join_answers._BY_STANDING if key[1:] == (question, code)]:
                patch.delitem(join_answers._BY_STANDING, key)

    missed("answers", *profiles, seed=seed)(_named(safeguard, out))


FAULTS = ("coordinators", "forgets", "evictions", "crashes")

answered("evicted_members_do_not_hear_of_it", [GroupRequest.HEARTBEAT], [Code.UNKNOWN_MEMBER_ID], JoinStep.TAKE, *FAULTS)
answered("rebalances_are_not_heard_of", [GroupRequest.HEARTBEAT], [Code.REBALANCE_IN_PROGRESS], JoinStep.TAKE, "smooth_moves", "moves", *FAULTS)
answered("another_generation_is_not_heard_of", [GroupRequest.HEARTBEAT], [Code.ILLEGAL_GENERATION], JoinStep.TAKE, *FAULTS)
answered("a_moved_coordinator_is_not_looked_for", [GroupRequest.JOIN, GroupRequest.SYNC, GroupRequest.HEARTBEAT], [Code.NOT_COORDINATOR], JoinStep.WAIT, *FAULTS)
answered("the_id_that_is_given_first_is_not_taken", [GroupRequest.JOIN], [Code.MEMBER_ID_REQUIRED], JoinStep.JOIN_ANEW, *FAULTS)
answered("a_late_sync_is_taken_for_a_plan", [GroupRequest.SYNC], [Code.REBALANCE_IN_PROGRESS, Code.ILLEGAL_GENERATION], JoinStep.TAKE, *FAULTS)
answered("a_sync_that_is_unknown_is_tried_again", [GroupRequest.SYNC], [Code.UNKNOWN_MEMBER_ID], JoinStep.JOIN_AGAIN, *FAULTS)
edited("generations_may_go_back", JoinProtocol, "_join", "if self._generation <= before:", "if False:", "generations", *FAULTS)
edited(
    "generations_are_published_with_their_plan", JoinProtocol, "_join",
    "self._hooks.published(self._generation, self.member_id)\n    return (await self._synced(self._plan(joined))).assignment",
    "plan = (await self._synced(self._plan(joined))).assignment\n    self._hooks.published(self._generation, self.member_id)\n    return plan",
    "generations", "smooth_moves", "moves", *FAULTS,
)  # fmt: skip
edited("ids_are_used_again_when_all_is_void", JoinProtocol, "_void", 'former, self.member_id, self._generation = self.member_id, "", -1', "former, self._generation = self.member_id, -1", "ids", *FAULTS)
edited("requests_during_a_join_are_forgotten", JoinProtocol, "_join", "self.member_id, self._generation = joined.member_id, joined.generation_id", "self.member_id, self._generation, self._must_join = joined.member_id, joined.generation_id, False", "news", "moves", "slow_restores", "standbys", *FAULTS)
edited("plans_of_a_lost_membership_are_applied", GroupMembership, "_apply", "generation < 0 or self.group_metadata.generation != generation", "False", "generations", *FAULTS)
edited("another_id_is_no_loss", GroupMembership, "published", "before.generation >= 0 and before.member_id != member_id", "False", "ids", *FAULTS)
edited("answers_are_not_compared_with_their_requests", BrokerConnection, "data_received", 'or int.from_bytes(frame[:4], "big", signed=True) != self._waiting[0][0]', "", "connections", *FAULTS)
edited("coordinators_may_be_silent_for_ever", CoordinatorLine, "ask", "asyncio.timeout(seconds)", "asyncio.timeout(None)", "connections", *FAULTS)
edited("pending_offsets_are_not_waited_for", WireTakeOver, "stable_offsets", "stable=True", "stable=False", "take-over", "crashes", "forgets", "evictions", "late", "unclear_moves", "struck_moves")


@missed("throttling", *FAULTS)
def an_hour_of_throttling_is_waited_for(patch: Patch) -> None:
    patch.setattr(lines, "MOST_THROTTLE_SECONDS", math.inf)



edited("nobody_beats", JoinProtocol, "_synced", "self._beats = self._client.spawn(self._beat())", "pass", "heartbeats", *FAULTS)
edited("joins_are_given_up_soon", JoinProtocol, "_joined", "seconds = max(", "seconds = min(1.0, ", "connections", "rebalances", "slow_rebalances", *FAULTS)
edited("news_during_a_join_are_forgotten", GroupMembership, "joined", "self._join_for_news()", "pass", "news", "moves", "slow_restores", "standbys", *FAULTS)
edited("what_came_late_is_no_reason_to_join_again", GroupMembership, "_apply", "if joins_again and not state.is_dismissed(assignment):", "if False:", "news", "rebalances", "moves", *FAULTS)
edited("a_barrier_is_not_waited_for", GroupMembership, "_apply", "while revoked := holdings.revoked_by(assignment):", "while revoked := None:", "barrier", "rebalances", *FAULTS)
