"""Journals: one fenced writer, a log in Kafka, readers and replicas that follow (``docs/guides/journal.md``)."""

from __future__ import annotations

from streams.journal.entries import JournalCheckpoint, JournalEntry, JournalItem, TermBegan
from streams.journal.journal import Journal, JournalTopic
from streams.journal.reader import JournalReader
from streams.journal.sync import SyncJournal, SyncJournalReader, SyncJournalTerm
from streams.journal.term import Appending, JournalTerm, PendingCheckpoint

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
    "SyncJournal",
    "SyncJournalReader",
    "SyncJournalTerm",
    "TermBegan",
]
