"""``kes visit``: start a run over the keys of a source's store, cancel it, and show how far it is."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from streams.cli.cluster import Json, Servers, SourceName, Timeout, await_listener, config_at, named_source
from streams.cli.console import emit, frameless
from streams.core.visits import joined_runs
from streams.errors import BrokerUnavailable, ConfigError
from streams.looks.group_live import LiveGroup
from streams.settings.config import EventSourceConfig
from streams.source.event_source import EventSource
from streams.statistics import VisitRunStatistics

app = typer.Typer()


@app.command()
def visit(
    source: SourceName,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the registered visit.")],
    run: Annotated[str, typer.Option("--run", help="Id of the run. The same id starts nothing a second time.")] = "",
    status: Annotated[bool, typer.Option("--status", help="Show the progress of its runs. Starts nothing.")] = False,
    cancel: Annotated[bool, typer.Option("--cancel", help="Cancel the run, or all runs without --run.")] = False,
    bootstrap_servers: Servers = "",
    timeout: Timeout = 30.0,
    json: Json = False,
) -> None:
    """Start a run of a visit: each key of the source's store once, in all partitions. Returns at once.

    The request is durable: members that are down, and partitions that are moving, take it later. With --run the command
    can be repeated safely. --status reads the status that running members publish.

    Exit codes: 0 requested, or shown; 1 no such visit, no topic for requests, no member publishes its status, or no
    broker answers; 2 wrong usage.
    """
    if status and cancel:
        raise typer.BadParameter("choose either --status or --cancel", param_hint="--status")
    found = named_source(source)
    found.config = config_at(bootstrap_servers, found)
    await_listener(found.config.bootstrap_servers, timeout)
    if status:
        count = found.config.num_partitions
        runs = [one for one in _runs(found, name, timeout) if not run or one.run == run]
        emit(msgspec.to_builtins(runs), json, lambda: _table(runs, count) if runs else f"no run of {name} is known")
    elif cancel:
        asyncio.run(_within(timeout, found.cancel_visit(name, run_id=run or None)))
        what = f"run {run}" if run else "all runs"
        emit({"visit": name, "cancelled": run or None}, json, lambda: f"requested: {what} of {name} cancelled")
    else:
        begun = asyncio.run(_within(timeout, found.start_visit(name, run_id=run or None)))
        emit({"visit": name, "run": begun}, json, lambda: f"requested: run {begun} of {name}")


async def _within(seconds: float, request: Any) -> Any:
    try:
        return await asyncio.wait_for(request, seconds)
    except TimeoutError:
        raise BrokerUnavailable(
            f"the request is not acknowledged after {seconds:g} s; some partitions may have it: give --run, and the "
            "command may be repeated"
        ) from None


def _runs(source: EventSource[Any], name: str, timeout: float) -> tuple[VisitRunStatistics, ...]:
    """Read the members' notes. Raises ``ConfigError`` when there is none."""
    config: EventSourceConfig = source.config
    if name not in source._declared.router.visits:
        raise ConfigError(
            f"this source has no visit {name!r}; it has {', '.join(source._declared.router.visits) or 'none'}"
        )
    with LiveGroup(config, "kes-cli") as group:
        view, live, problems = group.read(timeout)
    if not live:
        members = ", ".join(sorted(member.instance for member in view.members))
        why = f"{members}: nothing is published by them (yet)" if members else "none is running"
        raise ConfigError(
            f"no member of the group {config.group_id} publishes its status: {'; '.join(problems) or why}. "
            "Runs continue when members start"
        )
    return joined_runs(run for member in live.values() for run in member.status.visits if run.visit == name)


def _table(runs: list[VisitRunStatistics], partitions: int) -> Table:
    table = frameless("run", "under way in", "waits in", "ended in", "cancelled in", "not known of", "keys")
    for one in runs:
        counts = one.running, one.waiting, one.ended, one.cancelled
        rest = max(partitions - sum(counts), 0)  # two notes may name a partition that has just moved
        table.add_row(Text(one.run), *(str(count) if count else "" for count in (*counts, rest)), f"{one.keys:,}")
    return table
