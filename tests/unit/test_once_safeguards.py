"""Safeguards of events that are handled once: each is taken out, and what it holds is missed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from streams import SKIP
from streams.runtime.partition.once import OnceTurns
from streams.runtime.partition.retirement import Retirement
from streams.runtime.partition.seen_ids import NOTE, SeenIds
from streams.settings import GroupConfig
from tests.unit.once_kit import numbers, once
from tests.unit.parking_kit import add, send

pytestmark = pytest.mark.usefixtures("quiet")
TakeOut = Callable[[pytest.MonkeyPatch], None]


def not_restored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SeenIds, "receive", lambda self, change: None)


def before_completion(patch: pytest.MonkeyPatch) -> None:
    """The id is there as soon as its event has its turn, whatever becomes of it."""
    note = OnceTurns.note

    def early(self: OnceTurns, ctx: Any, record: Any) -> None:
        note(self, ctx, record)
        if NOTE in ctx._changes:
            self._partition.seen.admitted(ctx._changes[NOTE], 4_000_000_000, 0)

    patch.setattr(OnceTurns, "note", early)


def not_written(patch: pytest.MonkeyPatch) -> None:
    admitted = SeenIds.admitted
    patch.setattr(SeenIds, "admitted", lambda *arguments: admitted(*arguments)[:0])


def decided_ahead(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Retirement, "_is_duplicate", lambda self, entry: False)


def failures_and_deaths(way: str) -> tuple[int, ...]:
    bank = once(way, SKIP)
    with bank.driver() as driver:
        bank.broken = {1}
        add(driver, 1, 2)
        bank.broken = set()
        add(driver, 1, 1)
        driver.crash()
        driver.restart()
        add(driver, 1, 2, 3)
        return numbers(driver)


def skipped(way: str) -> tuple[int, ...]:
    bank = once(way, SKIP)
    with bank.driver() as driver:
        bank.broken = {1}
        add(driver, 1, 2)
        bank.broken = set()
        add(driver, 1, 1)
        return numbers(driver)


def side_by_side(way: str) -> tuple[int, ...]:
    bank = once(way)
    with bank.driver() as driver:
        bank.seconds = {1: 2.0}
        for key in ("a", "b"):
            send(driver, 1, key=key)
        driver.advance(5)
        return numbers(driver, "a") + numbers(driver, "b")


def there_and_back(way: str) -> tuple[int, ...]:
    """A partition moves to another member, and back to the copy that its first owner has kept."""
    bank = once(way, num_partitions=1, group=GroupConfig(num_standbys=1))
    with bank.driver(members=2) as driver:
        driver.advance(30)
        add(driver, 1)
        first = driver.owner(0)
        driver.leave(first)
        driver.restart(first)
        driver.advance(60)
        add(driver, 1, 2)
        return numbers(driver)


CASES: list[tuple[str, TakeOut, Callable[[str], tuple[int, ...]], str, tuple[int, ...]]] = [
    ("restored", not_restored, failures_and_deaths, "async", (2, 1, 3)),
    ("recorded at completion", before_completion, skipped, "async", (2, 1)),
    ("written with the event", not_written, failures_and_deaths, "async", (2, 1, 3)),
    ("decided at the turn", decided_ahead, side_by_side, "jobs", (1,)),
    ("decided at the turn", decided_ahead, side_by_side, "concurrent", (1,)),
    ("restored on other members", not_restored, there_and_back, "plain", (1, 2)),
]


@pytest.mark.parametrize(("name", "take_out", "history", "way", "expected"), CASES, ids=lambda value: str(value)[:24])
def test_a_safeguard_is_missed_when_it_is_out(
    name: str, take_out: TakeOut, history: Any, way: str, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert history(way) == expected
    take_out(monkeypatch)
    assert history(way) != expected, name
