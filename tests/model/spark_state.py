"""The state of the sink's small world: immutable, hashable, and free of history that cannot matter any more.

What keeps it small: epochs are not numbers (a bump marks the holder fenced and drops what is in flight under the old
epoch), and what is in Kafka is a count for each query: its units of input must arrive in order, so "each once" is
"the next one is the one after the last".
"""

from __future__ import annotations

from typing import NamedTuple

from .spark_rules import Config, Rule
from .state import Broken, put

__all__ = ["Broken", "put"]

NOBODY = -1

# A driver in the commit of one batch.
(STAGE, STAGED, LOOKED, READY, DECIDED, HALF, FULL, MARKED, ENDING, ANSWERED, WRITTEN, GONE) = range(12)
"""STAGED: the tasks have succeeded. LOOKED: read the marker before init. READY: init_transactions has returned.
HALF, FULL: rows sent and acknowledged. MARKED: so is the offset. ENDING: EndTxn sent. ANSWERED: it said committed.
WRITTEN: ``commit`` returns, Spark's commit log comes next. GONE: dead, or stopped with an error, or finished."""

# Its producer, as the broker sees it.
NO_PRODUCER, CURRENT, FENCED = range(3)


class Marker(NamedTuple):
    """The newest batch that is in Kafka, and whose; ``replaced`` has a bit for each query that had been there."""

    query: int
    batch: int
    replaced: int = 0
    rows: int = 0


class Txn(NamedTuple):
    """An open transaction at its coordinator: the rows of one batch, half of them or (``whole``) all."""

    owner: int
    query: int
    batch: int
    start: int
    end: int
    replaces: int
    whole: bool = False
    marker: Marker | None = None


class Query(NamedTuple):
    """A checkpoint, and what of its input is in Kafka."""

    finished: int = 0
    """Batches in Spark's commit log."""
    ends: tuple[int, ...] = ()
    """Spark's offset log: where each batch ends in the input."""
    written: int = 0
    """Units of input that readers of committed records see."""
    batches: int = 0
    """Batches that are in Kafka."""
    crowded: bool = False
    """Two drivers have run on it at the same time."""


class Driver(NamedTuple):
    """A process that runs a query, as it stands in the commit of ``batch``. A frozen one just takes no step."""

    query: int
    batch: int = 0
    at: int = STAGE
    start: int = 0
    end: int = 0
    producer: int = NO_PRODUCER
    rounds: int = 0
    names: int = NOBODY
    """Option ``replaceQuery``."""
    last: tuple[int, int] | None = None
    """Option ``lastWrittenBatch``: (query, batch)."""
    replaces: int = NOBODY
    """The query that this commit takes over from."""
    seen: Marker | None = None
    """Read before init, where that is searched."""
    cut: bool = False
    """Not all of the rows are there."""
    committed: bool = False
    """The broker has committed the transaction that it waits for."""


DEAD = Driver(NOBODY, at=GONE)


class World(NamedTuple):
    """Everything. Transactional ids: one, or (ONE_ID out) one for each driver; ``flying``: EndTxn on the way."""

    txns: tuple[Txn | None, ...]
    flying: tuple[int, ...]
    marker: Marker | None
    pending: Marker | None
    """Committed, but not shown yet: the group coordinator has not settled it, or the log's stable offset is below."""
    queries: tuple[Query, ...]
    drivers: tuple[Driver, ...]
    holder: int
    """The query that wrote last; what the marker should say, and what nobody in this world can see."""
    left: tuple[int, int] | None
    """A ``lastWrittenBatch`` that is still in the code."""
    expiries: int
    restores: int
    resets: int


def initial(model: object) -> World:
    """Nothing has run yet."""
    config: Config = model.config  # type: ignore[attr-defined]
    ids = 1 if Rule.ONE_ID not in model.out else config.drivers  # type: ignore[attr-defined]
    return World(
        (None,) * ids, (0,) * ids, None, None, (), (), NOBODY, None, config.expiries, config.restores, config.resets
    )


def id_of(world: World, driver: int) -> int:
    """Index of the transactional id of a driver."""
    return 0 if len(world.txns) == 1 else driver


def start_of(query: Query, batch: int) -> int:
    """Where a batch begins in the input."""
    return query.ends[batch - 1] if batch else 0


def with_driver(world: World, index: int, driver: Driver) -> World:
    """``world`` with this driver changed."""
    return world._replace(drivers=put(world.drivers, index, driver))


def with_query(world: World, index: int, query: Query) -> World:
    """``world`` with this query changed."""
    return world._replace(queries=put(world.queries, index, query))
