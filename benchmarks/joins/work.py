"""The event sources of the measure ``joins``: ``python -m benchmarks.joins.work HOW JOB``.

``two``: the account workload with two inputs. ``join``: orders with their customers' rows. ``hop``: the account
workload, each deposit after one hop through the loop. Options: as in ``benchmarks.engine``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from benchmarks.child import job_of
from benchmarks.engine import Accounts, deposit, source_of, without_handlers
from benchmarks.joins.workload import MISSING, Customer, Invoiced, Ordered
from benchmarks.workload import Deposited, Job
from streams import EventContext, EventSource, event_type


@event_type("Hopped")
class Hopped(Deposited, frozen=True):
    """A deposit that came through the loop."""


def two(job: Job) -> EventSource[Accounts]:
    """Build it with a second input."""
    source = source_of(job)
    source.input(job.second)
    return source


def join(job: Job) -> EventSource[Accounts]:
    """Build it with a joined table. It has a store, and does not use it."""
    source, output = without_handlers(job), job.output
    customers = source.join(job.table, key=str, value=Customer)

    def ordered(ctx: EventContext[Accounts], event: Ordered) -> None:
        key = event.customer
        row = ctx.joined(customers).get(key)
        version, address = (MISSING, "") if row is None else (row.version, row.address)
        ctx.forward(output, Invoiced(key, event.number, event.cents, version, address), key=key)

    source.register_event_type(Ordered, ordered)
    return source


def hop(job: Job) -> EventSource[Accounts]:
    """Build it with a loop."""
    source, output = without_handlers(job, loop=True), job.output

    def deposited(ctx: EventContext[Accounts], event: Deposited) -> None:
        ctx.loop(Hopped(event.account, event.cents, event.sent, event.note), key=event.account)

    def hopped(ctx: EventContext[Accounts], event: Hopped) -> None:
        deposit(ctx, event, output)

    source.register_event_type(Deposited, deposited)
    source.register_event_type(Hopped, hopped)
    return source


MADE: dict[str, Callable[[Job], EventSource[Accounts]]] = {"two": two, "join": join, "hop": hop}

if __name__ == "__main__":
    MADE[sys.argv[1]](job_of(Job)).run()
