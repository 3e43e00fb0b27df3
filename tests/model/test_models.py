"""Both protocols, searched state by state: with all its rules each holds, without any one it does not.

``docs/internals/protocol-model.md`` and ``spark-protocol.md`` explain the models; ``run.py`` prints the
counterexamples in words.
"""

from __future__ import annotations

import functools
from enum import Enum
from typing import Any

import pytest

from tests.broker.gate import nightly
from tests.model import rules, spark_rules
from tests.model.run import searched, world_of
from tests.simulation import move_safeguards  # noqa: F401  adds its own
from tests.simulation.safeguards import SAFEGUARDS

pytestmark = pytest.mark.timeout(900)  # seconds of wall: a search needs the processor, however busy the machine

PARTS: dict[str, Any] = {"protocol": rules, "spark": spark_rules}
AT_LEAST = {"protocol": 300_000, "spark": 500_000}
"""Distinct states in all standard configurations together."""

MISSED = [rule for of in PARTS.values() for rule in of.Rule if world_of(rule) and rule not in of.MISSED_LATE]
ALSO_SIMULATED = {
    rules.Rule.SECOND_LOOK: "incarnation_is_not_looked_at",
    rules.Rule.S8_DONOR_STOPS: "donors_go_on_after_the_marker",
    rules.Rule.S8_MARKER_COMMITTED: "handed_over_before_it_is_committed",
    rules.Rule.S8_MARKER_TO_MEMBER_ID: "markers_are_for_the_instance",
    rules.Rule.S8_WITHDRAWN_BY_IDENTITY: "withdrawn_orders_count_when_carried_out",
}
"""Their counterexamples are the farthest, so they are searched nightly. In the change gate the engine without them goes
wrong: by these safeguards of the simulation."""

WORLDS: list[Any] = [*rules.STANDARD, *spark_rules.STANDARD]
LARGEST = {"warm move", "pipeline", "revoke", "amnesia", "new checkpoint", "expiry"}
"""Worlds that are searched whole nightly only, two thirds of all states: no module of the product is in them, so a
change of the product cannot make them fail. The change gate searches their beginning, and each of their rules taken
out."""
BEGUN: list[Any] = [each for each in WORLDS if each.name in LARGEST]
BEGUN += [each for each in dict.fromkeys(map(world_of, MISSED)) if each not in WORLDS]
"""And the small worlds of the rules: the counterexamples come from the missing rule."""

whole = functools.cache(searched)


@pytest.mark.parametrize(
    "config",
    [pytest.param(config, marks=[pytest.mark.nightly] if config.name in LARGEST else []) for config in WORLDS],
    ids=lambda config: config.name,
)
def test_the_protocol_holds_in_every_reachable_state(config: Any) -> None:
    verdict = whole(config)
    assert not verdict.problem, f"{config.name}: {verdict}"
    assert verdict.complete, config.name
    assert verdict.finished, f"{config.name}: no state in which everything is written was reached"


@pytest.mark.parametrize("states", [5_000, nightly(30_000)])
@pytest.mark.parametrize("config", BEGUN, ids=lambda config: config.name)
def test_the_protocol_holds_in_the_nearest_states(config: Any, states: int) -> None:
    verdict = searched(config, (), states)
    assert not verdict.problem, str(verdict)
    assert verdict.complete or verdict.states >= states


@pytest.mark.nightly
@pytest.mark.parametrize("part", PARTS)
def test_the_worlds_are_large_enough_to_mean_something(part: str) -> None:
    assert sum(whole(config).states for config in PARTS[part].STANDARD) >= AT_LEAST[part]


@pytest.mark.parametrize(
    "rule",
    [pytest.param(rule, marks=pytest.mark.nightly if rule in ALSO_SIMULATED else []) for rule in MISSED],
    ids=lambda rule: rule.name,
)
def test_without_the_rule_there_is_a_counterexample(rule: Enum) -> None:
    verdict = searched(world_of(rule), {rule}, 400_000)
    assert verdict.problem, f"without {rule.name} ({rule.value}) nothing breaks: {verdict}"
    assert verdict.trace


def test_what_is_searched_nightly_is_simulated_by_every_change() -> None:
    assert {*ALSO_SIMULATED.values()} <= SAFEGUARDS.keys()


@pytest.mark.parametrize("config", spark_rules.HOLES, ids=lambda config: config.name)
def test_what_no_rule_closes_is_still_open(config: Any) -> None:
    """The page says that these end badly. When one does not any more, the page is to be changed."""
    assert searched(config).problem
