"""A group, read again and again: its members, their lags, and the status that they publish.

Threads: it blocks, and one thread at a time reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Final

from streams.errors import BrokerUnavailable, TopicError
from streams.kafka.questions.admin import TopicAdmin, standing
from streams.kafka.questions.group_view import GroupQuestions, GroupView
from streams.kafka.questions.lags import PartitionLag
from streams.kafka.settings import ClientSettings
from streams.looks.group_live import Live
from streams.looks.group_picture import Lags, Picture, remembered
from streams.settings.config import EventSourceConfig

LAG_SECONDS: Final = 3.0
"""Time limit for the ends of topics: the members are worth seeing without."""
SETTLE_SECONDS: Final = 3.0
"""Time for a rebalance to end, before the members are shown without what they have."""

LagsOf = Callable[[GroupView, float], tuple[Lags, tuple[str, ...]]]
LiveOf = Callable[[GroupView, float], tuple[Live, tuple[str, ...]]]


class GroupReader:
    """One look after the other: what a rebalance hides is remembered, what cannot be found out is noted."""

    def __init__(self, questions: GroupQuestions, lags: LagsOf, live: LiveOf, group: str, timeout: float) -> None:
        self._questions, self._lags, self._live = questions, lags, live
        self._group, self._timeout = group, timeout
        self._before: GroupView | None = None
        self._known_lags: Lags = {}

    def __call__(self) -> Picture:
        """The group now. Raises ``BrokerUnavailable``, ``ConfigError``."""
        view, stale = remembered(self._questions.describe_group(self._group, self._timeout), self._before)
        if view.settled:
            self._before = view
        patience = min(self._timeout, LAG_SECONDS)
        found, notes = self._lags(view, patience)
        self._known_lags = {**self._known_lags, **found}
        live, more = self._live(view, patience)
        return Picture(view=view, lags=self._known_lags, live=live, stale=stale, notes=(*notes, *more))

    def settled(self, now: Callable[[], float], sleep: Callable[[float], None]) -> Picture:
        """The group now, or in a moment, when a rebalance that is under way is through."""
        until = now() + min(self._timeout, SETTLE_SECONDS)
        while True:
            picture = self()
            if picture.view.settled or now() > until:
                return picture
            sleep(0.1)


@contextmanager
def lags_of(config: EventSourceConfig | None, admin: TopicAdmin) -> Iterator[LagsOf]:
    """Provide a group's lag in its topics. A source on another cluster has its ends there, and its offsets here."""
    if config is None or not config.source_is_elsewhere:
        yield lambda view, seconds: lags_in(admin, view, {}, seconds)
        return
    settings = ClientSettings(config.source_bootstrap_servers, config.source_client_settings, client_id="kes-cli")
    with closing(TopicAdmin(settings)) as elsewhere:
        yield lambda view, seconds: lags_in(elsewhere, view, {config.offsets_topic: config.topic}, seconds)


def lags_in(
    admin: TopicAdmin, view: GroupView, stands_for: Mapping[str, str], seconds: float
) -> tuple[Lags, tuple[str, ...]]:
    """Return the lags in every topic that the group reads or has offsets in, and notes about those not known.

    ``stands_for``: topics whose offsets are committed under another name, by that name; others are left out then.
    """
    lags: dict[str, list[PartitionLag]] = {}
    notes = []
    topics = {topic for member in view.members for topic in member.topics} | view.committed.keys()
    for topic in sorted(topics & stands_for.keys() if stands_for else topics):
        at = stands_for.get(topic, topic)
        try:
            marks = admin.watermarks(at, None, seconds)
        except (BrokerUnavailable, TopicError) as error:
            notes.append(f"lag in {topic}: {error}")
            continue
        lags[topic] = admin.tails.without_markers(at, standing(view.committed.get(topic, {}), marks))
    return lags, tuple(notes)
