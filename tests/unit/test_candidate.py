"""A candidate over a scripted group: leaving it does not wait for brokers that do not answer."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from streams.errors import NotLeading
from streams.runtime.ownership.candidate import Candidate
from tests.unit.waiting import until


class SilentTenure:
    """A tenure whose group does not answer from its second question on; it notes how long each may take."""

    is_over, reason = False, ""

    def __init__(self) -> None:
        self.asked: list[float] = []

    def is_confirmed(self, seconds: float) -> bool:
        self.asked.append(seconds)
        return len(self.asked) == 1

    def done(self) -> None: ...


class ClosedThings:
    """Claim and group."""

    def start(self) -> None: ...
    def close(self, seconds: float = 0.0) -> None: ...


class BareTerm:
    """A term that is begun, and nothing else."""

    token, reason = 7, ""

    def end(self, reason: str) -> None:
        self.reason = self.reason or reason


@pytest.mark.parametrize(("session", "longest"), [(1_800.0, 3.0), (1.0, 1.0)])
async def test_no_question_to_the_group_keeps_the_close_for_longer_than_seconds(
    session: float, longest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streams.runtime.ownership.candidate._CHECKS", session / 0.01)
    candidate, things, tenure = Candidate("ledger", session), ClosedThings(), SilentTenure()
    parts: Any = (things, things)
    elected: Any = tenure
    await candidate.open(lambda owner: parts)
    candidate.tenure_begins(elected)
    with contextlib.suppress(NotLeading):
        async with asyncio.timeout(20), candidate.term(lambda claim, tenure: BareTerm()):
            await until(lambda: len(tenure.asked) > 2)
    await candidate.close()
    assert set(tenure.asked) == {longest}
