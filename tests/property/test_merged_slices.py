"""A slice over several inputs does the same as slices of one run each, and as its events one by one.

The same records of two inputs and a joined table go through workers and their pools. What is admitted, with the
positions at which it can be cut, what is left in the store and among the rows, and what is reported of failures must be
equal.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from streams.codecs import RESERVED_KEY_PREFIX, codec_for
from streams.core.origin import in_input
from streams.core.partition import PartitionState
from streams.core.router import Route
from streams.core.transaction import Admitted
from streams.errors import EventFailure, TopicError
from streams.events import event_type_of
from streams.model.topics import InputSpec
from streams.outcomes import ErrorResponse, Retry
from streams.records import TYPE_HEADER, IncomingRecord, TopicPartition
from streams.runtime.ownership.replica import Replica
from streams.runtime.partition.joined_rows import ROUTE_PREFIX, JoinedRows
from streams.runtime.partition.joining import JoinKind, keep_row
from streams.runtime.partition.worker import PartitionWorker
from streams.runtime.transactions.pool import MergingPool
from streams.stores import HashEngine, Table
from streams.stores.joined import Joined
from tests.property.kit import seeded
from tests.property.test_unit import LIMIT, Deed, Seen, World, act, deeds

pytestmark = pytest.mark.usefixtures("quiet")

MADE: Final = event_type_of(Deed)
ROW_HEADERS: Final = ((TYPE_HEADER, f"{ROUTE_PREFIX}v".encode()),)
MISPLACED: Final = b"d"
"""A key of the other one of two partitions; a, b and c are of this one."""
Step = tuple[int, int, Deed] | tuple[int, int, str, str]
"""Place of the input, milliseconds since the event before, and what it does; of a row (place 2) which kind, and its
key."""
BAD_ROWS: Final = ("no key", "no text", "large", "refused")
ROWS: Final = ("set",) * 6 + ("gone",) * 2 + BAD_ROWS


class Fussy:
    """The codec of the rows: text, but for one word."""

    encode = staticmethod(str.encode)

    def decode(self, data: bytes) -> str:
        if data == b"refused":
            raise KeyError("not this one")
        return data.decode()


def row_of(offset: int, kind: str, key: str, at_ms: int) -> IncomingRecord:
    value = {"gone": None, "no text": b"\xff", "large": b"x" * LIMIT, "refused": b"refused"}.get(kind, b"%d" % offset)
    name = {"no key": None, "misplaced": MISPLACED, "own": RESERVED_KEY_PREFIX + b"x"}.get(kind, key.encode())
    return IncomingRecord("v", 0, offset, name, value, ROW_HEADERS, at_ms)


class Merged(World):
    """A worker of two inputs and a joined table, and its pool. ``how``: ``together`` takes runs of all in one slice,
    ``apart`` a slice for each run, ``one by one`` each event by ``Execution``. ``goal``: the end of the table up to
    which it is read first. ``observed``: the store looks at each event."""

    def __init__(
        self,
        script: list[Step],
        how: str,
        policy: Retry,
        on_error: Retry | None = None,
        goal: int = 0,
        *,
        observed: bool = True,
    ) -> None:
        super().__init__("hot path", policy, awaits=False)
        self._how = how
        host: Any = self.worker.engine
        self.customers = Joined("v", (codec_for(str), Fussy()), partitions=2)
        spec = InputSpec("v", ROW_HEADERS, None, on_error, self.customers)
        host.router.add(Route(f"{ROUTE_PREFIX}v", None, keep_row, blocking=False, policy=policy, kind=JoinKind("v")))
        host.further_inputs = [(InputSpec("u", None, None), host.input), (spec, host.input)]
        host.config = host.config.__class__(group_id="g", topic="t", num_partitions=2, alignment_seconds=0.0)
        worker = self.worker = PartitionWorker(host, 0, 1)
        unused: Any = None
        self.pool = host.pool = MergingPool(
            host.config, unused, unused, writer="w", now=host.now, group_metadata=unused, further_fields=unused,
            settled=unused, further_inputs=["u", "v"], moved_to=lambda _, offset: worker.moved_to(offset),
        )  # fmt: skip
        store: Any = self.table
        if not observed:
            store = self.table = Table(TopicPartition("t", 0), HashEngine(), codec_for(str), codec_for(str))
        joined = JoinedRows.of([spec], 0)
        if goal:
            joined.goals["v"] = goal
        self.rows: Any = joined.tables["v"]
        worker.adopt(Replica(0, 1, store, 0.0, joined))
        worker.state = worker.state.to(PartitionState.ACTIVE)
        worker.start_at((0, 0, 0))
        queues: list[list[IncomingRecord]] = [[], [], []]
        at_ms = 1_000
        for place, later, *what in script:
            at_ms += later
            queue = queues[place]
            deed = what[0]
            if isinstance(deed, Deed):
                headers, value = MADE.headers, MADE.encode(deed)
                queue.append(IncomingRecord("tu"[place], 0, len(queue), b"k", value, headers, at_ms))
            else:
                queue.append(row_of(len(queue), deed, str(what[1]), at_ms))
        assert worker.inputs is not None
        for place, queue in enumerate(queues):
            worker.inputs.add(place, queue, 0, 0.0, at_end=True)

    def _handle(self, ctx: Any, deed: Deed) -> Any:
        """Send the rows, too: no event is without effects."""
        self.contexts.append(ctx)
        rows = ctx.joined(self.customers)
        ctx.forward("rows", Seen(" ".join(f"{key}={rows.get(key)}" for key in "abc")), key="k")
        return act(ctx, deed)

    async def _run_apart(self) -> bool:
        worker = self.worker
        records = worker._next_records()
        if self._how == "one by one":
            for record in records:
                await worker._singles.one(record, None)
                worker._reads_from.handled(1)
        else:
            await worker.handle(records)
        return bool(records)

    async def run(self) -> tuple[Any, ...]:
        worker = self.worker
        assert worker.inputs is not None
        together = self._how == "together"
        try:
            while (together and await worker._run_merged(worker.inputs)) or await self._run_apart():
                pass
        except (EventFailure, TopicError) as failure:
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
        return entries, dict(self.table.items()), dict(self.rows.items()), worker.timers.contents(), stand


async def left_by(script: list[Step], how: str, policy: Retry, *more: Any, observed: bool = True) -> tuple[Any, ...]:
    return await Merged(script, how, policy, *more, observed=observed).run()


later = st.sampled_from([0, 0, 1, 5])
events = st.tuples(st.integers(0, 1), later, deeds)
rows = st.tuples(st.just(2), later, st.sampled_from(ROWS), st.sampled_from("abc"))
scripts = st.lists(st.one_of(events, events, rows), min_size=1, max_size=16)
policies = st.sampled_from([None, Retry(attempts=1, then=ErrorResponse.DEAD_LETTER)])
NOTHING: Final = Deed((), "nothing")
PUT: Final = Deed((("put", "a", 1),), "nothing")
FAILS: Final = Deed((("put", "a", 1),), "raise once")
TAIL: Final[list[Step]] = [(0, 5, NOTHING), (1, 0, NOTHING), (2, 0, "set", "a")]
"""Behind the others, because a slice ends with the last record that is known of an input."""


@seeded
@example([(1, 1, PUT), (0, 1, PUT), (2, 1, "set", "a"), (0, 1, FAILS), (2, 1, "gone", "a")], 2, None, 0, False)
@example([(0, 1, PUT), (2, 1, "set", "a"), (2, 1, "misplaced", "a"), (1, 1, PUT)], 1, None, 0, False)
@example([(0, 1, PUT), (2, 1, "set", "a"), (1, 1, PUT)], 1, None, 0, True)
@given(scripts, st.integers(1, 2), policies, st.integers(0, 3), st.booleans())
@settings(deadline=None)
def test_one_slice_is_as_one_of_each_run(
    script: list[Step], attempts: int, on_error: Retry | None, goal: int, observed: bool
) -> None:
    policy = Retry(attempts=attempts, backoff_seconds=0.0, then=ErrorResponse.DEAD_LETTER)
    more = policy, on_error, goal
    ways = ("one by one", "apart", "together")
    expected, *found = (asyncio.run(left_by(script + TAIL, how, *more, observed=observed)) for how in ways)
    assert all(one == expected for one in found)


def test_effects_name_the_input_of_their_event() -> None:
    script: list[Step] = [(1, 1, PUT), (0, 1, PUT), (2, 1, "set", "a"), (1, 1, PUT), *TAIL]
    entries, *_ = asyncio.run(left_by(script, "together", Retry(attempts=1)))
    origins = [{effect[-1] for effect in (*changes, *outputs)} for _, _, changes, outputs in entries]
    assert origins[:4] == [{in_input(1, 0)}, {0}, {in_input(2, 0)}, {in_input(1, 1)}]
    assert [offset for offset, *_ in entries][:4] == [(0, 1, 0), (1, 1, 0), (1, 1, 1), (1, 2, 1)]


def test_rows_and_events_share_a_slice() -> None:
    """Also a record of the toolkit's own, in the changelog of another source, which is no row."""
    script: list[Step] = [(0, 1, PUT), (2, 1, "set", "a"), (2, 0, "own", "a"), (1, 1, PUT), (2, 1, "gone", "a")]

    async def admitted() -> list[Admitted]:
        merged = Merged(script + TAIL, "together", Retry(attempts=1))
        await merged.run()
        assert merged.pool._open is not None
        return merged.pool._open.admitted

    first, *_ = found = asyncio.run(admitted())
    assert (first.events, first.offset) == (6, (2, 1, 3))
    sent = [output.value or b"" for entry in found for output in entry.outputs if output.topic == "rows"]
    assert [b"a=0" in value for value in sent] == [False, True, False, False]


@pytest.mark.parametrize("kind", [*BAD_ROWS, "misplaced"])
def test_a_row_that_cannot_be_kept_ends_the_slice_in_front_of_it(kind: str) -> None:
    script: list[Step] = [(0, 1, PUT), (2, 1, "set", "a"), (2, 1, kind, "a"), (1, 1, PUT)]
    entries, _, left, _, stand = asyncio.run(left_by(script, "together", Retry(attempts=1)))
    assert [offset for offset, *_ in entries] == [(1, 0, 0), (1, 0, 1)]
    assert left == {"a": "0"}
    assert "v[0]@1" in stand[-2]
