"""Take-overs with any answers: the steps end, and no partition is brought up before its turn."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from streams.core.takeover import BARRIER, ENDS, Stand, Step, next_step
from tests.property.kit import seeded

STALLED = 5.0
MOST = 3
"""Partitions of an attempt, and changes of each that are still to be read."""


class Attempt:
    """Carries the steps out. Each answer is drawn; anything may happen at a step that awaits."""

    def __init__(self, data: st.DataObject) -> None:
        self.draw = data.draw
        self.left = self.draw(st.lists(st.integers(0, MOST), min_size=1, max_size=MOST))
        self.stand = Stand(range(len(self.left)))
        self.steps: list[Step] = []
        self.ahead = {*self.stand.waiting}  # in this round
        self.is_away = [False for _ in self.left]
        self.is_up = [False for _ in self.left]
        self.is_current = True
        self.waits = 2 * sum(self.left) + 2
        """Each wait brings a record, or counts towards the stall."""

    def chance(self, percent: int = 20) -> bool:
        return self.draw(st.integers(0, 99)) >= 100 - percent

    def run(self) -> Step:
        while True:
            stand, one = self.stand, self.stand.at_hand
            stand.is_current = self.is_current
            if one is not None:
                one.is_restoring = not self.is_away[one.number]
                self.ahead.discard(one.number)
            step = next_step(stand, STALLED)
            self.steps.append(step)
            if step is Step.WAIT or step in ENDS:
                assert step is Step.GIVE_WAY or not self.ahead, "one that is not ready holds up no other"
            if step in ENDS:
                return step
            self.carry_out(step)

    def carry_out(self, step: Step) -> None:
        stand, one = self.stand, self.stand.at_hand
        if step in BARRIER:
            self.anything()
            stand.answer()
        elif one is None:
            assert step is Step.WAIT
            self.wait()
        elif step is Step.CHECK:
            one.is_complete = not self.left[one.number]
            one.looks_lost = one.is_complete and self.chance(50)
        elif step is Step.CHECK_END:
            self.anything()
            one.is_alone = not self.chance()
        elif step is Step.AWAIT_LOOKUPS:
            self.anything()
            one.has_lookups = True
        elif step is Step.FIND_MISSED:
            self.anything()
            if self.chance():
                stand.is_unanswered = True
                stand.pass_on()
            else:
                stand.searched.add(one.number)
        elif step is Step.BRING_UP:
            assert one.is_complete
            assert one.has_lookups
            assert one.number in stand.searched
            assert one.is_alone is not False
            assert one.is_alone == (True if one.looks_lost else None)
            assert self.is_current
            assert not self.is_away[one.number]
            assert not self.is_up[one.number]
            if self.chance():  # the tail puts records into the copy
                stand.pass_on()
            else:
                self.is_up[one.number] = True
                stand.leave()
        elif step is Step.PASS_ON:
            stand.pass_on()
        else:
            assert step is Step.LEAVE
            assert self.is_away[one.number]
            stand.leave()

    def wait(self) -> None:
        self.waits -= 1
        assert self.waits >= 0, "it waits without end"
        self.anything()
        reading = [number for number in self.stand.waiting if self.left[number]]
        if reading and self.chance(80):
            self.left[reading[0]] -= 1
            self.stand.unmoved_seconds = 0.0
        else:
            self.stand.unmoved_seconds += STALLED
        self.stand.begin_round()
        self.ahead = {*self.stand.waiting}

    def anything(self) -> None:
        """Partitions are taken away, or the membership ends."""
        for number in self.stand.waiting:
            self.is_away[number] = self.is_away[number] or self.chance(10)
        self.is_current = self.is_current and not self.chance(10)


@seeded
@given(st.data())
def test_the_steps_end_and_none_comes_before_its_turn(data: st.DataObject) -> None:
    attempt = Attempt(data)
    end = attempt.run()
    barrier, rest = attempt.steps[: len(BARRIER)], attempt.steps[len(BARRIER) :]
    assert tuple(barrier) == BARRIER
    assert not {*rest} & {*BARRIER}
    if end is Step.DONE:
        assert all(up or away for up, away in zip(attempt.is_up, attempt.is_away, strict=True))
