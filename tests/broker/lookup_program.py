"""The program of ``test_lookups``: payments in, and out the rate that each has met.

python lookup_program.py BOOTSTRAP GROUP INSTANCE
"""

from __future__ import annotations

from typing import Any

import msgspec

from streams import EventContext, EventSource, event_type
from streams.records import Record
from tests.broker.program_kit import config_of, main


@event_type("looked.Paid")
class Paid(msgspec.Struct, frozen=True):
    currency: str


def topics_of(group: str) -> tuple[str, str, str]:
    """Return the names of payments, rates, and of what is said."""
    return f"{group}-payments", f"{group}-rates", f"{group}-said"


def build(bootstrap: str, group: str, instance: str) -> EventSource[Any]:
    payments, table, said = topics_of(group)
    config = config_of(bootstrap, group, instance, payments, 1)
    source = EventSource(config)
    rates = source.lookup(table, key=str, value=int)

    @source.on
    def paid(ctx: EventContext[Any], event: Paid) -> None:
        rate = ctx.lookup(rates).get(event.currency)
        ctx.forward(Record(said, f"{instance}: {rate}".encode(), b"k", partition=0))

    return source


if __name__ == "__main__":
    main(build)
