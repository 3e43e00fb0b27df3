"""What tests of timers need: a time of day that they set, and a source whose events set and cancel timers."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec

from streams import EventContext, EventSource, event_type
from streams.errors import StreamsError
from streams.runtime.changelog import TIMER_PREFIX
from streams.runtime.system import Environment
from tests.unit.runtime_kit import CHANGELOG, OUT, TABLE, Bench, Connections, Named, count


@event_type("Ring")
class Ring(msgspec.Struct, frozen=True):
    """What timers fire."""

    name: str


class Clocked(Bench):
    """Its sources take the time of day from ``seconds``."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 1_000_000.0

    def run(self) -> asyncio.Task[None]:
        self.connections = Connections(self.broker, self.source.config.num_partitions)
        environment = Environment(wall_seconds=lambda: self.seconds)
        self.tasks.append(asyncio.create_task(self.source._consume(lambda _: self.connections, environment)))  # type: ignore[arg-type,return-value]
        return self.tasks[-1]

    async def again(self) -> None:
        """Stop in good order, and start."""
        await self.stop()
        await self.start()

    async def handled(self, *names: str) -> None:
        """Send these, and wait until they are committed."""
        self.broker.send(*names)
        goal = len(self.broker.logs["in", 0])
        await self.until(lambda: self.broker.reached() == goal, f"{names} are committed")

    async def rang(self, *names: str) -> None:
        """Wait until exactly these have fired, in this order."""
        with contextlib.suppress(StreamsError):  # not at work yet, or any more
            await self.source.interject(0, lambda ctx: None)  # so that it looks at the time of day at once
        await self.until(lambda: len(self.broker.outputs()) >= len(names), f"{names} fire")
        assert self.broker.outputs() == list(names)

    def timers(self, partition: int = 0) -> list[str]:
        """The names of those that the changelog holds."""
        last = {record.key: record.value for record in self.broker.logs[CHANGELOG, partition] if record.key}
        found = [key for key, value in last.items() if key.startswith(TIMER_PREFIX) and value is not None]
        return sorted(key[len(TIMER_PREFIX) :].decode() for key in found)

    async def wait_for_nothing(self) -> None:
        """Long enough for a worker to look at the time of day again, and at what else there is."""
        for _ in range(3):
            await self.source.interject(0, lambda ctx: None)


def ring(ctx: EventContext[Any], event: Ring) -> None:
    count(ctx, event.name)
    ctx.forward(OUT, Named(event.name), key=event.name)


def on_named(ctx: EventContext[Any], event: Named) -> None:
    """What the name says: "a+10" sets the timer a, to ring in 10 seconds, "a-" cancels it, "!a+10" fails, too."""
    name, sign, seconds = event.name.lstrip("!").partition("+")
    if sign:
        ctx.schedule_in(float(seconds), Ring(name), name=name)
    elif name.endswith("-"):
        ctx.cancel_timer(name[:-1])
    if event.name.startswith("!"):
        raise ValueError("not this one")


def alarmed(bench: Bench, handler: Any = ring, *, store: Any = TABLE, **settings: Any) -> EventSource[Any]:
    """A source of events that set timers, and of the handler for these."""
    source = bench.make(on_named, store=store, on_error=settings.pop("named", None), **settings.pop("config", {}))
    if handler is not None:
        source.register_event_type(Ring, handler, **settings)
    return source
