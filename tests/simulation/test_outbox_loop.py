"""The relay's real loop in many orders: no row is lost, doubled or misplaced; each rule is missed when it is out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.broker.gate import nightly
from tests.simulation.outbox_world import simulate
from tests.simulation.seeds import assert_missed, assert_right, silent

SEEDS = 60
MORE_SEEDS = 600
TRIES = 400


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with silent("streams.outbox.shard"):
        yield


@pytest.mark.parametrize("seeds", [range(SEEDS), nightly(range(SEEDS, MORE_SEEDS))], ids=["few", "many"])
def test_rows_are_sent_once_in_their_order(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_right(simulate, seeds, monkeypatch)


@pytest.mark.parametrize("rule", ["O1", "O2", "O3", "O4", "O5", "O8"])
def test_a_rule_that_is_taken_out_is_missed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_missed(simulate, rule, TRIES, monkeypatch)
