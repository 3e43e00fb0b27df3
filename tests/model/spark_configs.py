"""The sink's worlds: what is searched whole on every run, where each rule is missed first, and the known holes."""

from __future__ import annotations

from .spark_rules import Config, LaneConfig, Rule

STANDARD: tuple[Config | LaneConfig, ...] = (
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
    LaneConfig("two lanes", truncated=True),
    LaneConfig("two attempts", drivers=1, copies=2, truncated=True),
    LaneConfig("other number of lanes", widths=(1, 2)),
)
"""Each is explored to the last state, in every test run."""

DEEP: tuple[Config | LaneConfig, ...] = (
    Config("drivers and batches", drivers=3),
    Config("four drivers", drivers=4, batches=1, units=1),
    Config("new checkpoints", queries=3, batches=1, units=1, rounds=0, copies=1, replacing=True),
    Config("a checkpoint replaced", queries=2, drivers=3, rounds=0, copies=1, replacing=True),
    Config("replaced, expired", queries=2, drivers=4, rounds=0, copies=1, replacing=True, expiries=1),
    Config("three checkpoints", queries=3, drivers=4, rounds=0, copies=1, replacing=True),
    Config("restored, three drivers", drivers=3, batches=3, units=4, uneven=True, rounds=0, restores=1),
    LaneConfig("two attempts, two drivers", copies=2, batches=1),
    LaneConfig("three drivers, one batch", drivers=3, widths=(1, 2), batches=1),
    LaneConfig("three drivers, other number of lanes", drivers=3, widths=(1, 2)),
)
"""Too large for a test run; ``run.py --spark`` explores as much of each as it is told to."""

_FEW = Config("", drivers=2, batches=1, units=1, rounds=0)

HOLES = (
    _FEW._replace(name="expiry in the first batch", expiries=1, expiry_in_first_batch=True),
    Config("stated twice", drivers=3, rounds=0, copies=1, expiries=2, last_written=True),
)
"""What no rule closes: each ends in a counterexample with all rules in, and the page says what it means."""

_ONE = Config("one batch", drivers=2, batches=1, units=1)
_TWO = Config("two batches", drivers=2, rounds=0)
_REPLACED = Config("replaced", queries=2, batches=1, units=1, rounds=0, copies=1, replacing=True, zombies=False)
_EXPIRED = Config("expired", drivers=2, rounds=0, copies=1, expiries=1)
_CUT = Config("cut", drivers=1, batches=1, units=1, truncated=True)
_LANES = LaneConfig("two lanes", batches=1, truncated=True)
_CHANGE = LaneConfig("other number of lanes", widths=(1, 2))
_CHANGE_LATE = LaneConfig("other number of lanes, three drivers", drivers=3, widths=(1, 2))

MISSED_IN: dict[Rule, Config | LaneConfig] = {
    Rule.DRIVER_COMMITS: _CUT,
    Rule.ROWS_COUNTED: _CUT,
    Rule.MARKER: _ONE,
    Rule.MARKER_IN_TRANSACTION: _ONE,
    Rule.READ_AFTER_INIT: _ONE,
    Rule.STABLE_READ: _ONE,
    Rule.ONE_ID: _ONE,
    Rule.FRESH_PRODUCER: _TWO,
    Rule.NEVER_GUESS: _ONE,
    Rule.QUERY_IN_MARKER: _REPLACED,
    Rule.NONE_MEANS_FIRST: _EXPIRED,
    Rule.BEHIND_STOPS: Config("reset", drivers=2, batches=3, units=3, rounds=0, copies=1, resets=1),
    Rule.AHEAD_STOPS: Config("restored", drivers=2, batches=3, units=3, uneven=True, rounds=0, restores=1),
    Rule.ROWS_COMPARED: Config("restored", drivers=2, units=3, uneven=True, rounds=0, restores=1),
    Rule.EMPTY_BATCH_TOO: Config("empty", drivers=1, empty=True),
    Rule.REPLACE_BY_NAME: _REPLACED._replace(drivers=2, stranger=True),
    Rule.REPLACE_AT_FIRST_BATCH: _REPLACED._replace(batches=2, units=2, expiries=1),
    Rule.NO_WAY_BACK: _REPLACED,
    Rule.LAST_NAMES_QUERY: Config("left", queries=2, rounds=0, copies=1, expiries=1, last_written=True),
    Rule.LOG_TO_HIGH_WATERMARK: _ONE._replace(marker_log=True),
    Rule.BATCH_IS_FIXED: Config("not fixed", drivers=2, uneven=True, rounds=0),
    Rule.BATCHES_IN_TURN: Config("asynchronous", drivers=2, rounds=0, copies=1),
    Rule.END_ROW: _LANES,
    Rule.ALL_LANES_DONE: _LANES,
    Rule.LANES_IN_MARKER: _CHANGE,
    Rule.PINNED: _CHANGE,
    Rule.PIN_NAMES_RUN: _CHANGE,
    Rule.PIN_FENCES: _CHANGE,
    Rule.PIN_NOT_AHEAD: _CHANGE,
    Rule.PIN_LEFT_LANES: _CHANGE,
}
"""Where a rule is missed: the search of this world without the rule must end in a counterexample."""

MISSED_LATE: dict[Rule, Config | LaneConfig] = {Rule.PIN_KEEPS_ROWS: _CHANGE_LATE}
"""The same, where the counterexample is too far away for a test run: for ``run.py --spark``."""

NOT_MISSED: frozenset[Rule] = frozenset()
