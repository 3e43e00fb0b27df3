"""The stages of an event's way, and the functions of each. A function that is not named here is of its caller's."""

from __future__ import annotations

from collections.abc import Mapping
from types import CodeType
from typing import Final

STAGES: Final = {
    "poll": "messages taken from the client and made into records (on the poll thread)",
    "inbox": "records handed to the loop, queued and counted per partition",
    "slice": "what is left of a slice: type header, route, context, journal, watermark",
    "decode": "value to event",
    "handler": "the user's function itself",
    "store": "get, put, encoding and undo journal of the typed table",
    "forward": "event to output: encoding, record",
    "admit": "into the open transaction: outputs, last change of each key, batching rule",
    "produce": "outputs encoded into record batches",
    "changelog": "last changes of each key encoded into record batches",
    "commit": "sealing, flush, offsets, commit, settling, measurements: per transaction",
    "ahead": "work ahead of an event's turn, and events that need patience: line, jobs, attempts",
    "loop": "asyncio and anyio, tasks that wait",
}
"""In the order of an event's way."""
HARNESS: Final = "harness"
"""The stage of the stand-ins for threads, clients and clock. Not part of any sum."""

FILES: Final = {
    "streams/kafka/reading/consumer.py": "poll",
    "streams/kafka/reading/accepting.py": "poll",
    "streams/runtime/reading/": "poll",
    "streams/runtime/partition/delivery.py": "inbox",
    "streams/runtime/partition/inbox.py": "inbox",
    "streams/runtime/ownership/partitions.py": "inbox",
    "streams/runtime/bridge.py": "inbox",
    "streams/runtime/partition/worker.py": "slice",
    "streams/runtime/partition/hot_path.py": "slice",
    "streams/runtime/partition/plain_slice.py": "slice",
    "streams/runtime/partition/context_fields.py": "slice",
    "streams/runtime/partition/forwarding.py": "forward",
    "streams/events.py": "",
    "streams/codecs.py": "",
    "streams/stores/": "store",
    "streams/core/transaction.py": "admit",
    "streams/core/admission.py": "admit",
    "streams/core/batching.py": "",
    "streams/core/merging.py": "inbox",
    "streams/core/runs.py": "inbox",
    "streams/runtime/partition/merged_inputs.py": "inbox",
    "streams/runtime/transactions/pool.py": "commit",
    "streams/runtime/transactions/producer_slots.py": "commit",
    "streams/kafka/writing/": "",
    "streams/runtime/engine.py": "commit",
    "streams/core/keyed_": "ahead",
    "streams/source/jobs.py": "ahead",
    "streams/runtime/partition/event_context.py": "slice",
    "streams/runtime/partition/batch_handlers.py": "slice",
    "streams/runtime/partition/timers.py": "",
    "streams/runtime/signal.py": "loop",
    "streams/runtime/": "ahead",
    "/asyncio/": "loop",
    "/anyio/": "loop",
    "benchmarks/engine.py": "handler",
    "benchmarks/handwritten.py": "handler",
    "benchmarks/instructions/": HARNESS,
    "streams/testing/simulation/": HARNESS,
}
"""By a part of the path of a file, the first that fits: its stage, but for the functions below; "": its caller's."""
_FUNCTIONS: Final = {
    "decode": "decode",
    "EventType.decode": "decode",
    "EventContext.forward": "forward",
    "EventContext.__init__": "slice",
    "Poller.handled": "inbox",
    "Poller.pause": "inbox",
    "Poller.resume": "inbox",
    "size_of_records": "poll",
    "TransactionPool.admit": "admit",
    "TransactionPool.admit_slice": "admit",
    "TransactionPool.is_full": "admit",
    "TransactionPool._begin_filling": "admit",
    "TransactionPool._changelog_of": "changelog",
    "EncodedTransaction.fill": "produce",
    "EncodedTransaction.complete": "produce",
    "EncodedTransaction.add_changes": "changelog",
    "EncodedTransaction.add": "changelog",
    "Transaction.to": "commit",
    "Transaction.seal": "commit",
    "Transaction.settle": "commit",
    "source_of": HARNESS,
}


def total(counts: Mapping[str, float]) -> float:
    """Sum up the stages that are the system's own."""
    return sum(number for stage, number in counts.items() if stage != HARNESS)


def stage_of(code: CodeType) -> str | None:
    """Return the stage of a function; ``None``: its caller's."""
    for part, stage in FILES.items():
        if part in code.co_filename:
            return _FUNCTIONS.get(code.co_qualname, stage) or None
    return None
