"""Journals: one fenced writer, a log in Kafka, readers and replicas that follow (``docs/guides/journal.md``)."""

from __future__ import annotations

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
