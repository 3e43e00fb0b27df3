"""A source whose events choose topic and size of their output: ``python -m benchmarks.members.refusing JOB``."""

from __future__ import annotations

import msgspec

from benchmarks.child import job_of
from benchmarks.workload import Job
from streams import DEAD_LETTER, EventContext, EventSource, EventSourceConfig, Table, event_type


@event_type("Chosen")
class Chosen(msgspec.Struct, frozen=True):
    """The input and the output: ``text`` goes to ``output``."""

    output: str
    number: int
    text: str = ""


def source_of(job: Job) -> EventSource[Table[str, int]]:
    """Build it. An event whose output the broker refuses becomes a dead letter."""
    config = EventSourceConfig(
        group_id=job.group,
        topic=job.source,
        num_partitions=job.partitions,
        changelog_topic=job.changelog,
        bootstrap_servers=job.bootstrap_servers,
        error_policy=DEAD_LETTER,
    )
    source = EventSource(config, store=Table.factory(key=str, value=int))

    @source.register_event_type(Chosen)
    def chosen(ctx: EventContext[Table[str, int]], event: Chosen) -> None:
        ctx.store.put("last", event.number)
        ctx.forward(event.output, event, key="last")

    return source


if __name__ == "__main__":
    source_of(job_of(Job)).run()
