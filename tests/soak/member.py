"""A member of the group under attack: the bank's program, with standbys, on a cluster that keeps three copies.

python member.py BOOTSTRAP GROUP INSTANCE        (environment: BANK_SESSION_SECONDS)
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

from streams import EventSource, Table
from streams.testing.faults import FaultPlan
from tests.broker import bank

PARTITIONS = 8


def build(bootstrap: str, group: str, instance: str) -> EventSource[Table[str, bank.Account]]:
    """The bank's source with one standby per partition and three copies of its topics."""
    copies = {"num_standbys": 1, "replication_factor": 3, "min_insync_replicas": 2}
    return bank.build(bootstrap, group, instance, FaultPlan(), num_partitions=PARTITIONS, **copies)


async def main(bootstrap: str, group: str, instance: str) -> None:
    source = build(bootstrap, group, instance)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: source._ask_to_stop(drain=True))
    await source.consume_events()


if __name__ == "__main__":
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s %(message)s")
    asyncio.run(main(*sys.argv[1:4]))
