"""The relay's real loop in many orders: no row is lost, doubled or misplaced; each rule is missed when it is out."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.broker.gate import nightly
from tests.simulation.outbox_world import simulate

SEEDS = 60
MORE_SEEDS = 600
TRIES = 400


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Each lost answer would be a line."""
    logger = logging.getLogger("streams.outbox.shard")
    before, logger.disabled = logger.disabled, True
    yield
    logger.disabled = before


@pytest.mark.parametrize("seeds", [range(SEEDS), nightly(range(SEEDS, MORE_SEEDS))], ids=["few", "many"])
def test_rows_are_sent_once_in_their_order(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in seeds:
        try:
            simulate(seed, monkeypatch)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.parametrize("rule", ["O1", "O2", "O3", "O4", "O5", "O8"])
def test_a_rule_that_is_taken_out_is_missed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(TRIES):
        try:
            simulate(seed, monkeypatch, [rule])
        except AssertionError:
            return simulate(seed, monkeypatch)  # and the same world is right with it
    raise AssertionError(f"{TRIES} worlds do not miss {rule}")
