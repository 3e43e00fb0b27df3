"""What programs of one source that tests start and kill have in common: their settings, and how they begin."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

from streams import EventSource, EventSourceConfig


def config_of(
    bootstrap: str, group: str, instance: str, topic: str, partitions: int, *, session: float = 6.0, **more: Any
) -> EventSourceConfig:
    """Settings with a standby, and a session (seconds) that ends soon."""
    return EventSourceConfig(
        group_id=group,
        topic=topic,
        num_partitions=partitions,
        bootstrap_servers=bootstrap,
        instance_id=instance,
        num_standbys=1,
        session_timeout_seconds=session,
        transaction_timeout_seconds=session - 1.0,
        **more,
    )


def main(build: Callable[[str, str, str], EventSource[Any]]) -> None:
    """Run the source for the brokers, the group and the instance that the command line names."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(module)s %(message)s")
    build(*sys.argv[1:4]).run()
