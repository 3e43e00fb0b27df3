"""All steps out of a state of the sink's world. The driver's half: ``commit`` of one batch step by step, what the
marker decides, and Spark's logs around it."""

from __future__ import annotations

from enum import Enum

from .search import Broken, put
from .spark_rules import Config, Model, Rule
from .spark_state import (
    DEAD,
    NOBODY,
    At,
    Driver,
    Marker,
    Producer,
    Query,
    Txn,
    World,
    end_arrives,
    id_of,
    initial,
    initialise,
    name,
    start_of,
    with_driver,
    with_query,
)

Steps = list[tuple[str, World]]


class Verdict(Enum):
    """What a marker means for a batch; all but the first two stop the query, with what the error says."""

    WRITE = "write"
    SKIP = "it is in Kafka"
    OTHER = "another query's"
    MISSING = "missing"
    AHEAD = "ahead"
    BEHIND = "behind"
    OTHER_ROWS = "of this batch with other rows"
    MISFIT = "missing, and the operator's batch does not fit"


WRITE, SKIP, OTHER, MISSING, AHEAD, BEHIND, OTHER_ROWS, MISFIT = Verdict


def decide(driver: Driver, marker: Marker | None, model: Model) -> Verdict:
    """What the sink does with batch ``driver.batch`` when it finds ``marker``."""
    batch, out = driver.batch, model.out
    if Rule.MARKER in out:
        return WRITE
    if model.config.batch_write:
        return WRITE if marker is None else SKIP
    if marker is None:
        if driver.last is not None and (driver.last[0] == driver.query or Rule.LAST_NAMES_QUERY in out):
            last = driver.last[1]
            if batch <= last if Rule.LAST_NAMES_QUERY in out else batch == last:
                return SKIP
            return WRITE if batch == last + 1 else MISFIT
        return WRITE if batch == 0 or Rule.NONE_MEANS_FIRST in out else MISSING
    if marker.query != driver.query and Rule.QUERY_IN_MARKER not in out:
        if marker.replaced >> driver.query & 1 and Rule.NO_WAY_BACK not in out:
            return OTHER
        named = driver.names == marker.query or (driver.names != NOBODY and Rule.REPLACE_BY_NAME in out)
        return WRITE if named and (batch == 0 or Rule.REPLACE_AT_FIRST_BATCH in out) else OTHER
    if marker.batch == batch:
        same = marker.rows == driver.end - driver.start or driver.last == (driver.query, batch)
        return SKIP if same or Rule.ROWS_COMPARED in out else OTHER_ROWS
    if marker.batch > batch:
        return SKIP if Rule.AHEAD_STOPS in out else AHEAD
    return WRITE if marker.batch == batch - 1 or Rule.BEHIND_STOPS in out else BEHIND


def _check_refusal(world: World, driver: Driver, why: Verdict, config: Config) -> None:
    """A sink that stops for nothing is broken too."""
    query = world.queries[driver.query]
    lawful = {
        OTHER: True,
        MISFIT: True,
        MISSING: world.expiries < config.expiries,
        OTHER_ROWS: world.restores < config.restores,
        AHEAD: query.crowded or world.restores < config.restores,
        BEHIND: world.resets < config.resets,
    }
    if not lawful[why]:
        raise Broken(f"{name(driver.query)} is stopped for nothing at batch {driver.batch}: the marker is {why.value}")


class Commit:
    """One driver in the commit of one batch: what it can do next, collected in ``steps``."""

    def __init__(self, world: World, model: Model, index: int, steps: Steps) -> None:
        self._world = world
        self._model = model
        self._index = index
        self._steps = steps
        self._driver = world.drivers[index]
        self._query = world.queries[self._driver.query]
        self._start = self._driver.start
        self._tid = id_of(world, index)

    def next(self) -> None:
        """Add every possible step."""
        STEPS[self._driver.at](self)

    def _goes(self, told: str, after: World | None = None, **changes: object) -> None:
        base = self._world if after is None else after
        driver = base.drivers[self._index]._replace(**changes)  # type: ignore[arg-type]
        self._steps.append((f"driver {self._index} {told}", with_driver(base, self._index, driver)))

    def _stops(self, told: str, after: World | None = None) -> None:
        self._goes(told, after, **DEAD._asdict())

    def _with_txn(self, txn: Txn | None) -> World:
        return self._world._replace(txns=put(self._world.txns, self._tid, txn))

    def _out(self, rule: Rule) -> bool:
        return rule in self._model.out

    def stage(self) -> None:
        """The tasks run. What a batch holds is decided once, in Spark's offset log, before they do."""
        driver, query, config, start = self._driver, self._query, self._model.config, self._start
        logged = len(query.ends) > driver.batch
        if len(query.ends) < driver.batch:
            self._stops("finds Spark's logs changed under it, and stops")
            return
        if logged and not self._out(Rule.BATCH_IS_FIXED):
            ends = [query.ends[driver.batch]]
        else:
            ends = list(range(start + 1, (config.units if config.uneven else min(start + 1, config.units)) + 1))
            if config.empty:
                ends.append(start)
        for end in ends:
            after = self._world
            if not logged:
                after = with_query(after, driver.query, query._replace(ends=(*query.ends, end)))
            self._goes("has the rows of the batch staged by all tasks", after, at=At.STAGED, end=end)
            if config.truncated and self._out(Rule.DRIVER_COMMITS) and end > start:
                self._goes(
                    "has a part of the rows: a failure upstream ends a task's iterator cleanly",
                    after,
                    at=At.STAGED,
                    end=end,
                    cut=True,
                )

    def fence(self) -> None:
        """A new producer under the sink's id, for this batch and this round alone."""
        driver, config = self._driver, self._model.config
        if driver.producer == Producer.CURRENT:  # FRESH_PRODUCER is out
            self._goes("goes on with its producer", at=At.READY)
        elif self._out(Rule.READ_AFTER_INIT) and driver.at == At.STAGED:
            self._goes("reads the marker", at=At.LOOKED, seen=self._world.marker)
        elif self._out(Rule.NEVER_GUESS) and driver.rounds < config.rounds:
            self._goes(
                "has a new producer, init_transactions; it takes the last try for aborted",
                initialise(self._world, self._index),
                at=At.DECIDED,
            )
        else:
            self._goes("has a new producer, init_transactions", initialise(self._world, self._index), at=At.READY)
        if config.truncated and not driver.cut and driver.end > self._start:
            self._goes("loses a part of the rows that it has staged", cut=True)

    def read(self) -> None:
        """The marker, read behind the fence, decides."""
        stable = Rule.LOG_TO_HIGH_WATERMARK if self._model.config.marker_log else Rule.STABLE_READ
        if self._out(Rule.READ_AFTER_INIT):
            self._decide("decides by the marker that it has read", self._driver.seen)
        elif self._world.pending is None or self._out(stable):
            self._decide("reads the marker", self._world.marker)

    def _decide(self, label: str, marker: Marker | None) -> None:
        driver = self._driver
        verdict = decide(driver, marker, self._model)
        if verdict is WRITE:
            other = marker is not None and marker.query != driver.query
            replaces = driver.names if other and not self._out(Rule.QUERY_IN_MARKER) else NOBODY
            left_out = self._out(Rule.EMPTY_BATCH_TOO) and driver.end == self._start
            self._goes(label, at=At.WRITTEN if left_out else At.DECIDED, replaces=replaces, seen=marker)
        elif verdict is SKIP:
            self._goes(label, at=At.WRITTEN)
        else:
            _check_refusal(self._world, driver, verdict, self._model.config)
            self._stops(f"{label} and stops with an error")

    def begin(self) -> None:
        """The first rows go out."""
        driver, empty = self._driver, self._driver.end == self._start
        if driver.producer != Producer.CURRENT:
            self._stops("is told that it is fenced, and stops")
        else:
            txn = Txn(self._index, driver.query, driver.batch, self._start, driver.end, driver.replaces, empty)
            self._goes(
                "begins a transaction and sends half of the rows", self._with_txn(txn), at=At.FULL if empty else At.HALF
            )

    def go_on(self) -> None:
        """An open transaction grows: the second half of the rows, the marker, the request to end it."""
        driver, txn = self._driver, self._world.txns[self._tid]
        if driver.producer != Producer.CURRENT:
            self._stops("is told that it is fenced, and stops")
        elif txn is None or txn.batch != driver.batch:
            self._again("finds its transaction gone")
        elif driver.at == At.HALF:
            if not driver.cut:
                self._goes("sends the other half", self._with_txn(txn._replace(whole=True)), at=At.FULL)
            elif self._out(Rule.ROWS_COUNTED) or self._out(Rule.DRIVER_COMMITS):
                self._goes("finds no more rows", at=At.FULL)
            else:
                self._stops("finds fewer rows than were staged, aborts and stops with an error", self._with_txn(None))
        elif driver.at == At.FULL:
            if self._out(Rule.MARKER) or self._out(Rule.MARKER_IN_TRANSACTION):
                self._goes("sends no offset in the transaction", at=At.MARKED)
            else:
                self._goes(
                    "sends the offset in the transaction",
                    self._with_txn(txn._replace(marker=marker_of(driver))),
                    at=At.MARKED,
                )
        else:
            flying = put(self._world.flying, self._tid, self._model.config.copies)
            self._goes("sends EndTxn(commit)", self._world._replace(flying=flying), at=At.ENDING)

    def wait(self) -> None:
        """The answer, or none."""
        if self._driver.committed:
            self._goes(
                "has the answer: committed", at=At.ANSWERED if self._out(Rule.MARKER_IN_TRANSACTION) else At.WRITTEN
            )
        elif self._driver.producer != Producer.CURRENT:
            self._stops("is told that it is fenced, and stops")
        self._again("gets no answer")

    def _again(self, label: str) -> None:
        """The next round begins at the fence. The last one raises."""
        rounds = self._driver.rounds
        if not rounds:
            self._stops(f"{label} and stops with an error")
        elif self._out(Rule.FRESH_PRODUCER) and self._driver.producer == Producer.CURRENT:
            told = f"{label}, aborts, and tries again with the same producer"
            self._goes(told, self._with_txn(None), at=At.READY, rounds=rounds - 1, committed=False)
        else:
            told, producer = f"{label} and tries again", Producer.NONE
            self._goes(told, at=At.STAGED, rounds=rounds - 1, committed=False, producer=producer, seen=None)

    def mark_after(self) -> None:
        """Only without MARKER_IN_TRANSACTION."""
        self._goes("commits the marker", self._world._replace(marker=marker_of(self._driver)), at=At.WRITTEN)

    def finish(self) -> None:
        """``commit`` has returned: Spark logs the batch as finished and begins the next."""
        driver, query, config = self._driver, self._query, self._model.config
        if query.written < driver.end:
            raise Broken(
                f"batch {driver.batch} of {name(driver.query)} is finished in Spark, its rows are not in Kafka"
            )
        if len(query.ends) <= driver.batch:
            self._stops("finds Spark's logs changed under it, and stops")
            return
        ends = put(query.ends, driver.batch, driver.end) if self._out(Rule.BATCH_IS_FIXED) else query.ends
        query = query._replace(finished=max(query.finished, driver.batch + 1), ends=ends)
        after = with_query(self._world, driver.query, query)
        nothing_left = driver.end == config.units and not config.empty and len(ends) == driver.batch + 1
        if config.batch_write or driver.batch + 1 == config.batches or nothing_left:
            self._stops("has its last batch logged as finished by Spark", after)
            return
        kept = driver.producer if self._out(Rule.FRESH_PRODUCER) else Producer.NONE
        onward = Driver(
            driver.query, driver.batch + 1, At.STAGE, driver.end, producer=kept, rounds=config.rounds,
            names=driver.names, last=driver.last,
        )  # fmt: skip
        self._goes("has its batch logged as finished by Spark, and begins the next", after, **onward._asdict())
        if self._out(Rule.BATCHES_IN_TURN):
            self._goes("begins the next batch; Spark will log this one as finished later", **onward._asdict())


def marker_of(driver: Driver) -> Marker:
    """What a commit of this driver leaves: it hands the list of the replaced on, and adds whom it replaces."""
    replaced = 0 if driver.seen is None else driver.seen.replaced
    if driver.seen is not None and driver.seen.query != driver.query:
        replaced |= 1 << driver.seen.query
    return Marker(driver.query, driver.batch, replaced, driver.end - driver.start)


STEPS = {
    At.STAGE: Commit.stage,
    At.STAGED: Commit.fence,
    At.LOOKED: Commit.fence,
    At.READY: Commit.read,
    At.DECIDED: Commit.begin,
    At.HALF: Commit.go_on,
    At.FULL: Commit.go_on,
    At.MARKED: Commit.go_on,
    At.ENDING: Commit.wait,
    At.ANSWERED: Commit.mark_after,
    At.WRITTEN: Commit.finish,
}


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
