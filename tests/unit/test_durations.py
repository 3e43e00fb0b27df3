"""The change gate keeps to its budget, by the durations recorded last: no speed of this machine is asserted."""

from __future__ import annotations

from pathlib import Path

from tests.durations import recorded

ROOT = Path(__file__).resolve().parents[2]
BUDGET_MINUTES, CORES, CHECKS_MINUTES = 25, 2, 3
"""Of the whole check, on two cores; lint, types and docs take the last part."""


def test_the_change_gate_is_within_its_budget() -> None:
    minutes = sum(recorded()["gate"].values()) / CORES / 60
    assert minutes <= BUDGET_MINUTES - CHECKS_MINUTES, "mark cases as nightly, or make them faster"


def test_long_tests_of_the_gate_are_marked() -> None:
    assert recorded()["long"] == {}, "mark them slow, and say why they are worth it"


def test_recorded_files_exist() -> None:
    times = recorded()
    assert [file for file in times["gate"].keys() | times["nightly"].keys() if not (ROOT / file).exists()] == []
