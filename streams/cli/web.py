"""``kes web``: the monitor of an event source, or of any group, by itself. Its options are those of ``kes run`` too."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from streams.cli.cluster import Servers, named_source
from streams.cli.console import complain, notices
from streams.cli.http_options import BehindProxy, Certificate, CertificateKey, Names, TokenFile, web_options
from streams.errors import StreamsError
from streams.source.event_source import EventSource
from streams.web.monitor import Monitor, WebOptions, monitor_of
from streams.web.workers import WorkerAddress, WorkerMembers

if TYPE_CHECKING:
    from streams.cli.worker_metrics import WorkerMetrics

Report = Callable[[dict[str, Any]], None]
"""Takes a status line of ``kes run``."""

app = typer.Typer()


@app.command()
def web(
    target: Annotated[
        str, typer.Argument(metavar="MODULE:SOURCE", help="An event source, for its group, settings and topology.")
    ] = "",
    group: Annotated[str, typer.Option("--group", "-g", help="Group, if no source is given.")] = "",
    http: Annotated[
        str, typer.Option("--http", metavar="ADDRESS", help="HOST:PORT or PORT to serve.")
    ] = "127.0.0.1:8780",
    http_tokens: TokenFile = "",
    http_certificate: Certificate = "",
    http_key: CertificateKey = "",
    http_name: Names = None,
    http_behind_tls_proxy: BehindProxy = False,
    bootstrap_servers: Servers = "",
) -> None:
    """Show an event source, or any group, in the browser, until Ctrl-C. Does not run the source.

    Exit codes: 0 ended by Ctrl-C; 1 the address is taken, or a file cannot be used; 2 wrong usage.
    """
    if bool(target) == bool(group):
        raise typer.BadParameter("name either MODULE:SOURCE or --group GROUP", param_hint="MODULE:SOURCE")
    options = web_options(http, http_tokens, http_certificate, http_key, http_name, http_behind_tls_proxy)
    source = named_source(target) if target else None
    monitor = Monitor(group=group, bootstrap_servers=bootstrap_servers) if source is None else monitor_of(source)
    if bootstrap_servers:
        monitor.ask(bootstrap_servers)
    monitor.serve_for(options, None, None)
    try:
        with monitor:
            if monitor.link == monitor.address:
                notices().print(Text(f"monitor: {monitor.address}"), soft_wrap=True)
            _show_token(monitor)
            threading.Event().wait()
    except KeyboardInterrupt:
        return  # how it ends


@contextmanager
def pages_of_workers(name: str, options: WebOptions, board: WorkerMetrics, report: Report) -> Iterator[None]:
    """Serve the pages of ``kes run`` while the block runs: with the facts of its workers, and what the source itself
    says (topology, dead letters, settings), if it can be loaded here."""

    def addresses() -> dict[str, WorkerAddress]:
        return {worker: WorkerAddress(*address) for worker, address in board.addresses().items()}

    source: EventSource[Any] | None = None
    try:
        source = named_source(name)
    except StreamsError as error:
        complain(f"the monitor shows the workers only: {error}")
    monitor = Monitor(group=name) if source is None else monitor_of(source)
    monitor.serve_for(options, WorkerMembers(addresses), board)
    with monitor:
        report({"event": "monitor", "address": monitor.address})
        _show_token(monitor)
        yield


def _show_token(monitor: Monitor) -> None:
    """Show the link with the token that was made, once: standard error is a terminal then."""
    if monitor.link != monitor.address:
        notices().print(Text(f"monitor: {monitor.link}"), soft_wrap=True)
