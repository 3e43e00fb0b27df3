"""The protocol of snapshots, searched state by state: with all its rules it holds, without any one it does not."""

from __future__ import annotations

import pytest

from tests.model.search import search
from tests.model.snapshot_rules import DEEP, STANDARD, SnapshotConfig, SnapshotModel, SnapshotRule

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize(
    "config",
    [*STANDARD, *(pytest.param(config, marks=pytest.mark.nightly) for config in DEEP)],
    ids=lambda config: config.name,
)
def test_the_protocol_of_snapshots_holds_in_every_reachable_state(config: SnapshotConfig) -> None:
    verdict = search(SnapshotModel(config))
    assert not verdict.problem, str(verdict)
    assert verdict.complete
    assert verdict.finished, "no state in which all snapshots are made was reached"


@pytest.mark.parametrize(
    "rule",
    [pytest.param(rule, marks=pytest.mark.nightly) if rule.value[1] in DEEP else rule for rule in SnapshotRule],
    ids=lambda rule: rule.name,
)
def test_without_a_rule_of_snapshots_there_is_a_counterexample(rule: SnapshotRule) -> None:
    _, config = rule.value
    verdict = search(SnapshotModel(config, frozenset({rule})), 400_000)
    assert verdict.problem, f"without {rule.name} nothing breaks: {verdict}"
    assert verdict.trace
