"""The program of ``test_visits``: keys come in, and a visit says of each in which run, and how often it was before.

python visit_program.py BOOTSTRAP GROUP INSTANCE
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import msgspec

from streams import EventContext, EventSource, Table, event_type
from streams.records import Record
from tests.broker.program_kit import config_of, main

PARTITIONS = 4
SECONDS = 0.003
"""For each key, so that a run takes its time."""
MOVE, CANCELLED, SLOW_SECONDS = "move", "cancelled", 0.05
"""Runs that take longer than a member needs to join, or a command to begin."""


@event_type("visited.Put")
class Put(msgspec.Struct, frozen=True):
    key: str


def topics_of(group: str) -> tuple[str, str]:
    """Return the names of the source, and of what is said."""
    return f"{group}-keys", f"{group}-said"


def build(bootstrap: str, group: str, instance: str) -> EventSource[Any]:
    keys, said = topics_of(group)
    config = config_of(bootstrap, group, instance, keys, PARTITIONS, visits=True)
    source = EventSource(config, Table.factory(key=str, value=int, ordered=True))

    @source.on
    def put(ctx: EventContext[Any], event: Put) -> None:
        ctx.store.put(event.key, ctx.store.get(event.key, 0))

    @source.register_visit("look")
    async def look(ctx: EventContext[Any], key: str, value: int) -> None:
        visited: Any = ctx.timer
        ctx.store.put(key, value + 1)
        text = f"{visited.run} {value} {instance}".encode()
        ctx.forward(Record(said, text, key.encode(), partition=ctx.topic_partition.partition))
        seconds = SLOW_SECONDS if visited.run in (MOVE, CANCELLED) else SECONDS
        until = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < until:
            await asyncio.sleep(seconds)

    return source


def named() -> EventSource[Any]:
    """The source for the command line."""
    return build("", os.environ["VISIT_GROUP"], "")


if __name__ == "__main__":
    main(build)
