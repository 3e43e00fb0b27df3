"""The guide about testing: its examples run as they stand there, and its tables name everything."""

from __future__ import annotations

import inspect
import logging
import re
import sys
import types
from pathlib import Path

import pytest

from streams.testing import FAULTS, POINTS, TestDriver
from streams.testing import plugin as plugin_module

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "guides" / "testing.md").read_text("utf-8")


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> list[types.ModuleType]:
    """The files of the page; a block without a name of a file goes on with the one before."""
    logging.getLogger("streams").setLevel(logging.CRITICAL)
    found: list[types.ModuleType] = []
    for block in re.findall(r"^```python\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE):
        named = re.match(r"# (\w+)\.py\n", block)
        if named is not None:
            found.append(types.ModuleType(named[1]))
            monkeypatch.setitem(sys.modules, named[1], found[-1])
        exec(compile(block, "testing.md", "exec"), vars(found[-1]))
    return found


@pytest.mark.timeout(300)
def test_the_examples_run(modules: list[types.ModuleType], request: pytest.FixtureRequest) -> None:
    ran = []
    for module in modules:
        for name, test in vars(module).items():
            if name.startswith("test_") and callable(test):
                test(**{given: request.getfixturevalue(given) for given in inspect.signature(test).parameters})
                ran.append(name)
    assert len(ran) >= 7


def test_the_tables_name_every_point_fault_and_fixture() -> None:
    for point in POINTS:
        assert f"`{point}`" in GUIDE
    methods = {name for name, _ in inspect.getmembers(TestDriver, inspect.isfunction) if not name.startswith("_")}
    fixtures = {name for name in vars(plugin_module) if name.startswith("kes_")}
    told_elsewhere = {"close", "start", "statistics", "stores"}
    for name in {*methods, *fixtures, *FAULTS} - told_elsewhere:
        assert re.search(rf"\b{name}\b", GUIDE), name
