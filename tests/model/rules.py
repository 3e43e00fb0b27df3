"""The rules of the commit and hand-over protocol, each a switch that can be taken out, and the configurations searched.

``docs/internals/protocol-model.md`` tells what each one stands for. A model is a configuration plus the set of rules
that are *out*; with none out, no reachable state may break an invariant.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Fault(Enum):
    """What may go wrong, each at any moment, as often as the configuration's budget allows."""

    EVICT = "the session of a member that runs on expires (also: frozen, cut off); it goes on as a zombie"
    CRASH = "a member dies; what it sent may still arrive"
    TIMEOUT = "a transactional call gets no answer in time; the request may arrive later, or never"
    EXPIRE = "the broker's transaction timeout ends an open transaction"
    AMNESIA = "the group coordinator comes back without its memory"
    STALE_MEMORY = "the group coordinator comes back as it was at its last rebalance but one"


class Config(NamedTuple):
    """A small world: ``members``, ``partitions`` with ``records`` each, and a budget of faults and moves."""

    name: str
    partitions: int = 1
    records: int = 2
    pool: int = 2
    faults: int = 2
    kinds: frozenset[Fault] = frozenset({Fault.EVICT, Fault.CRASH, Fault.TIMEOUT})
    moves: int = 0
    """How often the leader may move a partition between two live members."""
    warm: bool = True
    """Moves may go by release marker (section 8)."""
    cold: bool = False
    """Moves may go by revoke."""
    restless: bool = False
    """A move may also be spent on a rebalance that a member asks for (its user data changed)."""
    restarts: int = 1
    """How often a dead member may come back."""
    members: int = 2
    lag: bool = False
    """The engine hears what the membership tells it later than the group does (its event loop is busy)."""
    together: bool = False
    """All members are in the group from the start (else the others join)."""
    version: int = 2
    """Of the transaction protocol: with 2 each end gives the next epoch (KIP-890)."""
    verified: bool = True
    """With version 1: leaders ask the coordinator whether a transaction is ongoing (Kafka 3.6 and later)."""


def _kinds(*names: str) -> frozenset[Fault]:
    return frozenset(Fault[name] for name in names)


PIPE = Config("pipeline", records=2, faults=0, moves=0, restarts=0)
EVICT = Config("eviction", pool=1, records=1, faults=1, moves=0, restarts=0, kinds=_kinds("EVICT"))
CRASH = Config("crash", pool=1, records=1, faults=1, moves=0, restarts=0, kinds=_kinds("CRASH"))
CRASH_TWO = CRASH._replace(name="crash, two records", pool=2, records=2)
TIMEOUT = Config("timeout", pool=1, records=1, faults=1, moves=0, restarts=0, kinds=_kinds("TIMEOUT"))
TIMEOUT_V1 = TIMEOUT._replace(name="timeout, v1", version=1)
LATE = Config("late", records=2, faults=1, moves=0, restarts=0, kinds=_kinds("TIMEOUT"))
LATE_V1 = LATE._replace(name="late, v1", version=1)
OLD_V1 = Config("old brokers", pool=1, records=1, faults=0, moves=0, restarts=0, version=1, verified=False)
ZOMBIE = Config("zombie", pool=1, records=1, faults=2, moves=0, restarts=0, kinds=_kinds("EVICT", "TIMEOUT"))
DYING = Config("dying zombie", pool=1, records=1, faults=2, moves=0, restarts=0, kinds=_kinds("EVICT", "CRASH"))
MOVE = Config("move", pool=1, records=1, faults=0, moves=2, restless=True, restarts=0)
TWO_RECORDS = Config("move, two records", pool=1, records=2, faults=0, moves=2, restless=True, restarts=0)
MOVE_EVICT = Config("move, eviction", pool=1, records=1, faults=1, moves=1, restarts=0, kinds=_kinds("EVICT"))
THERE_AND_BACK = Config(
    "there and back", pool=1, records=1, faults=0, moves=5, restless=True, restarts=0, together=True
)
REVOKE = Config("revoke", pool=1, records=1, faults=0, moves=1, restarts=0, warm=False, cold=True)
AMNESIA = Config("amnesia", pool=1, records=1, faults=1, moves=0, restarts=0, kinds=_kinds("AMNESIA"))
AMNESIA_LAG = AMNESIA._replace(name="amnesia, slow engine", lag=True)
AMNESIA_MOVE = Config("move, amnesia", pool=1, records=1, faults=1, moves=2, restarts=0, kinds=_kinds("AMNESIA"))


class Rule(Enum):
    """A rule: (section of the protocol, what the protocol does when the rule is out, where it is missed: the search of
    this world without the rule must end in a counterexample). Nothing was found to break without those that are missed
    nowhere: the others cover for them, or the search did not go far enough (the page says which)."""

    R1_REAL_METADATA = ("R1", "offsets are sent with generation -1, which the broker accepts from anybody", ZOMBIE)
    R2_PRODUCE_IN_ORDER = ("R2", "T(n+1) is produced although T(n) is not flushed", PIPE)
    R2_COMMIT_IN_ORDER = ("R2", "T(n+1) is committed although T(n) is not settled", CRASH_TWO)
    R3_NOT_GUESSED_ABORTED = ("R3", "an unclear answer is taken for an abort", TIMEOUT_V1)
    R3_NOT_GUESSED_COMMITTED = ("R3", "an unclear answer is taken for a commit", TIMEOUT_V1)
    R3_NEW_PRODUCER = ("R3", "the producer is aborted and used again after an unclear answer", LATE_V1)
    R3_END_ONCE_PER_EPOCH = ("R3", "an end without an answer is requested again under v1, too", LATE_V1)
    R3_ANSWERED_BEFORE_ABORT = ("R3", "aborted under v1 while records are under way", OLD_V1)
    R3_LATER_ABORTED_FIRST = ("R3", "the outcome is looked up while a later transaction of ours holds it up", LATE_V1)
    R4_LATER_SENT_AGAIN = ("R4", "only the transaction that failed is sent again, those behind it are not", LATE_V1)
    R4_WAIT_FOR_SNAPSHOT = ("R4, 8a", "after a refused generation the work is dropped instead of sent again", PIPE)
    R5_LOST_IS_NOT_REVOKED = ("R5", "a store outlives the loss of the membership and is used again", EVICT)
    R5_LOST_SETTLES_ITS_SLOTS = ("R5", "open transactions of a lost membership are left to the broker's timeout", EVICT)
    INCARNATION = ("8a", "a transaction of a lost membership is sent with the metadata of the new one", EVICT)
    SECOND_LOOK = ("R5, 8a", "the membership is not looked at again right before the commit", AMNESIA_LAG)
    S6_OFFSET_IN_CHANGELOG = ("6", "processing starts at the group's offset, on the changelog's state", AMNESIA)
    S7_FENCE = ("7.1", "transactions that departed members left open are not ended", CRASH)
    S7_FENCE_WHILE_WAITING = ("7.1", "a departed member that opens a transaction later is not fenced again", DYING)
    S7_STABLE_OFFSET = ("7.2", "the group's offset is read although transactional offsets are pending", REVOKE)
    S7_BARRIER_BEFORE_RESTORE = ("7.2", "the high watermark was read before the take-over began", REVOKE)
    S7_POSITION_REACHES_END = ("7.3", "restore ends where read_committed ends now, not at the high watermark", REVOKE)
    S8_DONOR_STOPS = ("8", "the donor goes on with the partition after its release marker", MOVE)
    S8_MARKER_COMMITTED = ("8", "the target starts at a release marker that is not committed", MOVE_EVICT)
    S8_MARKER_OF_GENERATION = ("8", "the target takes a release marker of an earlier generation", None)
    S8_MARKER_TO_MEMBER_ID = ("8", "the release marker names the instance, not the member id", AMNESIA_MOVE)
    S8_REVOKE_BARRIER = ("8", "the group is answered before a revoked partition's transactions are settled", REVOKE)
    S8_MARKER_IS_LAST = ("8", "the target takes a release marker although there are records after it", None)
    S8_TRANSIT_KEPT = ("8", "the plan treats an owner that was ordered to hand over like any owner", MOVE)
    S8_SINCE_OF_THE_ORDER = ("8", "a kept move is told as of this generation, not of the one it was ordered in", MOVE)
    S8_INCOMING_KEEPS = ("8", "the plan gives a partition without owner to another than the one that awaits it", MOVE)
    S8_INCOMING_NEWEST = ("8", "of two members that await a partition the one told first gets it", None)
    S8_ONE_STEP = ("8", "a partition that donor and receiver both claim is moved on in the same plan", THERE_AND_BACK)
    S8_TAKEN_AWAY_REJOINS = ("8", "what a plan takes away after it was handed over asks for no new plan", None)
    S8_NOTES_OF_INCARNATION = ("8, 8a", "what the engine did before a loss counts for the membership after it", None)
    S8_START_IS_ASKED = ("8", "the target starts by an assignment that its membership has replaced meanwhile", None)
    S8_RECEIVER_HAS_IT = ("8", "donor and receiver claim a partition: the donor keeps it", TWO_RECORDS)
    S8_WITHDRAWN_BY_IDENTITY = ("8", "a hand-over under a withdrawn order ends the ownership given since", MOVE_EVICT)
    S8_WITHDRAWN_IS_ANEW = ("8", "told to keep what it handed over, the donor goes on with its store", MOVE_EVICT)
    S8_WITHDRAWN_IS_TAKEN = ("8", "told to keep what it handed over, the donor takes it for its own", MOVE_EVICT)
    S8_TAKEN_IS_NOT_REVOKED = ("8", "a plan that says `incoming` revokes what was started since the claim", MOVE)
    S8_NEW_ORDER_IS_OWNED = ("8", "a new order for what was handed over since the claim is ignored", None)


MISSED_LATE = frozenset({Rule.S8_ONE_STEP})
"""The counterexample is too far away for a test run (300,000 states and more): for ``run.py``."""


class Model(NamedTuple):
    """What the actions ask while they run: the configuration and the rules that are out."""

    config: Config
    out: frozenset[Rule]


STANDARD = (
    # Two pipelined transactions, and one fault anywhere, while the other member joins.
    Config("pipeline", records=1, faults=1, kinds=_kinds("EVICT", "CRASH", "TIMEOUT"), moves=0, restarts=0),
    Config("two records", records=2, faults=1, kinds=_kinds("TIMEOUT"), moves=0, restarts=0),
    # The same under transactions v1, with leaders that verify what they take, and without.
    Config("two records, v1", records=2, faults=1, kinds=_kinds("TIMEOUT"), moves=0, restarts=0, version=1),
    Config("old brokers", pool=1, records=1, faults=1, moves=0, restarts=0, version=1, verified=False),
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
    # The offsets of three transactions pending at once.
    Config("three at once", pool=3, records=3, faults=1, moves=0, restarts=0, kinds=_kinds("TIMEOUT")),
    Config("three at once, v1", pool=3, records=3, faults=1, moves=0, restarts=0, kinds=_kinds("TIMEOUT"), version=1),
    AMNESIA_LAG,
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

HOLES: tuple[Config, ...] = ()
"""What no rule closes: too far away for a test, see "stale memory" above."""
