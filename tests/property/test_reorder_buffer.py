"""The reorder buffer at any settings: no deadlock, nothing lost, order kept; whatever is lost or given up meanwhile."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streams.runtime.async_work.concurrent_stage import ConcurrentContext
from streams.runtime.async_work.job_runner import Job, JobRunner
from streams.runtime.partition.reorder_buffer import Entry, ReorderBuffer
from streams.runtime.partition.worker import PartitionWorker
from tests.property.kit import seeded
from tests.property.reorder_buffer_kit import KINDS, Settings, simulate

pytestmark = pytest.mark.usefixtures("quiet")

EXAMPLES = int(os.environ.get("LINE_EXAMPLES", "60"))


SECONDS = st.sampled_from([0.0, 0.01, 0.3, 5.0])


@st.composite
def worlds(draw: Any) -> Settings:
    partitions = draw(st.integers(1, 5))
    here = st.integers(0, partitions - 1)
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=len(KINDS), unique=True))
    events = st.tuples(here, st.sampled_from(kinds), st.integers(0, draw(st.integers(0, 5))), SECONDS)
    return Settings(
        partitions=partitions,
        concurrency=draw(st.integers(1, 4)),
        depth=draw(st.integers(0, 3)),
        max_keys=draw(st.integers(1, 3)),
        queued=draw(st.sampled_from([1, 2, 5, 50])),
        batch=draw(st.integers(1, 10)),
        pool_room=draw(st.integers(1, 10)),
        pool_seconds=draw(st.sampled_from([0.001, 0.1, 1.0])),
        events=draw(st.lists(events, max_size=60)),
        ends=draw(st.lists(st.tuples(st.floats(0.0, 8.0), here, st.booleans()), max_size=5)),
        asks=draw(st.lists(st.tuples(st.floats(0.0, 8.0), here), max_size=4)),
    )


@pytest.mark.timeout(0)
@seeded
@settings(deadline=None, max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
@given(worlds())
def test_everything_ends_in_order_at_any_settings(world: Settings) -> None:
    simulate(world)


def test_the_smallest_of_everything() -> None:
    events = [(number % 5, KINDS[number % len(KINDS)], number % 3, 0.3) for number in range(150)]
    made = simulate(
        Settings(partitions=5, concurrency=1, depth=0, max_keys=1, queued=1, batch=1, pool_room=1, events=events)
    )
    assert sum(made.offsets.values()) == 150


def drawn(number: int) -> Settings:
    """A world by a seed, for those who need no shrinking."""
    rng = random.Random(number)
    partitions = rng.randint(1, 4)
    return Settings(
        partitions=partitions,
        concurrency=rng.randint(1, 3),
        depth=rng.randint(0, 2),
        max_keys=rng.randint(1, 3),
        queued=rng.choice((2, 5, 50)),
        batch=rng.randint(1, 10),
        events=[
            (rng.randrange(partitions), rng.choice(KINDS), rng.randrange(4), rng.choice((0.0, 0.01, 0.3, 5.0)))
            for _ in range(60)
        ],
        ends=[(rng.uniform(0.0, 8.0), rng.randrange(partitions), rng.random() < 0.5) for _ in range(4)],
        asks=[(rng.uniform(0.0, 8.0), rng.randrange(partitions)) for _ in range(3)],
    )


def _jobs_outlive_their_partition(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Entry, "drop", lambda self: None)


def _whoever_is_done_is_next(patch: pytest.MonkeyPatch) -> None:
    def is_ready(self: ReorderBuffer) -> bool:
        for entry in list(self.entries):
            if entry.is_settled:
                self.entries.remove(entry)
                self.entries.appendleft(entry)
                return True
        return False

    patch.setattr(ReorderBuffer, "is_ready", property(is_ready))


def _keys_have_no_order(patch: pytest.MonkeyPatch) -> None:
    add = JobRunner.add

    def alone(self: JobRunner, job: Job) -> None:
        job.key = object()
        add(self, job)

    patch.setattr(JobRunner, "add", alone)


def _whoever_is_roused_has_the_turn(patch: pytest.MonkeyPatch) -> None:
    rouse = ConcurrentContext._rouse

    def roused(self: ConcurrentContext) -> None:
        self._has_turn = True
        rouse(self)

    patch.setattr(ConcurrentContext, "_rouse", roused)


def _failures_are_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    over = JobRunner.over
    patch.setattr(JobRunner, "over", lambda self, job, *, holds_key=False: over(self, job))


def _given_up_partitions_go_on_in_the_buffer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PartitionWorker, "drop_line", lambda self: None)


@pytest.mark.filterwarnings("ignore")  # tasks of a buffer that was broken on purpose
@pytest.mark.parametrize(
    "out",
    [
        _jobs_outlive_their_partition,
        _whoever_is_done_is_next,
        _keys_have_no_order,
        _whoever_is_roused_has_the_turn,
        _failures_are_not_waited_for,
        _given_up_partitions_go_on_in_the_buffer,
    ],
)
def test_each_safeguard_is_missed(out: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """With it taken out some world goes wrong, which is right with it."""
    for number in range(60):
        with monkeypatch.context() as patch:
            out(patch)
            try:
                simulate(drawn(number))
            except AssertionError as wrong:
                print(f"seed {number}: {str(wrong)[:200]}")
                break
    else:
        pytest.fail("nobody missed it")
    simulate(drawn(number))


def test_room_is_used_while_the_first_one_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever found no room comes as soon as there is some, and not at the next turn."""
    slow_first = [(0, "Job", 0, 5.0), *((0, "Job", key, 0.3) for key in range(1, 15))]
    world = Settings(concurrency=2, max_keys=2, queued=50, batch=10, events=slow_first)
    assert simulate(world).ended < 5.5
    monkeypatch.setattr(JobRunner, "_look_again", lambda self, lane: None)
    assert simulate(world).ended > 6.5, "without being told"
