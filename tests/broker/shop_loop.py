"""The program of ``test_loop``: events that say how many hops they still have to go, each to the other partition; out
which event came as which one in its partition. At the point that ``KILL_AT`` names, after so many times, it dies.

python shop_loop.py BOOTSTRAP GROUP INSTANCE
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import msgspec

from streams import EventContext, EventSource, Table, event_type
from streams.clients.producing.transactions import WireSlot
from streams.clients.takeover import KafkaPythonTakeOver
from streams.records import Record
from streams.runtime.ownership import loop_purge
from tests.broker.program_kit import config_of, main

PARTITIONS = 2
PURGE_SECONDS = 0.5


@event_type("Hop")
class Hop(msgspec.Struct, frozen=True):
    chain: int
    left: int


def orders_of(group: str) -> str:
    return f"{group}-orders"


def output_of(group: str) -> str:
    return f"{group}-seen"


def build(bootstrap: str, group: str, instance: str) -> EventSource[Any]:
    config = config_of(bootstrap, group, instance, orders_of(group), PARTITIONS, loop=True)
    source = EventSource(config, Table.factory(key=str, value=int))

    @source.on
    def hop(ctx: EventContext[Any], event: Hop) -> None:
        record = ctx.input
        assert record is not None
        count = ctx.store.get("count", 0) + 1
        ctx.store.put("count", count)
        text = f"{count} {record.topic} {record.offset} {event.chain} {event.left}"
        ctx.forward(Record(output_of(group), text.encode(), b"k", partition=record.partition))
        if event.left:
            ctx.loop(Hop(event.chain, event.left - 1), key=f"{event.chain}-{event.left}")

    return source


POINTS: dict[str, tuple[type, str, bool]] = {
    "commit.before": (WireSlot, "commit", True),
    "commit.after": (WireSlot, "commit", False),
    "flush.after": (WireSlot, "flush", False),
    "purge.before": (KafkaPythonTakeOver, "delete_records", True),
    "purge.after": (KafkaPythonTakeOver, "delete_records", False),
}
"""Name -> a method, and whether the process dies in front of it."""


def die_at(point: str, times: int) -> None:
    """Have this process killed when it passes a point for the last of so many times."""
    owner, name, is_before = POINTS[point]
    taken: Callable[..., Any] = getattr(owner, name)
    left = times

    def passed(now: bool) -> None:
        nonlocal left
        left -= now
        if now and not left:
            os.kill(os.getpid(), signal.SIGKILL)

    def plain(*arguments: Any) -> Any:
        passed(is_before)
        answer = taken(*arguments)
        passed(not is_before)
        return answer

    async def waiting(*arguments: Any) -> Any:
        passed(is_before)
        answer = await taken(*arguments)
        passed(not is_before)
        return answer

    setattr(owner, name, waiting if owner is WireSlot else plain)


if __name__ == "__main__":
    loop_purge.PURGE_SECONDS = PURGE_SECONDS  # type: ignore[misc]
    if point := os.environ.get("KILL_AT"):
        die_at(point, int(os.environ.get("KILL_TIMES", "3")))
    main(build)
