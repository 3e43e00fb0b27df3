"""The pools of a muted source: what its events send does not enter their transactions; the rest does, as ever."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property

from streams.core.position import Position
from streams.core.runs import Run
from streams.core.transaction import Waiter
from streams.records import Change, Output, OwnSample
from streams.runtime.transactions.pool import MergingPool, TransactionPool


class MutedPool(TransactionPool):
    """A pool that admits no output."""

    @cached_property
    def _muted(self) -> Counter[str]:
        return Counter()

    def muted_records(self) -> dict[str, int]:
        """Return how many records were not sent in this run, by topic. Those of an event that is handled again, after a
        restart of its partition, count again."""
        return dict(self._muted)

    def admit(
        self,
        partition: int,
        offset: Position,
        outputs: list[Output],
        changes: list[Change],
        waiter: Waiter | None = None,
        events: int = 1,
        runs: Sequence[Run] = (),
    ) -> None:
        """See ``TransactionPool.admit``; samples of the source's own metrics are no records, and stay."""
        samples: list[Output] = []
        for output in outputs:
            if isinstance(output, OwnSample):
                samples.append(output)
            else:
                self._muted[output.topic] += 1
        super().admit(partition, offset, samples, changes, waiter, events, runs)


class MutedMergingPool(MutedPool, MergingPool):
    """The same for a source with several inputs."""


def pool_of(shadow_of: str, further_inputs: Sequence[object]) -> type[TransactionPool]:
    """Return the pool of a source. Only ``runtime.partition.voices`` lets partitions work, so that both agree."""
    if further_inputs:
        return MutedMergingPool if shadow_of else MergingPool
    return MutedPool if shadow_of else TransactionPool
