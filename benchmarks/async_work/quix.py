"""The waiting workload in quixstreams: its callbacks are plain functions, so the wait is a ``time.sleep`` in one.

Runs in an environment of its own (``quix_environment``), so it imports nothing of this project. Options, both of
them quixstreams' own: ``processing_guarantee`` (its default: at-least-once), ``commit_interval`` in seconds (its
default: 5).
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

from quixstreams import Application  # pyright: ignore[reportMissingImports]


def handle(event: dict[str, Any], state: Any) -> dict[str, Any]:
    """Wait for the world, count, answer."""
    time.sleep(event["milliseconds"] / 1000)
    count = state.get("count", 0) + 1
    state.set("count", count)
    return {"key": event["key"], "number": event["number"], "count": count, "sent": event["sent"]}


def main() -> None:
    """The process's way in."""
    job = json.loads(sys.argv[1])
    options: dict[str, Any] = dict(job["options"])
    if "commit_interval" in options:
        options["commit_interval"] = float(options["commit_interval"])
    application = Application(
        broker_address=job["bootstrap_servers"],
        consumer_group=job["group"],
        auto_offset_reset="earliest",
        state_dir=job["folder"],
        loglevel="WARNING",
        **options,
    )
    source = application.topic(job["source"], key_deserializer="str", value_deserializer="json")
    output = application.topic(job["output"], key_serializer="str", value_serializer="json")
    application.dataframe(source).apply(handle, stateful=True).to_topic(output)
    application.run()


def end_with_parent() -> None:
    """As ``benchmarks.child``, which cannot be imported there."""
    while os.read(0, 1):
        pass
    os._exit(3)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    main()
