"""A partition's life on one member, as a table of legal moves.

A partition comes by an assignment, is restored from its changelog, works, and ends in one of two ways: *released*
after a barrier (everything that was admitted is settled), or *void* at once (the member lost it: nothing may be sent
any more). ``RESTARTING`` is the member's own doing: the effects of an event turned out to be refused, or a store
cannot be undone; the state is dropped and restored from the changelog, never patched.
"""

from __future__ import annotations

import enum
from typing import Final


class PartitionState(enum.Enum):
    """Where a partition is in its life. ``to`` is the only way to move on."""

    RESTORING = "restoring"
    ACTIVE = "active"
    RESTARTING = "restarting"
    DRAINING = "draining"
    RELEASED = "released"
    VOID = "void"

    @property
    def admits(self) -> bool:
        """Whether a completed event of the partition may enter a transaction."""
        return self in (PartitionState.ACTIVE, PartitionState.DRAINING)

    def to(self, new: PartitionState) -> PartitionState:
        """``new``, if that move is legal. Raises ``ValueError`` otherwise: it is a bug of the engine, never of its
        input."""
        if new not in LEGAL_MOVES[self]:
            raise ValueError(f"a partition cannot go from {self.value} to {new.value}")
        return new


LEGAL_MOVES: Final[dict[PartitionState, frozenset[PartitionState]]] = {
    PartitionState.RESTORING: frozenset({PartitionState.ACTIVE, PartitionState.DRAINING, PartitionState.VOID}),
    PartitionState.ACTIVE: frozenset({PartitionState.RESTARTING, PartitionState.DRAINING, PartitionState.VOID}),
    PartitionState.RESTARTING: frozenset({PartitionState.DRAINING, PartitionState.VOID}),
    PartitionState.DRAINING: frozenset({PartitionState.RELEASED, PartitionState.VOID}),
    PartitionState.RELEASED: frozenset(),
    PartitionState.VOID: frozenset(),
}
