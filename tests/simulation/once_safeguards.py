"""The safeguards of events that are handled once, as in ``safeguards.py``."""

from __future__ import annotations

from typing import Any

from streams.runtime.ownership.replicas import Replicas
from streams.runtime.partition import plain_slice
from streams.runtime.partition.once import OnceRule, OnceTurns
from streams.runtime.partition.retirement import Retirement
from streams.runtime.partition.seen_ids import NOTE, SeenIds
from streams.runtime.partition.state import Partition
from tests.property.leaves_kit import plain

from .member_safeguards import edited, edited_text
from .safeguards import Patch, instead, left_out, missed, nothing

ONCE = "once"

left_out(
    "copies_in_a_slice_are_handled",
    plain_slice, "run", edited_text(plain(plain_slice).run, "digest in new or has(digest)", "has(digest)"), "D2", ONCE,
    seed=11,
)  # fmt: skip
left_out("copies_ahead_have_their_turn", Retirement, "_is_duplicate", lambda self, entry: False, "D2", ONCE)
edited(
    "ids_of_a_slice_are_not_in_its_transaction",
    OnceRule, "recorded", "*new.values(), ", "", "D1", ONCE, seed=10,
)  # fmt: skip
edited(
    "ids_of_turns_are_not_in_their_transaction",
    SeenIds, "admitted", "return made + self.forget(len(made), origin)", "return []", "D1", ONCE,
)  # fmt: skip
edited(
    "ids_of_events_that_have_failed_in_a_slice_stay",
    OnceRule, "recorded", "new[last].origin >= partition.watermark", "False", "D1", ONCE, seed=10,
)  # fmt: skip


@instead(OnceTurns, "note", "D1", ONCE)
def ids_of_turns_are_there_before_their_events_are_complete(
    original: Any, self: OnceTurns, ctx: Any, record: Any
) -> None:
    original(self, ctx, record)
    if NOTE in ctx._changes:
        self._partition.seen.admitted(ctx._changes[NOTE], 4_000_000_000, 0)


left_out("ids_are_not_restored", SeenIds, "receive", nothing, "D8", ONCE)


@instead(Replicas, "adopt", "D8", ONCE, seed=10)
def donors_forget_the_ids_of_what_they_keep(original: Any, self: Replicas, *of: Any) -> None:
    original(self, *of[:-2], None, of[-1])


@missed("D1", ONCE, seed=4)
def a_new_worker_keeps_the_ids_of_the_last(patch: Patch) -> None:
    """Those of a partition that is restarted or given back: what was not committed is in them."""
    kept = dict[tuple[int, int], SeenIds]()
    adopt = Partition.adopt

    def adopted(self: Any, restored: Any) -> None:
        adopt(self, restored)
        self.timers.seen = kept.setdefault((id(self.engine), self.partition), self.timers.seen)

    patch.setattr(Partition, "adopt", adopted)
