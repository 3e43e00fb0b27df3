"""``kes journal``: the log of a journal: what is in it, what comes, what may go, and whether it is whole."""

from __future__ import annotations

import io
import sys
import time
from contextlib import closing
from importlib import import_module
from typing import Annotated, Any

import typer
from rich.table import Table as Grid

from streams.cli.cluster import Json, Servers, Timeout, await_listener
from streams.cli.console import as_json, emit, frameless, notices
from streams.cli.source_name import checked_name
from streams.core.journal import LogOrder, kept_from
from streams.errors import ConfigError, JournalError, OffsetError, StreamsError, TopicError
from streams.journal import Replicated
from streams.journal.entries import JournalEntry
from streams.journal.inspection import JournalSurvey, survey
from streams.journal.snapshots import LoadedSnapshot
from streams.kafka.questions.admin import Watermarks
from streams.kafka.questions.trimming import LogTrimmer
from streams.kafka.reading.fetch_session import FOLLOWING
from streams.kafka.reading.fetching import LogFetcher
from streams.kafka.reading.reader import PartitionReader
from streams.kafka.settings import ClientSettings
from streams.looks.addresses import brokers
from streams.looks.figures import duration
from streams.looks.records import one_line, plain_bytes, shown_time
from streams.looks.scans import OffsetProgress
from streams.model.loading import described
from streams.model.topics import missing
from streams.records import IncomingRecord
from streams.sak.harmless import harmless
from streams.settings.sources import joined_client_settings

app = typer.Typer(no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the journal, which is its topic.")]
_POLL_SECONDS = 0.2


class _Log:
    """The topic of a journal, with the clients that read it."""

    def __init__(self, name: str, servers: str, timeout: float) -> None:
        self.name = name
        self.settings = ClientSettings(brokers(servers), joined_client_settings(None), client_id="kes-cli")
        await_listener(self.settings.bootstrap_servers, timeout)
        self.admin, self.reader = LogTrimmer(self.settings), PartitionReader(self.settings)
        found = self.admin.describe([name], timeout)[name]
        if found is None:
            raise TopicError(missing(name))
        if found.partitions != 1:
            raise TopicError(f"topic {name} has {found.partitions} partitions: a journal has one")
        self.topic = found
        self.marks: Watermarks = self.admin.watermarks(name, [0], timeout)[0]

    def survey(self, what: str) -> JournalSurvey:
        progress = OffsetProgress(f"{what} {self.name}", {0: (self.marks.start, self.marks.end)})
        return survey(self.reader, self.name, self.marks, progress.reached)

    def close(self) -> None:
        self.reader.close()
        self.admin.close()


@app.command("status")
def status_command(name: Name, bootstrap_servers: Servers = "", timeout: Timeout = 15.0, json: Json = False) -> None:
    """Show the log, terms and checkpoints of a journal. Reads the whole log.

    Exit code 1: no such journal, or the log is not intact.
    """
    with closing(_Log(name, bootstrap_servers, timeout)) as log:
        found = log.survey("reading")
    keeps = {key: log.topic.configs.get(key, "") for key in ("cleanup.policy", "retention.ms", "min.insync.replicas")}
    data = {
        "journal": name,
        "topic_id": log.topic.topic_id,
        "replication_factor": log.topic.replication_factor,
        **keeps,
        "start": log.marks.start,
        "end": log.marks.end,
        "open": log.marks.end - log.marks.stable,
        "entries": found.entries,
        "terms": [term._asdict() for term in found.terms],
        "checkpoints": [checkpoint._asdict() for checkpoint in found.checkpoints],
    }
    emit(data, json, lambda: _status_table(data, found))


@app.command("follow")
def follow_command(
    name: Name,
    after: Annotated[int | None, typer.Option(min=0, help="Start after this position. Default: the end.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=1, help="Stop after this many records.")] = None,
    bootstrap_servers: Servers = "",
    timeout: Timeout = 15.0,
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON per record.")] = False,
) -> None:
    """Show entries, terms and checkpoints as they are written, until Ctrl-C.

    Exit code 1: the log is out of order.
    """
    with closing(_Log(name, bootstrap_servers, timeout)) as log:
        start = log.marks.end if after is None else after
        if not log.marks.start <= start <= log.marks.end:
            raise OffsetError(f"position {start} is not in {name}[0], which has {log.marks.start} to {log.marks.end}")
        with closing(LogFetcher(log.settings, name, FOLLOWING)) as consumer:
            consumer.add(0, start)
            _show(consumer, LogOrder(is_start=start == 0), limit, json)


def _show(consumer: LogFetcher, order: LogOrder, limit: int | None, json: bool) -> None:
    shown = 0
    try:
        while limit is None or shown < limit:
            news = consumer.poll_batch(_POLL_SECONDS).get(0)
            for failure in consumer.take_failures().values():
                raise failure
            for record in news.records if news is not None else ():
                mark = order.see(record)
                kind, value = record.record_type or "-", plain_bytes(record.value)
                line = {"offset": record.offset, "term": mark.term, "number": mark.number, "type": kind}
                line |= {"at_ms": record.timestamp_ms, "value": value}
                words = [str(record.offset), shown_time(record.timestamp_ms), f"{mark.term}:{mark.number}"]
                text = "  ".join([*words, harmless(kind), one_line(value)])
                sys.stdout.write(as_json(line) if json else text + "\n")
                shown += 1
                if shown == limit:
                    break
            sys.stdout.flush()
    except KeyboardInterrupt:
        return  # how it ends


@app.command("trim")
def trim_command(
    name: Name,
    keep: Annotated[
        int, typer.Option(min=1, help="Number of checkpoints to keep, with everything after the oldest.")
    ] = 3,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Skip the confirmation.")] = False,
    bootstrap_servers: Servers = "",
    timeout: Timeout = 15.0,
    json: Json = False,
) -> None:
    """Delete the entries that the remaining checkpoints do not need.

    From then on, a new member without a snapshot of its own needs one from another member. Exit code 1: no such
    journal, or the log is not intact; nothing is deleted then.
    """
    with closing(_Log(name, bootstrap_servers, timeout)) as log:
        found = log.survey("reading")
        before = kept_from([checkpoint.covers for checkpoint in found.checkpoints], keep)
        start = log.marks.start
        if before > start:
            if not yes:
                typer.confirm(f"Delete the offsets {start} to {before - 1} of {name}?", abort=True)
            start = log.admin.delete_before(name, 0, before)
    count = len(found.checkpoints)
    reason = "" if before > log.marks.start else f"nothing is deleted: {count} checkpoints, {keep} are kept"
    data = {"journal": name, "checkpoints": count, "keep": keep, "was": log.marks.start, "start": start}
    emit(data, json, lambda: reason or f"{name}[0] begins at {start:,} now; it began at {log.marks.start:,}")


@app.command("verify")
def verify_command(
    name: Name,
    service: Annotated[
        str, typer.Option(metavar="MODULE:SERVICE", help="A Replicated: compare its snapshots with its log.")
    ] = "",
    bootstrap_servers: Servers = "",
    timeout: Timeout = 15.0,
    json: Json = False,
) -> None:
    """Read and check the whole log: terms in order, no entry missing or from a past term, checkpoints well formed.

    With --service, also replay the state machine from each snapshot to the next and compare the bytes.

    Exit codes: 0 intact; 1 not intact, or no such journal.
    """
    began = time.monotonic()
    with closing(_Log(name, bootstrap_servers, timeout)) as log:
        found = log.survey("pass 1,")
        compared = _compare(_service_of(service, name), log) if service else []
    data: dict[str, Any] = {
        "journal": name,
        "start": log.marks.start,
        "end": log.marks.end,
        "terms": len(found.terms),
        "entries": found.entries,
        "checkpoints": len(found.checkpoints),
        "snapshots": compared,
        "seconds": round(time.monotonic() - began, 1),
    }
    text = (
        f"{name}[0] is whole: {len(found.terms)} terms, {found.entries:,} entries, {len(found.checkpoints)} checkpoints"
    )
    more = f"; the snapshots of {compared} are what the log makes" if compared else ""
    emit(data, json, lambda: text + more)


def _service_of(text: str, name: str) -> Replicated[Any]:
    module, _, path = checked_name(text).partition(":")
    try:
        found: Any = getattr(import_module(module), path)
        found = found if isinstance(found, Replicated) else found()
    except StreamsError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{text!r} cannot make a service: {described(error)}") from error
    if not isinstance(found, Replicated) or found.journal.name != name:
        raise ConfigError(f"{text!r} is not a Replicated of the journal {name}")
    return found


def _compare(service: Replicated[Any], log: _Log) -> list[int]:
    """Run the machine from the oldest whole snapshot, or from the start of the log, to each later one."""
    snapshots = sorted(service.snapshots.whole(), key=lambda snapshot: snapshot.head.position)
    for snapshot in snapshots:
        _check_position(snapshot, log)
    snapshots = [snapshot for snapshot in snapshots if snapshot.head.position >= log.marks.start]
    if log.marks.start == 0:
        machine, at = service.machine(), 0
    elif snapshots:
        first, *snapshots = snapshots
        machine, at = service.machine.load(io.BytesIO(first.state)), first.head.position
    else:
        notices().print("no snapshot lies within the log: there is nothing to compare", highlight=False)
        return []
    compared = []
    order = LogOrder(is_start=at == 0)
    for snapshot in snapshots:
        end = snapshot.head.position
        progress = OffsetProgress(f"pass 2, up to {end}", {0: (at, end)})

        def receive(
            partition: int, records: list[IncomingRecord], machine: Any = machine, progress: OffsetProgress = progress
        ) -> None:
            for record in records:
                item = service.journal.types.item(record, order.see(record))
                if isinstance(item, JournalEntry):
                    machine.apply(item.event)
            progress.reached(partition, records)

        spans = {0: (at, end)}
        log.reader.read(log.name, spans, receive, stalled_after_seconds=30.0, cancelled=lambda: False)
        made = io.BytesIO()
        machine.save(made)
        if made.getvalue() != snapshot.state:
            raise JournalError(
                f"the snapshot of {end} in {service.snapshots.path} is not what the log makes up to there: "
                f"{len(snapshot.state)} bytes, and {len(made.getvalue())} from the log. Is `apply` deterministic?"
            )
        compared.append(end)
        at = end
    return compared


def _check_position(snapshot: LoadedSnapshot, log: _Log) -> None:
    head = snapshot.head
    if (head.journal, head.topic_id) != (log.name, log.topic.topic_id) or head.position > log.marks.end:
        raise JournalError(
            f"the snapshot of {head.position} is of {head.journal} with the topic id {head.topic_id}, and this is "
            f"{log.name} with {log.topic.topic_id}, which ends at {log.marks.end}"
        )


def _status_table(data: dict[str, Any], found: JournalSurvey) -> Grid:
    now = time.time() * 1000
    grid = frameless("journal", "log", "entries", "terms", "last term", "led by", "began", "checkpoints", "last covers")
    last = found.terms[-1] if found.terms else None
    newest = found.checkpoints[-1] if found.checkpoints else None
    grid.add_row(
        data["journal"],
        f"{data['start']:,} to {data['end']:,}" + (", open" if data["open"] else ""),
        f"{found.entries:,}",
        f"{len(found.terms):,}",
        "-" if last is None else str(last.term),
        "-" if last is None else harmless(last.address or last.writer),
        "-" if last is None else f"{duration(max(now - last.began_ms, 0) / 1000)} ago",
        str(len(found.checkpoints)),
        "-" if newest is None else f"{newest.covers:,}",
    )
    return grid
