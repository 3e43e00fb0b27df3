"""Work that runs ahead of its turn, at any settings and with faults: no deadlock, nothing lost, order kept, each
event's effects once."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streams import BatcherConfig
from streams.runtime.async_work.concurrent_stage import ConcurrentContext
from streams.runtime.async_work.job_runner import Job, JobRunner
from streams.runtime.partition.reorder_buffer import Entry, ReorderBuffer
from streams.runtime.partition.worker import PartitionWorker
from tests.property.driven_kit import BATCH_KINDS, JOB_KINDS, Event, Settings, simulate
from tests.property.kit import seeded
from tests.simulation.safeguards import first_settled_is_ready, nothing, stand_in

pytestmark = [pytest.mark.usefixtures("quiet"), pytest.mark.timeout(0)]

EXAMPLES = int(os.environ.get("DRIVEN_EXAMPLES", "45"))
FAULTS = ("crash", "evict", "fence", "abort", "rebalance")
SECONDS = (0.0, 0.01, 0.3, 5.0)

items = st.tuples(st.integers(0, 3), st.sampled_from(SECONDS[:3]), st.sampled_from([False] * 7 + [True]))


@st.composite
def worlds(draw: Any, kinds: tuple[str, ...], faults: tuple[str, ...]) -> Settings:
    partitions = draw(st.integers(1, 5))
    here = st.integers(0, partitions - 1)
    some = st.sampled_from(draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=len(kinds), unique=True)))
    keys, many = st.integers(0, draw(st.integers(0, 5))), st.lists(items, max_size=7)
    if kinds is BATCH_KINDS:
        event = st.tuples(here, some, st.just(0), st.just(0.0), many)
    else:
        event = st.tuples(here, some, keys, st.sampled_from(SECONDS), st.just(()))
    strike = st.tuples(st.integers(0, 60), st.sampled_from([0.0, 0.2, 1.0, 5.0]), st.sampled_from(faults or ("",)))
    return Settings(
        partitions=partitions,
        members=draw(st.integers(1, 2)) if faults else 1,
        concurrency=draw(st.integers(1, 4)),
        depth=draw(st.integers(0, 3)),
        max_keys=draw(st.integers(1, 3)),
        queued=draw(st.sampled_from([1, 2, 5, 50])),
        poll=draw(st.integers(1, 10)),
        room=draw(st.integers(1, 10)),
        pool_seconds=draw(st.sampled_from([0.001, 0.1, 1.0])),
        max_sent=draw(st.integers(1, 4)),
        batcher=BatcherConfig(
            max_batch_size=draw(st.integers(1, 4)),
            max_delay_seconds=draw(st.sampled_from([0.0, 0.005, 0.4])),
            max_concurrent_batches=draw(st.integers(1, 3)),
            max_queued_items=draw(st.integers(1, 6)),
        ),
        events=draw(st.lists(event, max_size=60)),
        faults=draw(st.lists(strike, max_size=5)) if faults else (),
        seed=draw(st.integers(0, 1000)),
    )


@pytest.mark.parametrize("kinds", [JOB_KINDS, BATCH_KINDS], ids=["jobs", "batches"])
@pytest.mark.parametrize("faults", [(), FAULTS], ids=["calm", "struck"])
def test_everything_ends_in_order_at_any_settings(kinds: tuple[str, ...], faults: tuple[str, ...]) -> None:
    @seeded
    @settings(deadline=None, max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
    @given(worlds(kinds, faults))
    def check(world: Settings) -> None:
        simulate(world)

    check()


@pytest.mark.parametrize("kind", ["jobs", "batches"])
def test_the_smallest_of_everything(kind: str) -> None:
    events: list[Event] = [(at % 5, JOB_KINDS[at % len(JOB_KINDS)], at % 3, 0.3, ()) for at in range(150)]
    if kind == "batches":
        some = [(1, 0.3, False), (1, 0.01, False), (2, 0.0, False)]
        events = [(at % 5, BATCH_KINDS[at % len(BATCH_KINDS)], 0, 0.3, some[: at % 4]) for at in range(150)]
    least = BatcherConfig(max_batch_size=1, max_concurrent_batches=1, max_queued_items=1)
    simulate(
        Settings(
            partitions=5, concurrency=1, depth=0, max_keys=1, queued=1, poll=1, room=1, max_sent=1, batcher=least,
            events=events,
        )
    )  # fmt: skip


def drawn(number: int) -> Settings:
    """A world of jobs by a seed, for those who need no shrinking."""
    rng = random.Random(number)
    partitions = rng.randint(1, 4)
    return Settings(
        partitions=partitions,
        concurrency=rng.randint(1, 3),
        depth=rng.randint(0, 2),
        max_keys=rng.randint(1, 3),
        queued=rng.choice((2, 5, 50)),
        poll=rng.randint(1, 10),
        events=[
            (rng.randrange(partitions), rng.choice(JOB_KINDS), rng.randrange(4), rng.choice(SECONDS), ())
            for _ in range(60)
        ],
        faults=[(60, rng.uniform(0.0, 3.0), rng.choice(("evict", "rebalance"))) for _ in range(4)],
    )


@pytest.mark.parametrize("number", range(10))
def test_worlds_by_seed(number: int) -> None:
    """With failures behind which others wait, which are few in what is drawn above."""
    simulate(drawn(number))


def keys_have_no_order(original: Any, self: JobRunner, job: Job) -> None:
    job.key = object()
    original(self, job)


def whoever_is_roused_has_the_turn(original: Any, self: ConcurrentContext) -> None:
    self._has_turn = True
    original(self)


def failures_are_not_waited_for(original: Any, self: JobRunner, job: Job, **_: bool) -> None:
    original(self, job)


SAFEGUARDS: dict[str, tuple[Any, str, Any]] = {
    "jobs outlive their partition": (Entry, "drop", nothing),
    "whoever is done is next": (ReorderBuffer, "is_ready", property(first_settled_is_ready)),
    "keys have no order": (JobRunner, "add", keys_have_no_order),
    "whoever is roused has the turn": (ConcurrentContext, "_rouse", whoever_is_roused_has_the_turn),
    "failures are not waited for": (JobRunner, "over", failures_are_not_waited_for),
    "given up partitions go on in the buffer": (PartitionWorker, "drop_line", nothing),
}


@pytest.mark.filterwarnings("ignore")  # tasks of a buffer that was broken on purpose
@pytest.mark.parametrize("name", SAFEGUARDS)
def test_each_safeguard_is_missed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With it taken out some world goes wrong, which is right with it."""
    for number in range(60):
        with monkeypatch.context() as patch:
            stand_in(patch, *SAFEGUARDS[name])
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
    slow_first = [(0, "Job", 0, 5.0, ()), *((0, "Job", key, 0.3, ()) for key in range(1, 15))]
    world = Settings(concurrency=2, max_keys=2, queued=50, poll=10, events=slow_first)
    assert simulate(world) < 5.5
    monkeypatch.setattr(JobRunner, "_wake_refused", lambda self, lane: None)
    assert simulate(world) > 6.5, "without being told"
