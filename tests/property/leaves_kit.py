"""What the comparisons of compiled leaves with their source in plain Python share."""

from __future__ import annotations

import importlib.util
import os
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

from streams.sak import leaves

needs_compiled = pytest.mark.skipif(leaves.summary() != leaves.COMPILED, reason=f"leaves: {leaves.summary()}")


def plain(leaf: ModuleType) -> Any:
    """The same source once more, as a module that is not compiled."""
    spec = importlib.util.spec_from_file_location(f"plain.{leaf.__name__}", leaves.source_of(leaf.__name__))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(os.environ, {leaves.PLAIN_VARIABLE: "1"}):
        spec.loader.exec_module(module)
    return module


def outcome(call: Any, *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except Exception as error:
        return type(error), str(error)
