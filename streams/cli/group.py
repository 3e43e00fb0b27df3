"""``kes group``: the members of a group, what each of them has, what is on its way, once or continuously."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Annotated, Any, Final

import typer
from rich.live import Live as LiveDisplay
from rich.text import Text

from streams.errors import BrokerUnavailable, ConfigError, TopicError
from streams.kafka.group.status_board import StatusBoard
from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.questions.group_view import NONE, GroupQuestions, GroupView
from streams.kafka.questions.lags import PartitionLag, standing
from streams.kafka.settings import ClientSettings
from streams.kafka.wire import kafka_python_settings
from streams.looks import cluster
from streams.looks.cluster import (
    Interval,
    JsonLines,
    Servers,
    Timeout,
    admin_of,
    brokers,
    client_settings_of,
    named_source,
)
from streams.looks.console import answers, complain, emit
from streams.looks.group_live import Live, live_status
from streams.looks.group_tables import Lags, Picture, facts, remembered, shown
from streams.settings.config import EventSourceConfig

app = typer.Typer()

LAG_SECONDS: Final = 3.0
"""Time limit for the ends of topics: the members are worth seeing without."""
SETTLE_SECONDS: Final = 3.0
"""Time for a rebalance to end, before the members are shown without what they have."""


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
    security = kafka_python_settings.security_of(client_settings_of(config))
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


LagsOf = Callable[[GroupView, float], tuple[Lags, tuple[str, ...]]]
LiveOf = Callable[[GroupView, float], tuple[Live, tuple[str, ...]]]


class GroupReader:
    """One look after the other: what a rebalance hides is remembered, what cannot be found out is noted."""

    def __init__(self, questions: GroupQuestions, lags: LagsOf, live: LiveOf, group: str, timeout: float) -> None:
        self._questions, self._lags, self._live = questions, lags, live
        self._group, self._timeout = group, timeout
        self._before: GroupView | None = None
        self._known_lags: Lags = {}

    def __call__(self) -> Picture:
        """The group now. Raises ``BrokerUnavailable``, ``ConfigError``."""
        view, stale = remembered(self._questions.look(self._group, self._timeout), self._before)
        if view.settled:
            self._before = view
        patience = min(self._timeout, LAG_SECONDS)
        found, notes = self._lags(view, patience)
        self._known_lags = {**self._known_lags, **found}
        live, more = self._live(view, patience)
        return Picture(view=view, lags=self._known_lags, live=live, stale=stale, notes=(*notes, *more))

    def settled(self, now: Callable[[], float], sleep: Callable[[float], None]) -> Picture:
        """The group now, or in a moment, when a rebalance that is under way is through."""
        until = now() + min(self._timeout, SETTLE_SECONDS)
        while True:
            picture = self()
            if picture.view.settled or now() > until:
                return picture
            sleep(0.1)


@contextmanager
def lags_of(config: EventSourceConfig | None, admin: TopicAdmin) -> Iterator[LagsOf]:
    """Provide a group's lag in its topics. A source on another cluster has its ends there, and its offsets here."""
    if config is None or not config.source_is_elsewhere:
        yield lambda view, seconds: lags_in(admin, view, {}, seconds)
        return
    settings = ClientSettings(config.source_bootstrap_servers, config.source_client_settings, client_id="kes-cli")
    with closing(TopicAdmin(settings)) as elsewhere:
        yield lambda view, seconds: lags_in(elsewhere, view, {config.offsets_topic: config.topic}, seconds)


def lags_in(
    admin: TopicAdmin, view: GroupView, stands_for: Mapping[str, str], seconds: float
) -> tuple[Lags, tuple[str, ...]]:
    """Return the lags in every topic that the group reads or has offsets in, and notes about those not known.

    ``stands_for``: topics whose offsets are committed under another name, by that name; others are left out then.
    """
    lags: dict[str, list[PartitionLag]] = {}
    notes = []
    topics = {topic for member in view.members for topic in member.topics} | view.committed.keys()
    for topic in sorted(topics & stands_for.keys() if stands_for else topics):
        at = stands_for.get(topic, topic)
        try:
            marks = admin.watermarks(at, None, seconds)
        except (BrokerUnavailable, TopicError) as error:
            notes.append(f"lag in {topic}: {error}")
            continue
        lags[topic] = admin.tails.without_markers(at, standing(view.committed.get(topic, {}), marks))
    return lags, tuple(notes)


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
