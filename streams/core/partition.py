"""The states of a partition on one member, as a table of legal moves.

A partition comes by an assignment or by a marker, is restored from its changelog, works, and ends in one of two ways:
*released* after a barrier (everything that was admitted is settled; ``RELEASING`` with a marker that hands it over,
``DRAINING`` without), or *void* at once (the member lost it: nothing may be sent any more). ``RESTARTING`` is the
member's own decision: the effects of an event were refused, or a store cannot be undone; the state is dropped and
restored from the changelog, never patched.
"""

from __future__ import annotations

import enum
from typing import Final


class PartitionState(enum.Enum):
    """The state of a partition. ``to`` is the only way to move on."""

    RESTORING = "restoring"
    ACTIVE = "active"
    RESTARTING = "restarting"
    RELEASING = "releasing"
    DRAINING = "draining"
    RELEASED = "released"
    VOID = "void"

    @property
    def admits(self) -> bool:
        """Check that a completed event of the partition may enter a transaction."""
        # Also while it is given up in good order: what has begun ends, and is committed. What restarts or is lost is
        # dropped: its store has effects that will not be committed.
        return self in (PartitionState.ACTIVE, PartitionState.RELEASING, PartitionState.DRAINING)

    def to(self, new: PartitionState) -> PartitionState:
        """Return ``new``, if that move is legal. Raises ``ValueError`` otherwise: it is a bug of the engine, never of
        its input."""
        if new not in LEGAL_MOVES[self]:
            raise ValueError(f"a partition cannot go from {self.value} to {new.value}")
        return new


_S = PartitionState
LEGAL_MOVES: Final[dict[PartitionState, frozenset[PartitionState]]] = {
    _S.RESTORING: frozenset({_S.ACTIVE, _S.DRAINING, _S.VOID}),
    _S.ACTIVE: frozenset({_S.RESTARTING, _S.RELEASING, _S.DRAINING, _S.VOID}),
    _S.RESTARTING: frozenset({_S.DRAINING, _S.VOID}),
    # A record may be refused before the marker is committed: the partition works again, and is handed over then.
    _S.RELEASING: frozenset({_S.RELEASED, _S.RESTARTING, _S.DRAINING, _S.VOID}),
    _S.DRAINING: frozenset({_S.RELEASED, _S.VOID}),
    # For good: when the partition comes back it is another one, with the state that is committed.
    _S.RELEASED: frozenset(),
    _S.VOID: frozenset(),
}
