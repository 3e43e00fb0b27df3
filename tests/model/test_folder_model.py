"""The rules of folders, searched state by state: with all its rules it holds, without any one it does not."""

from __future__ import annotations

import pytest

from tests.model.folder_rules import DEEP, STANDARD, FolderConfig, FolderModel, FolderRule
from tests.model.search import search

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize(
    "config",
    [*STANDARD, *(pytest.param(config, marks=pytest.mark.nightly) for config in DEEP)],
    ids=lambda config: config.name,
)
def test_the_rules_of_folders_hold_in_every_reachable_state(config: FolderConfig) -> None:
    verdict = search(FolderModel(config))
    assert not verdict.problem, str(verdict)
    assert verdict.complete
    assert verdict.finished, "no state in which all is on disk was reached"


@pytest.mark.parametrize("rule", FolderRule, ids=lambda rule: rule.name)
def test_without_a_rule_of_folders_there_is_a_counterexample(rule: FolderRule) -> None:
    _, config = rule.value
    verdict = search(FolderModel(config, frozenset({rule})), 400_000)
    assert verdict.problem, f"without {rule.name} nothing breaks: {verdict}"
    assert verdict.trace
