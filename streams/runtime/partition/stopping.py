"""The advice in the message of a source that stops: the ways to go on."""

from __future__ import annotations

import shlex
from typing import Final

from streams.core.router import Route
from streams.core.timers import Timer
from streams.records import IncomingRecord
from streams.runtime.partition.failures import unreadable_state
from streams.runtime.partition.state import Partition
from streams.runtime.partition.timekeeping import ClosedWindow

_REPAIR: Final = "repair the handler and deploy it"
_REPAIR_CLASS: Final = "repair the event class and deploy it; or set decode_policy=DEAD_LETTER or decode_policy=SKIP"
_REPAIR_WINDOW: Final = "; or set on_error=DEAD_LETTER or on_error=SKIP where the window is declared"
_REPAIR_ROW: Final = "set on_error=DEAD_LETTER or on_error=SKIP in source.join(...): the row before stays"


def advice(
    partition: Partition, record: IncomingRecord, route: Route | None, error: BaseException, timer: Timer | None
) -> str:
    """Return the end of the message; without a ``route`` the record could not be read."""
    text = "; the source stops, and the next start meets it again. To go on, "
    if (unreadable := unreadable_state(error)) is not None:  # passing the event would leave it there
        return text + (
            "repair the class of that value and deploy it; or stop all members and mend the value: kes state repair "
            f"MODULE:SOURCE {shlex.quote(unreadable.key)} --partition {unreadable.partition} --previous (or --with "
            "FILE, or --delete)"
        )
    is_row = partition.reading.topic in partition.joined.tables
    text += _REPAIR if route is not None else _REPAIR_ROW if is_row else _REPAIR_CLASS
    text += _REPAIR_WINDOW if isinstance(timer, ClosedWindow) else ""
    if timer is not None:
        return text
    topic = "" if partition.reading == partition.topic_partition else f"{record.topic}:"
    passed = f"kes skip MODULE:SOURCE {topic}{record.partition}@{record.offset}"
    return f"{text}; or stop all members and pass this record: {passed}"
