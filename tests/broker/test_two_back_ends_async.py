"""The driver's answers are the broker's: work ahead of its turn, batch handlers, timers."""

from __future__ import annotations

import pytest

from streams import (
    DEAD_LETTER,
    AsyncJobScheduler,
    BatchContext,
    EventContext,
    EventSource,
    EventSourceConfig,
    SchedulerConfig,
)
from streams.events import event_type_of
from streams.testing.fixtures import BrokerAddress
from tests.broker.back_ends_kit import BackEnd, Scenario, feed, scenario, turn_of_others
from tests.broker.two_back_ends import must_be_equal
from tests.vocabulary import TOTALS, Added, Total, Totals, tell_total

pytestmark = [pytest.mark.broker, pytest.mark.timeout(120)]

NAMES = ["a", "b", "c", "a", "b", "a", "d", "a", "e", "b"]


async def doubled(event: Added) -> int:
    """A job."""
    await turn_of_others()
    if event.deed == "raise":
        raise ValueError(f"no {event.name}, please")
    return event.amount * 2


@scenario(partitions=2)
def jobs(end: BackEnd) -> None:
    """Jobs, some of which fail, with finalizers in order."""

    def make(config: EventSourceConfig) -> EventSource[Totals]:
        source = EventSource(config, TOTALS)
        scheduler: AsyncJobScheduler[Totals, Added, int] = AsyncJobScheduler(
            source,
            doubled,
            lambda ctx, event, amount: tell_total(ctx, Added(event.name, amount), end.out),
            config=SchedulerConfig(concurrency=4),
        )
        scheduler.register_event_type(Added, key=lambda event: event.name, on_error=DEAD_LETTER)
        return source

    end.run(make)
    feed(end, *NAMES)
    feed(end, "a", "b", deed="raise")
    feed(end, *NAMES)
    end.settle()
    end.leave()
    feed(end, *NAMES)
    end.restart()
    end.settle()


@scenario(partitions=2, configs={"out": {"max_message_bytes": "2000"}})
def batch_handlers(end: BackEnd) -> None:
    """Lists of events: some fail, some send what the broker refuses, some cannot be read; one event pays each time."""

    def make(config: EventSourceConfig) -> EventSource[Totals]:
        source = EventSource(config, TOTALS)

        @source.register_event_type(Added, batch=True, on_error=DEAD_LETTER)
        def handle(ctx: BatchContext[Totals], events: list[Added]) -> None:
            for event in events:
                tell_total(ctx, Added(event.name, event.amount), end.out)
                if event.deed == "large":
                    ctx.forward(end.out, Total("x" * 3_000, 0), key=event.name)
                if event.deed == "later":
                    ctx.schedule_in(0.2, Added(f"{event.name} later"), name=event.name)
                if event.deed == "raise":
                    raise ValueError(f"no {event.name}, please")

        return source

    end.run(make, start=False, decode_policy=DEAD_LETTER)
    feed(end, *NAMES)
    feed(end, "a", "b", deed="raise")
    feed(end, *NAMES)
    end.send_raw(b"?", b"a", headers=event_type_of(Added).headers)
    feed(end, "a", "c", deed="large")
    feed(end, "d", deed="later")
    feed(end, *NAMES)
    end.start()
    end.settle()
    end.until(
        lambda: any(b"d later" in (record.value or b"") for record in end.records(end.out)), "the timer has fired"
    )
    end.settle()


@scenario(partitions=2)
def timers(end: BackEnd) -> None:
    """Set, replaced, cancelled, firing in order; one fires after a restart."""

    def handle(ctx: EventContext[Totals], event: Added) -> None:
        if ctx.timer is not None:
            tell_total(ctx, Added(f"{event.name} by timer {ctx.timer.name} {ctx.timer.key!r}", event.amount), end.out)
        elif event.deed == "cancel":
            tell_total(ctx, Added(event.name, int(ctx.cancel_timer(event.name))), end.out)
        elif event.deed == "twice":
            ctx.schedule_in(3600.0, Added(event.name, 1), name=event.name)
            ctx.schedule_in(0.2, Added(event.name, 2), name=event.name)
        else:
            ctx.schedule_in(event.amount / 1000, Added(event.name, event.amount), name=event.name)

    def make(config: EventSourceConfig) -> EventSource[Totals]:
        source = EventSource(config, TOTALS)
        source.register_event_type(Added, handle)
        return source

    end.run(make)
    end.send(Added("a", 100), "a")
    end.send(Added("b", 200), "b")
    end.send(Added("kept", 3_600_000), "c")
    end.send(Added("cancelled", 3_600_000), "c")
    feed(end, "twice", deed="twice")
    end.send(Added("cancelled", 0, "cancel"), "c")
    end.send(Added("nothing", 0, "cancel"), "c")
    end.settle()
    end.until(lambda: len(end.records(end.out)) == 5, "the timers have fired")
    end.send(Added("later", 300), "a")
    end.settle()
    end.leave()
    end.restart()
    end.until(lambda: len(end.records(end.out)) == 6, "the one that was left has fired")
    end.settle()


SCENARIOS = [jobs, batch_handlers, timers]


@pytest.mark.parametrize("one", SCENARIOS, ids=str)
def test_same_answers(kafka_broker: BrokerAddress, one: Scenario) -> None:
    must_be_equal(one, kafka_broker.bootstrap_servers)
