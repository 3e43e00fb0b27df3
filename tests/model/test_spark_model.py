"""The Spark sink's protocol, searched state by state: with all its rules it holds, without any one it does not.

``docs/internals/spark-protocol.md`` explains the model; ``run.py --spark`` prints the counterexamples in words.
"""

from __future__ import annotations

import functools

import pytest

from .search import Verdict
from .spark_configs import HOLES, MISSED_IN, MISSED_LATE, STANDARD
from .spark_rules import Config, LaneConfig, Rule
from .spark_search import model_of, search

pytestmark = pytest.mark.timeout(900)  # seconds of wall: a search needs the processor, however busy the machine

AT_LEAST = 500_000
"""Distinct states in all standard worlds together."""


@functools.cache
def _searched(config: Config | LaneConfig) -> Verdict:
    return search(model_of(config))


@pytest.mark.parametrize("config", STANDARD, ids=lambda config: config.name)
def test_the_protocol_holds_in_every_reachable_state(config: Config | LaneConfig) -> None:
    verdict = _searched(config)
    assert not verdict.problem, f"{config.name}: {verdict}"
    assert verdict.complete, config.name
    assert verdict.finished, f"{config.name}: no state in which everything is written was reached"


def test_the_worlds_are_large_enough_to_mean_something() -> None:
    assert sum(_searched(config).states for config in STANDARD) >= AT_LEAST


@pytest.mark.parametrize("rule", list(MISSED_IN), ids=lambda rule: rule.name)
def test_without_the_rule_there_is_a_counterexample(rule: Rule) -> None:
    verdict = search(model_of(MISSED_IN[rule], {rule}), limit=100_000)
    assert verdict.problem, f"without {rule.name} ({rule.value}) nothing breaks: {verdict}"
    assert verdict.trace


@pytest.mark.parametrize("config", sorted(set(MISSED_IN.values()), key=repr), ids=lambda config: config.name)
def test_the_same_small_world_holds_with_the_rule(config: Config | LaneConfig) -> None:
    """The counterexamples come from the missing rule, not from the small world."""
    verdict = search(model_of(config), limit=30_000)
    assert not verdict.problem, str(verdict)


@pytest.mark.parametrize("config", HOLES, ids=lambda config: config.name)
def test_what_no_rule_closes_is_still_open(config: Config) -> None:
    """The page says that these end badly. When one does not any more, the page is to be changed."""
    assert search(model_of(config)).problem


def test_every_rule_is_accounted_for() -> None:
    assert set(MISSED_IN) | set(MISSED_LATE) == set(Rule)
    assert len(MISSED_IN) + len(MISSED_LATE) == len(Rule)


def test_a_trace_reads_as_sentences() -> None:
    verdict = search(model_of(MISSED_IN[Rule.READ_AFTER_INIT], {Rule.READ_AFTER_INIT}))
    assert "driver 0 reads the marker" in verdict.trace
    assert verdict.problem == "rows of batch 0 of Q1 are committed twice"
    lanes = search(model_of(MISSED_IN[Rule.PINNED], {Rule.PINNED}))
    assert not any("{" in step for step in (*verdict.trace, *lanes.trace))
