"""Fixtures that many unit tests share."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.unit.cli_kit import Kes, kes_with
from tests.unit.runtime_kit import Bench


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    """A broker in memory and the sources over it; in the end all of their threads are gone."""
    made = Bench()
    yield made
    await made.end()


@pytest.fixture
def kes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Kes:
    """The command line, without a cluster in the environment."""
    monkeypatch.delenv("KES_BOOTSTRAP_SERVERS", raising=False)
    monkeypatch.delenv("KES_DEBUG", raising=False)
    return kes_with(capsys)
