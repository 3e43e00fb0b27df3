"""The outbox: rows of PostgreSQL or SQLite in Kafka exactly once, in the order of their keys
(``docs/guides/outbox.md``).

``stash`` writes a row in the user's SQL transaction, ``schema`` has the tables, ``postgres`` is the relay's session of
the database, ``shard`` moves the rows of one shard, ``relay`` runs a thread for each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from streams.sak.lazy_names import LazyNames

if TYPE_CHECKING:
    from streams.outbox.config import RelayConfig
    from streams.outbox.relay import Relay
    from streams.outbox.stash import AsyncOutbox, Outbox

__all__ = ["AsyncOutbox", "Outbox", "Relay", "RelayConfig"]

if not TYPE_CHECKING:
    __getattr__ = LazyNames(__name__, {"config": "RelayConfig", "relay": "Relay", "stash": "AsyncOutbox Outbox"})
