"""A source whose keys are visited, under faults, while keys come and go: in each run no key twice, and every key that
is there all along once. What a visit sends names its run, and what it stores counts, so a lost one is seen."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, Final

import msgspec
import pytest

from streams import EventContext, EventSource, EventSourceConfig, GroupConfig, Retry, Table
from streams.core.visits import VisitState
from streams.outcomes import ErrorResponse
from streams.records import Record
from streams.runtime.partition.timers import PartitionTimers
from streams.testing import TestDriver
from streams.testing.schedule_search import SearchReport, search
from streams.testing.simulation.virtual_time import elapse
from tests.simulation.seeds import Removal, assert_search_misses
from tests.vocabulary import Put

pytestmark = pytest.mark.usefixtures("quiet")

SEEDS: Final = int(os.environ.get("SIM_SEEDS", "16"))
PARTITIONS, SEEN = 2, "seen"
STAYING: Final = [f"s{number:02}" for number in range(24)]
PASSING: Final = [f"p{number}" for number in range(6)]
RUNS: Final = ("one", "two", "three")


def build() -> EventSource[Any]:
    config = EventSourceConfig(
        group_id="shop",
        topic="orders",
        num_partitions=PARTITIONS,
        visits=True,
        error_policy=Retry(attempts=3, backoff_seconds=0.01, then=ErrorResponse.CONTINUE),
        group=GroupConfig(num_standbys=1),
    )
    source = EventSource(config, Table.factory(key=str, value=int, ordered=True))

    @source.on
    def put(ctx: EventContext[Any], event: Put) -> None:
        if event.value is not None:
            ctx.store.put(event.key, ctx.store.get(event.key, 0))
        else:
            ctx.store.delete(event.key)

    @source.register_visit("look")
    async def look(ctx: EventContext[Any], key: str, value: int) -> None:
        visited: Any = ctx.timer
        ctx.store.put(key, value + 1)
        ctx.forward(
            Record(SEEN, f"{visited.run} {value}".encode(), key.encode(), partition=ctx.topic_partition.partition)
        )
        if ctx.attempt == 1 and key.endswith("7"):
            raise RuntimeError("not yet")
        if key.endswith("3"):
            await elapse(0.05)

    return source


def scenario(driver: TestDriver[Any]) -> None:
    rng = driver._world.rng
    for key in STAYING:
        driver.send(Put(key), partition=int(key[1:]) % PARTITIONS, wait=False)
    driver.settle(200.0)
    todo = [*RUNS, *RUNS, *("",) * 20]
    rng.shuffle(todo)
    for run in todo:
        if run:
            driver.start_visit("look", run_id=run, wait=False)
        else:
            driver.send(Put(rng.choice(PASSING), 1 if rng.random() < 0.6 else None), partition=0, wait=False)
        driver.advance(rng.choice((0.0, 0.02, 0.1, 0.5)))
    driver.settle(200.0)


def judge(driver: TestDriver[Any]) -> None:
    by_run: dict[str, Counter[str]] = defaultdict(Counter)
    values: dict[str, list[int]] = defaultdict(list)
    for record in driver.outputs(SEEN):
        run, value = (record.value or b"").decode().split()
        key = (record.key or b"").decode()
        by_run[run][key] += 1
        values[key].append(int(value))
    assert by_run.keys() == set(RUNS)
    for run, visited in by_run.items():
        assert {key: count for key, count in visited.items() if count > 1} == {}, f"visited twice in {run}"
        assert set(STAYING) <= visited.keys(), f"not visited in {run}: {set(STAYING) - visited.keys()}"
    for key in STAYING:
        assert values[key] == list(range(len(RUNS))), "each visit has met what the one before has stored"
        assert driver.store(int(key[1:]) % PARTITIONS).get(key) == len(RUNS)


def run(seeds: int | Iterable[int]) -> SearchReport:
    return search(build, scenario, seeds=seeds, members=2, invariant=judge, compare=False, patience=120.0)


@pytest.mark.timeout(0)
def test_visits_under_faults() -> None:
    report = run(SEEDS)
    assert len(report.happened) > 6, report


# -- each safeguard, taken out -----------------------------------------------------------------------------------------


def left_behind_by_a_move(patch: pytest.MonkeyPatch) -> None:
    """What is restored has no runs: neither from the changelog, nor from a copy."""
    taken = PartitionTimers.restore

    def restore(self: PartitionTimers, timers: Iterable[Any]) -> None:
        taken(self, timers)
        self.visits = {}

    patch.setattr(PartitionTimers, "restore", restore)


def a_run_begins_each_time_it_is_requested(patch: pytest.MonkeyPatch) -> None:
    """A partition does not know the runs that are over."""
    taken = VisitState.requested
    patch.setattr(
        VisitState, "requested", lambda self, request: taken(msgspec.structs.replace(self, finished=()), request)
    )


def the_place_is_that_of_this_process(patch: pytest.MonkeyPatch) -> None:
    """The place of the run moves in memory, and reaches the changelog with the end of the run only."""
    taken = PartitionTimers.admitted

    def admitted(self: PartitionTimers, changes: dict[str, Any], origin: int) -> Any:
        found = taken(self, changes, origin)
        is_place = any(b"after" in timer.value for timer in changes.values() if timer is not None)
        return [] if is_place else found

    patch.setattr(PartitionTimers, "admitted", admitted)


@pytest.mark.filterwarnings("ignore")  # tasks of an engine that was broken on purpose
@pytest.mark.parametrize(
    "removal", [left_behind_by_a_move, a_run_begins_each_time_it_is_requested, the_place_is_that_of_this_process]
)
def test_each_safeguard_is_missed(removal: Removal) -> None:
    assert_search_misses(run, removal, r"seed \d+ goes wrong|not done after|visited twice|visited in")
