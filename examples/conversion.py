"""Payments in many currencies, booked in euros, with the rate of the moment in which each payment was made.

The rates are reference data: a compacted topic that somebody else writes, read by a global change log into a table that
handlers look into. A rate is kept under (currency, valid from), so no rate is ever overwritten, and a payment that is
handled again years later finds the rate that it found the first time.

kes broker start
kes topics apply examples.conversion:source
python -m examples.conversion_rates EUR=1 USD=0.92 JPY=0.0061
kes run examples.conversion:source
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from streams import ErrorResponse, EventContext, EventSource, EventSourceConfig, Retry, Table, event_type
from streams.views import GlobalChangeLog, GlobalTable

RATES = "currency-rates"


@event_type("Rate")
class Rate(msgspec.Struct, frozen=True):
    """What one unit of a currency is worth from a moment on, in millionths of a euro."""

    currency: str
    valid_from_ms: int
    micros: int


@event_type("Paid")
class Paid(msgspec.Struct, frozen=True):
    """Somebody paid into an account, in any currency (the smallest unit that amounts are counted in is a hundredth)."""

    account: str
    currency: str
    hundredths: int


@event_type("Booked")
class Booked(msgspec.Struct, frozen=True):
    """The payment in euro cents, the balance after it, and the rate that was used: nobody has to look it up again."""

    account: str
    cents: int
    balance: int
    rate: Rate


class NoRate(Exception):
    """There is no rate for this currency at that time (yet)."""


Rates = GlobalTable[tuple[str, int], Rate]
rates: Rates
"""As long as the source runs; the same for all its partitions."""


@asynccontextmanager
async def with_rates() -> AsyncIterator[None]:
    """Read all rates before the first payment is handled, and follow them until the last one was."""
    global rates
    log = GlobalChangeLog(RATES)
    rates = log.table(key=tuple[str, int], value=Rate, ordered=True)
    async with log:  # if it fails, the source is cancelled, and stops with that error
        await log.wait_caught_up(timeout_seconds=120)
        yield


source = EventSource(
    EventSourceConfig(group_id="conversion", topic="payments", num_partitions=4),
    store=Table.factory(key=str, value=int),
    lifespan=with_rates,
)
bookings = source.output("bookings")


def rate_at(currency: str, at_ms: int) -> Rate:
    """The rate that was valid at a moment. Raises ``NoRate``."""
    newest_first = rates.range((currency, 0), (currency, at_ms), reverse=True, include_high=True)
    found = next(newest_first, None)
    if found is None:
        raise NoRate(f"no rate of {currency} at {at_ms}")
    return found[1]


# The view may be a moment behind whoever wrote the rate: wait a little before giving the payment up.
@source.on(on_error=Retry(attempts=5, backoff_seconds=0.25, then=ErrorResponse.DEAD_LETTER))
def on_paid(ctx: EventContext[Table[str, int]], event: Paid) -> None:
    assert ctx.input is not None  # no interjection
    rate = rate_at(event.currency, ctx.input.timestamp_ms)
    cents = event.hundredths * rate.micros // 1_000_000
    balance = ctx.store.get(event.account, 0) + cents
    ctx.store.put(event.account, balance)
    ctx.forward(bookings, Booked(event.account, cents, balance, rate), key=event.account)


if __name__ == "__main__":
    source.run()
