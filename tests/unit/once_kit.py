"""A bank whose events are handled once, for the tests of ids."""

from __future__ import annotations

from typing import Any

from streams import PARK
from streams.runtime.changelog import SEEN_PREFIX
from streams.settings import Once
from streams.testing import TestDriver
from tests.unit.parking_kit import Add, Bank

WEEK = 7 * 86_400


def once(way: str = "plain", policy: Any = PARK, within: float = WEEK, **settings: Any) -> Bank:
    """A bank whose events are handled once, by their numbers."""
    bank = Bank(policy, way, **settings)
    bank.once = Once("number", within=within)
    return bank


def ids(driver: TestDriver[Any], partition: int = 0) -> dict[bytes, bytes]:
    """The records of ids, as they are committed in the changelog."""
    world, found = driver._world, dict[bytes, bytes]()
    log = world.broker.log(world.config.changelog, partition)
    for record in log.committed(0, log.end):
        if record.key is not None and record.key.startswith(SEEN_PREFIX):
            found.pop(record.key, None)
            if record.value is not None:
                found[record.key] = record.value
    return found


def numbers(driver: TestDriver[Any], key: str = "a") -> tuple[int, ...]:
    found: tuple[int, ...] = driver.store(0).get(key) or ()
    return found


def sent(driver: TestDriver[Any]) -> list[int]:
    return [event.number for event in driver.outputs("out", Add)]
