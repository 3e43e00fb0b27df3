"""``search`` finds what is broken, says how to see it again, and finds nothing where nothing is."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest

from streams import EventContext, EventSource, Table
from streams.errors import ConfigError
from streams.testing import FAULTS, SearchFailed, TestDriver, search

from .driver_kit import OUT, Added, Slow, Total, build, config

pytestmark = pytest.mark.usefixtures("quiet")

Source = EventSource[Table[str, int]]
Driver = TestDriver[Table[str, int]]
SEEDS = int(os.environ.get("SIM_SEEDS", "40"))


def scenario(driver: Driver) -> None:
    for number in range(24):
        kind = Slow(f"k{number % 4}", 0.05) if number % 5 == 0 else Added(f"k{number % 4}")
        driver.send(kind, key=f"k{number % 4}", wait=False)
        if number % 8 == 7:
            driver.settle()
    driver.advance(10.0)


def everything_is_there(driver: Driver) -> None:
    assert sorted(total.total for total in driver.outputs(OUT, Total)) == sorted([1, 2, 3, 4, 5, 6] * 4)


def of(handle: Callable[[EventContext[Table[str, int]], Added], None]) -> Source:
    """A source with one handler."""
    source = EventSource(config(), Table.factory(key=str, value=int))
    source.register_event_type(Added, handle)
    source.register_event_type(Slow, lambda ctx, event: handle(ctx, Added(event.key)))
    return source


@pytest.mark.timeout(300)
def test_the_engine_is_right_and_everything_did_go_wrong() -> None:
    report = search(build, scenario, seeds=SEEDS, invariant=everything_is_there)
    assert report.seeds == tuple(range(SEEDS)) or "SEED" in os.environ
    if len(report.seeds) >= 40:
        assert set(report.happened) == set(FAULTS)


def test_a_counter_of_the_process_is_found() -> None:
    """After a crash the event is handled again, and the counter has gone on: no broker is needed to see it."""
    counter = itertools.count()

    def numbered(ctx: EventContext[Table[str, int]], event: Added) -> None:
        ctx.forward(OUT, Total(event.key, next(counter)), key=event.key)

    def fresh() -> Source:
        nonlocal counter
        counter = itertools.count()  # a new process begins anew
        return of(numbered)

    with pytest.raises(SearchFailed) as raised:
        search(fresh, lambda driver: scenario(driver), seeds=50, members=1, faults=["crash"])
    text = str(raised.value)
    assert f"run it alone with SEED={raised.value.seed}" in text
    assert "totals, key b'k" in text
    assert "It goes exactly the same way when it is run again." in text
    assert "x crash" in text
    assert "is killed" in text


def test_a_failing_seed_is_run_alone_and_fails_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(ctx: EventContext[Table[str, int]], event: Added) -> None:
        """Keeps its state where it is not restored from."""
        seen[event.key] = seen.get(event.key, 0) + 1
        ctx.forward(OUT, Total(event.key, seen[event.key]), key=event.key)

    seen: dict[str, int] = {}

    def fresh() -> Source:
        seen.clear()
        return of(forgetful)

    def run() -> SearchFailed:
        with pytest.raises(SearchFailed) as raised:
            search(fresh, scenario, seeds=50, members=1)
        return raised.value

    first = run()
    monkeypatch.setenv("SEED", str(first.seed))
    again = run()
    assert (again.seed, str(again)) == (first.seed, str(first))


def test_what_does_not_repeat_itself_is_told() -> None:
    total = itertools.count()  # of all runs together

    def numbered(ctx: EventContext[Table[str, int]], event: Added) -> None:
        ctx.forward(OUT, Total(event.key, next(total)), key=event.key)

    with pytest.raises(SearchFailed, match="It went another way when it was run again"):
        search(of(numbered), scenario, seeds=3, faults=[])


def test_effects_outside_of_the_transaction_are_found_by_an_invariant() -> None:
    calls: list[tuple[str, int]] = []

    def calling(ctx: EventContext[Table[str, int]], event: Added) -> None:
        calls.append((event.key, ctx.offset))

    def fresh() -> Source:
        calls.clear()
        return of(calling)

    def each_once(driver: Driver) -> None:
        assert len(calls) == len(set(calls)), "called twice"

    with pytest.raises(SearchFailed, match="called twice"):
        search(fresh, scenario, seeds=50, members=1, invariant=each_once)


def test_an_engine_that_takes_unclear_for_committed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the engine's own safeguards taken out: events are lost, and the search says so."""
    from streams.runtime.ownership.takeover import TakeOvers

    async def look_up(self: TakeOvers, txn: Any) -> bool:
        return True

    monkeypatch.setattr(TakeOvers, "look_up", look_up)
    with pytest.raises(SearchFailed):
        search(build, scenario, seeds=200, faults=["lose_request", "lose_reply"], patience=60.0)


def test_orders_that_may_differ_are_told_apart() -> None:
    def one_key(ctx: EventContext[Table[str, int]], event: Added) -> None:
        ctx.forward(OUT, Total(event.key, ctx.offset), key="all")

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
