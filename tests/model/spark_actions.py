"""The sink's world: all steps out of a state, and what each is called in a trace."""

from __future__ import annotations

from .spark_broker import end_arrives, name, shown
from .spark_driver import Commit, Steps
from .spark_rules import Model
from .spark_state import DEAD, GONE, NOBODY, STAGE, Driver, Query, World, put, start_of, with_driver, with_query

ACTIONS = {
    "start": "driver {0} starts on {1}",
    "die": "driver {0} dies",
    "stage": "driver {0}: all tasks of the batch have staged their rows",
    "stage_truncated": "driver {0}: a failure upstream ends a task's iterator cleanly, with a part of the rows",
    "lose_rows": "a part of the rows that driver {0} has staged is lost",
    "same_producer": "driver {0} goes on with its producer",
    "read_before": "driver {0} reads the marker",
    "init": "driver {0}: new producer, init_transactions",
    "init_blindly": "driver {0}: new producer, init_transactions; it takes the last try for aborted",
    "read": "driver {0} reads the marker",
    "read_refused": "driver {0} reads the marker and stops with an error",
    "decide": "driver {0} decides by the marker that it has read",
    "decide_refused": "driver {0} decides by the marker that it has read and stops with an error",
    "begin": "driver {0} begins a transaction and sends half of the rows",
    "rest": "driver {0} sends the other half",
    "no_more_rows": "driver {0} finds no more rows",
    "count_differs": "driver {0} finds fewer rows than were staged, aborts and stops with an error",
    "mark": "driver {0} sends the offset in the transaction",
    "no_mark": "driver {0} sends no offset in the transaction",
    "end": "driver {0} sends EndTxn(commit)",
    "answered": "driver {0} has the answer: committed",
    "no_answer": "driver {0} gets no answer and tries again",
    "no_answer_aborts": "driver {0} gets no answer, aborts, and tries again with the same producer",
    "no_answer_raises": "driver {0} gets no answer and stops with an error",
    "transaction_gone": "driver {0}: the transaction is not there any more; it tries again",
    "transaction_gone_aborts": "driver {0}: the transaction is not there any more; it tries again, same producer",
    "transaction_gone_raises": "driver {0}: the transaction is not there any more; it stops with an error",
    "log_gone": "driver {0} finds Spark's logs changed under it, and stops",
    "fenced": "driver {0} is told that it is fenced, and stops",
    "mark_after": "driver {0} commits the marker",
    "finish": "Spark logs the batch of driver {0} as finished, and begins the next",
    "finish_later": "Spark begins the next batch of driver {0}, and will log this one as finished later",
    "finish_last": "Spark logs the last batch of driver {0} as finished",
    "end_arrives": "EndTxn(commit) reaches the coordinator",
    "shown": "the marker's new value can be read",
    "expire": "the broker forgets the marker",
    "restore": "the checkpoint of {0} is put back to where batch {1} is the next",
    "reset": "the marker is set back to batch {0}",
}


def successors(world: World, model: Model) -> tuple[Steps, Steps]:
    """(steps, luck) out of ``world``. Raises Broken when an invariant does not hold."""
    steps: Steps = []
    luck: Steps = []
    for index, driver in enumerate(world.drivers):
        if driver.at != GONE:
            Commit(world, model, index, steps).next()
            luck.append((("die", index), with_driver(world, index, DEAD)))
    for tid, copies in enumerate(world.flying):
        if copies:
            steps.append((("end_arrives", tid), end_arrives(world, tid, model.config)))
    if world.pending is not None:
        steps.append((("shown",), shown(world)))
    room = len(world.drivers) < model.config.drivers
    if room and (model.config.zombies or all(driver.at == GONE for driver in world.drivers)):
        _starts(world, model, steps)
    _faults(world, model, luck)
    return steps, luck


def _starts(world: World, model: Model, steps: Steps) -> None:
    """Another process: on a checkpoint that is there (whether the one before is dead or not), or on a new one."""
    config, index = model.config, len(world.drivers)
    for number in range(min(len(world.queries) + 1, config.queries)):
        query = world.queries[number] if number < len(world.queries) else Query()
        if query.finished == config.batches and not config.batch_write:
            continue
        alive = any(driver.at != GONE and driver.query == number for driver in world.drivers)
        queries = (*world.queries, query) if number == len(world.queries) else world.queries
        queries = put(queries, number, query._replace(crowded=query.crowded or alive))
        others = range(config.queries + config.stranger if config.replacing else 0)
        named = [NOBODY, *(other for other in others if other != number)]
        for names in named:
            for last in _last_written(world, config.last_written, number, query):
                batch = 0 if config.batch_write else query.finished
                driver = Driver(
                    number, batch, STAGE, start_of(query, batch), rounds=config.rounds, names=names, last=last
                )
                left = last if last is not None else world.left
                after = world._replace(queries=queries, drivers=(*world.drivers, driver), left=left)
                label = ("start", index, number, names, last)
                steps.append((label, after))


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
        first = any(driver.at != GONE and driver.batch == 0 for driver in world.drivers)
        first |= any(query.batches and not query.finished for query in world.queries)
        if config.expiry_in_first_batch or not first:
            luck.append((("expire",), world._replace(marker=None, expiries=world.expiries - 1)))
    if world.restores:
        for number, query in enumerate(world.queries):
            for batch in range(query.finished):
                older = query._replace(finished=batch, ends=query.ends[:batch])
                after = with_query(world, number, older)._replace(restores=world.restores - 1)
                luck.append((("restore", number, batch), after))
    if world.resets and marker is not None and world.pending is None:
        # Nobody does that while the query runs: a driver may want just the batch after the older marker.
        quiet = all(driver.at == GONE for driver in world.drivers)
        for batch in range(marker.batch - 1 if quiet else 0):
            after = world._replace(marker=marker._replace(batch=batch), resets=world.resets - 1)
            luck.append((("reset", batch), after))


def done(world: World, model: Model) -> bool:
    """Some query has everything in Kafka, and Spark knows."""
    config = model.config
    wanted = 1 if config.batch_write else config.batches
    return any(query.finished == wanted or query.written == config.units for query in world.queries)


def describe(label: tuple[object, ...]) -> str:
    """One step as a sentence."""
    kind, *details = label
    words = list(details)
    if kind == "start":
        index, number, names, last = details
        assert isinstance(number, int)
        assert isinstance(names, int)
        told = f", told to replace {name(names)}" if names != NOBODY else ""
        if isinstance(last, tuple):
            told += f", told that batch {last[1]} of {name(last[0])} was the last"
        words = [index, name(number) + told]
    elif kind == "restore":
        assert isinstance(words[0], int)
        words[0] = name(words[0])
    return ACTIONS[str(kind)].format(*words)
