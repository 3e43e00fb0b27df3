"""Views: compacted topics, and the state of event sources, as tables that any process may read
(``docs/guides/views.md``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streams.sak.lazy_names import LazyNames

if TYPE_CHECKING:
    from streams.views.blocking import BlockingView
    from streams.views.global_change_log import GlobalChangeLog, GlobalChangeLogStatistics
    from streams.views.global_table import GlobalTable
    from streams.views.state import ViewState, ViewStatistics
    from streams.views.table import ViewChange, ViewSnapshot
    from streams.views.view import View

__all__ = [
    "BlockingView",
    "GlobalChangeLog",
    "GlobalChangeLogStatistics",
    "GlobalTable",
    "View",
    "ViewChange",
    "ViewSnapshot",
    "ViewState",
    "ViewStatistics",
]

if not TYPE_CHECKING:
    __getattr__ = LazyNames(
        __name__,
        {
            "blocking": "BlockingView",
            "global_change_log": "GlobalChangeLog GlobalChangeLogStatistics",
            "global_table": "GlobalTable",
            "table": "ViewChange ViewSnapshot",
            "state": "ViewState ViewStatistics",
            "view": "View",
        },
    )
