"""One worker process of a verification: a user's event source on another broker. Started by ``kes verify`` only.

``python -m streams.testing.verification_worker MODULE:SOURCE SERVERS FOLDER``, its name in ``KES_INSTANCE_ID``; state
on disk is in FOLDER. The worker ends with its parent: standard input is a pipe that carries no data.
"""

from __future__ import annotations

import os
import sys
import threading

import msgspec

from streams.model.loading import load
from streams.source.event_source import EventSource
from streams.testing.state_folder import elsewhere


def moved(source: EventSource[object], servers: str, folder: str) -> EventSource[object]:
    """Copy the source for this broker: one cluster, without the security settings of the one it was made for, and
    without its state on disk."""
    source.config = msgspec.structs.replace(
        source.config,
        bootstrap_servers=servers,
        start_at="",  # all records are handled
        client_settings={},
        source_bootstrap_servers="",
        source_client_settings={},
        replication_factor=1,
        min_insync_replicas=1,
        instance_id=os.environ["KES_INSTANCE_ID"],
        group=msgspec.structs.replace(source.config.group, static_membership=False),
        state=elsewhere(source.config.state, folder),
    )
    return source


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    moved(load(sys.argv[1]), *sys.argv[2:]).run()
