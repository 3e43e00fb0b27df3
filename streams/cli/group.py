"""``kes group``: the members of a group, what each of them has, what is on its way, once or continuously."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Annotated, Any

import typer
from rich.live import Live as LiveDisplay
from rich.text import Text

from streams.cli import cluster
from streams.cli.cluster import Interval, JsonLines, Servers, Timeout, admin_of, named_source
from streams.cli.console import answers, complain, emit
from streams.cli.group_tables import shown
from streams.errors import ConfigError
from streams.kafka.group.status_board import StatusBoard
from streams.kafka.questions.group_view import NONE, GroupQuestions, GroupView
from streams.kafka.wire.security import Security
from streams.looks.addresses import brokers, client_settings_of
from streams.looks.group_live import Live, live_status
from streams.looks.group_picture import Picture, facts
from streams.looks.group_reader import GroupReader, lags_of

app = typer.Typer()


@app.command("group")
def show_group(
    target: Annotated[
        str, typer.Argument(metavar="MODULE:SOURCE", help="An event source, for its group and settings.")
    ] = "",
    group: Annotated[str, typer.Option("--group", "-g", help="Group, if no source is given.")] = "",
    bootstrap_servers: Servers = "",
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh until Ctrl-C.")] = False,
    interval: Interval = 1.0,
    timeout: Timeout = 10.0,
    json: JsonLines = False,
) -> None:
    """Show the members of a group: partitions, standbys, moves in progress and lag.

    Works for groups of any consumer. Standbys and moves are shown for event sources only.

    Exit codes: 0 shown; 1 no broker answers, or no such group; 2 wrong usage.
    """
    if bool(target) == bool(group):
        raise typer.BadParameter("name either MODULE:SOURCE or --group GROUP", param_hint="MODULE:SOURCE")
    config = named_source(target).config if ":" in target else None
    servers = brokers(bootstrap_servers, config)
    group_id = config.group_id if config else group or target
    security = Security.of(client_settings_of(config))
    with (
        closing(GroupQuestions(servers, security)) as questions,
        admin_of(servers, config, timeout) as admin,
        lags_of(config, admin) as lags,
        closing(StatusBoard(servers, "kes-cli", security, group_id)) as board,
    ):

        def live(view: GroupView, seconds: float) -> tuple[Live, tuple[str, ...]]:
            return live_status(board, view, seconds, time.time(), config.offsets_topic if config else "")

        look = GroupReader(questions, lags, live, group_id, timeout)
        if watch:
            with _shown(json) as show:
                cluster.watch(look, show, interval, time.monotonic, time.sleep)
        else:
            picture = look.settled(time.monotonic, time.sleep)
            if picture.view.kind == NONE and not picture.view.committed:
                raise ConfigError(
                    f"there is no group {picture.view.group!r} at {servers}: no member has joined it or committed in it"
                    " (kes group --watch waits for it)"
                )
            emit(facts(picture), json, lambda: shown(picture, time.time()))


@contextmanager
def _shown(json: bool) -> Iterator[Callable[[Picture, str], None]]:
    """Live tables on a terminal; elsewhere a block for each change, or as JSON a line each time."""
    console = answers()
    if json:
        yield lambda picture, problem: complain(problem) if problem else emit(facts(picture), True, Text)
    elif not console.is_terminal or console.is_dumb_terminal:
        yield Blocks()
    else:
        with LiveDisplay(Text("asking for the group ..."), console=console, auto_refresh=False) as display:

            def show(picture: Picture, problem: str) -> None:
                if problem:
                    display.console.print(Text(problem, style="bold red"))
                display.update(shown(picture, time.time()), refresh=True)

            yield show


class Blocks:
    """Without a terminal: the tables, with the time, whenever something else than a number has changed."""

    def __init__(self) -> None:
        self._last: Any = None

    def __call__(self, picture: Picture, problem: str) -> None:
        """Show it, if it differs from the last one."""
        if problem:
            if problem != self._last:
                complain(problem)
            self._last = problem
            return
        key = _shape(picture)
        if key != self._last:
            answers().print(shown(picture, time.time(), time.strftime("%H:%M:%S ")))
            self._last = key


def _shape(picture: Picture) -> dict[str, Any]:
    """Return the facts whose change starts a new block: all but offsets and counts."""
    found = facts(picture)
    found["lag"] = None
    for row in found["partitions"]:
        row.update(committed=None, end=None, lag=None)
        for kind in ("restoring", "standbys", "preparing"):
            row[kind] = [(copy["member"], copy["state"]) for copy in row[kind]]
    for member in found["members"]:
        member.update(live=None, folders=None)
    return found
