"""The broker's half: one transaction coordinator (version 1), the topic, and the marker.

EndTxn carries the producer's id and epoch, nothing else: whatever transaction is ongoing under that epoch when it
arrives is the one it ends. A new epoch waits for nothing here but the decision: the marker's new value may be shown
later, as a group coordinator does that settles offsets after the transaction is complete.
"""

from __future__ import annotations

from .spark_rules import Config
from .spark_state import (
    CURRENT,
    ENDING,
    FENCED,
    NOBODY,
    Broken,
    Txn,
    World,
    id_of,
    put,
    with_driver,
    with_query,
)


def initialise(world: World, index: int) -> World:
    """InitProducerId: what is open under the id is aborted, whoever held it is fenced, what flies is void."""
    tid = id_of(world, index)
    drivers = tuple(
        driver._replace(producer=FENCED, committed=False)
        if driver.producer == CURRENT and id_of(world, other) == tid
        else driver
        for other, driver in enumerate(world.drivers)
    )
    world = world._replace(txns=put(world.txns, tid, None), flying=put(world.flying, tid, 0), drivers=drivers)
    return with_driver(world, index, world.drivers[index]._replace(producer=CURRENT))


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
    if owner.at == ENDING and owner.batch == txn.batch:
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


def shown(world: World) -> World:
    """The marker's new value can be read."""
    return world._replace(marker=world.pending, pending=None)


def name(query: int) -> str:
    """A query in words."""
    return f"Q{query + 1}"
