"""Rules of a member's protocol that no world misses when they are taken out, because what goes wrong is mended soon:
each by the scene that misses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from streams.core.group_member import GroupMember
from streams.kafka.group import join_answers
from streams.kafka.group.join_answers import GroupRequest, JoinStep
from streams.kafka.group.join_protocol import JoinProtocol
from streams.kafka.group.membership import GroupMembership
from streams.kafka.wire.codes import Code

from . import test_join_protocol as scenes
from .member_safeguards import edited_text


def a_late_sync_group_is_taken_for_a_plan(patch: pytest.MonkeyPatch) -> None:
    for code in (Code.UNKNOWN_MEMBER_ID, Code.ILLEGAL_GENERATION, Code.REBALANCE_IN_PROGRESS):
        patch.setitem(join_answers._ROWS[GroupRequest.SYNC], code, JoinStep.TAKE)  # type: ignore[arg-type]


def generations_may_go_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(JoinProtocol, "_join", edited_text(JoinProtocol._join, "if self._generation <= before:", "if False:"))


def the_generation_is_published_behind_sync_group(patch: pytest.MonkeyPatch) -> None:
    published, late = GroupMembership.published, list[tuple[int, str]]()
    synced = JoinProtocol._synced

    async def publish(self: JoinProtocol, plan: dict[str, bytes]) -> Any:
        answer = await synced(self, plan)
        published(self._hooks, *late.pop())  # type: ignore[arg-type]
        return answer

    patch.setattr(GroupMembership, "published", lambda _, *of: late.append(of))
    patch.setattr(JoinProtocol, "_synced", publish)


def any_assignment_is_an_answer_to_the_last_report(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GroupMember, "is_answer_to_report", lambda *_: True)


@pytest.mark.filterwarnings("ignore")  # tasks that a scene leaves behind when it fails
@pytest.mark.parametrize(
    ("out", "scene"),
    [
        (a_late_sync_group_is_taken_for_a_plan, scenes.a_member_that_freezes_before_its_sync_group_is_not_waited_for),
        (generations_may_go_back, scenes.an_old_generation_from_a_coordinator_is_not_taken),
        (the_generation_is_published_behind_sync_group, scenes.the_generation_is_published_before_sync_group),
        (
            any_assignment_is_an_answer_to_the_last_report,
            scenes.a_restarted_static_member_does_not_take_what_was_made_for_its_predecessor,
        ),
    ],
    ids=lambda each: each.__name__,
)
def test_a_rule_that_is_left_out_is_missed(
    out: Callable[[pytest.MonkeyPatch], None], scene: scenes.Scene, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        out(patch)
        with pytest.raises(AssertionError):
            scenes.play(scene, caplog)
