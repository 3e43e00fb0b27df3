"""The configurations: what is searched whole on every run, and the small world in which each rule is missed first."""

from __future__ import annotations

from .rules import Config, Fault, Rule


def _kinds(*names: str) -> frozenset[Fault]:
    return frozenset(Fault[name] for name in names)


STANDARD = (
    # Two pipelined transactions, and one fault anywhere, while the other member joins.
    Config("pipeline", records=1, faults=1, kinds=_kinds("EVICT", "CRASH", "TIMEOUT"), moves=0, restarts=0),
    Config("two records", records=2, faults=1, kinds=_kinds("TIMEOUT"), moves=0, restarts=0),
    # A warm move back and forth with one fault anywhere.
    Config("warm move", pool=1, records=1, faults=1, moves=1, restless=True, restarts=0),
    # The same by revoke.
    Config("revoke", pool=1, records=1, faults=1, moves=1, restarts=0, warm=False, cold=True),
    # The coordinator forgets the group, or the broker ends a transaction.
    Config("amnesia", records=1, faults=1, moves=0, restarts=1, kinds=_kinds("AMNESIA", "EXPIRE")),
    # Two partitions, one given away while the other goes on.
    Config("two partitions", partitions=2, pool=1, records=1, faults=0, moves=1, restarts=0),
)
"""Each is explored to the last state, in every test run."""

DEEP = (
    Config("two records, every fault", records=2, faults=1, kinds=_kinds("EVICT", "CRASH", "TIMEOUT"), moves=0,
           restarts=0),
    Config("three members", pool=1, records=1, faults=1, moves=2, restarts=0, kinds=_kinds("EVICT"), members=3,
           together=True),
    Config("slow engine", pool=1, records=1, faults=1, moves=2, restarts=0, kinds=_kinds("EVICT"), lag=True,
           together=True),
    Config("moves of both kinds", pool=1, records=1, faults=0, moves=5, restless=True, restarts=0, cold=True),
    Config("two faults", records=1, faults=2, moves=0, restarts=1),
    Config("two faults, warm move", records=1, faults=2, moves=1, restarts=1),
    Config("three records", records=3, faults=1, moves=1, restarts=1),
    Config("amnesia and eviction", records=2, faults=2, moves=1, restarts=1, kinds=_kinds("AMNESIA", "EVICT")),
    Config("every fault", partitions=2, records=2, faults=3, moves=2, restarts=1,
           kinds=_kinds("EVICT", "CRASH", "TIMEOUT", "EXPIRE", "AMNESIA"), cold=True),
    Config("stale memory", pool=1, records=1, faults=2, moves=0, restarts=0, kinds=_kinds("STALE_MEMORY", "EVICT")),
)  # fmt: skip
"""Too large to finish in a test run; ``run.py`` explores as much of each as it is told to."""

_PIPE = Config("pipeline", records=2, faults=0, moves=0, restarts=0)
_EVICT = Config("eviction", pool=1, records=1, faults=1, moves=0, restarts=0, kinds=_kinds("EVICT"))
_CRASH = Config("crash", pool=1, records=1, faults=1, moves=0, restarts=0, kinds=_kinds("CRASH"))
_TIMEOUT = Config("timeout", pool=1, records=1, faults=1, moves=0, restarts=0, kinds=_kinds("TIMEOUT"))
_LATE = Config("timeout", records=2, faults=1, moves=0, restarts=0, kinds=_kinds("TIMEOUT"))
_ZOMBIE = Config("zombie", pool=1, records=1, faults=2, moves=0, restarts=0, kinds=_kinds("EVICT", "TIMEOUT"))
_DYING = Config("dying zombie", pool=1, records=1, faults=2, moves=0, restarts=0, kinds=_kinds("EVICT", "CRASH"))
_MOVE = Config("move", pool=1, records=1, faults=0, moves=2, restless=True, restarts=0)
_TWO_RECORDS = Config("move, two records", pool=1, records=2, faults=0, moves=2, restless=True, restarts=0)
_MOVE_EVICT = Config("move, eviction", pool=1, records=1, faults=1, moves=1, restarts=0, kinds=_kinds("EVICT"))
_THERE_AND_BACK = Config(
    "there and back", pool=1, records=1, faults=0, moves=5, restless=True, restarts=0, together=True
)
_REVOKE = Config("revoke", pool=1, records=1, faults=0, moves=1, restarts=0, warm=False, cold=True)
_AMNESIA = Config("amnesia", pool=1, records=1, faults=1, moves=0, restarts=0, kinds=_kinds("AMNESIA"))
_AMNESIA_MOVE = Config("move, amnesia", pool=1, records=1, faults=1, moves=2, restarts=0, kinds=_kinds("AMNESIA"))

MISSED_IN: dict[Rule, Config] = {
    Rule.R1_REAL_METADATA: _ZOMBIE,
    Rule.R2_PRODUCE_IN_ORDER: _PIPE,
    Rule.R2_COMMIT_IN_ORDER: _PIPE,
    Rule.R3_NOT_GUESSED_ABORTED: _TIMEOUT,
    Rule.R3_NOT_GUESSED_COMMITTED: _TIMEOUT,
    Rule.R3_NEW_PRODUCER: _LATE,
    Rule.R3_LATER_ABORTED_FIRST: _LATE,
    Rule.R4_LATER_SENT_AGAIN: _PIPE,
    Rule.R4_WAIT_FOR_SNAPSHOT: _PIPE,
    Rule.R5_LOST_IS_NOT_REVOKED: _EVICT,
    Rule.R5_LOST_SETTLES_ITS_SLOTS: _EVICT,
    Rule.R7_DEADLINE: _TIMEOUT,
    Rule.INCARNATION: _EVICT,
    Rule.S6_OFFSET_IN_CHANGELOG: _AMNESIA,
    Rule.S7_FENCE: _CRASH,
    Rule.S7_FENCE_WHILE_WAITING: _DYING,
    Rule.S7_STABLE_OFFSET: _REVOKE,
    Rule.S7_BARRIER_BEFORE_RESTORE: _REVOKE,
    Rule.S7_POSITION_REACHES_END: _REVOKE,
    Rule.S8_DONOR_STOPS: _MOVE,
    Rule.S8_MARKER_COMMITTED: _MOVE_EVICT,
    Rule.S8_MARKER_TO_MEMBER_ID: _AMNESIA_MOVE,
    Rule.S8_REVOKE_BARRIER: _REVOKE,
    Rule.S8_TRANSIT_KEPT: _MOVE,
    Rule.S8_SINCE_OF_THE_ORDER: _MOVE,
    Rule.S8_INCOMING_KEEPS: _MOVE,
    Rule.S8_WITHDRAWN_BY_IDENTITY: _MOVE_EVICT,
    Rule.S8_WITHDRAWN_IS_ANEW: _MOVE_EVICT,
    Rule.S8_WITHDRAWN_IS_TAKEN: _MOVE_EVICT,
    Rule.S8_TAKEN_IS_NOT_REVOKED: _MOVE,
    Rule.S8_RECEIVER_HAS_IT: _TWO_RECORDS,
}
"""Where a rule is missed: the search of this configuration without the rule must end in a counterexample."""

MISSED_LATE: dict[Rule, Config] = {
    Rule.S8_ONE_STEP: _THERE_AND_BACK,
}
"""The same, where the counterexample is too far away for a test run (300,000 states and more): for ``run.py``."""

NOT_MISSED = frozenset(
    {
        Rule.S8_INCOMING_NEWEST,
        Rule.S8_MARKER_IS_LAST,
        Rule.S8_MARKER_OF_GENERATION,
        Rule.S8_NEW_ORDER_IS_OWNED,
        Rule.S8_NOTES_OF_INCARNATION,
        Rule.S8_START_IS_ASKED,
        Rule.S8_TAKEN_AWAY_REJOINS,
    }
)
"""Out one by one, nothing was found to break: the others cover for them, or the search did not go far enough (the page
says which)."""

HOLES: tuple[Config, ...] = ()
"""What no rule closes: too far away for a test, see "stale memory" above."""
