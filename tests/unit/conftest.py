"""Fixtures that many unit tests share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from streams.runtime.keeping.folders import folder as folder_module
from tests.unit.cli_kit import Kes, kes_with
from tests.unit.kept_engine_kit import Kept
from tests.unit.runtime_kit import Bench


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    """A broker in memory and the sources over it; in the end all of their threads are gone."""
    made = Bench()
    yield made
    await made.end()


@pytest.fixture
def unflushed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Power is not lost here."""
    monkeypatch.setattr(folder_module.os, "fsync", lambda handle: None)


@pytest.fixture
def kept(bench: Bench, tmp_path: Path, unflushed: None) -> Kept:
    """The bench, with sources that keep their state in a folder."""
    return Kept(bench, tmp_path / "state")


@pytest.fixture
def kes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Kes:
    """The command line, without a cluster in the environment."""
    monkeypatch.delenv("KES_BOOTSTRAP_SERVERS", raising=False)
    monkeypatch.delenv("KES_DEBUG", raising=False)
    return kes_with(capsys)
