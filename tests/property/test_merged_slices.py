"""A slice over several inputs does the same as slices of one run each, event by event.

The same records of two inputs go through two workers and their pools. What is admitted, with the positions at which it
can be cut, what is left in the store, and what is reported of failures must be equal.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.core.origin import in_input
from streams.core.partition import PartitionState
from streams.errors import EventFailure
from streams.events import event_type_of
from streams.outcomes import ErrorResponse, Retry
from streams.records import IncomingRecord
from streams.runtime.ownership.replica import Replica
from streams.runtime.partition.worker import PartitionWorker
from streams.runtime.transactions.pool import MergingPool
from streams.topics import InputSpec
from tests.property.kit import seeded
from tests.property.test_unit import Deed, World, deeds

pytestmark = pytest.mark.usefixtures("quiet")

MADE = event_type_of(Deed)
Script = list[tuple[int, int, Deed]]
"""Place of the input, milliseconds since the event before, and what it does."""


class Merged(World):
    """A worker of two inputs and its pool. ``together``: runs of both in one slice."""

    def __init__(self, script: Script, policy: Retry, *, together: bool) -> None:
        super().__init__("hot path", policy, awaits=False)
        self._together = together
        host: Any = self.worker.engine
        host.further_inputs = [(InputSpec("u", None, None), host.input)]
        host.config = host.config.__class__(group_id="g", topic="t", num_partitions=1, alignment_seconds=0.0)
        worker = self.worker = PartitionWorker(host, 0, 1)
        unused: Any = None
        self.pool = host.pool = MergingPool(
            host.config, unused, unused, writer="w", now=host.now, snapshot=unused, further_fields=unused,
            settled=unused, further_inputs=["u"], moved_to=lambda _, offset: worker.moved_to(offset),
        )  # fmt: skip
        worker.adopt(Replica(0, 1, self.table, 0.0))
        worker.state = worker.state.to(PartitionState.ACTIVE)
        worker.start_at((0, 0))
        queues: list[list[IncomingRecord]] = [[], []]
        at_ms = 1_000
        for place, later, deed in script:
            at_ms += later
            queue = queues[place]
            deed = Deed((*deed.ops, ("read", "a", 0)), deed.then)  # no event is without effects
            queue.append(IncomingRecord("tu"[place], 0, len(queue), b"k", MADE.encode(deed), MADE.headers, at_ms))
        assert worker.inputs is not None
        for place, queue in enumerate(queues):
            worker.inputs.add(place, queue, 0, 0.0, at_end=True)

    async def _run_apart(self) -> bool:
        records = self.worker._next_records()
        await self.worker.handle(records)
        return bool(records)

    async def run(self) -> tuple[Any, ...]:
        worker = self.worker
        assert worker.inputs is not None
        try:
            while (self._together and await worker._run_merged(worker.inputs)) or await self._run_apart():
                pass
        except EventFailure as failure:
            self.stopped = str(failure)
        entries = [
            (
                entry.offset,
                entry.events,
                [(change.key, change.value, change.previous, change.origin) for change in entry.changes],
                [(output.topic, output.key, output.value, output.origin) for output in entry.outputs],
            )
            for whole in (self.pool._open.admitted if self.pool._open is not None else ())
            for entry in whole.by_event()
        ]
        stand: list[Any] = [
            (one.position, self.stopped or (one.inbox.records, bool(one.inbox))) for one in worker.inputs.all
        ]
        stand += [self.measured, self.stopped, len(self.contexts)]
        return entries, dict(self.table.items()), worker.timers.contents(), stand


async def left_by(script: Script, policy: Retry, *, together: bool) -> tuple[Any, ...]:
    return await Merged(script, policy, together=together).run()


scripts = st.lists(st.tuples(st.integers(0, 1), st.sampled_from([0, 0, 1, 5]), deeds), min_size=1, max_size=16)


@seeded
@given(scripts, st.integers(1, 2))
@settings(deadline=None)
def test_one_slice_is_as_one_of_each_run(script: Script, attempts: int) -> None:
    policy = Retry(attempts=attempts, backoff_seconds=0.0, then=ErrorResponse.DEAD_LETTER)
    apart, together = (asyncio.run(left_by(script, policy, together=how)) for how in (False, True))
    assert together == apart


def test_effects_name_the_input_of_their_event() -> None:
    put = Deed((("put", "a", 1),), "nothing")
    entries, *_ = asyncio.run(left_by([(1, 1, put), (0, 1, put), (1, 1, put)], Retry(attempts=1), together=True))
    origins = [{effect[-1] for effect in (*changes, *outputs)} for _, _, changes, outputs in entries]
    assert origins == [{in_input(1, 0)}, {0}, {in_input(1, 1)}]
    assert [offset for offset, *_ in entries] == [(0, 1), (1, 1), (1, 2)]
