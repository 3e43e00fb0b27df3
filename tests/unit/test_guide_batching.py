"""The code of the guide on batches, run as one program over the simulated broker."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from streams.testing import TestDriver

GUIDE = Path(__file__).parents[2] / "docs/guides/batching.md"


@pytest.fixture(scope="module")
def guide() -> Any:
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL))
    module = types.ModuleType("guide_batching")
    sys.modules[module.__name__] = module
    exec(compile(code, str(GUIDE), "exec"), module.__dict__)
    yield module
    del sys.modules[module.__name__]


def test_the_guide_does_what_it_says(guide: Any) -> None:
    orders = [guide.Order(f"o{number}", "c", ["tea", "cup"] * (number % 3)) for number in range(8)]
    with TestDriver(guide.source) as driver:
        for order in orders:
            driver.send(order, partition=0, wait=False)
        driver.settle()
        assert driver.outputs("priced", guide.Priced) == [
            guide.Priced(order.id, 625 * len(order.products)) for order in orders if order.products
        ]
        assert sum(guide.calls) == sum(len(order.products) for order in orders)
        assert len(guide.calls) < 5, "many events in one call"
        driver.send(guide.Order("bad", "c", ["tea", "spoon"]), partition=0)
        (letter,) = driver.dead_letters()
        assert b"no price for spoon" in (value for _, value in letter.headers or ())
        driver.send(guide.Quoted("pot"), partition=0)
        assert driver.store(0).get("pot") == 2400
        driver.send(guide.Shipped("s1", ["a", "b"]), partition=1)
        assert driver.store(1).get("told-shipments-b") == 0
        assert len(driver.outputs("shipments-a")) == 1
