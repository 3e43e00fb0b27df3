"""Spark's driver, with its Connect server, as a process of its own: ``spark-pipelines`` runs on it.

Its first line on stdout is the server's port. It ends, with its Java and its workers, when its standard input does: so
it outlives nobody, whatever becomes of its owner.

The catalog is a Hive metastore in a folder, which the next driver finds again: the declarative pipelines of Spark need
one that lasts from run to run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import streams.spark as kes_spark


def kill_session(leader: int) -> None:
    """SIGKILL to all processes of a session, the leader last. Python workers have process groups of their own, and one
    that waits for a broker would outlive Java for a minute."""
    running = subprocess.run(["ps", "-A", "-o", "pid="], capture_output=True, text=True, check=True).stdout
    for pid in (*(int(word) for word in running.split() if int(word) != leader), leader):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) == leader:
                os.kill(pid, signal.SIGKILL)


def main(folder: Path) -> None:
    spark = kes_spark.local_session(
        "pipeline",
        settings={
            "spark.driver.defaultJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",  # starts quickly, four times
            "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": "0",
            "spark.sql.catalogImplementation": "hive",
            "spark.sql.warehouse.dir": (folder / "warehouse").as_uri(),
            "spark.hadoop.javax.jdo.option.ConnectionURL": f"jdbc:derby:;databaseName={folder}/catalog;create=true",
        },
    )
    java: Any = spark.sparkContext._jvm
    service = getattr(java, "org.apache.spark.sql.connect.service.SparkConnectService$")
    print(getattr(service, "MODULE$").localPort(), flush=True)
    while os.read(0, 1):
        pass
    kill_session(os.getsid(0))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
