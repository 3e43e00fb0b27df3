"""A partition with two inputs, searched state by state: with all its rules it holds, without any one it does not."""

from __future__ import annotations

import pytest

from tests.model.inputs_rules import DEEP, STANDARD, InputsConfig, InputsModel, InputsRule
from tests.model.search import search

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize(
    "config",
    [STANDARD[0], *(pytest.param(config, marks=pytest.mark.nightly) for config in (*STANDARD[1:], *DEEP))],
    ids=lambda config: config.name,
)
def test_two_inputs_hold_in_every_reachable_state(config: InputsConfig) -> None:
    verdict = search(InputsModel(config))
    assert not verdict.problem, str(verdict)
    assert verdict.complete
    assert verdict.finished, "no state in which every record is handled and committed was reached"


@pytest.mark.parametrize("rule", InputsRule, ids=lambda rule: rule.name)
def test_without_a_rule_of_two_inputs_there_is_a_counterexample(rule: InputsRule) -> None:
    _, config = rule.value
    verdict = search(InputsModel(config, frozenset({rule})), 400_000)
    assert verdict.problem, f"without {rule.name} nothing breaks: {verdict}"
    assert verdict.trace
