"""``spark-pipelines run``, which also ends with its standard input: without its server it would try for minutes."""

from __future__ import annotations

import os
import runpy
import sys
import threading


def follow_stdin() -> None:
    """End this process at once when its owner is gone."""
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=follow_stdin, daemon=True).start()
    sys.argv = ["spark-pipelines", "run", *sys.argv[1:]]
    runpy.run_module("pyspark.pipelines.cli", run_name="__main__")
