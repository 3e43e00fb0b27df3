"""``EventContext.loop``: an event that is sent to its own source, and how many led to it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from streams.errors import ConfigError, EncodeError, LoopTooLong
from streams.records import IncomingRecord
from streams.runtime.partition import forwarding
from streams.runtime.partition.context_fields import ContextFields
from streams.settings.config import EventSourceConfig

HOPS_HEADER: Final = "__kes_hops"
"""Header of a record in the loop: how many events of the loop led to one another up to it, in decimal digits."""


def loop(ctx: ContextFields, event: object, key: object, headers: Iterable[tuple[str, bytes | None]]) -> None:
    """See ``EventContext.loop``."""
    config: EventSourceConfig = ctx._host.config if ctx._timers is None else ctx._timers.config
    if not config.loop:
        raise ConfigError(f"{ctx.where}: ctx.loop was called, and the source has no loop: set loop=True")
    if not isinstance(key, str | bytes):
        raise EncodeError(f"{ctx.where}: the key for the loop is {key!r}; it must be str or bytes")
    records = ctx._records
    hops = 1 + max((_hops(record) for record in records if record.topic == config.loop_topic), default=0)
    if 0 < config.max_loop_hops < hops:
        raise LoopTooLong(
            f"{ctx.where}: {config.max_loop_hops} events of the loop {config.loop_topic} have led to one another, and "
            "this one sends a further one (max_loop_hops): end the loop in the handler, or set the bound higher"
        )
    forwarding.forward(
        ctx,
        config.loop_topic,
        event,
        key=key,
        headers=[(HOPS_HEADER, b"%d" % hops), *headers],
        timestamp_ms=_time_ms(ctx),
    )


def _time_ms(ctx: ContextFields) -> int:
    """Return the time of the event, of a batch the earliest: what it sends to the loop has happened then. 0 (the time
    of sending): it has none, or is an interjection."""
    times = [record.timestamp_ms for record in ctx._records] if ctx.timer is None else [ctx.timer.due_ms]
    now_ms: int = ctx._host.wall_ms() if ctx._timers is None else ctx._timers.now_ms()
    # Not later than now: brokers refuse times in the future.
    return max(0, min((now_ms, *(time_ms for time_ms in times if time_ms >= 0)))) if times else 0


def _hops(record: IncomingRecord) -> int:
    count = record.header(HOPS_HEADER) or b""
    return int(count) if count.isdigit() else 0  # anything else is not ours: another program has sent the record
