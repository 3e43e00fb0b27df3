"""Clicks of users, counted: goka's first example, exactly once. Any process may read the table, as a view.

kes broker start
kes topics apply examples.clicks:source
kes run examples.clicks:source
kes view watch examples.clicks:source
"""

from __future__ import annotations

import msgspec

from streams import EventContext, EventSource, EventSourceConfig, Table, event_type


@event_type("Clicked")
class Clicked(msgspec.Struct, frozen=True):
    """A user has clicked on something."""

    user: str
    what: str


class User(msgspec.Struct):
    """State of one user."""

    clicks: int = 0


source = EventSource(
    EventSourceConfig(group_id="clicks", topic="user-clicks", num_partitions=8),
    store=Table.factory(key=str, value=User),
)


@source.on
def clicked(ctx: EventContext[Table[str, User]], event: Clicked) -> None:
    user = ctx.store.get(event.user) or User()
    user.clicks += 1
    ctx.store.put(event.user, user)


if __name__ == "__main__":
    source.run()
