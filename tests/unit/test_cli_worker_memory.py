"""What a worker process of ``kes run`` tells Python's garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from streams.cli.worker import collect_rarely


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Other tests have Python's own settings."""
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def test_modules_are_frozen_and_new_objects_looked_at_rarely() -> None:
    others = gc.get_threshold()[1:]
    collect_rarely(5_000)
    assert gc.get_threshold() == (5_000, *others)
    assert gc.get_freeze_count() > 1_000
    assert gc.isenabled()


def test_0_leaves_it_as_it_is() -> None:
    before = gc.get_threshold(), gc.get_freeze_count()
    collect_rarely(0)
    assert (gc.get_threshold(), gc.get_freeze_count()) == before
