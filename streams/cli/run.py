"""``kes run module:source``: an event source in worker processes that are kept alive."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import msgspec
import typer
from rich.text import Text

from streams.cli.console import as_json, notices
from streams.cli.failures import NO_ROOM, discard
from streams.cli.http_options import BehindProxy, Certificate, CertificateKey, Names, TokenFile
from streams.cli.logging_setup import LogFormat, LogLevel, LogOptions, checked_file, configure_logging, verbose_options
from streams.cli.outside_options import unknown_variables
from streams.cli.source_name import check_defined, checked_name
from streams.cli.supervisor import CodeChanges, Status, Supervisor, worker_command, worker_names
from streams.cli.worker import GC_THRESHOLD, WorkerOptions
from streams.errors import ConfigError
from streams.sak.harmless import harmless
from streams.sak.restarts import RestartPolicy
from streams.settings.config import host_name

if TYPE_CHECKING:
    from streams.cli.worker_metrics import WorkerMetrics

_log = logging.getLogger("streams.cli.run")

app = typer.Typer()

_STYLES = {
    "started": "green",
    "exited": "yellow",
    "removed": "yellow",
    "gave up": "bold red",
    "killed": "bold red",
    "not reloading": "bold red",
}
_LEVELS = {
    "restarting": logging.WARNING,
    "killed": logging.WARNING,
    "gave up": logging.ERROR,
    "watching": logging.WARNING,
    "not reloading": logging.WARNING,
    "waiting": logging.WARNING,
}


@app.command()
def run(
    context: typer.Context,
    source: Annotated[
        str, typer.Argument(metavar="MODULE:SOURCE", help="An EventSource, or a function that returns one.")
    ],
    workers: Annotated[
        int, typer.Option("--workers", "-n", min=1, help="Number of processes; each is a group member.")
    ] = 1,
    instance_prefix: Annotated[
        str, typer.Option(help="Name worker n PREFIX-n. Unique per supervisor. Default: host name.")
    ] = "",
    drain_seconds: Annotated[
        float, typer.Option(min=0.0, max=86_400, help="Seconds to wait for workers to stop.")
    ] = 60.0,
    max_crashes: Annotated[
        int, typer.Option(min=0, help="Restarts of one worker within the window before giving up.")
    ] = 5,
    window_seconds: Annotated[float, typer.Option(min=1.0, max=86_400, help="Length of the window in seconds.")] = 60.0,
    gc_threshold: Annotated[
        int,
        typer.Option(min=0, max=2**31 - 1, help="Allocations between garbage collections. 0: Python's default."),
    ] = GC_THRESHOLD,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Log warnings and errors only.")] = False,
    log_level: Annotated[
        LogLevel | None, typer.Option(case_sensitive=False, help="Level of all loggers, yours included. Default: info.")
    ] = None,
    log_format: Annotated[LogFormat, typer.Option(help="Format of the log on standard error.")] = LogFormat.TEXT,
    log_config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Python logging configuration of the workers (.json, .toml, .ini)."),
    ] = None,
    metrics: Annotated[
        str, typer.Option(metavar="ADDRESS", help="HOST:PORT or PORT to serve /metrics (Prometheus), /live and /ready.")
    ] = "",
    http: Annotated[
        str, typer.Option("--http", metavar="ADDRESS", help="HOST:PORT or PORT to serve the monitor.")
    ] = "",
    http_tokens: TokenFile = "",
    http_certificate: Certificate = "",
    http_key: CertificateKey = "",
    http_name: Names = None,
    http_behind_tls_proxy: BehindProxy = False,
    queries: Annotated[
        str, typer.Option(metavar="ADDRESS", help="HOST:PORT or PORT to answer queries of other processes.")
    ] = "",
    reload: Annotated[
        bool, typer.Option("--reload", help="Restart when Python files change (for development).")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print starts, exits and restarts as lines of JSON.")] = False,
) -> None:
    """Run an event source in supervised worker processes.

    SIGINT, SIGTERM and SIGHUP drain: work in progress is committed, then the workers leave the group. A second signal
    kills them.

    Exit codes: 0 drained or finished; 1 a problem to solve first (the message names it); 2 wrong usage; 70 a worker
    failed, or exited on its own (sys.exit), too often; 128 + signal (130, 143): killed before the drain was complete.
    """
    checked_name(source)
    if log_config is not None and (log_level is not None or log_format is not LogFormat.TEXT):
        raise typer.BadParameter("the file sets level and format: leave out --log-level and --log-format")
    verbosity = context.parent.params["verbose"] if context.parent else 0
    level = log_level or verbose_options(max(0 if quiet else 1, verbosity)).level
    logs = LogOptions(level, log_format, "" if log_config is None else checked_file(log_config))
    configure_logging(msgspec.structs.replace(logs, config=""))
    for text in unknown_variables(context.find_root().command):
        _log.warning("%s", text)
    if reload and getattr(context.get_parameter_source("reload"), "name", "") != "COMMANDLINE":
        raise ConfigError(
            "--reload is for development and belongs on the command line: take it out of kes.toml and KES_RUN_RELOAD"
        )
    report = _status_json if json else _log_status if log_format is LogFormat.JSON else StatusLines(quiet)
    prefix = instance_prefix or host_name()
    if not reload:  # under which the name may come with the next change
        check_defined(source)
    pages = None
    if http:
        pages = _pages(source, http, http_tokens, http_certificate, http_key, http_name, http_behind_tls_proxy)
    board = served(metrics, worker_names(prefix, workers), pages, report)
    with board as noted, _watched(reload, report) as code:

        def status(status: Status) -> None:
            noted(status)
            if status["event"] != "serving":
                report(status)

        supervisor = Supervisor(
            worker_command(WorkerOptions(source, logs, gc_threshold, bool(metrics), bool(http), queries)),
            workers=workers,
            instance_prefix=prefix,
            policy=RestartPolicy(max_crashes=max_crashes, window_seconds=window_seconds),
            drain_seconds=drain_seconds,
            status=status,
            code=code,
        )
        exit_code = supervisor.run()
    raise typer.Exit(exit_code)


@contextmanager
def _watched(reload: bool, report: Callable[[Status], None]) -> Iterator[CodeChanges | None]:
    """Watch the code below the current folder, if it is to be reloaded."""
    if not reload:
        yield None
        return
    from streams.cli.reloading import WatchedCode

    code = WatchedCode(Path.cwd())
    with code.watching():
        report({"event": "watching", "folder": str(code.folder)})
        yield code


Pages = Callable[["WorkerMetrics", Callable[[Status], None]], AbstractContextManager[None]]
"""Serves the pages of ``--http`` in a block, with what is known of the workers; reports its address."""


def _pages(source: str, *options: Any) -> Pages:
    """Prepare the pages of ``--http``. Raises ``ConfigError``."""
    try:
        from streams.cli.http_options import web_options
        from streams.cli.web import pages_of_workers

        checked = web_options(*options)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "streams":
            raise
        raise ConfigError(f"--http needs {error.name}: pip install 'kafka-event-source[web]'") from error
    return lambda board, report: pages_of_workers(source, checked, board, report)


@contextmanager
def served(
    address: str, names: list[str], pages: Pages | None = None, report: Callable[[Status], None] = lambda _: None
) -> Iterator[Callable[[Status], None]]:
    """Serve the metrics of all workers, if there is an address, and the pages, if there are any; yield what is to be
    called with each status."""
    if not address and pages is None:
        yield lambda status: None
        return
    try:
        from streams.cli.worker_metrics import WorkerMetrics
    except ModuleNotFoundError as error:
        if error.name != "prometheus_client":
            raise
        raise ConfigError("--metrics needs prometheus_client: pip install 'kafka-event-source[prometheus]'") from error
    board = WorkerMetrics(names)
    with ExitStack() as stack:
        if address:
            stack.enter_context(board.serve(address))
        if pages is not None:
            stack.enter_context(pages(board, report))
        yield board.noted


def _status_json(status: Status) -> None:
    _write(sys.stdout, as_json(status))


def _log_status(status: Status) -> None:
    name, level = status.get("worker", ""), _LEVELS.get(status["event"], logging.INFO)
    if status["event"] == "exited" and (status["code"] != 0 or status["reason"] != "drained"):
        level = logging.WARNING
    _log.log(level, sentence(status), extra={"worker": name, "status": status})


class StatusLines:
    """Writes the events of the workers to stderr, a line each."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._console = notices()

    def __call__(self, status: Status) -> None:
        event = status["event"]
        is_ordinary = not status.get("code") and status.get("reason", "drained") == "drained"
        if self._quiet and is_ordinary and event in ("started", "joining", "exited", "removed", "stopping"):
            return
        name = status.get("worker", "all workers")
        words = harmless(sentence(status)), _STYLES.get(event, "")
        with self._console.capture() as line:
            self._console.print(Text.assemble(harmless(f"{name}: "), words), soft_wrap=True)
        _write(sys.stderr, line.get())


def sentence(status: Status) -> str:
    """Format a status line of ``--json`` as a sentence."""
    match status["event"]:
        case "started":
            again = f", start {status['starts']}" if status["starts"] > 1 else ""
            return f"started (process {status['pid']}{again})"
        case "joining":
            return f"the group knows it as {status['member_id']}"
        case "exited":
            return f"ended: {status['reason']} (process {status['pid']})"
        case "restarting":
            return f"restarting in {status['in_seconds']:g} s"
        case "removed":
            return f"removed from the group by {status['by']} after {status['after_seconds']:.2f} s"
        case "gave up":
            within = f"{status['crashes']} crashes within {status['within_seconds']:g} s"
            return f"gave up: {within}, and --max-crashes is {status['max_crashes']}"
        case "stopping":
            return f"stopping; they have {status['drain_seconds']:g} s to drain"
        case "killed":
            return f"killed, because {status['reason']} (process {status['pid']})"
        case "monitor":
            return f"the monitor is at {status['address']}"
        case "watching":
            return (
                f"--reload, for development: they start again when a Python file below {status['folder']} has changed"
            )
        case "reloading":
            return f"reloading: {', '.join(status['files'])} changed"
        case "not reloading":
            return f"not reloading, what runs goes on: {status['problem']}"
        case "waiting":
            return "none is left: waiting for a change of the code, or Ctrl-C"
        case event:
            raise AssertionError(f"a status without words: {event}")


def _write(stream: TextIO, text: str) -> None:
    """Write nothing once the reader is gone: ``| tee log`` ends by the same Ctrl-C, and the workers have to drain. A
    line for which the disk has no room is left out: workers go on."""
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        discard(stream)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
