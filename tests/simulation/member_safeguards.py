"""Safeguards of a member's I/O and of the connections under it, against a coordinator that speaks bytes."""

from __future__ import annotations

import inspect
import math
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

from streams.kafka.group import join_answers
from streams.kafka.group.join_answers import GroupRequest, JoinStep
from streams.kafka.group.join_protocol import JoinProtocol
from streams.kafka.group.locating import CoordinatorLine
from streams.kafka.wire import lines
from streams.kafka.wire.codes import Code
from streams.kafka.wire.connection import BrokerConnection

from .safeguards import Patch, left_out, missed

JOIN, SYNC, HEARTBEAT = GroupRequest.JOIN, GroupRequest.SYNC, GroupRequest.HEARTBEAT


def edited_text(function: Callable[..., Any], before: str, after: str) -> Any:
    """Return a function with a piece of its text replaced."""
    text = textwrap.dedent(inspect.getsource(function))
    assert text.count(before) == 1, f"{function.__qualname__} has no {before!r} any more"
    made: dict[str, Any] = {}
    code = compile(f"from __future__ import annotations\n{text.replace(before, after)}", __file__, "exec")
    exec(code, function.__globals__, made)
    return made[function.__name__]


def edited(name: str, owner: Any, method: str, before: str, after: str, rule: str, profile: str, seed: int = 0) -> None:
    """Register a safeguard that is a piece of a method's text."""
    left_out(name, owner, method, edited_text(getattr(owner, method), before, after), rule, profile, seed=seed)


def answered(
    name: str, requests: Iterable[GroupRequest], code: Code, step: JoinStep, *profiles: str, seed: int = 0
) -> None:
    """Register a safeguard that is a row of the member's table: the next step after an answer."""

    def out(patch: Patch) -> None:
        for request in requests:
            patch.setitem(join_answers._ROWS[request], code, step)
            for standing in join_answers.MemberStanding:
                patch.delitem(join_answers._BY_STANDING, (standing, request, code), raising=False)

    out.__name__ = name
    missed("answers", *profiles, seed=seed)(out)


# -- answers of the group ----------------------------------------------------------------------------------------------

answered("evictions_are_not_heard_of", [HEARTBEAT], Code.UNKNOWN_MEMBER_ID, JoinStep.TAKE, "coordinators")
answered("rebalances_are_not_heard_of", [HEARTBEAT], Code.REBALANCE_IN_PROGRESS, JoinStep.TAKE, "smooth_moves")
answered("the_id_that_is_given_first_is_not_taken", [JOIN], Code.MEMBER_ID_REQUIRED, JoinStep.JOIN_ANEW, "coordinators")
answered(
    "a_coordinator_that_moved_is_not_looked_for",
    [JOIN, SYNC, HEARTBEAT], Code.NOT_COORDINATOR, JoinStep.WAIT, "coordinators", seed=1,
)  # fmt: skip
edited(
    "ids_are_used_again_when_all_is_void",
    JoinProtocol, "_void", 'self.member_id, self._generation = self.member_id, "", -1',
    "self._generation = self.member_id, -1", "ids", "coordinators",
)  # fmt: skip
edited(
    "members_do_not_beat",
    JoinProtocol, "_synced", "self._beats = self._client.spawn(self._beat())", "pass", "heartbeats", "coordinators",
)  # fmt: skip
edited(
    "joins_do_not_have_the_time_of_a_rebalance",
    JoinProtocol, "_joined", "seconds = max(", "seconds = min(1.0, ", "time", "slow_rebalances", seed=11,
)  # fmt: skip

# -- connections -------------------------------------------------------------------------------------------------------

edited(
    "coordinators_may_be_silent_for_ever",
    CoordinatorLine, "ask", "asyncio.timeout(seconds)", "asyncio.timeout(None)", "connections", "coordinators", seed=1,
)  # fmt: skip
edited(
    "answers_are_not_compared_with_their_requests",
    BrokerConnection, "_answered", 'int.from_bytes(frame[:4], "big", signed=True) != self._waiting[0][0]', "False",
    "connections", "coordinators", seed=32,
)  # fmt: skip


@missed("throttling", "coordinators", seed=6)
def an_hour_of_throttling_is_waited_for(patch: Patch) -> None:
    patch.setattr(lines, "MOST_THROTTLE_SECONDS", math.inf)
