"""The account workload by an event source that answers queries and has a monitor; with those who ask.

``python -m benchmarks.served.member JOB``. Options: ``queries`` (a second) and ``viewers``, of another process that
this one starts; ``folder``: of the secret, and for the figures of those who ask.
"""

from __future__ import annotations

import signal
from pathlib import Path

import msgspec

from benchmarks.child import job_of
from benchmarks.engine import source_of
from benchmarks.served.asking import Asking
from benchmarks.systems import running
from benchmarks.workload import Job
from streams.queries import QueryServer
from streams.settings.groups import QueryConfig
from streams.web import Monitor

SECRET, ASKED = "secret", "asked"
"""Files of the folder: the group's secret, which is the monitor's token too; the figures."""
PATIENCE_SECONDS = 30.0


def serve(job: Job) -> None:
    """Work until SIGTERM."""
    queries, viewers = (int(job.options.get(name, "0")) for name in ("queries", "viewers"))
    folder = Path(job.options["folder"])
    source = source_of(msgspec.structs.replace(job, options={}))
    secret = str(folder / SECRET)
    source.config = msgspec.structs.replace(source.config, queries=QueryConfig(secret_file=secret))
    monitor = Monitor(source, address="127.0.0.1:0", token_file=secret)
    with QueryServer(source, "127.0.0.1:0"), monitor:
        if not (queries or viewers):
            source.run()
            return
        asking = Asking(job=job, secret=secret, queries=queries, viewers=viewers, monitor=monitor.address)
        with running("benchmarks.served.asking", asking) as child:
            source.run()
            child.send(signal.SIGTERM)
            (folder / ASKED).write_bytes(child.result(PATIENCE_SECONDS))


if __name__ == "__main__":
    serve(job_of(Job))
