"""Which function belongs to which stage of an event's way. What is not named here belongs to its caller's."""

from __future__ import annotations

import linecache
from collections.abc import Mapping
from types import CodeType
from typing import Final, NamedTuple

STAGES: Final = {
    "poll": "messages taken from the client and made into records (on the poll thread)",
    "inbox": "records handed to the loop, queued and counted per partition",
    "slice": "what is left of a slice: type header, route, context, journal, watermark",
    "decode": "value to event",
    "handler": "the user's function itself",
    "store": "get, put, encoding and undo journal of the typed table",
    "forward": "event to output: encoding, record",
    "admit": "into the open transaction: outputs, last change of each key, batching rule",
    "produce": "outputs handed to the producer",
    "changelog": "last changes of each key handed to the producer",
    "commit": "sealing, flush, offsets, commit, settling, measurements: per transaction",
    "ahead": "work ahead of an event's turn, and events that need patience: line, jobs, attempts",
    "loop": "asyncio and anyio, tasks that wait",
}
"""In the order of an event's way."""
HARNESS: Final = "harness"
"""What stands in for threads, clients and clock. Not part of any sum."""

_FILES: Final = {
    "streams/clients/consumer.py": "poll",
    "streams/runtime/poller.py": "poll",
    "streams/runtime/inbox.py": "inbox",
    "streams/runtime/partitions.py": "inbox",
    "streams/runtime/bridge.py": "inbox",
    "streams/runtime/partition_worker.py": "slice",
    "streams/runtime/slices.py": "slice",
    "streams/events.py": "",
    "streams/codecs.py": "",
    "streams/stores/": "store",
    "streams/core/transaction.py": "admit",
    "streams/core/batching.py": "",
    "streams/runtime/transaction_pool.py": "commit",
    "streams/runtime/slot.py": "",
    "streams/runtime/slots.py": "commit",
    "streams/clients/transactional.py": "",
    "streams/runtime/lifecycle.py": "commit",
    "streams/core/keyed_": "ahead",
    "streams/async_jobs.py": "ahead",
    "streams/runtime/event_context.py": "slice",
    "streams/runtime/batch_handlers.py": "slice",
    "streams/runtime/timers.py": "",
    "streams/runtime/signal.py": "loop",
    "streams/runtime/": "ahead",
    "/asyncio/": "loop",
    "/anyio/": "loop",
    "benchmarks/engine.py": "handler",
    "benchmarks/engine_batch.py": "handler",
    "benchmarks/instructions/ahead.py": "handler",
    "benchmarks/handwritten.py": "poll",
    "benchmarks/instructions/": HARNESS,
    "streams/testing/simulation/": HARNESS,
}
_FUNCTIONS: Final = {
    "decode": "decode",
    "EventType.decode": "decode",
    "EventContext.forward": "forward",
    "EventContext.__init__": "slice",
    "EventContext.close": "slice",
    "Poller.handled": "inbox",
    "Poller.pause": "inbox",
    "Poller.resume": "inbox",
    "TransactionPool.admit": "admit",
    "TransactionPool.admit_slice": "admit",
    "TransactionPool.is_full": "admit",
    "TransactionPool._begin_filling": "admit",
    "TransactionPool.pump": "produce",
    "TransactionPool._produce": "produce",
    "TransactionPool._produce_changelog": "changelog",
    "TransactionPool._changelog_of": "changelog",
    "TransactionPool._send": "changelog",
    "TransactionPool._slot": "",
    "Transaction.to": "commit",
    "Transaction.seal": "commit",
    "Transaction.settle": "commit",
    "source_of": HARNESS,
}
_LINES: Final = {
    "consumer.poll(": "poll",
    "message.headers()": "slice",
    "decode = ": "slice",
    "if decode is": "slice",
    "if name ==": "slice",
    "raise RuntimeError(f": "slice",
    "break": "slice",
    "decode(": "decode",
    "self.job.changelog": "changelog",
    "self.job.output": "produce",
    "_encode(Balance": "forward",
    "_encode(": "forward",
    "message.partition()": "admit",
    "message.offset()": "admit",
    "self.states": "store",
    "producer.poll": "produce",
}
"""The loop written by hand is one function: its lines, by a part of them. Others are the handler's."""
_HAND_FUNCTION: Final = "Loop._handle"


def total(counts: Mapping[str, float]) -> float:
    """Of all stages that are the system's own."""
    return sum(number for stage, number in counts.items() if stage != HARNESS)


class Function(NamedTuple):
    """A function's ``stage`` (``None``: its caller's), and of one that does everything the stages of its ``parts``, by
    the offset of the bytecode."""

    stage: str | None
    parts: dict[int, str]


def described(code: CodeType) -> Function:
    """What is known about this function."""
    for part, stage in _FILES.items():
        if part in code.co_filename:
            return Function(_FUNCTIONS.get(code.co_qualname, stage) or None, _parts(code))
    return Function(None, {})


def _parts(code: CodeType) -> dict[int, str]:
    if code.co_qualname != _HAND_FUNCTION:
        return {}
    found = {}
    for start, end, line in code.co_lines():
        text = linecache.getline(code.co_filename, line) if line is not None else ""
        stage = next((stage for part, stage in _LINES.items() if part in text), "handler")
        found.update(dict.fromkeys(range(start, end, 2), stage))
    return found
