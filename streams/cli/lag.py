"""``kes lag``: the lag of a group in its topic, once or continuously."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import typer
from rich.console import Group, RenderableType
from rich.live import Live as LiveDisplay
from rich.table import Table
from rich.text import Text

from streams.cli import cluster
from streams.cli.cluster import Interval, JsonLines, Servers, Timeout, admin_of, named_source, source_admin_of
from streams.cli.console import answers, complain, emit, frameless
from streams.errors import TopicError
from streams.kafka.questions.admin import standing
from streams.kafka.questions.lags import PartitionLag
from streams.looks.addresses import brokers
from streams.looks.figures import duration
from streams.looks.group_live import Live, LiveGroup, jobs_in, parked_in, waiting_texts
from streams.model.topics import unread

app = typer.Typer()

LIVE_SECONDS: Final = 3.0
"""Time limit for what members report: the lags are worth seeing without."""
WINDOW_SECONDS: Final = 15.0
"""Rates are those of the last so many seconds: long enough to even out transactions, short enough to see a change."""


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


class GroupLag(NamedTuple):
    """The lag of a group at one moment. ``known``: the number of partitions in the settings of the event source, if one
    is named; no member reads others. ``live``: what the members of a source report; ``problem``: why not."""

    group: str
    topic: str
    known: int | None
    partitions: list[PartitionLag]
    speed: Speed | None = None
    live: Live | None = None
    problem: str = ""

    def is_unread(self, entry: PartitionLag) -> bool:
        """Check whether no member reads this partition."""
        return self.known is not None and entry.partition >= self.known

    @property
    def seconds(self) -> float | None:
        """The age of the oldest record that is not handled, in all partitions where it is known."""
        return max((entry.seconds for entry in self.partitions if entry.seconds is not None), default=None)

    def facts(self) -> dict[str, Any]:
        """The answer as data; ``committed`` is ``None`` where the group has no offset."""
        found = {
            "group": self.group,
            "topic": self.topic,
            "lag": sum(entry.lag for entry in self.partitions),
            "seconds": self.seconds,
            "partitions": [msgspec.structs.asdict(entry) for entry in self.partitions],
            "unread_partitions": [entry.partition for entry in self.partitions if self.is_unread(entry)],
            "parked": [msgspec.structs.asdict(each) for each in parked_in(self.live or {})],
            "jobs": [msgspec.structs.asdict(each) for each in jobs_in(self.live or {})],
        }
        if self.speed is not None:
            found["committed_per_second"], found["arriving_per_second"], found["seconds_left"] = self.speed
        return found

    def summary(self) -> str:
        """``12,000 behind, 3,000/s committed, 1,000/s arriving, 6 s left``; what is not known is left out."""
        words = [f"{sum(entry.lag for entry in self.partitions):,} behind"]
        if all(entry.committed is None for entry in self.partitions):
            return f"{words[0]}, nothing committed yet"
        if self.seconds:
            words.append(f"the oldest for {duration(self.seconds)}")
        if self.speed is not None and self.speed.committed is not None and self.speed.arriving is not None:
            words += [f"{self.speed.committed:,.0f}/s committed", f"{self.speed.arriving:,.0f}/s arriving"]
            if self.speed.seconds_left is None:
                words.append("not getting nearer")
            elif self.speed.seconds_left > 0:
                words.append(f"{duration(self.speed.seconds_left)} left")
        return "; ".join(filter(None, (", ".join(words), *self.waiting())))

    def waiting(self) -> list[str]:
        """The parked keys, and parked and old jobs, that members report, which no lag tells of."""
        problem = f"parked keys and jobs: {self.problem}"
        return [problem] if self.problem else waiting_texts(self.live or {}, time.time())

    def answer(self) -> RenderableType:
        """The answer for people."""
        waiting = [Text(text, "yellow") for text in self.waiting()]
        return Group(self.table(), *waiting) if waiting else self.table()

    def table(self) -> Table:
        """A row per partition, and the sum."""
        title = f"{self.group} in {self.topic}"
        grid = frameless(title=title, show_footer=True, min_width=len(title))
        grid.add_column("partition", footer="all", overflow="fold")
        for name in ("committed", "stable", "end", "lag"):
            total = sum(getattr(entry, name) or 0 for entry in self.partitions)
            grid.add_column(name, footer=f"{total:,}", justify="right", overflow="fold")
        ages = [] if self.seconds is None else [duration(self.seconds)]  # else nothing is known, in no row
        for age in ages:
            grid.add_column("age", footer=age, justify="right", overflow="fold")
        for entry in self.partitions:
            committed = "-" if entry.committed is None else f"{entry.committed:,}"
            style = "red" if self.is_unread(entry) else "" if entry.committed is not None else "yellow"
            name = f"{entry.partition} (no member reads it)" if self.is_unread(entry) else str(entry.partition)
            figures = [committed, f"{entry.stable:,}", f"{entry.end:,}", f"{entry.lag:,}"]
            age = "-" if entry.seconds is None else duration(entry.seconds)
            grid.add_row(name, *figures, *(age for _ in ages), style=style)
        return grid


@app.command()
def lag(
    source: Annotated[
        str, typer.Argument(metavar="MODULE:SOURCE", help="An event source, for its group, topic and settings.")
    ] = "",
    group: Annotated[str, typer.Option("--group", "-g", help="Group, if no source is given.")] = "",
    topic: Annotated[str, typer.Option("--topic", "-t", help="Topic, if no source is given.")] = "",
    bootstrap_servers: Servers = "",
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Refresh until Ctrl-C, with rates and time left.")
    ] = False,
    interval: Interval = 2.0,
    timeout: Timeout = 10.0,
    json: JsonLines = False,
) -> None:
    """Show the lag of each partition: committed offset, end of the log, distance, and the age of the oldest record.

    `lag` is end - committed, as other tools count it, but 0 where only transaction markers are left (up to 16 trailing
    offsets are read to find out, if permitted). `stable` is the last stable offset, the limit of read_committed
    consumers. A source with several inputs or a loop has one table per topic.

    Exit codes: 0 shown; 1 no broker answers, no such topic, or the group of --group has no offset in it; 2 wrong usage.
    """
    if bool(source) == bool(group or topic) or bool(group) != bool(topic):
        raise typer.BadParameter("name MODULE:SOURCE, or both --group and --topic", param_hint="MODULE:SOURCE")
    found = named_source(source) if source else None
    config = found.config if found else None
    if config is not None:
        config = msgspec.structs.replace(config, bootstrap_servers=brokers(bootstrap_servers, config))
    group, topic = (config.group_id, config.topic) if config else (group, topic)
    known = config.num_partitions if config else None
    with (
        admin_of(brokers(bootstrap_servers, config), config, timeout) as admin,
        source_admin_of(config, admin, timeout) as source_admin,
        LiveGroup(config, "kes-cli") if config else nullcontext() as live_group,
    ):

        def ask(topic: str = topic) -> GroupLag:
            if source_admin is admin:
                lags = admin.lag(group, topic, timeout)
            else:
                committed = admin.committed(group, config.offsets_topic if config else topic, timeout)
                lags = standing(committed, source_admin.watermarks(topic, None, timeout))
            tails = source_admin.tails
            lags = tails.with_ages(topic, tails.without_markers(topic, lags), time.time() * 1000)
            found = GroupLag(group, topic, known, lags)
            if live_group is None or config is None or topic != config.topic:
                return found
            _, live, problems = live_group.read(min(timeout, LIVE_SECONDS))
            return found._replace(live=live, problem="; ".join(problems))

        inputs = [topic, *(found.inputs if found else ())]
        if watch:
            paces = {name: Pace() for name in inputs}

            def ask_again() -> list[GroupLag]:
                lags = [ask(name) for name in inputs]
                now = time.monotonic()
                return [one._replace(speed=paces[one.topic].add(now, one.partitions)) for one in lags]

            with _shown(group, json) as show:
                cluster.watch(ask_again, show, interval, time.monotonic, time.sleep)
            return
        one = ask()
        if config is None and all(entry.committed is None for entry in one.partitions):  # a typo, most of the time
            raise TopicError(
                f"the group {group!r} has no committed offset in topic {topic}: there is no such group, it has not "
                "committed yet, or its offsets have expired (kes lag --watch waits for it)"
            )
        for shown in [one, *(ask(further) for further in inputs[1:])]:
            emit(shown.facts(), json, shown.answer)
        if known is not None and len(one.partitions) > known:
            complain(unread(topic, known, len(one.partitions)))


@contextmanager
def _shown(group: str, json: bool) -> Iterator[Callable[[list[GroupLag], str], None]]:
    """Show a live table for each input on a terminal; elsewhere, or as JSON, a line each time."""
    console = answers()
    if json or not console.is_terminal or console.is_dumb_terminal:
        yield lambda lags, problem: _lines(lags, problem, json)
        return
    with LiveDisplay(Text(f"asking for group {group} ..."), console=console, auto_refresh=False) as live:

        def show(lags: list[GroupLag], problem: str) -> None:
            parts: list[RenderableType] = []
            for one in lags:
                parts += [one.table(), Text(one.summary())]
            if problem:
                parts.append(Text(problem, style="bold red"))
            live.update(Group(*parts), refresh=True)

        yield show


def _lines(lags: list[GroupLag], problem: str, json: bool) -> None:
    if problem:
        complain(problem)
        return
    for one in lags:
        if json:
            emit(one.facts(), True, Text)
        else:
            sys.stdout.write(f"{time.strftime('%H:%M:%S')} {one.group} in {one.topic}: {one.summary()}\n")
    sys.stdout.flush()
