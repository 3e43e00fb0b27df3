"""Settings of a relay."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from streams.errors import ConfigError
from streams.outbox.schema import DEFAULT_TABLE, checked_table
from streams.runtime.ownership.tenure import SESSION_SECONDS
from streams.settings.sources import bootstrap_servers, joined_client_settings

DATABASE_VARIABLE = "KES_OUTBOX_DATABASE"


@dataclass(frozen=True, kw_only=True)
class RelayConfig:
    """Settings of a relay. Raises ``ConfigError``.

    ``name`` of the outbox in Kafka: positions topic ``<name>.outbox``, transactional ids ``<name>.outbox.<shard>``.
    ``database``: address for psycopg, not through a pooler in transaction mode, or ``sqlite:FILE`` (else
    ``KES_OUTBOX_DATABASE``).
    ``bootstrap_servers`` (else ``KES_BOOTSTRAP_SERVERS``) and ``client_settings`` are as those of
    ``EventSourceConfig``. ``table``: of the outbox. A transaction has at most ``batch_rows``, and about
    ``batch_bytes``. A refused row is tried again after ``backoff_seconds``, doubled up to ``max_backoff_seconds``. A
    relay that is killed or cut off is replaced after ``session_seconds`` (brokers allow 6 and more, by default).
    """

    name: str
    database: str = field(default="", repr=False)
    bootstrap_servers: str = ""
    client_settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    table: str = DEFAULT_TABLE
    batch_rows: int = 2_000
    batch_bytes: int = 4_000_000
    backoff_seconds: float = 10.0
    max_backoff_seconds: float = 3_600.0
    session_seconds: float = SESSION_SECONDS

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,200}", self.name):
            raise ConfigError(f"the name of a relay is {self.name!r}; use letters, digits, '.', '_', '-', at most 200")
        checked_table(self.table)
        for name, longest in (("batch_rows", 100_000), ("batch_bytes", 100_000_000)):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= longest:
                raise ConfigError(f"{name} is {value!r}; it must be a whole number from 1 to {longest:,}")
        if not 0.1 <= self.backoff_seconds <= self.max_backoff_seconds <= 86_400:
            raise ConfigError("backoff_seconds must be 0.1 or more, and max_backoff_seconds as much, at most a day")
        if not 1.0 <= self.session_seconds <= 1_800:
            raise ConfigError(f"session_seconds is {self.session_seconds!r}; it must be from 1 to 1800")
        if not self.database:
            object.__setattr__(self, "database", os.environ.get(DATABASE_VARIABLE, ""))
        if not self.database:
            raise ConfigError(f"no database is named: set database or the variable {DATABASE_VARIABLE}")
        object.__setattr__(self, "client_settings", joined_client_settings(self.client_settings))
        object.__setattr__(self, "bootstrap_servers", bootstrap_servers(self.bootstrap_servers))
