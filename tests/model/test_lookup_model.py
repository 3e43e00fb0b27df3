"""A partition with a lookup, searched state by state: with all its rules no table is older than one before, without any
one there is such a table."""

from __future__ import annotations

import pytest

from tests.model.lookup_rules import DEEP, PLAIN, STANDARD, LookupConfig, LookupModel, LookupRule
from tests.model.search import search

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize(
    "config",
    [PLAIN, *(pytest.param(config, marks=pytest.mark.nightly) for config in (*STANDARD[1:], *DEEP))],
    ids=lambda config: config.name,
)
def test_no_partition_looks_into_an_older_table_in_any_reachable_state(config: LookupConfig) -> None:
    verdict = search(LookupModel(config))
    assert not verdict.problem, str(verdict)
    assert verdict.complete
    assert verdict.finished, "no state in which all rows were looked into, and recorded, was reached"


@pytest.mark.parametrize(
    "rule",
    [pytest.param(rule, marks=[] if rule.value[1] is PLAIN else pytest.mark.nightly) for rule in LookupRule],
    ids=lambda rule: rule.name,
)
def test_without_a_rule_of_lookups_there_is_a_counterexample(rule: LookupRule) -> None:
    _, config = rule.value
    verdict = search(LookupModel(config, frozenset({rule})), 400_000)
    assert "were there before" in verdict.problem, f"without {rule.name} no table is older: {verdict}"
    assert verdict.trace
