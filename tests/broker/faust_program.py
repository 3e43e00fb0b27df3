"""The account workload in Faust, at least once: what ``test_adoption`` takes over. Runs in an environment of its own,
so it imports nothing of this project.

python faust_program.py JOB
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import faust  # pyright: ignore[reportMissingImports]

job = json.loads(sys.argv[1])
app = faust.App(
    job["group"],
    broker=f"kafka://{job['bootstrap_servers']}",
    store="memory://",
    datadir=os.environ["BENCH_SCRATCH"],
    topic_partitions=job["partitions"],
    broker_session_timeout=float(job["options"]["session_ms"]) / 1000,
    broker_heartbeat_interval=1.0,
    broker_commit_interval=0.2,
    web_enabled=False,
)
source = app.topic(job["source"], key_type=bytes, value_type=bytes, value_serializer="raw", key_serializer="raw")
output = app.topic(job["output"], key_type=bytes, value_type=bytes, value_serializer="raw", key_serializer="raw")
accounts = app.Table("accounts", default=int)


@app.agent(source)
async def handle(stream: Any) -> None:
    """Count, sum, answer."""
    async for event in stream.events():
        found = json.loads(event.value)
        accounts[found["account"]] += found["cents"]
        balance = {"account": found["account"], "count": 1, "cents": found["cents"], "sent": found["sent"]}
        await output.send(key=event.key, value=json.dumps(balance).encode(), headers={"__grt__": b"Balance"})


if __name__ == "__main__":
    sys.argv = [sys.argv[0], "worker", "--loglevel", "warn", "--without-web"]
    app.main()
