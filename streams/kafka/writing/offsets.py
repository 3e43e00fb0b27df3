"""The offsets that a transaction sends to the group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from streams.errors import TransactionFailed
from streams.kafka.wire import messages
from streams.kafka.wire.messages import Identity
from streams.model.group import GroupMetadata


class Offsets(NamedTuple):
    """The offsets of a transaction: the next one to read, by topic and partition. ``fence`` returns the member's newest
    group metadata; it raises if the transaction is not the member's any more."""

    offsets: Mapping[str, Mapping[int, int]]
    fence: Callable[[], GroupMetadata]

    def request(self, who: Identity, group_id: str) -> list[bytes]:
        """Encode their request, under the newest metadata. Raises ``TransactionFailed``."""
        # Read when the request is made, never kept: from each JoinGroup answer on the broker refuses the one before.
        member = self.fence()
        # The broker takes offsets of generation -1 from anybody, unfenced: an evicted member could commit with it.
        if member.generation < 0:
            raise TransactionFailed("send_offsets_to_transaction", "NO_MEMBER", "stale", "not in the group right now")
        # Instance id included: a broker takes a static member's offsets without it, but does not fence it by it then.
        return messages.commit_offsets(
            who, group_id, member.generation, member.member_id, member.instance_id, self.offsets
        )


class OffsetsOfNoMember(NamedTuple):
    """The offsets of a transaction for a group that has no members: the transactional id is the only fence.
    ``metadata``: kept with each."""

    offsets: Mapping[str, Mapping[int, int]]
    metadata: str

    def request(self, who: Identity, group_id: str) -> list[bytes]:
        """Encode their request."""
        return messages.commit_offsets(who, group_id, -1, "", None, self.offsets, self.metadata)


SentOffsets = Offsets | OffsetsOfNoMember
