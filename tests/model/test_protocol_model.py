"""The commit and hand-over protocol, searched state by state: with all its rules it holds, without any one it does not.

``docs/internals/protocol-model.md`` explains the model; ``run.py`` prints the counterexamples in words.
"""

from __future__ import annotations

import functools

import pytest

from .configs import MISSED_IN, MISSED_LATE, NOT_MISSED, STANDARD
from .rules import Config, Model, Rule
from .search import Verdict, search

pytestmark = pytest.mark.timeout(900)  # seconds of wall: a search needs the processor, however busy the machine

AT_LEAST = 300_000
"""Distinct states in all standard configurations together."""


@functools.cache
def _searched(config: Config) -> Verdict:
    return search(Model(config, frozenset()))


@pytest.mark.parametrize("config", STANDARD, ids=lambda config: config.name)
def test_the_protocol_holds_in_every_reachable_state(config: Config) -> None:
    verdict = _searched(config)
    assert not verdict.problem, f"{config.name}: {verdict}"
    assert verdict.complete, config.name
    assert verdict.finished, f"{config.name}: no state in which every record is processed was reached"


def test_the_worlds_are_large_enough_to_mean_something() -> None:
    assert sum(_searched(config).states for config in STANDARD) >= AT_LEAST


@pytest.mark.parametrize("rule", list(MISSED_IN), ids=lambda rule: rule.name)
def test_without_the_rule_there_is_a_counterexample(rule: Rule) -> None:
    verdict = search(Model(MISSED_IN[rule], frozenset({rule})), limit=400_000)
    assert verdict.problem, f"without {rule.name} ({rule.value[1]}) nothing breaks: {verdict}"
    assert verdict.trace


@pytest.mark.parametrize(
    "config", sorted(set(MISSED_IN.values()), key=lambda config: repr(config)), ids=lambda c: c.name
)
def test_the_same_small_world_holds_with_the_rule(config: Config) -> None:
    """The counterexamples come from the missing rule, not from the small world."""
    verdict = search(Model(config, frozenset()), limit=30_000)
    assert not verdict.problem, str(verdict)


def test_every_rule_is_accounted_for() -> None:
    assert set(MISSED_IN) | set(MISSED_LATE) | NOT_MISSED == set(Rule)
    assert len(MISSED_IN) + len(MISSED_LATE) + len(NOT_MISSED) == len(Rule)


def test_a_trace_reads_as_sentences() -> None:
    rule = Rule.S7_FENCE
    verdict = search(Model(MISSED_IN[rule], frozenset({rule})))
    assert "FAULT A dies" in verdict.trace
    assert "stalled" in verdict.problem
    assert not any("{" in step for step in verdict.trace)
