"""The journal's protocol, searched state by state: with all its rules it holds, without any one it does not."""

from __future__ import annotations

import pytest

from tests.model.journal_rules import DEEP, STANDARD, JournalModel, JournalRule, JournalWorld
from tests.model.search import search

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize(
    "config",
    [*STANDARD, *(pytest.param(config, marks=pytest.mark.nightly) for config in DEEP)],
    ids=lambda config: config.name,
)
def test_the_protocol_of_the_journal_holds_in_every_reachable_state(config: JournalWorld) -> None:
    verdict = search(JournalModel(config))
    assert not verdict.problem, str(verdict)
    assert verdict.complete
    assert verdict.finished, "no state in which every append has its answer was reached"


@pytest.mark.parametrize("rule", JournalRule, ids=lambda rule: rule.name)
def test_without_a_rule_of_the_journal_there_is_a_counterexample(rule: JournalRule) -> None:
    _, config = rule.value
    verdict = search(JournalModel(config, frozenset({rule})), 400_000)
    assert verdict.problem, f"without {rule.name} nothing breaks: {verdict}"
    assert verdict.trace
