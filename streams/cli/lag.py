"""``kes lag``: the lag of a group in its topic, once or continuously."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from streams.cli.cluster import admin_of, brokers, named_source, source_admin_of
from streams.cli.console import answers, complain, duration, emit
from streams.clients.admin import PartitionLag, standing
from streams.errors import BrokerUnavailable, TopicError
from streams.topics import unread

app = typer.Typer()

WINDOW_SECONDS: Final = 15.0
"""Rates are those of the last so many seconds: long enough to even out transactions, short enough to see a change."""

Ask = Callable[[], list[PartitionLag]]


class Speed(NamedTuple):
    """Records per second, and the time until the end is reached; ``None``: not known (yet), or never at this speed.

    ``seconds_left`` is 0 when less than a second's work is left: that is what being up to date looks like under load.
    """

    committed: float | None
    arriving: float | None
    seconds_left: float | None


class Pace:
    """Rates out of samples taken one after the other. Time is an argument."""

    def __init__(self, window_seconds: float = WINDOW_SECONDS) -> None:
        self._window = window_seconds
        self._samples: deque[tuple[float, dict[int, PartitionLag]]] = deque()

    def add(self, now: float, partitions: list[PartitionLag]) -> Speed:
        """Take in one sample. Partitions that had no committed offset, or lost it, count from the next sample on."""
        samples = self._samples
        samples.append((now, {entry.partition: entry for entry in partitions}))
        while len(samples) > 2 and now - samples[1][0] >= self._window:
            samples.popleft()
        then, before = samples[0]
        if now <= then:
            return Speed(None, None, None)
        committed = arriving = 0
        for entry in partitions:
            first = before.get(entry.partition)
            if first is None:
                continue
            arriving += entry.end - first.end
            if first.committed is not None and entry.committed is not None:
                committed += entry.committed - first.committed
        closing = committed - arriving
        lag = sum(entry.lag for entry in partitions)
        rate = committed / (now - then)
        left = 0.0 if lag <= rate else lag * (now - then) / closing if closing > 0 else None
        return Speed(rate, arriving / (now - then), left)


@app.command()
def lag(
    source: Annotated[
        str, typer.Argument(metavar="MODULE:SOURCE", help="An EventSource: its group, topic and settings are taken.")
    ] = "",
    group: Annotated[str, typer.Option("--group", "-g", help="The group, if no source is named.")] = "",
    topic: Annotated[str, typer.Option("--topic", "-t", help="The topic, if no source is named.")] = "",
    bootstrap_servers: Annotated[
        str, typer.Option(help="The brokers. Default: those of the source, else KES_BOOTSTRAP_SERVERS.")
    ] = "",
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on until Ctrl-C, with rates and time left.")] = False,
    interval: Annotated[float, typer.Option(min=0.2, max=86_400, help="Seconds between two looks.")] = 2.0,
    timeout: Annotated[float, typer.Option(min=0.1, max=86_400, help="Seconds to wait for the brokers.")] = 10.0,
    json: Annotated[bool, typer.Option("--json", help="A line of JSON (each time) instead of a table.")] = False,
) -> None:
    """Committed offset, end and distance of every partition.

    `lag` is end - committed, as other tools count it: markers of transactions are in it, so a topic that is written
    by transactions may show 1 or more per partition when everything is handled. `stable` is how far committed readers
    can see (the last stable offset).

    Exit codes: 0 shown; 1 no broker answers, no such topic, or the group of --group has no offset in it; 2 wrong usage.
    """
    if bool(source) == bool(group or topic) or bool(group) != bool(topic):
        raise typer.BadParameter("name MODULE:SOURCE, or both --group and --topic", param_hint="MODULE:SOURCE")
    config = named_source(source).config if source else None
    group, topic = (config.group_id, config.topic) if config else (group, topic)
    known = config.num_partitions if config else None
    with (
        admin_of(brokers(bootstrap_servers, config), config, timeout) as admin,
        source_admin_of(config, admin, timeout) as source_admin,
    ):
        offsets_topic = config.offsets_topic if config else topic

        def ask() -> list[PartitionLag]:
            if source_admin is admin:
                return admin.lag(group, topic, timeout)
            committed = admin.committed(group, offsets_topic, timeout)
            return standing(committed, source_admin.watermarks(topic, None, timeout))

        if watch:
            with _shown(group, topic, known, json) as show:
                _watch(ask, show, interval, time.monotonic, time.sleep)
        else:
            partitions = ask()
            if config is None and all(entry.committed is None for entry in partitions):  # a typo, most of the time
                raise TopicError(
                    f"the group {group!r} has no committed offset in topic {topic}: there is no such group, it has not "
                    "committed yet, or its offsets have expired (kes lag --watch waits for it)"
                )
            emit(facts(group, topic, known, partitions), json, lambda: table(group, topic, known, partitions))
            if known is not None and len(partitions) > known:
                complain(unread(topic, known, len(partitions)))


Show = Callable[[list[PartitionLag], Speed, str], None]


def _watch(ask: Ask, show: Show, interval: float, now: Callable[[], float], sleep: Callable[[float], None]) -> None:
    """Look again and again until Ctrl-C. A broker that goes away later is reported and waited for."""
    pace = Pace()
    partitions: list[PartitionLag] = []
    speed = Speed(None, None, None)
    try:
        while True:
            problem = ""
            began = now()
            try:
                partitions = ask()
            except BrokerUnavailable as error:
                if not partitions:
                    raise
                problem = str(error)
            else:
                speed = pace.add(now(), partitions)
            show(partitions, speed, problem)
            sleep(max(interval - (now() - began), 0.05))
    except KeyboardInterrupt:
        return  # how a watch ends


@contextmanager
def _shown(group: str, topic: str, known: int | None, json: bool) -> Iterator[Show]:
    """Show a live table on a terminal; elsewhere, or as JSON, a line each time. ``known``: the number of partitions in
    the settings of the event source, if one is named."""
    console = answers()
    if json or not console.is_terminal or console.is_dumb_terminal:
        yield lambda partitions, speed, problem: _line(group, topic, known, partitions, speed, problem, json)
        return
    with Live(Text(f"asking for group {group} ..."), console=console, auto_refresh=False) as live:

        def show(partitions: list[PartitionLag], speed: Speed, problem: str) -> None:
            parts: list[RenderableType] = [table(group, topic, known, partitions), Text(summary(partitions, speed))]
            if problem:
                parts.append(Text(problem, style="bold red"))
            live.update(Group(*parts), refresh=True)

        yield show


def _line(
    group: str,
    topic: str,
    known: int | None,
    partitions: list[PartitionLag],
    speed: Speed,
    problem: str,
    json: bool,
) -> None:
    if problem:
        complain(problem)
    elif json:
        emit({**facts(group, topic, known, partitions), **_per_second(speed)}, True, Text)
    else:
        sys.stdout.write(f"{time.strftime('%H:%M:%S')} {group} in {topic}: {summary(partitions, speed)}\n")
        sys.stdout.flush()


def facts(group: str, topic: str, known: int | None, partitions: list[PartitionLag]) -> dict[str, Any]:
    """The answer as data; ``committed`` is ``None`` where the group has no offset. ``unread_partitions``: the settings
    do not know them, so no member reads them."""
    return {
        "group": group,
        "topic": topic,
        "lag": sum(entry.lag for entry in partitions),
        "partitions": [msgspec.structs.asdict(entry) for entry in partitions],
        "unread_partitions": [entry.partition for entry in partitions if _is_unread(entry, known)],
    }


def _is_unread(entry: PartitionLag, known: int | None) -> bool:
    return known is not None and entry.partition >= known


def _per_second(speed: Speed) -> dict[str, Any]:
    return {
        "committed_per_second": speed.committed,
        "arriving_per_second": speed.arriving,
        "seconds_left": speed.seconds_left,
    }


def summary(partitions: list[PartitionLag], speed: Speed) -> str:
    """``12,000 behind, 3,000/s committed, 1,000/s arriving, 6 s left``; what is not known is left out."""
    words = [f"{sum(entry.lag for entry in partitions):,} behind"]
    if all(entry.committed is None for entry in partitions):
        return f"{words[0]}, nothing committed yet"
    if speed.committed is not None and speed.arriving is not None:
        words += [f"{speed.committed:,.0f}/s committed", f"{speed.arriving:,.0f}/s arriving"]
        if speed.seconds_left is None:
            words.append("not getting nearer")
        elif speed.seconds_left > 0:
            words.append(f"{duration(speed.seconds_left)} left")
    return ", ".join(words)


def table(group: str, topic: str, known: int | None, partitions: list[PartitionLag]) -> Table:
    """The answer for people: a row per partition, and the sum."""
    title = f"{group} in {topic}"
    grid = Table(title=title, title_justify="left", show_footer=True, min_width=len(title))
    grid.add_column("partition", overflow="fold")
    for name in ("committed", "stable", "end", "lag"):
        grid.add_column(name, justify="right", overflow="fold")
    for entry in partitions:
        committed = "-" if entry.committed is None else f"{entry.committed:,}"
        is_unread = _is_unread(entry, known)
        style = "red" if is_unread else "" if entry.committed is not None else "yellow"
        name = f"{entry.partition} (no member reads it)" if is_unread else str(entry.partition)
        grid.add_row(name, committed, f"{entry.stable:,}", f"{entry.end:,}", f"{entry.lag:,}", style=style)
    grid.columns[0].footer = "all"
    for number, total in enumerate(
        (
            sum(entry.committed or 0 for entry in partitions),
            sum(entry.stable for entry in partitions),
            sum(entry.end for entry in partitions),
            sum(entry.lag for entry in partitions),
        ),
        1,
    ):
        grid.columns[number].footer = f"{total:,}"
    return grid
