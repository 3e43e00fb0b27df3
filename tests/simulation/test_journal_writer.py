"""The journal's real writer in many orders: each append gets its right answer; each rule is missed when it is out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.broker.gate import nightly
from tests.simulation.journal_world import simulate
from tests.simulation.seeds import assert_missed, assert_right, silent

SEEDS = 80
MORE_SEEDS = 800
TRIES = 400


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with silent("streams.journal.writer"):
        yield


@pytest.mark.parametrize("seeds", [range(SEEDS), nightly(range(SEEDS, MORE_SEEDS))], ids=["few", "many"])
def test_each_append_gets_its_right_answer(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_right(simulate, seeds, monkeypatch)


@pytest.mark.parametrize("rule", ["J1", "J3", "J3b", "J5"])
def test_a_rule_of_the_journal_that_is_taken_out_is_missed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_missed(simulate, rule, TRIES, monkeypatch)
