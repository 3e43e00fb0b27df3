"""The reference pages of events and stores say what is true: their examples run."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


@pytest.mark.parametrize("page", ["events", "stores"])
def test_the_examples_of_the_page_run(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(
        r"^```python\n(.*?)^```$", (REFERENCE / f"{page}.md").read_text("utf-8"), re.DOTALL | re.MULTILINE
    )
    assert blocks
    module = types.ModuleType(f"example_of_{page}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in blocks:
        exec(compile(block, f"{page}.md", "exec"), vars(module))
