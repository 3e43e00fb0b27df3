"""Commands, folders, inputs, durable jobs, a journal, loaded state, lookups, markers, muted sources, an
outbox, parked keys, snapshots, and the switch between two sources, searched state by state: with all its rules each
holds, without any one it does not."""

from __future__ import annotations

from enum import Enum
from types import ModuleType
from typing import Any

import pytest

from tests.model import (
    commands_rules,
    folder_rules,
    inputs_rules,
    jobs_rules,
    journal_rules,
    loading_rules,
    lookup_rules,
    marker_rules,
    muted_rules,
    outbox_rules,
    parking_rules,
    snapshot_rules,
    switch_back_rules,
    switch_rules,
    switch_timers_rules,
)
from tests.model.search import search

pytestmark = pytest.mark.timeout(900)

MODELS: dict[type[Enum], tuple[type[Any], ModuleType, Any]] = {
    commands_rules.CommandsRule: (commands_rules.CommandsModel, commands_rules, commands_rules.STANDARD),
    folder_rules.FolderRule: (folder_rules.FolderModel, folder_rules, folder_rules.STANDARD),
    inputs_rules.InputsRule: (inputs_rules.InputsModel, inputs_rules, inputs_rules.STANDARD[:1]),
    jobs_rules.JobsRule: (jobs_rules.JobsModel, jobs_rules, jobs_rules.STANDARD),
    journal_rules.JournalRule: (journal_rules.JournalModel, journal_rules, journal_rules.STANDARD),
    loading_rules.LoadingRule: (loading_rules.LoadingModel, loading_rules, loading_rules.STANDARD),
    lookup_rules.LookupRule: (lookup_rules.LookupModel, lookup_rules, lookup_rules.STANDARD[:1]),
    marker_rules.MarkerRule: (marker_rules.MarkerModel, marker_rules, marker_rules.STANDARD),
    muted_rules.MutedRule: (muted_rules.MutedModel, muted_rules, muted_rules.STANDARD),
    outbox_rules.OutboxRule: (outbox_rules.OutboxModel, outbox_rules, outbox_rules.STANDARD[:1]),
    parking_rules.ParkingRule: (parking_rules.ParkingModel, parking_rules, parking_rules.STANDARD[:1]),
    snapshot_rules.SnapshotRule: (snapshot_rules.SnapshotModel, snapshot_rules, snapshot_rules.STANDARD),
    switch_back_rules.BackRule: (switch_back_rules.BackModel, switch_back_rules, switch_back_rules.STANDARD),
    switch_rules.SwitchRule: (switch_rules.SwitchModel, switch_rules, switch_rules.STANDARD[:1]),
    switch_timers_rules.TimersRule: (
        switch_timers_rules.TimersModel,
        switch_timers_rules,
        switch_timers_rules.STANDARD,
    ),
}
"""By the rules of each: its model, the module of its worlds, and those worlds that every change explores."""
NIGHTLY = {*snapshot_rules.DEEP, *lookup_rules.STANDARD[1:]}
"""Worlds of rules that are taken out nightly only."""
FARTHEST = {outbox_rules.OutboxRule.GUARD}
"""So are these rules; ``unit/test_outbox.py`` has what they say."""

WORLDS = [
    pytest.param(
        model, world, id=f"{model.__name__}-{world.name}", marks=[] if world in every_change else pytest.mark.nightly
    )
    for model, module, every_change in MODELS.values()
    for world in (*module.STANDARD, *module.DEEP)
]
RULES = [
    pytest.param(
        rule,
        id=f"{of.__name__}-{rule.name}",
        marks=pytest.mark.nightly if rule.value[1] in NIGHTLY or rule in FARTHEST else [],
    )
    for of in MODELS
    for rule in of
]


@pytest.mark.parametrize(("model", "world"), WORLDS)
def test_the_rules_hold_in_every_reachable_state(model: type[Any], world: Any) -> None:
    verdict = search(model(world))
    assert not verdict.problem, str(verdict)
    assert verdict.complete
    assert verdict.finished, "no state was reached in which everything is done"


@pytest.mark.parametrize("rule", RULES)
def test_without_a_rule_there_is_a_counterexample(rule: Enum) -> None:
    verdict = search(MODELS[type(rule)][0](rule.value[1], frozenset({rule})), 400_000)
    assert verdict.problem, f"without {rule.name} nothing breaks: {verdict}"
    if isinstance(rule, lookup_rules.LookupRule):
        assert "were there before" in verdict.problem, f"without {rule.name} no table is older: {verdict}"
    assert verdict.trace
