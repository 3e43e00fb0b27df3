"""``search`` finds what is broken, says how to see it again, and finds nothing where nothing is."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from streams import EventContext, EventSource
from streams.errors import ConfigError
from streams.testing import FAULTS, SearchFailed, TestDriver, search
from tests.vocabulary import TOTALS, Totals

from .driver_kit import OUT, Added, Slow, Total, build, config

pytestmark = pytest.mark.usefixtures("quiet")

SEEDS = int(os.environ.get("SIM_SEEDS", "40"))
Source = EventSource[Totals]
Driver = TestDriver[Totals]


def scenario(driver: Driver) -> None:
    for number in range(24):
        kind = Slow(f"k{number % 4}", 0.05) if number % 5 == 0 else Added(f"k{number % 4}")
        driver.send(kind, key=f"k{number % 4}", wait=False)
        if number % 8 == 7:
            driver.settle()
    driver.advance(10.0)


def of(handle: Callable[[EventContext[Totals], Added], None]) -> Source:
    """A source with one handler."""
    source = EventSource(config(), TOTALS)
    source.register_event_type(Added, handle)
    source.register_event_type(Slow, lambda ctx, event: handle(ctx, Added(event.name)))
    return source


class Outside:
    """A source that counts where nothing is restored from."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.calls: list[tuple[str, int]] = []

    def handle(self, ctx: EventContext[Totals], event: Added) -> None:
        self.seen[event.name] += 1
        self.calls.append((event.name, ctx.offset))
        ctx.forward(OUT, Total(event.name, self.seen[event.name]), key=event.name)

    def fresh(self) -> Source:
        """What a new process begins with."""
        self.seen.clear()
        self.calls.clear()
        return of(self.handle)


def test_a_state_of_the_process_is_found_and_its_seed_run_alone_fails_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a crash the event is handled again, and the state starts over: no broker is needed to see it."""

    def run() -> SearchFailed:
        with pytest.raises(SearchFailed) as raised:
            search(Outside().fresh, scenario, seeds=50, members=1, faults=["crash"])
        return raised.value

    first = run()
    same_again = "It goes exactly the same way when it is run again."
    for text in (f"run it alone with SEED={first.seed}", "totals, key b'k", same_again, "x crash", "is killed"):
        assert text in str(first)
    monkeypatch.setenv("SEED", str(first.seed))
    again = run()
    assert (again.seed, str(again)) == (first.seed, str(first))


def test_what_does_not_repeat_itself_is_told() -> None:
    with pytest.raises(SearchFailed, match="It went another way when it was run again"):
        search(of(Outside().handle), scenario, seeds=3, faults=[])


def test_effects_outside_of_the_transaction_are_found_by_an_invariant() -> None:
    outside = Outside()

    def each_once(driver: Driver) -> None:
        assert len(outside.calls) == len(set(outside.calls)), "called twice"

    with pytest.raises(SearchFailed, match="called twice"):
        search(outside.fresh, scenario, seeds=50, members=1, invariant=each_once, ignore_topics=[OUT])


def test_an_engine_that_takes_unclear_for_committed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the engine's own safeguards taken out: events are lost, and the search says so."""
    from streams.runtime.ownership.look_up import LookUps

    async def look_up(self: LookUps, txn: Any) -> bool:
        return True

    monkeypatch.setattr(LookUps, "look_up", look_up)
    with pytest.raises(SearchFailed):
        search(build, scenario, seeds=200, faults=["refuse", "lose_reply"], patience=60.0)


def test_orders_that_may_differ_are_told_apart() -> None:
    def one_key(ctx: EventContext[Totals], event: Added) -> None:
        ctx.forward(OUT, Total(event.name, ctx.offset), key="all")

    with pytest.raises(SearchFailed, match="use ordered=False"):
        search(of(one_key), scenario, seeds=40)
    search(of(one_key), scenario, seeds=10, ordered=False)
    search(of(one_key), scenario, seeds=10, ignore_topics=[OUT])


def test_a_scenario_that_is_wrong_by_itself_is_raised_as_it_is() -> None:
    def wrong(driver: Driver) -> None:
        driver.send(Added("ann"))
        assert driver.outputs(OUT) == []

    with pytest.raises(AssertionError) as raised:
        search(build, wrong)
    assert not isinstance(raised.value, SearchFailed)


def test_bad_use_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="there are no faults fire; the faults are crash"):
        search(build, scenario, faults=["fire"])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="no seed to run"):
        search(build, scenario, seeds=0)
    monkeypatch.setenv("SEED", "many")
    with pytest.raises(ConfigError, match="SEED is 'many'"):
        search(build, scenario)


@pytest.mark.timeout(400)
def test_nothing_is_found_in_a_right_source_and_every_fault_has_happened() -> None:
    """Sources with all kinds of work: ``tests/simulation`` and ``tests/property/test_driven.py``."""
    report = search(build, scenario, seeds=SEEDS, invariant=lambda driver: driver.check())
    assert report.seeds == tuple(range(SEEDS)) or "SEED" in os.environ
    if len(report.seeds) >= 40:
        assert set(report.happened) == set(FAULTS)


def test_points_around_a_concurrent_handler() -> None:
    async def slowly(ctx: EventContext[Totals], event: Slow) -> None:
        await anyio.sleep(event.seconds)
        await ctx.turn()

    source = EventSource(config(), TOTALS)
    source.register_event_type(Slow, slowly, concurrency=8)
    with TestDriver(source) as driver:
        traps = [driver.at(point, lambda member: None) for point in ("handler.before", "handler.after")]  # type: ignore[arg-type]
        driver.send(Slow("ann", 1.0), key="ann")
        assert [trap.sprung for trap in traps] == [1, 1]
