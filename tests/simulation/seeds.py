"""Worlds from seeds: all of them are right, and without a rule one of them is not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import pytest

from streams.testing.schedule_search import SearchFailed, SearchReport

Removal = Callable[[pytest.MonkeyPatch], None]
"""Takes a safeguard of the engine out."""


class Simulate(Protocol):
    """Runs one world; raises ``AssertionError`` for what is wrong in it. ``without``: rules that are taken out."""

    def __call__(self, seed: int, monkeypatch: pytest.MonkeyPatch, without: Iterable[str] = (), /) -> None: ...


@contextmanager
def silent(name: str) -> Iterator[None]:
    """Switch a logger off: each lost answer would be a line."""
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    yield
    logger.disabled = before


def assert_right(simulate: Simulate, seeds: Iterable[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the worlds of these seeds; the failure names the seed."""
    for seed in seeds:
        try:
            simulate(seed, monkeypatch)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def assert_missed(simulate: Simulate, rule: str, tries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a world goes wrong without the rule, and is right with it."""
    for seed in range(tries):
        try:
            simulate(seed, monkeypatch, [rule])
        except AssertionError:
            return simulate(seed, monkeypatch)
    raise AssertionError(f"{tries} worlds do not miss {rule}")


def assert_search_misses(
    run: Callable[[int | list[int]], SearchReport], removal: Removal, wrong: str, seeds: int = 40
) -> None:
    """Check that a search goes ``wrong`` without the safeguard, and that the same seed is right with it."""
    with pytest.MonkeyPatch.context() as patch:
        removal(patch)
        with pytest.raises(Exception, match=wrong) as missed:
            run(seeds)
    run([missed.value.seed if isinstance(missed.value, SearchFailed) else 0])  # else it went wrong without any fault
