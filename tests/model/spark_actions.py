"""The sink's world: all steps out of a state, and what each is called in a trace."""

from __future__ import annotations

from .search import put
from .spark_driver import Commit, Steps
from .spark_rules import Model
from .spark_state import (
    DEAD,
    NOBODY,
    At,
    Driver,
    Query,
    World,
    end_arrives,
    initial,
    name,
    start_of,
    with_driver,
    with_query,
)


class Sink(Model):
    """``search.Rules``: a sink that writes a batch in one transaction."""

    def initial(self) -> World:
        return initial(self)

    def successors(self, world: World) -> tuple[Steps, Steps]:
        steps: Steps = []
        luck: Steps = []
        for index, driver in enumerate(world.drivers):
            if driver.at != At.GONE:
                Commit(world, self, index, steps).next()
                luck.append((f"driver {index} dies", with_driver(world, index, DEAD)))
        for tid, copies in enumerate(world.flying):
            if copies:
                steps.append(("EndTxn(commit) reaches the coordinator", end_arrives(world, tid, self.config)))
        if world.pending is not None:
            shown = world._replace(marker=world.pending, pending=None)
            steps.append(("the marker's new value can be read", shown))
        room = len(world.drivers) < self.config.drivers
        if room and (self.config.zombies or all(driver.at == At.GONE for driver in world.drivers)):
            _starts(world, self, steps)
        _faults(world, self, luck)
        return steps, luck

    def done(self, world: World) -> bool:
        """Some query has everything in Kafka, and Spark knows."""
        config = self.config
        wanted = 1 if config.batch_write else config.batches
        return any(query.finished == wanted or query.written == config.units for query in world.queries)

    def stalled(self, world: World) -> str:
        if any(driver.at != At.GONE for driver in world.drivers):
            return "stalled: a driver is in its commit, and nothing leads on"
        return ""


def _starts(world: World, model: Model, steps: Steps) -> None:
    """Another process: on a checkpoint that is there (whether the one before is dead or not), or on a new one."""
    config, index = model.config, len(world.drivers)
    for number in range(min(len(world.queries) + 1, config.queries)):
        query = world.queries[number] if number < len(world.queries) else Query()
        if query.finished == config.batches and not config.batch_write:
            continue
        alive = any(driver.at != At.GONE and driver.query == number for driver in world.drivers)
        queries = (*world.queries, query) if number == len(world.queries) else world.queries
        queries = put(queries, number, query._replace(crowded=query.crowded or alive))
        others = range(config.queries + config.stranger if config.replacing else 0)
        named = [NOBODY, *(other for other in others if other != number)]
        for names in named:
            for last in _last_written(world, config.last_written, number, query):
                batch = 0 if config.batch_write else query.finished
                driver = Driver(
                    number, batch, At.STAGE, start_of(query, batch), rounds=config.rounds, names=names, last=last
                )
                left = last if last is not None else world.left
                after = world._replace(queries=queries, drivers=(*world.drivers, driver), left=left)
                told = f", told to replace {name(names)}" if names != NOBODY else ""
                if last is not None:
                    told += f", told that batch {last[1]} of {name(last[0])} was the last"
                steps.append((f"driver {index} starts on {name(number)}{told}", after))


def _last_written(world: World, asked: bool, number: int, query: Query) -> list[tuple[int, int] | None]:
    """What the option may say: nothing, what an earlier job left in the code, or the truth, once a marker is missed."""
    options: list[tuple[int, int] | None] = [None]
    if asked and world.left is not None:
        options.append(world.left)
    truth = (number, query.batches - 1)
    if asked and world.marker is None and world.pending is None and query.batches and truth not in options:
        options.append(truth)
    return options


def _faults(world: World, model: Model, luck: Steps) -> None:
    config, marker = model.config, world.marker
    if world.expiries and marker is not None and world.pending is None:
        first = any(driver.at != At.GONE and driver.batch == 0 for driver in world.drivers)
        first |= any(query.batches and not query.finished for query in world.queries)
        if config.expiry_in_first_batch or not first:
            forgotten = world._replace(marker=None, expiries=world.expiries - 1)
            luck.append(("the broker forgets the marker", forgotten))
    if world.restores:
        for number, query in enumerate(world.queries):
            for batch in range(query.finished):
                older = query._replace(finished=batch, ends=query.ends[:batch])
                after = with_query(world, number, older)._replace(restores=world.restores - 1)
                luck.append((f"the checkpoint of {name(number)} is put back to where batch {batch} is the next", after))
    if world.resets and marker is not None and world.pending is None:
        # Nobody does that while the query runs: a driver may want just the batch after the older marker.
        quiet = all(driver.at == At.GONE for driver in world.drivers)
        for batch in range(marker.batch - 1 if quiet else 0):
            after = world._replace(marker=marker._replace(batch=batch), resets=world.resets - 1)
            luck.append((f"the marker is set back to batch {batch}", after))
