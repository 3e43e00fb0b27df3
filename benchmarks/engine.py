"""The same work by ``EventSource``, with everything on: types, typed table with changelog, metrics, group membership.

Options: ``pool.NAME`` and ``config.NAME`` set that field of the settings, ``client.NAME`` a setting of librdkafka,
``switch`` the interpreter's switch interval in seconds, ``trace`` a file for when which events had come how far
(``benchmarks.tracing``). For ``kes run`` the job is in the environment.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable

import msgspec

from benchmarks import tracing
from benchmarks.child import job_of
from benchmarks.workload import Account, Balance, Deposited, Job, kinds
from streams import EventContext, EventSource, EventSourceConfig, PoolConfig, Table

JOB_VARIABLE = "KES_BENCH_JOB"

measured: Counter[str] = Counter()


def _options(options: dict[str, str], prefix: str) -> dict[str, object]:
    found = {name.removeprefix(prefix): text for name, text in options.items() if name.startswith(prefix)}
    return {name: float(text) if "." in text else int(text) for name, text in found.items()}


def without_handlers(job: Job) -> EventSource[Table[str, Account]]:
    """The event source of the account workload, but for what it does."""
    config = EventSourceConfig(
        group_id=job.group,
        topic=job.source,
        num_partitions=job.shape.partitions,
        changelog_topic=job.changelog,
        bootstrap_servers=job.bootstrap_servers,
        pool=msgspec.convert(_options(job.options, "pool."), PoolConfig),
        client_settings={
            name.removeprefix("client."): text for name, text in job.options.items() if name.startswith("client.")
        },
        metrics_handler=lambda measurement: measured.update([type(measurement).__name__]),
    )
    config = msgspec.structs.replace(config, **_options(job.options, "config."))
    return EventSource(config, store=Table.factory(key=str, value=Account))


def source_of(job: Job) -> EventSource[Table[str, Account]]:
    """The event source of the account workload."""
    source, output = without_handlers(job), job.output

    def deposited(ctx: EventContext[Table[str, Account]], event: Deposited) -> None:
        key = event.account
        account = ctx.store.get(key) or Account()
        account.count += 1
        account.cents += event.cents
        ctx.store.put(key, account)
        ctx.forward(output, Balance(key, account.count, account.cents, event.sent), key=key)

    for kind in kinds(job.shape.types):
        source.register_event_type(kind)(deposited)
    return source


def source() -> EventSource[Table[str, Account]]:
    """For ``kes run``."""
    return source_of(msgspec.json.decode(os.environ[JOB_VARIABLE], type=Job))


def main(made: Callable[[Job], EventSource[Table[str, Account]]] = source_of) -> None:
    """The process's way in."""
    job = job_of(Job)
    if "switch" in job.options:
        sys.setswitchinterval(float(job.options["switch"]))
    path = job.options.get(tracing.OPTION)
    if path is None:
        made(job).run()
        return
    trace = tracing.Trace()
    with tracing.engine_traced(trace):
        made(job).run()
    trace.write(path)


if __name__ == "__main__":
    main()
