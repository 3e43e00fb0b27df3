"""The code of the guide to batch handlers runs, and what it says is so; the example counts right whatever happens."""

from __future__ import annotations

import pickle
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from examples.page_views import PageViews, Viewed, source
from streams.runtime.slices import LONGEST_SLICE_SECONDS, SLICE
from streams.testing import TestDriver

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "batch-handlers.md"


def test_the_example_and_its_test() -> None:
    names: dict[str, Any] = {"__name__": "batch_handlers_guide"}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE):
        exec(compile(block, str(PAGE), "exec"), names)
    names["test_a_page_is_counted_once_for_each_view"]()


def test_the_sizes_that_it_tells() -> None:
    text = PAGE.read_text("utf-8")
    assert f"at most {SLICE}**" in text
    assert f"longer than {LONGEST_SLICE_SECONDS * 1000:g} ms" in text


def test_it_is_a_batch_handler_in_other_processes_too() -> None:
    """As a replay on Spark sends it there."""
    route = pickle.loads(pickle.dumps(source._router.routes[b"Viewed"]))
    assert (route.is_batch, route.plain, route.name) == (True, False, "Viewed")


@pytest.mark.parametrize("seed", range(5))
def test_the_example(seed: int) -> None:
    rng = random.Random(seed)
    sent: Counter[str] = Counter()
    with TestDriver(source, members=2, seed=seed, topics={"page-views": 4}) as driver:
        for step in range(8):
            for _ in range(rng.randrange(40)):
                page = f"page-{rng.randrange(5)}"
                driver.send(Viewed(page), key=page, wait=False)
                sent[page] += 1
            if step % 3 == 1:
                member = rng.choice(driver.members)
                driver.crash(member)
                driver.restart(member)
        driver.settle()
        driver.check()
        last = {event.page: event.views for event in driver.outputs("page-views", PageViews)}
        assert last == sent
        assert dict(item for store in driver.stores().values() for item in store.items()) == sent
