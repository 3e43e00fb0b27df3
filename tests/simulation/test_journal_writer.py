"""The journal's real writer in many orders: each append gets its right answer; each rule is missed when it is out."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.broker.gate import nightly
from tests.simulation.journal_world import simulate

SEEDS = 80
MORE_SEEDS = 800
TRIES = 400


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Each lost answer would be a line."""
    logger = logging.getLogger("streams.journal.writer")
    before, logger.disabled = logger.disabled, True
    yield
    logger.disabled = before


@pytest.mark.parametrize("seeds", [range(SEEDS), nightly(range(SEEDS, MORE_SEEDS))], ids=["few", "many"])
def test_each_append_gets_its_right_answer(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in seeds:
        try:
            simulate(seed, monkeypatch)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.parametrize("rule", ["J1", "J3", "J3b", "J5"])
def test_a_rule_of_the_journal_that_is_taken_out_is_missed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(TRIES):
        try:
            simulate(seed, monkeypatch, [rule])
        except AssertionError:
            return simulate(seed, monkeypatch)  # and the same world is right with it
    raise AssertionError(f"{TRIES} worlds do not miss {rule}")
