"""The relay's protocol, searched state by state: with all its rules it holds, without any one it does not."""

from __future__ import annotations

import pytest

from tests.model.outbox_rules import DEEP, STANDARD, OutboxConfig, OutboxModel, OutboxRule
from tests.model.search import search

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize(
    "config",
    [*STANDARD, *(pytest.param(config, marks=pytest.mark.nightly) for config in DEEP)],
    ids=lambda config: config.name,
)
def test_the_protocol_of_the_outbox_holds_in_every_reachable_state(config: OutboxConfig) -> None:
    verdict = search(OutboxModel(config))
    assert not verdict.problem, str(verdict)
    assert verdict.complete
    assert verdict.finished, "no state in which every row is in Kafka and deleted was reached"


@pytest.mark.parametrize("rule", OutboxRule, ids=lambda rule: rule.name)
def test_without_a_rule_of_the_outbox_there_is_a_counterexample(rule: OutboxRule) -> None:
    _, config = rule.value
    verdict = search(OutboxModel(config, frozenset({rule})), 400_000)
    assert verdict.problem, f"without {rule.name} nothing breaks: {verdict}"
    assert verdict.trace
