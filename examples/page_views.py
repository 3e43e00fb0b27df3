"""Views of pages, counted a list at a time: each page's total is read, written and sent once per list.

kes broker start
kes topics apply examples.page_views:source
kes run examples.page_views:source
"""

from __future__ import annotations

from collections import Counter

import msgspec

from streams import BatchContext, EventSource, EventSourceConfig, Table, event_type


@event_type("Viewed")
class Viewed(msgspec.Struct, frozen=True):
    """Somebody looked at a page."""

    page: str


@event_type("PageViews")
class PageViews(msgspec.Struct, frozen=True):
    """How often a page was viewed until now: readers keep the last one of each page."""

    page: str
    views: int


source = EventSource(
    EventSourceConfig(group_id="page-views", topic="views", num_partitions=4),
    store=Table.factory(key=str, value=int),
)
page_views = source.output("page-views")


@source.on(batch=True)
def viewed(ctx: BatchContext[Table[str, int]], events: list[Viewed]) -> None:
    for page, count in Counter(event.page for event in events).items():
        views = ctx.store.get(page, 0) + count
        ctx.store.put(page, views)
        ctx.forward(page_views, PageViews(page, views), key=page)


if __name__ == "__main__":
    source.run()
