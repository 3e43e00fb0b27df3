"""Blocking and asynchronous clients of Kafka, each owned by one thread or loop; only these import Kafka libraries.

``wire`` has connections and messages, ``reading`` and ``writing`` have records, ``questions`` has what is read about
a cluster, ``group`` has membership. Each folder imports only those that stand before it.

Nothing is exported here: import the modules.
"""

from __future__ import annotations

__all__: list[str] = []
