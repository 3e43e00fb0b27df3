"""What is wrong is not tried again: the rule of ``tests/conftest.py`` knows how the oracles tell it."""

from __future__ import annotations

import re

import pytest

from streams.testing.oracle import Report
from tests.conftest import WRONG_RESULT


def test_a_result_that_is_wrong_has_no_second_try() -> None:
    report, read = Report(1, 1, 1, ("out[0], key k: 1 record is not there",)), [1]
    with pytest.raises(AssertionError, match=WRONG_RESULT):
        assert not report.differences, report
    with pytest.raises(AssertionError, match=WRONG_RESULT):
        assert read == [1, 2]


def test_waiting_in_vain_has_one() -> None:
    assert not re.search(WRONG_RESULT, "AssertionError: waited 60 s in vain: the others have everything")
    assert not re.search(WRONG_RESULT, "TimeoutError: ")


def test_only_what_runs_beside_real_parts_has_one(pytestconfig: pytest.Config, request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("flaky") is None
    assert pytestconfig.getoption("max_suite_reruns") == 4
