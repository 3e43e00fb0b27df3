"""The notebook of the examples, cell by cell in a running event loop, as Jupyter runs it."""

from __future__ import annotations

import ast
import inspect
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


async def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a kernel: that would be twenty packages for what ``eval`` does."""
    module = types.ModuleType("__main__of_the_notebook")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    names: dict[str, Any] = vars(module)
    shown = []
    for number, cell in enumerate(json.loads(NOTEBOOK.read_text())["cells"]):
        if cell["cell_type"] != "code":
            continue
        tree = ast.parse("".join(cell["source"]))
        last = ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None
        for part, mode in ((tree, "exec"), (last, "eval")):
            if part is None:
                continue
            compiled = compile(part, f"cell {number}", mode, flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)  # type: ignore[arg-type]
            result = eval(compiled, names)
            value = await result if inspect.isawaitable(result) else result
        shown.append(value)
    balance = names["Balance"]
    assert [balance("ann", 500), balance("ann", 750)] in shown
    assert balance("ann", 900) in shown
