"""The rules of the Spark sink, each a switch that can be taken out, and the worlds that are searched.

``docs/internals/spark-protocol.md`` tells the protocol. A model is a configuration plus the set of rules that are
*out*; with none out, no reachable state may break an invariant.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Rule(Enum):
    """What the sink does, or what it takes for granted: the text says what happens when the rule is out."""

    DRIVER_COMMITS = "each task commits what its iterator gave, although a failure upstream ends it like a clean end"
    ROWS_COUNTED = "the rows that are found again are not compared with the rows that were staged"
    MARKER = "there is no marker: every attempt writes"
    MARKER_IN_TRANSACTION = "the marker is committed after the transaction, not in it"
    READ_AFTER_INIT = "the marker is read before the fence (init_transactions), not after it"
    STABLE_READ = "the marker is read although the outcome of an offset in a transaction is not settled"
    ONE_ID = "every driver has a transactional id of its own, so nobody is fenced"
    FRESH_PRODUCER = "a driver keeps its producer for the next batch or round"
    NEVER_GUESS = "a commit without an answer is taken for an abort: written again without looking"
    QUERY_IN_MARKER = "the marker holds the batch only, not the query"
    NONE_MEANS_FIRST = "without a marker every batch is written, not only the first"
    BEHIND_STOPS = "a marker older than the batch before this one: written all the same"
    AHEAD_STOPS = "a marker newer than this batch counts as 'done before'"
    ROWS_COMPARED = "a batch that is in Kafka with another number of rows counts as 'done before'"
    EMPTY_BATCH_TOO = "a batch without rows leaves the marker as it is"
    REPLACE_BY_NAME = "a new checkpoint may take over from whoever wrote last (a flag instead of a query id)"
    REPLACE_AT_FIRST_BATCH = "a query may take over at any batch, not only at its first"
    NO_WAY_BACK = "a query that was replaced may take over again"
    LAST_NAMES_QUERY = "the operator's last written batch holds for whatever query finds no marker"
    LOG_TO_HIGH_WATERMARK = "the marker log is read up to the last stable offset"
    BATCH_IS_FIXED = "(Spark) the offsets of a batch are not logged before it runs: a replay has others"
    BATCHES_IN_TURN = "(Spark) the next batch may run before this one is finished (asynchronous progress)"
    # Lanes (spark_lanes.py).
    END_ROW = "a lane commits without having seen its end row"
    ALL_LANES_DONE = "a batch is finished in Spark when one of its lanes is"
    LANES_IN_MARKER = "a marker does not say with how many lanes its batch was written"
    PINNED = "a run writes lanes that it has not pinned"
    PIN_NAMES_RUN = "a lane takes any pin, not only the one of its own run"
    PIN_FENCES = "the driver pins without fencing the lanes first"
    PIN_NOT_AHEAD = "the driver pins although a lane has a newer batch"
    PIN_KEEPS_ROWS = "a pin says that the last batch was written with the new number of lanes"
    PIN_LEFT_LANES = "lanes that a smaller number leaves without rows are not pinned"


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


class LaneConfig(NamedTuple):
    """A small world of lanes: the rows of a batch are two, in one lane or in two."""

    name: str
    drivers: int = 2
    batches: int = 2
    copies: int = 1
    """How many attempts of one lane may run at the same time (speculation, or a task that is believed dead)."""
    widths: tuple[int, ...] = (2,)
    """The numbers of lanes that a driver may be started with."""
    truncated: bool = False


class Model(NamedTuple):
    """What the actions ask while they run: the configuration and the rules that are out."""

    config: Config
    out: frozenset[Rule] = frozenset()


class LaneModel(NamedTuple):
    """The same for lanes."""

    config: LaneConfig
    out: frozenset[Rule] = frozenset()
