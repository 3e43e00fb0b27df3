"""Decide the next step for a failed transaction: the failure table of the protocol as one pure function.

The order of the questions is the point.
"""

from __future__ import annotations

import enum

import msgspec


class Remedy(enum.Enum):
    """The next step for a failed transaction."""

    DROP = "drop"
    """The partitions are not ours any more: send nothing, drop everything."""
    LOOK_UP = "look up"
    """It may be committed: settle it with a new producer, then look it up in the changelog."""
    RESEND = "resend"
    """It is not committed: send it again."""
    RESEND_AFTER_NEWS = "resend after news"
    """It is not committed, and our generation was refused: wait for the new group metadata, then send it again."""
    STOP = "stop"
    """It keeps failing: leave the group and stop, with the error."""


class Patience(msgspec.Struct, frozen=True):
    """The limits of trying the same transaction: ``seconds`` since its first failure; ``attempts`` when the broker
    keeps answering with a refusal. (An outage is not a refusal, and a blocked transaction waits for an operator: there
    only the time counts.)"""

    seconds: float = 300.0
    attempts: int = 8


def remedy(
    kind: str,
    *,
    ours: bool,
    commit_requested: bool,
    attempts: int,
    seconds: float,
    patience: Patience,
) -> Remedy:
    """Decide the step for a transaction whose call failed with ``kind`` (see ``errors.TransactionFailed``).

    ``ours``: the membership it was opened under is still the current one. ``attempts``: how often it was sent, this
    time included. ``seconds``: since its first failure.
    """
    # First: what is not ours any more is not sent, whatever else is known (R5).
    if not ours or kind == "lost":
        return Remedy.DROP
    # Before the look-up: stopping is always safe, because the next start looks into the changelog.
    if seconds > patience.seconds:
        return Remedy.STOP
    # Only a requested commit can have happened. Then the changelog decides, never a guess (R3).
    if commit_requested and kind in ("unknown", "fenced"):
        return Remedy.LOOK_UP
    # Refused again and again. An id that is fenced so often, while the group knows the member, has a second process.
    if kind in ("abortable", "fenced") and attempts >= patience.attempts:
        return Remedy.STOP
    # Known to be aborted: the same records are sent again (R4). Under the refused generation that would fail again.
    return Remedy.RESEND_AFTER_NEWS if kind == "stale" else Remedy.RESEND
