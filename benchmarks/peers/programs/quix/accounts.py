"""The account workload in quixstreams, exactly once.

The first argument is the job as JSON; its options are listed in ``benchmarks/peers/quix.py``. Runs in an environment of
its own, so it imports nothing of this project. Ends in an orderly way on SIGTERM, and at once when its standard input
ends.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

from quixstreams import Application  # pyright: ignore[reportMissingImports]

HEADERS = [("__grt__", b"Balance")]
QUICK = {"fetch.queue.backoff.ms": "5", "fetch.wait.max.ms": "20"}
"""As in the loop written by hand: a consumer that does not wait when there is something."""
TIMEOUTS = {"session_ms": "consumer.session.timeout.ms", "transaction_ms": "producer.transaction.timeout.ms"}


def handle(event: dict[str, Any], key: str, timestamp: int, headers: Any, state: Any) -> dict[str, Any]:
    """Count, sum, answer."""
    for name, kind in headers:
        if name == "__grt__":
            if kind != b"Deposited":
                raise RuntimeError(f"an event of type {kind!r}")
            break
    account = state.get("account") or {"count": 0, "cents": 0}
    account["count"] += 1
    account["cents"] += event["cents"]
    state.set("account", account)
    return {"account": event["account"], **account, "sent": event["sent"]}


def handle_after_wait(event: dict[str, Any], key: str, timestamp: int, headers: Any, state: Any) -> dict[str, Any]:
    """Wait as ``benchmarks.workload.wait_seconds`` has it; callbacks are plain functions, so by ``time.sleep``."""
    time.sleep(0.5 if event["cents"] % 100 == 0 else 0.005)
    return handle(event, key, timestamp, headers, state)


def of_client(options: dict[str, str], prefix: str) -> dict[str, str]:
    """The settings that are given for one of the clients."""
    options = {TIMEOUTS.get(name, name): text for name, text in options.items()}
    return {name.removeprefix(prefix): text for name, text in options.items() if name.startswith(prefix)}


def main() -> None:
    """Run the process."""
    job = json.loads(sys.argv[1])
    options: dict[str, str] = job["options"]
    work = handle_after_wait if options.get("waits") else handle
    application = Application(
        broker_address=job["bootstrap_servers"],
        consumer_group=job["group"],
        processing_guarantee="exactly-once",
        commit_interval=float(options.get("commit_ms", "100")) / 1000,
        auto_offset_reset="earliest",
        state_dir=os.environ["BENCH_SCRATCH"],
        consumer_extra_config={**QUICK, **of_client(options, "consumer.")},
        producer_extra_config=of_client(options, "producer."),
        loglevel="WARNING",
    )
    source = application.topic(job["source"], key_deserializer="str", value_deserializer="json")
    output = application.topic(job["output"], key_serializer="str", value_serializer="json")
    events = application.dataframe(source)
    handled = events.apply(work, stateful=True, metadata=True)
    handled.set_headers(lambda value, key, timestamp, headers: HEADERS).to_topic(output)
    application.run()


def end_with_parent() -> None:
    """As ``benchmarks.child``, which cannot be imported here."""
    while os.read(0, 1):
        pass
    os._exit(3)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    main()
