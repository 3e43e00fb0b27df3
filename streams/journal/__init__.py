"""Journals: one fenced writer, a log in Kafka, readers and replicas that follow (``docs/guides/journal.md``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streams.sak.lazy_names import LazyNames

if TYPE_CHECKING:
    from streams.journal.appending import Appending, PendingCheckpoint
    from streams.journal.entries import JournalCheckpoint, JournalEntry, JournalItem, TermBegan
    from streams.journal.held_state import StateMachine
    from streams.journal.journal import Journal, JournalTopic
    from streams.journal.reader import JournalReader
    from streams.journal.replicated import Replicated
    from streams.journal.snapshots import SnapshotFolder
    from streams.journal.sync import SyncJournal, SyncJournalReader, SyncJournalTerm
    from streams.journal.term import JournalTerm

__all__ = [
    "Appending",
    "Journal",
    "JournalCheckpoint",
    "JournalEntry",
    "JournalItem",
    "JournalReader",
    "JournalTerm",
    "JournalTopic",
    "PendingCheckpoint",
    "Replicated",
    "SnapshotFolder",
    "StateMachine",
    "SyncJournal",
    "SyncJournalReader",
    "SyncJournalTerm",
    "TermBegan",
]

if not TYPE_CHECKING:
    __getattr__ = LazyNames(
        __name__,
        {
            "appending": "Appending PendingCheckpoint",
            "entries": "JournalCheckpoint JournalEntry JournalItem TermBegan",
            "held_state": "StateMachine",
            "journal": "Journal JournalTopic",
            "reader": "JournalReader",
            "replicated": "Replicated",
            "snapshots": "SnapshotFolder",
            "sync": "SyncJournal SyncJournalReader SyncJournalTerm",
            "term": "JournalTerm",
        },
    )
