"""``kes jobs``: the durable jobs of an event source, and an operator's acts on them.

An act names the start that the operator has seen: a name that was set again meanwhile is another job.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

import typer
from rich.text import Text

from streams.cli.cluster import Json, Servers, SourceName, Timeout, named_source
from streams.cli.console import emit
from streams.cli.operating import Act, Entries, PartitionOption, Rows, Selection, about, found_of, operate
from streams.cli.state_files import rows_table
from streams.cli.state_sources import jobs_of
from streams.cli.state_writing import Changes, Yes, stopped_source
from streams.core.jobs import PREFIX, JobAction, SeenJob
from streams.core.parking import NEVER_MS
from streams.errors import StreamsError
from streams.looks.records import one_line, plain, plain_bytes, plain_text, shortened, shown_time
from streams.runtime.changelog import encode_timer, timer_key
from streams.runtime.queries.jobs import JobRequest, ShownJob
from streams.sak.harmless import harmless
from streams.settings.config import EventSourceConfig
from streams.source.event_source import EventSource

if TYPE_CHECKING:
    from streams.queries.operating import JobClient  # of the extra for queries

app = typer.Typer(help="Manage durable jobs: list, show, retry, cancel.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="[NAME]", help="The job's name; after `--` if it begins with a hyphen.")]
Id = Annotated[str, typer.Option("--id", help="The job's id, as its receivers know it, instead of NAME.")]
Kind = Annotated[str, typer.Option("--jobs", help="Only jobs of this AsyncJobScheduler.")]
OnlyParked = Annotated[bool, typer.Option("--parked", help="Only jobs that wait for an operator.")]
All = Annotated[bool, typer.Option("--all", help="All jobs, or those of --jobs and --parked.")]


class ChosenJobs(Selection[ShownJob]):
    """Durable jobs: those of a request, or the one that it names."""

    command: ClassVar[str] = "kes jobs"
    noun: ClassVar[str] = "job"
    absent: ClassVar[str] = "there is no such job (any more), or it is cancelled: see kes jobs list"

    def __init__(
        self,
        source: EventSource[Any],
        action: JobAction | str = "list",
        *,
        partition: int | None = None,
        **only: Any,
    ) -> None:
        self._request = JobRequest(group="", partition=0, **only)
        super().__init__(source, action, is_one=bool(self._request.name or self._request.id), partition=partition)
        self.only = only

    def client(self, config: EventSourceConfig) -> JobClient:
        from streams.queries.operating import JobClient

        return JobClient(config)

    def chosen(self, number: int, entries: Entries) -> list[ShownJob]:
        known = self.source._declared.router.jobs or {}
        return [
            ShownJob.of(record, is_known=known.get(record.state.jobs) is not None, with_item=self.is_one)
            for record in self._request.listed(jobs_of(number, entries))
            if self.action == "list" or not record.state.cancelled
        ]

    def changes(
        self, config: EventSourceConfig, number: int, entries: Entries, chosen: list[ShownJob], limit: int
    ) -> Act:
        jobs, now_ms, changes = jobs_of(number, entries), int(time.time() * 1000), Changes()
        for job in chosen:
            seen, action = SeenJob(PREFIX + job.name, job.number, job.since_ms), self.action
            record = jobs.acted(seen, action, now_ms)  # type: ignore[arg-type]
            assert record is not None  # it was read just now
            changes[timer_key(record.name)] = encode_timer(record)
        return Act(changes)

    @property
    def question(self) -> str:
        return {"retry": "are tried at once, with all of their attempts", "cancel": "end without a result"}[self.action]

    def row(self, number: int, entry: ShownJob) -> dict[str, Any]:
        due = entry.due_ms < NEVER_MS and not entry.is_running
        return {
            "partition": number,
            "name": entry.name,
            "jobs": entry.jobs,
            "id": entry.id,
            "state": entry.state,
            "since_ms": entry.since_ms,
            "attempts": entry.attempts,
            "next_attempt_ms": entry.due_ms if due else None,
            "key": plain_text(entry.key),
            "key_bytes": entry.key_bytes,
            "order": plain_text(entry.order),
            "item_bytes": entry.item_bytes,
            "error": entry.error,
        }

    def table(self, rows: Rows) -> Any:
        shown = [
            row
            | {
                "name": shortened(one_line(row["name"]), 64),
                "since": shown_time(row["since_ms"]),
                "next attempt": "-" if row["next_attempt_ms"] is None else shown_time(row["next_attempt_ms"]),
                "error": shortened(harmless(row["error"]), 60),
            }
            for row in rows
        ]
        names = ("partition", "name", "jobs", "id", "state", "since", "attempts", "next attempt", "error")
        return rows_table(shown, *names)


class AboutJob(NamedTuple):
    """The options of a command about one job, or several."""

    source: str
    name: str
    id: str
    partition: int | None
    servers: str
    timeout: float
    json: bool

    @property
    def one(self) -> dict[str, str]:
        """Return which job is meant. Raises ``BadParameter``."""
        if bool(self.name) is bool(self.id):
            raise typer.BadParameter("name the job by its NAME or by its --id")
        try:
            return {"name": os.fsencode(self.name).decode(), "id": os.fsencode(self.id).decode()}
        except UnicodeError as error:
            raise typer.BadParameter("names and ids of jobs are text in UTF-8", param_hint="NAME") from error


def _asked(
    source: SourceName,
    name: Name = "",
    id_: Id = "",
    partition: PartitionOption = None,
    bootstrap_servers: Servers = "",
    timeout: Timeout = 30.0,
    json: Json = False,
) -> AboutJob:
    return AboutJob(source, name, id_, partition, bootstrap_servers, timeout, json)


@app.command("list")
def list_(
    source: SourceName,
    partition: PartitionOption = None,
    jobs: Kind = "",
    parked: OnlyParked = False,
    bootstrap_servers: Servers = "",
    timeout: Timeout = 30.0,
    json: Json = False,
) -> None:
    """List durable jobs that are not over, in the order of their starts: state, attempts, the next one, the last error.

    A job is `waiting`, `running`, `parked` (it has failed for good and waits for an operator), `unknown` (the source
    does not define its kind of jobs), or `cancelled` (its end has not had its turn). Read from the members that own
    them, or from the changelog if no member answers; the changelog does not know what runs.

    Exit codes: 0 there is none; 1 there are some, or no broker answers; 2 wrong usage.
    """
    chosen = ChosenJobs(named_source(source), partition=partition, jobs=jobs, only_parked=parked)
    rows = chosen.rows(found_of(chosen, bootstrap_servers, timeout))
    emit({"jobs": rows}, json, lambda: chosen.table(rows))
    raise typer.Exit(bool(rows))


@app.command()
@about(_asked)
def show(asked: AboutJob) -> None:
    """Show a durable job, its item decoded as the source would, and how far it is if it runs and says so.

    Read as for `kes jobs list`.

    Exit codes: 0 shown; 1 there is no such job, partitions have several of this name, or no broker answers; 2 wrong
    usage.
    """
    chosen = ChosenJobs(named_source(asked.source), partition=asked.partition, **asked.one)
    [(number, job)] = found_of(chosen, asked.servers, asked.timeout)
    facts = chosen.row(number, job) | {"progress": job.progress, **_item(chosen.source, job)}
    lines = [f"{name}: {one_line(value)}" for name, value in facts.items() if value not in ("", None)]
    emit(facts, asked.json, lambda: Text("\n".join(lines)))


@app.command()
@about(_asked)
def retry(asked: AboutJob, all_: All = False, jobs: Kind = "", parked: OnlyParked = False, yes: Yes = False) -> None:
    """Have a durable job tried at once: by the member that owns it, or by the next start.

    It has all of its attempts again, and its time counts anew. A job that runs goes on. Running members need
    QueryConfig.operate and `kes run --queries`; without them all members must be stopped.

    Exit codes: 0 done; 1 refused (there is no such job, it is cancelled, or another one by now, or running members take
    no acts), not confirmed, or no broker or owner answers; 2 wrong usage.
    """
    _act("retry", asked, all_=all_, jobs=jobs, parked=parked, yes=yes)


@app.command()
@about(_asked)
def cancel(asked: AboutJob, all_: All = False, jobs: Kind = "", parked: OnlyParked = False, yes: Yes = False) -> None:
    """Cancel a durable job: a run of it ends, and its `on_failure` is called with JobCancelled, by the member that owns
    it or by the next start.

    Without an `on_failure`, and where the source does not define this kind of jobs any more, it just goes. What its
    calls have done outside stays done.

    Members may be running, and exit codes are, as for `kes jobs retry`.
    """
    _act("cancel", asked, all_=all_, jobs=jobs, parked=parked, yes=yes)


def _act(action: JobAction, asked: AboutJob, *, all_: bool, jobs: str, parked: bool, yes: bool) -> None:
    if (jobs or parked) and not all_:
        raise typer.BadParameter("--jobs and --parked choose some of --all")
    if all_ and (asked.name or asked.id):
        raise typer.BadParameter("choose NAME, --id, or --all")
    source = stopped_source(asked.source, json=asked.json, yes=yes)
    only: dict[str, Any] = {"jobs": jobs, "only_parked": parked} if all_ else asked.one
    chosen = ChosenJobs(source, action, partition=asked.partition, **only)
    operate(chosen, asked.servers, asked.timeout, json=asked.json, yes=yes)


def _item(source: EventSource[Any], job: ShownJob) -> dict[str, Any]:
    """Return the item of a job as its function would have it."""
    definition = (source._declared.router.jobs or {}).get(job.jobs)
    if job.item is None or definition is None:
        return {"item": plain_bytes(job.item), "problem": "" if definition else "the source does not define these jobs"}
    try:
        return {"item": plain(definition.codecs[0].decode(job.item)), "problem": ""}
    except StreamsError as error:
        return {"item": plain_bytes(job.item), "problem": str(error)}
