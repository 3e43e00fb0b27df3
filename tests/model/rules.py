"""The rules of the commit and hand-over protocol, each a switch that can be taken out, and the configurations searched.

``docs/internals/protocol-model.md`` tells what each one stands for. A model is a configuration plus the set of rules
that are *out*; with none out, no reachable state may break an invariant.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Rule(Enum):
    """A rule of the protocol: (section of the protocol, what the protocol does when the rule is out)."""

    R1_REAL_METADATA = ("R1", "offsets are sent with generation -1, which the broker accepts from anybody")
    R2_PRODUCE_IN_ORDER = ("R2", "T(n+1) is produced although T(n) is not flushed")
    R2_COMMIT_IN_ORDER = ("R2", "T(n+1) is committed although T(n) is not settled")
    R3_NOT_GUESSED_ABORTED = ("R3", "an unclear answer is taken for an abort")
    R3_NOT_GUESSED_COMMITTED = ("R3", "an unclear answer is taken for a commit")
    R3_NEW_PRODUCER = ("R3", "the producer is aborted and used again after an unclear answer")
    R3_LATER_ABORTED_FIRST = ("R3", "the outcome is looked up while a later open transaction of ours holds it up")
    R4_LATER_SENT_AGAIN = ("R4", "only the transaction that failed is sent again, later open ones go on")
    R4_WAIT_FOR_SNAPSHOT = ("R4, 8a", "after a refused generation the work is dropped instead of sent again")
    R5_LOST_IS_NOT_REVOKED = ("R5", "a store outlives the loss of the membership and is used again")
    R5_LOST_SETTLES_ITS_SLOTS = ("R5", "open transactions of a lost membership are left to the broker's timeout")
    R7_DEADLINE = ("R7", "a call that hangs is waited for, whatever the time")
    INCARNATION = ("8a", "a transaction of a lost membership is sent with the metadata of the new one")
    S6_OFFSET_IN_CHANGELOG = ("6", "processing starts at the group's offset, on the changelog's state")
    S7_FENCE = ("7.1", "transactions that departed members left open are not ended")
    S7_FENCE_WHILE_WAITING = ("7.1", "a departed member that opens a transaction after the fence is not fenced again")
    S7_STABLE_OFFSET = ("7.2", "the group's offset is read although transactional offsets are pending")
    S7_BARRIER_BEFORE_RESTORE = ("7.2", "the high watermark to restore up to was read before the take-over began")
    S7_POSITION_REACHES_END = ("7.3", "restore ends where read_committed ends now, not at the high watermark")
    S8_DONOR_STOPS = ("8", "the donor goes on with the partition after its release marker")
    S8_MARKER_COMMITTED = ("8", "the target starts at a release marker that is not committed")
    S8_MARKER_OF_GENERATION = ("8", "the target takes a release marker of an earlier generation")
    S8_MARKER_TO_MEMBER_ID = ("8", "the release marker names the instance, not the member id")
    S8_REVOKE_BARRIER = ("8", "the group is answered before the transactions of a revoked partition are settled")
    S8_MARKER_IS_LAST = ("8", "the target takes a release marker although there are records after it")
    S8_TRANSIT_KEPT = ("8", "the plan treats an owner that was ordered to hand over like any owner")
    S8_SINCE_OF_THE_ORDER = ("8", "a kept move is told as of this generation, not of the one it was ordered in")
    S8_INCOMING_KEEPS = ("8", "the plan gives a partition without owner to another than the one that awaits it")
    S8_INCOMING_NEWEST = ("8", "of two members that await a partition the one told first gets it")
    S8_ONE_STEP = ("8", "a partition that donor and receiver both claim is moved on in the same plan")
    S8_TAKEN_AWAY_REJOINS = ("8", "what a plan takes away, and was handed over since the claim, asks for no new plan")
    S8_NOTES_OF_INCARNATION = ("8, 8a", "what the engine did before a loss counts for the membership after it")
    S8_START_IS_ASKED = ("8", "the target starts by an assignment that its membership has replaced meanwhile")
    S8_RECEIVER_HAS_IT = ("8", "donor and receiver claim a partition: the donor keeps it")
    S8_WITHDRAWN_BY_IDENTITY = ("8", "a hand-over under a withdrawn order ends the ownership given since")
    S8_WITHDRAWN_IS_ANEW = ("8", "told to keep what it handed over, the donor goes on with its store")
    S8_WITHDRAWN_IS_TAKEN = ("8", "told to keep what it handed over, the donor believes that it works on it")
    S8_TAKEN_IS_NOT_REVOKED = ("8", "a plan that says `incoming` revokes what was started since the claim")
    S8_NEW_ORDER_IS_OWNED = ("8", "a new order for what was handed over since the claim is ignored")


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


class Model(NamedTuple):
    """What the actions ask while they run: the configuration and the rules that are out."""

    config: Config
    out: frozenset[Rule]
