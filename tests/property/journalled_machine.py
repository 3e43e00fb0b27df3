"""What all stores have in common: events that succeed or fail, restores at any time, in one go or as a standby."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from streams.records import Change, TopicPartition

HERE = TopicPartition("t", 0)


class JournalledMachine(RuleBasedStateMachine):
    """A store beside a simple model of it. Those below begin events, by ``begun``, and write in them."""

    def make(self) -> Any:
        raise NotImplementedError

    def empty(self) -> Any:
        """Return the model of an empty store."""
        raise NotImplementedError

    def committed(self, store: Any, changes: list[Change]) -> None:
        """Notes what a store on disk may write."""

    @initialize()
    def start(self) -> None:
        self.store, self.standby = self.make(), self.make()
        self.model = self.empty()
        self.before = deepcopy(self.model)
        self.changelog: list[Change] = []
        self.journal: list[Change] | None = None
        self.ctx: Any = None

    def begun(self) -> None:
        self.before = deepcopy(self.model)
        self.journal = []
        self.store.begin(self.journal)

    @precondition(lambda self: self.journal is not None)
    @rule(last_one_wins=st.booleans())
    def complete(self, last_one_wins: bool) -> None:
        assert self.journal is not None
        self.store.end()
        changes = list({change.key: change for change in self.journal}.values()) if last_one_wins else self.journal
        received = [Change(change.key, change.value) for change in changes]
        self.changelog += received
        for change in received:
            self.standby.receive_change(change)
        self.committed(self.store, changes)
        self.committed(self.standby, received)
        self.journal = None

    @precondition(lambda self: self.journal is not None)
    @rule()
    def fail(self) -> None:
        assert self.journal is not None
        self.store.end()
        self.store.undo(self.journal)
        self.model = self.before
        self.journal = None

    @precondition(lambda self: self.journal is None)
    @rule(compacted=st.booleans())
    def restore(self, compacted: bool) -> None:
        fresh = self.make()
        kept = list({change.key: change for change in self.changelog}.values()) if compacted else self.changelog
        for change in kept:
            fresh.receive_change(change)
        self.committed(fresh, kept)
        assert sorted(fresh.dump()) == sorted(self.store.dump())
        self.store.revoked()
        self.store = fresh

    @precondition(lambda self: self.journal is None)
    @rule()
    def take_over(self) -> None:
        self.store, self.standby = self.standby, self.store
