"""Running a scenario on both back ends, and comparing."""

from __future__ import annotations

import functools
import uuid
from typing import Any

from tests.broker.back_ends_kit import BackEnd, Scenario, differences, observed
from tests.broker.driven_back_end import DrivenBackEnd
from tests.broker.real_back_end import RealBackEnd


def played(end: BackEnd) -> dict[str, Any]:
    """What the scenario leaves behind there."""
    try:
        end.scenario.play(end)
        return observed(end)
    finally:
        end.close()


@functools.cache
def real(scenario: Scenario, bootstrap: str) -> tuple[str, dict[str, Any]]:
    """Over the broker, once in a session: (prefix of all names, what it left behind)."""
    prefix = f"two-{scenario}-{uuid.uuid4().hex[:8]}-"
    return prefix, played(RealBackEnd(scenario, prefix, bootstrap))


def must_be_equal(scenario: Scenario, bootstrap: str) -> None:
    """Fail with the differences."""
    found = compare(scenario, bootstrap)
    assert not found, "\n".join(found)


def compare(scenario: Scenario, bootstrap: str, seeds: range = range(3)) -> list[str]:
    """Differences between the broker and the driver, with each of some seeds."""
    prefix, expected = real(scenario, bootstrap)
    found: list[str] = []
    for seed in seeds:
        found += differences(played(DrivenBackEnd(scenario, prefix, seed)), expected)
        if found:
            return [f"seed {seed}", *found]
    return []
