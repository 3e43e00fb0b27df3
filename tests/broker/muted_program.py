"""A muted source as a process: python muted_program.py BOOTSTRAP PREFIX PARTITIONS."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from streams import EventSource
from tests.broker.engine_kit import Lab


def second(lab: Lab, **settings: Any) -> EventSource[Any]:
    """The source of the lab again, in a group of its own."""
    return lab.telling(group_id=f"{lab.group}-v2", **{"shadow_of": lab.group, **settings})


if __name__ == "__main__":
    bootstrap, prefix, partitions = sys.argv[1:]
    asyncio.run(second(Lab(bootstrap, prefix, int(partitions)), instance_id="killed").consume_events())
