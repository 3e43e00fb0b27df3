"""The safeguards of parked keys, as in ``safeguards.py``."""

from __future__ import annotations

from typing import Any

from streams.core.origin import parked_origin
from streams.core.parking import ParkedKeys, Queue, Queued, queue_name
from streams.core.timers import Timer
from streams.runtime.partition import hot_path, parking_acts, timers
from streams.runtime.partition.execution import Execution
from streams.runtime.partition.parked_events import ParkedEvents
from streams.runtime.partition.parked_heads import ParkedHeads
from streams.runtime.partition.retirement import Retirement
from streams.runtime.partition.state import Partition

from .member_safeguards import edited
from .safeguards import Patch, instead, left_out, missed

Changes = dict[str, Timer | None]
P, S = "parked", "struck"


def no_changes(*_: Any, **__: Any) -> Changes:
    """Changes nothing."""
    return {}


left_out("first_event_of_a_queue_is_not_in_it", ParkedKeys, "begun", no_changes, "P1", P)
left_out("later_event_is_not_in_its_queue", ParkedEvents, "behind", no_changes, "P1", P)


@instead(ParkedEvents, "in_slice", "P1", P, seed=1)
def events_queue_beside_the_transaction_of_their_slice(original: Any, self: ParkedEvents, record: Any) -> Any:
    return None if original(self, record) is None else []


edited(
    "work_that_has_ended_has_its_turn_whatever_is_parked",
    Retirement, "retire", "first.is_given_up or first.record.key in self._partition.timers.parked.keys",
    "first.is_given_up", "P2", P, seed=5,
)  # fmt: skip
edited(
    "work_that_was_given_up_is_taken_for_done",
    Retirement, "retire", "first.is_given_up or first.record.key in self._partition.timers.parked.keys",
    "False", "P2", P,
)  # fmt: skip
left_out("slices_pass_parked_keys", hot_path, "parked_places", lambda *_: [], "P3", P)
edited("single_events_pass_parked_keys", Execution, "one", "self._partition.queue_of(record)", "None", "P3", P)
left_out("head_stays_when_its_effects_are_there", ParkedHeads, "_left", no_changes, "P4", P)


@instead(Queue, "left", "P5", P)
def queue_goes_with_its_head(self: Queue, owner: str, now_ms: int) -> Changes:
    return self.dropped()


left_out(
    "failure_is_that_of_a_place_in_the_queue",
    Queue, "origin", property(lambda self: parked_origin(f"{self.name} {self.state.head}", 0)), "P9", P, seed=3,
)  # fmt: skip
edited(
    "attempts_ahead_end_with_the_first",
    Execution, "failed", "decision is Decision.RETRY", "False", "waits", P,
)  # fmt: skip
left_out("donors_forget_the_queues_of_what_they_keep", Queue, "records", lambda self: iter(()), "P9", S, seed=87)


@missed("P9", S, seed=10)
def a_new_worker_keeps_the_queues_of_the_last(patch: Patch) -> None:
    """Those of a partition that is restarted or given back: what was not committed is in them."""
    kept = dict[tuple[int, int], ParkedKeys]()
    adopt = Partition.adopt

    def adopted(self: Any, restored: Any) -> None:
        adopt(self, restored)
        self.timers.parked = kept.setdefault((id(self.engine), self.partition), self.timers.parked)

    patch.setattr(Partition, "adopt", adopted)


edited(
    "an_act_is_for_whatever_is_the_first_event",
    parking_acts, "acted", "queue.state.head != seen.head", "False", "P7", S, seed=8,
)  # fmt: skip
left_out(
    "numbers_of_a_later_queue_begin_where_those_of_the_first_did",
    Queued, "first_number", lambda self, now_ms: 0, "P7", S, seed=54,
)  # fmt: skip
left_out("heads_that_were_found_are_tried_without_a_note", Queue, "must_be_noted", lambda *_: False, "P12", S, seed=1)
edited(
    "heads_that_have_ended_a_process_are_due_at_once",
    timers, "found_by", "if state.noted:", "if False:", "P12", S, seed=22,
)  # fmt: skip
edited("notes_are_not_awaited", ParkedHeads, "_note", ", set_aside=name", "", "P12", S, seed=9)
left_out(
    "events_without_key_share_a_queue",
    Queued, "queue_name", property(lambda self: queue_name(self.key or b"")), "P13", S, seed=1,
)  # fmt: skip
