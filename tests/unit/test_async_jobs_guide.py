"""The code of the guide to asynchronous work, as it stands there."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streams.testing import TestDriver

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "async-jobs.md"


@pytest.fixture(scope="module")
def guide() -> Iterator[Any]:
    module = types.ModuleType("guide_to_async_jobs")
    sys.modules[module.__name__] = module  # events find their annotations there
    code = "\n".join(re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL))
    exec(compile(code, str(GUIDE), "exec"), vars(module))
    yield module
    del sys.modules[module.__name__]


def test_the_short_form(guide: Any) -> None:
    with TestDriver(guide.source) as driver:
        for number in range(40):
            driver.send(guide.OrderPlaced("ann", 100 * number), key="ann", wait=False)
        driver.settle()
        rated = driver.outputs("rated-orders", guide.OrderRated)
    assert [order.risk for order in rated] == list(range(40))


def test_jobs_finalizers_and_dead_letters(guide: Any) -> None:
    with TestDriver(guide.source) as driver:
        driver.send(guide.PaymentRequested("ann", 5), key="ann")
        driver.send(guide.PaymentRequested("ann", 0), key="ann")
        driver.send(guide.PaymentRequested("ann", 7), key="ann")
        driver.settle()
        assert len(driver.outputs("payments", guide.PaymentMade)) == 2
        assert len(driver.dead_letters()) == 1
        driver.send(guide.RefundRequested("ann", 5), key="ann")
        driver.settle()
        *_, last = driver.outputs("payments", guide.PaymentMade, guide.PaymentFailed)
        assert last == guide.PaymentFailed("ann", "the bank is closed")


def test_chains_and_work_that_depends_on_the_store(guide: Any) -> None:
    with TestDriver(guide.source) as driver:
        driver.send(guide.ImageUploaded("a.png"), key="a.png")
        driver.send(guide.BalanceAsked("bob"), key="bob")
        driver.send(guide.BalanceAsked("bob"), key="bob")
        driver.settle()
        assert len(driver.outputs("images", guide.ImageMeasured)) == 1
        assert len(driver.outputs("payments", guide.PaymentMade)) == 1


def test_its_own_test(guide: Any) -> None:
    guide.test_a_crash_loses_nothing()
