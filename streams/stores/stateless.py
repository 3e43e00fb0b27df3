"""The store of an event source without state: it holds nothing, and undoing nothing is easy."""

from __future__ import annotations

from typing import NoReturn

from streams.errors import OffsetError, StoreError
from streams.records import Change, TopicPartition
from streams.sak.users_code import calling_location


class NoStore(StoreError, AttributeError):
    """A handler used the store of an event source that has none. (An ``AttributeError`` too: ``hasattr`` works.)"""


class Stateless:
    """A ``JournalledStore`` that holds nothing. Its changelog carries the input offset only."""

    def __init__(self, topic_partition: TopicPartition) -> None:
        self._where = topic_partition

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse the use of a store that the event source does not have."""
        if name.startswith("_"):
            raise AttributeError(name)
        raise NoStore(
            f"{self._where}: ctx.store.{name} was used{calling_location()}, but the event source has no store; "
            "give it one: EventSource(config, store=Table.factory(key=..., value=...))"
        )

    def receive_change(self, change: Change, /) -> None:
        """Refuse a change: the changelog of a stateless source has none, so this one belongs to another source."""
        raise OffsetError(
            f"the changelog of {self._where} holds state (key {change.key[:64]!r}), but the event source has "
            "no store: give it "
            "its store back, or another group_id"
        )

    def begin(self, journal: list[Change], /) -> None:
        """Do nothing: there is nothing to journal."""

    def end(self) -> None:
        """Do nothing: nothing was journalled."""

    def undo(self, journal: list[Change], /) -> None:
        """Do nothing: there is nothing to undo."""

    def revoked(self) -> None:
        """Do nothing: there is nothing to free."""
