"""At most so many events per second and customer: a token bucket in the store, and timers that release what waits.

kes topics apply examples.async_work.rate_limit:source
kes run examples.async_work.rate_limit:source
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import msgspec

from streams import EventContext, EventSource, EventSourceConfig, Table, event_type

CALLS, REFUSED = "calls", "calls-refused"
A_TOKEN = timedelta(seconds=0.2)  # five calls per second and customer
BURST = 10  # so many at once, after a pause
MOST_WAITING = 1_000


@event_type("CallWanted")
class CallWanted(msgspec.Struct, frozen=True):
    """Input and output. Its record's key is the customer."""

    customer: str
    text: str


@event_type("TokenDue")
class TokenDue(msgspec.Struct, frozen=True):
    """What the timer brings: there is a token for this customer."""

    customer: str


class Bucket(msgspec.Struct):
    """A customer's tokens, told by the time at which all of them are back, and the calls that wait for one."""

    full_at: datetime = datetime(1970, 1, 2, tzinfo=UTC)
    waiting: list[CallWanted] = []

    @property
    def next_token_at(self) -> datetime:
        """From when on there is a token."""
        return self.full_at - (BURST - 1) * A_TOKEN

    def take(self, now: datetime) -> None:
        self.full_at = max(self.full_at, now) + A_TOKEN


source = EventSource(
    EventSourceConfig(group_id="limiter", topic="calls-wanted", num_partitions=4),
    store=Table.factory(key=str, value=Bucket),
)
source.output(CALLS)
source.output(REFUSED)
Context = EventContext[Table[str, Bucket]]


@source.on
def want(ctx: Context, call: CallWanted) -> None:
    bucket = ctx.store.get(call.customer) or Bucket()
    if len(bucket.waiting) >= MOST_WAITING:
        ctx.forward(REFUSED, call, key=call.customer)
        return
    bucket.waiting.append(call)
    if len(bucket.waiting) == 1:  # otherwise the timer runs
        release(ctx, call.customer, bucket)
    else:
        ctx.store.put(call.customer, bucket)


@source.on
def token_due(ctx: Context, event: TokenDue) -> None:
    bucket = ctx.store.get(event.customer)
    if bucket is not None:
        release(ctx, event.customer, bucket)


def release(ctx: Context, customer: str, bucket: Bucket) -> None:
    """Send what there are tokens for; a timer comes back for the rest."""
    now = ctx.now
    while bucket.waiting and bucket.next_token_at <= now:
        bucket.take(now)
        ctx.forward(CALLS, bucket.waiting.pop(0), key=customer)
    if bucket.waiting:
        ctx.schedule_at(bucket.next_token_at, TokenDue(customer), name=f"token for {customer}")
    ctx.store.put(customer, bucket)


if __name__ == "__main__":
    source.run()
