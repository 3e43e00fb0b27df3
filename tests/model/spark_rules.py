"""The rules of the Spark sink, each a switch that can be taken out, and the worlds that are searched.

``docs/internals/spark-protocol.md`` tells the protocol. A model is a configuration plus the set of rules that are
*out*; with none out, no reachable state may break an invariant.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Config(NamedTuple):
    """A small world of one sink: ``queries`` checkpoints, ``drivers`` processes in all, each alive for as long as it
    likes, ``units`` of input that a query's batches cut up."""

    name: str
    queries: int = 1
    drivers: int = 3
    batches: int = 2
    units: int = 2
    rounds: int = 1
    """How often one commit may try again after an unclear answer."""
    copies: int = 2
    """How often a request to end a transaction may arrive."""
    uneven: bool = False
    """A batch may hold any number of units (two attempts of one batch agree, by Spark's log)."""
    empty: bool = False
    """A batch may hold none."""
    truncated: bool = False
    """Upstream failures end a task's iterator cleanly; staged rows are lost between task and driver."""
    expiries: int = 0
    """How often the broker forgets the marker."""
    expiry_in_first_batch: bool = False
    """Also while a batch 0 is not finished: the known hole."""
    restores: int = 0
    """How often the checkpoint may be put back to an older state."""
    resets: int = 0
    """How often the marker's offset may be set back, by two batches or more."""
    replacing: bool = False
    """The operator may name a query to replace (right or wrong, or left in the code from another time)."""
    stranger: bool = False
    """A query may also be named that was never here."""
    zombies: bool = True
    """A driver may start while another one is still there."""
    last_written: bool = False
    """The operator may state the last written batch, true when first stated; the option may be left in the code."""
    marker_log: bool = False
    """The marker is a record of a compacted topic that other sinks write to as well; it never expires."""
    batch_write: bool = False
    """``df.write`` with a writeId: every driver is another run of the same write."""


ONE = Config("one batch", drivers=2, batches=1, units=1)
TWO = Config("two batches", drivers=2, rounds=0)
REPLACED = Config("replaced", queries=2, batches=1, units=1, rounds=0, copies=1, replacing=True, zombies=False)
EXPIRED = Config("expired", drivers=2, rounds=0, copies=1, expiries=1)
CUT = Config("cut", drivers=1, batches=1, units=1, truncated=True)
RESET = Config("reset", drivers=2, batches=3, units=3, rounds=0, copies=1, resets=1)
RESTORED = Config("restored", drivers=2, batches=3, units=3, uneven=True, rounds=0, restores=1)
RESTORED_ROWS = Config("restored", drivers=2, units=3, uneven=True, rounds=0, restores=1)
STRANGER = REPLACED._replace(drivers=2, stranger=True)
FORGOTTEN = REPLACED._replace(batches=2, units=2, expiries=1)
LEFT = Config("left", queries=2, rounds=0, copies=1, expiries=1, last_written=True)
NOT_FIXED = Config("not fixed", drivers=2, uneven=True, rounds=0)
ASYNCHRONOUS = Config("asynchronous", drivers=2, rounds=0, copies=1)


class Rule(Enum):
    """What the sink does, or what it takes for granted: what happens when the rule is out, and where it is
    missed: the search of this world without the rule must end in a counterexample."""

    DRIVER_COMMITS = ("each task commits what its iterator gave, whose end may be a failure upstream", CUT)
    ROWS_COUNTED = ("the rows that are found again are not compared with the rows that were staged", CUT)
    MARKER = ("there is no marker: every attempt writes", ONE)
    MARKER_IN_TRANSACTION = ("the marker is committed after the transaction, not in it", ONE)
    READ_AFTER_INIT = ("the marker is read before the fence (init_transactions), not after it", ONE)
    STABLE_READ = ("the marker is read although the outcome of an offset in a transaction is not settled", ONE)
    ONE_ID = ("every driver has a transactional id of its own, so nobody is fenced", ONE)
    FRESH_PRODUCER = ("a driver keeps its producer for the next batch or round", TWO)
    NEVER_GUESS = ("a commit without an answer is taken for an abort: written again without looking", ONE)
    QUERY_IN_MARKER = ("the marker holds the batch only, not the query", REPLACED)
    NONE_MEANS_FIRST = ("without a marker every batch is written, not only the first", EXPIRED)
    BEHIND_STOPS = ("a marker older than the batch before this one: written all the same", RESET)
    AHEAD_STOPS = ("a marker newer than this batch counts as 'done before'", RESTORED)
    ROWS_COMPARED = ("a batch that is in Kafka with another number of rows counts as 'done before'", RESTORED_ROWS)
    EMPTY_BATCH_TOO = ("a batch without rows leaves the marker as it is", Config("empty", drivers=1, empty=True))
    REPLACE_BY_NAME = (
        "a new checkpoint may take over from whoever wrote last (a flag instead of a query id)",
        STRANGER,
    )
    REPLACE_AT_FIRST_BATCH = ("a query may take over at any batch, not only at its first", FORGOTTEN)
    NO_WAY_BACK = ("a query that was replaced may take over again", REPLACED)
    LAST_NAMES_QUERY = ("the operator's last written batch holds for whatever query finds no marker", LEFT)
    LOG_TO_HIGH_WATERMARK = ("the marker log is read up to the last stable offset", ONE._replace(marker_log=True))
    BATCH_IS_FIXED = ("(Spark) the offsets of a batch are not logged before it runs: a replay has others", NOT_FIXED)
    BATCHES_IN_TURN = (
        "(Spark) the next batch may run before this one is finished (asynchronous progress)",
        ASYNCHRONOUS,
    )


MISSED_LATE: frozenset[Rule] = frozenset()
"""Rules whose counterexample is too far away for a test run: for ``run.py --spark``."""


class Model(NamedTuple):
    """What the actions ask while they run: the configuration and the rules that are out."""

    config: Config
    out: frozenset[Rule] = frozenset()


STANDARD: tuple[Config, ...] = (
    # Restarts, zombies and two drivers on one checkpoint; every request to end a transaction may come late and twice.
    Config("drivers", rounds=1, batches=1, units=1, drivers=3),
    Config("batches", rounds=0, drivers=3),
    Config("uneven batches, some empty", drivers=2, batches=2, uneven=True, empty=True),
    Config("lost rows", drivers=2, truncated=True),
    Config("marker log", drivers=2, batches=3, units=3, marker_log=True),
    # Two checkpoints under the name of one sink.
    Config("new checkpoint", queries=2, batches=1, units=1, rounds=0, copies=1, replacing=True),
    Config("two queries, two batches", queries=2, drivers=2, rounds=0, replacing=True, stranger=True),
    # The marker is forgotten, or set back; the checkpoint is put back.
    Config("expiry", queries=2, drivers=3, rounds=0, copies=1, expiries=1, last_written=True),
    Config("restored checkpoint", drivers=2, batches=3, units=3, uneven=True, rounds=0, restores=1),
    Config("reset marker", drivers=2, batches=3, units=3, rounds=0, resets=1),
    Config("batch write", drivers=3, batches=1, units=1, batch_write=True),
)
"""Each is explored to the last state, in every test run."""

DEEP: tuple[Config, ...] = (
    Config("drivers and batches", drivers=3),
    Config("four drivers", drivers=4, batches=1, units=1),
    Config("new checkpoints", queries=3, batches=1, units=1, rounds=0, copies=1, replacing=True),
    Config("a checkpoint replaced", queries=2, drivers=3, rounds=0, copies=1, replacing=True),
    Config("replaced, expired", queries=2, drivers=4, rounds=0, copies=1, replacing=True, expiries=1),
    Config("three checkpoints", queries=3, drivers=4, rounds=0, copies=1, replacing=True),
    Config("restored, three drivers", drivers=3, batches=3, units=4, uneven=True, rounds=0, restores=1),
)
"""Too large for a test run; ``run.py --spark`` explores as much of each as it is told to."""

_FEW = Config("", drivers=2, batches=1, units=1, rounds=0)

HOLES = (
    _FEW._replace(name="expiry in the first batch", expiries=1, expiry_in_first_batch=True),
    Config("stated twice", drivers=3, rounds=0, copies=1, expiries=2, last_written=True),
)
"""What no rule closes: each ends in a counterexample with all rules in, and the page says what it means."""
