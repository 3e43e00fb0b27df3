"""The state of the sink's small world: immutable, hashable, and free of history that cannot matter any more.

What keeps it small: epochs are not numbers (a bump marks the holder fenced and drops what is in flight under the old
epoch), and what is in Kafka is a count for each query: its units of input must arrive in order, so "each once" is
"the next one is the one after the last".
"""

from __future__ import annotations

from typing import NamedTuple

from .search import Broken, put
from .spark_rules import Config, Model, Rule

NOBODY = -1


class At:
    """Where a driver is in the commit of one batch. STAGED: the tasks have succeeded. LOOKED: read the marker before
    init. READY: init_transactions has returned. HALF, FULL: rows sent and acknowledged. MARKED: so is the offset.
    ENDING: EndTxn sent. ANSWERED: it said committed. WRITTEN: ``commit`` returns, Spark's commit log comes next. GONE:
    dead, or stopped with an error, or finished."""

    STAGE, STAGED, LOOKED, READY, DECIDED, HALF, FULL, MARKED, ENDING, ANSWERED, WRITTEN, GONE = range(12)


class Producer:
    """A driver's, as the broker sees it."""

    NONE, CURRENT, FENCED = range(3)


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
    at: int = At.STAGE
    start: int = 0
    end: int = 0
    producer: int = Producer.NONE
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


DEAD = Driver(NOBODY, at=At.GONE)


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


def initial(model: Model) -> World:
    """Nothing has run yet."""
    config = model.config
    ids = 1 if Rule.ONE_ID not in model.out else config.drivers
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


# The broker's half: one transaction coordinator (version 1), the topic, and the marker. EndTxn carries the producer's
# id and epoch, nothing else: whatever transaction is ongoing under that epoch when it arrives is the one it ends. A new
# epoch waits for nothing here but the decision: the marker's new value may be shown later, as a group coordinator does
# that settles offsets after the transaction is complete.


def initialise(world: World, index: int) -> World:
    """InitProducerId: what is open under the id is aborted, whoever held it is fenced, what flies is void."""
    tid = id_of(world, index)
    drivers = tuple(
        driver._replace(producer=Producer.FENCED, committed=False)
        if driver.producer == Producer.CURRENT and id_of(world, other) == tid
        else driver
        for other, driver in enumerate(world.drivers)
    )
    world = world._replace(txns=put(world.txns, tid, None), flying=put(world.flying, tid, 0), drivers=drivers)
    return with_driver(world, index, world.drivers[index]._replace(producer=Producer.CURRENT))


def end_arrives(world: World, tid: int, config: Config) -> World:
    """One copy of EndTxn(commit) arrives under the current epoch of this id."""
    world = world._replace(flying=put(world.flying, tid, world.flying[tid] - 1))
    txn = world.txns[tid]
    if txn is None:
        return world
    world = _visible(world._replace(txns=put(world.txns, tid, None)), txn, config)
    if txn.marker is not None:
        world = world._replace(pending=txn.marker)
    owner = world.drivers[txn.owner]
    if owner.at == At.ENDING and owner.batch == txn.batch:
        world = with_driver(world, txn.owner, owner._replace(committed=True))
    return world


def _visible(world: World, txn: Txn, config: Config) -> World:
    """The rows of a transaction are readable from here on. Everything that must hold of the topic is checked here."""
    query = world.queries[txn.query]
    batch = f"batch {txn.batch} of {name(txn.query)}"
    if not txn.whole:
        raise Broken(f"a part of {batch} is committed")
    if txn.start < query.written:
        raise Broken(f"rows of {batch} are committed twice")
    if txn.start > query.written:
        raise Broken(f"{batch} is committed, rows before it are not")
    if world.holder not in (NOBODY, txn.query) and world.expiries == config.expiries and txn.replaces != world.holder:
        named = "nobody" if txn.replaces == NOBODY else name(txn.replaces)
        raise Broken(
            f"{name(txn.query)} writes everything again behind {name(world.holder)}; {named} was to be replaced"
        )
    query = query._replace(written=txn.end, batches=query.batches + 1)
    return with_query(world, txn.query, query)._replace(holder=txn.query)


def name(query: int) -> str:
    """A query in words."""
    return f"Q{query + 1}"
